"""Metrics of one process for Prometheus: their catalog, and their exposition on an HTTP port.

Names follow Prometheus' conventions: prefix ``psdist_``, base units, ``_total`` for counters. No label has an unbounded
set of values: no tensors, steps or addresses.

``METRICS`` lists them. Nothing is counted for scrapers alone, except the lag of the loop and histograms.

The port answers in threads beside the event loop, and only reads. Requests carry a token of the run as ``Authorization:
Bearer TOKEN``, whose role may read metrics. Beyond this machine they are encrypted, with the process's certificate.
Without a token only this machine can reach the port, and the request must name it by an address, so that a page in a
browser cannot reach it by a name of its own.

Invariant: A peer holds one of ``limits.SCRAPES_MAX`` threads for a bounded time, and nothing of the training waits for
it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import ssl
import sys
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import accumulate
from socketserver import ThreadingMixIn
from typing import Any, Final, Literal, TypeVar

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from psdist import addresses
from psdist.errors import InsecureBindError, PermissionDeniedError, UnauthenticatedError
from psdist.off_loop import on_loop
from psdist.security import roles
from psdist.security.tokens import Audience, Verifier
from psdist.settings.config import MetricsEndpoint
from psdist.version import __version__
from psdist.wire import limits

Role = Literal["scheduler", "server", "worker"]
Kind = Literal["gauge", "counter", "histogram"]

ALL: Final[tuple[Role, ...]] = ("scheduler", "server", "worker")
_SCHEDULER: Final[tuple[Role, ...]] = ("scheduler",)
_SERVER: Final[tuple[Role, ...]] = ("server",)
_WORKER: Final[tuple[Role, ...]] = ("worker",)

#: Upper bounds in seconds: steps of small models take a fraction of a millisecond.
SECONDS_BOUNDS: Final = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
#: Upper bounds in versions.
VERSIONS_BOUNDS: Final = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)


@dataclass(frozen=True, slots=True)
class Metric:
    """Declaration of a metric.

    roles: processes that show it.
    bounds: upper bounds of a histogram's buckets, without infinity.
    """

    name: str
    kind: Kind
    roles: tuple[Role, ...]
    help: str
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()


METRICS: Final = (
    # --- every process ---
    Metric("psdist_process_info", "gauge", ALL, "Always 1; the labels identify the process.",
           ("run_id", "role", "member_id", "version")),
    Metric("psdist_event_loop_lag_seconds", "histogram", ALL,
           "Delay of a timer on the event loop, measured ten times a second.", (), SECONDS_BOUNDS),
    Metric("psdist_waits", "gauge", ALL, "Waits in this process that have lasted for more than 10 s."),
    # --- scheduler ---
    Metric("psdist_epoch", "gauge", _SCHEDULER, "Epoch of the published cluster map."),
    Metric("psdist_members", "gauge", _SCHEDULER, "Members by role and state: live, left or lost.", ("role", "state")),
    Metric("psdist_members_wanted", "gauge", _SCHEDULER, "Members that the run waits for or was scaled to.", ("role",)),
    Metric("psdist_heartbeat_age_seconds", "gauge", _SCHEDULER, "Time since the last heartbeat of a live member.",
           ("role", "id")),
    Metric("psdist_shards", "gauge", _SCHEDULER,
           "Shards by state: full (it has all copies that the run wants), short (some are missing or being filled) or "
           "lost.", ("parameters", "state")),
    Metric("psdist_events_total", "counter", _SCHEDULER,
           "Events of the run's history since this scheduler started, by kind (psdist events).", ("kind",)),
    Metric("psdist_rollbacks_total", "counter", _SCHEDULER, "Rollbacks to a snapshot since this scheduler started."),
    Metric("psdist_snapshots", "gauge", _SCHEDULER, "Committed snapshots in the storage."),
    Metric("psdist_snapshot_age_seconds", "gauge", _SCHEDULER,
           "Time since the newest snapshot was committed; absent without one."),
    Metric("psdist_snapshot_bytes", "gauge", _SCHEDULER, "Size of the newest snapshot."),
    Metric("psdist_snapshot_duration_seconds", "gauge", _SCHEDULER, "Time that the newest snapshot took."),
    Metric("psdist_snapshot_failures_total", "counter", _SCHEDULER,
           "Abandoned snapshots since this scheduler started."),
    # --- server ---
    Metric("psdist_version_min", "gauge", _SERVER, "Lowest version of a slice in the primary shards of this server.",
           ("parameters",)),
    Metric("psdist_version_max", "gauge", _SERVER, "Highest version of such a slice.", ("parameters",)),
    Metric("psdist_primary_shards", "gauge", _SERVER, "Primary shards of this server.", ("parameters",)),
    Metric("psdist_backup_shards", "gauge", _SERVER, "Shards that this server backs up or is being filled with.",
           ("parameters",)),
    Metric("psdist_slices_applied_total", "counter", _SERVER, "Updates of slices.", ("parameters",)),
    Metric("psdist_apply_seconds_total", "counter", _SERVER, "Time of kernel threads in updates.", ("parameters",)),
    Metric("psdist_slices_waiting", "gauge", _SERVER,
           "Slices with a contribution that is not applied yet: those of other workers are missing, or it waits for a "
           "thread.", ("parameters",)),
    Metric("psdist_waiting_bytes", "gauge", _SERVER, "Memory of contributions that are not applied yet.",
           ("parameters",)),
    Metric("psdist_worker_slices_total", "counter", _SERVER,
           "Slices pushed by a worker (push), and asked for by calls that only pull (pull).",
           ("parameters", "worker", "direction")),
    Metric("psdist_worker_bytes_total", "counter", _SERVER,
           "Payloads received from a worker (push) or sent to it (pull), as encoded.",
           ("parameters", "worker", "direction")),
    Metric("psdist_worker_slices_unused_total", "counter", _SERVER,
           "Slices of a worker that did not count: late, duplicates, non_finite or rejected.",
           ("parameters", "worker", "reason")),
    Metric("psdist_replicas", "gauge", _SERVER, "Copies of this primary's shards: in sync, filling or unreachable.",
           ("parameters", "state")),
    Metric("psdist_replication_lag_updates", "gauge", _SERVER,
           "Updates that a backup has not acknowledged, over this primary's shards.", ("parameters", "replica")),
    Metric("psdist_replication_lag_bytes", "gauge", _SERVER, "Bytes of these updates.", ("parameters", "replica")),
    Metric("psdist_device_bytes", "gauge", _SERVER, "Memory in use on the device; 0 without one."),
    # --- worker ---
    Metric("psdist_incarnation", "gauge", _WORKER,
           "Registrations of this worker; above 1 it has rejoined or restarted."),
    Metric("psdist_step_seconds", "histogram", _WORKER,
           "Time between two answered pushes, by phase: compute, push, wait and pull add up to it.",
           ("phase",), SECONDS_BOUNDS),
    Metric("psdist_steps_total", "counter", _WORKER, "Answered pushes.", ("parameters",)),
    Metric("psdist_staleness_versions", "histogram", _WORKER,
           "Staleness of each push: the largest over its slices, in versions; 0 in BSP.", (), VERSIONS_BOUNDS),
    Metric("psdist_bytes_total", "counter", _WORKER,
           "Payloads sent (push) and received (pull), as encoded. A change of transport counts from the next scrape.",
           ("parameters", "transport", "codec", "direction")),
    Metric("psdist_pushes_dropped_total", "counter", _WORKER,
           "Pushes that were dropped because this worker was expelled, or the run rolled back.", ("parameters",)),
    Metric("psdist_pushes_abstained_total", "counter", _WORKER,
           "Pushes without (a part of) their gradient: weight 0, or not finite.", ("parameters",)),
    Metric("psdist_slices_ignored_total", "counter", _WORKER, "Pushed slices that the servers did not use.",
           ("parameters",)),
    Metric("psdist_slices_resent_total", "counter", _WORKER, "Slices sent again after a break.", ("parameters",)),
    Metric("psdist_reported", "gauge", _WORKER,
           "Mean of the last interval of a number that the script reports: context.report(loss=...).", ("metric",)),
)  # fmt: skip

BY_NAME: Final = {metric.name: metric for metric in METRICS}


logger = logging.getLogger("psdist.metrics")

T = TypeVar("T")
#: Returns the content type and the body of a page. Called in a thread of the port; raises TimeoutError if the process
#: does not answer.
Page = Callable[[], tuple[str, bytes]]

_TICK_SECONDS: Final = 0.1
_TEXT: Final = "text/plain; version=0.0.4; charset=utf-8"


class Exporter:
    """Metrics of one process. Made and closed on its event loop.

    identity: returns the run, and the id of this member.
    read: adds the process's own readings. Runs on the loop.
    targets: returns the run's metrics ports in the form of Prometheus' ``http_sd_configs``, for the page ``/targets``;
        None without that page. Runs on the loop.

    Raises ConfigurationError and InsecureBindError, as ``MetricsServer``.
    """

    def __init__(
        self,
        endpoint: MetricsEndpoint,
        role: Role,
        identity: Callable[[], tuple[str, str]],
        read: Callable[[Readings], None],
        targets: Callable[[], list[dict[str, Any]]] | None = None,
    ) -> None:
        self._role: Role = role
        self._identity = identity
        self._read = read
        self._loop = asyncio.get_running_loop()
        self._lag = Histogram(SECONDS_BOUNDS)
        pages: dict[str, Page] = {"/metrics": lambda: (_TEXT, self._on_loop(self.readings).exposition())}
        if targets is not None:
            pages["/targets"] = lambda: ("application/json", json.dumps(self._on_loop(targets)).encode())
        verifier = Verifier(endpoint.credentials.token, Audience(role), endpoint.key)
        context = endpoint.credentials.web_context(endpoint.host, f"--metrics-host {endpoint.host} serves metrics")
        self._server = MetricsServer(endpoint.host, endpoint.port, verifier, pages, context)
        self._server.start()
        self._due = self._loop.time() + _TICK_SECONDS
        self._timer = self._loop.call_at(self._due, self._tick)

    @property
    def address(self) -> str:
        """``host:port`` of the metrics."""
        return self._server.address

    def readings(self) -> Readings:
        """Return all readings of this process. Runs on the loop."""
        readings = Readings()
        run_id, member_id = self._identity()
        readings.add("psdist_process_info", 1, run_id=run_id, role=self._role, member_id=member_id, version=__version__)
        readings.add_histogram("psdist_event_loop_lag_seconds", self._lag)
        self._read(readings)
        return readings

    def close(self) -> None:
        """Stop serving."""
        self._timer.cancel()
        self._server.close()

    def _tick(self) -> None:
        now = self._loop.time()
        self._lag.observe(max(0.0, now - self._due))
        self._due = now + _TICK_SECONDS
        self._timer = self._loop.call_at(self._due, self._tick)

    def _on_loop(self, function: Callable[[], T]) -> T:
        """Return the result of a function that runs on the loop. Raises TimeoutError if the loop does not answer."""
        answer = on_loop(self._loop, function)
        try:
            return answer.result(limits.SCRAPE_SECONDS)
        except TimeoutError:
            answer.cancel()
            raise


def target(address: str, run_id: str, role: Role, member_id: str, *, has_tls: bool) -> dict[str, Any]:
    """Return one entry of ``http_sd_configs``. Its labels do not collide with those of the catalog."""
    labels = {"run": run_id, "member": member_id, "member_role": role}
    if has_tls and not addresses.is_loopback(addresses.parse_address(address)[0]):
        labels["__scheme__"] = "https"
    return {"targets": [address], "labels": labels}


# --- readings of one scrape, and their exposition in Prometheus' text format ------------------------------------------

_FAMILIES: Final = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily, "histogram": HistogramMetricFamily}


class Histogram:
    """Counts of observed values by bucket. Observing costs a fraction of a microsecond, and only one thread does it.

    bounds: upper bounds of the buckets, without infinity.
    """

    __slots__ = ("_bounds", "_counts", "_total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    @property
    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative counts by upper bound, as text."""
        names = [*map(str, self._bounds), "+Inf"]
        return list(zip(names, map(float, accumulate(self._counts)), strict=True))

    @property
    def total(self) -> float:
        """Sum of all values."""
        return self._total


class Readings(Collector):
    """Values of one process's metrics at one moment. Only metrics of the catalog, with its labels, are accepted."""

    def __init__(self) -> None:
        self._families: dict[str, Family] = {}

    def add(self, name: str, value: float, **labels: str) -> None:
        """Add the value of a gauge or counter."""
        metric = BY_NAME[name]
        self._family(metric).add_metric(_values(metric, labels), value)

    def add_histogram(self, name: str, histogram: Histogram, **labels: str) -> None:
        """Add a histogram."""
        metric = BY_NAME[name]
        self._family(metric).add_metric(_values(metric, labels), buckets=histogram.buckets, sum_value=histogram.total)

    def _family(self, metric: Metric) -> Any:
        if metric.name not in self._families:
            self._families[metric.name] = _FAMILIES[metric.kind](metric.name, metric.help, labels=metric.labels)
        return self._families[metric.name]

    def collect(self) -> Iterator[Family]:
        """Yield the families, for prometheus_client."""
        yield from self._families.values()

    def exposition(self) -> bytes:
        """Return all readings and those of the process (memory, processor time, open files) as text."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        ProcessCollector(registry=registry)
        return generate_latest(registry)


def _values(metric: Metric, labels: dict[str, str]) -> list[str]:
    if labels.keys() != set(metric.labels):
        raise ValueError(f"{metric.name} has the labels {metric.labels}, not {tuple(labels)}")
    return [labels[name] for name in metric.labels]


# --- the HTTP port ----------------------------------------------------------------------------------------------------


class MetricsServer(ThreadingMixIn, HTTPServer):
    """The port. ``start`` serves until ``close``.

    pages: by path.
    verifier: checks the tokens of requests.
    context: returns the TLS context for a connection; None for plaintext.

    Raises ConfigurationError if the port cannot be bound, InsecureBindError for a ``host`` beyond this machine without
    a token.
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = limits.SCRAPES_MAX

    def __init__(
        self,
        host: str,
        port: int,
        verifier: Verifier,
        pages: Mapping[str, Page],
        context: Callable[[], ssl.SSLContext] | None = None,
    ) -> None:
        if not addresses.is_loopback(host) and verifier.is_open:
            raise InsecureBindError(
                f"--metrics-host {host} would show the run's metrics to everybody who can reach it: set PSDIST_TOKEN, "
                "or leave the metrics on this machine"
            )
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.pages = pages
        self.verifier = verifier
        self._context = context
        self._slots = threading.BoundedSemaphore(limits.SCRAPES_MAX)
        #: Open connections, and the times when they are broken.
        self._deadlines: dict[Any, float] = {}
        self._has_failed = False
        try:
            super().__init__((host.strip("[]"), port), _Handler)
        except OSError as error:
            raise addresses.unbound("metrics", "--metrics", host, port, error) from None
        self._host = host

    @property
    def address(self) -> str:
        """``host:port`` at which others reach the port."""
        host = addresses.own_address() if addresses.is_wildcard(self._host) else self._host
        return addresses.format_address(host, self.server_address[1])

    def start(self) -> None:
        """Serve in a thread of its own."""
        threading.Thread(target=self.serve_forever, name="metrics", daemon=True, args=(0.1,)).start()

    def close(self) -> None:
        """Stop serving, without waiting for anything. Another server can have the port immediately."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        threading.Thread(target=self._close, name="metrics-close", daemon=True).start()

    def _close(self) -> None:
        self.shutdown()
        self.server_close()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start a thread for the connection, or close it if there are too many."""
        if not self._slots.acquire(blocking=False):
            self.shutdown_request(request)
            return
        self._deadlines[request] = time.monotonic() + 2 * _Handler.timeout
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            del self._deadlines[request]
            self._slots.release()

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Answer a request, by TLS if the port has it. The handshake has the limits of the request."""
        if self._context is None:
            super().finish_request(request, client_address)
            return
        request.settimeout(_Handler.timeout)
        with self._context().wrap_socket(request, server_side=True, do_handshake_on_connect=False) as secured:
            self._deadlines[secured] = self._deadlines[request]
            try:
                secured.do_handshake()
                super().finish_request(secured, client_address)
            finally:
                del self._deadlines[secured]

    def service_actions(self) -> None:
        """Break connections that are open for too long: a socket's timeout begins again with each byte."""
        now = time.monotonic()
        for request, deadline in self._deadlines.copy().items():
            if now > deadline:
                with suppress(OSError):
                    request.shutdown(socket.SHUT_RDWR)

    def server_bind(self) -> None:
        """Bind without the base class's look-up of this host's name, which may take seconds."""
        super(HTTPServer, self).server_bind()
        self.server_name, self.server_port = "", self.server_address[1]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a connection that broke or took too long. Any other error is a defect, which is logged once: scrapers
        repeat their requests."""
        if not isinstance(sys.exception(), OSError) and not self._has_failed:
            self._has_failed = True
            logger.exception("a request for metrics failed (logged once)")


class _Handler(BaseHTTPRequestHandler):
    server: MetricsServer
    server_version = "psdist"
    sys_version = ""
    #: Limit in seconds for each read, and for writing the whole answer.
    timeout = limits.SCRAPE_SECONDS

    def do_GET(self) -> None:
        page = self.server.pages.get(self.path.partition("?")[0])
        if not self._is_allowed():
            return
        if page is None:
            known = ", ".join(self.server.pages)
            self.send_error(HTTPStatus.NOT_FOUND, f"the pages are {known}")
            return
        try:
            kind, body = page()
        except TimeoutError:
            self.send_error(HTTPStatus.SERVICE_UNAVAILABLE, "the event loop of this process does not answer")
            return
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _is_allowed(self) -> bool:
        """Return True if the request may be answered; otherwise refuse it."""
        verifier = self.server.verifier
        try:
            scheme, _, shown = self.headers.get("Authorization", "").partition(" ")
            roles.check(verifier.role(shown if scheme == "Bearer" else ""), roles.METRICS_PAGES)
        except UnauthenticatedError:
            self.send_response(HTTPStatus.UNAUTHORIZED)
            self.send_header("WWW-Authenticate", "Bearer")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return False
        except PermissionDeniedError as error:
            self.send_error(HTTPStatus.FORBIDDEN, error.message)
            return False
        if verifier.is_open and not addresses.is_named_by_address(self.headers.get("Host", "")):
            self.send_error(HTTPStatus.FORBIDDEN, "without a token, name this port by its address")
            return False
        return True

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: anybody who reaches the port could fill the log."""

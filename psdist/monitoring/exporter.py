"""Metrics of one process for Prometheus: reads them on its event loop when a scraper asks, and measures the loop's lag.

``catalog`` lists the metrics. Nothing is counted for scrapers alone, except the lag of the loop and histograms.

The port answers in threads beside the event loop, and only reads. Requests carry a token of the run as ``Authorization:
Bearer TOKEN``, whose role may read metrics. Without a token only this machine can reach the port, and the request must
name it by an address, so that a page in a browser cannot reach it by a name of its own.

Invariant: A peer holds one of ``limits.SCRAPES_MAX`` threads for a bounded time, and nothing of the training waits for
it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import sys
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import accumulate
from socketserver import ThreadingMixIn
from typing import Any, Final, TypeVar

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from psdist import addresses
from psdist.errors import InsecureBindError, PermissionDeniedError, UnauthenticatedError
from psdist.monitoring.catalog import BY_NAME, SECONDS_BOUNDS, Metric, Role
from psdist.off_loop import on_loop
from psdist.security import roles
from psdist.security.tokens import Audience, Verifier
from psdist.settings.config import MetricsEndpoint
from psdist.version import __version__
from psdist.wire import limits

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
        verifier = Verifier(endpoint.token, Audience(role), endpoint.key)
        self._server = MetricsServer(endpoint.host, endpoint.port, verifier, pages)
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


def target(address: str, run_id: str, role: Role, member_id: str) -> dict[str, Any]:
    """Return one entry of ``http_sd_configs``. Its labels do not collide with those of the catalog."""
    return {"targets": [address], "labels": {"run": run_id, "member": member_id, "member_role": role}}


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

    Raises ConfigurationError if the port cannot be bound, InsecureBindError for a ``host`` beyond this machine without
    a token.
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = limits.SCRAPES_MAX

    def __init__(self, host: str, port: int, verifier: Verifier, pages: Mapping[str, Page]) -> None:
        if not addresses.is_loopback(host) and verifier.is_open:
            raise InsecureBindError(
                f"--metrics-host {host} would show the run's metrics to everybody who can reach it: set PSDIST_TOKEN, "
                "or leave the metrics on this machine"
            )
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.pages = pages
        self.verifier = verifier
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

"""Metrics of one process for Prometheus: reads them on its event loop when a scraper asks, and measures the loop's lag.

``catalog`` lists the metrics, ``http_server`` answers the requests. Nothing is counted for scrapers alone, except the
lag of the loop and histograms.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any, Final, TypeVar

from psdist.monitoring.catalog import SECONDS_BOUNDS, Role
from psdist.monitoring.http_server import MetricsServer, Page
from psdist.monitoring.readings import Histogram, Readings
from psdist.off_loop import on_loop
from psdist.security.tokens import Audience, Verifier
from psdist.settings.config import MetricsEndpoint
from psdist.version import __version__
from psdist.wire import limits

T = TypeVar("T")

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

"""Frames of the dashboard's page in headless Chromium while somebody scrolls it.

    python -m benchmarks.dashboard [SECONDS [ROUNDS]]

The real page follows the real server over HTTP: a made-up run with 100 workers, 16 servers and 2,000 slices, all of
whose numbers change with every reading. A script scrolls the page, and the browser reports the time of each frame.

Two controls are scrolled in the same way in turn, by the same browser: an empty page of the same height, and the
dashboard of a run without news. Without a GPU the browser paints on the CPU, and other programs take the CPU from
it. Prints the intervals between the frames of each, the bytes of the page, and those of the stream.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import shutil
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

from playwright.sync_api import sync_playwright

from psdist.monitoring.dashboard import dashboard_link, view_key
from psdist.security.tls import Credentials
from psdist.settings.config import DashboardEndpoint
from psdist_scheduler.dashboard import DashboardServer, Reading
from tests.support.dashboard_runs import advance, sample, status

WORKERS: Final = 100
SERVERS: Final = 16
SHARDS: Final = 64
SLICES: Final = 2000
_TOKEN: Final = "secret"
_VIEWPORT: Final = {"width": 1280, "height": 900}
_FRAME_MS: Final = 1000 / 60

#: Scrolls up and down, and through the tables, by as much as the time since the last frame asks for.
_SCROLL: Final = """
seconds => new Promise(resolve => {
  const places = [document.scrollingElement, ...document.querySelectorAll(".scroll")];
  const times = [];
  let first = null;
  requestAnimationFrame(function frame(now) {
    first ??= now;
    times.push(now);
    const share = (now - first) / 4000 % 2;
    for (const place of places) {
      place.scrollTop = (place.scrollHeight - place.clientHeight) * (share < 1 ? share : 2 - share);
    }
    if (now - first < 1000 * seconds) requestAnimationFrame(frame);
    else resolve(times);
  });
})
"""


class _Serving:
    """The dashboard of a made-up run, whose loop runs in a thread beside the browser's driver."""

    def __init__(self) -> None:
        self._status = status(WORKERS, SERVERS, SHARDS, SLICES)
        self._rng = random.Random(3)
        self.is_live = True
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        key = view_key(_TOKEN, "made-up")

        async def start() -> DashboardServer:
            return DashboardServer(DashboardEndpoint("127.0.0.1", 0, Credentials(_TOKEN)), key, self._read)

        self._server = asyncio.run_coroutine_threadsafe(start(), self._loop).result()
        self.link = dashboard_link(self._server.address, key)

    def _read(self, after: int) -> Reading:
        if not self.is_live:
            return Reading(self._status, [], 0.0)
        advance(self._status, self._rng)
        return Reading(self._status, [sample(after + 1, WORKERS, SERVERS, self._rng)], 0.0)

    def close(self) -> None:
        """Stop serving."""
        self._server.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class Pages(NamedTuple):
    """Open pages, and the bytes that the dashboard received: (address, count)."""

    serving: _Serving
    dashboard: Any
    empty: Any
    received: list[tuple[str, int]]


@contextmanager
def open_pages() -> Iterator[Pages]:
    """Yield the dashboard of a live run, and an empty page of the same height."""
    serving = _Serving()
    try:
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(
                executable_path=shutil.which("chromium") or shutil.which("chromium-browser"), args=["--no-sandbox"]
            )
            page, empty = (browser.new_context(viewport=_VIEWPORT).new_page() for _ in range(2))
            received = _count_bytes(page)
            page.goto(serving.link)
            page.wait_for_selector(f"#workers tr:nth-child({WORKERS})", timeout=60_000)
            height = page.evaluate("document.documentElement.scrollHeight")
            empty.set_content(f"<!doctype html><body style='margin: 0; height: {height}px'></body>")
            yield Pages(serving, page, empty, received)
            browser.close()
    finally:
        serving.close()


def _count_bytes(page: Any) -> list[tuple[str, int]]:
    network, received, addresses = page.context.new_cdp_session(page), [], {}
    network.on("Network.responseReceived", lambda each: addresses.update({each["requestId"]: each["response"]["url"]}))
    network.on("Network.dataReceived", lambda each: received.append((addresses[each["requestId"]], each["dataLength"])))
    network.send("Network.enable")
    return received


def intervals(page: Any, seconds: float) -> list[float]:
    """Return the milliseconds between the frames of a page that is scrolled."""
    page.bring_to_front()
    times = page.evaluate(_SCROLL, seconds)
    return [after - before for before, after in itertools.pairwise(times)]


def _print(name: str, found: list[float]) -> None:
    # A frame that misses one refresh of the screen takes two. Times are rounded, and differ by some microseconds.
    late, missed = (sum(one > times * _FRAME_MS for one in found) / len(found) for times in (1.5, 2.5))
    points = statistics.quantiles(found, n=100)
    print(
        f"{name:>15}: {1000 / statistics.mean(found):5.1f} frames a second; interval median {points[49]:.1f} ms, "
        f"95 % {points[94]:.1f} ms, 99 % {points[98]:.1f} ms; later than one refresh (16.7 ms) {late:.1%}, "
        f"than two (33.3 ms) {missed:.1%}"
    )


def _stream_rate(received: list[tuple[str, int]], since: int, seconds: float) -> float:
    return sum(count for address, count in received[since:] if address.endswith("/events")) / seconds


def main(seconds: float = 8, rounds: int = 3) -> None:
    """Measure and print."""
    frames: dict[str, list[float]] = {"empty page": [], "still dashboard": [], "live dashboard": []}
    rates: list[float] = []
    with open_pages() as (serving, page, empty, received):
        parts = {
            name: sum(n for at, n in received if at.endswith("/events") == (name == "stream"))
            for name in ("page", "stream")
        }
        for _ in range(rounds):
            frames["empty page"] += intervals(empty, seconds)
            serving.is_live = False
            frames["still dashboard"] += intervals(page, seconds)
            serving.is_live = True
            since, began = len(received), time.monotonic()
            frames["live dashboard"] += intervals(page, seconds)
            rates.append(_stream_rate(received, since, time.monotonic() - began))
    for name, found in frames.items():
        _print(name, found)
    rate = statistics.mean(rates)
    print(
        f"page {parts['page'] / 1e3:.0f} kB; stream {rate / 1e3:.1f} kB a second after {parts['stream'] / 1e3:.0f} kB"
    )


if __name__ == "__main__":
    main(*map(float, sys.argv[1:2]), *map(int, sys.argv[2:]))

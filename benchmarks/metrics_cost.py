"""Cost of metrics and of the dashboard to a training step: blocks of steps with and without, in turn, in one process.

    python -m benchmarks.metrics_cost [PARAMETERS [STEPS]]

Scheduler and server serve metrics and dashboard all the time. During the blocks with, a thread scrapes all processes
every second, and another one follows the dashboard as an open page does.
Prints the median and the tenth percentile of both, which other programs on the machine disturb less, and the cost of
the end of a step by itself.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import threading
import timeit
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

import numpy as np

import psdist
from psdist.client.process import loop
from psdist.launcher.embedded import EmbeddedCluster
from psdist.launcher.process import free_port
from psdist.monitoring.dashboard_link import view_key
from psdist.settings.config import MetricsEndpoint

_BLOCKS: Final = 20
_SCRAPE_SECONDS: Final = 1.0


def scrape(address: str, token: str, ended: threading.Event) -> None:
    """Scrape every target of the scheduler at ``address`` until ``ended``."""

    def get(place: str) -> bytes:
        request = urllib.request.Request(f"http://{place}", headers={"Authorization": f"Bearer {token}"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            body: bytes = answer.read()
            return body

    while not ended.wait(_SCRAPE_SECONDS):
        for target in json.loads(get(f"{address}/targets")):
            with suppress(OSError):  # The worker's address of an earlier block.
                get(f"{target['targets'][0]}/metrics")


def watch(port: int, key: str, ended: threading.Event) -> None:
    """Follow the events of the dashboard until ``ended``."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}/events", headers={"Authorization": f"Bearer {key}"})
    with urllib.request.urlopen(request, timeout=60) as events:
        while not ended.is_set():  # There is an event at least every second.
            events.readline()


@contextmanager
def serving(client: psdist.Client, cluster: EmbeddedCluster, scheduler: str, dashboard: int) -> Iterator[None]:
    """Serve the worker's metrics, scrape all, and follow the dashboard on this port."""
    handles: Any = client._async.handles
    ended = threading.Event()

    async def change() -> None:
        if handles.metrics is None:
            handles.serve_metrics(MetricsEndpoint("127.0.0.1", 0, cluster.token))
        else:
            handles.metrics.close()
            handles.metrics = None

    loop.shared().call(change())
    key = view_key(cluster.token, cluster.run_id)
    threads = [
        threading.Thread(target=scrape, args=(scheduler, cluster.token, ended)),
        threading.Thread(target=watch, args=(dashboard, key, ended)),
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()
        loop.shared().call(change())


def steps(model: Any, gradient: Any, count: int) -> list[float]:
    """Return the seconds of each step."""
    found = []
    for _ in range(count):
        began = timeit.default_timer()
        model.push_pull(gradient, copy=False)
        found.append(timeit.default_timer() - began)
    return found


def main(parameters: int = 1000, count: int = 0) -> None:
    """Measure and print."""
    dashboard = free_port("127.0.0.1")
    environ = {"PSDIST_METRICS_PORT": "0", "PSDIST_DASHBOARD_PORT": str(dashboard)}
    os.environ |= environ
    cluster = EmbeddedCluster(servers=1)
    for name in environ:
        del os.environ[name]
    count = count or max(5, min(500, 2_000_000_000 // (100 * parameters)))
    try:
        with psdist.Client(cluster.address, cluster.token) as client:
            gradient = {"w": np.full(parameters, 1e-6, np.float32)}
            model = client.parameters("model", {"w": np.zeros(parameters, np.float32)}, psdist.optim.Adam())
            steps(model, gradient, max(count, 50))
            status: Any = client._async.status()
            scheduler = loop.shared().call(status).metrics_address
            times: dict[bool, list[float]] = {False: [], True: []}
            for block in range(_BLOCKS):
                if block % 2:
                    with serving(client, cluster, scheduler, dashboard):
                        times[True] += steps(model, gradient, count)
                else:
                    times[False] += steps(model, gradient, count)
            for name, place in (("median", 9), ("tenth percentile", 1)):
                off, on = (1e3 * statistics.quantiles(times[which], n=20)[place] for which in (False, True))
                print(
                    f"{parameters:,} parameters, {name}: {off:.4f} ms without, {on:.4f} ms with metrics and dashboard "
                    f"({on / off - 1:+.2%})"
                )
            with serving(client, cluster, scheduler, dashboard):
                handles: Any = client._async.handles
                took = min(timeit.repeat(lambda: handles.metrics._push_ended(0), number=1000, repeat=50))
                print(f"the end of a step takes {1e3 * took:.2f} us more")
    finally:
        cluster.close()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

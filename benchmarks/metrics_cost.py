"""Cost of metrics for Prometheus to a training step: blocks of steps with and without, in turn, in one process.

    python -m benchmarks.metrics_cost [PARAMETERS [STEPS]]

Scheduler and server serve metrics all the time, and a thread scrapes all processes every second during the blocks with.
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


@contextmanager
def serving(client: psdist.Client, cluster: EmbeddedCluster, scheduler: str) -> Iterator[None]:
    """Serve the worker's metrics, and scrape all."""
    handles: Any = client._async.handles
    ended = threading.Event()

    async def change() -> None:
        if handles.metrics is None:
            handles.serve_metrics(MetricsEndpoint("127.0.0.1", 0, cluster.token))
        else:
            handles.metrics.close()
            handles.metrics = None

    loop.shared().call(change())
    thread = threading.Thread(target=scrape, args=(scheduler, cluster.token, ended))
    thread.start()
    try:
        yield
    finally:
        ended.set()
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
    os.environ["PSDIST_METRICS_PORT"] = "0"
    cluster = EmbeddedCluster(servers=1)
    del os.environ["PSDIST_METRICS_PORT"]
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
                    with serving(client, cluster, scheduler):
                        times[True] += steps(model, gradient, count)
                else:
                    times[False] += steps(model, gradient, count)
            for name, place in (("median", 9), ("tenth percentile", 1)):
                off, on = (1e3 * statistics.quantiles(times[which], n=20)[place] for which in (False, True))
                print(
                    f"{parameters:,} parameters, {name}: {off:.4f} ms without, {on:.4f} ms with metrics "
                    f"({on / off - 1:+.2%})"
                )
            with serving(client, cluster, scheduler):
                handles: Any = client._async.handles
                took = min(timeit.repeat(lambda: handles.metrics._push_ended(0), number=1000, repeat=50))
                print(f"the end of a step takes {1e3 * took:.2f} us more")
    finally:
        cluster.close()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

"""Cost of metrics and of the dashboard to a training step: blocks of steps with and without, in turn, in one process.

    python -m benchmarks.metrics_cost [PARAMETERS [PAIRS]]

Scheduler and server serve metrics and dashboard all the time. During the blocks with, the worker serves its metrics as
well, and another process scrapes all processes every second and follows the dashboard's events as an open page does.

Two neighbouring blocks make a pair, in alternating order, so that a slow minute of the machine meets both. Prints the
median of the pairs' ratios with its 95 % confidence interval (by the sign test), for the median step and for the tenth
percentile of a block, which other programs on the machine disturb less. Then, while nothing trains, the CPU time that
worker, server and scheduler use more with than without: steps cannot lose more than that. Last, the cost of the end of
a step by itself.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import statistics
import sys
import threading
import time
import timeit
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, Final, NamedTuple

import numpy as np
import psutil

import psdist
from psdist.addresses import free_port
from psdist.client.session import loop
from psdist.launcher.embedded import EmbeddedCluster
from psdist.monitoring.dashboard import view_key
from psdist.security.tls import Credentials
from psdist.settings.config import MetricsEndpoint

_PAIRS: Final = 80
#: Time of a block, in which each process is scraped at least once, and its least steps.
_BLOCK_SECONDS: Final = 1.25
_STEPS_MIN: Final = 5
#: Time of each measurement of CPU time, and their pairs.
_IDLE_SECONDS: Final = 3.0
_IDLE_PAIRS: Final = 4
_SCRAPE_SECONDS: Final = 1.0


class Watched(NamedTuple):
    """Addresses of a run's metrics and dashboard, and the secrets that open them."""

    scheduler: str
    dashboard: str
    token: str
    key: str


def look(watched: Watched, looking: Any, ended: Any) -> None:
    """Scrape and follow while ``looking`` is set, until ``ended``. Runs in a process of its own."""
    threading.Thread(target=_follow, args=(watched, looking), daemon=True).start()
    while not ended.wait(_SCRAPE_SECONDS):
        if looking.is_set():
            for target in json.loads(_get(f"{watched.scheduler}/targets", watched.token)):
                with suppress(OSError):  # The worker's address of an earlier block.
                    _get(f"{target['targets'][0]}/metrics", watched.token)


def _get(place: str, token: str) -> bytes:
    request = urllib.request.Request(f"http://{place}", headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        body: bytes = answer.read()
        return body


def _follow(watched: Watched, looking: Any) -> None:
    place = f"http://{watched.dashboard}/events"
    request = urllib.request.Request(place, headers={"Authorization": f"Bearer {watched.key}"})
    while looking.wait():
        with urllib.request.urlopen(request, timeout=60) as events:
            while looking.is_set():  # There is an event at least every second.
                events.readline()


@contextmanager
def watching(client: psdist.Client, token: str, looking: Any) -> Iterator[None]:
    """Serve the worker's metrics, and let the other process look."""
    handles: Any = client._async.handles

    async def change() -> None:
        if handles.metrics is None:
            handles.serve_metrics(MetricsEndpoint("127.0.0.1", 0, Credentials(token)))
        else:
            handles.metrics.close()
            handles.metrics = None

    loop.shared().call(change())
    looking.set()
    try:
        yield
    finally:
        looking.clear()
        loop.shared().call(change())


def block(model: Any, gradient: Any) -> list[float]:
    """Return the seconds of each step of a block."""
    found: list[float] = []
    began = timeit.default_timer()
    while len(found) < _STEPS_MIN or timeit.default_timer() - began < _BLOCK_SECONDS:
        start = timeit.default_timer()
        model.push_pull(gradient, copy=False)
        found.append(timeit.default_timer() - start)
    return found


def cpu_share(onlooker: int) -> float:
    """Return the share of a core that this run's processes use for some seconds, without the one that looks."""
    own = psutil.Process()
    members = [own, *(one for one in own.children(recursive=True) if one.pid != onlooker)]
    before = [sum(one.cpu_times()[:2]) for one in members]
    time.sleep(_IDLE_SECONDS)  # The measured time: nothing trains in it.
    return sum(sum(one.cpu_times()[:2]) - used for one, used in zip(members, before, strict=True)) / _IDLE_SECONDS


def interval(values: list[float]) -> tuple[float, float, float]:
    """Return the median, and the ends of its 95 % confidence interval by the sign test."""
    ordered, count = sorted(values), len(values)
    tail, rank = 0.0, 0
    while (tail := tail + math.comb(count, rank) / 2**count) <= 0.025:
        rank += 1
    return statistics.median(ordered), ordered[max(rank - 1, 0)], ordered[min(count - rank, count - 1)]


def _print(parameters: int, pairs: list[tuple[list[float], list[float]]]) -> None:
    for name, place in (("median", 9), ("tenth percentile", 1)):
        both = [[statistics.quantiles(one, n=20)[place] for one in pair] for pair in pairs]
        off, on = (1e3 * statistics.median(column) for column in zip(*both, strict=True))
        cost, least, most = interval([on_one / off_one - 1 for off_one, on_one in both])
        print(
            f"{parameters:,} parameters, {name}: {off:.4f} ms without, {on:.4f} ms with metrics and dashboard; "
            f"{cost:+.2%} in {len(pairs)} pairs ({least:+.2%} to {most:+.2%})"
        )


@contextmanager
def _cluster() -> Iterator[tuple[EmbeddedCluster, str]]:
    """Run a cluster with metrics and a dashboard. Yields it with the dashboard's address."""
    port = free_port("127.0.0.1")
    environ = {"PSDIST_METRICS_PORT": "0", "PSDIST_DASHBOARD_PORT": str(port)}
    os.environ |= environ
    cluster = EmbeddedCluster(servers=1)
    for name in environ:
        del os.environ[name]
    try:
        yield cluster, f"127.0.0.1:{port}"
    finally:
        cluster.close()


@contextmanager
def _onlooker(watched: Watched) -> Iterator[tuple[Any, int]]:
    """Start the process that looks. Yields the event that lets it, and the process's id."""
    context = multiprocessing.get_context("spawn")
    looking, ended = context.Event(), context.Event()
    process = context.Process(target=look, args=(watched, looking, ended))
    process.start()
    try:
        yield looking, process.pid or 0
    finally:
        ended.set()
        process.join()


def main(parameters: int = 1000, count: int = _PAIRS) -> None:
    """Measure and print."""
    with _cluster() as (cluster, dashboard), psdist.Client(cluster.address, cluster.token) as client:
        status: Any = client._async.status()
        scheduler = loop.shared().call(status).metrics_address
        watched = Watched(scheduler, dashboard, cluster.token, view_key(cluster.token, cluster.run_id))
        gradient = {"w": np.full(parameters, 1e-6, np.float32)}
        model = client.parameters("model", {"w": np.zeros(parameters, np.float32)}, psdist.optim.Adam())
        with _onlooker(watched) as (looking, onlooker):

            def alternate(measure: Callable[[], Any], pairs: int) -> list[tuple[Any, Any]]:
                """Return the results without and with, pair by pair."""
                found: dict[bool, list[Any]] = {False: [], True: []}
                for pair in range(pairs):
                    for on in (pair % 2 == 1, pair % 2 == 0):
                        with watching(client, cluster.token, looking) if on else nullcontext():
                            found[on].append(measure())
                return list(zip(found[False], found[True], strict=True))

            block(model, gradient)
            _print(parameters, alternate(lambda: block(model, gradient), count))
            shares = alternate(lambda: cpu_share(onlooker), _IDLE_PAIRS)
            off, on = (statistics.median(column) for column in zip(*shares, strict=True))
            print(f"idle, all processes use {off:.2%} of a core without, {on:.2%} with: {on - off:+.2%}")
            with watching(client, cluster.token, looking):
                handles: Any = client._async.handles
                took = min(timeit.repeat(lambda: handles.metrics._push_ended(0), number=1000, repeat=50))
                print(f"the end of a step takes {1e3 * took:.2f} us more")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

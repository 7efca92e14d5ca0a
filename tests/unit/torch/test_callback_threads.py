"""Threads for callbacks of futures: callbacks that wait for each other, and threads that are kept."""

from __future__ import annotations

import os
import threading

import pytest

from psdist.process_group import work
from psdist.process_group.work import CallbackThreads


def wait_until_idle(threads: CallbackThreads, count: int) -> None:
    while threads._idle != count:
        os.sched_yield()


@pytest.mark.timeout(60)
def test_a_callback_waits_for_another_one() -> None:
    threads, ended = CallbackThreads(), threading.Event()

    def waits() -> None:
        inner = threading.Event()
        threads.run(inner.set)
        inner.wait()
        ended.set()

    for _ in range(20):
        ended.clear()
        threads.run(waits)
        ended.wait()


@pytest.mark.timeout(60)
def test_an_idle_thread_runs_the_next_callback() -> None:
    threads, found = CallbackThreads(), list[int]()
    for _ in range(5):
        threads.run(lambda: found.append(threading.get_ident()))
        wait_until_idle(threads, 1)
    assert len(found) == 5 and len(set(found)) == 1


@pytest.mark.timeout(60)
def test_few_threads_are_kept() -> None:
    threads, together = CallbackThreads(), threading.Barrier(work._KEPT_THREADS + 4)
    before = threading.active_count()
    for _ in range(together.parties):
        threads.run(together.wait)
    wait_until_idle(threads, work._KEPT_THREADS)
    while threading.active_count() > before + work._KEPT_THREADS:
        os.sched_yield()

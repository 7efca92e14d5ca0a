"""Background load is busy while it lasts, and ends with its run, or with the process that started it."""

from __future__ import annotations

import os
import subprocess
import sys

import psutil
import pytest

from tests.support.chaos.faults import BackgroundLoad

_CORES = len(os.sched_getaffinity(0))


def test_it_runs_so_many_processes_per_core_and_ends_them() -> None:
    with BackgroundLoad(2) as load:
        processes = [psutil.Process(process.pid) for process in load.processes]
        assert len(processes) == 2 * _CORES
        assert all(process.is_running() for process in processes)
    _, alive = psutil.wait_procs(processes, timeout=120)
    assert not alive


def test_it_ends_with_an_error_of_the_run() -> None:
    with pytest.raises(ZeroDivisionError), BackgroundLoad(1) as load:
        processes = [psutil.Process(process.pid) for process in load.processes]
        raise ZeroDivisionError
    _, alive = psutil.wait_procs(processes, timeout=120)
    assert not alive


def test_none_is_started_without_it() -> None:
    with BackgroundLoad(0) as load:
        assert load.processes == []


def test_it_does_not_outlive_a_killed_process() -> None:
    script = "import sys; from tests.support.chaos.faults import BackgroundLoad; load = BackgroundLoad(1).__enter__(); "
    script += "print(*(process.pid for process in load.processes), flush=True); sys.stdin.read()"
    owner = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    processes = [psutil.Process(int(pid)) for pid in owner.stdout.readline().split()]
    assert len(processes) == _CORES
    owner.kill()
    owner.communicate()
    _, alive = psutil.wait_procs(processes, timeout=120)
    assert not alive

"""Silence of peers, and of this process itself; states of processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

from psdist.collectives.group_runner import CallCounts, SilenceWatch
from psdist.collectives.mesh import PeerSilence
from psdist.errors import ClosedError, WorkerLostError
from psdist.link import processes


def test_silence_lasts_from_the_look_before_until_a_sign_of_life() -> None:
    silence = PeerSilence(0.1)
    assert silence.look(1.0, is_silent=False) == 0.0
    assert [round(silence.look(now, is_silent=True), 3) for now in (1.1, 1.2, 1.3)] == [0.1, 0.2, 0.3]
    assert silence.look(1.4, is_silent=False) == 0.0
    assert round(silence.look(1.5, is_silent=True), 3) == 0.1


def test_time_in_which_this_process_was_stopped_does_not_count() -> None:
    silence = PeerSilence(0.1)
    silence.look(1.0, is_silent=True)
    assert round(silence.look(9.0, is_silent=True), 3) == 0.1
    assert round(silence.look(9.1, is_silent=True), 3) == 0.2


def test_stopped_and_ended_processes_are_known() -> None:
    assert processes.own_scope()
    assert not processes.is_stopped(os.getpid())
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        assert processes.is_stopped(process.pid)
        process.kill()
    assert processes.is_stopped(process.pid)


def test_a_rank_that_tells_of_the_end_at_another_one_has_not_closed_the_group() -> None:
    gave_up = ClosedError("rank 2 gave up a call", rank=2)
    lost = {0: gave_up, 1: ClosedError("rank 1 reconfigures the group"), 2: gave_up, 3: WorkerLostError("", rank=3)}
    machine: Any = SimpleNamespace(lost=lost)
    assert SilenceWatch(SimpleNamespace(), machine, None, lambda _: None, CallCounts(machine)).closed == [2]

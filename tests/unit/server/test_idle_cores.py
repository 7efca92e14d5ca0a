"""Idle cores between two reports."""

from __future__ import annotations

import time

import psutil
import pytest

from psdist_server.server import Cores


def test_a_period_is_long_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    now, percent = [10.0], [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(psutil, "cpu_percent", lambda: percent[0])
    monkeypatch.setattr(psutil, "cpu_count", lambda: 8)
    cores = Cores()
    found = []
    for seconds, busy in ((0.1, 50.0), (0.2, 75.0), (0.1, 0.0), (0.5, 100.0)):
        now[0] += seconds
        percent[0] = busy
        found.append(cores.idle())
    assert found == [None, 2.0, 2.0, 0.0]


def test_the_usable_cores_are_counted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    now, usable = [10.0], [4]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr("psdist_server.server.usable_cores", lambda: usable[0])
    monkeypatch.setattr(psutil, "cpu_percent", lambda: 0.0)
    monkeypatch.setattr(psutil, "cpu_count", lambda: 8)
    cores = Cores()
    usable[0] = 2
    for seconds, counted in ((30.0, 4), (30.0, 2)):
        now[0] += seconds
        assert cores.idle() == cores.usable == counted


def test_this_host_has_at_most_its_cores() -> None:
    cores = Cores()
    cores._since -= 1.0
    idle = cores.idle()
    assert idle is not None and 0 <= idle <= (psutil.cpu_count() or 1)

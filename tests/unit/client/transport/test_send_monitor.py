"""Polls of a push's bytes: each report comes once, when they are delivered, and none after ``stop``."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from psdist.client.session.waits import Wait
from psdist.client.transport import tcp
from psdist.client.transport.tcp import SendMonitor
from psdist.wire.limits import DELIVERED_BYTES


class Reports:
    """The reports of a monitor, in place of a wait."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.changed = asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        def report() -> None:
            self.seen.append(name)
            self.changed.set()

        return report


class Bytes:
    """Bytes of a connection, which become fewer by ``step`` from poll to poll."""

    def __init__(self, left: int, step: int) -> None:
        self.left, self.step = left, step
        self.polls = 0

    def __call__(self, _: object) -> int:
        self.polls += 1
        left, self.left = self.left, max(0, self.left - self.step)
        return left


def monitored(monkeypatch: pytest.MonkeyPatch, left: Bytes) -> tuple[SendMonitor, Reports]:
    monkeypatch.setattr(tcp, "unacknowledged_bytes", left)
    reports = Reports()
    return SendMonitor(cast(Any, None), cast(Wait, reports)), reports


async def test_a_push_is_held_up_once_its_bytes_are_delivered(monkeypatch: pytest.MonkeyPatch) -> None:
    left = Bytes(4 * DELIVERED_BYTES, DELIVERED_BYTES)
    monitor, reports = monitored(monkeypatch, left)
    monitor.hold()
    assert reports.seen == []
    async with asyncio.timeout(60):
        await reports.changed.wait()
    assert reports.seen == ["held_up"] and left.polls == 4
    monitor.resume()
    monitor.finish()
    assert reports.seen == ["held_up", "resumed", "sent"]


async def test_a_push_that_may_send_again_before_that_is_not_held_up(monkeypatch: pytest.MonkeyPatch) -> None:
    left = Bytes(2 * DELIVERED_BYTES, DELIVERED_BYTES)
    monitor, reports = monitored(monkeypatch, left)
    monitor.hold()
    monitor.resume()
    left.left = 2 * DELIVERED_BYTES
    monitor.finish()
    async with asyncio.timeout(60):
        while "sent" not in reports.seen:
            reports.changed.clear()
            await reports.changed.wait()
    assert reports.seen == ["resumed", "sent"]


async def test_a_stopped_monitor_polls_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    left = Bytes(2 * DELIVERED_BYTES, 0)
    monitor, reports = monitored(monkeypatch, left)
    monitor.finish()
    monitor.stop()
    monitor.stop()
    assert monitor._timer is None and left.polls == 1 and reports.seen == []

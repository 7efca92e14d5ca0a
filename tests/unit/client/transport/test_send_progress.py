"""Sending and waiting within a push over gRPC, from the server's reports of its reading."""

from __future__ import annotations

from typing import Any, cast

import pytest

from psdist.client.session.waits import Wait
from psdist.client.transport.grpc import SendProgress
from psdist.v1 import server_pb2 as pb
from psdist.wire.limits import DELIVERED_BYTES


class NotedSending:
    """The reports to a wait."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return lambda: self.seen.append(name)


@pytest.fixture
def reports() -> NotedSending:
    return NotedSending()


@pytest.fixture
def progress(reports: NotedSending) -> SendProgress:
    return SendProgress(cast(Wait, reports))


def test_a_small_push_is_sent_once_it_is_written(progress: SendProgress, reports: NotedSending) -> None:
    progress.wrote(DELIVERED_BYTES)
    assert reports.seen == []
    progress.finish()
    assert reports.seen == ["sent"]


def test_a_larger_push_is_sent_once_the_server_has_read_it(progress: SendProgress, reports: NotedSending) -> None:
    progress.wrote(DELIVERED_BYTES)
    progress.on_reading(pb.READING_HELD)
    progress.on_reading(pb.READING_RESUMED)
    progress.wrote(1)
    progress.finish()
    assert reports.seen == ["held_up", "resumed"]
    progress.on_reading(pb.READING_COMPLETE)
    assert reports.seen == ["held_up", "resumed", "sent"]


def test_a_report_of_a_later_version_says_nothing(progress: SendProgress, reports: NotedSending) -> None:
    progress.on_reading(77)
    assert reports.seen == []

"""Defaults of the server program."""

from __future__ import annotations

import os

import pytest

from psdist.types import ClusterMap, ServerEntry
from psdist_server import app


@pytest.mark.parametrize(
    ("others", "threads"),
    [
        ([], 8),
        (["10.0.0.1:7000"], 4),
        (["10.0.0.2:7000", "10.0.0.3:7000"], 8),
        ([f"10.0.0.1:{port}" for port in range(7000, 7030)], 1),
        (["10.0.0.1:9000"], 8),
    ],
)
def test_servers_on_one_host_share_its_cores(others: list[str], threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    cluster = ClusterMap("run", 1, tuple(ServerEntry(f"server-{i}", 1, other) for i, other in enumerate(others)))
    assert app.default_kernel_threads(cluster, "10.0.0.1:9000") == threads

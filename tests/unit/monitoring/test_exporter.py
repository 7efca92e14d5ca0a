"""The exporter: readings on the loop, whose lag it measures, and a loop that does not answer."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
from typing import Any

import pytest

from psdist.monitoring.exporter import Exporter, Readings, target
from psdist.settings.config import MetricsEndpoint
from psdist.wire import limits


def get(address: str, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection(address, timeout=60)
    try:
        connection.request("GET", path, headers={"Authorization": "Bearer secret"})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def make(read: Any = lambda readings: None, targets: Any = None) -> Exporter:
    endpoint = MetricsEndpoint("127.0.0.1", 0, "secret")
    return Exporter(endpoint, "scheduler", lambda: ("run", "member"), read, targets)


async def test_readings_are_made_on_the_loop() -> None:
    threads = []

    def read(readings: Readings) -> None:
        threads.append(threading.current_thread())
        readings.add("psdist_epoch", 7)

    exporter = make(read, lambda: [target("a:1", "run", "worker", "worker-0")])
    try:
        status, text = await asyncio.to_thread(get, exporter.address, "/metrics")
        assert status == 200 and "\npsdist_epoch 7.0\n" in text and threads == [threading.current_thread()]
        assert 'psdist_process_info{member_id="member",role="scheduler",run_id="run"' in text
        assert "psdist_event_loop_lag_seconds_bucket" in text and "process_open_fds" in text
        _, text = await asyncio.to_thread(get, exporter.address, "/targets")
        labels = {"run": "run", "member": "worker-0", "member_role": "worker"}
        assert json.loads(text) == [{"targets": ["a:1"], "labels": labels}]
    finally:
        exporter.close()


async def test_a_blocked_loop_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SCRAPE_SECONDS", 0.2)
    exporter, answers = make(), []
    try:
        asking = threading.Thread(target=lambda: answers.append(get(exporter.address, "/metrics")[0]))
        asking.start()
        asking.join()  # Blocks the loop.
        assert answers == [503]
    finally:
        exporter.close()


async def test_an_error_of_a_reading_breaks_only_its_scrape() -> None:
    def read(readings: Readings) -> None:
        readings.add("psdist_unknown", 1)

    exporter = make(read)
    try:
        with pytest.raises(http.client.HTTPException):
            await asyncio.to_thread(get, exporter.address, "/metrics")
    finally:
        exporter.close()

"""The exporter: readings on the loop, whose lag it measures, and a loop that does not answer."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import ssl
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from psdist.errors import InsecureBindError
from psdist.monitoring.exporter import Exporter, Readings, target
from psdist.security.roles import DOMAIN, Role
from psdist.security.tls import Credentials
from psdist.settings.config import MetricsEndpoint
from psdist.wire import limits
from tests.support.certificates import make_ca, write_tls


def get(address: str, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection(address, timeout=60)
    try:
        connection.request("GET", path, headers={"Authorization": "Bearer secret"})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def make(
    read: Any = lambda readings: None,
    targets: Any = None,
    credentials: Credentials = Credentials("secret"),  # noqa: B008
    host: str = "127.0.0.1",
) -> Exporter:
    endpoint = MetricsEndpoint(host, 0, credentials)
    return Exporter(endpoint, "scheduler", lambda: ("run", "member"), read, targets)


async def test_readings_are_made_on_the_loop() -> None:
    threads = []

    def read(readings: Readings) -> None:
        threads.append(threading.current_thread())
        readings.add("psdist_epoch", 7)

    exporter = make(read, lambda: [target("a:1", "run", "worker", "worker-0", has_tls=False)])
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


async def test_beyond_this_machine_tokens_are_encrypted(tmp_path: Path) -> None:
    """The certificate is that of the process, for any host: scrapers know members of the run by its common name."""
    files = write_tls(tmp_path, make_ca(), Role.SERVER)
    trusting = ssl.create_default_context(cafile=str(files.ca))

    def ask(port: int) -> bytes:
        with (
            socket.create_connection(("127.0.0.1", port), timeout=60) as plain,
            trusting.wrap_socket(plain, server_hostname=DOMAIN) as secured,
        ):
            secured.sendall(b"GET /metrics HTTP/1.0\r\nAuthorization: Bearer secret\r\n\r\n")
            return b"".join(iter(lambda: secured.recv(1 << 16), b""))

    def ask_in_plaintext(port: int) -> bytes:
        with socket.create_connection(("127.0.0.1", port), timeout=60) as plain:
            plain.sendall(b"GET /metrics HTTP/1.0\r\nAuthorization: Bearer secret\r\n\r\n")
            with suppress(ConnectionError):
                return b"".join(iter(lambda: plain.recv(1 << 16), b""))
        return b""

    exporter = make(credentials=Credentials("secret", files), host="0.0.0.0")
    try:
        port = int(exporter.address.rpartition(":")[2])
        assert b"psdist_process_info" in await asyncio.to_thread(ask, port)
        assert b"psdist" not in await asyncio.to_thread(ask_in_plaintext, port)
        assert b"psdist_process_info" in await asyncio.to_thread(ask, port), "a wrong peer harms nobody"
    finally:
        exporter.close()
    labels = target("10.0.0.1:9", "run", "worker", "worker-0", has_tls=True)["labels"]
    assert labels["__scheme__"] == "https", "Prometheus takes it from here"
    assert "__scheme__" not in target("127.0.0.1:9", "run", "worker", "worker-0", has_tls=True)["labels"]


async def test_plaintext_beyond_this_machine_must_be_asked_for() -> None:
    with pytest.raises(InsecureBindError, match=r"--metrics-host 0.0.0.0 .*without encryption.*--tls-ca.*--insecure"):
        make(credentials=Credentials("secret"), host="0.0.0.0")
    exporter = make(credentials=Credentials("secret", insecure=True), host="0.0.0.0")
    try:
        port = exporter.address.rpartition(":")[2]
        assert (await asyncio.to_thread(get, f"127.0.0.1:{port}", "/metrics"))[0] == 200
    finally:
        exporter.close()


async def test_a_peer_that_begins_no_handshake_is_sent_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psdist.monitoring.exporter._Handler.timeout", 0.2)
    exporter = make(credentials=Credentials("secret", write_tls(tmp_path, make_ca())), host="0.0.0.0")

    def wait(port: int) -> bytes:
        with socket.create_connection(("127.0.0.1", port), timeout=60) as silent:
            return silent.recv(1)

    try:
        assert await asyncio.to_thread(wait, int(exporter.address.rpartition(":")[2])) == b""
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

"""The port for scrapers: who may read it, and peers that read slowly or not at all."""

from __future__ import annotations

import http.client
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from psdist.errors import ConfigurationError, InsecureBindError
from psdist.monitoring import exporter
from psdist.monitoring.exporter import MetricsServer, Page
from psdist.security.roles import Role
from psdist.security.tokens import Audience, Verifier, audience_key, create
from psdist.wire import limits

OPEN = Verifier("", Audience.WORKER)


def hello() -> tuple[str, bytes]:
    return "text/plain", b"hello"


@contextmanager
def serving(token: str | Verifier = "", page: Page = hello) -> Iterator[MetricsServer]:
    verifier = token if isinstance(token, Verifier) else Verifier(token, Audience.WORKER)
    server = MetricsServer("127.0.0.1", 0, verifier, {"/metrics": page})
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server
    finally:
        server.close()
        thread.join()


def get(server: MetricsServer, path: str = "/metrics", method: str = "GET", **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=60)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def test_the_token_opens_the_port() -> None:
    with serving("secret") as server:
        assert get(server)[0] == 401
        assert get(server, Authorization="Bearer other")[0] == 401
        assert get(server, Authorization="Bearer s\u00e9cret")[0] == 401
        assert get(server, Authorization="Bearer secret") == (200, b"hello")
        assert get(server, Authorization="Bearer secret", Host="anything.example") == (200, b"hello")


def test_readers_and_admins_may_read_and_members_may_not() -> None:
    with serving("secret") as server:
        for role, status in ((Role.READER, 200), (Role.ADMIN, 200), (Role.WORKER, 403), (Role.SERVER, 403)):
            assert get(server, Authorization=f"Bearer {create('secret', role)}")[0] == status, role
        assert get(server, Authorization=f"Bearer {create('other', Role.READER)}")[0] == 401
        assert get(server, Authorization=f"Bearer {create('secret', Role.READER, 1)}")[0] == 401  # It has expired.


def test_a_page_that_fails_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> tuple[str, bytes]:
        raise ValueError("no page")

    with serving(page=fail) as server:
        for _ in range(3):
            with pytest.raises(http.client.RemoteDisconnected):
                get(server)
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [ValueError]


def test_a_member_with_a_token_of_its_role_checks_readers_by_its_key() -> None:
    key = audience_key("secret", Audience.WORKER)
    with serving(Verifier(create("secret", Role.WORKER), Audience.WORKER, key)) as server:
        assert get(server, Authorization=f"Bearer {create('secret', Role.READER)}")[0] == 200
        assert get(server, Authorization="Bearer secret")[0] == 200
        assert get(server, Authorization=f"Bearer {create('secret', Role.WORKER)}")[0] == 403


def test_without_a_token_a_browser_cannot_reach_it_by_a_name_of_its_own() -> None:
    with serving() as server:
        assert get(server) == (200, b"hello")
        assert get(server, Host="[::1]:80")[0] == 200 and get(server, Host="localhost")[0] == 200
        assert get(server, Host="evil.example:9400")[0] == 403 and get(server, Host="")[0] == 403


def test_other_pages_and_methods_are_refused() -> None:
    with serving() as server:
        assert get(server, "/other")[0] == 404 and get(server, "/metrics?x=1")[0] == 200
        assert get(server, method="POST")[0] == 501


def test_a_process_that_does_not_answer_is_unavailable() -> None:
    def page() -> tuple[str, bytes]:
        raise TimeoutError

    with serving(page=page) as server:
        assert get(server)[0] == 503


def stuck(server: MetricsServer, count: int) -> list[socket.socket]:
    """Open connections that ask for a large page and never read it."""
    server.pages = {"/metrics": lambda: ("text/plain", bytes(64 << 20))}
    found = [socket.create_connection(("127.0.0.1", server.server_address[1]), 60) for _ in range(count)]
    for one in found:
        one.sendall(b"GET /metrics HTTP/1.0\r\nHost: localhost\r\n\r\n")
    return found


def test_scrapers_that_never_read_hold_a_few_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporter._Handler, "timeout", 100.0)
    before = threading.active_count()
    with serving() as server:
        opened = stuck(server, limits.SCRAPES_MAX + 4)
        # Those above the limit are closed without an answer.
        assert all(map(_is_closed, opened[limits.SCRAPES_MAX :]))
        assert threading.active_count() <= before + 1 + limits.SCRAPES_MAX
        for one in opened:
            one.close()


def test_a_scraper_that_never_reads_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporter._Handler, "timeout", 0.2)
    with serving() as server:
        opened = stuck(server, limits.SCRAPES_MAX)
        server.pages, pause = {"/metrics": hello}, threading.Event()
        answer = None
        while answer is None:  # The test's time limit ends this.
            try:
                answer = get(server)
            except (http.client.HTTPException, OSError):
                pause.wait(0.05)
        assert answer == (200, b"hello")
        for one in opened:
            one.close()


def test_a_request_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send a header byte by byte, each in less than the timeout of a read. The test's time limit ends this."""
    monkeypatch.setattr(exporter._Handler, "timeout", 0.5)
    with serving() as server, socket.create_connection(("127.0.0.1", server.server_address[1]), 0.05) as slow:
        slow.sendall(b"GET /metrics HTTP/1.0\r\nName: ")
        with pytest.raises(OSError, match=r"reset|pipe"):
            while True:
                slow.sendall(b"x")
                with suppress(TimeoutError):
                    slow.recv(1024)


def _is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_the_port_of_a_closed_client_is_free_for_the_next_one() -> None:
    with serving() as server:
        port = server.server_address[1]
        for _ in range(5):
            server.close()
            server = MetricsServer("127.0.0.1", port, OPEN, {"/metrics": hello})
            server.start()
            assert get(server) == (200, b"hello")
        server.close()


def test_a_port_in_use_and_an_open_one_are_refused() -> None:
    with serving() as server, pytest.raises(ConfigurationError, match="Choose another --metrics-port"):
        MetricsServer("127.0.0.1", server.server_address[1], OPEN, {})
    with pytest.raises(ConfigurationError, match="Correct --metrics-host"):
        MetricsServer("203.0.113.1", 0, Verifier("secret", Audience.WORKER), {})  # an address for documentation
    with pytest.raises(InsecureBindError, match=r"--metrics-host 0.0.0.0 .* PSDIST_TOKEN"):
        MetricsServer("0.0.0.0", 0, OPEN, {})

"""The dashboard's server over real sockets: access to it, policies of its page, browsers and schedulers that hang."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import random
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from psdist.addresses import own_address
from psdist.errors import ConfigurationError, InsecureBindError
from psdist.monitoring.dashboard import content, listen, make_key, view_key
from psdist.monitoring.run_state import RunState
from psdist.security.roles import DOMAIN, Role
from psdist.security.tls import Credentials
from psdist.settings.config import DashboardEndpoint
from psdist.wire import limits
from psdist_scheduler import dashboard
from psdist_scheduler.dashboard import DashboardServer, Reading
from tests.support.certificates import make_ca, write_tls
from tests.support.dashboard_runs import advance, sample, status

TOKEN = "secret"
KEY = view_key(TOKEN, "made-up")
Read = Callable[[int], Reading]


def made_up(workers: int = 3) -> Read:
    """Return a function that reads a made-up run, which continues with each reading."""
    answer, rng = status(workers), random.Random(1)

    def read(after: int) -> Reading:
        advance(answer, rng)
        return Reading(answer, [sample(after + 1, workers, 2, rng)], 0.0)

    return read


@asynccontextmanager
async def serving(read: Read | None = None, token: str = TOKEN, logs: Path | None = None) -> AsyncIterator[int]:
    """Serve the dashboard. Yields its port."""
    endpoint = DashboardEndpoint("127.0.0.1", 0, Credentials(token), logs=logs)
    server = DashboardServer(endpoint, KEY if token else "", read or made_up())
    try:
        yield int(server.address.rpartition(":")[2])
    finally:
        server.close()
        assert not server._thread.is_alive()


def get(port: int, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()


@contextmanager
def following(port: int, **headers: str) -> Iterator[Iterator[dict[str, Any]]]:
    """Follow the events. Yields an iterator over their values."""
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        connection.request("GET", "/events", headers=headers or {"Authorization": f"Bearer {KEY}"})
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        with closing(answer):
            yield (json.loads(line[6:]) for line in answer if line.startswith(b"data: "))


async def test_token_and_key_open_the_stream_and_nothing_else_does() -> None:
    def check(port: int) -> None:
        assert get(port, "/events")[0] == get(port, "/session")[0] == 401
        assert get(port, "/session", "POST", Authorization="Bearer other")[0] == 401
        for secret in (TOKEN, KEY):
            code, headers, _ = get(port, "/session", "POST", Authorization=f"Bearer {secret}")
            cookie = headers["set-cookie"]
            assert code == 204 and "HttpOnly" in cookie and "SameSite=Strict" in cookie and TOKEN not in cookie
            assert get(port, "/session", Cookie=cookie.partition(";")[0])[0] == 204
        with following(port, Cookie=cookie.partition(";")[0]) as events:
            assert next(events)["state"]["run"]["id"] == "made-up"
        for path in ("/events", "/", "/dashboard.js"):
            assert get(port, path, "POST")[0] == get(port, path, "DELETE")[0] == 405
        assert get(port, "/../server.py")[0] == get(port, "/page")[0] == 404

    async with serving() as port:
        await asyncio.to_thread(check, port)


async def test_logs_are_those_of_members_and_need_the_key(tmp_path: Path) -> None:
    logs, answer = tmp_path / "logs", status()
    logs.mkdir()
    (logs / "worker-1.log").write_bytes(b"old\n" * 60 + b"newest\n")
    (logs / "server-0.log").write_bytes(b"x" * 200_000)
    (logs / "scheduler.log").write_text("<b>listening</b>\n")
    (tmp_path / "worker-0.log").write_text("of another run")
    (logs / "worker-0.log").symlink_to(tmp_path / "worker-0.log")
    (logs / "worker-7.log").write_text("of no member")
    os.mkfifo(logs / "worker-2.log")
    (logs / "notes.log").write_text("of no member")
    answer.members.add(member_id="notes", role="ROLE_WORKER", state="live")
    answer.members.add(member_id="../worker-0", role="ROLE_WORKER", state="live")

    def check(port: int) -> None:
        headers = {"Authorization": f"Bearer {KEY}"}
        with following(port) as events:
            assert next(events)["state"]["run"]["logs"] is True
        assert get(port, "/logs/worker-1")[0] == 401
        code, found, body = get(port, "/logs/worker-1", **headers)
        assert code == 200 and body == b"old\n" * 49 + b"newest\n" and found["content-type"].startswith("text/plain")
        assert found["x-content-type-options"] == "nosniff"
        assert len(get(port, "/logs/server-0", **headers)[2]) == 64 << 10
        assert get(port, "/logs/scheduler", **headers)[2] == b"<b>listening</b>\n"
        for name in ("worker-0", "worker-2", "worker-7", "notes", "..%2Fworker-0", "../worker-0", "%2e%2e%2fworker-0"):
            code, _, body = get(port, f"/logs/{name}", **headers)
            assert code == 404 and b"of another" not in body and b"of no member" not in body, (name, code, body)

    async with serving(lambda after: Reading(answer, [], 0.0), logs=logs) as port:
        await asyncio.to_thread(check, port)
    async with serving() as port:
        assert (await asyncio.to_thread(get, port, "/logs/worker-1", Authorization=f"Bearer {KEY}"))[0] == 404


async def test_a_revoked_key_ends_the_pages_that_it_opened(tmp_path: Path) -> None:
    file = tmp_path / "key"
    key = make_key(file)

    def check(port: int) -> None:
        with (
            following(port, Authorization=f"Bearer {key}") as revoked,
            following(port, Authorization=f"Bearer {TOKEN}") as others,
        ):
            assert next(revoked) and next(others)
            file.unlink()
            assert len(list(revoked)) < 5, "the stream ends"
            assert next(others), "the run's own token opened this one"
        assert get(port, "/events", Authorization=f"Bearer {key}")[0] == 401

    endpoint = DashboardEndpoint("127.0.0.1", 0, Credentials(TOKEN), key_file=file)
    with closing(DashboardServer(endpoint, KEY, made_up())) as server:
        await asyncio.to_thread(check, int(server.address.rpartition(":")[2]))


async def test_beyond_this_machine_the_page_is_encrypted(tmp_path: Path) -> None:
    """Renewed certificates serve the next connection."""
    ca = make_ca()
    files = write_tls(tmp_path, ca, Role.SCHEDULER)
    trusting = ssl.create_default_context(cafile=str(files.ca))

    def ask(port: int) -> tuple[str, bytes]:
        with (
            socket.create_connection(("127.0.0.1", port), timeout=60) as plain,
            trusting.wrap_socket(plain, server_hostname=DOMAIN) as secured,
        ):
            secured.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            answer = b"".join(iter(lambda: secured.recv(1 << 16), b""))
            certificate = secured.getpeercert()
            assert certificate is not None
            return str(certificate["serialNumber"]), answer

    with closing(DashboardServer(DashboardEndpoint("0.0.0.0", 0, Credentials(TOKEN, files)), KEY, made_up())) as server:
        port = int(server.address.rpartition(":")[2])
        assert server.is_secure
        first, answer = await asyncio.to_thread(ask, port)
        assert answer.startswith(b"HTTP/1.1 200") and b"<html" in answer
        write_tls(tmp_path, ca, Role.SCHEDULER)
        second, answer = await asyncio.to_thread(ask, port)
        assert answer.startswith(b"HTTP/1.1 200") and first != second
        with pytest.raises((http.client.HTTPException, ConnectionError)):
            await asyncio.to_thread(get, port, "/")


async def test_a_link_has_the_advertised_host() -> None:
    """A browser compares it with the certificate, which names hosts and not each of their addresses."""
    credentials = Credentials(TOKEN, insecure=True)
    cases = [("0.0.0.0", "node-1:29600", "node-1"), ("127.0.0.1", "node-1:29600", "127.0.0.1")]
    cases.append(("0.0.0.0", "127.0.0.1:29600", own_address()))  # A tunnel's end, of another port.
    for host, advertise, shown in cases:
        endpoint = DashboardEndpoint(host, 0, credentials, advertise=advertise)
        with closing(DashboardServer(endpoint, KEY, made_up())) as server:
            assert server.address.rpartition(":")[0] == shown


async def test_plaintext_beyond_this_machine_must_be_asked_for() -> None:
    with pytest.raises(InsecureBindError, match=r"--dashboard-host 0.0.0.0 .*without encryption.*--insecure"):
        DashboardServer(DashboardEndpoint("0.0.0.0", 0, Credentials(TOKEN)), KEY, made_up())


async def test_without_a_token_a_page_in_a_browser_cannot_use_a_name_of_its_own() -> None:
    def check(port: int) -> None:
        with following(port, Host="127.0.0.1") as events:
            assert "state" in next(events)
        for path in ("/", "/events", "/session"):
            assert get(port, path, Host="evil.example")[0] == 403

    async with serving(token="") as port:
        await asyncio.to_thread(check, port)


async def test_the_page_is_small_and_may_load_nothing_from_elsewhere() -> None:
    def check(port: int) -> None:
        total = 0
        for path in ("/", "/dashboard.js", "/dashboard.css", "/uplot.js", "/uplot.css"):
            code, headers, body = get(port, path)
            total += len(body)
            policy = headers["content-security-policy"]
            assert code == 200 and "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
            assert headers["x-content-type-options"] == "nosniff" and headers["referrer-policy"] == "no-referrer"
            assert b"//cdn" not in body and b'src="http' not in body
        assert total < 300_000

    async with serving() as port:
        await asyncio.to_thread(check, port)


def test_the_page_never_makes_html_of_text() -> None:
    script = content("dashboard.js").decode()
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"):
        assert word not in script
    page = content("index.html").decode()
    assert "style=" not in page and "onclick" not in page and page.count("<script") == page.count("<script src=")


async def test_changes_follow_the_whole_state() -> None:
    def check(port: int) -> None:
        with following(port) as events, following(port) as others:
            first, second = next(events), next(events)
            assert first["state"]["workers"].keys() == {"worker-0", "worker-1", "worker-2"}
            assert "state" not in second and second["change"]["parameters"]["model"]["version_max"]
            assert second["points"][0]["reported"]["loss"]["value"] <= 1
            assert "state" in next(others)

    async with serving() as port:
        await asyncio.to_thread(check, port)


async def test_nobody_is_read_for_while_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dashboard, "_IDLE_SECONDS", 1e6)
    read, times = made_up(), []
    once = asyncio.Event()

    def counted(after: int) -> Reading:
        times.append(after)
        once.set()
        return read(after)

    def check(port: int) -> None:
        with following(port) as events:
            while len(times) < 3:
                next(events)

    async with serving(counted) as port:
        await once.wait()
        await asyncio.to_thread(get, port, "/")
        assert len(times) == 1
        await asyncio.to_thread(check, port)


async def test_a_scheduler_that_hangs_or_fails_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    read, broken = made_up(), threading.Event()

    def failing(after: int) -> Reading:
        if broken.is_set():
            raise TimeoutError
        return read(after)

    def check(port: int) -> None:
        with following(port) as events:
            next(events)
            broken.set()
            while "unanswered" not in next(events).get("change", {}):
                pass
            broken.clear()
            while next(events).get("change", {}).get("unanswered", 0) is not None:
                pass

    async with serving(failing) as port:
        await asyncio.to_thread(check, port)


async def test_the_scheduler_does_not_wait_for_a_dashboard_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread of the dashboard hangs, and the scheduler's loop ends it nevertheless."""
    blocked, release = threading.Event(), threading.Event()
    monkeypatch.setattr(RunState, "state", lambda *_: (blocked.set(), release.wait(), {})[-1])
    server = DashboardServer(DashboardEndpoint("127.0.0.1", 0, Credentials(TOKEN)), KEY, made_up())
    await asyncio.to_thread(blocked.wait)
    server.close()
    assert server._thread.is_alive()
    release.set()
    await asyncio.to_thread(server._thread.join)


async def test_a_browser_that_never_reads_is_cut_off_and_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "DASHBOARD_STALL_SECONDS", 0.5)
    monkeypatch.setattr(dashboard, "_INTERVAL_SECONDS", 0.01)
    read, rng = made_up(1), random.Random(2)

    def large(after: int) -> Reading:
        found = read(after)
        del found.status.events[:]
        for _ in range(100):  # Each change is large.
            found.status.events.add(number=rng.randrange(1 << 40), text="x" * 3000)
        return found

    def check(port: int) -> None:
        with closing(socket.socket()) as lazy:
            lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            lazy.connect(("127.0.0.1", port))
            lazy.sendall(f"GET /events HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n\r\n".encode())
            lazy.settimeout(60)
            with following(port) as events:
                for _ in range(5):
                    next(events)
                assert server._server is not None
                connections = server._server.server_state.connections
                assert len(connections) == 2
                while len(connections) > 1:
                    next(events)
                next(events)

    with closing(DashboardServer(DashboardEndpoint("127.0.0.1", 0, Credentials(TOKEN)), KEY, large)) as server:
        await asyncio.to_thread(check, int(server.address.rpartition(":")[2]))


def has_ended(connection: socket.socket) -> bool:
    """Wait for a byte. Returns True if the peer ends the connection instead."""
    with closing(connection):
        try:
            return connection.recv(1) == b""
        except ConnectionResetError:
            return True


async def test_connections_without_requests_are_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "DASHBOARD_STALL_SECONDS", 0.2)

    def check(port: int) -> None:
        idle = socket.create_connection(("127.0.0.1", port), timeout=60)
        idle.sendall(b"GET / HTTP/1.1\r\n")
        assert has_ended(idle)

    async with serving() as port:
        await asyncio.to_thread(check, port)


async def test_a_later_request_that_never_ends_is_broken_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "DASHBOARD_STALL_SECONDS", 1.0)

    def check(port: int) -> None:
        with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
            connection.request("GET", "/session")
            assert connection.getresponse().read()
            connection.sock.settimeout(10)
            connection.sock.sendall(b"GET / HTTP/1.1\r\n")  # It ends the wait for another request.
            assert has_ended(connection.sock)

    async with serving() as port:
        await asyncio.to_thread(check, port)


@pytest.mark.parametrize(
    ("first", "rest"),
    [
        (b"POST /session HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nno length\r\n", b""),
        (b"GET /session HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n", b"no length\r\n"),
        (b"GET /events HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nCookie: KEY\r\n\r\n", b"no length\r\n"),
    ],
    ids=["before the answer", "after the answer", "during the answer"],
)
async def test_a_malformed_body_is_refused_without_a_log_line(
    first: bytes, rest: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving() as port, asyncio.timeout(60):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(first.replace(b"KEY", f"psdist-dashboard-{port}={KEY}".encode()))
        answer = await reader.readuntil(b"\r\n\r\n")
        writer.write(rest)
        await reader.read()
        writer.close()
    assert answer.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 401 ", b"HTTP/1.1 200 "))
    assert not caplog.records


async def test_connections_and_readers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "DASHBOARD_READERS_MAX", 2)
    monkeypatch.setattr(limits, "DASHBOARD_CONNECTIONS_MAX", 4)

    def check(port: int) -> None:
        with following(port) as first, following(port) as second:
            assert "state" in next(first) and "state" in next(second)
            for path in ("/events", "/session"):  # A page asks the second, which has a text that it can show.
                code, _, text = get(port, path, Authorization=f"Bearer {KEY}")
                assert code == 503 and b"2 pages follow this run already: close one" in text
            idle = [socket.create_connection(("127.0.0.1", port), timeout=60) for _ in range(2)]
            assert has_ended(socket.create_connection(("127.0.0.1", port), timeout=60))
            for each in idle:
                each.close()
            assert "change" in next(first)

    async with serving() as port:
        await asyncio.to_thread(check, port)


async def test_a_browser_that_connects_while_the_scheduler_restarts_is_answered_by_the_next_one() -> None:
    """Its launcher holds the listening socket, which each scheduler inherits."""
    with closing(listen("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        for _ in range(2):
            waiting = socket.create_connection(("127.0.0.1", port), timeout=60)
            with closing(waiting):
                endpoint = DashboardEndpoint("127.0.0.1", 0, Credentials(TOKEN), os.dup(held.fileno()))
                server = DashboardServer(endpoint, KEY, made_up())
                assert server.address == f"127.0.0.1:{port}"
                waiting.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1:%d\r\n\r\n" % port)
                answer = await asyncio.to_thread(waiting.recv, 100)
                assert answer.startswith(b"HTTP/1.1 200")
                await asyncio.to_thread(server.close)
    with pytest.raises(ConfigurationError, match="--dashboard-fd 12345 is no socket"):
        DashboardServer(DashboardEndpoint("127.0.0.1", 0, Credentials(TOKEN), 12345), KEY, made_up())


async def test_ports_and_hosts_that_cannot_be_are_refused() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"127.0.0.1:{port}.*--dashboard-port"):
            DashboardServer(DashboardEndpoint("127.0.0.1", port, Credentials(TOKEN)), KEY, made_up())
    with pytest.raises(ConfigurationError, match="--dashboard-host"):
        DashboardServer(DashboardEndpoint("192.0.2.1", 0, Credentials(TOKEN, insecure=True)), KEY, made_up())
    with pytest.raises(InsecureBindError, match="PSDIST_TOKEN"):
        DashboardServer(DashboardEndpoint("0.0.0.0", 0, Credentials()), "", made_up())

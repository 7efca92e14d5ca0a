"""Requests at the HTTP ports: metrics of every process, and the dashboard with its streams of events.

Inputs are random bytes, requests of random parts (methods, paths, hosts, tokens, lengths, many and huge headers,
bodies), changed and half requests, and many streams of events at a time. A status 500, or anything of the run for a
request without a token, is a find.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Final

from psdist.monitoring.dashboard import view_key
from psdist.security.roles import TOKEN_ROLES
from psdist.security.tokens import create
from tests.fuzz.inputs import HOST, OPEN_SECONDS, Input, connect, converse
from tests.fuzz.messages import mutate_bytes
from tests.fuzz.rpcs import FuzzFailure
from tests.fuzz.run import FuzzedRun

_METHODS: Final = ("POST", "HEAD", "PUT", "OPTIONS", "CONNECT", "PRI", "G E T", "GET\0", "")
_METRICS: Final = ("/metrics", "/metrics?a=b", "/targets")
_DASHBOARD: Final = ("/", "/session", "/events", "/events#x", "/dashboard.js", "/uplot.css")
_PATHS: Final = (
    "", "*", "/nothing", "//events", "/../../etc/passwd", "/%ff%00%", "http://x/metrics", "http://[/", "/é",
    "/" + "a" * 70000,
)  # fmt: skip
_VERSIONS: Final = ("HTTP/1.0", "HTTP/0.9", "HTTP/2.0", "HTTP/9.9", "HTTP/1.1.1", "HTTP/-1.x", "")
_HOSTS: Final = ("127.0.0.1", "localhost", "evil.example", "[::1]:2", "[", "]", "::", "", "é", "1" * 5000)
_HEADERS: Final = (
    "Content-Length: 3", "Content-Length: -1", "Content-Length: 99999999999999999999", "Content-Length: x",
    "Transfer-Encoding: chunked", "Transfer-Encoding: gzip, chunked", "Connection: keep-alive", "Connection: close",
    "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: eA==\r\nSec-WebSocket-Version: 13",
    "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk", "Expect: 100-continue",
    "Accept-Encoding: gzip", "Range: bytes=0-1,5-", "X-Forwarded-For: é", " folded: value", "no colon", ": no name",
    "Cookie: a; b=; =c", "Host: two.example", "X: \0",
)  # fmt: skip
_BODIES: Final = ("abc", "3\r\nabc\r\n0\r\n\r\n", "ffffffffffffffff\r\n", "-1\r\n\r\n", "x" * 100_000)
_STREAMS: Final = (1, 10, 40, 100)
#: In answers that only the run's readers may see.
_SECRETS: Final = (b"psdist_process_info", b'data: {"', b"__meta_")


def _keys(run: FuzzedRun) -> list[str]:
    """Return the keys and tokens that open the pages, and some that do not."""
    made = [create(run.token, role) for role in TOKEN_ROLES]
    return [run.token, view_key(run.token, run.run_id), *made, create(run.token, TOKEN_ROLES[-1], 1), "x", "é" * 30]


def _request(one: Input, paths: Sequence[str]) -> bytes:
    """Return a request. Most of its parts are as they should be. paths: of the port."""
    rng, keys = one.rng, _keys(one.run)

    def part(usual: str, others: Sequence[str]) -> str:
        return usual if rng.random() < 0.85 else rng.choice(others)

    path = part(rng.choice(paths), _PATHS)
    lines = [f"{part('GET', _METHODS)} {path} {part('HTTP/1.1', _VERSIONS)}", f"Host: {part(f'{HOST}:1', _HOSTS)}"]
    if (way := rng.random()) < 0.7:
        lines.append(f"Authorization: {part('Bearer', ('bearer', 'Basic', ''))} {part(rng.choice(keys[:2]), keys)}")
    elif way < 0.85:
        lines.append(f"Cookie: psdist-dashboard-{one.run.dashboard_port}={part(keys[1], keys)}")
    lines += rng.sample(_HEADERS, rng.choice((0, 0, 0, 1, 2, 5)))
    body = part("", _BODIES)
    if rng.random() < 0.1:
        lines.append("Transfer-Encoding: chunked")
        body = rng.choice(_BODIES)
    if rng.random() < 0.05:
        lines.append(f"X-Huge: {'x' * rng.choice((10_000, 70_000, 1_000_000))}")
    if rng.random() < 0.05:
        lines += [f"X-{number}: {number}" for number in range(rng.choice((90, 101, 5000)))]
    lines = lines if rng.random() < 0.95 else lines[:1]
    return "\r\n".join([*lines, "", body]).encode("latin-1")


def _requests(one: Input, paths: Sequence[str]) -> bytes:
    """Return the bytes of one connection."""
    rng = one.rng
    if rng.random() < 0.1:
        return rng.choice((one.noise(), one.http2(), b"\x16\3\1\0\xf4\1" + rng.randbytes(200)))
    data = _request(one, paths) * rng.choice((1, 1, 1, 1, 2, 50))
    if rng.random() < 0.3:
        data = mutate_bytes(rng, data)
    return data[: rng.randrange(len(data) + 1)] if rng.random() < 0.15 else data


async def _ask(one: Input, port: int, paths: Sequence[str]) -> str:
    data = _requests(one, paths)
    outcome, answer = await converse(await connect(one, port), data)
    status = answer[9:12].decode("latin-1") if answer.startswith(b"HTTP/1.") else outcome
    is_member = any(key.encode() in data for key in _keys(one.run)[:-2])
    if status == "500" or (not is_member and any(secret in answer for secret in _SECRETS)):
        raise FuzzFailure(f"{data[:2000]!r} is answered by {answer[:2000]!r}")
    return status


async def metrics(one: Input) -> str:
    """The metrics of the scheduler or a server."""
    return await _ask(one, one.rng.choice(one.run.metrics_ports), _METRICS)


async def dashboard(one: Input) -> str:
    """The dashboard."""
    return await _ask(one, one.run.dashboard_port, _DASHBOARD)


async def event_streams(one: Input) -> str:
    """Many streams of events at a time, which end in the middle."""
    request = _get(one.run, "/events")
    streams = [await connect(one, one.run.dashboard_port) for _ in range(one.rng.choice(_STREAMS))]
    answers = await asyncio.gather(*(converse(stream, request) for stream in streams))
    found = Counter(answer[9:12].decode("latin-1") or outcome for outcome, answer in answers)
    if not found.keys() <= {"200", "503", "closes", "waits for more"}:
        raise FuzzFailure(f"streams of events are answered by {dict(found)}")
    return found.most_common(1)[0][0]


PAGES: Final[dict[str, Callable[[Input], Awaitable[str]]]] = {
    "metrics": metrics,
    "dashboard": dashboard,
    "event-streams": event_streams,
}


def _get(run: FuzzedRun, path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: {HOST}\r\nAuthorization: Bearer {run.token}\r\n\r\n".encode()


async def require_pages(run: FuzzedRun) -> None:
    """Raise FuzzFailure unless each port answers a reader soon. Connections that were fuzzed may fill it before."""
    one = Input(run, random.Random(0))
    pages = [(port, "/metrics") for port in run.metrics_ports] + [(run.dashboard_port, "/session")]
    for port, path in pages:
        answer = b""
        with suppress(TimeoutError):
            async with asyncio.timeout(OPEN_SECONDS):
                while not answer.startswith((b"HTTP/1.1 20", b"HTTP/1.0 20")):
                    with suppress(ConnectionError):
                        _, answer = await converse(await connect(one, port), _get(run, path))
        if not answer.startswith((b"HTTP/1.1 20", b"HTTP/1.0 20")):
            raise FuzzFailure(f"{path} on port {port} does not answer a reader: {answer[:500]!r}")

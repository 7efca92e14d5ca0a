"""The dashboard's server: a thread with an event loop of its own, beside the scheduler's.

``Feed`` reads the run while somebody looks, and turns it into server-sent events. Of the scheduler it needs one short
call per reading, and readings take at most ``_LOOP_SHARE`` of the time of the scheduler's loop.

Invariants: Nothing in this thread, and nobody who looks at the page, can hold up the scheduler's loop for longer than
one reading. Connections are bounded in number, and those that make no progress are broken. A reader holds no memory but
its place; one that is too slow for a difference gets the whole state next.
"""

from __future__ import annotations

import asyncio
import errno
import hmac
import logging
import os
import re
import socket
import ssl
import stat
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import h11
import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from psdist import addresses
from psdist.errors import ConfigurationError, InsecureBindError, PermissionDeniedError, UnauthenticatedError
from psdist.monitoring import dashboard
from psdist.monitoring.dashboard import listen
from psdist.monitoring.run_json import status_json
from psdist.monitoring.run_state import RunState, Tree, difference
from psdist.monitoring.run_summary import Point, RunCurves
from psdist.off_loop import on_loop
from psdist.security import roles
from psdist.security.roles import Role
from psdist.security.tokens import Audience, Verifier
from psdist.settings.config import DashboardEndpoint
from psdist.v1 import scheduler_pb2 as pb
from psdist.wire import limits

logger = logging.getLogger("psdist.scheduler")

_ANSWER_SECONDS: Final = 2.0
_CLOSE_SECONDS: Final = 1.0
#: Least time between two readings while somebody looks, and the time otherwise: curves are kept from the start.
_INTERVAL_SECONDS: Final = 0.5
_IDLE_SECONDS: Final = 20.0
_LOOP_SHARE: Final = 0.02
#: Share of the time for which this thread prepares readings, while it takes the interpreter from the scheduler's.
_THREAD_SHARE: Final = 0.1


class DashboardServer:
    """The dashboard at an endpoint. Made and closed on the scheduler's event loop.

    read: returns a reading with the samples after a number; runs on that loop.
    key: follows from the endpoint's token. It opens the dashboard besides that, unless a file has the key of links.

    Raises ConfigurationError if the port cannot be bound, InsecureBindError for a host beyond this machine without a
    token, or without TLS or a permission to do so.
    """

    def __init__(self, endpoint: DashboardEndpoint, key: str, read: Callable[[int], Reading]) -> None:
        token, file = endpoint.credentials.token, endpoint.key_file
        if not addresses.is_loopback(endpoint.host) and not token:
            raise InsecureBindError(
                f"--dashboard-host {endpoint.host} would show the run to everybody who can reach it: set PSDIST_TOKEN, "
                "or leave the dashboard on this machine"
            )
        use = f"--dashboard-host {endpoint.host} serves the dashboard"
        self._context = endpoint.credentials.web_context(endpoint.host, use)
        self._scheduler_loop = asyncio.get_running_loop()
        self._read = read
        self._socket = _listening(endpoint)
        port = self._socket.getsockname()[1]
        host = endpoint.host
        if addresses.is_wildcard(host):
            named = addresses.parse_address(endpoint.advertise)[0] if endpoint.advertise else ""
            host = addresses.own_address() if not named or addresses.is_loopback(named) else named
        self.address = addresses.format_address(host, port)
        current = None if file is None else partial(dashboard.read_key, file)
        self._access = Access(token, key, port, current=current, is_secure=self.is_secure)
        self._logs = endpoint.logs
        self._server: uvicorn.Server | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="dashboard", daemon=True)
        self._thread.start()

    @property
    def is_secure(self) -> bool:
        """True if the port speaks TLS."""
        return self._context is not None

    def close(self) -> None:
        """Stop serving. A server that does not stop ends with the process."""
        self._closed.set()
        if self._server is not None:
            self._server.should_exit = self._server.force_exit = True
        self._thread.join(_CLOSE_SECONDS)

    def _serve(self) -> None:
        try:
            asyncio.run(self._run())
        except Exception:  # The run continues without its dashboard.
            logger.exception("the dashboard ended")
        finally:
            self._socket.close()

    async def _run(self) -> None:
        feed = Feed(self._ask, has_logs=self._logs is not None)
        config = uvicorn.Config(
            application(feed, self._access, self._logs),
            http=_BrowserConnection,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="error",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=int(limits.DASHBOARD_STALL_SECONDS),
            h11_max_incomplete_event_size=limits.DASHBOARD_REQUEST_BYTES_MAX,
        )
        config.load()
        config.ssl = None if self._context is None else _renewing(self._context)
        self._server = uvicorn.Server(config)
        reading = asyncio.create_task(feed.run())
        try:
            if not self._closed.is_set():
                await self._server.serve(sockets=[self._socket])
        finally:
            reading.cancel()

    async def _ask(self, after: int) -> Reading:
        """Return a reading from the scheduler's loop. Raises TimeoutError if that does not answer."""
        answer = on_loop(self._scheduler_loop, partial(self._read, after))
        return await asyncio.wait_for(asyncio.wrap_future(answer), _ANSWER_SECONDS)


def _renewing(current: Callable[[], ssl.SSLContext]) -> ssl.SSLContext:
    """Return a TLS context that uses the certificate of the time of each connection."""
    context = current()

    def use_newest(connection: ssl.SSLObject | ssl.SSLSocket, name: str | None, first: ssl.SSLContext) -> None:
        connection.context = current()

    context.sni_callback = use_newest
    return context


def _listening(endpoint: DashboardEndpoint) -> socket.socket:
    if endpoint.descriptor is None:
        return listen(endpoint.host, endpoint.port)
    try:
        return socket.socket(fileno=endpoint.descriptor)
    except OSError as error:
        raise ConfigurationError(f"--dashboard-fd {endpoint.descriptor} is no socket: {error.strerror}") from None


class _BrowserConnection(H11Protocol):
    """One connection of a browser. It is broken if it is one too many, makes no progress, or sends a malformed body."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > limits.DASHBOARD_CONNECTIONS_MAX:
            transport.abort()
            return
        self._watch(0, None)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Refuse malformed bytes. The request before them may be answered already, or at this moment: uvicorn would log
        a traceback for both."""
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        try:
            super().send_400_response(msg)
        except h11.LocalProtocolError:  # The answer has begun.
            self.transport.close()

    def _watch(self, unsent_before: int, awaiting_before: tuple[bool, Any] | None) -> None:
        """Look whether the connection makes progress.

        unsent_before: bytes that it had not sent at the last look; 0 at the first one. awaiting_before: whether it
        awaited a request then, and after which one; a request that never ends must not hold its place.
        """
        unsent: int = self.transport.get_write_buffer_size()
        awaiting = (not unsent and (self.cycle is None or self.cycle.response_complete), self.cycle)
        if unsent >= unsent_before > 0 or (awaiting[0] and awaiting == awaiting_before):
            self.transport.abort()
            return
        self._timer = self.loop.call_later(limits.DASHBOARD_STALL_SECONDS, self._watch, unsent, awaiting)


# --- the feed ---------------------------------------------------------------------------------------------------------


class Reading(NamedTuple):
    """Part of the run that the scheduler's loop reads for the dashboard.

    samples: those after the asked one.
    seconds: how long it took.
    curves: those of the whole run, in the first reading.
    """

    status: pb.GetStatusResponse
    samples: list[pb.RunSample]
    seconds: float
    curves: RunCurves | None = None


#: Returns a reading with the samples after a number. Raises TimeoutError if the scheduler does not answer.
Read = Callable[[int], Awaitable[Reading]]


class Feed:
    """The newest state of the run, with the difference to the one before it. has_logs: True if the page may ask for
    logs."""

    def __init__(self, read: Read, *, has_logs: bool = False) -> None:
        self._read = read
        self._has_logs = has_logs
        self._run = RunState()
        self._state: Tree = {}
        self._number = 0
        self._time = 0.0
        self._change = b""
        self._whole = b""
        self._answered = 0.0
        self._has_failed = False
        self._changed = asyncio.Event()
        self._wanted = asyncio.Event()
        self.readers = 0

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Count a reader during a block. The run is read while there are any."""
        self.readers += 1
        self._wanted.set()
        try:
            yield
        finally:
            self.readers -= 1
            if not self.readers:
                self._wanted.clear()

    async def run(self) -> None:
        """Read the run forever."""
        self._answered = _now()
        while True:
            pause = await self._refresh()
            if self.readers:
                await asyncio.sleep(pause)
            else:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._wanted.wait(), _IDLE_SECONDS)

    @property
    def members(self) -> frozenset[str]:
        """Ids of the run's members."""
        return frozenset(self._state.get("workers", ())) | frozenset(self._state.get("servers", ()))

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the whole state, and then what changes, as server-sent events. The first is a new reading: while
        nobody looked, the state has become old."""
        seen = -1
        await self._changed.wait()
        while True:
            if self._number and seen == self._number - 1:
                yield self._change
            elif self._number:
                yield self._whole_event()
            seen = self._number
            while seen == self._number:
                await self._changed.wait()

    async def _refresh(self) -> float:
        """Read the run once and publish it. Returns the time until the next reading."""
        try:
            reading = await self._read(self._run.last_sample)
            began = _now()
            status = status_json(reading.status)
            points = self._run.add_samples(reading.samples, status, reading.curves)
            state = self._run.state(status)
            state["run"]["logs"] = self._has_logs
        except Exception as error:  # The page keeps its last state.
            if not isinstance(error, TimeoutError) and not self._has_failed:
                self._has_failed = True
                logger.exception("the dashboard cannot show the run (logged once)")
            self._publish({**self._state, "unanswered": round(_now() - self._answered)}, [], self._time)
            return _INTERVAL_SECONDS
        self._answered = _now()
        self._publish(state, points, reading.status.time)
        return max(_INTERVAL_SECONDS, reading.seconds / _LOOP_SHARE, (_now() - began) / _THREAD_SHARE)

    def _publish(self, state: Tree, points: list[Point], time: float) -> None:
        self._number += 1
        patch = difference(self._state, state)
        self._state, self._time, self._whole = state, time, b""
        self._change = _event({"time": round(time, 1), "change": patch, **({"points": points} if points else {})})
        self._changed.set()
        self._changed = asyncio.Event()

    def _whole_event(self) -> bytes:
        if not self._whole:
            recent, whole = list(self._run.recent), self._run.whole.points
            # A run of less than five minutes has one curve.
            curves = {"recent": recent, "whole": whole if len(whole) != len(recent) else []}
            self._whole = _event({"time": round(self._time, 1), "state": self._state, **curves})
        return self._whole


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def _now() -> float:
    return asyncio.get_running_loop().time()


# --- pages ------------------------------------------------------------------------------------------------------------

_HEADERS: Final = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


class _EventStream(StreamingResponse):
    """Server-sent events of a feed, until the browser goes away, or may not read any more."""

    def __init__(self, feed: Feed, may_read: Callable[[], bool]) -> None:
        super().__init__(self._events(feed, may_read), media_type="text/event-stream")
        self._feed = feed

    @staticmethod
    async def _events(feed: Feed, may_read: Callable[[], bool]) -> AsyncIterator[bytes]:
        async for event in feed.events():
            if not may_read():  # The key was revoked, or the token has expired.
                return
            yield event

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._feed.reading():
            await super().__call__(scope, receive, send)


def application(feed: Feed, access: Access, logs: Path | None = None) -> ASGIApp:
    """Return the dashboard's application. logs: directory of the members' logs."""

    def refusal(request: Request) -> Response | None:
        if not access.may_read(request.headers):
            return _refused()
        if feed.readers >= limits.DASHBOARD_READERS_MAX:
            return Response(f"{feed.readers} pages follow this run already: close one", status_code=503)
        return None

    async def session(request: Request) -> Response:
        if request.method == "GET":
            return refusal(request) or Response(status_code=204)
        cookie = access.set_cookie(request.headers.get("authorization", ""))
        return _refused() if cookie is None else Response(status_code=204, headers={"set-cookie": cookie})

    async def events(request: Request) -> Response:
        return refusal(request) or _EventStream(feed, partial(access.may_read, request.headers))

    async def log(request: Request) -> Response:
        if not access.may_read(request.headers):
            return _refused()
        # Nothing of the request is part of a path but the id of a member, and no other program names these.
        name = request.path_params["member"]
        if logs is None or name not in feed.members | {"scheduler"} or not _LOGGED.fullmatch(name):
            return Response("this run has no log of that name", status_code=404)
        try:
            lines = await asyncio.to_thread(last_lines, logs / f"{name}.log")
        except FileNotFoundError:
            return Response(f"{name} has written no line on the scheduler's host", status_code=404)
        except OSError as error:
            return Response(f"no log of {name} where the scheduler runs: {error.strerror}", status_code=404)
        return Response(lines, media_type="text/plain; charset=utf-8")

    routes = [Route("/" if name == "index.html" else f"/{name}", _file(name)) for name in dashboard.FILES]
    routes += [Route("/session", session, methods=["GET", "POST"]), Route("/events", events, methods=["GET"])]
    routes += [Route("/logs/{member}", log, methods=["GET"])]
    return _guarded(Starlette(routes=routes), access)


def _file(name: str) -> Callable[[Request], Awaitable[Response]]:
    body = dashboard.content(name)

    async def answer(request: Request) -> Response:
        return Response(body, media_type=dashboard.FILES[name])

    return answer


#: Ids that psdist gives to members, and that the launcher names logs by.
_LOGGED: Final = re.compile(r"(worker|server)-[0-9]{1,9}|scheduler")
_LOG_LINES: Final = 50
_LOG_BYTES: Final = 64 << 10


def last_lines(path: Path) -> bytes:
    """Return the last lines of a log, at most ``_LOG_LINES`` of its last ``_LOG_BYTES``. Raises OSError."""
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        info = os.fstat(file.fileno())
        if not stat.S_ISREG(info.st_mode):
            raise OSError(errno.EINVAL, "not a file")
        file.seek(max(0, info.st_size - _LOG_BYTES))
        return b"".join(file.read(_LOG_BYTES).splitlines(keepends=True)[-_LOG_LINES:])


def _refused() -> Response:
    return Response("this needs the token of the run", status_code=401, headers={"www-authenticate": "Bearer"})


def _guarded(app: ASGIApp, access: Access) -> ASGIApp:
    """Return ``app`` behind the check of the header ``Host``, with headers that restrict the page in all answers."""

    async def guard(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                added = [(name.encode(), value.encode()) for name, value in _HEADERS.items()]
                message = {**message, "headers": [*message.get("headers", ()), *added]}
            await send(message)

        if access.names_host(Headers(scope=scope).get("host", "")):
            await app(scope, receive, send_with_headers)
        else:
            refusal = Response("without a token, name this port by its address", status_code=403)
            await refusal(scope, receive, send_with_headers)

    return guard


# --- access -----------------------------------------------------------------------------------------------------------
#
# A run's token, or the key of a link, is exchanged for a cookie that holds a key; a token of a role, for one that holds
# the token. So the cookie ends with the token, or with the key that a file has. Without a token only this machine
# reaches the port, and requests must name it by an address, so that a page in a browser cannot reach it by a name of
# its own.


class Access:
    """The rules of one dashboard. token, key: empty if the run has no token.

    port: cookies belong to a host, so each dashboard of a host has its own name for them.
    current: returns the key of links if it can be replaced; None if it is ``key``.
    is_secure: True if the port speaks TLS.
    """

    def __init__(
        self, token: str, key: str, port: int, *, current: Callable[[], str] | None = None, is_secure: bool = False
    ) -> None:
        self._verifier = Verifier(token, Audience.SCHEDULER)
        self._key = key.encode()
        self._current = current
        self._attributes = f"Path=/; HttpOnly; SameSite=Strict{'; Secure' if is_secure else ''}"
        self.cookie = f"psdist-dashboard-{port}"

    def names_host(self, host: str) -> bool:
        """Return True if the header ``Host`` may be this."""
        return not self._verifier.is_open or addresses.is_named_by_address(host)

    def set_cookie(self, authorization: str) -> str | None:
        """Return the header ``Set-Cookie`` for a header ``Authorization``; None if that is wrong."""
        scheme, _, given = authorization.partition(" ")
        is_link = self._current is not None and hmac.compare_digest(given.strip().encode(), self._key)
        is_bearer = scheme.lower() == "bearer" and not self._verifier.is_open and not is_link  # a cookie alone has it
        held = self._held(given.strip()) if is_bearer else ""
        return f"{self.cookie}={held}; {self._attributes}" if held else None

    def may_read(self, headers: Mapping[str, str]) -> bool:
        """Return True if a request with these headers may read the state of the run."""
        if self._verifier.is_open or self.set_cookie(headers.get("authorization", "")) is not None:
            return True
        # Not http.cookies: that drops all cookies if one of them is malformed, and other ports of a host share theirs.
        given = (part.strip().partition("=") for part in headers.get("cookie", "").split(";"))
        # The run's own token is in no cookie that was set here.
        return any(name == self.cookie and value and self._held(value) == value for name, _, value in given)

    def _held(self, shown: str) -> str:
        """Return the content of the cookie for a browser that has shown the key or a token; empty if neither opens the
        dashboard."""
        if hmac.compare_digest(shown.encode(), self._key):
            return self._key.decode()
        if self._current is not None and hmac.compare_digest(shown.encode(), (key := self._current()).encode()):
            return key
        try:
            role = self._verifier.role(shown)
            roles.check(role, roles.DASHBOARD_PAGES)
        except (UnauthenticatedError, PermissionDeniedError):
            return ""
        return self._key.decode() if role is Role.ALL else shown

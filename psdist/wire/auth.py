"""Acceptance of calls by tokens and certificates, and the connections of strangers, on which no call with the run's
token has arrived.

The caller's token, sent in the metadata of every call, proves its role, and the table of ``psdist.security.roles`` says
which calls the role may make. Both are checked before the body is read. A certificate that states a role binds its
holder to that role, whatever its token proves. gRPC shows a certificate to handlers alone, so ``service_handler``
applies it before it parses a request (``apply_certificate``). A certificate without a role proves no more than that its
holder may connect. A handler that must know the caller asks ``caller``, because some requests claim a role in their
body.

Refused calls are answered by a stream-shaped handler, because gRPC reads and parses the request of a unary handler
before the handler runs. The health check is open to probes without a token; its only answer is "serving". Other methods
of the health service need the token, because they store data for the caller. Calls that need no token are paced
(``limits.Pacer``). A stranger who repeats them in a tight loop waits for answers, and members keep the event loop.
Calls with a token of the run are never paced.

gRPC's own limit counts all connections, whoever opens them, so that one address could use them up. Here each address
has a limit of its own: one more connection closes its oldest. Members' connections are never closed, so strangers that
share an address with members keep no connected member out. ``Strangers`` decides and is pure. gRPC offers no way to
close a connection of a server. But its socket is a descriptor of this process: ``shut_down`` ends the connection on a
duplicate of it, and gRPC sees the end. On systems without ``/proc`` nothing is closed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import suppress
from contextvars import ContextVar
from functools import partial
from typing import Any, Final, NamedTuple
from urllib.parse import unquote

import grpc
import grpc.aio

from psdist.errors import LimitExceededError, PermissionDeniedError, PsdistError, UnauthenticatedError
from psdist.security import roles
from psdist.security.roles import CERTIFICATE_ROLES, Role, is_role_uri, parse_role_uri
from psdist.security.tokens import Audience, Verifier, present
from psdist.wire import limits, status
from psdist.wire.limits import LogPacer, Pacer

KEY: Final = "authorization"
_SCHEME: Final = "Bearer "
#: gRPC's name for the SANs of a caller's certificate.
_NAMES: Final = "x509_subject_alternative_name"

logger = logging.getLogger("psdist.auth")

#: Role of the caller whose call the running task handles. A call without an interceptor comes from this process.
_CALLER: ContextVar[Role] = ContextVar("psdist_caller", default=Role.ALL)


def metadata(token: str, audience: Audience = Audience.SCHEDULER) -> tuple[tuple[str, str], ...]:
    """Return call metadata that proves to ``audience`` what ``token`` proves, or no metadata if the token is empty."""
    return ((KEY, _SCHEME + present(token, audience)),) if token else ()


def caller() -> Role:
    """Return the role of the caller whose call the running task handles."""
    return _CALLER.get()


def apply_certificate(context: grpc.aio.ServicerContext, call: str, run_id: str) -> None:
    """Take the caller's role from its certificate, if that states one. Arguments and errors as for
    ``certificate_role``."""
    names = [name.decode("latin-1") for name in context.auth_context().get(_NAMES, [])]
    if (role := certificate_role(names, caller(), call, run_id)) is not None:
        _CALLER.set(role)


def certificate_role(names: Sequence[str], proven: Role, call: str, run_id: str) -> Role | None:
    """Return the role that a certificate states, or None if it states none.

    names: its SANs.
    proven: the role that the caller's token proves.
    call: full name of the method.
    run_id: the run served here.

    Raises PermissionDeniedError if the certificate is for another run or of an unknown role, the token is of another
    role, or the role may not make the call.
    """
    uris = [name for name in names if is_role_uri(name)]
    if not uris:
        return None
    # A misspelt role must not give more rights than the right one.
    if (stated := parse_role_uri(uris[0])) is None:
        raise PermissionDeniedError(
            f"the certificate states {uris[0]!r:.120}, which is no role: it must be psdist://RUN/ROLE, with a ROLE of "
            f"{', '.join(CERTIFICATE_ROLES)} (psdist certs issue)"
        )
    run, role = stated[0], Role(stated[1])
    if run not in ("", run_id):
        raise PermissionDeniedError(
            f"the certificate is for run {run!r:.80}, and this is run {run_id!r}: use one of this run (psdist certs "
            "issue)"
        )
    if proven not in (Role.ALL, role):
        raise PermissionDeniedError(
            f"the certificate is of role {role.value}, and the token of role {proven.value}: use both of one role",
            role=role.value,
        )
    roles.check(role, call)
    return role


class RightsInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    """Server interceptor that refuses calls which their callers may not make."""

    def __init__(self, verifier: Verifier) -> None:
        self._verifier = verifier
        self._busy = grpc.stream_stream_rpc_method_handler(_refuse_probe)
        self._refused = Pacer(limits.REFUSALS_PER_SECOND, limits.REFUSALS_BURST, limits.REFUSALS_HELD_MAX)
        self._probes = Pacer(limits.PROBES_PER_SECOND, limits.PROBES_PER_SECOND, limits.PROBES_HELD_MAX)
        self._strangers_log = LogPacer(limits.STRANGERS_LOG_SECONDS)
        self._denials_log = LogPacer(limits.STRANGERS_LOG_SECONDS)

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        """Pass the call to its handler, or answer it with the refusal."""
        method = handler_call_details.method
        try:
            role = self._verifier.role(_shown(handler_call_details))
            roles.check(role, method)
        except UnauthenticatedError as error:
            if method != roles.HEALTH_CHECK:
                return _answer(self._refuse, error)
            return await continuation(handler_call_details) if await self._may_probe() else self._busy
        except PsdistError as error:
            return _answer(self._deny, error)
        _CALLER.set(role)  # Each call has a task of its own, which runs its handler, too.
        return await continuation(handler_call_details)

    async def _may_probe(self) -> bool:
        """Wait for the turn of a health check. False if too many are waiting."""
        wait = self._probes.wait_seconds(asyncio.get_running_loop().time())
        if wait:
            await asyncio.sleep(wait)
        return wait is not None

    async def _refuse(self, error: PsdistError, _: object, context: grpc.aio.ServicerContext) -> None:
        now = asyncio.get_running_loop().time()
        if count := self._strangers_log.note(now):
            logger.warning("refused %d calls without a token of this run, the last from %s", count, context.peer())
        # If the queue is full, refusing immediately is the cheapest answer.
        if wait := self._refused.wait_seconds(now):
            await asyncio.sleep(wait)
        await status.abort(context, error)

    async def _deny(self, error: PsdistError, _: object, context: grpc.aio.ServicerContext) -> None:
        if count := self._denials_log.note(asyncio.get_running_loop().time()):
            logger.warning("denied %d calls, the last from %s: %s", count, context.peer(), error.message)
        await status.abort(context, error)


def _shown(details: grpc.HandlerCallDetails) -> str:
    """Return the token in a call's metadata; empty without one."""
    given = dict(details.invocation_metadata or ()).get(KEY, "")
    text = given.decode("latin-1") if isinstance(given, bytes) else given
    return text[len(_SCHEME) :] if text.startswith(_SCHEME) else ""


def _answer(
    refuse: Callable[[PsdistError, object, grpc.aio.ServicerContext], Awaitable[None]], error: PsdistError
) -> Any:
    """Return a handler that answers a call with ``error`` before its request is read."""
    return grpc.stream_stream_rpc_method_handler(partial(refuse, error))


async def _refuse_probe(request_iterator: object, context: grpc.aio.ServicerContext) -> None:
    await status.abort(
        context,
        LimitExceededError(
            f"{limits.PROBES_HELD_MAX} health checks without the token of this run are waiting, which is the limit: "
            "probe less often"
        ),
    )


# --- connections ------------------------------------------------------------------------------------------------------

_DESCRIPTORS: Final = "/proc/self/fd"
_MAPPED: Final = "::ffff:"
#: Seconds between two looks at the open connections, and looks between two complete ones if there are few.
_SWEEP_SECONDS: Final = 1.0
_SWEEPS_WHILE_FEW: Final = 60


class RemoteEnd(NamedTuple):
    """The other end of a connection."""

    host: str
    port: int


def parse_peer(text: str) -> RemoteEnd | None:
    """Return the peer that gRPC calls ``ipv4:host:port`` or ``ipv6:[host]:port``; None for another kind."""
    kind, _, address = unquote(text).partition(":")
    host, _, port = address.rpartition(":")
    if kind not in ("ipv4", "ipv6") or not port.isdecimal():
        return None
    return _peer(host.strip("[]"), int(port))


def _peer(host: str, port: int) -> RemoteEnd:
    return RemoteEnd(host.removeprefix(_MAPPED), port)


class Strangers:
    """Decides which connections are closed."""

    def __init__(self) -> None:
        #: Members' connections, and the sweep that saw them last.
        self._members: dict[RemoteEnd, int] = {}
        #: Other connections, in order of arrival.
        self._others: dict[RemoteEnd, None] = {}
        self._sweeps = 0

    @property
    def member_count(self) -> int:
        """Number of members' connections, with those that ended since the last sweep."""
        return len(self._members)

    def admit(self, peer: RemoteEnd) -> None:
        """Note a call with the token."""
        self._members[peer] = self._sweeps

    def surplus(self, connected: Sequence[RemoteEnd]) -> list[RemoteEnd]:
        """Return those of the open connections that are to be closed: the oldest of each address with too many."""
        self._sweeps += 1
        is_open = set(connected)
        self._members |= dict.fromkeys(self._members.keys() & is_open, self._sweeps)
        # A connection that was admitted while the open ones were listed may be missing in that list.
        self._members = {peer: seen for peer, seen in self._members.items() if seen >= self._sweeps - 1}
        arrived = dict.fromkeys([*(peer for peer in self._others if peer in is_open), *connected])
        self._others = dict.fromkeys(peer for peer in arrived if peer not in self._members)
        by_host: defaultdict[str, list[RemoteEnd]] = defaultdict(list)
        for peer in self._others:
            by_host[peer.host].append(peer)
        return [peer for peers in by_host.values() for peer in peers[: -limits.STRANGERS_PER_ADDRESS_MAX]]


class ConnectionGuard:
    """Limits the connections of strangers to a port of this process, which ``watch`` names. Belongs to an event
    loop."""

    def __init__(self) -> None:
        self._strangers = Strangers()
        self._task: asyncio.Task[None] | None = None
        self._log = LogPacer(limits.STRANGERS_LOG_SECONDS)

    def admit(self, peer: str) -> None:
        """Note a call with the token. peer: as gRPC names it."""
        if (found := parse_peer(peer)) is not None:
            self._strangers.admit(found)

    def watch(self, port: int) -> None:
        """Guard the connections to ``port``, until ``stop``."""
        self._task = asyncio.create_task(self._run(port))

    def stop(self) -> None:
        """End the guard."""
        if self._task is not None:
            self._task.cancel()

    async def _run(self, port: int) -> None:
        sweeps = 0
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            sweeps += 1
            # The connections of a thousand members are not looked at each second: that took a tenth of the scheduler's
            # work at rest.
            unknown = _count_descriptors() - self._strangers.member_count
            if unknown > limits.STRANGERS_PER_ADDRESS_MAX or sweeps % _SWEEPS_WHILE_FEW == 0:
                # In a thread: 16,000 connections take a fraction of a second.
                surplus = self._strangers.surplus(await asyncio.to_thread(peers, port))
                self._note(await asyncio.to_thread(shut_down, port, surplus))

    def _note(self, closed: Sequence[RemoteEnd]) -> None:
        now = asyncio.get_running_loop().time()
        for peer in closed:
            if count := self._log.note(now):
                logger.warning(
                    "closed %d connections without a call with the token of this run, the last from %s: %d of one "
                    "address are the limit", count, peer.host, limits.STRANGERS_PER_ADDRESS_MAX,
                )  # fmt: skip


def peers(port: int) -> list[RemoteEnd]:
    """Return the other ends of the connections to ``port`` of this process."""
    return [peer for _, peer in _connections(port)]


def shut_down(port: int, closing: Collection[RemoteEnd]) -> list[RemoteEnd]:
    """End these connections to ``port``. Returns those that were open."""
    found = []
    wanted = set(closing)
    for connection, peer in _connections(port) if wanted else ():
        if peer in wanted:
            with suppress(OSError):  # It may have ended.
                connection.shutdown(socket.SHUT_RDWR)
            found.append(peer)
    return found


def _count_descriptors() -> int:
    try:
        return len(os.listdir(_DESCRIPTORS))
    except OSError:
        return 0


def _connections(port: int) -> Iterator[tuple[socket.socket, RemoteEnd]]:
    """Yield a duplicate of the socket of each connection to ``port``, and its other end. A descriptor that is reused
    meanwhile is harmless: only the duplicate is asked for its ends."""
    try:
        names = os.listdir(_DESCRIPTORS)
    except OSError:
        return
    for name in names:
        with suppress(OSError):  # It was closed, is no socket, or is not connected.
            if not os.readlink(f"{_DESCRIPTORS}/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as duplicate:
                if duplicate.family in (socket.AF_INET, socket.AF_INET6) and duplicate.getsockname()[1] == port:
                    yield duplicate, _peer(*duplicate.getpeername()[:2])

"""Authentication and authorization of calls: the caller's token, sent in the metadata of every call, proves its role,
and the table of ``psdist.security.roles`` says which calls the role may make. Both are checked before the body is read.

Refused calls are answered by a stream-shaped handler, because gRPC reads and parses the request of a unary handler
before the handler runs. The health check is open to probes without a token; its only answer is "serving". Other methods
of the health service need the token, because they store data for the caller.

Calls that need no token are paced (``backoff``). A stranger who repeats them in a tight loop waits for answers, and
members keep the event loop. Calls with a token of the run are never paced.

A certificate that states a role binds its holder to that role, whatever its token proves. gRPC shows a certificate to
handlers alone, so ``service_handler`` applies it before it parses a request (``apply_certificate``). A certificate
without a role proves no more than that its holder may connect.

A handler that must know the caller asks ``caller``, because some requests claim a role in their body.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any, Final

import grpc
import grpc.aio

from psdist.errors import LimitExceededError, PermissionDeniedError, PsdistError, UnauthenticatedError
from psdist.security import roles
from psdist.security.roles import CERTIFICATE_ROLES, Role, is_role_uri, parse_role_uri
from psdist.security.tokens import Audience, Verifier, present
from psdist.wire import limits, status
from psdist.wire.backoff import LogPacer, Pacer

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

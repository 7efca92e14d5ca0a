"""Links between workers: the port on which a worker accepts them.

A worker dials each worker that it sends to. A link carries frames of the dialing worker alone, so that one that leaves
after its last frame loses none of them. The first frame proves that its sender is a worker of the run; the answer is
``welcome``. With TLS both workers have shown certificates before.

Invariants: Nothing but the first frame is read before its proof was compared in constant time. A link that was accepted
before this worker uses it is not read, and waits.

``peer_link`` is the dialing end. ``psdist.collectives`` uses the links.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final, Protocol

from psdist import addresses
from psdist.errors import (
    ClosedError,
    LimitExceededError,
    PeerUnreachableError,
    PsdistError,
    WrongRunError,
)
from psdist.link.frame_connection import FrameConnection, MessageReceiver, certificate_names
from psdist.link.listening import Listener
from psdist.security import roles
from psdist.security.roles import Role
from psdist.security.tls import Credentials
from psdist.security.tokens import Audience, Verifier
from psdist.v1 import worker_pb2 as pb
from psdist.wire import auth, limits

logger = logging.getLogger("psdist")

_NOTHING: Final = memoryview(b"")
#: Time limit for a connection to the scheduler, to find out where it listens.
_PROBE_SECONDS: Final = 1.0


class PeerFrames(Protocol):
    """Consumer of accepted links."""

    def accepted(self, hello: pb.PeerHello, connection: FrameConnection) -> None:
        """Take over a link. Raises PsdistError to refuse it."""

    def close(self, error: PsdistError) -> None:
        """End all links, because of ``error``."""


class PeerListener(Listener[pb.PeerFrame]):
    """Port of a worker for links of other workers. With neither a token nor TLS it accepts all (loopback only)."""

    message_type = pb.PeerFrame
    opening_bytes = limits.PEER_OPENING_BYTES

    def __init__(self, credentials: Credentials) -> None:
        super().__init__(credentials.tls)
        #: host:port for other workers; empty if there is none.
        self.address = ""
        self.credentials = credentials
        self.verifier = Verifier(credentials.token, Audience.WORKER)
        self._consumer: PeerFrames | None = None
        #: Links that nobody uses yet, by worker.
        self._waiting: dict[str, tuple[pb.PeerHello, FrameConnection]] = {}
        #: Links that arrived before the key that their proofs are checked by. The others learn this worker's address
        #: from the map, which may be quicker than the answer to its registration.
        self._unchecked: list[tuple[pb.PeerHello, FrameConnection]] = []

    async def open_towards(self, scheduler: str, *, spans_hosts: bool, name: str = "") -> None:
        """Listen at the address by which this host reaches ``scheduler`` (host:port, or several).

        spans_hosts: True if other hosts have workers, which cannot reach a loopback address.
        name: name or address by which they reach it instead, such as that in its certificate.

        Raises OSError if the scheduler's name does not resolve now, or if it has to be asked and does not answer.
        """
        peer = (await addresses.look_up_any(scheduler))[0]
        host = addresses.route_source(peer) or addresses.loopback()
        if spans_hosts and addresses.is_loopback(host) and (own := await _beyond_loopback(scheduler)):
            host = own
        if not addresses.is_loopback(host) and self.credentials.tls is None:
            if not self.credentials.token:
                self.log_unavailable(host, "beyond loopback the run needs a token or TLS")
                return
            if not self.credentials.insecure:
                self.log_unavailable(host, "beyond loopback a token needs TLS, or --insecure (PSDIST_INSECURE=1)")
                return
        await self.open(host)
        self.address = addresses.format_address(name or host, self.port) if self.port else ""

    def serve(self, consumer: PeerFrames) -> None:
        """Hand accepted links, including those that wait, to ``consumer``."""
        self._consumer = consumer
        waiting, self._waiting = self._waiting, {}
        for hello, connection in waiting.values():
            connection.set_receiver(_Refused())
            self._hand_over(hello, connection)
            connection.release()

    def close(self) -> None:
        """Stop accepting links, and close all."""
        super().close()
        if self._consumer is not None:
            self._consumer.close(ClosedError("the client is closed"))
        for _, connection in (*self._waiting.values(), *self._unchecked):
            connection.abort()
        self._waiting.clear()
        self._unchecked.clear()

    def identify(self, opening: pb.PeerFrame) -> Callable[[FrameConnection], None]:
        """Check that a link comes from a worker. Raises UnauthenticatedError and PermissionDeniedError."""
        hello = opening.hello
        if not self.verifier.is_ready:
            if len(self._unchecked) >= limits.UNIDENTIFIED_MAX:
                raise LimitExceededError(f"{limits.UNIDENTIFIED_MAX} links wait for this worker to be registered")
            return lambda connection: self._hold_unchecked(hello, connection)
        role = self._check(hello)
        return lambda connection: self._take(hello, role, connection)

    def _check(self, hello: pb.PeerHello) -> Role:
        role = self.verifier.role(hello.token)
        roles.check(role, roles.PEER_LINK)
        hello.token = ""
        return role

    def _take(self, hello: pb.PeerHello, role: Role, connection: FrameConnection) -> None:
        """Keep a link whose token proved ``role``, if its certificate does not state another one. Raises
        PermissionDeniedError."""
        auth.certificate_role(certificate_names(connection), role, roles.PEER_LINK, hello.run_id)
        self._keep(hello, connection)

    def _hold_unchecked(self, hello: pb.PeerHello, connection: FrameConnection) -> None:
        self._unchecked.append((hello, connection))
        connection.set_receiver(_Refused())
        connection.hold()

    def registered(self) -> None:
        """Check the links that arrived before this worker had its key."""
        unchecked, self._unchecked = self._unchecked, []
        for hello, connection in unchecked:
            try:
                self._take(hello, self._check(hello), connection)
            except PsdistError as error:
                self.note_stranger(error.message)
                connection.abort()
            else:
                connection.release()

    def _keep(self, hello: pb.PeerHello, connection: FrameConnection) -> None:
        if self._consumer is not None:
            self._hand_over(hello, connection)
            return
        name = hello.sender.worker_id
        if name not in self._waiting and len(self._waiting) >= limits.MEMBERS_MAX:
            raise LimitExceededError(f"{len(self._waiting)} links of other workers wait to be used, which is the limit")
        if name in self._waiting:
            self._waiting.pop(name)[1].abort()
        self._waiting[name] = hello, connection
        connection.set_receiver(_Refused())
        connection.hold()

    def _hand_over(self, hello: pb.PeerHello, connection: FrameConnection) -> None:
        assert self._consumer is not None
        try:
            self._consumer.accepted(hello, connection)
        except PsdistError as error:
            self.note_stranger(error.message)
            connection.abort()
            return
        connection.send(pb.PeerFrame(welcome=True).SerializeToString())

    def log_unavailable(self, host: str, reason: str) -> None:
        logger.warning("this worker accepts no links of other workers (%s: %s): it has no collectives", host, reason)

    def log_strangers(self, count: int, reason: str) -> None:
        logger.info("closed %d links that were not of this run's workers; the last: %s", count, reason)


async def _beyond_loopback(scheduler: str) -> str:
    """Return this host's address for other hosts; empty if the scheduler listens on loopback alone. Then all members
    are on this host, and none of them needs to be reached from outside. Raises OSError if no scheduler answers yet."""
    own = addresses.own_address()
    for host, port in map(addresses.parse_address, addresses.split_addresses(scheduler)):
        if await _accepts(host, port):
            return own if await _accepts(own, port) else ""
    raise ConnectionRefusedError(f"no scheduler answers at {scheduler}")


async def _accepts(host: str, port: int) -> bool:
    try:
        async with asyncio.timeout(_PROBE_SECONDS):
            _, writer = await asyncio.open_connection(host, port)
    except OSError:  # TimeoutError is an OSError.
        return False
    writer.close()
    return True


def check_hello(hello: pb.PeerHello, run_id: str, worker_id: str, incarnation: int) -> None:
    """Raise WrongRunError or PeerUnreachableError unless a link means this worker."""
    if hello.run_id != run_id:
        raise WrongRunError(f"a link is of run {hello.run_id!r:.80}, and this is run {run_id!r}")
    meant = hello.receiver
    if (meant.worker_id, meant.incarnation) != (worker_id, incarnation):
        raise PeerUnreachableError(
            f"a link is for {meant.worker_id!r:.80} in incarnation {meant.incarnation}, and this is {worker_id} in "
            f"incarnation {incarnation}"
        )


class _Refused(MessageReceiver[pb.PeerFrame]):
    """Receiver of a link that nobody uses."""

    message_type = pb.PeerFrame

    def on_message(self, message: pb.PeerFrame) -> None:
        raise ClosedError("the link is not in use")

    def connection_ended(self, error: PsdistError | None) -> None:
        pass

"""The server's side of one stream of slices, between the gRPC handler and the parameter store.

A call holds at most HELD_SLICES_MAX payloads that are not used yet. More stay in the network, which holds the sender
back. Answers queue up without their weights, which are read when the answer is written. So a slow reader costs no
memory.
"""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass, field

from psdist.errors import FencedError, PsdistError
from psdist.types import Identity
from psdist.wire import limits

_tokens = itertools.count(1)


def next_token() -> int:
    """A number that no slice of any call had before."""
    return next(_tokens)


@dataclass(frozen=True, slots=True)
class SliceAnswer:
    """A slice may be read (or was applied)."""

    index: int
    version: int
    ignored: bool = False
    staleness: int = 0


@dataclass
class Call:
    """One stream: who it is from, what it waits for, what it is to be told."""

    identity: Identity
    is_push: bool
    wants_weights: bool
    step: int = 0
    dtype: str = "float32"
    pull_dtype: str = "float32"
    abstain: bool = False
    grad_norm: float = 0.0
    #: The snapshot attempt that the push comes after; 0 for none.
    mark: int = 0
    #: Slices that were asked about and not answered, by token.
    outstanding: dict[int, int] = field(default_factory=dict)
    #: Why the oldest of them has waited for longer than REPORT_WAIT_SECONDS; "" if it has not.
    waiting_for: str = ""

    def __post_init__(self) -> None:
        self.slots = asyncio.Semaphore(limits.HELD_SLICES_MAX)
        self._answers: asyncio.Queue[SliceAnswer | PsdistError | None] = asyncio.Queue()
        self._asked_all = False

    def ask(self, index: int) -> int:
        """A token for one more slice."""
        token = next_token()
        self.outstanding[token] = index
        return token

    def answer(self, token: int, answer: SliceAnswer) -> None:
        """Tells the answer for ``token``."""
        del self.outstanding[token]
        self._answers.put_nowait(answer)
        self._end_if_done()

    def asked_all(self) -> None:
        """No more slices will be asked about."""
        self._asked_all = True
        self._end_if_done()

    def fail(self, error: PsdistError) -> None:
        """Ends the stream with ``error``, after the answers that are there already."""
        self._answers.put_nowait(error)

    def _end_if_done(self) -> None:
        if self._asked_all and not self.outstanding:
            self._answers.put_nowait(None)

    async def next_answer(self) -> SliceAnswer | None:
        """The next answer; None at the end of the stream. Raises the error that the call failed with, and TimeoutError
        after REPORT_WAIT_SECONDS without an answer."""
        if self._answers.empty():
            async with asyncio.timeout(limits.REPORT_WAIT_SECONDS):
                answer = await self._answers.get()
        else:
            answer = self._answers.get_nowait()
        self.waiting_for = ""
        if isinstance(answer, PsdistError):
            raise answer
        return answer


def fenced(identity: Identity) -> FencedError:
    """The error for a worker that the cluster map does not know any more."""
    return FencedError(
        f"{identity.worker_id} (incarnation {identity.incarnation}) is not a live member: its lease ended or it was "
        "replaced; start the worker anew",
        worker_id=identity.worker_id,
    )

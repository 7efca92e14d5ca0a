"""Synchronous collectives, which run on psdist's loop thread."""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from psdist.client.process import loop
from psdist.client.process.other_processes import ProcessBound
from psdist.collectives.compression import AllReduceCompression
from psdist.collectives.core.plans import Array
from psdist.collectives.group import AsyncWorkerGroup
from psdist.compression import Codec

T = TypeVar("T")


class Handle(Generic[T]):
    """Call under way, of ``async_op=True``. Its arrays belong to psdist until ``wait`` returns."""

    def __init__(self, started: loop.StartedCall[T]) -> None:
        self._started: loop.StartedCall[T] | None = started
        self._result: T | None = None

    def wait(self) -> T:
        """Wait for the call, and return its result or raise its error."""
        if self._started is not None:
            started, self._started = self._started, None
            self._result = started.result()
        return self._result  # type: ignore[return-value]  # set once the call has ended


class WorkerGroup(ProcessBound):
    """Workers that make the same calls in the same order. Made by ``Context.new_group``.

    A call ends when all ranks have made it. It ends with WorkerLostError if a rank is gone that it needs,
    CollectiveMismatchError if the ranks made different calls, and WaitTimeoutError after ``timeout`` seconds (None:
    never). Then all ranks raise the error, and the group has ended: ``reconfigure`` makes the
    next one, of the ranks that are left.

    Arrays are numpy's, of booleans, integers, floats (bfloat16 of ``ml_dtypes`` too) or complex numbers. ``out``
    receives the result; it may be ``array`` itself. Reductions are in rank order, so that all ranks get the same bytes,
    whatever arrives first: see docs/collectives.md.

    With ``async_op=True`` a call returns a ``Handle`` immediately. Calls of a group are carried out one after another.
    """

    def __init__(self, wrapped: AsyncWorkerGroup) -> None:
        self._async = wrapped
        self.ranks = wrapped.ranks
        self.rank = wrapped.rank
        self.size = wrapped.size
        #: Number of the group among those that were made of it by ``reconfigure``.
        self.epoch = wrapped.epoch

    @property
    def has_ended(self) -> bool:
        """True if an error has ended the group, or ``close``."""
        return self._async.has_ended

    @property
    def wrapped(self) -> AsyncWorkerGroup:
        """The asyncio group, for callers on psdist's loop."""
        return self._async

    def __repr__(self) -> str:
        return f"<Group of ranks {self.ranks}>"

    def all_reduce(
        self,
        array: ArrayLike,
        op: str = "sum",
        *,
        out: Array | None = None,
        timeout: float | None = None,
        compression: AllReduceCompression | Codec | str | None = None,
        async_op: bool = False,
    ) -> Any:
        """Return the reduction of all ranks' arrays.

        op: "sum", "avg", "product", "min", "max", "band", "bor" or "bxor".
        compression: how a float32 array is sent, for "sum" and "avg": an ``AllReduceCompression``, which adds the part
            that one call leaves out to the next; or a codec or its name, which drops this part.
        """
        reducing = self._async.all_reduce(array, op, out=out, timeout=timeout, compression=compression)
        return _run(reducing, async_op)

    def all_gather(
        self, array: ArrayLike, *, out: Array | None = None, timeout: float | None = None, async_op: bool = False
    ) -> Any:
        """Return all ranks' arrays, which have one shape, one after another along a new first axis."""
        return _run(self._async.all_gather(array, out=out, timeout=timeout), async_op)

    def broadcast(
        self,
        array: ArrayLike,
        src: int = 0,
        *,
        out: Array | None = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Return the array of rank ``src``. The other ranks give one of the same shape and dtype, which is not read."""
        return _run(self._async.broadcast(array, src, out=out, timeout=timeout), async_op)

    def reduce(
        self,
        array: ArrayLike,
        dst: int = 0,
        op: str = "sum",
        *,
        out: Array | None = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Return the reduction of all ranks' arrays at rank ``dst``, and None at the others. op: as ``all_reduce``."""
        return _run(self._async.reduce(array, dst, op, out=out, timeout=timeout), async_op)

    def reduce_scatter(
        self,
        array: ArrayLike,
        op: str = "sum",
        *,
        out: Array | None = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Return this rank's row of the reduction. array: one row for each rank. op: as ``all_reduce``."""
        return _run(self._async.reduce_scatter(array, op, out=out, timeout=timeout), async_op)

    def gather(
        self,
        array: ArrayLike,
        dst: int = 0,
        *,
        out: Array | None = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Return all ranks' arrays along a new first axis at rank ``dst``, and None at the others."""
        return _run(self._async.gather(array, dst, out=out, timeout=timeout), async_op)

    def scatter(
        self,
        array: ArrayLike | None,
        src: int = 0,
        *,
        out: Array | None = None,
        timeout: float | None = None,
        async_op: bool = False,
    ) -> Any:
        """Return this rank's row of the array of rank ``src``. The other ranks give None, and ``out`` for their row."""
        return _run(self._async.scatter(array, src, out=out, timeout=timeout), async_op)

    def all_to_all(
        self, array: ArrayLike, *, out: Array | None = None, timeout: float | None = None, async_op: bool = False
    ) -> Any:
        """Return the rows that the ranks have for this one. array: one row for each rank."""
        return _run(self._async.all_to_all(array, out=out, timeout=timeout), async_op)

    def all_to_all_uneven(
        self, arrays: Sequence[ArrayLike], out: Sequence[Array], *, timeout: float | None = None, async_op: bool = False
    ) -> Any:
        """Send ``arrays[r]`` to each rank r, and receive its array in ``out[r]``. Sizes may differ."""
        return _run(self._async.all_to_all_uneven(arrays, out, timeout=timeout), async_op)

    def send(
        self, array: ArrayLike, dst: int, tag: int = 0, *, timeout: float | None = None, async_op: bool = False
    ) -> Any:
        """Send an array to rank ``dst``, which receives it. Returns when it has been sent, which needs the receiver.

        tag: messages of a tag are in order, those of different tags are independent.
        """
        return _run(self._async.send(array, dst, tag, timeout=timeout), async_op)

    def recv(self, out: Array, src: int, tag: int = 0, *, timeout: float | None = None, async_op: bool = False) -> Any:
        """Receive the next array that rank ``src`` sends with this tag into ``out``, and return it."""
        return _run(self._async.recv(out, src, tag, timeout=timeout), async_op)

    def recv_any(self, out: Array, tag: int = 0, *, timeout: float | None = None, async_op: bool = False) -> Any:
        """Receive the next array that any rank sends with this tag into ``out``, and return its rank.

        Raises WorkerLostError if a rank is gone and no other has sent one.
        """
        return _run(self._async.recv_any(out, tag, timeout=timeout), async_op)

    def allocate_buffer(
        self, shape: int | Sequence[int], dtype: DTypeLike = np.float32, *, timeout: float | None = None
    ) -> Array:
        """Return an array of zeros for ``all_reduce``. All ranks call this, with the same shape and dtype.

        If all ranks are on one host, they map the array: an all-reduce of it, or of one part of it at all ranks, reads
        the contributions in place, and needs no copy of them. For everything else it is an ordinary array, which
        outlives the group. After an error of an all-reduce with ``out`` in the array its content is unspecified.
        """
        return loop.shared().call(self._async.allocate_buffer(shape, dtype, timeout=timeout))

    def barrier(self, *, timeout: float | None = None, async_op: bool = False) -> Any:
        """Return when all ranks have called it."""
        return _run(self._async.barrier(timeout=timeout), async_op)

    def reconfigure(self, *, admit: bool = False, timeout: float | None = None) -> WorkerGroup:
        """Return the next group, of the members that are left, once each of them has called this.

        Call it after an error of the group, or to take in workers that wait in ``join_group``. Members that were
        killed or stopped, or that cannot be reached, are left out; slow ones are waited for. This group ends, and late
        messages of it are dropped.

        admit: take in new workers, if all members pass it. Fewer members than ``size_min`` take them in anyway.

        Raises ExcludedError if the others continued without this worker, LateWorkerError if they have completed their
        work, WorkerLeftError if too few are left because others have ended, WaitTimeoutError after ``timeout`` seconds,
        InvalidArgumentError if members of the group have never been in the run, FencedError if this worker was
        expelled, ClosedError.
        """
        return WorkerGroup(loop.shared().call(self._async.reconfigure(admit=admit, timeout=timeout)))

    def count_newcomers(self) -> int:
        """Return the number of workers that wait in ``join_group`` to be taken in; 0 if the scheduler cannot tell."""
        return loop.shared().call(self._async.count_newcomers())

    def finish(self) -> None:
        """Close the group because the members have completed their work: workers that join it get LateWorkerError."""
        loop.shared().call(self._async.finish(), ending=True)

    def close(self) -> None:
        """End the group. Calls of other ranks that need this one fail. Closing again does nothing."""
        loop.shared().call(self._async.close(), ending=True)


def _run(coroutine: Coroutine[Any, Any, T], async_op: bool) -> T | Handle[T]:
    if async_op:
        return Handle(loop.shared().start(coroutine))
    return loop.shared().call(coroutine)

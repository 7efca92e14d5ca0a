"""``AsyncWorkerGroup``: collectives of some workers of a run, for numpy arrays."""

from __future__ import annotations

import asyncio
import inspect
import operator
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Sequence
from contextlib import AbstractContextManager
from functools import partial, wraps
from typing import Any, Concatenate, Final, ParamSpec, TypeVar, cast

import numpy as np
from numpy.lib.array_utils import byte_bounds
from numpy.typing import ArrayLike, DTypeLike

from psdist.collectives.core import plans
from psdist.collectives.core.machine import COLLECTIVES, CallLane
from psdist.collectives.core.plans import Array, Plan, check_dtype, check_op
from psdist.collectives.forming import FormedGroup, GroupFormer, GroupSettings, outlasts_stop
from psdist.collectives.host_sharing import BufferType
from psdist.collectives.memory_order import MemoryOrder, Span
from psdist.errors import (
    ClosedError,
    DTypeMismatchError,
    InvalidArgumentError,
    PsdistError,
    ShapeMismatchError,
    WaitTimeoutError,
)
from psdist.settings.debugging import time_limit
from psdist.settings.launcher_reports import note_group
from psdist.wire.limits import DIMENSIONS_MAX, EAGER_BYTES

_TAGS: Final = range(-(2**63), 2**63)

_P = ParamSpec("_P")
_T = TypeVar("_T")


def _in_order(
    call: Callable[Concatenate[AsyncWorkerGroup, _P], Awaitable[_T]],
) -> Callable[Concatenate[AsyncWorkerGroup, _P], Coroutine[Any, Any, _T]]:
    """Let a collective begin after the earlier calls whose memory it shares. It reads its first argument, and writes to
    ``out``."""
    names = [*inspect.signature(call).parameters][1:]
    place = names.index("out") if "out" in names else len(names)

    @wraps(call)
    async def ordered(group: AsyncWorkerGroup, /, *given: _P.args, **named: _P.kwargs) -> _T:
        read = given[0] if given else named.get(names[0])
        written = given[place] if place < len(given) else named.get("out")
        order, timeout = group._memory, cast(float | None, named.get("timeout"))
        turn = order.enter(COLLECTIVES, _arrays(read), _arrays(written))
        try:
            if turn.awaited is not None:
                await order.wait_for(turn, timeout)
            return await call(group, *given, **named)  # It begins without another wait.
        finally:
            order.leave(turn)

    return ordered


class AsyncWorkerGroup:
    """Workers that make the same calls in the same order. Made by ``new_group``.

    A call ends when all ranks have made it. It ends with WorkerLostError if a rank is gone that it needs,
    CollectiveMismatchError if the ranks made different calls, and WaitTimeoutError after ``timeout`` seconds (None:
    never). Then all ranks raise the error, and the group has ended: ``reconfigure`` makes the
    next one, of the ranks that are left.

    Arrays are numpy's, of booleans, integers, floats (bfloat16 of ``ml_dtypes`` too) or complex numbers. ``out``
    receives the result; it may be ``array`` itself. Reductions are in rank order, so that all ranks get the same bytes,
    whatever arrives first: see docs/collectives.md.
    """

    def __init__(self, former: GroupFormer, formed: FormedGroup, settings: GroupSettings | None = None) -> None:
        note_group()
        self._runner = formed.runner
        self.ranks = self._runner.ranks
        self.rank = formed.rank
        self.size = len(self.ranks)
        #: Number of the group among those that were made of it by ``reconfigure``.
        self.epoch = formed.epoch
        self._former = former
        self._session = former._session
        self._formed = formed
        self._settings = settings
        #: Held while a buffer is allocated, by several calls, so that later calls start later.
        self._order = asyncio.Lock()
        self._memory = self.memory_order(_span)

    @_in_order
    async def all_reduce(
        self,
        array: ArrayLike,
        op: str = "sum",
        *,
        out: Array | None = None,
        timeout: float | None = None,
    ) -> Array:
        """Return the reduction of all ranks' arrays.

        op: "sum", "avg", "product", "min", "max", "band", "bor" or "bxor".
        """
        given = _checked(array)
        check_op(op, given.dtype)
        result = _Result(given, given.shape, out)
        await self._call(plans.all_reduce(self.rank, self.size, result.apart(given), result.memory, op), timeout)
        return result.finish()

    @_in_order
    async def all_gather(self, array: ArrayLike, *, out: Array | None = None, timeout: float | None = None) -> Array:
        """Return all ranks' arrays, which have one shape, one after another along a new first axis."""
        given = _checked(array)
        result = _Result(given, (self.size, *given.shape), out)
        await self._call(plans.all_gather(self.rank, self.size, result.apart(given), result.memory), timeout)
        return result.finish()

    @_in_order
    async def broadcast(
        self, array: ArrayLike, src: int = 0, *, out: Array | None = None, timeout: float | None = None
    ) -> Array:
        """Return the array of rank ``src``. The other ranks give one of the same shape and dtype, which is not read."""
        given = _checked(array)
        src = self._checked_rank(src, "src")
        result = _Result(given, given.shape, out)
        if self.rank == src:
            result.memory[...] = given
        await self._call(plans.broadcast(self.rank, self.size, result.memory, src), timeout)
        return result.finish()

    @_in_order
    async def reduce(
        self, array: ArrayLike, dst: int = 0, op: str = "sum", *, out: Array | None = None, timeout: float | None = None
    ) -> Array | None:
        """Return the reduction of all ranks' arrays at rank ``dst``, and None at the others. op: as ``all_reduce``."""
        given = _checked(array)
        check_op(op, given.dtype)
        dst = self._checked_rank(dst, "dst")
        if self.rank != dst:
            await self._call(plans.reduce(self.rank, self.size, given, given, op, dst), timeout)
            return None
        result = _Result(given, given.shape, out)
        plan = plans.reduce(self.rank, self.size, result.apart(given), result.memory, op, dst)
        await self._call(plan, timeout)
        return result.finish()

    @_in_order
    async def reduce_scatter(
        self, array: ArrayLike, op: str = "sum", *, out: Array | None = None, timeout: float | None = None
    ) -> Array:
        """Return this rank's row of the reduction. array: one row for each rank. op: as ``all_reduce``."""
        given = _rows(array, self.size)
        check_op(op, given.dtype)
        result = _Result(given, given.shape[1:], out)
        plan = plans.reduce_scatter(self.rank, self.size, result.apart(given), result.memory, op)
        await self._call(plan, timeout)
        return result.finish()

    @_in_order
    async def gather(
        self, array: ArrayLike, dst: int = 0, *, out: Array | None = None, timeout: float | None = None
    ) -> Array | None:
        """Return all ranks' arrays along a new first axis at rank ``dst``, and None at the others."""
        given = _checked(array)
        dst = self._checked_rank(dst, "dst")
        if self.rank != dst:
            await self._call(plans.gather(self.rank, self.size, given, None, dst), timeout)
            return None
        result = _Result(given, (self.size, *given.shape), out)
        await self._call(plans.gather(self.rank, self.size, result.apart(given), result.memory, dst), timeout)
        return result.finish()

    @_in_order
    async def scatter(
        self, array: ArrayLike | None, src: int = 0, *, out: Array | None = None, timeout: float | None = None
    ) -> Array:
        """Return this rank's row of the array of rank ``src``. The other ranks give None, and ``out`` for their row."""
        src = self._checked_rank(src, "src")
        if self.rank == src and array is not None:
            given = _rows(array, self.size)
            result = _Result(given, given.shape[1:], out)
            plan = plans.scatter(self.rank, self.size, result.apart(given), result.memory, src)
        elif self.rank != src and out is not None:
            _check_memory(out)
            result = _Result(out, out.shape, out)
            plan = plans.scatter(self.rank, self.size, None, result.memory, src)
        else:
            raise InvalidArgumentError("scatter: rank src gives the array, and the other ranks give out")
        await self._call(plan, timeout)
        return result.finish()

    @_in_order
    async def all_to_all(self, array: ArrayLike, *, out: Array | None = None, timeout: float | None = None) -> Array:
        """Return the rows that the ranks have for this one. array: one row for each rank."""
        given = _rows(array, self.size)
        result = _Result(given, given.shape, out)
        sent = given.copy() if np.may_share_memory(given, result.memory) else given
        await self._call(plans.all_to_all(self.rank, plans.rows_of(sent), plans.rows_of(result.memory)), timeout)
        return result.finish()

    @_in_order
    async def all_to_all_uneven(
        self, arrays: Sequence[ArrayLike], out: Sequence[Array], *, timeout: float | None = None
    ) -> None:
        """Send ``arrays[r]`` to each rank r, and receive its array in ``out[r]``. Sizes may differ."""
        given = _without_overlaps([_checked(array) for array in arrays], out)
        for array in out:
            _check_memory(array)
        results = [_Result(array, array.shape, array) for array in out]
        if not len(given) == len(results) == self.size:
            raise InvalidArgumentError(
                f"{len(given)} arrays and {len(results)} in out: give one for each of {self.size}"
            )
        if len({array.dtype for array in (*given, *out)}) > 1:
            raise DTypeMismatchError("all_to_all_uneven: give arrays of one dtype")
        own = given[self.rank], results[self.rank].memory
        if own[0].size != own[1].size:
            raise ShapeMismatchError(f"this rank has {own[0].size} elements for itself, and out has {own[1].size}")
        plan = plans.all_to_all(
            self.rank, [array.reshape(-1) for array in given], [r.memory.reshape(-1) for r in results]
        )
        await self._call(plan, timeout)
        for result in results:
            result.finish()

    async def send(self, array: ArrayLike, dst: int, tag: int = 0, *, timeout: float | None = None) -> None:
        """Send an array to rank ``dst``, which receives it. Returns when it has been sent, which needs the receiver.

        tag: messages of a tag are in order, those of different tags are independent.
        """
        lane = CallLane(self.rank, self._checked_partner(dst, "dst"), _checked_tag(tag))

        async def given() -> Array:
            given = _checked(array)
            return given.copy() if given is array and given.nbytes <= EAGER_BYTES else given

        async def sent() -> None:
            await self._call(plans.send(_checked(array), lane.target), timeout, lane)

        # Two ranks may exchange small arrays in place, and would wait for each other.
        if np.asarray(array).nbytes > EAGER_BYTES:
            await self._after_others(lane, array, None, timeout, sent)
        else:
            array = await self._after_others(lane, array, None, timeout, given)
            await sent()

    async def recv(self, out: Array, src: int, tag: int = 0, *, timeout: float | None = None) -> Array:
        """Receive the next array that rank ``src`` sends with this tag into ``out``, and return it."""
        lane = CallLane(self._checked_partner(src, "src"), self.rank, _checked_tag(tag))
        _check_memory(out)
        return await self._after_others(lane, None, out, timeout, partial(self._received, lane, out, timeout))

    async def _received(self, lane: CallLane, out: Array, timeout: float | None) -> Array:
        result = _Result(out, out.shape, out)
        await self._call(plans.receive(result.memory, lane.source), timeout, lane)
        return result.finish()

    @outlasts_stop
    async def recv_any(self, out: Array, tag: int = 0, *, timeout: float | None = None) -> int:
        """Receive the next array that any rank sends with this tag into ``out``, and return its rank.

        Raises WorkerLostError if a rank is gone and no other has sent one.
        """
        tag = _checked_tag(tag)
        _check_memory(out)
        _check_timeout(timeout)

        async def received() -> int:
            source = await self._runner.any_source(tag, timeout)
            await self._received(CallLane(source, self.rank, tag), out, timeout)
            return source

        return await self._after_others(("any", tag), None, out, timeout, received)

    @_in_order
    @outlasts_stop
    async def allocate_buffer(
        self, shape: int | Sequence[int], dtype: DTypeLike = np.float32, *, timeout: float | None = None
    ) -> Array:
        """Return an array of zeros for ``all_reduce``. All ranks call this, with the same shape and dtype.

        If all ranks are on one host, they map the array: an all-reduce of it, or of one part of it at all ranks, reads
        the contributions in place, and needs no copy of them. For everything else it is an ordinary array, which
        outlives the group. After an error of an all-reduce with ``out`` in the array its content is unspecified.
        """
        wanted = BufferType.checked(shape, dtype)
        _check_timeout(timeout)

        async def call(plan: Plan) -> None:
            await self._runner.result(self._runner.start(COLLECTIVES, plan), str(plan.call), timeout)

        async with self._order:
            return await self._runner.route.allocate(wanted, call)

    @_in_order
    async def barrier(self, *, timeout: float | None = None) -> None:
        """Return when all ranks have called it."""
        await self._call(plans.barrier(self.rank, self.size), timeout)

    def preparing(self) -> AbstractContextManager[None]:
        return self._session.waits.group_calls.preparing()

    @property
    def has_ended(self) -> bool:
        """True if an error has ended the group, or ``close``."""
        return self._runner.error is not None

    @property
    def error(self) -> PsdistError | None:
        """The error that ended the group, or None."""
        return self._runner.error

    async def reconfigure(self, *, admit: bool = False, timeout: float | None = None) -> AsyncWorkerGroup:
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
        _check_timeout(timeout)
        runner = self._runner
        if not runner.members:
            raise InvalidArgumentError("members of this group have never been in the run: make another group")
        settings = self._settings or GroupSettings(f"group-{runner.key.hex()}")
        runner.end(ClosedError(f"rank {self.rank} reconfigures the group"))
        formed = await self._former.form(settings, self._formed, admits=admit, timeout=timeout)
        return AsyncWorkerGroup(self._former, formed, settings)

    async def count_newcomers(self) -> int:
        """Return the number of workers that wait in ``join_group`` to be taken in; 0 if the scheduler cannot tell."""
        return await self._former.count_newcomers(self._settings, self._formed) if self._settings is not None else 0

    async def finish(self) -> None:
        """Close the group because the members have completed their work: workers that join it get LateWorkerError."""
        if self._settings is not None:
            await self._former.finish(self._settings, self._formed)
        await self.close()

    async def close(self) -> None:
        """End the group. Calls of other ranks that need this one fail. Closing again does nothing."""
        self._runner.end(ClosedError(f"rank {self.rank} closed the group", rank=self.rank))
        self._former.mesh.remove(self._runner)

    def _checked_rank(self, rank: int, name: str) -> int:
        """Return a rank of this group as an int. Raises InvalidArgumentError."""
        number = _whole(name, rank)
        if not 0 <= number < self.size:
            raise InvalidArgumentError(f"rank {number} is not in this group of {self.size}: ranks count from 0")
        return number

    def _checked_partner(self, rank: int, name: str) -> int:
        number = self._checked_rank(rank, name)
        if number == self.rank:
            raise InvalidArgumentError(f"rank {number} is this rank: copy the array")
        return number

    async def _after_others(
        self,
        lane: Hashable,
        read: object,
        written: object,
        timeout: float | None,
        call: Callable[[], Awaitable[_T]],
    ) -> _T:
        """Make a call after the earlier ones whose memory it shares. read, written: its arrays, or lists of them."""
        turn = self._memory.enter(lane, _arrays(read), _arrays(written))
        return await self._memory.make(turn, timeout, call)

    def memory_order(self, find: Callable[[Any], Span]) -> MemoryOrder:
        """Return an order of this group's calls. find: returns the memory of an argument of its calls."""
        return MemoryOrder(find, self._wait_for_memory)

    async def _wait_for_memory(self, wait: Awaitable[None], timeout: float | None) -> None:
        """Wait for earlier calls. If this rank does not make its call after that, the group ends."""
        _check_timeout(timeout)
        timeout, reason = time_limit(timeout), "for an earlier call with the same memory"
        try:
            with self._session.waits.open(reason), self.preparing():
                async with asyncio.timeout(timeout):
                    await wait
        except TimeoutError:
            error = WaitTimeoutError(f"rank {self.rank} reached the timeout of {timeout:g} s, waiting {reason}")
            self._runner.end(error)
            raise self.error or error from None
        except asyncio.CancelledError:
            gave_up = f"rank {self.rank} gave up a call, so that the group has ended"
            self._runner.end(ClosedError(gave_up, rank=self.rank))
            raise

    @outlasts_stop
    async def _call(self, plan: Plan, timeout: float | None, lane: CallLane = COLLECTIVES) -> None:
        _check_timeout(timeout)
        if lane == COLLECTIVES and self._order.locked():
            async with self._order:
                call_id = self._runner.start(lane, plan)
        else:
            call_id = self._runner.start(lane, plan)
        await self._runner.result(call_id, str(plan.call), timeout)


def _arrays(given: object) -> Sequence[Any]:
    """Return the arrays of an argument that is one, or a list of them. Other values have memory of their own."""
    if isinstance(given, np.ndarray):
        return (given,)
    return given if isinstance(given, list | tuple) else ()


def _span(array: object) -> Span:
    if not isinstance(array, np.ndarray) or not array.size:
        return 0, 0
    if array.flags.c_contiguous:
        first: int = array.__array_interface__["data"][0]
        return first, first + array.nbytes
    return byte_bounds(array)


def _whole(name: str, value: int) -> int:
    """Return a whole number of any type as an int. Raises InvalidArgumentError."""
    try:
        return operator.index(value)
    except TypeError:
        raise InvalidArgumentError(f"{name}={value!r:.60} is not a whole number") from None


def _checked_tag(tag: int) -> int:
    number = _whole("tag", tag)
    if number not in _TAGS:
        raise InvalidArgumentError(f"tag={number} is out of range: use a whole number from -2**63 to 2**63 - 1")
    return number


def _check_timeout(timeout: float | None) -> None:
    try:
        is_valid = timeout is None or timeout > 0
    except TypeError:
        is_valid = False
    if not is_valid:
        raise InvalidArgumentError(f"timeout={timeout!r:.60} is out of range: use seconds above 0, or None")


class _Result:
    """Memory for a result: ``out`` if it is contiguous, else memory that is copied to it.

    Raises ShapeMismatchError and DTypeMismatchError unless ``out`` fits.
    """

    def __init__(self, given: Array, shape: tuple[int, ...], out: Array | None) -> None:
        self._out = out
        if out is None:
            self.memory = np.empty(shape, given.dtype)
            return
        _check_memory(out)
        flags = out.flags
        if out.shape != shape or out.dtype != given.dtype or not flags.writeable:
            raise ShapeMismatchError(
                f"out has shape {out.shape} and dtype {out.dtype.name}: give a writable array of shape {shape} and "
                f"dtype {given.dtype.name}"
            )
        self.memory = out if flags.c_contiguous and flags.aligned else np.empty(shape, given.dtype)

    def apart(self, given: Array) -> Array:
        """Return ``given``, copied if it overlaps the memory without being the same."""
        if not np.may_share_memory(given, self.memory):
            return given
        same = given.ctypes.data == self.memory.ctypes.data and given.shape == self.memory.shape
        return given if same else given.copy()

    def finish(self) -> Array:
        """Return the result, in ``out`` if it was given."""
        if self._out is not None and self._out is not self.memory:
            self._out[...] = self.memory
            return self._out
        return self.memory


def _rows(array: ArrayLike, size: int) -> Array:
    """Return an array with a row for each of ``size`` ranks. Raises ShapeMismatchError."""
    given = _checked(array)
    if given.ndim == 0 or len(given) != size:
        raise ShapeMismatchError(f"an array of shape {given.shape} has no row for each of {size} ranks")
    return given


def _check_memory(out: Array) -> None:
    """Raise an error unless ``out`` is an array that collectives carry."""
    if not isinstance(out, np.ndarray):
        raise InvalidArgumentError(f"out={out!r:.60} is no array of numpy: give memory for the result")
    check_dtype(out.dtype)
    _check_dimensions(out)


def _check_dimensions(array: Array) -> None:
    if array.ndim > DIMENSIONS_MAX:
        raise InvalidArgumentError(f"an array has {array.ndim} dimensions, over {DIMENSIONS_MAX}: reshape it")


def _without_overlaps(given: list[Array], out: Sequence[Array]) -> list[Array]:
    """Return arrays, copied if they share memory with any of ``out``."""
    spans = [(_span(array), array) for array in out]
    low, high = min((span[0] for span, _ in spans), default=0), max((span[1] for span, _ in spans), default=0)
    return [
        array.copy()
        if _span(array)[0] < high and low < _span(array)[1] and any(np.may_share_memory(array, one) for _, one in spans)
        else array
        for array in given
    ]


def _checked(array: ArrayLike) -> Array:
    """Return a contiguous array of a supported dtype. Raises DTypeMismatchError, InvalidArgumentError."""
    given = np.asarray(array)
    check_dtype(given.dtype)
    _check_dimensions(given)
    return given if given.flags.c_contiguous and given.flags.aligned else given.copy()

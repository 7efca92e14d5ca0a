"""Calls of torch.distributed in progress, the memory of their tensors, and the threads of their callbacks.

A callback of a future may make calls and wait for them. So each callback that runs has a thread of its own, and the
loop runs none. Threads are kept for later callbacks, because the loop would wait until a new one has started.
"""

from __future__ import annotations

import asyncio
import math
import threading
from bisect import bisect_left
from collections.abc import Callable, Coroutine, Iterator, Sequence
from datetime import timedelta
from functools import cache, partial, reduce
from itertools import accumulate
from queue import SimpleQueue
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch._C._autograd import (
    _profiler_enabled,
    _record_function_with_args_enter,
    _record_function_with_args_exit,
)

from psdist.client.session import loop
from psdist.client.session.script import sigterm
from psdist.collectives.group import AsyncWorkerGroup
from psdist.errors import ClosedError, PsdistError, ShapeMismatchError, WaitTimeoutError, copy_error
from psdist.process_group.checks import opaque
from psdist.settings.debugging import time_limit
from psdist.torch.values import as_array

#: C++ knows the values of Python's futures as Python objects only, and those of this function as lists of tensors.
_TYPED: Final = """
def value_after(ended: Future[None], tensors: List[Tensor]) -> List[Tensor]:
    torch.jit.wait(ended)
    return tensors

def typed(ended: Future[None], tensors: List[Tensor]) -> Future[List[Tensor]]:
    return torch.jit.fork(value_after, ended, tensors)
"""


#: Threads that are kept without a callback.
_KEPT_THREADS: Final = 4


class CallbackThreads:
    """Daemon threads, started as they are needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queue: SimpleQueue[Callable[[], object]] = SimpleQueue()
        #: Threads that wait, and have no callback in the queue.
        self._idle = 0

    def run(self, callback: Callable[[], object]) -> None:
        """Run ``callback`` in a thread. If it raises, ``threading.excepthook`` is called."""
        with self._lock:
            starts = not self._idle
            self._idle -= not starts
        self._queue.put(callback)
        if starts:
            threading.Thread(target=self._serve, name="psdist callbacks", daemon=True).start()

    def _serve(self) -> None:
        is_kept = True
        while is_kept:
            self._queue.get()()
            with self._lock:
                is_kept = self._idle < _KEPT_THREADS
                self._idle += is_kept


_callbacks: Final = CallbackThreads()


@cache
def _typed() -> Any:
    return torch.jit.CompilationUnit(_TYPED).typed


class TensorMemory:
    """Contiguous memory of a tensor for a call: its own if possible. array: the same memory for numpy.

    tensor: dense, on the CPU. If numpy lacks the dtype, it can be moved but not reduced.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor.detach()
        self._flat = self._tensor.resolve_conj().resolve_neg().contiguous()
        self.array = as_array(self._flat)

    def finish(self) -> None:
        """Copy the result to the tensor."""
        if self._flat.data_ptr() != self._tensor.data_ptr() or self._flat.stride() != self._tensor.stride():
            self._tensor.copy_(self._flat)


def rows(tensors: Sequence[Tensor]) -> NDArray[Any]:
    """Return a new array with a row for each tensor. They have one shape and dtype."""
    return np.stack([TensorMemory(tensor).array for tensor in tensors])


def set_rows(tensors: Sequence[Tensor], found: NDArray[Any]) -> None:
    """Copy a row into each tensor."""
    for tensor, row in zip(tensors, found, strict=True):
        memory = TensorMemory(tensor)
        memory.array[...] = row.reshape(memory.array.shape)
        memory.finish()


def apart(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors, with a copy in the place of each whose memory overlaps that of another."""
    found = list(tensors)
    spans = sorted((*span(tensor), number) for number, tensor in enumerate(tensors) if tensor.numel())
    end, last = -1, -1
    for first, after, number in spans:
        if first < end:
            found[number], found[last] = tensors[number].clone(), tensors[last].clone()
        if after > end:
            end, last = after, number
    return found


def each(
    call: Callable[[Any, Tensor], Coroutine[Any, Any, None]],
    outputs: Sequence[Any],
    inputs: Sequence[Tensor],
    *,
    written: Sequence[Tensor],
) -> Iterator[Coroutine[Any, Any, None]]:
    """Yield a call for each output and input. Several calls read copies of the inputs that share memory with
    ``written``."""
    if len(inputs) > 1:
        spans = sorted(span(tensor) for tensor in written)
        starts, ends = [first for first, _ in spans], list(accumulate((after for _, after in spans), max))

        def is_written(first: int, after: int) -> bool:
            before = bisect_left(starts, after)
            return before > 0 and ends[before - 1] > first

        inputs = [tensor.clone() if is_written(*span(tensor)) else tensor for tensor in inputs]
    for output, tensor in zip(outputs, inputs, strict=True):
        yield call(output, tensor)


def span(tensor: Tensor) -> tuple[int, int]:
    """Return the addresses of a tensor's first byte, and of the one after its last; twice 0 if it has no memory."""
    if tensor.layout is not torch.strided or not tensor.numel():
        return 0, 0
    elements = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + elements * tensor.element_size()


@opaque
class CollectiveWork(dist.Work):
    """A call in progress.

    call: the coroutine that makes it; the source of a message from any rank is its result.
    tensors: the call's result, for the future.
    name, inputs: name of the call and its tensors, for torch's profiler.
    """

    def __init__(
        self, call: Coroutine[Any, Any, int | None], tensors: Sequence[Any], name: str, inputs: Sequence[Tensor]
    ) -> None:
        super().__init__()
        self._ended = threading.Event()
        self._source = -1
        self._profiled = _record_function_with_args_enter(name, *inputs) if _profiler_enabled() else None
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        #: Future that is set when the call ends, and the one that torch gets, if it has asked for it.
        self._started: torch.futures.Future[Any] | None = None
        self._future: torch.futures.Future[Any] | None = None
        self._tensors = list(tensors)
        try:
            self._call = loop.shared().start(self._run(call))
        except BaseException:  # Also for SystemExit: an unawaited coroutine would cause a warning.
            call.close()
            raise

    async def _run(self, call: Coroutine[Any, Any, int | None]) -> None:
        try:
            source = await call
            self._source = -1 if source is None else source
        except BaseException as error:
            self._error = error
            if not isinstance(error, Exception):
                raise
        finally:
            if self._profiled is not None:
                _record_function_with_args_exit(self._profiled)
            with self._lock:
                self._ended.set()
                started = self._started
            if started is not None:
                _callbacks.run(partial(started.set_result, self._tensors))

    def _checked(self, future: torch.futures.Future[Any]) -> Any:
        if self._error is not None:
            raise RuntimeError(f"{type(self._error).__name__}: {self._error}")
        return future.value()

    # torch calls these methods by name.

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for the call, and raise its error; WaitTimeoutError after ``timeout`` unless that is 0."""
        limit = timeout.total_seconds()
        until = time_limit(limit if limit > 0 else None)
        try:
            while not self._ended.wait(0.5 if until is None else min(until, 0.5)):  # Signals are handled in between.
                self._call.mark_awaited(until is None)  # With a limit the wait ends by itself.
                if until is not None and (until := until - 0.5) <= 0:
                    raise WaitTimeoutError(f"a call of torch.distributed took longer than {limit:g} s")
        except BaseException:
            self._call.mark_awaited(False)
            raise
        if isinstance(self._error, PsdistError):
            raise copy_error(self._error)
        if isinstance(self._error, asyncio.CancelledError):
            sigterm.check()  # This worker leaves, and so its script ends, as in any other call.
            raise ClosedError("this process is ending, and has given up a call of torch.distributed")
        if self._error is not None:
            raise self._error
        return True

    def _source_rank(self) -> int:
        """Return the rank whose message was received."""
        return self._source

    def get_future(self) -> torch.futures.Future[Any]:
        """Return the future of the result."""
        with self._lock:
            if self._future is not None:
                return self._future
            started: torch.futures.Future[Any] = torch.futures.Future()
            self._started = started
            # torch's C++ code sees errors of a callback, but none that were set from Python.
            self._future = started.then(self._checked)
            if [getattr(tensor, "dtype", None) for tensor in self._tensors] == [torch.float16]:
                # DistributedDataParallel's hook FP16_COMPRESS, which is in C++, demands a list of tensors.
                self._future = _typed()(self._future, self._tensors)
            has_ended = self._ended.is_set()
        if has_ended:
            started.set_result(self._tensors)
        return self._future

    def is_completed(self) -> bool:
        """True if the call has ended."""
        return self._ended.is_set()

    def is_success(self) -> bool:
        """True if the call has its result."""
        return self._ended.is_set() and self._error is None

    def result(self) -> list[Any]:
        """Return the tensors."""
        return self._tensors


@opaque
class SeveralWorks(dist.Work):
    """Calls in progress as one."""

    def __init__(self, works: Sequence[CollectiveWork]) -> None:
        super().__init__()
        self._works = works

    # torch calls these methods by name.

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for each call, and raise the first one's error; WaitTimeoutError as a call does."""
        return all(work.wait(timeout) for work in self._works)

    def get_future(self) -> torch.futures.Future[Any]:
        """Return the future of the results."""
        return torch.futures.collect_all([work.get_future() for work in self._works])

    def is_completed(self) -> bool:
        """True if all calls have ended."""
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        """True if all calls have their results."""
        return all(work.is_success() for work in self._works)

    def result(self) -> list[Any]:
        """Return the tensors."""
        return [tensor for work in self._works for tensor in work.result()]


async def all_reduce_sparse(group: AsyncWorkerGroup, tensors: Sequence[Tensor], op: str, timeout: float | None) -> None:
    """Add the sparse tensors (COO, on the CPU, of one shape) of all ranks and lists into each of ``tensors``.

    op: "sum" or "avg".
    timeout: seconds for each of the calls.

    Raises ShapeMismatchError if the ranks' shapes differ, or a rank announces more values than the shape has places.
    """
    own = reduce(torch.add, [tensor.detach() for tensor in tensors]).coalesce()
    facts = await group.all_gather(np.array([own._nnz(), own.sparse_dim(), *own.shape]), timeout=timeout)
    if len({tuple(row) for row in facts[:, 1:]}) > 1:
        raise ShapeMismatchError(
            f"ranks give sparse tensors of shapes {[tuple(row[2:]) for row in facts]}: give one shape"
        )
    places = math.prod(own.shape[: own.sparse_dim()])
    if facts[:, 0].min() < 0 or facts[:, 0].max() > places:
        raise ShapeMismatchError(
            f"ranks announce {facts[:, 0].tolist()} values of a sparse tensor with {places} places: give one shape"
        )
    indices = await _gather_uneven(group, own.indices().t(), facts[:, 0], timeout)
    values = await _gather_uneven(group, own.values(), facts[:, 0], timeout)
    total = torch.sparse_coo_tensor(indices.t(), values, own.shape, check_invariants=True).coalesce()
    for tensor in tensors:
        tensor.copy_(total / (group.size * len(tensors)) if op == "avg" else total)


async def _gather_uneven(group: AsyncWorkerGroup, rows: Tensor, counts: np.ndarray, timeout: float | None) -> Tensor:
    """Return the rows of all ranks, one rank after another. counts: number of each rank's rows."""
    memory = [torch.empty((int(count), *rows.shape[1:]), dtype=rows.dtype) for count in counts]
    given = TensorMemory(rows).array
    await group.all_to_all_uneven([given] * group.size, [TensorMemory(one).array for one in memory], timeout=timeout)
    return torch.cat(memory)

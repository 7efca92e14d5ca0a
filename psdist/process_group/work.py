"""Calls of torch.distributed in progress, and the memory of their tensors."""

from __future__ import annotations

import asyncio
import threading
from bisect import bisect_left
from collections.abc import Callable, Coroutine, Iterator, Sequence
from datetime import timedelta
from functools import cache, partial
from itertools import accumulate
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

from psdist.client.process import loop
from psdist.client.process.sigterm import sigterm
from psdist.errors import ClosedError, PsdistError, WaitTimeoutError, copy_error
from psdist.process_group.callback_threads import CallbackThreads
from psdist.process_group.forms import opaque
from psdist.torch.values import as_array

_callbacks: Final = CallbackThreads()
#: C++ knows the values of Python's futures as Python objects only, and those of this function as lists of tensors.
_TYPED: Final = """
def value_after(ended: Future[None], tensors: List[Tensor]) -> List[Tensor]:
    torch.jit.wait(ended)
    return tensors

def typed(ended: Future[None], tensors: List[Tensor]) -> Future[List[Tensor]]:
    return torch.jit.fork(value_after, ended, tensors)
"""


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
        until = None if limit <= 0 else limit
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

"""Calls of torch.distributed in progress, and the memory of their tensors."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Final

import ml_dtypes
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
from psdist.collectives.core.reductions import DTYPES
from psdist.errors import (
    ClosedError,
    DTypeMismatchError,
    InvalidArgumentError,
    PsdistError,
    WaitTimeoutError,
    copy_error,
)
from psdist.process_group.callback_threads import CallbackThreads

_callbacks: Final = CallbackThreads()


class TensorMemory:
    """Contiguous memory of a tensor for a call: its own if possible. array: the same memory for numpy.

    Dtypes that numpy lacks become bytes, which can be moved but not reduced.

    is_reduced: True for a call that computes. DTypeMismatchError is raised if numpy lacks the dtype.
    """

    def __init__(self, tensor: Tensor, *, is_reduced: bool = False) -> None:
        if tensor.device.type != "cpu" or tensor.layout != torch.strided:
            raise InvalidArgumentError(
                f"a tensor on {tensor.device} with layout {tensor.layout} cannot be sent: use dense tensors on the CPU"
            )
        if is_reduced and not _has_arithmetic(tensor.dtype):
            raise DTypeMismatchError(
                f"tensors of {tensor.dtype} can be moved, but not reduced: convert them to float32"
            )
        self._tensor = tensor.detach()
        self._flat = self._tensor.resolve_conj().resolve_neg().contiguous()
        self.array = _as_numpy(self._flat)

    def finish(self) -> None:
        """Copy the result to the tensor."""
        if self._flat.data_ptr() != self._tensor.data_ptr() or self._flat.stride() != self._tensor.stride():
            self._tensor.copy_(self._flat)


def _as_numpy(tensor: Tensor) -> NDArray[Any]:
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    if _has_arithmetic(tensor.dtype):
        return tensor.numpy()
    return tensor.reshape(-1).view(torch.uint8).numpy()


def _has_arithmetic(dtype: torch.dtype) -> bool:
    return str(dtype).removeprefix("torch.") in DTYPES


def rows(tensors: Sequence[Tensor], *, is_reduced: bool = False) -> NDArray[Any]:
    """Return a new array with a row for each tensor, which have one shape. is_reduced: as for ``TensorMemory``."""
    if len({(tensor.shape, tensor.dtype) for tensor in tensors}) > 1:
        raise InvalidArgumentError("a list of tensors has several shapes or dtypes: give tensors of one")
    return np.stack([TensorMemory(tensor, is_reduced=is_reduced).array for tensor in tensors])


def set_rows(tensors: Sequence[Tensor], found: NDArray[Any]) -> None:
    """Copy a row into each tensor."""
    for tensor, row in zip(tensors, found, strict=True):
        memory = TensorMemory(tensor)
        memory.array[...] = row.reshape(memory.array.shape)
        memory.finish()


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
            loop.shared().start(self._run(call))
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
        while not self._ended.wait(0.5 if until is None else min(until, 0.5)):  # Signals are handled in between.
            if until is not None and (until := until - 0.5) <= 0:
                raise WaitTimeoutError(f"a call of torch.distributed took longer than {limit:g} s")
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

"""Stream of a model's gradients to the servers: hooks collect them during the backward pass and push them in buckets.

Autograd makes each gradient in memory of its own. A hook copies it into the flat gradient vector, which servers on the
same host read in place, and makes ``parameter.grad`` a view of it. With ``zero_grad(set_to_none=True)``, torch's
default, nothing has to be cleared or added up. The vector is on the model's CUDA device if the codec encodes there, so
that only payloads are copied to main memory; this needs CuPy, and device memory for one vector. Otherwise it is in main
memory.

Invariants: Each tensor is pushed once in a step. A bucket is a contiguous range of the layout, so only neighbouring
buckets share slices. Every tensor is in one bucket. A pushed gradient is not written to before the step is answered; a
script that does so gets an error.

Not here: use of the answer (``optimizer``, ``data_parallel``).
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, Final
from weakref import WeakValueDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack

from psdist.client.means import push_finite
from psdist.client.session.membership import unless_dropped
from psdist.client.sync_client import Bucket, Parameters
from psdist.errors import (
    DeviceUnavailableError,
    InvalidArgumentError,
    LimitExceededError,
    NonFiniteGradientError,
    PsdistError,
)
from psdist.torch.values import as_real, weight_of
from psdist.torch.writes import Fingerprint

Write = Callable[[Mapping[str, NDArray[Any]]], None]

#: Streams by the identity of their handle. Two streams of one set would write to the same memory.
_streams: WeakValueDictionary[int, GradientStream] = WeakValueDictionary()


@dataclass
class _Step:
    """State of the current step.

    values: content of the gradients at the end of the backward pass.
    taken: gradients that were copied into the vector, with their autograd version at that time.
    reached: parameters that got gradients in passes without a push.
    absent: taken tensors that had no gradient.
    given: tensors whose gradients were pushed.
    buckets: pushed buckets and their tensors.
    is_broken: gradients were changed after they were pushed, so this worker can contribute nothing else.
    is_dropped: this worker had been expelled.
    """

    values: Fingerprint
    weight: float = 1.0
    taken: dict[int, tuple[Tensor | None, int]] = field(default_factory=dict)
    reached: set[int] = field(default_factory=set)
    absent: set[int] = field(default_factory=set)
    given: set[int] = field(default_factory=set)
    buckets: list[tuple[Bucket, tuple[int, ...]]] = field(default_factory=list)
    is_broken: bool = False
    is_dropped: bool = False


def check_free(parameters: Mapping[str, Tensor]) -> None:
    """Raise InvalidArgumentError if one of these parameters is already trained through another parameter set."""
    for stream in list(_streams.values()):
        taken = set(map(id, stream._parameters))
        if name := next((name for name, one in parameters.items() if id(one) in taken), None):
            raise InvalidArgumentError(
                f"parameter {name!r} is trained through the parameter set {stream.name!r} already, and a model has one "
                "optimizer: give parameter groups to that, wrap parts of the model, each with an optimizer of its "
                "own, instead of the whole, or close() the other one first"
            )


class GradientStream:
    """Pushes the gradients of ``trained``, which are the tensors of ``handle``, once per step.

    bucket_bytes: see ``BucketPlan``.
    as_views: make ``parameter.grad`` a view of the vector if the parameter has its dtype and is on its device.
    others: tensors of ``handle`` that are not parameters. They are pushed at the end. With some, ``handle`` has mean
        gradients, and parameters without a gradient count with zeros; without, servers skip these.
    overflows: name of one of ``others``. It becomes 1 in a step in which gradients of this worker are not finite; these
        are pushed as zeros. None: such gradients raise.
    on_begin: called before the first gradient of a step is taken. Its errors end the backward pass.
    after_failure: remedy, for messages about a backward pass that failed after it had pushed something.
    values: detects writes through ``parameter.grad.data`` between the backward pass and ``complete``; None detects
        none.

    Raises InvalidArgumentError if ``handle`` already has a stream.
    """

    def __init__(
        self,
        handle: Parameters,
        trained: Mapping[str, nn.Parameter],
        bucket_bytes: int,
        on_begin: Callable[[], None],
        *,
        as_views: bool = True,
        others: Iterable[str] = (),
        overflows: str | None = None,
        after_failure: str = "After a failed pass, or if gradients were changed, call zero_grad() of the "
        "DistributedOptimizer: it completes the step with the gradients that were pushed",
        values: Fingerprint | None = None,
    ) -> None:
        if id(handle) in _streams:
            raise InvalidArgumentError(
                f"the parameter set {handle.name!r} already has the gradients of a model: give this one another name="
            )
        self._handle = handle
        #: Name of the parameter set.
        self.name = handle.name
        self._names = [*trained, *others]
        self._parameters = list(trained.values())
        self._arrays, self.buffers = gradient_memory(handle, self._parameters[0].device)
        #: Tensors that ``parameter.grad`` becomes. Autograd does not see writes to ``buffers`` as changes of these.
        self._views = [self.buffers[name].data for name in trained]
        self._plan = BucketPlan([view.nbytes for view in self._views], bucket_bytes)
        self._on_begin = on_begin
        self._as_views = as_views
        self._overflows = overflows
        self._after_failure = after_failure
        self._step = _Step(values=values or Fingerprint(is_enabled=False))
        #: True if backward passes accumulate gradients and push nothing.
        self.is_paused = False
        #: Autograd's number of the backward pass that produced gradients and has not ended (or failed); -1 for none.
        self._pass = -1
        #: By parameter; None if backward passes do not push.
        self._hooks: dict[int, torch.utils.hooks.RemovableHandle] | None = None
        _streams[id(handle)] = self

    # --- while the backward pass runs ---

    def listen(self) -> None:
        """Register hooks, so that backward passes push. A frozen parameter gets its hook in the first step at whose end
        it is unfrozen; until then its gradients are pushed by ``complete``."""
        self._hooks = self._hooks or {}
        for number, parameter in enumerate(self._parameters):
            if number not in self._hooks and parameter.requires_grad:
                push = partial(self._on_gradient, number)
                hook = parameter.register_post_accumulate_grad_hook(push)  # type: ignore[no-untyped-call]  # torch: untyped
                self._hooks[number] = hook

    def set_weight(self, weight: float) -> None:
        """Set the weight of this step's gradients in its mean.

        Raises InvalidArgumentError once some gradients were pushed, and the errors of ``weight_of``.
        """
        weight = weight_of(weight, self._handle.spec.consistency)
        if self._step.given and weight != self._step.weight:
            raise InvalidArgumentError(
                f"weight={weight!r:.40} comes after gradients of this step were pushed: set it before the backward "
                "pass that pushes, or use overlap=False"
            )
        self._step.weight = weight

    def close(self) -> None:
        """Remove the hooks. Gradients stay in place."""
        for hook in (self._hooks or {}).values():
            hook.remove()
        self._hooks = None
        _streams.pop(id(self._handle), None)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Return a context in which backward passes accumulate gradients and push nothing."""
        before, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = before

    def _on_gradient(self, number: int, parameter: Tensor) -> None:
        if self.is_paused:
            self._step.reached.add(number)
            return
        if self._step.is_dropped:
            return
        if number in self._step.taken:
            if self._step.given:
                self._step.is_broken = True  # Autograd has added to a pushed gradient.
                raise InvalidArgumentError(
                    f"parameter {self._names[number]!r} got a second gradient before step(), and gradients of the "
                    "first backward pass are already under way: run all passes of a step but the last in no_sync(), "
                    f"and those of another model's loss. {self._after_failure}"
                )
            # A failed pass, or one more of the same step: autograd accumulates, and nothing was sent.
            self._step.taken.clear()
            self._step.values.forget()
        if self._pass != (current := torch._C._current_graph_task_id()):
            self._pass = current
            torch.autograd.Variable._execution_engine.queue_callback(self._on_pass_end)
        self._take(number)
        if ready := self._plan.on_ready(number):
            self._give(ready)

    def _on_pass_end(self) -> None:
        """Handle a backward pass that ended without an error."""
        self._pass = -1
        taken = ((self._names[number], gradient) for number, (gradient, _) in self._step.taken.items())
        self._step.values.take((name, gradient) for name, gradient in taken if gradient is not None)

    def _take(self, number: int) -> None:
        """Copy a gradient to its place in the vector, or zeros if there is none, as for a frozen parameter."""
        if not self._step.taken:
            self._on_begin()
            self._plan.start_step()
        parameter, view = self._parameters[number], self._views[number]
        gradient = parameter.grad
        self._step.absent.discard(number)
        if gradient is None:
            view.zero_()
            self._step.absent.add(number)
        elif gradient is not view:
            if self._as_views:
                view = self._views[number] = separate_kept(view, self.buffers[self._names[number]], self.name)
            with torch.no_grad():
                view.copy_(as_real(dense(gradient)))
            if self._as_views and parameter.device == view.device and parameter.dtype == view.dtype:
                gradient = parameter.grad = view
        self._step.taken[number] = gradient, 0 if gradient is None else gradient._version

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch gives it no types
    def _give(self, numbers: tuple[int, ...]) -> None:
        try:
            bucket = unless_dropped(lambda: self._push_pull_async(numbers))
        except NonFiniteGradientError as error:
            if self._step.given:
                text = f"{error.message}. Parts of other parameters were sent. {self._after_failure}"
                raise NonFiniteGradientError(text, **error.details) from None
            self._step.taken.clear()
            raise
        if bucket is None:
            self._step.is_dropped = True  # The next call shows whether this worker is a member again.
            return
        self._step.buckets.append((bucket, numbers))
        self._step.given.update(numbers)

    def _push_pull_async(self, numbers: tuple[int, ...]) -> Bucket:
        names, flag = [self._names[number] for number in numbers], self._overflows

        def push() -> Bucket:
            return self._handle.push_pull_async(names, self._step.weight, self._absent(numbers))

        if flag is None:
            return push()

        def clear() -> None:
            for name in (*names, flag):
                self.buffers[name].fill_(float(name == flag))

        return push_finite(push, clear)

    def _absent(self, numbers: Iterable[int]) -> list[str]:
        """Return the names of those tensors that the servers skip if no other worker has a gradient for them."""
        has_flags = len(self._names) > len(self._views)
        return [self._names[number] for number in numbers if not has_flags and number in self._step.absent]

    # --- at its end ---

    @property
    def weight(self) -> float:
        """Weight of this step's gradients in its mean."""
        return self._step.weight

    @property
    def untaken(self) -> list[str]:
        """Names of the parameters without a gradient in this step so far.

        Gradients of a pass without a push do not count once the script has cleared them.
        """
        reached = {number for number in self._step.reached if self._parameters[number].grad is not None}
        got = self._step.taken.keys() | reached
        return [name for number, name in enumerate(self._names[: len(self._views)]) if number not in got]

    def complete(self) -> None:
        """Push the remaining tensors.

        Raises InvalidArgumentError if a gradient was changed after it was pushed.
        """
        self._check_unchanged()
        self._take_rest()
        rest = tuple(number for number in range(len(self._names)) if number not in self._step.given)
        if rest and not self._step.is_dropped:
            self._give(rest)

    def _check_unchanged(self) -> None:
        hidden = self._step.values.changed()
        for number, (gradient, version) in self._step.taken.items():
            now = self._parameters[number].grad
            is_written = now is not None and now._version != version
            if now is not gradient or is_written or self._names[number] in hidden:
                self._step.is_broken = True
                raise InvalidArgumentError(
                    f"the gradient of {self._names[number]!r} was changed or removed after the backward pass, which "
                    "had already pushed it. Clip by max_grad_norm=, scale the loss instead, or use overlap=False, "
                    f"which pushes in step(). {self._after_failure}"
                )

    def collect(self, write: Write) -> bool:
        """Wait for the step's answers, and pass each to ``write`` as it arrives. Returns False if the step was dropped.

        Raises the error of a failed bucket. ``complete`` and ``collect`` then retry the same step.
        """
        failures: list[PsdistError] = []
        for bucket, numbers in self._step.buckets:
            try:
                answer = unless_dropped(bucket.wait)
            except PsdistError as error:
                failures.append(error)
                self._step.given.difference_update(numbers)
            else:
                if answer is None:
                    self._step.is_dropped = True
                    break
                write(answer)
        self._step.buckets.clear()
        if failures:
            # A bucket whose slices wait for a failed one only reports that it waits.
            raise next((error for error in failures if not isinstance(error, InvalidArgumentError)), failures[0])
        was_dropped = self._step.is_dropped
        self._end()
        return not was_dropped

    def push_pull(self, write: Write) -> None:
        """Push the whole step in one call, for steps that cannot be pushed in buckets."""
        self._take_rest()
        try:
            absent = self._absent(range(len(self._names)))
            weights = self._handle.push_pull(self._arrays, copy=False, weight=self._step.weight, absent=absent)
        except NonFiniteGradientError:
            self._step.taken.clear()  # The retry copies them again.
            raise
        write(weights)
        self._end()

    def forget(self) -> None:
        """Abandon a step that sent nothing."""
        self._end()

    def discard(self) -> bool:
        """Discard the gradients of a backward pass that failed, or whose gradients were changed afterwards.

        A push cannot be undone. If there were some, push the remaining tensors without a gradient and return True: the
        caller must still collect the step. Raises InvalidArgumentError if ``complete`` could still make a step of the
        pushed gradients.
        """
        if not self._step.given:
            self._step.taken.clear()
            self._step.values.forget()
            return False
        if self._pass == -1 and not self._step.is_broken:
            raise InvalidArgumentError(
                "zero_grad() comes after a backward pass and before step(), but the gradients of the pass are under "
                "way, and the other workers wait for the rest of the step: call step(). Run passes that are not for "
                "this optimizer in its no_sync(); to inspect gradients before deciding whether they count, use "
                "overlap=False, which pushes in step()"
            )
        rest = tuple(number for number in range(len(self._names)) if number not in self._step.given)
        for number in rest:
            self.buffers[self._names[number]].zero_()
        self._step.absent.update(rest)
        if rest and not self._step.is_dropped:
            self._give(rest)
        return True

    def check_idle(self) -> None:
        """Raise InvalidArgumentError if gradients of an unfinished step were taken."""
        if self._step.taken:
            raise InvalidArgumentError(
                "gradients of a step are under way at the end of join(): call step() after each backward pass in it"
            )

    def skip(self, weight: float) -> None:
        """Push a step of zeros, which count by ``weight``; with 0 they contribute nothing."""
        for buffer in self.buffers.values():
            buffer.zero_()
        self._handle.push(self._arrays, weight, self._names)

    def _take_rest(self) -> None:
        for number in range(len(self._parameters)):
            if number not in self._step.taken:
                self._take(number)

    def refuse(self) -> None:
        """Mark the step as refused by the caller. ``discard`` then completes it with the gradients that were pushed."""
        self._step.is_broken = bool(self._step.given)

    def _end(self) -> None:
        self._step.values.forget()
        self._step, self._pass = _Step(values=self._step.values), -1
        if self._hooks is not None:
            self.listen()


class BucketPlan:
    """Divides tensors into buckets and counts the tensors of a step that are ready.

    sizes: bytes of each tensor, in the layout's order.
    bucket_bytes: a bucket ends with the tensor that brings it to this size. Backward passes reach the last layers
        first, so buckets are filled from the last tensor on.
    """

    def __init__(self, sizes: Sequence[int], bucket_bytes: int) -> None:
        self.buckets: list[tuple[int, ...]] = []
        self._bucket_of = [0] * len(sizes)
        members: list[int] = []
        held = 0
        for number in reversed(range(len(sizes))):
            members.append(number)
            held += sizes[number]
            if held >= bucket_bytes or number == 0:
                for member in members:
                    self._bucket_of[member] = len(self.buckets)
                self.buckets.append(tuple(reversed(members)))
                members, held = [], 0
        self._missing = [len(bucket) for bucket in self.buckets]

    def start_step(self) -> None:
        """Start a step: no tensor is ready."""
        self._missing = [len(bucket) for bucket in self.buckets]

    def on_ready(self, number: int) -> tuple[int, ...]:
        """Mark tensor ``number`` as ready. Returns the bucket that it completes, or an empty tuple."""
        bucket = self._bucket_of[number]
        self._missing[bucket] -= 1
        return () if self._missing[bucket] else self.buckets[bucket]


def bucket_bytes_of(bucket_cap_mb: float) -> int:
    """Convert MiB to bytes. Raises InvalidArgumentError."""
    if (
        isinstance(bucket_cap_mb, bool)
        or not isinstance(bucket_cap_mb, int | float)
        or not 0 < bucket_cap_mb <= 1 << 20
    ):
        raise InvalidArgumentError(f"bucket_cap_mb={bucket_cap_mb!r} is out of range: use MiB above 0")
    return max(1, int(bucket_cap_mb * (1 << 20)))


logger = logging.getLogger("psdist")

#: References to a view that no script holds: the caller's list and variable, and the arguments of two functions.
_REFERENCES: Final = 4
#: Uses of a buffer's memory without a script: by the buffer, its view, and the query itself.
_USES: Final = 3


def gradient_memory(handle: Parameters, device: torch.device) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the gradient buffers of ``handle`` for a model on ``device``, and a tensor that shares the memory of each.

    All have the dtype of the servers, and the shapes of the parameters ``as_real``. Raises DeviceLostError.
    """
    number, arrays = cuda_number(device), None
    if number is not None and handle.statistics().compression.encodes_on_device:
        arrays = _on_device(handle, number)
    if arrays is None:
        arrays = handle.gradient_buffers(is_checked=False)
    return arrays, {name: as_tensor(array) for name, array in arrays.items()}


def dense(gradient: Tensor) -> Tensor:
    """Return a gradient without its sparse layout."""
    return gradient if gradient.layout is torch.strided else gradient.to_dense()


def cuda_number(device: torch.device) -> int | None:
    """Return the number of a CUDA device, or None for any other device."""
    if device.type != "cuda":
        return None
    return torch.cuda.current_device() if device.index is None else device.index


def _on_device(handle: Parameters, number: int) -> dict[str, Any] | None:
    try:
        return handle.gradient_buffers(device=f"cuda:{number}")
    except (DeviceUnavailableError, LimitExceededError) as error:
        logger.warning(
            "gradients of %r are copied to main memory and encoded there, not on cuda:%d: %s",
            handle.name, number, error.message,
        )  # fmt: skip
        return None


def as_tensor(array: Any) -> Tensor:
    """Return a tensor that shares the memory of an array of numpy or of a device."""
    return torch.from_numpy(array) if isinstance(array, np.ndarray) else from_dlpack(array)


def separate_kept(view: Tensor, buffer: Tensor, name: str) -> Tensor:
    """Return the view of ``buffer`` that becomes the gradient of the next step.

    view: gradient of the last step. If the script still holds it, it moves to memory of its own, and a new view is
        returned. Views that the script made of it cannot be moved, so their values change; one warning says so.
    name: parameter set, for the warning.
    """
    if sys.getrefcount(view) > _REFERENCES:
        view.data = view.clone()
        view = buffer.data
    if torch._C._storage_Use_Count(view.untyped_storage()._cdata) > _USES:
        _warn_of_view(name)
    return view


@lru_cache(maxsize=256)
def _warn_of_view(name: str) -> None:
    logger.warning(
        "the script still holds a view of a gradient of %r from an earlier step, such as gradient.data or "
        "gradient.view(-1). The next gradient overwrites it: clone() the values to keep",
        name,
    )  # fmt: skip

"""Arguments of a process group's calls: their forms, as c10d has them, and their checks before anything is sent.

**Forms.** A call takes lists of tensors and an object with options: ``allreduce([tensor], options)``. c10d also takes
one tensor for a list, and options one by one: ``allreduce(tensor, op=ReduceOp.MAX, timeout=limit)``, or none. The
methods of a group are written for the first form, which is that of torch.distributed and of C++. ``call`` adds the
others.

**Checks.** A rank that raises an error here has made no call: its group stays usable, as with torch's own backends.
Texts begin with those of c10d and gloo, which scripts and PyTorch's tests know.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import cache, wraps
from types import FunctionType
from typing import Any, Final, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from psdist.collectives.core.plans import check_op
from psdist.errors import DTypeMismatchError, InvalidArgumentError, WaitTimeoutError
from psdist.torch.values import numpy_dtype

Tensors = Sequence[Tensor]


@cache
def _check_meaning(op: str, dtype: torch.dtype) -> None:
    if (known := numpy_dtype(dtype)) is None:
        raise DTypeMismatchError(f"tensors of {dtype} can be moved, but not reduced: convert them to float32")
    check_op(op, known)


class Checks:
    """Checks of one call. name: of the call. size: number of ranks."""

    __slots__ = ("_name", "_size")

    def __init__(self, name: str, size: int) -> None:
        self._name = name
        self._size = size

    def refuse(self, text: str) -> NoReturn:
        """Raise InvalidArgumentError."""
        raise InvalidArgumentError(f"psdist::{self._name}: {text}")

    def root(self, rank: int) -> None:
        """Check a root."""
        if not 0 <= rank < self._size:
            self.refuse(f"invalid root rank: {rank}: ranks of this group are 0 to {self._size - 1}")

    def root_tensor(self, number: int, tensors: Tensors) -> None:
        """Check the number of the root's tensor in its list."""
        if not 0 <= number < len(tensors):
            self.refuse(f"invalid root tensor: {number}: the list has {len(tensors)} tensors")

    def some(self, tensors: Tensors, kind: str = "") -> None:
        """Check that a list has tensors. kind: "input " or "output "."""
        if not len(tensors):
            self.refuse(f"requires non-empty {kind}tensor list")

    def length(self, number: int, tensors: Tensors, expected: int) -> None:
        """Check how many tensors a list has. number: of the list."""
        if len(tensors) != expected:
            self.refuse(
                f"invalid output tensor list at index {number} (expected length {expected}, got {len(tensors)})"
            )

    def single(self, tensors: Tensors, kind: str = "") -> None:
        """Check that a list has one tensor. kind: "input " or "output "."""
        if len(tensors) != 1:
            self.refuse(f"requires a single-element {kind}tensor list, and got {len(tensors)} tensors")

    def dense(self, tensors: Tensors) -> None:
        """Check that tensors can be sent."""
        for tensor in tensors:
            if tensor.layout is not torch.strided:
                self.refuse(f"only supports dense tensors, and got layout {tensor.layout}: unsupported layout")
            if tensor.device.type != "cpu":
                self.refuse(f"unsupported device type {tensor.device.type}: use tensors on the CPU")

    def alike(self, tensors: Tensors, like: Tensor) -> None:
        """Check that tensors have the dtype and the shape of another one."""
        for number, tensor in enumerate(tensors):
            if tensor.layout is not like.layout:
                self.refuse(f"invalid tensor layout at index {number} (expected {like.layout}, got {tensor.layout})")
            if tensor.dtype is not like.dtype:
                self.refuse(f"invalid tensor type at index {number} (expected {like.dtype}, got {tensor.dtype})")
            if tensor.shape != like.shape:
                expected, found = list(like.shape), list(tensor.shape)
                self.refuse(f"invalid tensor size at index {number} (expected {expected}, got {found})")

    def each_alike(self, outputs: Tensors, inputs: Tensors) -> None:
        """Check that each output has the dtype and the shape of its input."""
        if len(outputs) != len(inputs):
            self.refuse(f"invalid output size: (expected length {len(inputs)}, got {len(outputs)})")
        for number, (output, given) in enumerate(zip(outputs, inputs, strict=True)):
            if output.shape != given.shape:
                expected, found = list(given.shape), list(output.shape)
                self.refuse(
                    f"invalid size of output tensor at index {number} (expected length {expected}, got {found})"
                )
            if output.dtype is not given.dtype:
                self.refuse(f"invalid tensor type at index {number} (expected {given.dtype}, got {output.dtype})")

    def same_kind(self, tensors: Tensors) -> None:
        """Check that tensors have one layout, dtype and device."""
        for number, tensor in enumerate(tensors):
            if tensor.layout is not tensors[0].layout:
                expected = tensors[0].layout
                self.refuse(f"invalid tensor layout at index {number} (expected {expected}, got {tensor.layout})")
            if tensor.dtype is not tensors[0].dtype:
                self.refuse(f"tensors must all have the same type, and got {tensors[0].dtype} and {tensor.dtype}")
            if tensor.device != tensors[0].device:
                self.refuse(f"tensors must all be on the same device, and got {tensors[0].device} and {tensor.device}")

    def sparse(self, op: str, tensors: Tensors) -> None:
        """Check that sparse tensors can be added by ``op``."""
        if op not in ("sum", "avg") or any(tensor.device.type != "cpu" for tensor in tensors):
            self.refuse(
                "unsupported reduction operation (allreduce of sparse tensors only works with ReduceOp.SUM and AVG, on "
                f"the CPU), and got {op}"
            )

    def reduced(self, op: str, tensors: Tensors) -> None:
        """Check that ``op`` has a meaning for tensors. Raises DTypeMismatchError, too."""
        self.dense(tensors)
        for tensor in tensors:
            _check_meaning(op, tensor.dtype)

    def rows(self, lists: Sequence[Tensors], kind: str, *, is_root: bool, like: Tensor) -> None:
        """Check the list of a root's tensors, one for each rank, and that others give none. kind: "input", "output"."""
        if not is_root:
            if len(lists):
                self.refuse(f"requires empty {kind} on non-root, and got {len(lists)} lists")
            return
        if len(lists) != 1:
            self.refuse(f"requires a single-element {kind} list containing a list with {self._size} tensors")
        if len(lists[0]) != self._size:
            self.refuse(
                f"Incorrect {kind} list size {len(lists[0])}. {kind.title()} list size should be {self._size}, same as "
                "size of the process group"
            )
        self.alike(lists[0], like)

    def pairs(self, outputs: Sequence[Any], inputs: Sequence[Any]) -> None:
        """Check that there is an output for each input, and an input."""
        if not len(inputs):
            self.refuse("requires non-empty input tensor list")
        if len(outputs) != len(inputs):
            self.refuse(
                f"requires input/output tensor lists to have the same length, and got {len(inputs)} and {len(outputs)}"
            )

    def whole(self, whole: Tensor, part: Tensor) -> None:
        """Check that a tensor has room for the parts of all ranks."""
        self.dense([whole, part])
        if whole.dtype is not part.dtype:
            self.refuse(f"invalid tensor type at index 0 (expected {part.dtype}, got {whole.dtype})")
        if whole.numel() != part.numel() * self._size:
            self.refuse(
                f"invalid tensor size at index 0: a tensor for {self._size} parts of {part.numel()} elements has "
                f"{whole.numel()}"
            )

    def packed(self, tensor: Tensor) -> None:
        """Check that a tensor has no gaps, in one of torch's memory formats."""
        formats = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim(), torch.contiguous_format)
        if not tensor.is_contiguous() and not tensor.is_contiguous(memory_format=formats):
            self.refuse("Tensors must be contiguous: give the contiguous() of the input")

    def splits(self, tensor: Tensor, sizes: Sequence[int]) -> None:
        """Check the rows that a tensor gives to, or takes from, each rank; none for equal parts."""
        self.dense([tensor])
        rows = tensor.size(0) if tensor.dim() else 1
        if sizes and len(sizes) != self._size:
            self.refuse(f"Number of tensor splits not equal to group size: {len(sizes)} and {self._size}")
        if sizes and sum(sizes) != rows:
            self.refuse(f"Split sizes doesn't match total dim 0 size: {list(sizes)} and {rows}")
        if not sizes and rows % self._size:
            self.refuse(f"Tensor's dim 0 does not divide equally across group size: {rows} rows, {self._size} ranks")


Kind = TypeVar("Kind", bound=type)


class Form(NamedTuple):
    """Form of a call.

    options: class of its options.
    depths: for each argument 2 for lists of lists of tensors, 1 for a list of tensors, 0 for others.
    given: options that may be given one by one, before the time limit.
    """

    options: Any
    depths: tuple[int, ...]
    given: tuple[str, ...] = ()


FORMS: Final[Mapping[str, Form]] = {
    "allgather": Form(c10d.AllgatherOptions, (2, 1)),
    "allgather_coalesced": Form(c10d.AllgatherOptions, (2, 1)),
    "all_gather_single": Form(c10d.AllgatherOptions, (0, 0)),
    "all_gather_single_coalesced": Form(c10d.AllgatherOptions, (1, 1)),
    "allreduce": Form(c10d.AllreduceOptions, (1,), ("op",)),
    "allreduce_coalesced": Form(c10d.AllreduceCoalescedOptions, (1,), ("op",)),
    "alltoall": Form(c10d.AllToAllOptions, (1, 1)),
    "all_to_all_single": Form(c10d.AllToAllOptions, (0, 0, 0, 0)),
    "barrier": Form(c10d.BarrierOptions, ()),
    "broadcast": Form(c10d.BroadcastOptions, (1,), ("root",)),
    "gather": Form(c10d.GatherOptions, (2, 1), ("root",)),
    "reduce": Form(c10d.ReduceOptions, (1,), ("root", "op")),
    "reduce_scatter": Form(c10d.ReduceScatterOptions, (1, 2), ("op",)),
    "reduce_scatter_single": Form(c10d.ReduceScatterOptions, (0, 0), ("op",)),
    "reduce_scatter_single_coalesced": Form(c10d.ReduceScatterOptions, (1, 1), ("op",)),
    "scatter": Form(c10d.ScatterOptions, (1, 2), ("root",)),
}
#: Names of calls before torch 2.12, and the present ones.
FORMER_NAMES: Final[Mapping[str, str]] = {
    "_allgather_base": "all_gather_single",
    "allgather_into_tensor_coalesced": "all_gather_single_coalesced",
    "_reduce_scatter_base": "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_single_coalesced",
    "alltoall_base": "all_to_all_single",
}
_ATTRIBUTES: Final = {"op": "reduceOp", "root": "rootRank", "timeout": "timeout"}


def call(method: Callable[..., Any]) -> Any:
    """Make a method for lists and options accept all forms of the call of its name. Others are a TypeError."""
    form = FORMS[method.__name__]
    count = len(form.depths)
    parameter = inspect.Parameter
    arguments = [*inspect.signature(method).parameters.values()][1 : 1 + count]
    chosen = [*form.given, "timeout", "opts"]
    signature = inspect.Signature(
        [*arguments, *(parameter(name, parameter.POSITIONAL_OR_KEYWORD, default=None) for name in chosen)]
    )

    options, is_listed = form.options, form.depths[:1] > (0,)

    @wraps(method)
    def made(self: Any, *given: Any, **named: Any) -> Any:
        if len(given) == count + 1 and type(given[count]) is options and (not is_listed or type(given[0]) is list):
            return method(self, *given, **named)
        return method(self, *_plain(form, signature, given, named))

    return made


def _plain(
    form: Form, signature: inspect.Signature, given: tuple[Any, ...], named: Mapping[str, Any]
) -> tuple[Any, ...]:
    """Return the arguments with lists and options."""
    count = len(form.depths)
    if len(given) == count + 1 and isinstance(given[count], form.options):
        given, named = given[:count], {"opts": given[count], **named}
    found = signature.bind(*given, **{_parameter(signature, key): value for key, value in named.items()})
    found.apply_defaults()
    *arguments, options = found.args
    options = form.options() if options is None else options
    for name in (*form.given, "timeout"):
        if found.arguments[name] is not None:
            setattr(options, _ATTRIBUTES[name], found.arguments[name])
    return (*map(_nested, arguments, form.depths), options)


def _parameter(signature: inspect.Signature, key: str) -> str:
    """Return the parameter that is meant. c10d has "output", "output_tensor" and "output_tensors" for one thing."""
    if key in signature.parameters:
        return key
    return next((name for name in signature.parameters if name[:5] == key[:5]), key)


def _nested(value: Any, depth: int) -> Any:
    """Return tensors in lists of ``depth``. c10d lets the outer list out if it has one entry."""
    if depth == 2 and isinstance(value, Tensor):
        raise TypeError("a tensor stands in the place of a list: give lists of tensors")
    if (depth == 1 and isinstance(value, Tensor)) or (depth == 2 and value and isinstance(value[0], Tensor)):
        return [value]
    return value


def opaque(kind: Kind) -> Kind:
    """Let torch.compile neither trace nor compile the methods of a class, and the functions that they call.

    C++ calls them while compiled code runs, for example when DistributedDataParallel forms other buckets.
    """
    frames = torch._C._dynamo.eval_frame
    if hasattr(frames, "set_code_exec_strategy"):  # torch 2.4 lacks it.
        skip = frames._FrameAction.SKIP
        for function in vars(kind).values():
            if isinstance(function, FunctionType):
                frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    return kind


def monitored_error(error: WaitTimeoutError, rank: int, limit: timedelta, wait_all_ranks: bool) -> WaitTimeoutError:
    """Return the error of a monitored barrier.

    error: that of the barrier, whose details name the absent ranks.
    rank: the rank that raises the error.
    wait_all_ranks: name all absent ranks, instead of the first one.
    """
    absent = error.details.get("absent", "").split(", ")
    if rank:
        return WaitTimeoutError(
            f"Rank {rank} successfully reached monitoredBarrier, but received errors while waiting for send/recv from "
            f"rank 0: {error.message}",
            **error.details,
        )
    named = f"Ranks {', '.join(absent)}" if wait_all_ranks and len(absent) > 1 else f"Rank {absent[0]}"
    milliseconds = round(limit.total_seconds() * 1000)
    return WaitTimeoutError(f"{named} failed to pass monitoredBarrier in {milliseconds} ms", **error.details)

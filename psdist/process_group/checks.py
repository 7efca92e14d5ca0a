"""Checks of the arguments of a process group's calls, before anything is sent.

A rank that raises an error here has made no call: its group stays usable, as with torch's own backends. Texts begin
with those of c10d, which scripts and PyTorch's tests know.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NoReturn

import torch
from torch import Tensor

from psdist.collectives.core.reductions import check_op
from psdist.errors import DTypeMismatchError, InvalidArgumentError
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

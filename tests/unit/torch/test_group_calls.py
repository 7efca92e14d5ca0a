"""Calls of a process group: the forms that c10d takes, checks of arguments, and the memory of tensors."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from psdist.errors import DTypeMismatchError, InvalidArgumentError
from psdist.process_group.checks import FORMS, Checks, call
from psdist.process_group.work import TensorMemory, apart
from psdist.torch.values import as_array

T = torch.ones(2)
SOON = timedelta(seconds=7)
DEFAULTS = {"reduceOp": dist.ReduceOp.SUM, "rootRank": 0, "timeout": timedelta(milliseconds=-1)}


class Recorder:
    """Calls that return their arguments."""

    @call
    def allreduce(self, tensors: Any, opts: Any) -> Any:
        return tensors, opts

    @call
    def broadcast(self, tensors: Any, opts: Any) -> Any:
        return tensors, opts

    @call
    def reduce(self, tensors: Any, opts: Any) -> Any:
        return tensors, opts

    @call
    def allgather(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        return outputs, inputs, opts

    @call
    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        return outputs, inputs, opts

    @call
    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        return outputs, inputs, opts

    @call
    def all_to_all_single(
        self, output: Any, input: Any, output_split_sizes: Any, input_split_sizes: Any, opts: Any
    ) -> Any:
        return output, input, output_split_sizes, input_split_sizes, opts

    @call
    def barrier(self, opts: Any) -> Any:
        return (opts,)


def plain(value: Any) -> Any:
    """Return lists with the letter T for each tensor."""
    return "T" if isinstance(value, Tensor) else [plain(one) for one in value] if isinstance(value, list) else value


def test_a_call_takes_the_forms_of_c10d() -> None:
    options: Any
    for name, given, named, tensors, options in [
        ("allreduce", ([T], c10d.AllreduceOptions()), {}, [["T"]], {}),
        ("allreduce", ([T, T],), {}, [["T", "T"]], {}),
        ("allreduce", (T,), {}, [["T"]], {}),
        ("allreduce", (T, dist.ReduceOp.MAX), {}, [["T"]], {"reduceOp": dist.ReduceOp.MAX}),
        (
            "allreduce",
            ([T],),
            {"op": dist.ReduceOp.MIN, "timeout": SOON},
            [["T"]],
            {"reduceOp": dist.ReduceOp.MIN, "timeout": SOON},
        ),
        ("allreduce", (), {"tensor": T}, [["T"]], {}),
        ("allreduce", (), {"tensors": [T], "opts": c10d.AllreduceOptions()}, [["T"]], {}),
        ("broadcast", (T,), {"root": 1}, [["T"]], {"rootRank": 1}),
        ("broadcast", (T, 1, SOON), {}, [["T"]], {"rootRank": 1, "timeout": SOON}),
        ("reduce", ([T], 1, dist.ReduceOp.MAX), {}, [["T"]], {"rootRank": 1, "reduceOp": dist.ReduceOp.MAX}),
        ("allgather", ([[T, T]], [T]), {}, [[["T", "T"]], ["T"]], {}),
        ("allgather", ([T, T], T), {}, [[["T", "T"]], ["T"]], {}),
        ("allgather", (), {"output_tensors": [T, T], "input_tensor": T}, [[["T", "T"]], ["T"]], {}),
        ("scatter", (T, [T, T]), {"root": 1}, [["T"], [["T", "T"]]], {"rootRank": 1}),
        ("scatter", ([T], []), {"root": 1}, [["T"], []], {"rootRank": 1}),
        ("reduce_scatter", (T, [T, T]), {}, [["T"], [["T", "T"]]], {}),
        ("reduce_scatter", (), {"output": T, "input": [T, T]}, [["T"], [["T", "T"]]], {}),
        ("all_to_all_single", (T, T, [1, 1], [2]), {}, ["T", "T", [1, 1], [2]], {}),
        ("all_to_all_single", (T, T), {"output_split_sizes": [], "input_split_sizes": [2]}, ["T", "T", [], [2]], {}),
        ("barrier", (), {}, [], {}),
        ("barrier", (SOON,), {}, [], {"timeout": SOON}),
        ("barrier", (), {"timeout": SOON}, [], {"timeout": SOON}),
        ("barrier", (c10d.BarrierOptions(),), {}, [], {}),
    ]:
        *found, opts = getattr(Recorder(), name)(*given, **named)
        assert [plain(value) for value in found] == tensors
        assert type(opts) is FORMS[name].options
        assert {key: getattr(opts, key) for key in DEFAULTS if hasattr(opts, key)} == {
            key: value for key, value in (DEFAULTS | options).items() if hasattr(opts, key)
        }


def test_another_form_is_a_type_error() -> None:
    for name, given, named in [
        ("allreduce", (), {}),
        ("allreduce", (T,), {"speed": 3}),
        ("allreduce", (T,), {"op": "sum"}),
        ("allreduce", (T, dist.ReduceOp.MAX), {"op": dist.ReduceOp.MAX}),
        ("broadcast", (T, 0, SOON, 1, 1), {}),
        ("allgather", (T, T), {}),
        ("barrier", (T,), {}),
    ]:
        with pytest.raises(TypeError):
            getattr(Recorder(), name)(*given, **named)


SPARSE = torch.eye(2).to_sparse()
CHECKS = Checks("allgather", 2)


def test_bad_arguments_are_refused_in_the_words_of_c10d() -> None:
    for check, text in [
        (lambda: CHECKS.root(2), "psdist::allgather: invalid root rank: 2: ranks of this group are 0 to 1"),
        (lambda: CHECKS.root(-1), "invalid root rank: -1"),
        (lambda: CHECKS.root_tensor(0, []), "invalid root tensor: 0: the list has 0 tensors"),
        (lambda: CHECKS.some([], "input "), "requires non-empty input tensor list"),
        (lambda: CHECKS.single([T, T]), "requires a single-element tensor list, and got 2 tensors"),
        (lambda: CHECKS.length(1, [T], 2), r"invalid output tensor list at index 1 \(expected length 2, got 1\)"),
        (lambda: CHECKS.dense([T, SPARSE]), "only supports dense tensors, .*sparse_coo.*unsupported layout"),
        (lambda: CHECKS.dense([T.to("meta")]), "unsupported device type meta: use tensors on the CPU"),
        (lambda: CHECKS.alike([T, torch.ones(3)], T), r"tensor size at index 1 \(expected \[2\], got \[3\]\)"),
        (lambda: CHECKS.alike([T.int()], T), r"tensor type at index 0 \(expected torch.float32, got torch.int32\)"),
        (lambda: CHECKS.alike([SPARSE], torch.eye(2)), "invalid tensor layout at index 0"),
        (lambda: CHECKS.each_alike([T], [T, T]), r"invalid output size: \(expected length 2, got 1\)"),
        (lambda: CHECKS.each_alike([T], [torch.ones(3)]), "invalid size of output tensor at index 0"),
        (lambda: CHECKS.each_alike([T], [T.int()]), "invalid tensor type at index 0"),
        (lambda: CHECKS.same_kind([T, T.int()]), "tensors must all have the same type"),
        (lambda: CHECKS.same_kind([T, T.to("meta")]), "tensors must all be on the same device"),
        (lambda: CHECKS.same_kind([torch.eye(2), SPARSE]), "invalid tensor layout at index 1"),
        (lambda: CHECKS.sparse("max", [SPARSE]), "unsupported reduction operation .* only works with ReduceOp.SUM"),
        (lambda: CHECKS.reduced("sum", [T.to(torch.float8_e4m3fn)]), "can be moved, but not reduced"),
        (lambda: CHECKS.reduced("band", [T]), "op='band' has no meaning for float32"),
        (lambda: CHECKS.rows([[T, T]], "output", is_root=False, like=T), "requires empty output on non-root"),
        (lambda: CHECKS.rows([], "input", is_root=True, like=T), "a single-element input list .* with 2 tensors"),
        (lambda: CHECKS.rows([[T]], "input", is_root=True, like=T), "Incorrect input list size 1. Input list size.* 2"),
        (lambda: CHECKS.pairs([], []), "requires non-empty input tensor list"),
        (lambda: CHECKS.pairs([T], [T, T]), "requires input/output tensor lists to have the same length"),
        (lambda: CHECKS.whole(T, T), "a tensor for 2 parts of 2 elements has 2"),
        (lambda: CHECKS.whole(torch.ones(4).int(), T), "invalid tensor type at index 0"),
        (lambda: CHECKS.packed(torch.ones(2, 3).t()), "Tensors must be contiguous"),
        (lambda: CHECKS.packed(torch.ones(2, 3, 4, 5).transpose(0, 1)), "Tensors must be contiguous"),
        (lambda: CHECKS.splits(T, [2]), "Number of tensor splits not equal to group size: 1 and 2"),
        (lambda: CHECKS.splits(T, [2, 1]), r"Split sizes doesn't match total dim 0 size: \[2, 1\] and 2"),
        (lambda: CHECKS.splits(torch.ones(3), []), "dim 0 does not divide equally across group size: 3 rows, 2 ranks"),
    ]:
        with pytest.raises((InvalidArgumentError, DTypeMismatchError), match=text) as caught:
            check()
        assert isinstance(caught.value, RuntimeError) and isinstance(caught.value, ValueError)


def test_memory_formats_are_contiguous() -> None:
    CHECKS.packed(torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last))
    CHECKS.packed(torch.ones(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d))


def test_tensors_in_one_list_that_share_memory_are_copied() -> None:
    whole, column = torch.zeros(4, 4), torch.zeros(4, 4).t()
    shared = [whole[:2], T, whole[1:3], column, whole[3:], torch.empty(0), column]
    found = apart(shared)
    same = [one.data_ptr() == other.data_ptr() for one, other in zip(found, shared, strict=True)]
    assert same == [False, True, False, False, True, True, False]
    assert all(torch.equal(one, other) for one, other in zip(found, shared, strict=True))
    far = [whole[:1], whole, whole[2:]]
    assert not any(one is other for one, other in zip(apart(far), far, strict=True))


KINDS = [
    *(torch.bool, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32),
    *(torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
]


def test_an_array_on_a_tensor_leaves_it_resizable() -> None:
    for kind in KINDS:
        for shape in [(2, 3), (), (0, 3)]:
            tensor = torch.zeros(shape, dtype=kind)
            as_array(tensor)[...] = True
            is_bytes = kind in (torch.float8_e4m3fn, torch.float8_e5m2)  # numpy lacks them.
            found, dtype = (tensor.view(torch.uint8), torch.uint8) if is_bytes else (tensor, kind)
            assert torch.equal(found, torch.ones(shape, dtype=dtype))
            memory = TensorMemory(tensor.t() if tensor.dim() == 2 else tensor)
            memory.finish()
            tensor.resize_(100)
            tensor.untyped_storage().resize_(0)

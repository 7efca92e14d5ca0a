"""Tensors that share memory: which are one tensor, which overlap, and which only lie beside each other."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from psdist.errors import InvalidArgumentError
from psdist.torch.inspection import find_aliases, inspect, merge_shared

SIZE = 24


@st.composite
def views(draw: st.DrawFn) -> tuple[int, int, int, int, int]:
    """Offset, sizes and strides of a view into SIZE elements. Its elements differ."""
    rows, columns = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    inner = draw(st.integers(1, 3))
    outer = draw(st.sampled_from([inner * columns, inner * columns + 1, 1 if inner > rows else inner * columns]))
    if len({a * outer + b * inner for a in range(rows) for b in range(columns)}) < rows * columns:
        outer = inner * columns
    span = (rows - 1) * outer + (columns - 1) * inner + 1
    offset = draw(st.integers(0, max(0, SIZE * 2 - span)))
    return offset, rows, columns, outer, inner


@given(first=views(), second=views(), device=st.sampled_from(["cpu", "meta"]))
def test_views_are_one_tensor_or_overlap_or_neither(
    first: tuple[int, ...], second: tuple[int, ...], device: str
) -> None:
    memory = torch.zeros(SIZE * 2 + 20, device=device)
    both = [
        memory.as_strided((rows, columns), (outer, inner), offset)
        for offset, rows, columns, outer, inner in (first, second)
    ]
    elements = [
        [offset + a * outer + b * inner for a in range(rows) for b in range(columns)]
        for offset, rows, columns, outer, inner in (first, second)
    ]
    tensors = dict(zip("ab", both, strict=True))
    if both[0].shape == both[1].shape and elements[0] == elements[1]:
        assert find_aliases(tensors) == {"b": "a"}
    elif set(elements[0]) & set(elements[1]):
        with pytest.raises(InvalidArgumentError, match=r"'a' of shape .* and 'b' of shape .* overlap.*clone\(\)"):
            find_aliases(tensors)
    else:
        assert find_aliases(tensors) == {}


def test_memory_of_numpy_is_compared_by_address() -> None:
    array = np.zeros((3, 4), np.float32)
    tensors = {name: torch.from_numpy(array) for name in "abc"} | {"d": torch.zeros(3, 4)}
    assert find_aliases(tensors) == {"b": "a", "c": "a"}
    with pytest.raises(InvalidArgumentError, match=r"'a'.*'e'"):
        find_aliases(tensors | {"e": torch.from_numpy(array.T)})
    with pytest.raises(InvalidArgumentError, match=r"'a'.*'e'"):
        find_aliases(tensors | {"e": torch.from_numpy(array).view(torch.int32)})


def test_empty_lazy_and_separate_tensors_share_nothing() -> None:
    lazy = nn.LazyLinear(3)
    tensors = {"empty": torch.zeros(0), "also": torch.zeros(0), "meta": torch.zeros(3, device="meta")}
    assert (
        find_aliases(tensors | {"other": torch.zeros(3, device="meta"), "lazy": lazy.weight, "bias": lazy.bias}) == {}
    )


def pair() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))


def alias(model: nn.Module) -> None:
    model[1].weight.data = model[0].weight.data


def test_equal_trained_parameters_are_tied(caplog: pytest.LogCaptureFixture) -> None:
    model = pair()
    alias(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tensors = merge_shared(model, inspect(model), optimizer)
    assert list(tensors.trained) == ["0.weight", "0.bias", "1.bias"] and not tensors.aliases
    assert model[1].weight is model[0].weight and len(optimizer.param_groups[0]["params"]) == 3
    (record,) = caplog.records
    assert "parameter '1.weight' is the memory of '0.weight'" in record.getMessage()


def test_equal_parameters_of_different_groups_are_refused() -> None:
    model = pair()
    alias(model)
    groups = [{"params": model[0].parameters()}, {"params": model[1].parameters(), "lr": 1.0}]
    with pytest.raises(InvalidArgumentError, match=r"'0.weight' and '1.weight' are the same memory.*parameter group"):
        merge_shared(model, inspect(model), torch.optim.SGD(groups, lr=0.1))
    assert model[1].weight is not model[0].weight


def freeze_alias(model: nn.Module) -> None:
    alias(model)
    model[1].weight.requires_grad_(False)


@pytest.mark.parametrize(
    ("share", "name"),
    [
        (freeze_alias, "1.weight"),
        (lambda model: model.register_buffer("seen", model[0].weight.data), "seen"),
    ],
)
def test_what_is_not_trained_may_be_the_memory_of_a_parameter(share: Callable[[nn.Module], object], name: str) -> None:
    model = pair()
    share(model)
    tensors = merge_shared(model, inspect(model), None)
    assert tensors.aliases == {name: "0.weight"} and name not in tensors.fixed


def transpose(model: nn.Module) -> None:
    model[1].weight.data = model[0].weight.data.T


def slice_rows(model: nn.Module) -> None:
    memory = torch.randn(5, 3)
    model[0].weight.data, model[1].weight.data = memory[:3], memory[2:]


def as_buffer(view: Callable[[Tensor], Tensor]) -> Callable[[nn.Module], None]:
    return lambda model: model.register_buffer("seen", view(model[0].weight.data))


def test_other_overlaps_are_refused_by_name() -> None:
    for share, names in [
        (transpose, "'0.weight' .*'1.weight'"),
        (slice_rows, "'0.weight' .*'1.weight'"),
        (as_buffer(lambda weight: weight[1]), "'0.weight' .*'seen'"),
        (as_buffer(lambda weight: weight.view(-1)), "'0.weight' .*'seen'"),
    ]:
        model = pair()
        share(model)
        with pytest.raises(InvalidArgumentError, match=names):
            merge_shared(model, inspect(model), None)


def test_slices_beside_each_other_are_trained() -> None:
    model, memory = pair(), torch.randn(6, 3)
    model[0].weight.data, model[1].weight.data = memory[::2], memory[1::2]
    assert len(merge_shared(model, inspect(model), None).trained) == 4

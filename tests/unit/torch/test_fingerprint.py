"""Writes that autograd does not see, found by comparing parts of tensors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from psdist.torch import writes
from psdist.torch.writes import FIRST, Fingerprint


def tensors(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Tensors of several shapes and layouts: contiguous, transposed, channels last, with gaps, empty and scalar."""
    random = torch.Generator().manual_seed(1)
    plain = {
        "plain": torch.randn(40, 7, generator=random),
        "transposed": torch.randn(9, 5, generator=random).T,
        "channels": torch.randn(2, 3, 4, 4, generator=random).contiguous(memory_format=torch.channels_last),
        "gaps": torch.randn(6, 8, generator=random)[:, :3],
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(2.0),
        "nan": torch.full((3,), torch.nan),
    }
    return {name: tensor.to(dtype) for name, tensor in plain.items()}


def write(tensor: Tensor, at: int) -> None:
    """Change one element, by its number in the tensor's order."""
    element = tensor.data
    for size, number in zip(reversed(tensor.shape), _numbers(tensor.shape, at), strict=True):
        element = element.select(element.ndim - 1, number % size)
    element.copy_(torch.where(element.isnan(), torch.zeros_like(element), element + 1))


def _numbers(shape: torch.Size, at: int) -> list[int]:
    numbers = []
    for size in reversed(shape):
        at, number = divmod(at, size)
        numbers.append(number)
    return numbers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@settings(max_examples=30)
@given(data=st.data())
def test_each_write_is_found_in_the_first_steps(dtype: torch.dtype, data: st.DataObject) -> None:
    mine = tensors(dtype)
    mark = Fingerprint()
    for _ in range(FIRST):
        mark.take(mine.items())
        assert mark.changed() == []
        written = data.draw(st.sets(st.sampled_from([name for name, one in mine.items() if one.numel()])))
        for name in written:
            write(mine[name], data.draw(st.integers(0, mine[name].numel() - 1)))
        assert set(mark.changed()) == written


@pytest.mark.usefixtures("small_parts")
def test_all_writes_are_found_in_each_step_if_everything_is_covered() -> None:
    mine, mark = tensors(), Fingerprint("all")
    for step in range(FIRST + 3):
        for name, tensor in mine.items():
            for at in {0, tensor.numel() // 2, tensor.numel() - 1} if tensor.numel() else ():
                mark.take(mine.items())
                assert mark.changed() == []
                write(tensor, at)
                assert mark.changed() == [name], step


def test_factors_of_changed_tensors() -> None:
    mine = {name: one for name, one in tensors().items() if name not in ("nan", "empty")}
    mark = Fingerprint()
    mark.take(mine.items())
    others = {name: one * 2 for name, one in mine.items()}
    mine["plain"].data.mul_(0.3)
    found = mark.factors({**others, "plain": mine["plain"]}.items())
    assert found == pytest.approx({**dict.fromkeys(others, 2.0), "plain": 0.3})
    mine["plain"].data.clamp_(-0.5, 0.5)
    assert mark.factors([("plain", mine["plain"])]) is None
    assert mark.factors([("scalar", mine["scalar"] * torch.inf)]) is None
    assert mark.factors([("other", mine["scalar"])]) is None


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make parts so small that a round takes several steps."""
    monkeypatch.setattr(writes, "LATER_ELEMENTS", 60)
    monkeypatch.setattr(writes, "_AT_LEAST", 2)


@pytest.mark.usefixtures("small_parts")
def test_parts_of_a_round_cover_every_element() -> None:
    mine = tensors()
    steps = -(-sum(one.numel() for one in mine.values()) // 60)
    for name, tensor in mine.items():
        for at in {*range(0, tensor.numel(), 11), tensor.numel() - 1} - {-1}:
            mark, found = Fingerprint(), []
            for step in range(FIRST + steps):
                mark.take(mine.items())
                if step >= FIRST:
                    write(tensor, at)
                    found += mark.changed()
            assert set(found) == {name}


@pytest.mark.usefixtures("small_parts")
def test_a_write_to_a_whole_tensor_is_found_at_once() -> None:
    for change in [Tensor.neg_, Tensor.zero_, lambda one: one.mul_(0.5), lambda one: one.copy_(one + 1)]:
        mine, mark = {name: one for name, one in tensors().items() if name not in ("nan", "empty")}, Fingerprint()
        for _ in range(FIRST + 3):
            mark.take(mine.items())
        for name, tensor in mine.items():
            mark.take(mine.items())
            before = tensor.clone()
            change(tensor.data)
            assert mark.changed() == [name]
            tensor.copy_(before)


@pytest.mark.usefixtures("small_parts")
def test_after_a_hidden_write_everything_is_compared_again() -> None:
    mine, mark = tensors(), Fingerprint()
    for _ in range(FIRST + 3):
        mark.take(mine.items())
    mine["plain"].data.add_(1)
    assert mark.changed() == ["plain"]
    for at in range(mine["plain"].numel()):
        mark.take(mine.items())
        write(mine["plain"], at)
        assert mark.changed() == ["plain"]


def test_nothing_is_changed_without_a_copy() -> None:
    mine, mark = tensors(), Fingerprint()
    assert mark.changed() == []
    mark.take(mine.items())
    mine["plain"].data.add_(1)
    mark.forget()
    assert mark.changed() == []

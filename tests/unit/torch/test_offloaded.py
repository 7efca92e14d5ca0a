"""Division of an offloaded model into layers, their expected order, and the places of gradients."""

from __future__ import annotations

from typing import Any, cast
from unittest.mock import Mock

import numpy as np
import pytest
from torch import nn

from psdist.errors import InvalidArgumentError, WaitTimeoutError
from psdist.torch.offloaded_layer import OffloadedLayer
from psdist.torch.offloaded_memory import GradientPlace, divide
from psdist.torch.offloaded_passes import LayerOrder


class Model(nn.Module):
    """An embedding that the last module shares, blocks in a list, and modules around them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 4)) for _ in range(3))
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight


def divided(model: nn.Module, layers: list[nn.Module] | None = None) -> tuple[dict[str, list[str]], list[Any]]:
    """Parameters by part, and for each use the module and its parts."""
    parts, uses = divide(model, dict(model.named_parameters()), layers)
    return {part.title: list(part.parameters) for part in parts}, [(use.module, use.layers) for use in uses]


def test_blocks_of_the_largest_list_come_as_a_whole_and_the_rest_by_module() -> None:
    model = Model()
    parts, uses = divided(model)
    names = [f"{number}.{kind}" for number in (0, 2) for kind in ("weight", "bias")]
    assert parts == {
        "embed": ["embed.weight"],
        **{f"blocks.{block}": [f"blocks.{block}.{name}" for name in names] for block in range(3)},
        "norm": ["norm.weight", "norm.bias"],
    }
    assert uses == [(model.embed, (0,)), *((model.blocks[at], (at + 1,)) for at in range(3)), (model.norm, (4,)),
                    (model.head, (0,))]  # fmt: skip


def test_layers_that_are_given_take_the_place_of_the_list() -> None:
    model = Model()
    parts, uses = divided(model, [model.blocks])
    assert list(parts) == ["embed", "blocks", "norm"]
    assert (model.blocks, (1,)) in uses


def test_a_list_within_a_list_is_divided_where_it_has_most_of_it() -> None:
    blocks = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    assert list(divided(nn.Sequential(blocks, nn.Linear(2, 2)))[0]) == ["0.0", "0.1", "0.2", "1"]
    assert list(divided(nn.Sequential(blocks, nn.Linear(9, 9), nn.Linear(9, 9)))[0]) == ["0", "1", "2"]


def test_a_layer_within_a_layer_is_refused() -> None:
    model = Model()
    with pytest.raises(InvalidArgumentError, match=r"'blocks' and 'blocks\.0', which is a part of it"):
        divided(model, [model.blocks, model.blocks[0]])


def test_the_order_is_learned_from_pass_to_pass() -> None:
    first, second, third = cast("list[OffloadedLayer]", [object(), object(), object()])
    order = LayerOrder()
    order.expect([first, second, third])
    assert order.first is first
    assert order.on_use(first) is second  # as the model has them
    assert order.on_use(third) is None
    order.start()
    assert order.on_use(first) is third  # as the last pass did
    assert order.on_use(third) is None


def test_a_layer_that_is_used_again_at_once_changes_nothing() -> None:
    first, second = cast("list[OffloadedLayer]", [object(), object()])
    order = LayerOrder()
    order.expect([first, second])
    assert [order.on_use(layer) for layer in (first, first, second)] == [second, second, None]


def test_a_place_without_memory_is_asked_again() -> None:
    """A step that failed, because connecting took too long, is retried."""
    buffers, layer = {"w": np.zeros(3, np.float32)}, Mock()
    layer.handle.gradient_buffers.side_effect = [WaitTimeoutError("slow"), buffers]
    place = GradientPlace(is_shared=True)
    with pytest.raises(WaitTimeoutError):
        place.buffer(layer, "w")
    assert place.holder is None
    place.buffer(layer, "w")[...] = 2.0
    assert place.holder is layer and buffers["w"].tolist() == [2.0] * 3

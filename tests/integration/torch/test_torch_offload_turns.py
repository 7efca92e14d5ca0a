"""``offload``: layers of equal size take turns with the memory of their gradients, in any order of use.

The bytes equal those of ``DistributedOptimizer``, and a worker whose backward pass failed does not keep the others
waiting.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from psdist.torch import DistributedOptimizer, OffloadedOptimizer, offload
from tests.support.launched import Run

pytestmark = pytest.mark.usefixtures("alone")


class Pair(nn.Module):
    """Two linear layers that are used one at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(4, 4)
        self.other = nn.Linear(4, 4)

    def forward(self, x: Tensor, which: int) -> Tensor:
        """Map float[batch, 4] to the same shape. which: 0, 1, or 2 for both."""
        for number, layer in enumerate((self.one, self.other)):
            x = torch.tanh(layer(x)) if which in (number, 2) else x
        return x


class Pairs(nn.Module):
    """Five layers of equal size. uses: in each step, numbers of layers and the parts used."""

    def __init__(self, uses: Sequence[Sequence[tuple[int, int]]]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Pair() for _ in range(5))
        self.uses = uses

    def loss(self, step: int) -> Tensor:
        """Return the loss of a batch."""
        return self(torch.randn(6, 4, generator=torch.Generator().manual_seed(step)), step)

    def forward(self, x: Tensor, step: int) -> Tensor:
        """Mean of squares after all layers of the step."""
        for number, which in self.uses[step % len(self.uses)]:
            x = self.layers[number](x, which)
        return x.square().mean()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def train(model: Pairs, optimizer: DistributedOptimizer | OffloadedOptimizer, steps: int = 6) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        model.loss(step).backward()
        optimizer.step()


def places(optimizer: OffloadedOptimizer) -> list[int]:
    """Return the gradient memory of each layer."""
    addresses = []
    for handle in optimizer.handles.values():
        buffer = next(iter(handle.gradient_buffers().values()))
        addresses.append(int(buffer.__array_interface__["data"][0]))
        handle.release_memory()
    return addresses


ALL = [(number, 2) for number in range(5)]
#: By description of the order: the order, and the number of layers after it that have memory of their own.
ORDERS: dict[str, tuple[list[list[tuple[int, int]]], int]] = {
    "one after the other": ([ALL], 0),
    "backwards": ([ALL[::-1]], 0),
    "in steps of two": ([[(0, 2), (2, 2), (4, 2), (1, 2), (3, 2)]], 0),
    "some layers are left out": ([ALL, ALL[::2], ALL[1::2], ALL[:1]], 0),
    # The gradients of layer 0 are complete only after those of the others, in its initial memory.
    "one layer is around others": ([[(0, 0), *ALL[1:], (0, 1)]], 4),
    "a part of a layer is left out": ([[(0, 0), *ALL[1:4], (4, 1)], ALL], 4),
}


@pytest.mark.parametrize(("uses", "apart"), ORDERS.values(), ids=ORDERS)
def test_bytes_are_those_of_a_whole_model(name: str, uses: list[list[tuple[int, int]]], apart: int) -> None:
    model = Pairs(uses)
    whole = copy.deepcopy(model)
    optimizer = offload(model, adam(model), name=name)
    train(model, optimizer)
    train(whole, DistributedOptimizer(whole, adam(whole), name=f"{name}-whole"))
    for key, one in optimizer.weights():
        assert np.array_equal(one, whole.get_parameter(key).detach().numpy()), key
    assert {handle.statistics().transport for handle in optimizer.handles.values()} == {"shm"}
    assert len(set(places(optimizer))) == 1 + apart


def test_a_backward_pass_that_failed_leaves_no_layer_with_a_turn(name: str) -> None:
    def fail(gradient: Tensor) -> Tensor:
        raise RuntimeError("no memory")

    model = Pairs([ALL])
    optimizer = offload(model, adam(model), name=name)
    # At this point layer 0 has half of its gradients.
    hook = model.layers[0].one.register_forward_hook(lambda module, inputs, output: output.register_hook(fail) and None)
    with pytest.raises(RuntimeError, match="no memory"):
        model.loss(0).backward()
    hook.remove()
    optimizer.zero_grad()
    train(model, optimizer, 2)
    assert optimizer.handle.step == 3
    assert len(set(places(optimizer))) == 1


#: Rank 0's first backward pass fails when the last layer's gradients are sent.
FAILS = """
import os
import torch
from torch import nn
from psdist.torch import offload

class Breaks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise RuntimeError("no memory")

def loss(breaks=False):
    x = torch.ones(2, 4)
    for number, layer in enumerate(model):
        x = layer(Breaks.apply(x) if breaks and number == 5 else x)
    return x.mean()

torch.set_num_threads(1)
model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(6)))
optimizer = offload(model, torch.optim.SGD(model.parameters(), lr=0.1))
if os.environ["RANK"] == "0":
    try:
        loss(breaks=True).backward()
    except RuntimeError as error:
        print("failed:", error, flush=True)
    optimizer.zero_grad()
else:
    loss().backward()
    optimizer.step()
for _ in range(2):
    optimizer.zero_grad()
    loss().backward()
    optimizer.step()
print("ends at step", optimizer.handle.step, "by", optimizer.handle.statistics().transport, flush=True)
"""


def test_a_pass_that_failed_keeps_no_other_worker_waiting(tmp_path: Path) -> None:
    status, output = Run.ended(tmp_path, FAILS)
    assert status == 0 and output.count("failed: no memory") == 1, output
    assert output.count("ends at step 3 by shm") == 2, output

"""``ElasticDDP`` in a launched run: a worker is killed and started again, and all end with the same weights."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

from psdist.errors import InvalidArgumentError, ShapeMismatchError
from psdist.torch import ElasticDDP
from psdist.torch.elastic import TrainingState, _Vectors
from tests.support.contexts import workers
from tests.support.launched import Run

#: The loop ends some steps after the killed worker is back.
_SCRIPT = """
import hashlib, os, signal
import torch
from torch import nn
import psdist
from psdist.torch import ElasticDDP

context = psdist.init()
torch.manual_seed(context.rank)
model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100, 0.9)
with ElasticDDP(model, optimizer, others={"scheduler": scheduler}) as ddp:
    was_alone, last = False, None
    while last is None or ddp.step < last:
        loss = ddp(torch.randn(4, 8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        if ddp.step == 20 and context.rank == 1 and context.client.incarnation == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        was_alone = was_alone or ddp.size == 2 or context.client.incarnation > 1
        if was_alone and ddp.size == 3 and last is None:
            last = ddp.step // 50 * 50 + 100
    state = torch.cat([one.reshape(-1).double() for one in (*model.parameters(), *model.buffers())])
    print("rank", context.rank, "weights", hashlib.sha256(state.detach().numpy().tobytes()).hexdigest(), flush=True)
    print("rank", context.rank, "rate", scheduler.get_last_lr(), flush=True)
context.close()
"""


@pytest.mark.long
def test_a_killed_worker_comes_back_to_the_same_weights(tmp_path: Path) -> None:
    flags = ("--nproc-per-node", "3", "--max-restarts", "2")
    status, output = Run.ended(tmp_path, _SCRIPT, flags=flags)
    assert status == 0, output
    weights = re.findall(r"rank (\d) weights (\w+)", output)
    assert sorted(rank for rank, _ in weights) == ["0", "1", "2"], output
    assert len({digest for _, digest in weights}) == 1, output
    assert len(set(re.findall(r"rate (\S+)", output))) == 1, output


def test_a_step_after_a_backward_pass_that_failed() -> None:
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            raise ArithmeticError("no gradient")

    with workers(1) as (context,):
        first, last = nn.Linear(2, 2), nn.Linear(2, 1)
        with ElasticDDP(nn.Sequential(first, last), context=context) as ddp:
            failing = Failing.apply(first(torch.ones(1, 2)))
            with pytest.raises(ArithmeticError):
                last(failing).sum().backward()
            ddp(torch.ones(1, 2)).sum().backward()
            assert ddp.step == 1


def test_two_states_named_optimizer_are_refused() -> None:
    module, optimizer = trained()
    with pytest.raises(InvalidArgumentError, match="use another name"):
        ElasticDDP(module, optimizer, others={"optimizer": optimizer})


def test_frozen_modules_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="no parameters to train"):
        ElasticDDP(nn.Linear(2, 2).requires_grad_(False))


def trained(width: int = 3) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a module after some steps, and its optimizer."""
    module = nn.Sequential(nn.Linear(2, width), nn.BatchNorm1d(width), nn.Linear(width, 1))
    optimizer = torch.optim.AdamW(module.parameters(), amsgrad=True)
    for _ in range(3):
        module(torch.randn(4, 2)).sum().backward()
        optimizer.step()
    return module, optimizer


async def test_a_state_is_the_same_at_another_worker() -> None:
    (mine, optimizer), (other, copied) = trained(), trained()
    data = await TrainingState(mine, {"optimizer": optimizer}).export()
    await TrainingState(other, {"optimizer": copied}).load(data)
    for name, tensor in mine.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name])
    before, after = (str(one.state_dict()) for one in (optimizer, copied))
    assert before == after


async def test_tensors_of_a_state_are_told_apart() -> None:
    class Plain:
        def __init__(self, state: dict[Any, Any]) -> None:
            self.state = state

        def state_dict(self) -> dict[Any, Any]:
            return self.state

        def load_state_dict(self, state: dict[Any, Any]) -> None:
            self.state = state

    given = {1: torch.ones(1), "1": torch.zeros(1), "a/b": torch.ones(2), "a": {"b": torch.zeros(2)}}
    (mine, _), (other, _), loaded = trained(), trained(), Plain({})
    average = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    data = await TrainingState(mine, {"module": average, "plain": Plain(given)}).export()
    await TrainingState(other, {"module": nn.Sequential(*average), "plain": loaded}).load(data)
    assert str(loaded.state) == str(given) and all(map(torch.equal, mine.parameters(), other.parameters()))


def test_gradients_that_no_worker_counts_are_dropped() -> None:
    """Check this for a worker whose state was replaced: its own gradients are of the former one."""
    module, _ = trained()
    vectors = _Vectors(dict(module.named_parameters()), {})
    for out in vectors.arrays.out:
        out[:] = 0
    vectors.finish()
    assert all(one.grad is None for one in module.parameters())


async def test_states_that_do_not_fit_change_nothing() -> None:
    (mine, optimizer), (wider, other) = trained(), trained(4)
    data = await TrainingState(mine, {"optimizer": optimizer}).export()
    weight = next(wider.parameters()).clone()
    with pytest.raises(ShapeMismatchError, match=r"'0.bias' has shape .* build the same model"):
        await TrainingState(wider, {"optimizer": other}).load(data)
    with pytest.raises(InvalidArgumentError, match="give all workers the same"):
        await TrainingState(mine, {}).load(data)
    assert torch.equal(weight, next(wider.parameters()))


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        "[]",
        '{"optimizer": {}}',
        '{"optimizer": {"tensor": "none"}}',
        '{"optimizer": {"tensor": []}}',
        '{"optimizer": {"dict": [[[], 1]]}}',
        '{"optimizer": {"list": 1}}',
    ],
    ids=["deep", "no dict", "no kind", "no tensor", "no name", "no key", "no items"],
)
async def test_states_in_another_form_are_refused_and_change_nothing(text: str) -> None:
    module = nn.Linear(2, 1)
    before = module.weight.detach().clone()
    tensors = {f"module/{name}": torch.ones_like(tensor) for name, tensor in module.named_parameters()}
    tensors["psdist/json"] = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with pytest.raises(InvalidArgumentError, match="the state of another worker cannot be read"):
        await TrainingState(module, {"optimizer": optimizer}).load(
            np.frombuffer(safetensors.torch.save(tensors), np.uint8)
        )
    assert torch.equal(module.weight, before)


def test_the_limit_on_a_state_leaves_room_for_that_of_a_trained_optimizer() -> None:
    model = nn.Linear(1000, 1000)
    optimizer = torch.optim.Adam(model.parameters())
    before = TrainingState(model, {"optimizer": optimizer}).bytes_max
    assert before == (1 << 30) + 256 * 4 * 1001 * 1000
    model(torch.ones(1000)).sum().backward()
    optimizer.step()
    after = TrainingState(model, {"optimizer": optimizer})
    assert after.bytes_max == before + 256 * (2 * 4 * 1001 * 1000 + 2 * 4)  # Two moments, and a count for each tensor.


async def test_states_that_cannot_be_sent_are_named() -> None:
    class Odd:
        def state_dict(self) -> dict[str, Any]:
            return {"when": object()}

        def load_state_dict(self, state: dict[str, Any]) -> None: ...

    with pytest.raises(InvalidArgumentError, match="'odd/when' of a state is a object, which cannot be sent"):
        await TrainingState(trained()[0], {"odd": Odd()}).export()

"""``DistributedOptimizer`` in a world of one, as in a script without a launcher.

The arithmetic is that of torch's own optimizers. Tests cover allowed and forbidden operations of a loop, and, with two
workers in two threads, everything that workers share.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

import psdist
from psdist import optim
from psdist.client.context import Context
from psdist.errors import InvalidArgumentError, NonFiniteGradientError
from psdist.torch import DistributedOptimizer, offload
from tests.support.torch_models import BATCHES, MODELS, STEPS, Attention, distance, loss_of, mlp, part, train

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-3, eps=1e-4, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, eps=1e-4),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01, initial_accumulator_value=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, eps=1e-4, momentum=0.9, centered=True),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0, eps=1e-4),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-3, eps=1e-4, maximize=True),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.1, lambd=0.1, t0=3),
    "groups": lambda p: torch.optim.SGD([{"params": [next(p)], "momentum": 0.9, "nesterov": True}, {"params": p}], 0.1),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_torch_and_the_servers_train_alike(
    alone: Context, name: str, make: Callable[[Any], torch.optim.Optimizer]
) -> None:
    model = mlp()
    other = copy.deepcopy(model)
    train(model, DistributedOptimizer(model, make(model.parameters()), name=name))
    train(other, make(other.parameters()))
    assert distance(model, other) < 1e-5


@pytest.mark.parametrize("overlap", [True, False])
def test_micro_batches_add_up(alone: Context, name: str, overlap: bool) -> None:
    model = mlp()
    other = copy.deepcopy(model)
    optimizer = DistributedOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), name=name, overlap=overlap)
    plain = torch.optim.SGD(other.parameters(), lr=0.1)
    for step in range(4):
        for one in (optimizer, plain):
            one.zero_grad(set_to_none=step % 2 == 0)
        with optimizer.no_sync():
            (loss_of(model, BATCHES(2 * step)) / 2).backward()
        (loss_of(model, BATCHES(2 * step + 1)) / 2).backward()
        for at in (2 * step, 2 * step + 1):
            (loss_of(other, BATCHES(at)) / 2).backward()
        optimizer.step()
        plain.step()
    assert distance(model, other) < 1e-5


class Parts(nn.Module):
    """Model with a frozen layer, a layer that no loss reaches, a table of sparse gradients, and running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 6, sparse=True)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 3)
        self.unused = nn.Linear(3, 3)
        self.register_buffer("mask", torch.full((3,), -torch.inf))

    def forward(self, numbers: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.frozen(self.table(numbers))))
        return logits


def test_frozen_unused_and_sparse_parameters(alone: Context, name: str) -> None:
    model = Parts()
    other = copy.deepcopy(model)
    optimizer = DistributedOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), name=name, bucket_cap_mb=1e-4)
    plain = torch.optim.SGD(other.parameters(), lr=0.1)
    assert "frozen.weight" in optimizer.handle.names, "it may be unfrozen"
    for step in range(3):
        numbers = torch.randint(10, (8,), generator=torch.Generator().manual_seed(step))
        for trained, by in ((model, optimizer), (other, plain)):
            by.zero_grad()
            nn.functional.cross_entropy(trained(numbers), numbers % 3).backward()
            by.step()
    for one, same in zip(model.state_dict().values(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(one, same)
    assert model.mask.tolist() == [-torch.inf] * 3 and int(model.norm.num_batches_tracked) == 3


def test_a_compiled_model_trains(alone: Context, name: str) -> None:
    model = mlp()
    other = copy.deepcopy(model)
    compiled = torch.compile(model, backend="aot_eager")
    optimizer = DistributedOptimizer(compiled, torch.optim.SGD(model.parameters(), lr=0.1), name=name)
    assert optimizer.handle.names[0] == "0.weight"
    train(compiled, optimizer)
    train(other, torch.optim.SGD(other.parameters(), lr=0.1))
    assert distance(model, other) < 1e-5


@pytest.mark.parametrize("consistency", [psdist.SSP(2), psdist.ASP()], ids=["ssp", "asp"])
def test_other_modes_of_one_worker_are_the_same(
    alone: Context, name: str, consistency: psdist.consistency.Consistency
) -> None:
    model = mlp()
    other = copy.deepcopy(model)
    spec = optim.SGD(lr=0.1)
    train(model, DistributedOptimizer(model, spec, consistency=consistency, max_grad_norm=0.1, name=name))
    train(other, torch.optim.SGD(other.parameters(), lr=0.1), clip=0.1)
    assert distance(model, other) < 1e-5


# --- forbidden in a loop ----------------------------------------------------------------------------------------------


@pytest.fixture
def wrapped(alone: Context, name: str) -> tuple[nn.Module, DistributedOptimizer]:
    """Return a model and its optimizer."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, DistributedOptimizer(model, optimizer, name=name, overlap=True)


def test_a_weight_comes_before_the_gradients(wrapped: tuple[nn.Module, DistributedOptimizer]) -> None:
    model, optimizer = wrapped
    optimizer.set_weight(3.0)
    loss_of(model, BATCHES(0)).backward()
    with pytest.raises(InvalidArgumentError, match="set it before the backward pass"):
        optimizer.set_weight(4.0)
    optimizer.step()


@pytest.mark.parametrize("wrap", [DistributedOptimizer, offload])
def test_a_weight_is_one_number(alone: Context, name: str, wrap: Callable[..., Any]) -> None:
    model = mlp()
    optimizer = wrap(model, optim.SGD(lr=0.1), name=name)
    for weight in (torch.tensor(5), torch.tensor([5.0]), np.int64(3), np.float32(2.5), np.ones((1, 1)), 0, 1):
        optimizer.set_weight(weight)
        loss_of(model, BATCHES(0)).backward()
        optimizer.step()
    assert optimizer.handle.step == 7
    for weight in (-1.0, True, "5", None, float("nan"), torch.tensor([1, 2]), np.ones(2), torch.tensor(True), 1j):
        with pytest.raises(InvalidArgumentError, match="out of range: use a number from 1e-18 to 1e18"):
            optimizer.set_weight(weight)


@pytest.mark.parametrize("wrap", [DistributedOptimizer, offload])
def test_the_optimizer_that_was_given_makes_no_steps(alone: Context, name: str, wrap: Callable[..., Any]) -> None:
    """Check that it makes no steps until its model is returned to it. Nothing is changed, so the step can still be made
    correctly."""
    model = mlp()
    other = copy.deepcopy(model)
    given = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = wrap(model, given, name=name)
    loss_of(model, BATCHES(0)).backward()
    with pytest.raises(InvalidArgumentError, match=r"psdist owns this torch.optim.SGD, .* step\(\) .*instead"):
        given.step()
    optimizer.step()
    if wrap is DistributedOptimizer:
        loss_of(other, BATCHES(0)).backward()
        torch.optim.SGD(other.parameters(), lr=0.1).step()
        assert distance(model, other) < 1e-5
    optimizer.close()
    given.step()


def test_a_second_backward_pass_needs_no_sync(wrapped: tuple[nn.Module, DistributedOptimizer]) -> None:
    model, _ = wrapped
    loss_of(model, BATCHES(0)).backward()
    with pytest.raises(InvalidArgumentError, match=r"got a second gradient before step\(\).*no_sync"):
        loss_of(model, BATCHES(1)).backward()


@pytest.mark.parametrize(
    "change",
    [
        lambda model, _: nn.utils.clip_grad_norm_(model.parameters(), 1e-3),
        lambda model, _: model[0].weight.grad.zero_(),
        lambda model, _: nn.utils.clip_grad_value_(model.parameters(), 1e-3),
        lambda model, _: model.zero_grad(),
    ],
    ids=["clipped", "written", "clipped by value", "cleared"],
)
def test_gradients_that_were_pushed_may_not_change(
    wrapped: tuple[nn.Module, DistributedOptimizer], change: Callable[[nn.Module, DistributedOptimizer], object]
) -> None:
    model, optimizer = wrapped
    loss_of(model, BATCHES(0)).backward()
    change(model, optimizer)
    with pytest.raises(InvalidArgumentError, match=r"was changed or removed.*zero_grad\(\).* completes the step"):
        optimizer.step()
    optimizer.zero_grad()
    assert optimizer.handle.step == 1 and all(parameter.grad is None for parameter in model.parameters())
    train(model, optimizer)
    assert optimizer.handle.step == 1 + STEPS


def test_zero_grad_between_a_backward_pass_and_its_step_is_refused(
    wrapped: tuple[nn.Module, DistributedOptimizer],
) -> None:
    model, optimizer = wrapped
    other = copy.deepcopy(model)
    loss_of(model, BATCHES(0)).backward()
    for _ in range(2):
        with pytest.raises(InvalidArgumentError, match=r"call step\(\).*no_sync\(\).*overlap=False"):
            optimizer.zero_grad()
    optimizer.step()
    plain = torch.optim.SGD(other.parameters(), lr=0.1)
    train(other, plain, steps=1)
    train(model, optimizer)
    train(other, plain)
    assert optimizer.handle.step == 1 + STEPS and distance(model, other) < 1e-5


def test_a_pass_that_is_for_the_inputs_alone_is_one_without_a_push(
    wrapped: tuple[nn.Module, DistributedOptimizer],
) -> None:
    """Check passes for the inputs, as in adversarial training, and for a loss of another model."""
    model, optimizer = wrapped
    inputs, classes = BATCHES(0)
    with optimizer.no_sync():
        inputs.requires_grad_()
        loss_of(model, (inputs, classes)).backward()
    optimizer.zero_grad()
    assert inputs.grad is not None and optimizer.handle.step == 0
    train(model, optimizer)
    assert optimizer.handle.step == STEPS


def test_zero_grad_after_the_second_of_two_passes_failed_makes_the_step(alone: Context, name: str) -> None:
    """Check two passes that each reach a part of the model; the first one was pushed."""
    model = nn.ModuleDict({"a": nn.Linear(3, 1), "b": nn.Linear(3, 1)})
    optimizer = DistributedOptimizer(model, optim.SGD(lr=0.1), name=name, overlap=True, bucket_cap_mb=1e-6)
    for _ in range(2):
        model["a"](torch.ones(1, 3)).sum().backward()
        message = r"nothing of it was sent.* Parts of other parameters were sent\. .*zero_grad\(\)"
        with pytest.raises(NonFiniteGradientError, match=message):
            (model["b"](torch.ones(1, 3)).sum() * torch.nan).backward()
        optimizer.zero_grad()
    assert optimizer.handle.step == 2
    model["a"](torch.ones(1, 3)).sum().backward()
    model["b"](torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert optimizer.handle.step == 3


def test_a_model_that_was_changed_is_seen_before_anything_is_sent(
    wrapped: tuple[nn.Module, DistributedOptimizer],
) -> None:
    model, optimizer = wrapped
    model[0] = copy.deepcopy(model[0])
    with pytest.raises(InvalidArgumentError, match="were added, replaced or removed after it was wrapped"):
        loss_of(model, BATCHES(0)).backward()
    assert optimizer.handle.step == 0


class Fragile(nn.Module):
    """Model of two layers. The backward pass fails between them on request."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 16), nn.Linear(16, 4)
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        middle = self.first(x).tanh()
        if middle.requires_grad:
            middle.register_hook(self._on_gradient)
        result: Tensor = self.second(middle)
        return result

    def _on_gradient(self, gradient: Tensor) -> None:
        if self.fails:
            raise MemoryError


def fail(model: Fragile, batch: Any) -> None:
    """Run a backward pass that ends in the middle."""
    model.fails = True
    with pytest.raises(MemoryError):
        loss_of(model, batch).backward()
    model.fails = False


@pytest.mark.parametrize("clears", [lambda model, optimizer: optimizer.zero_grad(), lambda model, _: model.zero_grad()])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_backward_pass_that_failed_before_anything_was_pushed_leaves_nothing(
    alone: Context, name: str, overlap: bool, clears: Callable[[nn.Module, DistributedOptimizer], None]
) -> None:
    model = Fragile()
    other = copy.deepcopy(model)
    optimizer = DistributedOptimizer(model, optim.SGD(lr=0.1), name=name.replace(".", "-"), overlap=overlap)
    fail(model, BATCHES(0))
    clears(model, optimizer)
    train(model, optimizer)
    train(other, torch.optim.SGD(other.parameters(), lr=0.1))
    assert optimizer.handle.step == STEPS and distance(model, other) < 1e-5


def test_a_backward_pass_that_failed_after_a_bucket_was_pushed_makes_a_step_of_it(alone: Context, name: str) -> None:
    """Check a pass that pushed the gradient of the second layer, and never computed that of the first."""
    model = Fragile()
    torch_optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = lr_scheduler.ExponentialLR(torch_optimizer, 0.9)
    optimizer = DistributedOptimizer(model, torch_optimizer, scheduler, name=name, overlap=True, bucket_cap_mb=1e-4)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    fail(model, BATCHES(0))
    with pytest.raises(InvalidArgumentError, match=r"After a failed pass.* call zero_grad\(\)"):
        loss_of(model, BATCHES(1)).backward()
    optimizer.zero_grad()
    assert optimizer.handle.step == 1
    changed = [key for key, value in model.state_dict().items() if not torch.equal(value, before[key])]
    assert changed == ["second.weight", "second.bias"]
    train(model, optimizer, scheduler)
    assert optimizer.handle.step == STEPS + 1
    optimizer.zero_grad()
    loss_of(model, BATCHES(0)).backward()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.9 ** (STEPS + 1))


@pytest.mark.parametrize("overlap", [False, True])
def test_training_goes_on_after_gradients_that_are_not_finite(alone: Context, name: str, overlap: bool) -> None:
    model = mlp()
    other = copy.deepcopy(model)
    optimizer = DistributedOptimizer(model, optim.SGD(lr=0.1), name=name, overlap=overlap)
    with pytest.raises(NonFiniteGradientError, match=r"gradient '0\.weight' holds"):
        (loss_of(model, BATCHES(0)) * torch.inf).backward()
        optimizer.step()
    train(model, optimizer)
    train(other, torch.optim.SGD(other.parameters(), lr=0.1))
    assert optimizer.handle.step == STEPS and distance(model, other) < 1e-5


def test_steps_that_were_made_elsewhere_take_the_scheduler_along(alone: Context, name: str) -> None:
    """Check this after this worker had been expelled and the others had continued."""
    model = mlp()
    torch_optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = lr_scheduler.CosineAnnealingLR(torch_optimizer, T_max=100)
    optimizer = DistributedOptimizer(model, torch_optimizer, scheduler, name=name)
    train(model, optimizer, scheduler)
    for _ in range(3):
        optimizer.handle.push({key: np.zeros(one.shape, np.float32) for key, one in model.named_parameters()})
    train(model, optimizer, scheduler)
    assert scheduler.last_epoch == optimizer.handle.step == 2 * STEPS + 3


def test_a_state_is_of_one_parameter_set(alone: Context, name: str) -> None:
    one, other = (DistributedOptimizer(mlp(), optim.SGD(lr=0.1), name=f"{name}-{end}") for end in "ab")
    with pytest.raises(InvalidArgumentError, match=f"of the parameter set '{name}-a', but this optimizer's set is"):
        other.load_state_dict(one.state_dict())


def test_the_state_belongs_to_the_run(wrapped: tuple[nn.Module, DistributedOptimizer]) -> None:
    model, optimizer = wrapped
    state = optimizer.state_dict()
    assert state["param_groups"][0]["lr"] == 0.1
    optimizer.load_state_dict(state)
    train(model, optimizer)
    with pytest.raises(InvalidArgumentError, match=f"state is of step 0, but the run is at step {STEPS}"):
        optimizer.load_state_dict(state)
    with pytest.raises(InvalidArgumentError, match="not of a DistributedOptimizer"):
        optimizer.load_state_dict(torch.optim.Adam(model.parameters()).state_dict())
    with pytest.raises(TypeError, match="cannot be copied"):
        copy.deepcopy(optimizer)


def test_a_closed_optimizer_lets_the_model_go(wrapped: tuple[nn.Module, DistributedOptimizer]) -> None:
    model, optimizer = wrapped
    optimizer.close()
    for _ in range(2):
        loss_of(model, BATCHES(0)).backward()
    assert optimizer.handle.step == 0


# --- two workers ------------------------------------------------------------------------------------------------------


def test_workers_begin_with_the_values_of_the_first(both: Callable[[Callable[[Context], Any]], list[Any]]) -> None:
    """Check all values, including frozen parameters, buffers, and bfloat16 weights, which the servers keep as
    float32."""

    def worker(context: Context) -> tuple[nn.Module, nn.Module]:
        rank, generator = context.rank, torch.Generator().manual_seed(context.rank)
        parts, half = Parts(), Attention().bfloat16()
        with torch.no_grad():
            for tensor in [*parts.parameters(), *half.parameters(), parts.norm.running_mean]:
                tensor.copy_(torch.rand(tensor.shape, generator=generator))
        parts.norm.num_batches_tracked += 2**40 + rank
        DistributedOptimizer(parts, optim.SGD(lr=0.1), name="parts", context=context)
        optimizer = DistributedOptimizer(half, optim.SGD(lr=0.1), name="half", context=context)
        first = copy.deepcopy(half)
        for step in range(3):
            optimizer.zero_grad()
            loss_of(half, part(MODELS["transformer"][1](step), rank, 2)).backward()
            optimizer.step()
        assert not torch.equal(first.embed.weight, half.embed.weight)
        return parts, half

    found = both(worker)
    for one, other in zip(*found, strict=True):
        for tensor, same in zip(one.state_dict().values(), other.state_dict().values(), strict=True):
            assert torch.equal(tensor, same)
    assert int(found[1][0].norm.num_batches_tracked) == 2**40
    assert np.isinf(found[1][0].mask.numpy()).all()


def test_torch_refuses_a_state_that_is_on_the_servers(alone: Context, name: str) -> None:
    model = nn.Linear(2, 1)
    optimizer = DistributedOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), name=name)
    for saved in (optimizer.state_dict(), json.loads(json.dumps(optimizer.state_dict()))):
        for kind in (torch.optim.SGD, torch.optim.Adam):
            other = kind(nn.Linear(2, 1).parameters(), lr=0.5)
            said = rf"parameter set '{name}' at step 0, and has settings alone.*--run-id.*load_optimizer_state"
            with pytest.raises(InvalidArgumentError, match=said):
                other.load_state_dict(saved)
            assert other.param_groups[0]["lr"] == 0.5
    optimizer.close()


def test_a_state_of_torch_with_settings_alone_is_loaded(alone: Context, name: str) -> None:
    model, other = nn.Linear(2, 1), nn.Linear(2, 1)
    optimizer = DistributedOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), name=name)
    plain = torch.optim.SGD(other.parameters(), lr=0.02)
    other(torch.ones(1, 2)).sum().backward()
    plain.step()
    optimizer.load_state_dict(plain.state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.02
    groups = [{"params": [one]} for one in other.parameters()]
    adam = torch.optim.Adam(other.parameters()).state_dict()
    for foreign in (torch.optim.SGD(groups, lr=0.3).state_dict(), adam, {"state": {0: {"momentum_buffer": None}}}):
        with pytest.raises(InvalidArgumentError, match="not of a DistributedOptimizer"):
            optimizer.load_state_dict(foreign)
    assert optimizer.param_groups[0]["lr"] == 0.02
    optimizer.close()

"""``overlap="auto"``: pushes during the backward pass once the first steps have shown that they are possible."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import psdist
from psdist import optim
from psdist.client.context import Context
from psdist.errors import InvalidArgumentError
from psdist.torch import DistributedOptimizer
from tests.support.contexts import everywhere, workers
from tests.support.torch_models import BATCHES, distance, loss_of, mlp, part, same_bytes

STEPS = 5
Two = Callable[[Callable[[Context], Any]], list[Any]]


def train(model: nn.Module, optimizer: Any, change: Callable[[nn.Module, int], None] | None = None) -> list[bool]:
    """Make steps that change gradients between backward() and step(). Return if each was pushed during backward()."""
    overlapped = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, BATCHES(step)).backward()
        if change is not None:
            change(model, step)
        overlapped.append(bool(optimizer._stream._step.given) if isinstance(optimizer, DistributedOptimizer) else False)
        optimizer.step()
    return overlapped


def clip(model: nn.Module, step: int) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def clip_nothing(model: nn.Module, step: int) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1e6)


def clamp_data(model: nn.Module, step: int) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.data.clamp_(-1e-3, 1e-3)


def negate_data(model: nn.Module, step: int) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.data.neg_()


def replace(model: nn.Module, step: int) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad = parameter.grad * 2


def add_a_pass(model: nn.Module, step: int) -> None:
    loss_of(model, BATCHES(step + 7)).backward()


def clip_the_second(model: nn.Module, step: int) -> None:
    if step == 1:
        clip(model, step)


def write_weights(model: nn.Module, step: int) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)


def write_data(model: nn.Module, step: int) -> None:
    list(model.parameters())[-1].data.fill_(0.25)


def test_a_plain_loop_overlaps_from_the_third_step_on(alone: Context, name: str) -> None:
    model = mlp()
    optimizer = DistributedOptimizer(model, optim.SGD(lr=0.1), name=name)
    assert train(model, optimizer) == [False, False, True, True, True]
    assert not model[0].weight._post_accumulate_grad_hooks or len(model[0].weight._post_accumulate_grad_hooks) == 1


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (clip, "changed after backward"),
        (clip_nothing, "changed after backward"),
        (clamp_data, "changed after backward"),
        (negate_data, "changed after backward"),
        (replace, "changed after backward"),
        (clip_the_second, "changed after backward"),
        (add_a_pass, "two gradients in a step"),
        (write_weights, "was written to after backward"),
        (write_data, "was written to after backward"),
    ],
)
def test_a_script_that_changes_gradients_or_weights_pushes_in_step(
    alone: Context, name: str, caplog: pytest.LogCaptureFixture, change: Callable[[nn.Module, int], None], reason: str
) -> None:
    model = mlp()
    other = copy.deepcopy(model)
    with caplog.at_level(logging.INFO, logger="psdist"):
        optimizer = DistributedOptimizer(model, optim.SGD(lr=0.1), name=name)
        assert not any(train(model, optimizer, change))
    lines = [record for record in caplog.records if "pushes gradients in step()" in record.getMessage()]
    assert len(lines) == 1 and reason in lines[0].getMessage() and lines[0].levelno == logging.INFO
    train(other, torch.optim.SGD(other.parameters(), lr=0.1), change)
    assert distance(model, other) < 1e-5


def critic_and_generator(name: str) -> list[tuple[nn.Module, DistributedOptimizer]]:
    """Return two small models and their optimizers."""
    torch.manual_seed(0)
    models = [nn.Linear(4, 1), nn.Linear(4, 4)]
    return [
        (model, DistributedOptimizer(model, optim.SGD(lr=0.01), name=f"{name}-{number}"))
        for number, model in enumerate(models)
    ]


@pytest.mark.parametrize("critic_steps", [1, 2, 3, 5])
def test_the_choice_is_made_after_whole_iterations_of_all_optimizers(
    alone: Context, name: str, caplog: pytest.LogCaptureFixture, critic_steps: int
) -> None:
    """The generator's loss reaches the critic, whose gradients of it are cleared in its next step."""
    (critic, judges), (generator, generates) = critic_and_generator(name)
    overlapped = []
    with caplog.at_level(logging.INFO, logger="psdist"):
        for step in range(4 * critic_steps):
            judges.zero_grad()
            (critic(generator(torch.ones(2, 4)).detach()).mean() - critic(torch.zeros(2, 4)).mean()).backward()
            judges.step()
            if step % critic_steps == critic_steps - 1:
                generates.zero_grad()
                (-critic(generator(torch.ones(2, 4))).mean()).backward()
                overlapped.append(bool(generates._stream._step.given))
                generates.step()
    assert "gradients were cleared before step()" in caplog.text and not judges._overlap.is_active
    assert overlapped == [False, False, True, True]
    judges.close()
    generates.close()


def test_optimizers_without_a_reason_overlap_once_all_have_made_two_steps(alone: Context, name: str) -> None:
    for _, unused in critic_and_generator(f"{name}-unused"):
        unused.close()  # Nobody waits for it then.
    (first, often), (second, seldom) = critic_and_generator(name)
    for step in range(9):
        for model, optimizer in ((first, often), (second, seldom)):
            if optimizer is often or step % 3 == 2:
                optimizer.zero_grad()
                model(torch.ones(2, 4)).mean().backward()
                assert bool(optimizer._stream._step.given) == (step > (6 if optimizer is often else 5)), step
                optimizer.step()
    often.close()
    seldom.close()


def test_gradients_that_are_assigned_are_pushed_in_step(
    alone: Context, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = mlp()
    optimizer = DistributedOptimizer(model, optim.SGD(lr=0.1), name=name)
    with caplog.at_level(logging.INFO, logger="psdist"):
        for _ in range(STEPS):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(1e-3)
                    parameter.grad = torch.ones_like(parameter)
            optimizer.step()
    assert "without a backward pass" in caplog.text and not optimizer._overlap.is_active
    optimizer.close()


def test_a_change_after_the_first_steps_is_refused_with_the_remedy(alone: Context, name: str) -> None:
    model = mlp()
    optimizer = DistributedOptimizer(model, optim.SGD(lr=0.1), name=name)
    with pytest.raises(InvalidArgumentError, match="overlap=False"):
        train(model, optimizer, lambda model, step: clip(model, step) if step == 3 else None)


@pytest.mark.parametrize("value", ["yes", 1, None])
def test_other_values_are_refused(alone: Context, name: str, value: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="use 'auto', True or False"):
        DistributedOptimizer(mlp(), optim.SGD(lr=0.1), name=name, overlap=value)


@pytest.fixture
def two() -> Iterator[Two]:
    """Do the same in both workers of a run of its own."""
    with workers(2) as contexts:
        yield partial(everywhere, contexts)


def test_workers_choose_alone_and_the_mean_is_clipped(two: Two) -> None:
    start = mlp()

    def work(context: Context) -> Any:
        mixed, plain, means = (copy.deepcopy(start) for _ in range(3))
        norms = []
        inner = {"name": "mixed", "overlap": context.rank == 0}
        for model, settings in ((mixed, inner), (plain, {"name": "plain"}), (means, {"name": "means"})):
            optimizer = DistributedOptimizer(model, optim.SGD(lr=0.1), context=context, bucket_cap_mb=0.002, **settings)
            for step in range(STEPS):
                optimizer.zero_grad()
                loss_of(model, part(BATCHES(step), context.rank, 2)).backward()
                if model is means:
                    norms.append(float(optimizer.clip_grad_norm_(0.05)))
                optimizer.step()
        return mixed, plain, means, norms

    one, other = two(work)
    for model, same in [*zip(one[:3], other[:3], strict=True), (one[0], one[1])]:
        assert same_bytes(model, same)
    expected, norms = copy.deepcopy(start), []
    plain = torch.optim.SGD(expected.parameters(), lr=0.1)
    for step in range(STEPS):
        plain.zero_grad()
        loss_of(expected, BATCHES(step)).backward()
        norms.append(float(nn.utils.clip_grad_norm_(expected.parameters(), 0.05)))
        plain.step()
    assert one[3] == other[3] == pytest.approx(norms, rel=1e-5)
    assert distance(one[2], expected) < 1e-5


def halve(model: nn.Module, step: int) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.data.mul_(0.5)


def halve_later(model: nn.Module, step: int) -> None:
    if step:
        halve(model, step)


def clip_by_hand(model: nn.Module, step: int) -> None:
    norm = torch.stack([one.grad.norm() for one in model.parameters() if one.grad is not None]).norm()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.mul_(0.01 / norm)


def clamp_and_clip(model: nn.Module, step: int) -> None:
    clamp_data(model, step)
    clip(model, step)


@pytest.mark.parametrize(
    ("change", "warns"),
    [
        (clip, False),
        (halve, False),
        (negate_data, False),
        (replace, False),
        (add_a_pass, False),
        (write_weights, False),
        (halve_later, True),
        (clamp_data, True),
        (clip_by_hand, True),
        (clamp_and_clip, True),
    ],
)
def test_two_workers_are_warned_of_changes_that_the_mean_does_not_commute_with(
    two: Two, caplog: pytest.LogCaptureFixture, change: Callable[[nn.Module, int], None], warns: bool
) -> None:
    def work(context: Context) -> None:
        torch.manual_seed(context.rank)
        model = mlp()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        train(model, DistributedOptimizer(model, inner, context=context, name="own"), change)

    with caplog.at_level(logging.WARNING, logger="psdist"):
        two(work)
    lines = [text for record in caplog.records if "before the mean" in (text := record.getMessage())]
    assert len(lines) == 2 * warns and all("average_gradients()" in line for line in lines)


def test_a_scaler_that_unscales_and_skips_is_no_change(two: Two, caplog: pytest.LogCaptureFixture) -> None:
    """Check that the first step overflows, so that the scale differs in the second one."""

    def work(context: Context) -> float:
        model = mlp()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = DistributedOptimizer(model, inner, context=context, name="scaled")
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        for step in range(STEPS):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, part(BATCHES(step), context.rank, 2)) * (1e38 * 1e3) ** (not step)).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        return scaler.get_scale()

    with caplog.at_level(logging.INFO, logger="psdist"):
        assert two(work) == [2.0**9] * 2
    texts = [record.getMessage() for record in caplog.records]
    assert sum("GradScaler may skip" in text for text in texts) == 2
    assert not any("before the mean" in text for text in texts)


def test_the_mean_needs_common_steps_and_unsent_gradients(alone: Context, name: str) -> None:
    model = mlp()
    asynchronous = DistributedOptimizer(
        copy.deepcopy(model), optim.SGD(lr=0.1), name=f"{name}-asp", consistency=psdist.ASP(), context=alone
    )
    with pytest.raises(InvalidArgumentError, match=r"in ASP.*torch\.nn\.utils\.clip_grad_norm_"):
        asynchronous.average_gradients()
    early = DistributedOptimizer(model, optim.SGD(lr=0.1), name=name, overlap=True)
    with pytest.raises(InvalidArgumentError, match="from the first step on, or use overlap=False"):
        early.clip_grad_norm_(1.0)
    early.close()
    late = DistributedOptimizer(mlp(), optim.SGD(lr=0.1), name=f"{name}-join", context=alone)
    with late.join(), pytest.raises(InvalidArgumentError, match=r"in join\(\)"):
        late.average_gradients()


def test_means_of_gradients_that_are_missing_or_not_finite(alone: Context, name: str) -> None:
    model = nn.Sequential(nn.Linear(12, 4), nn.Linear(3, 3))
    optimizer = DistributedOptimizer(model, optim.SGD(lr=0.1), name=name)
    for factor in (1.0, float("inf")):
        optimizer.zero_grad()
        (loss_of(model[0], BATCHES(0)) * factor).backward()
        optimizer.average_gradients()
        assert model[1].weight.grad is None
        assert torch.isfinite(model[0].weight.grad).all() == (factor == 1.0)
    with pytest.raises(psdist.errors.NonFiniteGradientError):
        optimizer.step()

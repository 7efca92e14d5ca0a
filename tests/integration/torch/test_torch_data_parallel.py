"""``DistributedDataParallel``: two workers, in two threads of this process with real servers.

They are compared with one process that has both of their batches.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import psdist
from psdist.client.context import Context
from psdist.errors import InvalidArgumentError
from psdist.torch import DistributedDataParallel, DistributedOptimizer
from tests.support.contexts import everywhere, workers
from tests.support.torch_models import BATCHES, distance, loss_of, mlp, part, same_bytes

Work = Callable[[Context], Any]


def test_equal_gradients_are_no_reason_for_a_warning(
    both: Callable[[Work], list[Any]], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Check that there is no warning: only psdist.torch writes to its buffers, so a script could not follow the
    remedy."""

    def worker(context: Context) -> int:
        model = mlp()
        wrapped = DistributedDataParallel(model, name=name, context=context)
        optimizer = DistributedOptimizer(other := mlp(), psdist.optim.SGD(lr=0.0), name=f"{name}-2", context=context)
        for _ in range(7):
            model.zero_grad()
            optimizer.zero_grad()
            loss_of(wrapped, BATCHES(0)).backward()
            loss_of(other, BATCHES(0)).backward()
            optimizer.step()
        return wrapped.handle.step

    assert both(worker) == [7, 7]
    assert "in a row" not in caplog.text


@pytest.mark.parametrize("way", ["no_sync", "views", "attribute"])
def test_micro_batches_and_an_optimizer_of_the_script(both: Callable[[Work], list[Any]], name: str, way: str) -> None:
    """Check this with clipping by torch, on the averaged gradients. Some scripts set the attribute before the forward
    pass."""
    at_first = mlp()

    def worker(context: Context) -> nn.Module:
        model = copy.deepcopy(at_first)
        wrapped = DistributedDataParallel(
            model, name=name, context=context, gradient_as_bucket_view=way == "views", bucket_cap_mb=0.002
        )
        optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-3, eps=1e-4)
        for step in range(6):
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            wrapped.require_backward_grad_sync = way != "attribute"
            with wrapped.no_sync() if way != "attribute" else nullcontext():
                loss_of(wrapped, part(BATCHES(2 * step), context.rank, 2)).backward()
            wrapped.require_backward_grad_sync = True
            loss_of(wrapped, part(BATCHES(2 * step + 1), context.rank, 2)).backward()
            nn.utils.clip_grad_norm_(wrapped.parameters(), 0.5)
            optimizer.step()
        assert wrapped.handle.step == 6
        return model

    alone = copy.deepcopy(at_first)
    optimizer = torch.optim.AdamW(alone.parameters(), lr=1e-3, eps=1e-4)
    for step in range(6):
        optimizer.zero_grad()
        for at in (2 * step, 2 * step + 1):
            loss_of(alone, BATCHES(at)).backward()
        nn.utils.clip_grad_norm_(alone.parameters(), 0.5)
        optimizer.step()
    one, other = both(worker)
    assert same_bytes(one, other) and distance(one, alone) < 1e-5


@pytest.mark.parametrize("wrapper", ["optimizer", "without overlap", "data parallel"])
def test_uneven_batches_make_the_step_of_one_process(
    both: Callable[[Work], list[Any]], name: str, wrapper: str
) -> None:
    """Check losses that are the mean of a worker's samples, whose number differs in each step."""
    at_first, sizes = mlp(), [(1, 9), (4, 4), (7, 0), (30, 2)]
    random = torch.Generator().manual_seed(7)
    batches = [(torch.randn(sum(size), 12, generator=random), torch.arange(sum(size)) % 4) for size in sizes]

    def own(step: int, rank: int) -> tuple[Tensor, Tensor]:
        cut, (inputs, classes) = sizes[step][0], batches[step]
        return (inputs[:cut], classes[:cut]) if rank == 0 else (inputs[cut:], classes[cut:])

    def worker(context: Context) -> nn.Module:
        model = copy.deepcopy(at_first)
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        network: nn.Module = model
        if wrapper == "data parallel":
            network = weighted = DistributedDataParallel(model, name=name, context=context)
        else:
            optimizer = weighted = DistributedOptimizer(
                model, optimizer, name=name, context=context, overlap=wrapper == "optimizer"
            )
        for step in range(len(sizes)):
            mine = own(step, context.rank)
            optimizer.zero_grad()
            weighted.set_weight(len(mine[0]))
            if len(mine[0]):
                loss_of(network, mine).backward()
            else:
                torch.stack([0.0 * parameter.sum() for parameter in model.parameters()]).sum().backward()
            optimizer.step()
        return model

    alone = copy.deepcopy(at_first)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for batch in batches:
        optimizer.zero_grad()
        loss_of(alone, batch).backward()
        optimizer.step()
    one, other = both(worker)
    assert same_bytes(one, other) and distance(one, alone) < 1e-5


class Branches(nn.Module):
    """Model that uses one of its layers on request, and keeps statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor, which: int) -> Tensor:
        y: Tensor = self.norm(self.layers[which](x))
        return y


def test_parameters_that_one_worker_does_not_reach(both: Callable[[Work], list[Any]], name: str) -> None:
    def worker(context: Context) -> tuple[nn.Module, list[Tensor | None]]:
        torch.manual_seed(context.rank)
        model = DistributedDataParallel(Branches(), name=name, context=context, find_unused_parameters=True)
        assert next(iter(model.state_dict())) == "module.layers.0.weight"
        local = copy.deepcopy(model.module)
        x = torch.ones(4, 3).cumsum(0)
        model(x, context.rank).pow(3).sum().backward()
        local(x, context.rank).pow(3).sum().backward()
        return model.module, [parameter.grad for parameter in local.parameters()]

    (one, mine), (other, theirs) = both(worker)
    for parameter, same, a, b in zip(one.parameters(), other.parameters(), mine, theirs, strict=True):
        if a is None and b is None:
            assert parameter.grad is None and same.grad is None, "of layer 2, which nobody reaches"
            continue
        mean = sum(gradient for gradient in (a, b) if gradient is not None) / 2
        assert torch.equal(parameter.grad, mean) and torch.equal(same.grad, mean)


def test_buffers_are_those_of_the_first_worker(both: Callable[[Work], list[Any]], name: str) -> None:
    """Check that the second worker's buffers are local to each forward pass, as in torch's DDP."""

    def worker(context: Context) -> list[dict[str, Tensor]]:
        model = DistributedDataParallel(nn.BatchNorm1d(2), name=name, context=context)
        seen = []
        for step in range(3):
            x = torch.randn(5, 2, generator=torch.Generator().manual_seed(10 * context.rank + step))
            model(x).sum().backward()
            seen.append(copy.deepcopy(model.module.state_dict()))
        return seen

    first, second = both(worker)
    assert int(first[-1]["num_batches_tracked"]) == int(second[-1]["num_batches_tracked"]) == 3
    expected = nn.BatchNorm1d(2)
    for step in range(2):
        expected(torch.randn(5, 2, generator=torch.Generator().manual_seed(step)))
    assert torch.equal(first[1]["running_mean"], expected.running_mean)
    expected(torch.randn(5, 2, generator=torch.Generator().manual_seed(12)))
    assert torch.equal(second[2]["running_mean"], expected.running_mean), "from the first worker's after two steps"


def rows(rank: int, step: int) -> Tensor:
    return torch.randn(5, 2, generator=torch.Generator().manual_seed(10 * rank + step))


def test_an_evaluation_has_the_buffers_of_the_first_worker(both: Callable[[Work], list[Any]], name: str) -> None:
    def worker(context: Context) -> list[Tensor]:
        model = DistributedDataParallel(nn.BatchNorm1d(2), name=name, context=context)
        results = []
        for step in range(3):
            with model.no_sync():
                model(rows(context.rank, step)).sum().backward()
            model(rows(context.rank, step + 5)).sum().backward()
            model.eval()
            with torch.inference_mode() if step else torch.no_grad():
                results += [model(rows(7, step)) for _ in range(2)]
            model.train()
        return results

    first, second = both(worker)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_the_first_worker_may_evaluate_alone(both: Callable[[Work], list[Any]], name: str) -> None:
    """Check that it waits for nobody, and that the others have its buffers afterwards."""

    def worker(context: Context) -> Tensor:
        model = DistributedDataParallel(nn.BatchNorm1d(2), name=name, context=context)
        for step in range(3):
            model(rows(context.rank, step)).sum().backward()
            if context.rank == 0:
                model.eval()
                with torch.no_grad():
                    model(rows(7, step))
                model.train()
            context.client.barrier(f"{name}-{step}")
        last = model(rows(3, 3)).detach()
        return torch.cat([last, model.module.running_mean[None]])

    first, second = both(worker)
    assert torch.equal(first, second)


def test_buffers_that_a_backward_pass_needs_may_be_copied(both: Callable[[Work], list[Any]], name: str) -> None:
    def worker(context: Context) -> Tensor:
        model = DistributedDataParallel(nn.BatchNorm1d(2).eval(), name=name, context=context)
        model.eval()
        loss = model(rows(context.rank, 0)).square().sum() + model(rows(context.rank, 1)).square().sum()
        loss.backward()
        return model.module.weight.grad

    first, second = both(worker)
    assert torch.equal(first, second)


def test_a_parameter_without_a_gradient_is_named(both: Callable[[Work], list[Any]], name: str) -> None:
    def worker(context: Context) -> None:
        model = DistributedDataParallel(Branches(), name=name, context=context, broadcast_buffers=False)
        with pytest.raises(InvalidArgumentError, match=r"no gradient of layers\.1.*find_unused_parameters=True"):
            model(torch.ones(4, 3), 0).sum().backward()

    both(worker)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"process_group": object()}, "process_group=.* is not supported"),
        ({"mixed_precision": "bf16"}, "mixed_precision='bf16' is not supported"),
        ({"no_such": 1}, "has no argument 'no_such'$"),
        ({"path": "auto"}, "has no argument 'path' any more.*torch.nn.parallel.DistributedDataParallel after"),
        ({"bucket_cap_mb": 0}, "bucket_cap_mb=0 is out of range"),
        ({"device_ids": ["cpu:1"]}, "but the model is on cpu"),
    ],
)
def test_arguments_that_would_have_no_effect_are_refused(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidArgumentError, match=said):
        DistributedDataParallel(mlp(), **arguments)


def test_some_workers_of_a_run_average_their_own_gradients() -> None:
    at_first = nn.Linear(2, 1)

    def worker(context: Context) -> float:
        ranks = [0, 3] if context.rank in (0, 3) else [1, 2]
        part, name = context.subset(ranks), f"part-{ranks[0]}"
        wrapped = DistributedDataParallel(copy.deepcopy(at_first), context=part, name=name)
        wrapped(torch.full((1, 2), 4.0**context.rank)).sum().backward()
        return wrapped.module.weight.grad[0, 0].item()  # type: ignore[index,no-any-return]  # has a gradient

    with workers(4) as contexts:
        assert everywhere(contexts, worker) == [32.5, 10.0, 10.0, 32.5]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_cuda_device_that_is_not_there_is_named() -> None:
    with pytest.raises(InvalidArgumentError, match="names a CUDA device, but this process sees none"):
        DistributedDataParallel(mlp(), device_ids=[0])


def test_hooks_on_the_communication_are_refused(both: Callable[[Work], list[Any]], name: str) -> None:
    def worker(context: Context) -> None:
        model = DistributedDataParallel(mlp(), [torch.device("cpu")], name=name, context=context, process_group=None)
        with pytest.raises(InvalidArgumentError, match="pass compression="):
            model.register_comm_hook(None, print)

    both(worker)


class TwoWays(nn.Module):
    """Model whose forward pass takes one of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 1), nn.Linear(3, 1)

    def forward(self, x: Tensor, branch: str) -> Tensor:
        return torch.sum(self.get_submodule(branch)(x))


def test_a_parameter_that_only_a_micro_batch_reaches_is_averaged(both: Callable[[Work], list[Any]], name: str) -> None:
    def worker(context: Context) -> list[Tensor]:
        wrapped = DistributedDataParallel(TwoWays(), name=name, context=context, find_unused_parameters=True)
        x = torch.full((1, 3), context.rank + 1.0)
        with wrapped.no_sync():
            wrapped(x, "b").backward()
        wrapped(x, "a").backward()
        return [parameter.grad.clone() for parameter in wrapped.parameters() if parameter.grad is not None]

    one, other = both(worker)
    for mine, theirs in zip(one, other, strict=True):
        assert torch.equal(mine, theirs)
    assert [gradient.flatten()[0].item() for gradient in one] == [1.5, 1.0, 1.5, 1.0]


def test_a_micro_batch_that_was_dropped_reached_nothing(both: Callable[[Work], list[Any]], name: str) -> None:
    def worker(context: Context) -> list[bool]:
        wrapped = DistributedDataParallel(TwoWays(), name=name, context=context, find_unused_parameters=True)
        with wrapped.no_sync():
            wrapped(torch.ones(1, 3), "b").backward()
        torch.optim.SGD(wrapped.parameters(), lr=0.1).zero_grad()
        wrapped(torch.ones(1, 3), "a").backward()
        return [parameter.grad is not None for parameter in wrapped.parameters()]

    assert both(worker) == [[True, True, False, False]] * 2


class Centered(nn.Module):
    """Module whose buffer becomes another tensor in each forward pass."""

    center: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 4)
        self.register_buffer("center", torch.zeros(12))

    def forward(self, x: Tensor) -> Tensor:
        self.center = self.center * 0.9 + x.mean(0) * 0.1
        result: Tensor = self.layer(x - self.center)
        return result


def test_a_buffer_that_was_replaced_is_that_of_the_first_worker(both: Callable[[Work], list[Any]], name: str) -> None:
    def worker(context: Context) -> Tensor:
        module = Centered()
        wrapped = DistributedDataParallel(module, name=name, context=context)
        for step in range(4):
            loss_of(wrapped, part(BATCHES(step), context.rank, 2)).backward()
        wrapped._begin_step()
        return module.center

    one, other = both(worker)
    assert torch.equal(one, other) and one.abs().sum() > 0


def test_a_compiled_wrapper_of_a_model_with_buffers_trains(both: Callable[[Work], list[Any]], name: str) -> None:
    at_first = nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))

    def worker(context: Context) -> nn.Module:
        model = copy.deepcopy(at_first)
        wrapped = DistributedDataParallel(model, name=name, context=context)
        compiled = torch.compile(wrapped, backend="eager") if context.rank == 0 else wrapped
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            optimizer.zero_grad()
            loss_of(compiled, part(BATCHES(step), context.rank, 2)).backward()
            optimizer.step()
        return model

    one, other = both(worker)
    assert same_bytes(one, other)


def test_a_copy_is_one_of_the_module(both: Callable[[Work], list[Any]], name: str) -> None:
    def worker(context: Context) -> None:
        wrapped = DistributedDataParallel(mlp(), name=name, context=context)
        for copy_it in (copy.deepcopy, lambda one: torch.save(one, io.BytesIO())):
            with pytest.raises(TypeError, match=r"copy or save its \.module"):
                copy_it(wrapped)

    both(worker)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda model: model.append(nn.Linear(4, 4)), "added, replaced or removed after it was wrapped"),
        (lambda model: model.__setitem__(1, nn.Linear(4, 4)), "added, replaced or removed after it was wrapped"),
        (lambda model: model[0].weight.requires_grad_(True), r"'0\.weight' was unfrozen after the model was wrapped"),
    ],
    ids=["added", "replaced", "unfrozen"],
)
def test_a_model_that_is_changed_later_is_told(
    both: Callable[[Work], list[Any]], name: str, change: Callable[[nn.Sequential], object], said: str
) -> None:
    def worker(context: Context) -> None:
        model = nn.Sequential(nn.Linear(12, 4), nn.Linear(4, 4))
        model[0].weight.requires_grad_(False)
        wrapped = DistributedDataParallel(model, name=name, context=context)
        change(model)
        with pytest.raises(InvalidArgumentError, match=said):
            loss_of(wrapped, BATCHES(0)).backward()

    both(worker)


def test_a_pass_that_failed_after_a_bucket_was_pushed_cannot_be_made_good(
    both: Callable[[Work], list[Any]], name: str
) -> None:
    def fail(gradient: Tensor) -> None:
        raise MemoryError

    def worker(context: Context) -> None:
        model = mlp()
        wrapped = DistributedDataParallel(model, name=name, context=context, bucket_cap_mb=1e-4)
        hook = model[0].weight.register_hook(fail)
        with pytest.raises(MemoryError):
            loss_of(wrapped, BATCHES(0)).backward()
        hook.remove()
        with pytest.raises(InvalidArgumentError, match="the others make a step that it did not: stop the run"):
            loss_of(wrapped, BATCHES(0)).backward()

    both(worker)


def test_buffers_are_those_of_the_next_worker_when_the_first_is_gone() -> None:
    def worker(context: Context) -> list[Tensor]:
        wrapped = DistributedDataParallel(nn.BatchNorm1d(2), context=context)
        seen = []
        for step in range(4):
            if context.rank == 0 and step == 2:
                context.client.close()
                break
            wrapped(torch.full((2, 2), 10.0 * step + context.rank)).sum().backward()
            wrapped._begin_step() if step == 3 else None
            seen.append(wrapped.module.running_mean.clone())
        return seen

    with workers(3) as contexts:
        _, second, third = everywhere(contexts, worker)
    expected = nn.BatchNorm1d(2)
    for value in (0.0, 11.0, 21.0, 31.0):
        expected(torch.full((2, 2), value))
    assert torch.equal(second[-1], third[-1]) and torch.equal(second[-1], expected.running_mean)

"""Local steps: ``DiLoCo`` and ``LocalSGD`` with real servers. Workers are threads of this process."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

import psdist
from psdist.client.context import Context
from psdist.errors import InvalidArgumentError
from psdist.torch import DiLoCo, DistributedOptimizer, LeasedDataLoader, LocalSGD
from psdist.torch.local_steps import _decode, _divide, _encode
from tests.support import reference
from tests.support.contexts import everywhere, workers
from tests.support.launched import Run

OUTER = psdist.optim.SGD(lr=0.7, momentum=0.9, nesterov=True)


def network() -> nn.Sequential:
    """Return a new model with the same values on any thread."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5), nn.Linear(5, 1))
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.5, 0.5, generator=generator)
    return model


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(1000 * step + rank))


def local_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, rank: int) -> None:
    optimizer.zero_grad()
    (model(batch(step, rank)) - 1.0).square().mean().backward()
    optimizer.step()


def train(context: Context, first: int, last: int, **options: Any) -> dict[str, Tensor]:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = lr_scheduler.MultiStepLR(optimizer, [5, 9], 0.5)
    with DiLoCo(model, optimizer, scheduler, context=context, **options) as local:
        assert local.steps == first
        for step in range(first, last):
            local_step(model, optimizer, step, context.rank)
            scheduler.step()
    return copy.deepcopy(model.state_dict())


class Reference:
    """Workers, rounds and the outer optimizer in plain numpy, in one process."""

    def __init__(self, count: int, every: int, fragments: int, delay: int, mix: float) -> None:
        self.models = [network() for _ in range(count)]
        self.optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in self.models]
        self.schedulers = [lr_scheduler.MultiStepLR(one, [5, 9], 0.5) for one in self.optimizers]
        self.parts = [list(part) for part in _divide(dict(self.models[0].named_parameters()), fragments)]
        self.weights = {key: one.detach().numpy().copy() for key, one in self.models[0].named_parameters()}
        self.last = [copy.deepcopy(self.weights) for _ in range(count)]
        self.momentum = {key: np.zeros_like(one) for key, one in self.weights.items()}
        self.rounds = [0] * fragments
        self.interval, self.delay, self.mix = every // fragments, delay, np.float32(mix)
        self.under_way: list[str] | None = None
        self.since = 0

    def run(self, last: int) -> list[dict[str, Any]]:
        for step in range(last):
            for rank, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
                local_step(model, optimizer, step, rank)
            self.since += 1
            if self.under_way is not None and self.since >= self.delay:
                self.load()
            if self.since == self.interval:
                self.since = 0
                self.exchange()
                if not self.delay:
                    self.load()
            for scheduler in self.schedulers:
                scheduler.step()
        if self.under_way is not None:
            self.load()
        if self.since:
            for _ in self.rounds:
                self.exchange()
                self.load()
        return [dict(model.state_dict()) for model in self.models]

    def exchange(self) -> None:
        turn = self.rounds.index(min(self.rounds))
        for key in self.parts[turn]:
            parts = [
                (last[key] - dict(model.named_parameters())[key].detach().numpy()).ravel()
                for last, model in zip(self.last, self.models, strict=True)
            ]
            mean = np.empty_like(parts[0])
            reference.combine(mean, parts, len(parts))
            reference.update(
                OUTER, OUTER.group_values(0), self.weights[key].reshape(-1), (self.momentum[key].reshape(-1),), mean,
                self.rounds[turn],
            )  # fmt: skip
        self.rounds[turn] += 1
        self.under_way = self.parts[turn]

    def load(self) -> None:
        assert self.under_way is not None
        for last, model in zip(self.last, self.models, strict=True):
            for key in self.under_way:
                last[key] = self.weights[key].copy()
                mine = dict(model.named_parameters())[key].detach().numpy()
                whole = self.mix == 1
                mine[:] = last[key] if whole else np.float32(1 - self.mix) * mine + self.mix * last[key]
        self.under_way = None


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


SHAPES = [(1, 0, 1.0), (3, 0, 1.0), (2, 2, 1.0), (2, 1, 0.5)]


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize(("fragments", "delay", "mix"), SHAPES)
def test_it_equals_a_reference_byte_for_byte(servers: int, fragments: int, delay: int, mix: float) -> None:
    options = {"every": 6, "fragments": fragments, "delay": delay, "mix": mix}
    with workers(2, servers=servers) as contexts:
        ends = everywhere(contexts, lambda context: train(context, 0, 20, **options))
    for mine, expected in zip(ends, Reference(2, 6, fragments, delay, mix).run(20), strict=True):
        assert same(mine, expected)


@contextmanager
def life(storage: Path) -> Iterator[Callable[[Callable[[Context], Any]], list[Any]]]:
    with workers(2, storage=storage, run_id="resumed") as contexts:
        yield lambda work: everywhere(contexts, work)
        everywhere(contexts, lambda context: context.client.close())


@pytest.mark.parametrize(("fragments", "delay", "mix"), SHAPES)
def test_a_resumed_run_continues_exactly(tmp_path: Path, fragments: int, delay: int, mix: float) -> None:
    options = {"every": 6, "fragments": fragments, "delay": delay, "mix": mix}

    def first(context: Context) -> None:
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = lr_scheduler.MultiStepLR(optimizer, [5, 9], 0.5)
        DiLoCo(model, optimizer, scheduler, context=context, **options)
        for step in range(12):
            local_step(model, optimizer, step, context.rank)
            scheduler.step()
        context.client.barrier()
        context.client.snapshot()

    with life(tmp_path) as both:
        both(first)
    with life(tmp_path) as both:
        ends = both(lambda context: train(context, 12, 26, **options))
    for mine, expected in zip(ends, Reference(2, 6, fragments, delay, mix).run(26), strict=True):
        assert same(mine, expected)


def test_averaging_after_each_step_is_bsp() -> None:
    def local(context: Context) -> dict[str, Tensor]:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with LocalSGD(model, optimizer, every=1, context=context):
            for step in range(10):
                local_step(model, optimizer, step, context.rank)
        return model.state_dict()

    def common(context: Context) -> dict[str, Tensor]:
        model = network()
        optimizer = DistributedOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.05), context=context)
        for step in range(10):
            local_step(model, optimizer, step, context.rank)
        return model.state_dict()

    with workers(2) as contexts:
        mine = everywhere(contexts, local)[0]
    with workers(2) as contexts:
        expected = everywhere(contexts, common)[0]
    for key in expected:
        torch.testing.assert_close(mine[key], expected[key], rtol=0, atol=1e-6)


def test_contributions_are_weighted_by_what_was_counted() -> None:
    def work(context: Context) -> Tensor:
        model = nn.Linear(1, 1, bias=False)
        with torch.no_grad():
            model.weight.fill_(0.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with LocalSGD(model, optimizer, every=2, context=context) as local:
            for _ in range(2):
                model.weight.grad = torch.full((1, 1), -float(context.rank + 1))
                local.count([1, 3][context.rank])
                optimizer.step()
        return model.weight.detach()

    with workers(2) as contexts:
        ends = everywhere(contexts, work)
    assert [end.item() for end in ends] == [(1 * 2 + 3 * 4) / 4] * 2


def test_every_fragment_is_weighted_by_what_was_counted_since_its_last_round() -> None:
    def work(context: Context) -> list[float]:
        model = nn.Linear(1, 1)
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with LocalSGD(model, optimizer, every=4, fragments=2, context=context) as local:
            for _ in range(3):
                for parameter in model.parameters():
                    parameter.grad = torch.full_like(parameter, -float(context.rank + 1))
                local.count([1, 3][context.rank])
                optimizer.step()
            local.sync()
        return [parameter.item() for parameter in model.parameters()]

    with workers(2) as contexts:
        ends = everywhere(contexts, work)
    # The first fragment meets after two steps and then after one, the second after three: each time 1 : 3.
    assert ends == [[3 * (1 + 2 * 3) / 4] * 2] * 2


def test_the_steps_of_a_worker_that_begins_later_are_those_of_the_rounds() -> None:
    with workers(1) as (context,):
        model = network()
        for begun in (0, 12):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            with LocalSGD(model, optimizer, every=6, fragments=2, context=context) as local:
                assert local.steps == begun
                for step in range(12):
                    local_step(model, optimizer, step, 0)


def test_floating_buffers_are_averaged_and_counters_are_not() -> None:
    def work(context: Context) -> tuple[Tensor, int]:
        norm = nn.BatchNorm1d(2)
        optimizer = torch.optim.SGD(norm.parameters(), lr=0.1)
        assert norm.running_mean is not None and norm.num_batches_tracked is not None
        with LocalSGD(norm, optimizer, every=2, context=context):
            for step in range(2):
                for _ in range(1 + context.rank):
                    norm(torch.randn(4, 2, generator=torch.Generator().manual_seed(context.rank + 9 * step)))
                norm.bias.grad = torch.ones(2)
                optimizer.step()
        return norm.running_mean, int(norm.num_batches_tracked)

    with workers(2) as contexts:
        (one, two), (other, four) = everywhere(contexts, work)
    assert torch.equal(one, other)
    assert (two, four) == (2, 4)


def test_a_contribution_that_is_too_large_is_scaled_down(caplog: pytest.LogCaptureFixture) -> None:
    with workers(1) as (context,):
        model = nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=100.0)
        local = LocalSGD(model, optimizer, every=1, max_update_norm=2.0, context=context)
        model.weight.grad = torch.ones(1, 1)
        optimizer.step()
        assert local.clipped == 1 and model.weight.item() == -2.0
    assert "above max_update_norm=2" in caplog.text


def ranges_done(leases: Any) -> int:
    position = leases.position()
    return sum(count for _, count in position.done) + 10 * position.data_epoch


def test_samples_count_as_used_once_they_are_contributed() -> None:
    with workers(1) as (context,):
        data = torch.arange(40.0).reshape(40, 1)
        leases = context.client.dataset("train", size=40, range_size=4, shuffle=False)
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        local = LocalSGD(model, optimizer, every=4, context=context)
        done = []
        for number, (inputs,) in enumerate(
            LeasedDataLoader(torch.utils.data.TensorDataset(data), leases, batch_size=4)
        ):
            done.append(ranges_done(leases))
            assert inputs[0].item() == 4 * number
            model(inputs).sum().backward()
            optimizer.step()
        assert done == [0, 0, 0, 0, 4, 4, 4, 4, 8, 8]
        local.close()
        assert ranges_done(leases) == 10


SCRIPT = """
import sys, hashlib
import torch
from torch import nn
import psdist.torch

torch.manual_seed(3)
model = nn.Linear(3, 2)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
with psdist.torch.DiLoCo(model, optimizer, every=4, fragments=2, delay=1) as local:
    print("started", flush=True)
    for step in range(local.steps, 400):
        optimizer.zero_grad()
        model(torch.full((3,), float((step + local.context.rank) % 7))).square().sum().backward()
        optimizer.step()
        if step == 100:
            print("at step 100", flush=True)
            local.context.client.barrier(timeout=200)
digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
print("digest", digest, "steps", local.steps, "rounds", local.round, flush=True)
"""


def test_a_killed_server_changes_no_byte(tmp_path: Path) -> None:
    flags = ("--nservers", "2", "--replicas", "2", "--failure-timeout", "2")
    ends = []
    for kills in (False, True):
        with Run(tmp_path, SCRIPT, flags=flags) as run:
            run.until("at step 100", count=1)
            if kills:
                run.children("psdist_server")[0].kill()
            status, output = run.end()
        assert status == 0, output
        ends.append(sorted(re.findall(r"digest .*", output)))
    assert len(ends[0]) == 2
    assert ends[0] == ends[1]
    assert "steps 400 rounds 100" in ends[0][0]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"every": 0}, "every"),
        ({"every": 10, "fragments": 4}, "use every=8"),
        ({"every": 10, "fragments": 10}, "each fragment has one at least"),
        ({"every": 10, "fragments": 2, "delay": 5}, "use a smaller delay"),
        ({"mix": 0.0}, "above 0"),
        ({"mix": 1.5}, "at most 1"),
        ({"max_update_norm": float("nan")}, "above 0"),
        ({"outer": "sgd"}, "give a specification"),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, Any], words: str) -> None:
    model = network()
    with pytest.raises(InvalidArgumentError, match=words):
        DiLoCo(model, torch.optim.SGD(model.parameters()), **options)


def test_states_keep_their_types_in_snapshots() -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.Adam(model.parameters(), betas=(0.8, 0.9))
    kinds: list[Any] = [
        lr_scheduler.MultiStepLR(optimizer, [3, 5]),
        lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10),
        lr_scheduler.ReduceLROnPlateau(optimizer),
        lr_scheduler.SequentialLR(
            optimizer, [lr_scheduler.ConstantLR(optimizer), lr_scheduler.StepLR(optimizer, 3)], milestones=[2]
        ),
    ]
    for one in kinds:
        state = one.state_dict()
        assert _decode(_encode(state)) == state, type(one)
    with pytest.raises(InvalidArgumentError, match="cannot contain a set"):
        _encode({"a": {1}})

"""PyTorch scripts whose run resumes from a snapshot under its run id, with real servers.

Two lives of a cluster with two workers, which are threads of this process.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

import psdist
from psdist.client.context import Context
from psdist.launcher.embedded import EmbeddedCluster
from psdist.snapshots.policy import SavePolicy
from psdist.torch import DistributedDataParallel, DistributedOptimizer, offload
from tests.support.contexts import everywhere, workers
from tests.support.launched import Run

Work = Callable[[Context], Any]


@contextmanager
def life(storage: Path, first_rank: int = 0) -> Iterator[Callable[[Work], list[Any]]]:
    """One life of the run. Yields a function that runs the same code in both workers and returns their results."""
    with workers(2, first_rank=first_rank, storage=storage, run_id="resumed") as contexts:
        yield partial(everywhere, contexts)
        everywhere(contexts, lambda context: context.client.snapshot())
        everywhere(contexts, lambda context: context.client.close())


def statistics_and_weights() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(8, 3, generator=torch.Generator().manual_seed(10 * step + rank)) * 5


def test_data_parallel_training_resumes_from_the_file_of_the_script(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Check that it does not use the values of the first start, which are in the snapshot. Each worker logs this."""

    def train(context: Context, loaded: dict[str, Any] | None, first: int) -> tuple[dict[str, Any], dict[str, Any]]:
        torch.manual_seed(context.rank)
        model = statistics_and_weights()
        if loaded is not None:
            model.load_state_dict(loaded)
        wrapped = DistributedDataParallel(model, context=context)
        begun = copy.deepcopy(model.state_dict())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(first, first + 3):
            optimizer.zero_grad()
            wrapped(batch(step, context.rank)).pow(2).mean().backward()
            optimizer.step()
        return begun, copy.deepcopy(model.state_dict())

    with life(tmp_path) as both:
        (_, saved), _ = both(lambda context: train(context, None, 0))
    assert "DistributedDataParallel" not in caplog.text
    with life(tmp_path) as both:
        ends = both(lambda context: train(context, saved if context.rank == 0 else None, 3))
    warnings = [record.getMessage() for record in caplog.records if "DistributedDataParallel" in record.getMessage()]
    assert len(warnings) == 2 and all("Load the script's own checkpoint" in text for text in warnings)
    for begun, _ in ends:
        for name, value in saved.items():
            assert torch.equal(begun[name], value), f"{name} as rank 0 loaded it"
    (_, one), (_, other) = ends
    assert all(torch.equal(one[name], other[name]) for name in one if "running" not in name)


def test_an_interval_of_steps_is_that_of_what_is_trained(tmp_path: Path) -> None:
    """Check a model whose buffers are in a parameter set of their own, which makes no steps."""
    commits = tmp_path / "commits"
    with workers(1, servers=2, storage=tmp_path, policy=SavePolicy(steps=5, keep_last=1000)) as (context,):
        model = statistics_and_weights()
        optimizer = DistributedOptimizer(model, psdist.optim.SGD(lr=0.01), context=context)
        while len(list(commits.glob("*.json"))) < 3:
            assert optimizer.handle.step < 100_000, "no snapshot was taken"
            optimizer.zero_grad()
            model(batch(0, 0)).pow(2).mean().backward()
            optimizer.step()
        steps = [json.loads(path.read_text())["steps"] for path in sorted(commits.glob("*.json"))]
    assert all(one["model"] % 5 == 0 and one["model/fixed"] == 0 for one in steps), steps
    # A later one, cut while the worker left, may lack its state.
    assert "1.running_mean" in psdist.load_snapshot(str(tmp_path), step=steps[2]["model"])


def with_rates(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return inner, lr_scheduler.LambdaLR(inner, lambda step: min(1.0, step / 4) * 0.9**step)


def with_cycle(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    inner = torch.optim.AdamW(model.parameters(), lr=0.1)
    return inner, lr_scheduler.OneCycleLR(inner, 0.1, total_steps=10)


def with_groups(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    groups = [{"params": layer.parameters()} for layer in (model[0], model[2])]  # type: ignore[index]
    inner = torch.optim.ASGD(groups, lr=0.1)
    return inner, lr_scheduler.LambdaLR(inner, [lambda step: 0.9**step, lambda step: 1 / (1 + step)])


@pytest.mark.parametrize(
    ("wrap", "make"),
    [
        (DistributedOptimizer, with_cycle),
        (offload, with_groups),
        # A cycle has rates; the same settings by the other wrapper.
        *(
            pytest.param(*one, marks=pytest.mark.long)
            for one in ((DistributedOptimizer, with_rates), (offload, with_rates), (DistributedOptimizer, with_groups))
        ),
    ],
)
def test_settings_that_the_servers_do_not_schedule_resume_with_the_weights(
    tmp_path: Path, wrap: Callable[..., Any], make: Callable[[nn.Module], tuple[torch.optim.Optimizer, Any]]
) -> None:
    """Check the bytes of an uninterrupted run: the scheduler of the second life is advanced to the step of the
    first."""
    # Made once, as the workers' threads share the random numbers.
    at_first = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))

    def train(context: Context, steps: int) -> bytes:
        model = copy.deepcopy(at_first)
        inner, scheduler = make(model)
        optimizer = wrap(model, inner, scheduler, context=context)
        for step in range(optimizer.handle.step, optimizer.handle.step + steps):
            optimizer.zero_grad()
            model(batch(step, context.rank)).pow(2).mean().backward()
            optimizer.step()
            scheduler.step()
        if wrap is offload:
            return b"".join(array.tobytes() for _, array in optimizer.weights())
        return b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())

    with life(tmp_path / "whole") as both:
        expected = both(lambda context: train(context, 8))
    with life(tmp_path / "parts") as both:
        both(lambda context: train(context, 3))
    with life(tmp_path / "parts") as both:
        assert both(lambda context: train(context, 5)) == expected


# long: test_the_snapshot_at_the_end_of_a_script_has_running_statistics has the same of the other wrapper.
@pytest.mark.parametrize("wrap", [pytest.param(DistributedOptimizer, marks=pytest.mark.long), offload])
def test_running_statistics_resume_with_the_weights(
    tmp_path: Path, wrap: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Check that each worker resumes its own. A new worker is warned that it has none."""

    def train(context: Context) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        model = statistics_and_weights()
        optimizer = wrap(model, psdist.optim.SGD(lr=0.1), context=context)
        begun = {name: buffer.clone() for name, buffer in model.named_buffers()}
        for step in range(3):
            optimizer.zero_grad()
            model(batch(step, context.rank)).pow(2).mean().backward()
            optimizer.step()
        return begun, {name: buffer.clone() for name, buffer in model.named_buffers()}

    with life(tmp_path) as both:
        ends = [end for _, end in both(train)]
    assert not torch.equal(ends[0]["1.running_mean"], ends[1]["1.running_mean"])
    with life(tmp_path) as both:
        begins = [begin for begin, _ in both(train)]
    for end, begin in zip(ends, begins, strict=True):
        assert all(torch.equal(end[name], begin[name]) for name in end)
    assert "start with their initial values" not in caplog.text
    with life(tmp_path, first_rank=1) as both:
        begins = [begin for begin, _ in both(train)]
    assert int(begins[0]["1.num_batches_tracked"]) == 6 and int(begins[1]["1.num_batches_tracked"]) == 0
    assert caplog.text.count("start with their initial values") == 1


def test_a_worker_that_joins_later_is_warned_that_it_has_no_running_statistics(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cluster = EmbeddedCluster(servers=1)

    def wrapped(client: psdist.Client, model: nn.Module) -> DistributedOptimizer:
        context = Context(client.rank, 2, client.rank, client)
        return DistributedOptimizer(model, psdist.optim.SGD(lr=0.1), consistency=psdist.ASP(), context=context)

    try:
        with psdist.Client(cluster.address, cluster.token, rank=0) as first:
            model = statistics_and_weights()
            optimizer = wrapped(first, model)
            model(batch(0, 0)).sum().backward()
            optimizer.step()
            assert "start with their initial values" not in caplog.text
            with psdist.Client(cluster.address, cluster.token, rank=1) as second:
                wrapped(second, statistics_and_weights())
    finally:
        cluster.close()
    assert "buffers of 'model' (1.running_mean, 1.running_var, 1.num_batches_tracked) start with" in caplog.text


#: Ends without closing its client.
SCRIPT = """
import sys
import torch
from torch import nn
import psdist, psdist.torch

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
optimizer = getattr(psdist.torch, sys.argv[1])(model, psdist.optim.SGD(lr=0.01))
print("begins", optimizer.handle.step, model[1].running_var.tolist(), flush=True)
for _ in range(4):
    model(torch.randn(8, 3)).square().mean().backward()
    optimizer.step()
print("ends", optimizer.handle.step, model[1].running_var.tolist(), flush=True)
"""


@pytest.mark.parametrize("wrapper", ["DistributedOptimizer", pytest.param("offload", marks=pytest.mark.long)])
def test_the_snapshot_at_the_end_of_a_script_has_running_statistics(tmp_path: Path, wrapper: str) -> None:
    outputs, storage = [], str(tmp_path / "storage")
    for _ in range(2):
        flags = ("--run-id", "resumed", "--nservers", "1", "--nproc-per-node", "1", "--storage-path", storage)
        status, output = Run.ended(tmp_path, SCRIPT, wrapper, flags=flags)
        assert status == 0, output
        outputs.append(output)
    (ended,) = re.findall(r"ends 4 (.*)", outputs[0])
    assert re.findall(r"begins 4 (.*)", outputs[1]) == [ended], outputs[1]

"""The examples of PyTorch's strategies train the weights of one process."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from psdist.errors import InvalidArgumentError
from tests.support.example_runs import ROOT, run

_ALL = """
import os
import runpy
import sys

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

import psdist.torch
from psdist.errors import InvalidArgumentError

sys.path.insert(0, sys.argv[1])
import torch_fsdp
import torch_pipeline
import torch_tensor_parallel


def check_subsets():
    # Each worker trains a model of its own on the servers.
    rank = dist.get_rank()
    alone, model = torch.nn.Linear(4, 1), torch.nn.Linear(4, 1)
    model.load_state_dict(alone.state_dict())
    torch_optimizer = torch.optim.AdamW(alone.parameters(), lr=0.1)
    wrapped = torch.optim.AdamW(model.parameters(), lr=0.1)
    mine = psdist.init().subset([rank])
    optimizer = psdist.torch.DistributedOptimizer(model, wrapped, name=f"model/{rank}", context=mine)
    for step in range(10 + 5 * rank):
        for net, one in ((alone, torch_optimizer), (model, optimizer)):
            one.zero_grad()
            (net(torch.full((1, 4), rank + 1.0)) - step).square().mean().backward()
            one.step()
    error = (model.weight - alone.weight).abs().max().item()
    assert (mine.rank, mine.world_size, optimizer.handle.step) == (0, 1, 10 + 5 * rank)
    print(f"difference to one process {error:.1e}", flush=True)
    parallelize_module(alone, init_device_mesh("cpu", (dist.get_world_size(),)), RowwiseParallel())
    for wrap in (psdist.torch.DistributedDataParallel, lambda net: psdist.torch.DistributedOptimizer(net, wrapped)):
        with pytest.raises(InvalidArgumentError, match="'weight' is a DTensor"):
            wrap(alone)


runpy.run_path(sys.argv[2])  # the page's program, which has a group of its own
# A rank may be here while rank 0 still serves torch's store of that group at MASTER_PORT, and would join that one.
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("psdist", store=dist.FileStore(sys.argv[2] + ".store", size), rank=rank, world_size=size)
for example in (torch_fsdp, torch_pipeline, torch_tensor_parallel):
    sys.argv = [example.__name__, "--steps", "10", "--compare"]
    example.main()
check_subsets()
dist.destroy_process_group()
"""


def differences(output: str) -> list[float]:
    """Return the relative differences between the weights and those of one process."""
    return [float(number) for number in re.findall(r"difference to one process ([\d.e+-]+)", output)]


_COMPARISON = """
alone = nn.Sequential(nn.Embedding(50, 24), nn.Flatten(), nn.Linear(4 * 24, 50))
torch.manual_seed(0)
for layer in (alone[0], alone[2]):
    layer.reset_parameters()
optimizer = torch.optim.Adam(alone.parameters(), lr=0.01)
for step in range(100):
    words = torch.randint(50, (24, 4), generator=torch.Generator().manual_seed(step))
    optimizer.zero_grad()
    nn.functional.cross_entropy(alone(words), words[:, 0]).backward()
    optimizer.step()
columns = alone[0].weight.chunk(world, dim=1)[rank]
pairs = [(model.module[0].weight, columns), (model.module[2].weight, alone[2].weight)]
print(f"difference to one process {max(float((one - other).norm() / other.norm()) for one, other in pairs):.1e}")
"""


def write_exact_page(directory: Path) -> str:
    """Write the program of the page, with gradients of 32 bits and a comparison at its end. Returns its path."""
    (program,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/internals/strategies.md").read_text(), re.S)
    end = "dist.destroy_process_group()\n"
    exact = program.replace(".bfloat16()", ".clone()")
    assert program.endswith(end) and exact != program
    (directory / "exact.py").write_text(exact.removesuffix(end) + _COMPARISON + end)
    return str(directory / "exact.py")


def check_page(output: str, workers: int) -> None:
    """Check the losses at the end of the page's program."""
    losses = re.findall(r"\] loss ([\d.]+)", output)
    assert len(losses) == workers and float(losses[0]) < 0.5, output


def test_strategies_train_the_weights_of_one_process(tmp_path: Path) -> None:
    """Check the program of the page, and the examples, in one run: importing torch takes longer than each of them."""
    script = tmp_path / "script.py"
    script.write_text(_ALL)
    output = run(str(script), str(ROOT / "examples"), write_exact_page(tmp_path), servers=1)
    check_page(output, 2)
    found = differences(output)
    assert len(found) == 7 and max(found) < 1e-5, output


@pytest.mark.long  # The test above has fewer workers and steps.
@pytest.mark.parametrize(
    ("words", "workers"),
    [
        (("torch_fsdp",), 3),
        (("torch_tensor_parallel",), 4),
        (("torch_pipeline", "--schedule", "GPipe"), 4),
        (("torch_pipeline", "--schedule", "1F1B"), 4),
        (("torch_hybrid", "--pipeline", "1"), 4),
        (("torch_hybrid",), 8),
    ],
)
def test_an_example_trains_the_weights_of_one_process(words: tuple[str, ...], workers: int) -> None:
    output = run(f"examples/{words[0]}.py", *words[1:], "--compare", workers=workers, servers=1)
    losses = [float(number) for number in re.findall(r"step +50  loss ([\d.]+)", output)]
    assert losses and losses[0] < 3.5, output
    found = differences(output)
    assert found and max(found) < 1e-5


@pytest.mark.parametrize(
    ("example", "check", "arguments", "text"),
    [
        ("torch_hybrid", "count_replicas", (2, 2, 2), "2 workers do not .* 2 stages x 2 parts .*-per-node 4 or"),
        ("torch_hybrid", "count_replicas", (6, 2, 2), "6 workers do not make up"),
        ("torch_hybrid", "count_replicas", (3, 1, 3), "3 parts of each matrix: use parts that divide 128"),
        ("torch_hybrid", "count_replicas", (3, 1, 1), "64 samples cannot be divided among 3 models in 4 micro-batches"),
        ("torch_tensor_parallel", "check_workers", (3,), "3 workers cannot have equal parts of 4 heads .* 1, 2 or 4"),
    ],
)
def test_numbers_of_workers_that_an_example_refuses(
    example: str, check: str, arguments: tuple[int, ...], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    examples = [importlib.import_module("torch_hybrid"), importlib.import_module("torch_tensor_parallel")]
    (module,) = (one for one in examples if one.__name__ == example)
    with pytest.raises(InvalidArgumentError, match=text):
        getattr(module, check)(*arguments)

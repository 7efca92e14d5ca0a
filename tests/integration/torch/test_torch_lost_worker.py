"""A worker that dies in the middle of a backward pass, with real processes: the others continue, and it comes back."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.launched import Run

ROOT = Path(__file__).resolve().parents[3]
#: Rank 1 dies in its first incarnation when the last layers' gradients are pushed, before the first layer's are
#: computed.
SCRIPT = """
import os, signal, sys
from pathlib import Path
import numpy as np
import torch
from torch import nn
import psdist.torch

consistency, steps = {"bsp": psdist.BSP(), "asp": psdist.ASP()}[sys.argv[1]], 40
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
optimizer = psdist.torch.DistributedOptimizer(
    model, psdist.optim.Adam(lr=0.01), consistency=consistency, bucket_cap_mb=0.001
)
handle, context = optimizer.handle, optimizer.context
life = context.client.incarnation
print("rank", context.rank, "life", life, "begins at", handle.version, flush=True)

def die(gradient):
    if handle.version >= 10:
        os.kill(os.getpid(), signal.SIGKILL)

came_back = Path("came-back")
if context.rank == 1:
    model[0].weight.register_hook(die) if life == 1 else came_back.touch()

def goes_on():
    # In ASP a worker alone could make all steps before the other's first.
    if sys.argv[1] == "asp":
        return handle.version < 2 * steps or not came_back.exists()
    return handle.version < steps

data = torch.Generator().manual_seed(context.rank)
losses = []
while goes_on():
    x = torch.randn(32, 8, generator=data)
    loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True).tanh())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
context.client.barrier()
handle.pull()
final = np.concatenate([array.ravel() for array in handle.pull().values()])
assert np.mean(losses[-5:]) < 0.5 or len(losses) < 20
print("rank", context.rank, "life", life, "ends with", final.tobytes().hex()[:64], flush=True)
"""


@pytest.mark.long  # Kills within a push, and workers that come back, have tests without torch; hooks push in buckets.
@pytest.mark.parametrize("consistency", ["bsp", "asp"])
def test_the_others_go_on_and_it_comes_back(tmp_path: Path, consistency: str) -> None:
    run = Run(tmp_path, SCRIPT, consistency)
    try:
        status, output = run.end()
    finally:
        run.stop()
    assert status == 0, output
    begun = {
        (int(rank), int(life)): int(at) for rank, life, at in re.findall(r"rank (\d) life (\d) begins at (\d+)", output)
    }
    assert begun[0, 1] == begun[1, 1] == 0 and begun[1, 2] >= 10, output
    ends = re.findall(r"rank (\d) life (\d) ends with (\w+)", output)
    assert sorted((rank, life) for rank, life, _ in ends) == [("0", "1"), ("1", "2")], output
    assert ends[0][2] == ends[1][2], "the weights that both have at the end"


#: Rank 1 dies in its first incarnation. Rank 0 continues when the second one has ended.
AVERAGED = """
import os, signal
import torch
from torch import nn
import psdist.torch
from psdist.errors import LateWorkerError

context = psdist.init()
if context.rank == 0:
    os.mkfifo("refused")
if context.client.incarnation == 1:
    context.client.barrier()
torch.manual_seed(context.client.incarnation)
model = nn.Linear(3, 1)
try:
    wrapped = psdist.torch.DistributedDataParallel(model)
except LateWorkerError:
    with open("refused", "w"):
        raise
optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01)
for step in range(8):
    if context.rank == 1 and step == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.zero_grad()
    wrapped(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    if step == 5:
        with open("refused"):
            pass
    print("step", step, "gradient", model.weight.grad[0].tolist(), flush=True)
"""


def test_a_restarted_worker_of_data_parallel_training_ends_and_the_others_continue(tmp_path: Path) -> None:
    """Check that the restarted worker ends. Its weights would be the initial ones, and its gradients would count in the
    mean of the others."""
    run = Run(tmp_path, AVERAGED)
    try:
        status, output = run.end()
    finally:
        run.stop()
    assert status == 0, output
    assert "LateWorkerError" in output and "start it again from a checkpoint" in output
    assert "worker 1 failed: exit code 66" in output and "others continue: worker 0" in output
    assert output.count("restart 1 of 3") == 1 and "restart 2" not in output
    assert output.count("[worker 0] step 7 gradient") == 1, output

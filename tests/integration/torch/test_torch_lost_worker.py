"""A worker that dies in the middle of a backward pass, with real processes: the others continue, and it comes back."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.launched import Run

#: Rank 1 dies in its first incarnation when the last layers' gradients are pushed, before the first layer's are
#: computed.
SCRIPT = """
import os, signal
import numpy as np
import torch
from torch import nn
import psdist.torch

steps = 40
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
optimizer = psdist.torch.DistributedOptimizer(
    model, psdist.optim.Adam(lr=0.01), bucket_cap_mb=0.001
)
handle, context = optimizer.handle, optimizer.context
life = context.client.incarnation
print("rank", context.rank, "life", life, "begins at", handle.version, flush=True)

def die(gradient):
    if handle.version >= 10:
        os.kill(os.getpid(), signal.SIGKILL)

if context.rank == 1 and life == 1:
    model[0].weight.register_hook(die)

data = torch.Generator().manual_seed(context.rank)
losses = []
while handle.version < steps:
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
def test_the_others_go_on_and_it_comes_back(tmp_path: Path) -> None:
    status, output = Run.ended(tmp_path, SCRIPT)
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
    status, output = Run.ended(tmp_path, AVERAGED)
    assert status == 0, output
    assert "LateWorkerError" in output and "start it again from a checkpoint" in output
    assert "worker 1 failed: exit code 66" in output and "others continue: worker 0" in output
    assert output.count("restart 1 of 3") == 1 and "restart 2" not in output
    assert output.count("[worker 0] step 7 gradient") == 1, output

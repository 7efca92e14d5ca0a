"""psdist's codecs as a communication hook of torch's DistributedDataParallel, with real processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from psdist.errors import InvalidArgumentError, UnknownCodecError
from psdist.torch import CompressionState, compression_hook
from tests.support.launched import Run

SCRIPT = """
import copy, sys
import torch
import torch.distributed as dist
from torch import nn
import psdist.torch
from psdist.compression import Int8

context = psdist.init()
rank, size = context.rank, context.world_size
dist.init_process_group("psdist")
torch.manual_seed(0)
shapes = nn.Linear(40, 60), nn.Tanh(), nn.Linear(60, 40), nn.Tanh(), nn.Linear(40, 40)
hooked = nn.Sequential(*shapes)
pushed = copy.deepcopy(hooked)
codec = Int8(block=64)
# Tiny buckets: torch forms others after the first step.
model = nn.parallel.DistributedDataParallel(hooked, bucket_cap_mb=0.01)
model.register_comm_hook(psdist.torch.CompressionState(codec), psdist.torch.compression_hook)
other = psdist.torch.DistributedDataParallel(pushed, path="servers", compression=codec)
optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (hooked, pushed)]
for step in range(6):
    x = torch.randn(8, 40, generator=torch.Generator().manual_seed(10 * step + rank))
    for net, optimizer in zip((model, other), optimizers):
        optimizer.zero_grad()
        net(x).square().sum().backward()
        optimizer.step()
    for mine, same in zip(hooked.parameters(), pushed.parameters()):
        assert torch.equal(mine.grad, same.grad), step
before = [one.detach().clone() for one in hooked.parameters()]
loss = model(torch.ones(1, 40)).sum() * (float("inf") if rank == 0 else 1.0)
loss.backward()
assert all(one.grad.isnan().all() for one in hooked.parameters())
doubles = nn.parallel.DistributedDataParallel(nn.Linear(2, 2, dtype=torch.float64))
doubles.register_comm_hook(psdist.torch.CompressionState("int8"), psdist.torch.compression_hook)
try:
    doubles(torch.ones(1, 2, dtype=torch.float64)).sum().backward()
except Exception as error:
    assert "use float32 parameters on the CPU" in str(error), error
    print("refused")
print("done", rank)
"""


def test_gradients_have_the_bytes_of_compressed_pushes(tmp_path: Path) -> None:
    """Check this while torch forms other buckets, whose residuals continue."""
    status, output = Run.ended(tmp_path, SCRIPT)
    assert status == 0 and output.count("done") == output.count("refused") == 2, output


def test_unusable_arguments_are_refused() -> None:
    with pytest.raises(UnknownCodecError, match="codec 'int3' is unknown"):
        CompressionState("int3")
    with pytest.raises(InvalidArgumentError, match="compression='auto' cannot be used"):
        CompressionState("auto")
    with pytest.raises(InvalidArgumentError, match="the state of compression_hook is 'int8': pass"):
        compression_hook("int8", torch.zeros(1))

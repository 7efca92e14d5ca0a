"""Data-parallel training that continues when workers die, and takes in new ones.

    psdist run --nproc-per-node 3 --max-restarts 3 examples/torch_elastic_ddp.py

Kill a worker while it runs: the others continue with the next step, and the worker that the launcher starts in its
place receives weights and optimizer state from one of them.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal

import torch
from torch import nn

import psdist
from psdist.torch import ElasticDDP


def digest(model: nn.Module) -> str:
    """Return a digest of the weights."""
    vector = nn.utils.parameters_to_vector(model.parameters())
    return hashlib.blake2b(vector.detach().numpy().tobytes(), digest_size=8).hexdigest()


def main() -> None:
    """Train this worker's share."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--kill-rank", type=int, default=-1, help="kill this worker once, in the middle")
    given = parser.parse_args()
    context = psdist.init()
    torch.manual_seed(context.rank)
    truth = torch.linspace(-1, 1, 32).reshape(-1, 1)
    model = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    with ElasticDDP(model, optimizer) as ddp:
        while ddp.step < given.steps:
            inputs = torch.randn(64, 32)
            loss = nn.functional.mse_loss(ddp(inputs), inputs @ truth)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            context.report(loss=loss, samples=len(inputs), step=ddp.step)
            if ddp.step == given.steps // 2 and context.rank == given.kill_rank and context.client.incarnation == 1:
                os.kill(os.getpid(), signal.SIGKILL)
        print(f"rank {context.rank}: step {ddp.step}, {ddp.size} workers, weights {digest(model)}", flush=True)
    context.close()


if __name__ == "__main__":
    main()

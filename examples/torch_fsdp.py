"""FSDP2: each worker holds a part of the weights, of the gradients and of Adam's state of a small transformer.

psdist run --nproc-per-node 2 examples/torch_fsdp.py
psdist run --nproc-per-node 2 examples/torch_fsdp.py --compare   # and once more in one process

Before a block is computed, its weights are gathered from all workers; its gradients are reduced to the workers that
hold its parts. Activations of a block are computed again in the backward pass. The workers use links of their own; the
parameter servers have nothing to do.
"""

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch_chargpt import CharGPT, loss_of, read_text, samples

BATCH = 8


def make_model() -> CharGPT:
    """Return the model, with the same weights in every process."""
    torch.manual_seed(0)
    return CharGPT(width=64, layers=3, heads=4, context=32, recompute=True)


def train(model: nn.Module, text: Tensor, steps: int, rank: int = 0, world: int = 1) -> None:
    """Train the model, each worker with its share of every batch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        passages = samples(text, BATCH, 32, step)[rank::world]
        loss = loss_of(model, passages) * len(passages) * world / BATCH  # parts may differ in size
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach()
        if world > 1:
            dist.all_reduce(mean, dist.ReduceOp.AVG)
        if rank == 0 and (step + 1) % 10 == 0:
            print(f"step {step + 1:3}  loss {mean.item():.5f}", flush=True)


def main() -> None:
    """Train the model in parts, and compare the result with training in one process if asked to."""
    parser = argparse.ArgumentParser(description="Fully sharded data parallelism on psdist's collectives.")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--compare", action="store_true", help="train once more in one process and compare")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rank, world = dist.get_rank(), dist.get_world_size()
    text, model = read_text(), make_model()
    mesh = init_device_mesh("cpu", (world,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    train(model, text, options.steps, rank, world)
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))  # of rank 0 alone: gathered
    if rank == 0 and options.compare:
        alone = make_model()
        train(alone, text, options.steps)
        one, other = (nn.utils.parameters_to_vector(states.values()) for states in (whole, alone.state_dict()))
        difference = (one - other).norm() / other.norm()
        print(f"relative difference to one process {difference.item():.1e}", flush=True)


if __name__ == "__main__":
    dist.init_process_group("psdist")
    main()
    dist.destroy_process_group()

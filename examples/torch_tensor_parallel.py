"""Tensor and sequence parallelism: each worker holds a part of every matrix of a small transformer.

psdist run --nproc-per-node 2 examples/torch_tensor_parallel.py
psdist run --nproc-per-node 4 examples/torch_tensor_parallel.py --compare   # and once more in one process

All workers train on the same batch. A worker computes some heads of attention and some hidden units of the networks;
between them each worker has some of the characters (sequence parallelism).
"""

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional
from torch_chargpt import CHARACTERS, loss_of, read_text, samples

from psdist.errors import InvalidArgumentError

WIDTH, HEAD, CONTEXT = 64, 16, 32


class Attention(nn.Module):
    """Attention over the preceding characters. The number of heads follows from the part that this worker holds."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.project = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map float[batch, length, WIDTH] to the same shape."""
        heads = (part(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for part in (self.query, self.key, self.value))
        mixed: Tensor = self.project(
            functional.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
        )
        return mixed


class Block(nn.Module):
    """Pre-normalized attention, and a network for each character."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.network = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Map float[batch, length, WIDTH] to the same shape."""
        x = x + self.attention(self.norm1(x))
        return x + self.network(self.norm2(x))


def make_model() -> nn.Sequential:
    """Return the model, with the same weights in every process."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(CHARACTERS, WIDTH), Block(), Block(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CHARACTERS)
    )


def check_workers(workers: int) -> None:
    """Raise InvalidArgumentError unless each worker gets as many heads and characters as any other."""
    if (WIDTH // HEAD) % workers or CONTEXT % workers:
        raise InvalidArgumentError(
            f"{workers} workers cannot have equal parts of {WIDTH // HEAD} heads of attention and {CONTEXT} "
            "characters: use --nproc-per-node 1, 2 or 4"
        )


def parallelize(model: nn.Sequential, mesh: DeviceMesh) -> None:
    """Divide the matrices among the workers of ``mesh``. Between layers each worker has some of the characters."""
    inside: dict[str, ParallelStyle] = {
        "norm1": SequenceParallel(),
        "norm2": SequenceParallel(),
        "attention": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        **{f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")},
        "attention.project": RowwiseParallel(output_layouts=Shard(1)),
        "network.0": ColwiseParallel(input_layouts=Shard(1)),
        "network.2": RowwiseParallel(output_layouts=Shard(1)),
    }
    outside = {
        "0": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "3": SequenceParallel(),
        "4": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, outside)
    for block in (model[1], model[2]):
        parallelize_module(block, mesh, inside)


def train(model: nn.Module, text: Tensor, steps: int, rank: int = 0) -> None:
    """Train the model, each worker with all passages of a batch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        loss = loss_of(model, samples(text, 8, CONTEXT, step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and (step + 1) % 10 == 0:
            print(f"step {step + 1:3}  loss {loss.item():.5f}", flush=True)


def main() -> None:
    """Train the model in parts, and compare the result with training in one process if asked to."""
    parser = argparse.ArgumentParser(description="Tensor parallelism on psdist's collectives.")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--compare", action="store_true", help="train once more in one process and compare")
    options = parser.parse_args()
    torch.set_num_threads(1)
    check_workers(dist.get_world_size())
    text, model = read_text(), make_model()
    parallelize(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    train(model, text, options.steps, dist.get_rank())
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))  # gathered, for rank 0 alone
    if dist.get_rank() == 0 and options.compare:
        alone = make_model()
        train(alone, text, options.steps)
        one, other = (nn.utils.parameters_to_vector(states.values()) for states in (whole, alone.state_dict()))
        difference = (one - other).norm() / other.norm()
        print(f"relative difference to one process {difference.item():.1e}", flush=True)


if __name__ == "__main__":
    dist.init_process_group("psdist")
    main()
    dist.destroy_process_group()

"""Pipeline parallelism: each worker holds one stage of a small transformer, and passes activations to the next.

psdist run --nproc-per-node 4 examples/torch_pipeline.py                            # 1F1B
psdist run --nproc-per-node 4 examples/torch_pipeline.py --schedule GPipe --compare # and once more in one process

A batch is divided into micro-batches. With GPipe a stage runs all forward passes before the first backward pass; with
1F1B it alternates, so that it holds the activations of a few micro-batches only.
"""

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn import functional
from torch_chargpt import CHARACTERS, Block, read_text, samples

WIDTH, CONTEXT, BATCH, MICRO_BATCHES = 64, 32, 16, 8


def make_stages(count: int) -> list[nn.Module]:
    """Return the model in stages of one block, with the same weights in every process."""
    torch.manual_seed(0)
    stages = [[Block(WIDTH, 4)] for _ in range(count)]
    first, last = nn.Embedding(CHARACTERS, WIDTH), [nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CHARACTERS)]
    return [
        nn.Sequential(*([first] if number == 0 else []), *stage, *(last if number == count - 1 else []))
        for number, stage in enumerate(stages)
    ]


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy of the next character, in nats."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batch_of(text: Tensor, step: int) -> tuple[Tensor, Tensor]:
    """Return the characters of a step and their successors, int64[BATCH, CONTEXT] each."""
    passages = samples(text, BATCH, CONTEXT, step)
    return passages[:, :-1].contiguous(), passages[:, 1:].contiguous()


def train(part: nn.Module, text: Tensor, steps: int, kind: str) -> None:
    """Train this worker's stage. Only the first one reads characters, and only the last one knows the loss."""
    rank, world = dist.get_rank(), dist.get_world_size()
    stage = PipelineStage(part, rank, world, torch.device("cpu"))
    schedule = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}[kind](stage, MICRO_BATCHES, loss_fn=loss_of)
    optimizer = torch.optim.AdamW(part.parameters(), lr=1e-3)
    for step in range(steps):
        characters, targets = batch_of(text, step)
        losses: list[Tensor] = []
        given = (characters,) if rank == 0 else ()
        schedule.step(*given, target=targets if rank == world - 1 else None, losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        if losses and (step + 1) % 10 == 0:
            print(f"step {step + 1:3}  loss {torch.stack(losses).mean().item():.5f}", flush=True)


def compare(part: nn.Module, text: Tensor, steps: int) -> None:
    """Train all stages in rank 0 alone, and print how far the weights of the workers' stages are from theirs."""
    weights = nn.utils.parameters_to_vector(part.parameters()).detach()
    if dist.get_rank() > 0:
        dist.send(weights, 0)
        return
    model = nn.Sequential(*make_stages(dist.get_world_size()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        characters, targets = batch_of(text, step)
        loss_of(model(characters), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    alone = [nn.utils.parameters_to_vector(stage.parameters()).detach() for stage in model]
    found = [weights, *(torch.empty_like(other) for other in alone[1:])]
    for number in range(1, len(found)):
        dist.recv(found[number], number)
    difference = (torch.cat(found) - torch.cat(alone)).norm() / torch.cat(alone).norm()
    print(f"relative difference to one process {difference.item():.1e}", flush=True)


def main() -> None:
    """Train the model in stages, and compare the result with training in one process if asked to."""
    parser = argparse.ArgumentParser(description="Pipeline parallelism on psdist's collectives.")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--schedule", choices=("GPipe", "1F1B"), default="1F1B")
    parser.add_argument("--compare", action="store_true", help="train once more in one process and compare")
    options = parser.parse_args()
    torch.set_num_threads(1)
    text, part = read_text(), make_stages(dist.get_world_size())[dist.get_rank()]
    train(part, text, options.steps, options.schedule)
    if options.compare:
        compare(part, text, options.steps)


if __name__ == "__main__":
    dist.init_process_group("psdist")
    main()
    dist.destroy_process_group()

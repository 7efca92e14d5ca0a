"""Steps whose workers have different numbers of micro-batches: through psdist, and under torch's DDP with padding.

Through psdist each worker makes its own micro-batches; under DDP, workers with fewer make up for them with padding.
Both run in the same processes, in turns.

python -m benchmarks.torch_uneven                 # four workers that share this machine's cores
python -m benchmarks.torch_uneven --sleep 20      # micro-batches of 20 ms without a core, as on hosts of their own

Numbers of micro-batches are lognormal, the same for all contenders. ``psdist`` is one weighted step in BSP,
``psdist_ssp`` is SSP(2), in which a worker may be two steps ahead. ``ddp`` synchronizes in the last micro-batch of the
slowest worker; the others compute equally many, and the surplus does not count.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from statistics import median
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks import torch_workers

SAMPLES: Final = 16
MICRO_BATCHES_LAST: Final = 40
CONTENDERS: Final = ("psdist", "psdist_ssp", "ddp")


def counts(step: int, workers: int, options: argparse.Namespace) -> list[int]:
    """Return the number of micro-batches of each worker in a step."""
    drawn = np.random.default_rng((options.seed, step)).lognormal(np.log(options.median), options.sigma, workers)
    return [int(number) for number in np.clip(np.ceil(drawn), 1, MICRO_BATCHES_LAST)]


def network(width: int) -> nn.Module:
    """Return three layers. 2.6 million parameters for a width of 1024."""
    return nn.Sequential(
        nn.Linear(256, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, width), nn.GELU(),
        nn.Linear(width, 16),
    )  # fmt: skip


class Work:
    """Work of one worker in a micro-batch: the sum of its samples' losses, and their gradients."""

    def __init__(self, options: argparse.Namespace, rank: int) -> None:
        generator = torch.Generator().manual_seed(rank)
        self._inputs = torch.randn(SAMPLES, 256, generator=generator)
        self._classes = torch.randint(16, (SAMPLES,), generator=generator)
        self._seconds = options.sleep / 1e3

    def backward(self, model: nn.Module, factor: float) -> None:
        """Compute the gradients. factor: factor on the summed loss."""
        if self._seconds:
            time.sleep(self._seconds)
        loss: Tensor = nn.functional.cross_entropy(model(self._inputs), self._classes, reduction="sum")
        (factor * loss).backward()


def through_psdist(work: Work, model: nn.Module, optimizer: Any, weighted: bool) -> Callable[[list[int], int], None]:
    """Make a step of a worker's own micro-batches."""

    def step(numbers: list[int], rank: int) -> None:
        mine = numbers[rank]
        optimizer.zero_grad()
        if weighted:
            optimizer.set_weight(mine * SAMPLES)
        for number in range(mine):
            with optimizer.no_sync() if number < mine - 1 else nullcontext():
                work.backward(model, 1 / (mine * SAMPLES))
        optimizer.step()

    return step


def under_ddp(work: Work, model: Any, optimizer: torch.optim.Optimizer) -> Callable[[list[int], int], None]:
    """Make a step of as many micro-batches as the slowest worker has."""

    def step(numbers: list[int], rank: int) -> None:
        total, most = sum(numbers) * SAMPLES, max(numbers)
        optimizer.zero_grad()
        for number in range(most):
            with model.no_sync() if number < most - 1 else nullcontext():
                work.backward(model, len(numbers) / total if number < numbers[rank] else 0.0)
        optimizer.step()

    return step


def steps_of(options: argparse.Namespace, rank: int, world: int) -> dict[str, Callable[[list[int], int], None]]:
    """Return a step function of each contender."""
    import psdist.torch

    work, result = Work(options, rank), {}
    for name in CONTENDERS:
        torch.manual_seed(0)
        model = network(options.width)
        if name == "ddp":
            torch_workers.join_gloo(rank, world)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
            result[name] = under_ddp(work, nn.parallel.DistributedDataParallel(model), optimizer)
        else:
            consistency = psdist.SSP(2) if name == "psdist_ssp" else psdist.BSP()
            through = psdist.torch.DistributedOptimizer(
                model, psdist.optim.AdamW(lr=1e-4), consistency=consistency, name=name
            )
            result[name] = through_psdist(work, model, through, weighted=name == "psdist")
    return result


def worker(options: argparse.Namespace) -> None:
    """Take turns with all contenders; rank 0 writes the seconds of a step in each turn."""
    import psdist

    context = psdist.init()
    torch.set_num_threads(1)
    contenders = steps_of(options, context.rank, context.world_size)
    rounds: list[dict[str, float]] = []
    for number in range(options.rounds + 1):
        rounds.append({})
        for name, step in contenders.items():
            dist.barrier()
            began = time.perf_counter()
            for at in range(options.steps):
                step(counts(number * options.steps + at, context.world_size, options), context.rank)
            dist.barrier()
            rounds[-1][name] = (time.perf_counter() - began) / options.steps
    if context.rank == 0:
        torch_workers.write(rounds[1:])
    dist.destroy_process_group()
    context.close()


def show(rounds: list[dict[str, float]], options: argparse.Namespace) -> None:
    """Print a table: the median step, and DDP's step relative to each one's, in the same round."""
    drawn = [
        counts(step, options.workers, options) for step in range(options.steps, (options.rounds + 1) * options.steps)
    ]
    padded = sum(max(one) * len(one) for one in drawn) / sum(map(sum, drawn))
    print(f"micro-batches with padding: {padded:.2f} times those without")
    for name in CONTENDERS:
        ratios = sorted(one["ddp"] / one[name] for one in rounds)
        times = f"{median(ratios):.2f} times ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        print(f"{name:12} {1e3 * median(one[name] for one in rounds):8.1f} ms   DDP takes {times}")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the arguments."""
    parser = argparse.ArgumentParser(description="Steps of uneven work, beside DDP with padding.")
    parser.add_argument("--median", type=float, default=3.0, help="micro-batches of a worker's step")
    parser.add_argument("--sigma", type=float, default=1.0, help="of their logarithm")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sleep", type=float, default=0.0, help="ms that a micro-batch takes without a core")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=10, help="steps of one turn")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main() -> None:
    """The benchmark, or one of its workers."""
    arguments = sys.argv[1:]
    options = parse(arguments)
    if options.worker:
        worker(options)
    else:
        show(torch_workers.run("benchmarks.torch_uneven", options, arguments), options)


if __name__ == "__main__":
    main()

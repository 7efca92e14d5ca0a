"""A training step of an example through psdist, beside torch's DDP over gloo.

Both run in the same processes, in turns, so that a noisy moment of the machine affects all equally.

python -m benchmarks.torch_step                 # the character transformer: two workers, two servers on this host
python -m benchmarks.torch_step --example mnist --batch 64 --steps 50
python -m benchmarks.torch_step --transport tcp --compression bfloat16 --pull-dtype bfloat16
python -m benchmarks.torch_step --workers 4 --batch 8                     # four workers on this host
python -m benchmarks.torch_step --workers 4 --batch 8 --transport tcp     # the links between workers by TCP, too

Four workers take about 10 s of processor time for one step of all contenders of the transformer, which has 10.7 M
parameters. So the defaults take more than five minutes on two cores. The progress is printed after each round.

``psdist`` is ``psdist.torch.DistributedOptimizer``, ``ddp`` the same script with torch's DistributedDataParallel and
its defaults, ``ddp_tuned`` with ``gradient_as_bucket_view=True`` and fused AdamW, ``ddp_psdist`` over the backend
psdist. ``averaged`` is ``psdist.torch.DistributedDataParallel``. ``alone`` is one process without communication. Ratios
are to the first contender. Phases are forward (with the batch), backward and optimizer step of rank 0, in ms.
"processor" is the processor time of all processes of the run for one step, workers and servers, in ms. If workers share
few cores it tells more than the step's time.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, Final

import psutil
import torch
import torch.distributed as dist
from torch import nn

from benchmarks import torch_workers

sys.path.insert(0, str(torch_workers.ROOT / "examples"))

import torch_chargpt  # the examples are no package
import torch_mnist

PHASES = ("forward", "backward", "step")
#: Uncounted steps of each turn, which start with the caches and pages of another contender.
UNTIMED = 1
#: Pixels of one side of MNIST's images.
SIDE: Final = 28

Loop = tuple[nn.Module, torch.optim.Optimizer]


class Text:
    """Batches of the character transformer, and their loss."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._text, self._options = torch_chargpt.read_text(), options

    def batch(self, step: int, rank: int, world: int) -> torch.Tensor:
        """Return a worker's part of a step's passages."""
        return torch_chargpt.samples(self._text, self._options.batch, self._options.context, step)[rank::world]

    def loss(self, model: nn.Module, passages: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of a batch."""
        return torch_chargpt.loss_of(model, passages)


class Digits:
    """Batches of scikit-learn's digits, enlarged to the size of MNIST's images, and their loss."""

    def __init__(self, options: argparse.Namespace) -> None:
        (images, self._labels), _ = torch_mnist.digits()
        self._images, self._batch = nn.functional.interpolate(images, size=SIDE), options.batch

    def batch(self, step: int, rank: int, world: int) -> torch.Tensor:
        """Return the numbers of a worker's images in a step."""
        order = torch_mnist.order_of(0, len(self._images))
        first = step * self._batch % (len(order) - self._batch)
        return order[first : first + self._batch][rank::world]

    def loss(self, model: nn.Module, mine: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of a batch."""
        return nn.functional.cross_entropy(model(self._images[mine]), self._labels[mine])


DATA: Final = {"chargpt": Text, "mnist": Digits}


def make_model(options: argparse.Namespace) -> nn.Module:
    """Return the example's model."""
    if options.example == "mnist":
        return torch_mnist.network(SIDE)
    return torch_chargpt.CharGPT(options.width, options.layers, 6, options.context)


def loops(options: argparse.Namespace, rank: int, world: int) -> dict[str, Loop]:
    """Model and optimizer of each contender, with the same initial values."""
    torch_workers.join_gloo(rank, world)
    made: dict[str, Loop] = {}
    for name in options.contenders:
        torch.manual_seed(0)
        made[name] = MAKERS[name](make_model(options), options)
    return made


def _psdist(model: nn.Module, options: argparse.Namespace) -> Loop:
    import psdist.torch

    optimizer = psdist.torch.DistributedOptimizer(
        model,
        _adamw(model),
        compression=options.compression or None,
        pull_dtype=options.pull_dtype,
        bucket_cap_mb=options.bucket_cap_mb,
    )
    return model, optimizer


def _averaged(model: nn.Module, options: argparse.Namespace) -> Loop:
    import psdist.torch

    wrapped = psdist.torch.DistributedDataParallel(
        model, name="means", bucket_cap_mb=options.bucket_cap_mb, broadcast_buffers=False
    )
    return wrapped, _adamw(model)


def _ddp(model: nn.Module, *, backend: str = "", tuned: bool = False) -> Loop:
    group = dist.new_group(backend=backend) if backend else None
    wrapped = nn.parallel.DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=tuned)
    return wrapped, _adamw(model, fused=tuned)


MAKERS: Final[dict[str, Callable[[nn.Module, argparse.Namespace], Loop]]] = {
    "psdist": _psdist,
    "averaged": _averaged,
    "ddp": lambda model, _: _ddp(model),
    "ddp_tuned": lambda model, _: _ddp(model, tuned=True),
    "ddp_psdist": lambda model, _: _ddp(model, backend="psdist"),
    "alone": lambda model, _: (model, _adamw(model)),
}


def _adamw(model: nn.Module, *, fused: bool = False) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused or None)


def one_step(loop: Loop, loss_of: Callable[[nn.Module], torch.Tensor]) -> tuple[float, ...]:
    """Seconds of each phase of a step."""
    model, optimizer = loop
    times = [perf_counter()]
    loss = loss_of(model)
    optimizer.zero_grad()
    times.append(perf_counter())
    loss.backward()
    times.append(perf_counter())
    optimizer.step()
    times.append(perf_counter())
    return tuple(after - before for before, after in pairwise(times))


def processor_seconds() -> float:
    """Processor time of all processes of this run until now."""
    members = psutil.Process(os.getppid()).children(recursive=True)
    return sum(sum(one.cpu_times()[:2]) for one in members)


def worker(options: argparse.Namespace) -> None:
    """Take turns with all contenders; rank 0 writes the times."""
    import psdist
    from psdist.collectives.mesh import Mesh

    context = psdist.init()
    Mesh.shares = options.transport in ("auto", "shm")
    torch.set_num_threads(1)
    data = DATA[options.example](options)
    contenders = loops(options, context.rank, context.world_size)
    rounds: list[dict[str, list[tuple[float, ...]]]] = []
    processor: list[dict[str, float]] = []
    began_all = perf_counter()
    for number in range(options.rounds + 1):
        if context.rank == 0:
            print(f"{perf_counter() - began_all:.0f} s: {number} of {options.rounds + 1} rounds", file=sys.stderr)
        rounds.append({})
        processor.append({})
        for name, loop in contenders.items():
            dist.barrier()
            began = processor_seconds()
            steps = []
            for step in range(options.steps + UNTIMED):

                def loss_of(model: nn.Module, step: int = number * options.steps + step) -> torch.Tensor:
                    return data.loss(model, data.batch(step, context.rank, context.world_size))

                steps.append(one_step(loop, loss_of))
            rounds[-1][name] = steps[UNTIMED:]
            dist.barrier()
            processor[-1][name] = (processor_seconds() - began) / (options.steps + UNTIMED)
    if context.rank == 0:
        parameters = sum(one.numel() for one in make_model(options).parameters())
        transports = context.info().transports.values()
        transport = "/".join(sorted({kind for one in transports for kind in one.values()})) or "links"
        times = {"rounds": rounds[1:], "processor": processor[1:]}
        torch_workers.write({"parameters": parameters, "transport": transport, **times})
    dist.destroy_process_group()
    context.close()


def summary(times: dict[str, Any]) -> dict[str, Any]:
    """Return medians in ms by contender, and their ratios to the first: median over rounds, minimum and maximum."""
    rounds = times["rounds"]
    result: dict[str, Any] = {"parameters": times["parameters"], "transport": times["transport"], "contenders": {}}
    totals = {name: [median(sum(step) for step in one[name]) for one in rounds] for name in rounds[0]}
    for name, medians in totals.items():
        steps = [step for one in rounds for step in one[name]]
        ratios = sorted(other / mine for other, mine in zip(medians, next(iter(totals.values())), strict=True))
        result["contenders"][name] = {
            "total_ms": 1e3 * median(medians),
            **{f"{phase}_ms": 1e3 * median(step[index] for step in steps) for index, phase in enumerate(PHASES)},
            "processor_ms": 1e3 * median(one[name] for one in times["processor"]),
            "ratio": median(ratios),
            "spread": [ratios[0], ratios[-1]],
        }
    return result


def show(result: dict[str, Any]) -> None:
    """Print a table."""
    print(f"{result['parameters']:,} parameters by {result['transport']}")
    print(f"{'':10} {'total':>8} {'forward':>8} {'backward':>8} {'step':>8} {'processor':>9}   times the first's")
    for name, one in result["contenders"].items():
        columns = " ".join(f"{one[key]:8.1f}" for key in ("total_ms", "forward_ms", "backward_ms", "step_ms"))
        columns += f" {one['processor_ms']:9.1f}"
        print(f"{name:10} {columns}   {one['ratio']:.2f} ({one['spread'][0]:.2f} to {one['spread'][1]:.2f})")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the arguments."""
    parser = argparse.ArgumentParser(description="A step of an example, beside DDP over gloo.")
    parser.add_argument("--example", choices=DATA, default="chargpt")
    parser.add_argument("--batch", type=int, default=4, help="samples of a step, of all workers together")
    parser.add_argument("--context", type=int, default=64, help="characters of a passage")
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--contenders", nargs="+", choices=MAKERS, default=list(MAKERS))
    parser.add_argument("--bucket-cap-mb", type=float, default=8.0)
    parser.add_argument("--compression", default="")
    parser.add_argument("--pull-dtype", default="float32")
    parser.add_argument("--transport", choices=("auto", "shm", "tcp", "grpc"), default="auto")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=6, help="timed steps of one turn")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.batch < options.workers:
        parser.error(f"--batch {options.batch} leaves some of {options.workers} workers without samples: raise it")
    return options


def main() -> None:
    """The benchmark, or one of its workers."""
    arguments = sys.argv[1:]
    options = parse(arguments)
    if options.worker:
        worker(options)
        return
    result = summary(torch_workers.run("benchmarks.torch_step", options, arguments))
    print(f"{options.workers} workers, {options.servers} servers")
    show(result)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()

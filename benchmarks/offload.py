"""Training of an offloaded model beside DistributedOptimizer: ``python -m benchmarks.offload``.

Two figures. Memory: the peak memory of a worker in its own process, above its memory after psdist and torch have
trained a model of a few bytes, relative to the bytes of the model's parameters. Counted are its private memory
(Anonymous of each mapping) and the memory files of its gradients, which it shares with servers. Weights are read from
the memory of servers on this host, which is theirs. Another process samples it every few milliseconds. Time: both
trainings in one process, in turns, each with the malloc settings of a separate process.

The model is a stack of residual blocks. It is made on the meta device, and the worker never holds all of its values.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter, sleep
from typing import Any, Final

import torch
from torch import Tensor, nn

ROOT: Final = Path(__file__).resolve().parent.parent
#: Variable with the folder of a run, for its workers.
VARIABLE: Final = "BENCH_OFFLOAD"
_SAMPLE_SECONDS: Final = 0.004
#: Uncounted steps of each turn, which start with the caches and pages of another contender.
UNTIMED: Final = 1
#: Name of psdist's memory file of gradients.
_GRADIENTS: Final = re.compile(r"memfd:psdist-?grad", re.I)


class Block(nn.Module):
    """Map of float[batch, width] to the same shape."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.rise = nn.Linear(width, 2 * width)
        self.fall = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Add the block's output to ``x``."""
        out: Tensor = x + self.fall(torch.relu(self.rise(self.norm(x))))
        return out


def stack(width: int, layers: int) -> nn.Module:
    """Return the model."""
    return nn.Sequential(*[Block(width) for _ in range(layers)])


def bytes_of(model: nn.Module) -> int:
    """Bytes of all parameters."""
    return sum(one.nbytes for one in model.parameters())


def held(pid: int) -> int:
    """Return the bytes that a process itself holds."""
    total, counts = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text(errors="replace").splitlines():
        first, _, rest = line.partition(" ")
        if not first.endswith(":"):
            counts = bool(_GRADIENTS.search(rest))
        elif (first == "Anonymous:" and not counts) or (first == "Rss:" and counts):
            total += int(rest.split()[0]) * 1024
    return total


# --- the worker -------------------------------------------------------------------------------------------------------


def batches(options: argparse.Namespace) -> Iterator[Tensor]:
    """Yield inputs endlessly."""
    generator = torch.Generator().manual_seed(1)
    while True:
        yield torch.randn(options.batch, options.width, generator=generator)


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor) -> float:
    """Seconds of a step."""
    start = perf_counter()
    optimizer.zero_grad()
    (model(inputs) - inputs.flip(1)).square().mean().backward()
    optimizer.step()
    return perf_counter() - start


def remember(options: argparse.Namespace) -> None:
    """Train an offloaded model while another process watches."""
    import psdist
    import psdist.torch

    folder = Path(os.environ[VARIABLE])
    context = psdist.init()
    small = stack(8, 2)  # loads all code that is loaded on first use
    one_step(small, psdist.torch.offload(small, _adamw(small), name="small"), torch.randn(1, 8))
    (folder / "begin").write_text(str(os.getpid()))
    while not (folder / "watched").exists():
        sleep(_SAMPLE_SECONDS)
    with torch.device("meta"):
        model = stack(options.width, options.layers)
    optimizer = psdist.torch.offload(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
    for _, inputs in zip(range(options.steps), batches(options), strict=False):
        one_step(model, optimizer, inputs)
    result = {"bytes": bytes_of(model), "transport": optimizer.handle.statistics().transport}
    (folder / "end.part").write_text(json.dumps(result))
    (folder / "end.part").rename(folder / "end")
    context.close()


def compare(options: argparse.Namespace) -> None:
    """Take turns with both trainings."""
    import psdist
    import psdist.torch
    from psdist import machine

    context = psdist.init()
    whole, layered = stack(options.width, options.layers), stack(options.width, options.layers)
    layered.load_state_dict(whole.state_dict())
    loops = {
        "distributed": (whole, psdist.torch.DistributedOptimizer(whole, _adamw(whole), name="whole")),
        "offload": (layered, psdist.torch.offload(layered, _adamw(layered), name="layered")),
    }
    rounds: list[dict[str, list[float]]] = []
    given = {name: batches(options) for name in loops}
    for _ in range(options.rounds + 1):
        rounds.append({})
        for name, (model, optimizer) in loops.items():
            (machine.give_back_buffers if name == "offload" else machine.keep_buffers)()
            steps = [one_step(model, optimizer, next(given[name])) for _ in range(options.steps + UNTIMED)]
            rounds[-1][name] = steps[UNTIMED:]
    weights = dict(loops["offload"][1].weights())  # type: ignore[attr-defined]  # psdist's
    equal = all((weights[name] == one.detach().numpy()).all() for name, one in whole.named_parameters())
    result = {"rounds": rounds[1:], "equal": bool(equal)}
    (Path(os.environ[VARIABLE]) / "times.json").write_text(json.dumps(result))
    context.close()


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4)


# --- the process that measures ----------------------------------------------------------------------------------------


def run(options: argparse.Namespace, transport: str, role: str, folder: str) -> subprocess.Popen[bytes]:
    """Start a run of this script."""
    command = [
        sys.executable, "-m", "psdist.cli.main", "run", "--nservers", str(options.servers), "--nproc-per-node", "1",
        "--storage-path", "none", "--max-restarts", "0", "-m", "benchmarks.offload", "--role", role,
        "--width", str(options.width), "--layers", str(options.layers), "--batch", str(options.batch),
        "--steps", str(options.steps), "--rounds", str(options.rounds),
    ]  # fmt: skip
    environment = {**os.environ, VARIABLE: folder, "PSDIST_TRANSPORT": transport}
    environment["OMP_NUM_THREADS"] = str(options.threads)
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=sys.stderr)


def memory(options: argparse.Namespace, transport: str) -> dict[str, Any]:
    """Return the peak memory of a worker, and the bytes of its model."""
    with tempfile.TemporaryDirectory() as name:
        folder, process = Path(name), run(options, transport, "memory", name)
        begin, end, peak, base, pid = folder / "begin", folder / "end", 0, 0, 0
        while not end.exists():
            if process.poll() is not None:
                raise SystemExit(f"the run ended with status {process.returncode}")
            if not pid and begin.exists() and (text := begin.read_text()):
                pid = int(text)
                base = held(pid)
                (folder / "watched").touch()
            if pid:
                peak = max(peak, held(pid))
            sleep(_SAMPLE_SECONDS)
        result = json.loads(end.read_text())
        process.wait()
    return {**result, "peak": peak - base, "part": (peak - base) / result["bytes"]}


def times(options: argparse.Namespace, transport: str) -> dict[str, Any]:
    """Return the medians of both in seconds, and the ratio of each round: its median, minimum and maximum."""
    with tempfile.TemporaryDirectory() as name:
        if status := run(options, transport, "times", name).wait():
            raise SystemExit(f"the run ended with status {status}")
        measured = json.loads((Path(name) / "times.json").read_text())
    rounds = [{name: median(steps) for name, steps in one.items()} for one in measured["rounds"]]
    ratios = sorted(one["offload"] / one["distributed"] for one in rounds)
    medians = {name: median(one[name] for one in rounds) for name in rounds[0]}
    return {**medians, "ratio": median(ratios), "spread": [ratios[0], ratios[-1]], "equal": measured["equal"]}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the arguments."""
    line = argparse.ArgumentParser(prog="python -m benchmarks.offload", description="An offloaded model.")
    line.add_argument("--width", type=int, default=1024)
    line.add_argument("--layers", type=int, default=24)
    line.add_argument("--batch", type=int, default=64)
    line.add_argument("--servers", type=int, default=1)
    line.add_argument("--threads", type=int, default=1, help="of torch in the worker")
    line.add_argument("--rounds", type=int, default=5)
    line.add_argument("--steps", type=int, default=4, help="of one turn")
    line.add_argument("--transports", default="shm,tcp")
    line.add_argument("--only", choices=("memory", "times"))
    line.add_argument("--json", type=Path, metavar="FILE")
    line.add_argument("--role", default="", help=argparse.SUPPRESS)
    return line.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, prints, and writes the file of ``--json``."""
    options = parse(arguments)
    if options.role:
        torch.set_num_threads(options.threads)
        (remember if options.role == "memory" else compare)(options)
        return
    result: dict[str, Any] = {}
    for transport in options.transports.split(","):
        result[transport] = {}
        if options.only != "times":
            result[transport]["memory"] = one = memory(options, transport)
            print(f"{transport}: {one['peak'] / 1e6:.0f} MB of {one['bytes'] / 1e6:.0f} MB: {one['part']:.1%}")
        if options.only != "memory":
            result[transport]["times"] = one = times(options, transport)
            low, high = one["spread"]
            print(
                f"{transport}: {1e3 * one['offload']:.0f} ms, {1e3 * one['distributed']:.0f} ms with "
                f"DistributedOptimizer: {one['ratio']:.2f} ({low:.2f} to {high:.2f}), equal: {one['equal']}",
                flush=True,
            )
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

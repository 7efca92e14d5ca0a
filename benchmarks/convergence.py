"""Effect of compression on training: ``python -m benchmarks.convergence``.

Trains each small model of ``models`` through two servers with two workers in BSP, once for each codec and seed, with
and without its error feedback, and also with compressed weights: the same batches each time. It measures the loss of
the workers' weights on samples that training does not see, relative to the loss without compression, and the bytes of a
push and of a pull. ``--page docs/internals/compression-results.md`` writes the tables and the curves into that page,
between the two marks of ``RESULTS``.

The time to a loss on a slow link is calculated, not measured: the number of steps, times the bytes that a model of
25,000,000 parameters with the same bytes for each would push and pull, in bfloat16 if weights are not compressed.
``network`` measures steps.

It asserts nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import numpy as np

import psdist
from benchmarks import machine, plot
from benchmarks.codec_choice import CODECS as PLAIN
from benchmarks.models import MODELS, Arrays, Model
from benchmarks.report import table
from psdist import compression
from psdist.compression.specifications import check_pull_codec
from psdist.errors import InvalidArgumentError
from psdist.launcher.embedded import EmbeddedCluster

WORKERS, BATCH, LOOKS = 2, 64, 30
#: Codecs by the text with which a user would make them.
CODECS: Mapping[str, compression.Codec] = {
    **PLAIN, "TopK(0.01, warm_up=100)": compression.TopK(0.01, warm_up=100)
}  # fmt: skip
OPTIMIZERS: Mapping[str, Callable[[float, psdist.optim.Schedule], psdist.optim.Optimizer]] = {
    "plain": lambda lr, schedule: psdist.optim.SGD(lr=lr, schedule=schedule),
    "sgd": lambda lr, schedule: psdist.optim.SGD(lr=lr, momentum=0.5, schedule=schedule),
    "momentum": lambda lr, schedule: psdist.optim.SGD(lr=lr, momentum=0.9, schedule=schedule),
    "adam": lambda lr, schedule: psdist.optim.Adam(lr=lr, schedule=schedule),
}
#: Share of the final loss without compression that a codec must reach, for the time to a loss.
TARGET = 1.05
RESULTS = ("<!-- results of benchmarks.convergence -->", "<!-- end of results -->")
_PARAMS, _BRAIN_BYTES = 25_000_000, 2
_LINK_BITS = 1e8


#: Uses of a codec: for gradients with and without error feedback (a cast has none), for weights beside that, and for
#: differences to an estimate.
VARIANTS = ("with", "without", "both ways", "ef21")


class Codecs(NamedTuple):
    """Codecs of gradients and of weights."""

    push: compression.Codec
    pull: compression.Codec | None = None


def variants(codec: compression.Codec) -> dict[str, Codecs]:
    """Return the ways in which a codec can be used."""
    if not isinstance(codec, compression.Compressor):
        return {"without": Codecs(codec)}
    found = {
        "with": Codecs(dataclasses.replace(codec, error_feedback=True)),
        "without": Codecs(dataclasses.replace(codec, error_feedback=False)),
        "ef21": Codecs(dataclasses.replace(codec, error_feedback="ef21")),
    }
    try:
        check_pull_codec(codec)
    except InvalidArgumentError:  # Another kind, or with arguments that apply to gradients only.
        return found
    return found | {"both ways": Codecs(found["with"].push, codec)}


def parameters_name(model: str, number: int, variant: str, seed: int) -> str:
    """Return the name of a run's parameter set."""
    return f"{model}-{number}-{variant.replace(' ', '-')}-{seed}"


def schedule(steps: int, warm_up: float) -> psdist.optim.Schedule:
    """Return the schedule of the learning rate: it rises in this part of the steps, then falls to 0 along a cosine."""
    rising = int(steps * warm_up)
    return psdist.optim.Cosine(steps - rising, warmup_steps=rising, warmup_start=0.01)


async def train(
    clients: Sequence[psdist.AsyncClient],
    name: str,
    model: Model,
    codecs: Codecs,
    seed: int,
    optimizer: psdist.optim.Optimizer,
    steps: int,
) -> dict[str, Any]:
    """Train once.

    Returns the losses after equal parts of its steps, and the bytes of a push and a pull by parameter.
    """
    initial = model.initial(seed)
    handles = await asyncio.gather(
        *(
            client.parameters(
                name, init=initial, optimizer=optimizer, compression=codecs.push, pull_compression=codecs.pull
            )
            for client in clients
        )
    )
    rngs = [np.random.default_rng([seed, rank]) for rank in range(len(handles))]
    weights: list[Arrays] = list(await asyncio.gather(*(handle.pull() for handle in handles)))
    losses, before = [], handles[0].statistics().pull_bytes
    for step in range(1, steps + 1):
        gradients = [
            model.gradients(mine, rng.integers(0, model.samples, BATCH))[1]
            for mine, rng in zip(weights, rngs, strict=True)
        ]
        pushed = (handle.push_pull(one) for handle, one in zip(handles, gradients, strict=True))
        weights = list(await asyncio.gather(*pushed))
        if step % max(1, steps // LOOKS) == 0 or step == steps:
            losses.append((step, model.loss(weights[0])))
    elements = sum(array.size for array in initial.values())
    traffic = handles[0].statistics()
    pulled = (traffic.pull_bytes - before) / steps / elements if codecs.pull is not None else _BRAIN_BYTES
    return {"losses": losses, "bytes": traffic.push_bytes / steps / elements, "pulled": pulled}


async def measure(options: argparse.Namespace, cluster: EmbeddedCluster) -> dict[str, Any]:
    """Return the runs, by model, codec and variant."""
    results: dict[str, Any] = {}
    clients = [
        psdist.AsyncClient(scheduler=cluster.address, token=cluster.token, transport="tcp") for _ in range(WORKERS)
    ]
    await asyncio.gather(*(client.connect() for client in clients))
    try:
        for model_name in options.model:
            model = MODELS[model_name]()
            steps = options.steps or model.steps
            optimizer = OPTIMIZERS[options.optimizer](model.lr[options.optimizer], schedule(steps, options.warm_up))
            of_model = results[model_name] = {}
            for codec_name in dict.fromkeys(["none", *options.codec]):
                for variant, codecs in variants(CODECS[codec_name]).items():
                    if variant not in options.variant and codec_name != "none":
                        continue
                    runs = []
                    for seed in range(options.seeds):
                        name = parameters_name(model_name, len(of_model), variant, seed)
                        runs.append(await train(clients, name, model, codecs, seed, optimizer, steps))
                    one = of_model.setdefault(codec_name, {})[variant] = summary(runs)
                    print(f"{model_name:11} {codec_name:30} {variant:8} {one['loss']:.4f}", flush=True)
    finally:
        await asyncio.gather(*(client.close() for client in clients))
    return results


def summary(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the means over the seeds, and each seed's last loss."""
    curves = np.array([[loss for _, loss in run["losses"]] for run in runs])
    steps = [step for step, _ in runs[0]["losses"]]
    return {
        "losses": list(zip(steps, curves.mean(axis=0).tolist(), strict=True)),
        "last": curves[:, -1].tolist(),
        "loss": float(curves[:, -1].mean()),
        "bytes": mean(run["bytes"] for run in runs),
        "pulled": mean(run["pulled"] for run in runs),
    }


def steps_to(losses: Sequence[tuple[int, float]], target: float) -> int | None:
    """Return the first measured step whose loss is at most ``target``."""
    return next((step for step, loss in losses if loss <= target), None)


# --- the page ---------------------------------------------------------------------------------------------------------


def _row(name: str, variant: str, one: Mapping[str, Any], plain: Mapping[str, Any]) -> list[str]:
    reached = steps_to(one["losses"], TARGET * plain["loss"])
    seconds = "-" if reached is None else f"{reached * 8 * _PARAMS * (one['bytes'] + one['pulled']) / _LINK_BITS:,.0f}"
    spread = f"{min(one['last']):.4f} to {max(one['last']):.4f}"
    change = f"{one['loss'] / plain['loss'] - 1:+.1%}"
    return [
        name,
        variant,
        f"{one['bytes']:.3f}",
        f"{one['pulled']:.3f}",
        f"{one['loss']:.4f}",
        change,
        spread,
        str(reached or "-"),
        seconds,
    ]


def text(results: Mapping[str, Any], stem: str) -> str:
    """Return the tables of all models, with their pictures."""
    titles = ["codec", "error feedback", "pushed", "pulled", "loss", "change", "of the seeds", "steps to 1.05x", "s"]
    parts = []
    for model, codecs in results.items():
        plain = codecs["none"]["without"]
        rows = [_row(name, variant, one, plain) for name, found in codecs.items() for variant, one in found.items()]
        parts += [
            f"### {model.capitalize()}, {len(plain['last'])} seeds",
            f"![loss of {model}]({stem}-{model}.svg)",
            table(titles, rows),
        ]
    return "\n\n".join(parts)


def picture(model: str, codecs: Mapping[str, Any]) -> str:
    """Draw the curves of one model: each codec with error feedback, if it has one."""
    lines = {
        name.removesuffix("()"): [(float(step), loss) for step, loss in next(iter(found.values()))["losses"]]
        for name, found in codecs.items()
    }
    return plot.svg(f"{model.capitalize()}: loss on held-out samples", "steps", "loss", lines)


def write(results: Mapping[str, Any], page: Path) -> None:
    """Write the results into ``page``, between the marks, and the pictures beside it."""
    before, _, rest = page.read_text(encoding="utf-8").partition(RESULTS[0])
    after = rest.partition(RESULTS[1])[2]
    middle = text(results, page.stem)
    page.write_text(f"{before}{RESULTS[0]}\n\n{middle}\n\n{RESULTS[1]}{after}", encoding="utf-8")
    for model, codecs in results.items():
        page.with_name(f"{page.stem}-{model}.svg").write_text(picture(model, codecs), encoding="utf-8")


# --- the command ------------------------------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    line = argparse.ArgumentParser(
        prog="python -m benchmarks.convergence", description="The loss with each codec, beside that without."
    )
    line.add_argument("--model", nargs="+", choices=list(MODELS), default=list(MODELS), help="default: all")
    line.add_argument("--codec", nargs="+", choices=list(CODECS), default=list(CODECS), help="default: all")
    line.add_argument("--variant", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="default: all")
    line.add_argument("--seeds", type=int, default=5, help="runs of each (default: %(default)s)")
    line.add_argument("--steps", type=int, help="default: 600 of digits, 3,000 of characters")
    line.add_argument(
        "--warm-up", type=float, default=0.1, metavar="PART", help="of the steps, in which the learning rate rises"
    )
    line.add_argument(
        "--optimizer", choices=list(OPTIMIZERS), default="sgd", help="of the servers (default: %(default)s)"
    )
    line.add_argument("--page", type=Path, metavar="FILE", help="write the results into this page")
    line.add_argument("--json", type=Path, metavar="FILE")
    return line


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, print, and write the requested files."""
    options = parser().parse_args(arguments)
    cluster = EmbeddedCluster(servers=2)
    try:
        results = asyncio.run(measure(options, cluster))
    finally:
        cluster.close()
    if options.page:
        write(results, options.page)
    if options.json:
        found = {"models": results, "machine": machine.facts()}
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

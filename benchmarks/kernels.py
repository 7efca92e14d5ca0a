"""Update kernels beside numpy and torch, one thread: ``python -m benchmarks.kernels``.

For each optimizer it measures the time of one update of a flat float32 vector by the kernel that the server calls
(``psdist_server.kernels.updates``), by two numpy versions, and by torch.optim if it has the optimizer. It asserts
nothing, and its figures are those of this machine at this moment.

- numpy: hand-written, in place if that is natural, else with temporaries (Adam only);
- reference: tests/support/reference.py, plain numpy with the same bytes as the kernel;
- torch: ``fused=True`` if torch has it, else ``foreach=True``.

All take turns, round by round, so that a noisy moment affects all equally; medians are compared. GB/s counts each array
once per read and once per write, as the kernel needs: weights and state are read and written, the gradient is read.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[_name] = "1"  # before numpy and torch are imported

import numpy as np  # noqa: E402
import torch  # noqa: E402
from numpy.typing import NDArray  # noqa: E402

from psdist import optim  # noqa: E402
from psdist_server.kernels.optimizers import Rule  # noqa: E402
from tests.support import fused_update, reference  # noqa: E402

Floats = NDArray[np.float32]
Update = Callable[[], object]
Result = dict[str, Any]

#: Measured cases: a title, the specification, and torch's optimizer.
CASES: list[tuple[str, optim.Optimizer, Callable[..., torch.optim.Optimizer] | None, dict[str, Any]]] = [
    ("Adam", optim.Adam(), torch.optim.Adam, {"fused": True}),
    ("AdamW", optim.AdamW(), torch.optim.AdamW, {"fused": True}),
    ("SGD", optim.SGD(), torch.optim.SGD, {"fused": True}),
    ("SGD momentum", optim.SGD(momentum=0.9), torch.optim.SGD, {"momentum": 0.9, "fused": True}),
    (
        "SGD nesterov",
        optim.SGD(momentum=0.9, nesterov=True),
        torch.optim.SGD,
        {"momentum": 0.9, "nesterov": True, "fused": True},
    ),
    ("Adagrad", optim.Adagrad(), torch.optim.Adagrad, {"fused": True}),
    ("RMSprop", optim.RMSprop(), torch.optim.RMSprop, {"foreach": True}),
    ("RMSprop momentum", optim.RMSprop(momentum=0.9), torch.optim.RMSprop, {"momentum": 0.9, "foreach": True}),
    ("RMSprop centered", optim.RMSprop(centered=True), torch.optim.RMSprop, {"centered": True, "foreach": True}),
    (
        "RMSprop both",
        optim.RMSprop(centered=True, momentum=0.9),
        torch.optim.RMSprop,
        {"centered": True, "momentum": 0.9, "foreach": True},
    ),
    ("Adam amsgrad", optim.Adam(amsgrad=True), torch.optim.Adam, {"amsgrad": True, "fused": True}),
    ("AdamW amsgrad", optim.AdamW(amsgrad=True), torch.optim.AdamW, {"amsgrad": True, "fused": True}),
    ("Adamax", optim.Adamax(), torch.optim.Adamax, {"foreach": True}),
    ("NAdam", optim.NAdam(), torch.optim.NAdam, {"foreach": True}),
    ("RAdam", optim.RAdam(betas=(0.9, 0.9)), torch.optim.RAdam, {"betas": (0.9, 0.9), "foreach": True}),
    ("Adadelta", optim.Adadelta(), torch.optim.Adadelta, {"foreach": True}),
    ("Rprop", optim.Rprop(), torch.optim.Rprop, {"foreach": True}),
    ("ASGD", optim.ASGD(), torch.optim.ASGD, {"foreach": True}),
    ("Lion", optim.Lion(), None, {}),
    ("FTRL", optim.FTRL(), None, {}),
]


class NumpyAdam:
    """Adam hand-written in numpy."""

    def __init__(self, weights: Floats, spec: optim.Adam) -> None:
        self.weights, self.spec, self.step = weights, spec, 0
        self.m, self.v = np.zeros_like(weights), np.zeros_like(weights)

    def update(self, gradient: Floats) -> None:
        """Make one step, in place."""
        self.step += 1
        beta1, beta2 = self.spec.betas
        self.m *= beta1
        self.m += (1 - beta1) * gradient
        self.v *= beta2
        self.v += (1 - beta2) * gradient**2
        m_hat = self.m / (1 - beta1**self.step)
        v_hat = self.v / (1 - beta2**self.step)
        self.weights -= self.spec.lr * m_hat / (np.sqrt(v_hat) + self.spec.eps)


def contenders(title: str, gradient: Floats) -> tuple[dict[str, Update], int]:
    """Return the updates of case ``title`` by name, each on its own arrays, and the bytes that one must move."""
    _, spec, torch_class, options = next(case for case in CASES if case[0] == title)
    size = gradient.size
    rule = Rule(spec)

    def state() -> tuple[Floats, tuple[Floats, ...]]:
        weights, states = np.ones(size, np.float32), tuple(np.empty(size, np.float32) for _ in rule.state_names)
        rule.initialize(weights, states, [(0, size, 0)])
        return weights, states

    mine, plain = state(), state()
    updates: dict[str, Update] = {
        "psdist": lambda: fused_update.update(rule, *mine, gradient, 7),
        "reference": lambda: reference.update(spec, spec.values(), *plain, gradient, 7),
    }
    if isinstance(spec, optim.Adam):
        adam = NumpyAdam(np.ones(size, np.float32), spec)
        updates["numpy"] = lambda: adam.update(gradient)
    if torch_class is not None:
        parameter = torch.nn.Parameter(torch.ones(size))
        parameter.grad = torch.from_numpy(gradient)
        updates["torch"] = torch_class([parameter], lr=spec.values()["lr"], **options).step
    return updates, 4 * size * (3 + 2 * len(rule.state_names))


def interleaved(updates: dict[str, Update], rounds: int) -> dict[str, list[float]]:
    """Seconds of each update in each of ``rounds`` rounds, after one round that does not count."""
    times: dict[str, list[float]] = {name: [] for name in updates}
    for _ in range(rounds + 1):
        for name, update in updates.items():
            begin = time.perf_counter()
            update()
            times[name].append(time.perf_counter() - begin)
    return {name: values[1:] for name, values in times.items()}


def measure(title: str, gradient: Floats, rounds: int) -> Result:
    """Return one line of the table: medians in milliseconds, ratios to psdist's, and psdist's GB/s."""
    updates, moved = contenders(title, gradient)
    times = interleaved(updates, rounds)
    medians = {name: statistics.median(values) for name, values in times.items()}
    own = medians["psdist"]
    return {
        "optimizer": title,
        "milliseconds": {name: 1e3 * median for name, median in medians.items()},
        "fastest_milliseconds": {name: 1e3 * min(values) for name, values in times.items()},
        "times_slower_than_psdist": {name: median / own for name, median in medians.items()},
        "gigabytes_per_second": moved / own / 1e9,
    }


def line(result: Result) -> str:
    """Return the result as a line of the table."""
    cells = [f"{result['optimizer']:17}{result['milliseconds']['psdist']:8.1f}{result['gigabytes_per_second']:8.1f}"]
    for name in ("torch", "numpy", "reference"):
        if name in result["milliseconds"]:
            cells.append(f"{result['milliseconds'][name]:9.1f}{result['times_slower_than_psdist'][name]:7.2f}x")
        else:
            cells.append(f"{'-':>9}{'':8}")
    return "".join(cells)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table, and write it as JSON if requested."""
    titles = [case[0] for case in CASES]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description="Update kernels, one thread.")
    parser.add_argument("--elements", type=int, default=25_000_000, help="float32 parameters (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=9, help="interleaved rounds (default: %(default)s)")
    parser.add_argument("--only", nargs="+", choices=titles, default=titles, metavar="NAME", help=", ".join(titles))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    gradient = np.random.default_rng(0).standard_normal(options.elements, dtype=np.float32)
    print(f"One update of {options.elements:,} float32 parameters, one thread, median of {options.rounds} rounds.")
    print("Milliseconds, and how many times psdist's; torch is fused where it can be, else foreach.")
    print(f"{'':17}{'psdist':>8}{'GB/s':>8}{'torch':>9}{'':8}{'numpy':>9}{'':8}{'reference':>9}")
    results = []
    for title in options.only:
        results.append(measure(title, gradient, options.rounds))
        print(line(results[-1]), flush=True)
    if options.json:
        options.json.write_text(json.dumps({"elements": options.elements, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()

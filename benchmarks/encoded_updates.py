"""Cost of a step to a server whose workers compress: ``python -m benchmarks.encoded_updates``, one thread.

For each codec it measures the time that a kernel thread takes for a step of several workers, from the received payloads
to the new weights (``DenseParameters.apply``), and the time of their checks on arrival. Beside it is the update by one
float32 gradient, and by those of all the workers. It asserts nothing, and its figures are those of this machine at this
moment.

All take turns, round by round, so that a noisy moment affects all equally; medians are compared.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.codec_choice import CODECS, COLUMNS, Encoder
from benchmarks.turns import in_turns
from psdist import BSP, optim
from psdist.compression import segments
from psdist.types import ParametersEntry, ParametersSpec, Replica, Shard
from psdist_server.kernels.arrays import DenseParameters, Update

Floats = NDArray[np.float32]
Parts = list[list[NDArray[Any]]]

#: Codec of all workers.
CASES = ("Int8()", "TopK(0.01)", "ChunkedTopK(64, 4096, bits=2)")
OPTIMIZERS = {"SGD": optim.SGD(lr=0.01), "Adam": optim.Adam()}


class Server:
    """Arrays of a parameter set, and the contributions of some workers to a step."""

    def __init__(self, optimizer: optim.Optimizer, elements: int) -> None:
        spec = ParametersSpec("p", optimizer, BSP(), slice_elements=1 << 20)
        self.dense = DenseParameters(ParametersEntry(spec, elements, (Shard(Replica("server-0", 1)),), ready=True))
        self.slicing = self.dense.slicing
        self.dense.hold(range(self.slicing.count))
        for index in self.dense.indices:
            self.dense.install(index, np.ones(self.slicing.size(index), np.float32))
        self._step = 0

    def update(self, parts: Parts, is_encoded: bool) -> None:
        """Make a step, slice by slice, like a kernel thread that keeps up."""
        for index, contributions in enumerate(parts):
            self.dense.apply([Update(index, self._step, contributions, is_encoded=is_encoded)])
        self._step += 1

    def check(self, parts: Parts) -> None:
        """Do the event loop's checks of arriving payloads."""
        for index, contributions in enumerate(parts):
            for payload in contributions:
                segments.check(payload, self.slicing.size(index))


def steps(server: Server, gradients: Sequence[Floats]) -> tuple[dict[str, Callable[[], None]], dict[str, int]]:
    """Return the measured steps by title, and the bytes that one worker sends for each.

    A codec is that of all workers.
    """
    bounds = [server.slicing.bounds(index) for index in range(server.slicing.count)]
    raw: Parts = [[gradient[start:stop] for gradient in gradients] for start, stop in bounds]
    found: dict[str, Callable[[], None]] = {
        "float32, 1 worker": lambda: server.update([parts[:1] for parts in raw], False),
        f"float32, {len(gradients)} workers": lambda: server.update(raw, False),
    }
    sizes = dict.fromkeys(found, gradients[0].nbytes)
    for title in CASES:
        pushes: list[list[NDArray[np.uint8]]] = [[] for _ in gradients]
        for rank, (gradient, payloads) in enumerate(zip(gradients, pushes, strict=True)):
            Encoder(CODECS[title], bounds, rank).encode(gradient, payloads=payloads)
        parts: Parts = [list(contributions) for contributions in zip(*pushes, strict=True)]
        found[title] = partial(server.update, parts, True)
        found[f"{title}, checks"] = partial(server.check, parts)
        sizes[title] = sizes[f"{title}, checks"] = sum(payload.nbytes for payload in pushes[0])
    return found, sizes


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table for each optimizer, and write it as JSON if requested."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.encoded_updates", description="Server cost of codecs.")
    parser.add_argument("--elements", type=int, default=25_000_000, help="float32 parameters (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=8, help="contributions of a step (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="interleaved rounds (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    options = parser.parse_args(arguments)
    elements = options.elements // COLUMNS * COLUMNS
    gradients = [np.random.default_rng(rank).standard_normal(elements, np.float32) for rank in range(options.workers)]
    results = []
    for name, optimizer in OPTIMIZERS.items():
        server = Server(optimizer, elements)
        measured, sizes = steps(server, gradients)
        times = in_turns(measured, options.rounds)
        medians = {title: statistics.median(seconds) for title, seconds in times.items()}
        plain = medians["float32, 1 worker"]
        print(f"{name}, {elements:,} parameters: milliseconds, times the first, bytes per parameter of a worker")
        for title, seconds in medians.items():
            print(f"  {title:32}{1e3 * seconds:9.1f}{seconds / plain:8.2f}x{sizes[title] / elements:9.3f}", flush=True)
            results.append({"optimizer": name, "case": title, "seconds": seconds, "ratio": seconds / plain})
        server.dense.close()
    if options.json:
        options.json.write_text(json.dumps({"elements": elements, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()

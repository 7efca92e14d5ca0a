"""``psdist bench``: the cost of a training step on the user's own cluster.

If a scheduler is named (a flag, or the environment of a launcher), it joins that run as a worker; otherwise it starts a
cluster on this machine. Several workers: ``psdist run --nproc-per-node 4 --no-python psdist bench`` (the worker of rank
0 reports). It measures the time of ``push_pull`` for a parameter set of a given size, with gradients that exist before
the clock starts (``benchmarks/`` does so, too). numpy and the client are imported when a measurement starts, so that
the command line is fast. The keys of the JSON form are stable.
"""

from __future__ import annotations

import math
import os
import re
import statistics
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final, get_args

from psdist import optim
from psdist.cli.commands import show
from psdist.consistency import ASP, BSP, SSP, Consistency
from psdist.errors import InvalidArgumentError
from psdist.launcher.output import stamped
from psdist.machine import python
from psdist.settings.config import INSECURE_VARIABLE, TransportName, find_scheduler, given_credentials
from psdist.settings.exit_codes import OK
from psdist.settings.flags import CommandLine, Flag, flags_of, integer, one_of, read, seconds, setting
from psdist.settings.other_launchers import check_alone
from psdist.settings.own_process import require_working_directory
from psdist.settings.programs import CREDENTIAL_FLAGS, FORMAT_FLAG, SCHEDULER_FLAG, run_id_flag
from psdist.types import WIRE_DTYPES, DType

#: Loading kernels from the cache takes less than this.
_QUIET_SECONDS: Final = 3.0

if TYPE_CHECKING:
    from psdist.client.sync_client import Client


def command_line() -> CommandLine:
    """Return the command line of ``psdist bench``."""
    return CommandLine(
        "psdist bench",
        "Measures training steps: as a worker of the cluster that the environment or --scheduler names, which must be "
        "idle; without one, on a separate cluster on this machine.",
        (
            *flags_of(BenchSettings),
            Flag("--steps", "steps to measure", integer(1, 1_000_000), 20, "N"),
            Flag("--transport", "auto, shm, tcp or grpc", one_of(*get_args(TransportName)), "auto", "NAME"),
            Flag("--nservers", "servers, if it starts a cluster", integer(1, 1024), 2, "N"),
            SCHEDULER_FLAG,
            run_id_flag(),
            *CREDENTIAL_FLAGS,
            Flag("--timeout", "longest wait for the scheduler, and for one step", seconds(0.01), 60.0, "SECONDS"),
            FORMAT_FLAG,
        ),
        epilog="Several workers: psdist run --nproc-per-node 4 --no-python psdist bench --params 1000000",
    )


def run(given: Namespace, environ: Mapping[str, str]) -> int:
    """Measure, and print the result at rank 0; returns the exit status."""
    with ExitStack() as stack:
        bench = StepBench(stack.enter_context(_client(given, environ, stack)), read(BenchSettings, given))
        result = bench.measure(given.steps)
    if environ.get("RANK", "0") == "0":
        show(given.format, result.as_json(), lambda report: print(table(report)))
    return OK


def _client(given: Namespace, environ: Mapping[str, str], stack: ExitStack) -> Client:
    from psdist.client.sync_client import Client

    times = {"connect_timeout": given.timeout, "request_timeout": given.timeout}
    if given.scheduler or find_scheduler(environ) or environ.get("PSDIST_SCHEDULER_FILE"):
        shown = given_credentials(given, environ)
        if shown.insecure:
            os.environ[INSECURE_VARIABLE] = "1"  # ``Client`` reads it.
        return Client(
            given.scheduler or None, shown.token or None, tls=shown.tls or False,
            run_id=given.run_id or None, transport=given.transport, **times,
        )  # fmt: skip
    require_working_directory()
    check_alone(environ, "pass --scheduler HOST:PORT")
    from psdist.launcher.embedded import EmbeddedCluster

    _compile_kernels()
    cluster = EmbeddedCluster(given.nservers, environ)
    stack.callback(cluster.close)
    return Client(cluster.address, cluster.token, tls=False, run_id=cluster.run_id, transport=given.transport, **times)


def _compile_kernels() -> None:
    """Compile kernels that are not in the cache. Otherwise servers would do so during the first, measured steps."""
    command = [python(), "-m", "psdist_server.kernels"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as compiler:
        try:
            compiler.wait(_QUIET_SECONDS)
        except subprocess.TimeoutExpired:
            text = "compiling kernels, once on this machine; this may take half a minute"
            print(stamped(text), file=sys.stderr, flush=True)
        if compiler.wait():
            raise subprocess.CalledProcessError(compiler.returncode, command)


def table(report: Mapping[str, Any]) -> str:
    """Format the report for people."""
    own = f"{report['step_ms']:.2f} ms (fastest {report['fastest_ms']:.2f}, slowest {report['slowest_ms']:.2f})"
    moved = f"{report['bytes_per_step'] / 1e6:,.1f} MB a step, {report['gigabytes_per_second']:.2f} GB/s"
    what = f"{report['params']:,} parameters, {report['optimizer']}, {report['consistency']}, {report['wire_dtype']}"
    rows = [("model", what), ("step", own), ("steps", str(report["steps"])), ("traffic", moved)]
    rows += [(server, transport) for server, transport in sorted(report["transports"].items())]
    width = max(len(name) for name, _ in rows) + 2
    return "\n".join(f"{name:{width}}{value}" for name, value in rows)


if TYPE_CHECKING:
    from numpy.typing import NDArray

    from psdist.client.sync_client import Client
    from psdist.compression import Codec

#: Default number of elements of one tensor.
LAYER_ELEMENTS: Final = 1 << 20
#: Characters that names must not have.
_PUNCTUATION = re.compile(r"[^A-Za-z0-9.]+")
#: Columns of a tensor, at most: codecs do not encode vectors, so the tensors are matrices.
_COLUMNS: Final = 1024
#: Steps before the clock starts: the first ones touch new memory, compile kernels, and attach shared memory.
WARM_STEPS: Final = 3

CONSISTENCIES: Final[dict[str, Consistency]] = {"bsp": BSP(), "ssp": SSP(staleness=2), "asp": ASP()}
OPTIMIZERS: Final[dict[str, optim.Optimizer]] = {
    "adam": optim.Adam(),
    "adamw": optim.AdamW(),
    "sgd": optim.SGD(lr=0.01),
    "momentum": optim.SGD(lr=0.01, momentum=0.9),
    "adagrad": optim.Adagrad(),
    "rmsprop": optim.RMSprop(),
    "lion": optim.Lion(),
    "ftrl": optim.FTRL(),
}


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """The measured case, with the flags of ``psdist bench``. Raises InvalidArgumentError for an unknown name or an
    impossible size.

    compression, pull_compression: a codec or its name; "" for ``wire_dtype``.
    layer_elements: elements of one tensor; the last may be smaller.
    slice_elements: as in ``client.parameters``.
    """

    params: int = setting("elements of the model", integer(1), 25_000_000, "N")
    wire_dtype: DType = setting(
        "dtype on the wire: " + ", ".join(WIRE_DTYPES), one_of(*WIRE_DTYPES), "float32", "DTYPE"
    )
    consistency: str = setting(", ".join(CONSISTENCIES), one_of(*CONSISTENCIES), "bsp", "NAME")
    optimizer: str = setting(", ".join(OPTIMIZERS), one_of(*OPTIMIZERS), "adam", "NAME")
    copy: bool = setting(
        "plain calls with separate arrays, instead of gradient buffers and weights that are read in place"
    )
    layer_elements: int = LAYER_ELEMENTS
    slice_elements: int = 0
    compression: Codec | str = setting("codec of gradients (default: --wire-dtype)", str, "", "NAME")
    pull_compression: Codec | str = setting("codec of weights (default: --wire-dtype)", str, "", "NAME")

    def __post_init__(self) -> None:
        for name, number in (("params", self.params), ("layer_elements", self.layer_elements)):
            if number < 1:
                raise InvalidArgumentError(f"{name}={number} is out of range: use 1 or more")
        for what, value, known in (
            ("wire_dtype", self.wire_dtype, WIRE_DTYPES),
            ("consistency", self.consistency, tuple(CONSISTENCIES)),
            ("optimizer", self.optimizer, tuple(OPTIMIZERS)),
        ):
            if value not in known:
                raise InvalidArgumentError(f"{what}={value!r:.60} is unknown: use one of {', '.join(known)}")

    @property
    def name(self) -> str:
        """The name of the parameter set. Different settings in the same run have different names."""
        layers = "" if self.layer_elements == LAYER_ELEMENTS else f"-{self.layer_elements}"
        pulls = f"-{_PUNCTUATION.sub('-', str(self.pull_compression))}" if self.pull_compression else ""
        slices = f"-s{self.slice_elements}" if self.slice_elements else ""
        codecs = f"{self.wire_dtype}-{self.consistency}-{self.optimizer}"
        return f"psdist-bench/{self.params}-{codecs}{layers}{slices}{pulls}"

    def layers(self) -> dict[str, int]:
        """Return the number of elements of each tensor, by name."""
        starts = range(0, self.params, self.layer_elements)
        return {f"layer.{n:05}": min(self.layer_elements, self.params - start) for n, start in enumerate(starts)}

    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments of ``client.parameters``."""
        import numpy as np

        ones = np.ones(self.layer_elements, np.float32)
        return {
            "name": self.name,
            "init": {name: _matrix(ones[:size]) for name, size in self.layers().items()},
            "optimizer": OPTIMIZERS[self.optimizer],
            "consistency": CONSISTENCIES[self.consistency],
            "slice_elements": self.slice_elements,
            "compression": self.compression or self.wire_dtype,
            "pull_dtype": "float32" if self.pull_compression else self.wire_dtype,
            "pull_compression": self.pull_compression or None,
        }

    def gradients(self, buffers: Mapping[str, NDArray[Any]] | None, rank: int) -> Mapping[str, NDArray[Any]]:
        """Return the gradients to push: written into ``buffers``, or into new arrays if it is None.

        rank: workers have different gradients, since servers warn of equal ones.
        """
        import numpy as np

        values = np.random.default_rng(rank).standard_normal(self.layer_elements, dtype=np.float32)
        if buffers is None:
            return {name: _matrix(values[:size].copy()) for name, size in self.layers().items()}
        for buffer in buffers.values():
            buffer[...] = _matrix(values[: buffer.size])
        return buffers


def _matrix(values: NDArray[Any]) -> NDArray[Any]:
    return values.reshape(-1, math.gcd(values.size, _COLUMNS))


def vary(gradients: Mapping[str, NDArray[Any]]) -> None:
    """Change one number, for the next step: unchanged buffers would cause a warning."""
    first = next(iter(gradients.values()))
    first.flat[0] = -first.flat[0]


@dataclass(frozen=True, slots=True)
class BenchResult:
    """Times of one worker's steps. Bytes are those of gradients and weights, whether sent or shared.

    transports: how each server was reached, by server id.
    """

    settings: BenchSettings
    seconds: tuple[float, ...]
    bytes_per_step: float
    transports: Mapping[str, str]

    def as_json(self) -> dict[str, Any]:
        """Return the result with stable keys."""
        ordered = sorted(self.seconds)
        median = statistics.median(ordered)
        return {
            **asdict(self.settings),
            "steps": len(ordered),
            "step_ms": 1e3 * median,
            "fastest_ms": 1e3 * ordered[0],
            "slowest_ms": 1e3 * ordered[-1],
            "bytes_per_step": round(self.bytes_per_step),
            "gigabytes_per_second": self.bytes_per_step / median / 1e9,
            "transports": dict(self.transports),
        }


class StepBench:
    """A worker of the benchmark, which joins the parameter set and makes steps."""

    def __init__(self, client: Client, settings: BenchSettings) -> None:
        self.settings = settings
        self.parameters = client.parameters(**settings.arguments())
        self.gradients = settings.gradients(None if settings.copy else self.parameters.gradient_buffers(), client.rank)

    def step(self) -> None:
        """Make a step: push the gradients and pull the new weights."""
        vary(self.gradients)
        self.parameters.push_pull(self.gradients, copy=self.settings.copy)

    def measure(self, steps: int, warm_steps: int = WARM_STEPS) -> BenchResult:
        """Measure ``steps`` steps after the warm-up. Raises InvalidArgumentError, and as ``push_pull``."""
        if steps < 1:
            raise InvalidArgumentError(f"steps={steps} is out of range: use 1 or more")
        for _ in range(warm_steps):
            self.step()
        before = self.parameters.statistics()
        seconds = []
        for _ in range(steps):
            begin = time.perf_counter()
            self.step()
            seconds.append(time.perf_counter() - begin)
        after = self.parameters.statistics()
        moved = after.push_bytes + after.pull_bytes - before.push_bytes - before.pull_bytes
        return BenchResult(self.settings, tuple(seconds), moved / steps, after.transports)

"""Plan of the report: each run with its command, and the goals that it is judged by. Values only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.shaped_hosts import hosts_missing

Result = Mapping[str, Any]


@dataclass(frozen=True)
class Run:
    """One call of a benchmark.

    short, full: arguments that set how long it measures.
    missing: returns the reason why the machine cannot run it; the run is then omitted.
    """

    name: str
    module: str
    arguments: tuple[str, ...] = ()
    short: tuple[str, ...] = ()
    full: tuple[str, ...] = ()
    missing: Callable[[], str] = str

    def command(self, full: bool) -> tuple[str, ...]:
        """Module and arguments."""
        return (self.module, *self.arguments, *(self.full if full else self.short))


_SHORT, _FULL = ("--rounds", "5"), ("--rounds", "20")


def _step(name: str, text: str, *peers: str) -> Run:
    return Run(
        name, "benchmarks.step", (*text.split(), *(word for peer in peers for word in ("--peer", peer))), _SHORT, _FULL
    )


RUNS: tuple[Run, ...] = (
    _step("shm-2", "--workers 2 --transport shm", "gloo", "kernel", "memcpy"),
    _step("shm-4", "--workers 4 --transport shm", "gloo", "kernel"),
    # Ray's own processes are not idle while others have their turn, so it is measured apart.
    _step("shm-2-ray", "--workers 2 --transport shm", "ray", "ray_dataflow"),
    _step("shm-4-ray", "--workers 4 --transport shm", "ray", "ray_dataflow"),
    _step("shm-8", "--workers 8 --transport shm", "gloo", "kernel"),
    _step("shm-2-copy", "--workers 2 --transport shm --copy", "gloo"),
    _step("tcp-2", "--workers 2 --transport tcp", "echo_tcp", "gloo"),
    _step("tcp-2-bf16", "--workers 2 --transport tcp --wire-dtype bfloat16", "gloo"),
    _step("tcp-2-asp", "--workers 2 --transport tcp --consistency asp", "tensorflow"),
    _step("grpc-2", "--workers 2 --transport grpc", "echo", "echo_tuned", "flight", "gloo"),
    _step("grpc-2-bf16", "--workers 2 --transport grpc --wire-dtype bfloat16", "gloo"),
    _step("grpc-2-asp", "--workers 2 --transport grpc --consistency asp", "tensorflow"),
    Run("network", "benchmarks.network", (), ("--rounds", "3"), ("--rounds", "8"), hosts_missing),
    _step("shm-2-replicas", "--workers 2 --servers 3 --replicas 2 --transport shm", "unreplicated"),
    _step("tcp-2-replicas", "--workers 2 --servers 3 --replicas 2 --transport tcp", "unreplicated"),
    Run("latency-shm", "benchmarks.latency", ("--transport", "shm"), ("--rounds", "10"), ("--rounds", "40")),
    Run("latency-tcp", "benchmarks.latency", ("--transport", "tcp"), ("--rounds", "10"), ("--rounds", "40")),
    Run("latency-grpc", "benchmarks.latency", ("--transport", "grpc"), ("--rounds", "10"), ("--rounds", "40")),
    Run(
        "scaling", "benchmarks.scaling", ("--transport", "shm", "--peer", "gloo"),
        ("--workers", "1", "2", "4", "8", "--rounds", "3"), ("--rounds", "8"),
    ),
    Run("steady", "benchmarks.steady", (), ("--steps", "300"), ("--steps", "1000")),
    Run("kernels", "benchmarks.kernels", (), ("--rounds", "5"), ("--rounds", "9")),
    Run("startup", "benchmarks.startup", (), ("--rounds", "3"), ("--rounds", "9")),
    Run("memory", "benchmarks.memory"),
    Run("snapshot", "benchmarks.snapshot", (), ("--rounds", "4"), ("--rounds", "12")),
)  # fmt: skip


@dataclass(frozen=True)
class Measured:
    """Figure for the table of goals: its text, and True if the goal is met (None: there is no goal)."""

    text: str
    met: bool | None


@dataclass(frozen=True)
class Goal:
    """Line of the table.

    judge: called with the result of the run. KeyError says that the result lacks the figure.
    """

    case: str
    target: str
    run: str
    judge: Callable[[Result], Measured]


def _faster(peer: str, least: float) -> Callable[[Result], Measured]:
    def judge(result: Result) -> Measured:
        one = result["peers"][peer]
        low, high = one["spread"]
        text = f"{one['ratio']:.2f}x ({low:.2f} to {high:.2f}): {result['psdist_ms']:.1f} against {one['ms']:.1f} ms"
        return Measured(text, one["ratio"] >= least)

    return judge


def _at_most(peer: str, most: float | None) -> Callable[[Result], Measured]:
    def judge(result: Result) -> Measured:
        one = result["peers"][peer]
        low, high = one["spread"]
        text = (
            f"{1 / one['ratio']:.2f}x ({1 / high:.2f} to {1 / low:.2f}): "
            f"{result['psdist_ms']:.1f} against {one['ms']:.1f} ms"
        )
        return Measured(text, None if most is None else 1 / one["ratio"] <= most)

    return judge


def _between_hosts(rate: str, judge: Callable[[Result], Measured]) -> Callable[[Result], Measured]:
    return lambda result: judge(result["rates"][rate])


def _latency(p50: float, p99: float, result: Result) -> Measured:
    points = {name: result["milliseconds"][name] for name in ("psdist", "psdist_async")}
    met = all(one["p50"] < p50 and one["p99"] < p99 for one in points.values())
    texts = [f"{name} {one['p50']:.2f} / {one['p99']:.2f} ms" for name, one in points.items()]
    return Measured("; ".join(texts), met)


def _scaling(result: Result) -> Measured:
    one = result["workers"]["8"]
    return Measured(
        f"{one['psdist']['efficiency']:.1%} (gloo {one['gloo']['efficiency']:.1%})", one["psdist"]["efficiency"] >= 0.95
    )


#: Growth over a run that counts as none: allocators round, and the interpreter's caches fill up.
TRACED_GROWTH_BYTES, RESIDENT_GROWTH_BYTES = 64 << 10, 4 << 20


def _steady(result: Result) -> Measured:
    every = [one for processes in result["processes"].values() for one in processes]
    traced = max(one["traced_growth_bytes"] for one in every)
    resident = max(one["resident_growth_bytes"] for one in every)
    text = f"{result['steps']} steps: at most {traced / 1024:.0f} KiB traced, {resident / 1024:.0f} KiB resident"
    return Measured(text, traced <= TRACED_GROWTH_BYTES and resident <= RESIDENT_GROWTH_BYTES)


def _stall(result: Result) -> Measured:
    before, during = (result["steps_ms"][name]["p99"] for name in ("normal", "during"))
    return Measured(f"{result['stall_ms']:.0f} ms: {during:.0f} after {before:.0f}", result["stall_ms"] <= 50)


def _written(result: Result) -> Measured:
    both = result["megabytes_per_second"]["training"]
    ratio = result["write_ratio"]["training"]
    return Measured(f"{ratio:.0%}: {both['written']:.0f} against {both['plain']:.0f} MB/s", ratio >= 0.7)


GOALS: tuple[Goal, ...] = (
    Goal("2 workers, shared memory, against gloo + fused Adam", "2.5x faster", "shm-2", _faster("gloo", 2.5)),
    Goal("the same with 4 workers", "3.5x faster", "shm-4", _faster("gloo", 3.5)),
    Goal("the same with 8 workers", "4x faster", "shm-8", _faster("gloo", 4.0)),
    Goal("2 workers, against Ray's actors", "5x faster", "shm-2-ray", _faster("ray", 5.0)),
    Goal("4 workers, against Ray's actors", "5x faster", "shm-4-ray", _faster("ray", 5.0)),
    Goal("tcp, float32, 2 workers: time over a raw echo's", "at most 1.4x", "tcp-2", _at_most("echo_tcp", 1.4)),
    Goal("tcp, float32, 2 workers, against gloo + fused Adam", "0.9x its speed", "tcp-2", _faster("gloo", 0.9)),
    Goal("tcp, bfloat16, against gloo in float32 + fused Adam", "1.4x faster", "tcp-2-bf16", _faster("gloo", 1.4)),
    Goal(
        "ASP over tcp, 2 workers, against TensorFlow's ParameterServerStrategy", "1.3x faster", "tcp-2-asp",
        _faster("tensorflow", 1.3),
    ),
    Goal(
        "ASP over gRPC, 2 workers, against TensorFlow's ParameterServerStrategy", "faster", "grpc-2-asp",
        _faster("tensorflow", 1.0),
    ),
    Goal("gRPC, float32, 2 workers: time over a raw echo's", "at most 1.25x", "grpc-2", _at_most("echo", 1.25)),
    Goal(
        "the same over a raw echo's with psdist's options", "at most 1.3x", "grpc-2", _at_most("echo_tuned", 1.3)
    ),
    Goal(
        "4 hosts at 1 Gbit/s, float32: time over torch DDP's over gloo", "at most 1.05x", "network",
        _between_hosts("1gbit", _at_most("ddp", 1.05)),
    ),
    Goal("gRPC, bfloat16, against gloo in float32 + fused Adam", "faster", "grpc-2-bf16", _faster("gloo", 1.0)),
    Goal("2 workers, shared memory: time over the lower bound's", "at most 1.6x", "shm-2", _at_most("kernel", 1.6)),
    Goal(
        "two copies of each shard, 3 servers, shared memory: time over that of one copy", "at most 1.6x",
        "shm-2-replicas", _at_most("unreplicated", 1.6),
    ),
    Goal("the same over tcp", "at most 1.8x", "tcp-2-replicas", _at_most("unreplicated", 1.8)),
    Goal("push_pull of 1,000 parameters, p50 / p99", "0.6 / 3 ms", "latency-shm", partial(_latency, 0.6, 3.0)),
    Goal("the same over tcp", "0.6 / 2 ms", "latency-tcp", partial(_latency, 0.6, 2.0)),
    Goal("8 emulated workers, 400 ms compute: efficiency", "at least 95%", "scaling", _scaling),
    Goal("memory that grows over the steps", "none", "steady", _steady),
    Goal("p99 of a step while 300 MB are saved, over the usual", "at most 50 ms", "snapshot", _stall),
    Goal("a snapshot written while training, over plain files", "at least 70%", "snapshot", _written),
)  # fmt: skip

"""Bottlenecks made on purpose, and the sentences of ``psdist explain`` about them.

    python -m benchmarks.bottlenecks [CASE ...]

Each case runs twice: as it is, and with the setting changed as the explanation proposes. The table has the bottleneck
that was named, the predicted speedup and the measured one. The speed is that of whole steps, which the second
explanation measures. The case *link* needs root: its hosts are network namespaces (``shaped_hosts``).

It asserts nothing about its figures: other programs on the machine change them.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.contenders import compile_kernels, module
from benchmarks.shaped_hosts import ShapedHosts, hosts_missing

_STOP_SECONDS = 20
_WAIT_SECONDS = 180


@dataclass(frozen=True)
class Made:
    """A run. compute_ms, straggler_ms: sleep of each worker, and of worker 0 besides; per batch.

    megabits: speed of the hosts' links; 0 starts everything on this machine.
    batches: accumulated per push.
    in_place: gradients are written where the server reads them, and weights are read where it writes them.
    """

    params: int = 1000
    workers: int = 1
    compute_ms: float = 0.0
    straggler_ms: float = 0.0
    batches: int = 1
    codec: str = ""
    backup_workers: int = 0
    in_place: bool = False
    kernel_threads: int = 1
    transport: str = "auto"
    megabits: int = 0


@dataclass(frozen=True)
class Case:
    """A bottleneck, the run that has it, and the change of the run's settings that is proposed against it."""

    bottleneck: str
    made: Made
    change: Mapping[str, Any]

    def batches(self, made: Made, step_seconds: float, unit: str) -> float:
        """Return the speed in ``unit`` per second."""
        return (made.workers * made.batches if unit == "batches" else 1) / step_seconds


CASES: Mapping[str, Case] = {
    "link": Case("link", Made(params=1 << 20, megabits=20, compute_ms=50), {"codec": "int8"}),
    "kernel": Case("server kernel", Made(params=16 << 20, in_place=True), {"kernel_threads": 2}),
    "straggler": Case("straggler", Made(workers=3, compute_ms=60, straggler_ms=300), {"backup_workers": 1}),
    "script": Case("script", Made(workers=2, compute_ms=300), {"workers": 3}),
    "latency": Case("latency", Made(transport="tcp", compute_ms=1), {"batches": 4}),
}


def work(made: Made) -> None:
    """Train until SIGTERM: one of the run's workers."""
    import numpy as np

    import psdist

    with psdist.Client() as client:
        shape = (-(-made.params // 1024), min(1024, made.params))
        model = client.parameters(
            "model",
            {"w": np.zeros(shape, np.float32)},
            psdist.optim.Adam(),
            consistency=psdist.BSP(backup_workers=made.backup_workers),
            **({"compression": made.codec, "pull_compression": made.codec} if made.codec else {}),
        )
        gradient: Any = {"w": np.random.default_rng(client.rank).standard_normal(shape, np.float32)}
        if made.in_place:
            buffers = model.gradient_buffers()
            buffers["w"][...] = gradient["w"]
            gradient = buffers
        seconds = (made.compute_ms + (made.straggler_ms if client.rank == 0 else 0.0)) / 1e3
        while True:
            for _ in range(made.batches):
                time.sleep(seconds)
            model.push_pull(gradient, copy=not made.in_place)


def commands(made: Made, hosts: ShapedHosts | None, address: Path) -> list[tuple[str, ...]]:
    """Return the command lines of a run. address: file that the scheduler writes its address into."""
    script = ("-m", "benchmarks.bottlenecks", "worker", json.dumps(asdict(made)))
    found = ("--scheduler-file", str(address))
    scheduler = module(
        "psdist_scheduler", "--address-file", str(address), "--min-workers", str(made.workers), "--min-servers", "1",
        "--failure-timeout", "20", "--worker-timeout", "60", "--log-level", "warning",
        *(("--host", hosts.gateway, "--insecure") if hosts is not None else ()),
    )  # fmt: skip
    server = module("psdist_server", *found, "--kernel-threads", str(made.kernel_threads), "--log-level", "warning",
                    *(("--host", hosts.address(0), "--insecure") if hosts is not None else ()))  # fmt: skip
    worker = (
        sys.executable, "-c", "from psdist.cli.main import worker; worker()", *found, "--nproc-per-node",
        str(made.workers), "--max-restarts", "0", *script,
    )  # fmt: skip
    if hosts is None:
        return [scheduler, server, worker]
    return [scheduler, (*hosts.inside(0), *server), (*hosts.inside(1), *worker)]


@contextmanager
def running(made: Made) -> Iterator[Mapping[str, str]]:
    """Start a run, and end it with the block. Yields the environment for commands about it."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="psdist-bottleneck-")))
        hosts = stack.enter_context(ShapedHosts(2, made.megabits * 1e6)) if made.megabits else None
        environment = os.environ | {
            "PSDIST_TOKEN": secrets.token_urlsafe(16),
            "PSDIST_INSECURE": "1",
            "PSDIST_TRANSPORT": made.transport,
            "PSDIST_SCHEDULER_FILE": str(directory / "scheduler"),
            "OMP_NUM_THREADS": "1",
        }
        log = stack.enter_context((directory / "log").open("wb"))
        processes: list[subprocess.Popen[bytes]] = []
        stack.callback(_end, processes)
        for command in commands(made, hosts, directory / "scheduler"):
            processes.append(
                subprocess.Popen(
                    command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
                )
            )
        _await(directory / "scheduler", processes, directory / "log")
        try:
            yield environment
        except ChildProcessError as error:
            printed = (directory / "log").read_text(errors="replace")[-2000:]
            raise SystemExit(f"{error}\nThe run's processes printed:\n{printed}") from None


def _await(address: Path, processes: Sequence[subprocess.Popen[bytes]], log: Path) -> None:
    deadline = time.monotonic() + _WAIT_SECONDS
    while not address.exists():
        if any(process.poll() is not None for process in processes) or time.monotonic() > deadline:
            raise SystemExit(f"the run did not start:\n{log.read_text(errors='replace')[-2000:]}")
        time.sleep(0.2)


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End the processes, the workers first."""
    for process in reversed(processes):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_SECONDS)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def explained(environment: Mapping[str, str], seconds: float) -> dict[str, Any]:
    """Return the JSON form of ``psdist explain`` of the run."""
    done = subprocess.run(
        module("psdist.cli.main", "explain", "--format", "json", "--seconds", str(seconds), "--timeout", "60",
               "--wait", str(_WAIT_SECONDS)),
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise ChildProcessError(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def settled(made: Made, seconds: float) -> dict[str, Any]:
    """Return the explanation of a run that has left its first steps, which compile and connect, behind."""
    with running(made) as environment:
        explained(environment, 1.0)
        time.sleep(seconds)
        return explained(environment, seconds)


def measure(case: Case, seconds: float) -> dict[str, Any]:
    """Return the named bottleneck, and the predicted and measured speedup."""
    changed = replace(case.made, **case.change)
    before, after = (settled(made, seconds) for made in (case.made, changed))
    unit = before["change"]["unit"]
    speeds = [case.batches(made, one["step_seconds"], unit) for made, one in ((case.made, before), (changed, after))]
    return {
        "named": before["bottleneck"],
        "setting": before["change"]["setting"],
        "step_ms": 1e3 * before["step_seconds"],
        "changed_step_ms": 1e3 * after["step_seconds"],
        "predicted": before["change"]["speedup"],
        "measured": speeds[1] / speeds[0],
        "sentences": before["sentences"],
    }


def main(names: Sequence[str], seconds: float = 15.0) -> None:
    """Print a row for each case, and its three sentences."""
    compile_kernels()
    for name in names or CASES:
        case = CASES[name]
        if case.made.megabits and (reason := hosts_missing()):
            print(f"{name}: left out, because {reason}")
            continue
        found = measure(case, seconds)
        print(
            f"{name}: named {found['named']} (made: {case.bottleneck}); {found['setting']}: "
            f"predicted {found['predicted']:.2f}x, measured {found['measured']:.2f}x "
            f"({found['step_ms']:.1f} -> {found['changed_step_ms']:.1f} ms a step)",
            *(f"    {sentence}" for sentence in found["sentences"]),
            sep="\n",
            flush=True,
        )


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        work(Made(**json.loads(sys.argv[2])))
    else:
        main(sys.argv[1:])

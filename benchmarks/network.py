"""Hosts with links of a given speed: ``python -m benchmarks.network --rate 1gbit``, as root.

Hosts are network namespaces (``shaped_hosts``), each with one worker and one server; psdist's scheduler is outside, and
its own link has no limit. psdist, with each transport, wire dtype and codec of ``VARIANTS``, takes turns with torch's
all-reduce and DistributedDataParallel over gloo, with and without its fp16 hook. A few contenders at a time take turns
with psdist, because all of them together need more memory than most machines have; each ratio refers to psdist's steps
of the same turns. It measures the time of a step, the bytes that the hosts' interfaces counted in it, and the processor
time of all hosts together. A raw TCP transfer from each host to the next, all concurrently, first shows the capacity of
a link.

Invariants: psdist's workers reach their own host's server and the others as the variant says, or there is no result. No
namespace, interface or process is left behind, however the benchmark ends (after SIGKILL, the next one removes the
namespaces).

All hosts share this machine's cores, so at 10 Gbit/s these are the limit. It asserts nothing about its figures.
"""

from __future__ import annotations

import argparse
import json
import secrets
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import figures, machine
from benchmarks.contenders import DIRECTORY, WARM_STEPS, Contender, ContenderError, Running, interleave, module
from benchmarks.shaped_hosts import Counters, ShapedHosts, hosts_missing
from benchmarks.turns import Settings
from psdist.errors import ConfigurationError
from tests.support.chaos.faults import INTERFACE


@dataclass(frozen=True)
class Rate:
    """Speed of links, and a number of parameters for which a step takes half a second or more."""

    bits_per_second: float
    params: int


RATES: Mapping[str, Rate] = {
    "100mbit": Rate(1e8, 1_000_000),
    "1gbit": Rate(1e9, 25_000_000),
    "10gbit": Rate(1e10, 25_000_000),
}


@dataclass(frozen=True)
class Variant:
    """One way to run psdist.

    own, others: expected transports to the server of the worker's own host, and to the others.
    slice_elements: 0 is psdist's choice.
    """

    transport: str
    own: str
    others: str
    wire_dtype: str = "float32"
    codec: str = ""
    pull_codec: str = ""
    slice_elements: int = 0


VARIANTS: Mapping[str, Variant] = {
    "psdist": Variant("auto", "shm", "tcp"),
    "psdist_bf16": Variant("auto", "shm", "tcp", "bfloat16"),
    "psdist_grpc": Variant("grpc", "grpc", "grpc"),
    "psdist_auto": Variant("auto", "shm", "tcp", codec="auto"),
    "psdist_int8": Variant("auto", "shm", "tcp", "float32", "Int8()", "Int8()"),
    "psdist_int8_small": Variant("auto", "shm", "tcp", "float32", "Int8()", "Int8()", 1 << 18),
    "psdist_topk": Variant("auto", "shm", "tcp", "float32", "TopK(0.01)", "TopK(0.01)"),
    "psdist_chunked": Variant("auto", "shm", "tcp", "float32", *2 * ("ChunkedTopK(64, 4096, bits=2)",)),
}

#: Seconds of the raw transfer.
_TRANSFER_SECONDS = 1.0
_TRANSFER = "benchmarks.peers.transfer"
#: Number of peers beside psdist in one part.
_AT_ONCE = 3
#: All contenders start on this machine's cores together.
_FAILURE_TIMEOUT_SECONDS = 15
_PSDIST_WORKER = (sys.executable, "-c", "from psdist.cli.main import worker; worker()")


# --- contenders -------------------------------------------------------------------------------------------------------


def psdist(settings: Settings, hosts: ShapedHosts, name: str) -> Contender:
    """Run psdist as a user starts it on several machines: a server and a ``psdist-worker`` on each host."""
    variant = VARIANTS[name]
    text = replace(
        settings,
        wire_dtype=variant.wire_dtype,
        codec=variant.codec,
        pull_codec=variant.pull_codec,
        slice_elements=variant.slice_elements,
    ).text()
    found = ("--scheduler-file", f"{DIRECTORY}/scheduler")
    scheduler = module(
        "psdist_scheduler", "--address-file", f"{DIRECTORY}/scheduler", "--host", hosts.gateway, "--insecure",
        "--min-workers", str(hosts.hosts), "--min-servers", str(hosts.hosts), "--idle-timeout", "1",
        "--failure-timeout", str(_FAILURE_TIMEOUT_SECONDS), "--log-level", "warning",
    )  # fmt: skip
    servers = [
        module(
            "psdist_server", *found, "--host", hosts.address(host), "--insecure", "--kernel-threads", "1",
            "--server-id", f"server-{host}", "--log-level", "warning",
        )
        for host in range(hosts.hosts)
    ]  # fmt: skip
    nodes = ("--nnodes", str(hosts.hosts), "--max-restarts", "0")
    workers = [
        (*_PSDIST_WORKER, *found, *nodes, "--node-rank", str(host), "-m", "benchmarks.worker", text)
        for host in range(hosts.hosts)
    ]
    environment = {
        "PSDIST_TRANSPORT": variant.transport,
        "PSDIST_TOKEN": secrets.token_urlsafe(32),
        "PSDIST_INSECURE": "1",
    }
    return Contender(name, (scheduler, *on_hosts(hosts, servers), *on_hosts(hosts, workers)), hosts.hosts, environment)


def on_hosts(hosts: ShapedHosts, commands: Sequence[tuple[str, ...]]) -> tuple[tuple[str, ...], ...]:
    """Return the commands, each on a host of its own."""
    return tuple((*hosts.inside(host), *command) for host, command in enumerate(commands))


def _torch(settings: Settings, hosts: ShapedHosts, name: str, peer: str, role: str = "") -> Contender:
    commands = [
        module(f"benchmarks.peers.{peer}", replace(settings, rank=rank, role=role).text())
        for rank in range(hosts.hosts)
    ]
    return Contender(name, on_hosts(hosts, commands), hosts.hosts, {"GLOO_SOCKET_IFNAME": INTERFACE})


def gloo(settings: Settings, hosts: ShapedHosts, name: str) -> Contender:
    """Run one all-reduce of the whole gradient, and fused Adam on each worker."""
    return _torch(settings, hosts, name, "gloo")


def ddp(settings: Settings, hosts: ShapedHosts, name: str) -> Contender:
    """Run DistributedDataParallel over gloo, and fused Adam on each worker."""
    return _torch(settings, hosts, name, "ddp")


def ddp_fp16(settings: Settings, hosts: ShapedHosts, name: str) -> Contender:
    """Run the same with torch's fp16 hook."""
    return _torch(settings, hosts, name, "ddp", "fp16")


CONTENDERS: Mapping[str, Callable[[Settings, ShapedHosts, str], Contender]] = {
    **dict.fromkeys(VARIANTS, psdist),
    "gloo": gloo,
    "ddp": ddp,
    "ddp_fp16": ddp_fp16,
}


# --- measuring --------------------------------------------------------------------------------------------------------


class Counted:
    """Contender whose turns are counted at the hosts' interfaces."""

    def __init__(self, running: Running, hosts: ShapedHosts) -> None:
        self.name = running.name
        self._running = running
        self._hosts = hosts
        self._moved = [Counters()] * hosts.hosts
        self._processor_seconds = 0.0
        self._steps = 0

    def turn(self, steps: int) -> list[list[float]]:
        """See ``Running.turn``."""
        before, processor = self._counters(), self._running.processor_seconds()
        seconds = self._running.turn(steps)
        self._processor_seconds += self._running.processor_seconds() - processor
        deltas = [now - then for now, then in zip(self._counters(), before, strict=True)]
        self._moved = [moved + delta for moved, delta in zip(self._moved, deltas, strict=True)]
        self._steps += steps
        return seconds

    def bytes_per_step(self) -> dict[str, float]:
        """Bytes that the busiest host sent and received."""
        return {
            "sent": max(moved.sent for moved in self._moved) / self._steps,
            "received": max(moved.received for moved in self._moved) / self._steps,
        }

    def processor_ms_per_step(self) -> float:
        """Processor time of all hosts together."""
        return 1e3 * self._processor_seconds / self._steps

    def _counters(self) -> list[Counters]:
        return [self._hosts.counters(host) for host in range(self._hosts.hosts)]


def check_transports(running: Running) -> None:
    """Raise ContenderError if a worker of psdist reached a server by another transport than its variant says."""
    variant = VARIANTS[running.name]
    expected = Counter({variant.own: 1}) + Counter({variant.others: len(running.facts) - 1})
    for facts in running.facts:
        if Counter(text.partition(":")[0] for text in facts["transports"].values()) != expected:
            raise ContenderError(f"{running.name}: servers were reached by {facts['transports']}, not by {expected}")


def transfer(hosts: ShapedHosts, seconds: float = _TRANSFER_SECONDS) -> list[float]:
    """Return the bits per second of raw TCP from each host to the next, all concurrently."""
    with ExitStack() as stack:

        def start(host: int, *arguments: str) -> subprocess.Popen[str]:
            command = [*hosts.inside(host), *module(_TRANSFER, *arguments)]
            process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            stack.callback(process.kill)
            return process

        def line(process: subprocess.Popen[str]) -> str:
            assert process.stdout is not None
            if not (text := process.stdout.readline()):
                raise ContenderError("the raw transfer failed")
            return text.strip()

        receivers = [start(host, "receive", hosts.address(host)) for host in range(hosts.hosts)]
        ports = [line(receiver) for receiver in receivers]
        for host in range(hosts.hosts):
            to = (host + 1) % hosts.hosts
            start(host, "send", hosts.address(to), ports[to], str(seconds))
        return [float(line(receiver)) for receiver in receivers]


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the result for one rate. Raises ContenderError and ConfigurationError."""
    rate = RATES[name]
    settings = Settings(params=options.params or rate.params, workers=options.hosts, servers=options.hosts)
    with ExitStack() as stack:
        hosts = stack.enter_context(ShapedHosts(options.hosts, rate.bits_per_second))
        raw = transfer(hosts)
        print(f"{name}: raw TCP {min(raw) / 1e6:.0f} to {max(raw) / 1e6:.0f} Mbit/s", flush=True)
        wanted = [one for one in dict.fromkeys(options.contender) if one != "psdist"]
        result: dict[str, Any] = {}
        for begin in range(0, max(1, len(wanted)), options.at_once):
            part = _measure_part(settings, hosts, wanted[begin : begin + options.at_once], options)
            result = part if not result else result | {"peers": result["peers"] | part["peers"]}
    for shown in (result["psdist"], *result["peers"].values()):
        moved = max(shown["bytes_per_step"].values())
        shown["link_share"] = 8 * moved / rate.bits_per_second / (shown["ms"] / 1e3)
    result["transfer_bits_per_second"] = raw
    result["settings"] = asdict(settings)
    return result


def _measure_part(
    settings: Settings, hosts: ShapedHosts, peers: Sequence[str], options: argparse.Namespace
) -> dict[str, Any]:
    """Return the result of psdist and of as many peers as fit into this machine's memory."""
    with ExitStack() as stack:
        names = ("psdist", *peers)
        started = [stack.enter_context(Running(CONTENDERS[one](settings, hosts, one))) for one in names]
        for running in started:
            if running.name in VARIANTS:
                check_transports(running)
            running.turn(WARM_STEPS)
        counted = [Counted(running, hosts) for running in started]
        result = figures.result(interleave(counted, options.rounds, options.steps_per_round))
        for one in counted:
            shown = result["psdist"] if one.name == "psdist" else result["peers"][one.name]
            shown["bytes_per_step"] = one.bytes_per_step()
            shown["processor_ms"] = one.processor_ms_per_step()
    return result


def table(result: Mapping[str, Any]) -> str:
    """Return the result for one rate as text."""
    lines = [f"{'':14}{'ms':>9}{'x psdist':>10}{'MB sent':>10}{'received':>10}{'of the link':>13}{'processor ms':>14}"]
    for name, one in {"psdist": result["psdist"] | {"ratio": 1.0}, **result["peers"]}.items():
        moved = one["bytes_per_step"]
        lines.append(
            f"{name:14}{one['ms']:>9.1f}{one['ratio']:>10.2f}{moved['sent'] / 1e6:>10.1f}"
            f"{moved['received'] / 1e6:>10.1f}{one['link_share']:>13.0%}{one['processor_ms']:>14.0f}"
        )
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    line = argparse.ArgumentParser(
        prog="python -m benchmarks.network",
        description="A step between hosts with shaped links, as root. Bytes are those of the busiest host, a step.",
    )
    line.add_argument("--rate", nargs="+", choices=list(RATES), default=list(RATES), help="default: all")
    line.add_argument("--hosts", type=int, default=4, help="each has one worker and one server (default: %(default)s)")
    line.add_argument("--params", type=int, help="default: so many that a step takes half a second or more")
    line.add_argument("--contender", nargs="*", choices=list(CONTENDERS), default=list(CONTENDERS), help="default: all")
    line.add_argument("--at-once", type=int, default=_AT_ONCE, metavar="COUNT",
                      help="so many contenders take turns with psdist; then come others (default: %(default)s). With "
                      "25 million parameters each takes about 3 GB of memory")  # fmt: skip
    line.add_argument("--rounds", type=int, default=5, help="turns of each contender (default: %(default)s)")
    line.add_argument("--steps-per-round", type=int, default=2, help="steps of one turn (default: %(default)s)")
    line.add_argument("--json", type=Path, metavar="FILE")
    return line


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, prints, and writes the file of ``--json``."""
    options = parser().parse_args(arguments)
    if reason := hosts_missing():
        raise SystemExit(f"benchmarks.network cannot run here: {reason}")
    # Lets the blocks below exit.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    results = {}
    for name in options.rate:
        try:
            results[name] = measure(name, options)
        except (ContenderError, ConfigurationError) as error:
            raise SystemExit(str(error)) from None
        print(table(results[name]), flush=True)
    if options.json:
        options.json.write_text(json.dumps({"rates": results, "machine": machine.facts()}, indent=1) + "\n")


if __name__ == "__main__":
    main()

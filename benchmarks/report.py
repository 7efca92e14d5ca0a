"""All benchmarks, and the page of their results: ``python -m benchmarks.report`` (or ``make bench``).

Runs each benchmark of ``plan`` in a process of its own, keeps its result in ``.bench/results.json`` (so that ``--only``
can measure some of them again), and writes docs/performance.md from all results. The part of the page from the heading
``## Notes`` on is written by hand, and kept.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import latency, machine, plan
from benchmarks.contenders import PEER_VENVS, ROOT, compile_kernels

PAGE = ROOT / "docs/performance.md"
RESULTS = PEER_VENVS / "results.json"
NOTES = "## Notes"

Results = Mapping[str, Any]


def run(one: plan.Run, *, full: bool, install: bool) -> dict[str, Any]:
    """Return the result of a benchmark. Raises CalledProcessError."""
    with tempfile.TemporaryDirectory(prefix="psdist-bench-") as directory:
        path = Path(directory, "result.json")
        command = [*one.command(full), "--json", str(path)]
        if install and one.module == "benchmarks.step":
            command.append("--install-peers")
        print("$ python -m", shlex.join(one.command(full)), flush=True)
        subprocess.run([sys.executable, "-m", *command], cwd=ROOT, check=True)
        return dict(json.loads(path.read_text()))


# --- the page ---------------------------------------------------------------------------------------------------------


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([f"| {' | '.join(titles)} |", "|" + "---|" * len(titles), *lines])


def page(results: Results, facts: Mapping[str, Any], notes: str) -> str:
    """Return the whole text, without the parts that have no result."""
    parts = [_introduction(facts), _goals(results)]
    writers = (_steps, _network, _latency, _scaling, _steady, _kernels, _startup, _memory, _snapshot)
    parts += [text for write in writers if (text := write(results))]
    return "\n\n".join([*parts, *filter(None, [notes.strip()])]) + "\n"


def section(heading: str, text: str, *tables: str) -> str:
    """Return a heading, a paragraph that is broken into lines here, and what comes below it."""
    return "\n\n".join((heading, textwrap.fill(" ".join(text.split()), 124, break_on_hyphens=False), *tables))


def _introduction(facts: Mapping[str, Any]) -> str:
    copies = " and ".join(
        f"{speed:.0f} GB/s with {count} thread{'s' * (int(count) > 1)}"
        for count, speed in facts["copy_gigabytes_per_second"].items()
    )
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    measured = f"""
        Measured on one machine: {facts["processor"]}, {facts["cores"]} cores, {facts["memory_gigabytes"]} GB; memcpy
        moves {copies} (bytes read and written). {facts["system"]}; {versions}. Only the ratios within one run are
        comparable; the milliseconds depend on the machine."""
    again = """
        `make bench` measures everything in some minutes (as root also between hosts) and rewrites this page. `python -m
        benchmarks.report --full` measures longer; `--install-peers` installs Ray, TensorFlow and PyArrow below
        `.bench`."""
    return section("# Performance", measured, textwrap.fill(" ".join(again.split()), 124, break_on_hyphens=False))


def _goals(results: Results) -> str:
    rows = []
    for goal in plan.GOALS:
        try:
            measured = goal.judge(results[goal.run])
        except KeyError:
            rows.append((goal.case, goal.target, "not measured", "", f"`{goal.run}`"))
        else:
            met = "" if measured.met is None else "yes" if measured.met else "**no**"
            rows.append((goal.case, goal.target, measured.text, met, f"`{goal.run}`"))
    text = """
        25,000,000 float32 parameters and Adam, unless stated otherwise; medians, and in brackets the 10th and the 90th
        percentile of the rounds. All contenders of a line ran in turns, in processes of their own. `python -m
        benchmarks.report --only RUN` measures a line again, and prints its command."""
    return section("## Goals", text, table(("case", "goal", "measured", "met", "run"), rows))


def _steps(results: Results) -> str:
    rows = []
    for one in plan.RUNS:
        if one.module != "benchmarks.step" or one.name not in results:
            continue
        result = results[one.name]
        settings = result["settings"]
        what = (
            f"{settings['workers']} workers, {settings['transport']}, {settings['wire_dtype']}, "
            f"{settings['consistency']}{', plain calls' * settings['copy']}"
            f"{', 2 copies on 3 servers' * (settings.get('replicas', 1) > 1)}"
        )
        peers = [
            f"{name} {peer['ms']:.1f} ({peer['ratio']:.2f}x)" if "ms" in peer else f"{name}: {peer['missing']}"
            for name, peer in result["peers"].items()
        ]
        rows.append((what, f"{result['psdist_ms']:.1f}", "; ".join(peers)))
    text = """
        Milliseconds, and in brackets the ratio to psdist's. *gloo*: all-reduce, then torch's fused Adam on each worker.
        *ray*: two actors with fused Adam, which the workers call; *ray_dataflow*: the same, driven by Ray's scheduler.
        *tensorflow*: ParameterServerStrategy, asynchronous, two servers. *echo*: raw `grpc.aio` that sends the same
        bytes and gets them back, *echo_tuned* with psdist's options, *echo_tcp* by TCP alone, received into place,
        *flight* by `pyarrow.flight` (gRPC in C++). *unreplicated*: psdist with one copy of each shard; *tls*: with
        mutual TLS. *kernel*: the sum of all gradients and Adam in one pass over memory; *memcpy*: one gradient copied.
        *Plain calls* push the script's own arrays and get new ones; the others use gradient buffers, and read weights
        in place."""
    return section("## A step", text, table(("psdist", "ms", "peers"), rows)) if rows else ""


def _network(results: Results) -> str:
    if "network" not in results:
        return ""
    tables = []
    titles = ("what", "ms", "over psdist", "MB sent", "received", "link")
    for rate, result in results["network"]["rates"].items():
        rows = []
        for name, one in {"psdist": result["psdist"] | {"ratio": 1.0}, **result["peers"]}.items():
            moved = [f"{one['bytes_per_step'][way] / 1e6:.1f}" for way in ("sent", "received")]
            rows.append((name, f"{one['ms']:.0f}", f"{one['ratio']:.2f}x", *moved, f"{one['link_share']:.0%}"))
        tables.append(f"{rate}, {result['settings']['params'] / 1e6:g} M parameters:\n\n{table(titles, rows)}")
    text = """
        `python -m benchmarks.network`, as root: four hosts, each with a worker and a server, are network namespaces
        whose links `tc tbf` limits in both directions. A worker reaches the server of its own host through shared
        memory, and the others by TCP, or by gRPC. MB: of the busiest host's interface, for each step; *link*: their
        share of the link's rate. *ddp*: DistributedDataParallel over gloo, *ddp_fp16* with torch's hook. All hosts
        share this machine's cores, which are the limit at 10 Gbit/s."""
    return section("## Between hosts", text, *tables)


def _latency(results: Results) -> str:
    rows = []
    for name in ("latency-shm", "latency-tcp", "latency-grpc"):
        if name not in results:
            continue
        for contender, points in results[name]["milliseconds"].items():
            values = [f"{points[point]:.2f}" for point in ("p50", "p90", "p99", "p99.9")]
            transport = name.removeprefix("latency-") if contender.startswith("psdist") else ""
            rows.append((latency.TITLES[contender], transport, *values))
    text = "`python -m benchmarks.latency`: `push_pull` of 1,000 parameters, one worker, one server; milliseconds."
    titles = ("what", "transport", "p50", "p90", "p99", "p99.9")
    return section("## Latency", text, table(titles, rows)) if rows else ""


def _scaling(results: Results) -> str:
    if "scaling" not in results:
        return ""
    rows = []
    for workers, contenders in results["scaling"]["workers"].items():
        cells = []
        for name in ("psdist", "gloo"):
            one = contenders[name]
            shares = (one["efficiency"], one["relative_efficiency"], one["communication_share"])
            cells += [f"{one['step_ms']:.0f}", *(f"{share:.1%}" for share in shares)]
        rows.append((workers, *cells))
    kinds = ("step, ms", "efficiency", "relative", "communication")
    text = f"""
        `python -m benchmarks.scaling`: each worker computes for {results["scaling"]["settings"]["compute_ms"]:.0f} ms
        without using the CPU, and its gradient becomes ready layer by layer in the last two thirds of that time.
        Efficiency is compute time / step time; *relative* is the ratio to that of the fewest workers."""
    titles = ("workers", *(f"{who}: {kind}" for who in ("psdist", "gloo") for kind in kinds))
    return section("## Scaling", text, table(titles, rows))


def _steady(results: Results) -> str:
    if "steady" not in results:
        return ""
    result = results["steady"]
    keys = ("traced_growth_bytes", "traced_above_bytes", "resident_growth_bytes")
    rows = [
        (transport, one["role"], *(f"{one[key] / 1024:,.0f}" for key in keys))
        for transport, processes in result["processes"].items()
        for one in processes
    ]
    text = f"""
        `python -m benchmarks.steady`: {result["steps"]} steps of {result["params"]:,} parameters; KiB by process, over
        the second half of the steps. *A step's peak* is the most that Python had allocated, less the least."""
    titles = ("transport", "process", "tracemalloc growth", "a step's peak", "RSS growth")
    return section("## Memory over many steps", text, table(titles, rows))


def _kernels(results: Results) -> str:
    if "kernels" not in results:
        return ""
    rows = []
    for one in results["kernels"]["results"]:
        times = one["times_slower_than_psdist"]
        others = [f"{times[name]:.2f}" if name in times else "" for name in ("torch", "numpy", "reference")]
        own = one["milliseconds"]["psdist"]
        rows.append((one["optimizer"], f"{own:.1f}", f"{one['gigabytes_per_second']:.1f}", *others))
    text = f"""
        `python -m benchmarks.kernels`: one update of {results["kernels"]["elements"]:,} float32 parameters by one
        thread, in turns, medians. *numpy* is code as written by hand, *reference* the plain numpy whose bytes the
        kernel must equal, *torch* is fused if possible, else `foreach`."""
    titles = ("optimizer", "ms", "GB/s", "torch / psdist", "numpy / psdist", "reference / psdist")
    return section("## Update kernels", text, table(titles, rows))


def _startup(results: Results) -> str:
    if "startup" not in results:
        return ""
    one = results["startup"]
    text = f"""
        `python -m benchmarks.startup`: from `psdist run --nservers 2 --nproc-per-node 2 examples/digits.py` to the end
        of the first step, with compiled kernels in the cache: median {one["median_s"]:.2f} s, worst
        {one["worst_s"]:.2f} s of {len(one["all_s"])}. The first run on a machine compiles beside its first steps."""
    return section("## Start", text)


def _memory(results: Results) -> str:
    if "memory" not in results:
        return ""
    one = results["memory"]
    keys = ("idle_bytes", "peak_bytes", "private_bytes", "shared_bytes")
    rows = [(name, *(f"{one[name][key] / 1e6:.0f}" for key in keys)) for name in ("shm", "grpc")]
    text = f"""
        `python -m benchmarks.memory`: {one["params"]:,} parameters with Adam, one worker, one server; MB. Weights and
        state alone are {12 * one["params"] / 1e6:.0f}. *Shared* are pages that the worker maps too."""
    titles = ("transport", "before the parameters", "peak", "private", "shared")
    return section("## Memory of a server", text, table(titles, rows))


def _snapshot(results: Results) -> str:
    if "snapshot" not in results:
        return ""
    one = results["snapshot"]
    rows = [
        (title, *(f"{one['steps_ms'][name][point]:.1f}" for point in ("p50", "p90", "p99")))
        for name, title in (("normal", "without a snapshot"), ("during", "while one is taken"))
    ]
    rates = "; ".join(
        f"while the worker is {name} {both['written']:.0f} MB/s, plain files {both['plain']:.0f} MB/s"
        for name, both in one["megabytes_per_second"].items()
    )
    text = f"""
        `python -m benchmarks.snapshot`: {one["settings"]["params"]:,} parameters with Adam, one worker that makes
        steps without a pause; milliseconds of a step. {one["snapshot_megabytes"]:.0f} MB are written and synced,
        beside one process that does the same with plain files: {rates}."""
    return section("## Snapshots", text, table(("steps", "p50", "p90", "p99"), rows))


def notes_of(text: str) -> str:
    """Return the part of a page that is written by hand."""
    return text[text.index(NOTES) :] if NOTES in text else ""


# --- the command ------------------------------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    names = [one.name for one in plan.RUNS]
    line = argparse.ArgumentParser(prog="python -m benchmarks.report", description="All benchmarks, and their page.")
    line.add_argument("--full", action="store_true", help="measure longer")
    line.add_argument(
        "--only", nargs="*", choices=names, metavar="RUN", help=f"measure these again: {', '.join(names)}"
    )
    line.add_argument(
        "--install-peers", action="store_true", help="install ray, tensorflow and pyarrow, each in its own place"
    )
    line.add_argument("--page", type=Path, default=PAGE, metavar="FILE")
    line.add_argument("--results", type=Path, default=RESULTS, metavar="FILE")
    return line


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and writes."""
    options = parser().parse_args(arguments)
    stored = json.loads(options.results.read_text()) if options.results.exists() else {"runs": {}}
    stored["machine"] = machine.facts()
    options.results.parent.mkdir(exist_ok=True)
    failed = []
    compile_kernels()
    for one in plan.RUNS:
        if options.only is None or one.name in options.only:
            if reason := one.missing():
                print(f"{one.name} is left out: {reason}", flush=True)
                continue
            try:
                stored["runs"][one.name] = run(one, full=options.full, install=options.install_peers)
            except subprocess.CalledProcessError:
                failed.append(one.name)
                continue
            options.results.write_text(json.dumps(stored, indent=1) + "\n")
    text = options.page.read_text(encoding="utf-8") if options.page.exists() else ""
    options.page.write_text(page(stored["runs"], stored["machine"], notes_of(text)), encoding="utf-8")
    if failed:
        raise SystemExit(f"failed, so the page has their last figures or none: {', '.join(failed)}")


if __name__ == "__main__":
    main()

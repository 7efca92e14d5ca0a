"""Benefit of a CUDA device for psdist: ``python -m benchmarks.gpu --out gpu.json``, on a machine that has one.

It runs the cases of ``CASES``, each with its target, and prints one table. The tests marked ``gpu`` check bytes; the
cases here that compare results report differences, and the others assert nothing.

* ``copy``: bytes that a copy within the device reads and writes each second, the best of some sizes of launches, and of
the driver's own copy. ``update``: the same for one fused update by one float32 contribution on the device, for each
optimizer; Adam's target is a share of ``copy``. ``torch``: torch's fused Adam on equally many parameters, if torch has
CUDA.
* ``server``: updates as a server makes them, from contributions on the host to weights on the host, on some threads.
* ``memory``: a server's device memory for these parameters with Adam.
* ``exact``: 100 steps of each optimizer compared with the processor's, on contributions of all types.
* ``codecs``: bytes of float32 that each codec encodes each second, beside its target (``gpu_codecs``).
* ``run``: BSP with two workers and two servers on one device, from end to end, beside servers without a device.

Times cover several launches between two waits, and are medians of some rounds. A failed case becomes a row, too, and
the others are still measured. The file is rewritten after each case.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import gpu_codecs, gpu_runs, gpu_updates
from psdist.device.device import Device, open_device
from psdist.errors import PsdistError

#: Cases in their order, with their functions.
CASES: dict[str, Callable[[Device, argparse.Namespace], Iterable[dict[str, Any]]]] = {
    "copy": gpu_updates.copy_bandwidth,
    "update": gpu_updates.update_bandwidth,
    "torch": gpu_updates.torch_adam,
    "server": gpu_updates.server_updates,
    "memory": gpu_updates.memory,
    "exact": gpu_updates.exactness,
    "codecs": gpu_codecs.encoding_speed,
    "run": gpu_runs.whole_runs,
}
#: Adam's target, as a share of the copy's bandwidth.
ADAM_SHARE = 0.8
#: Device memory per parameter with Adam, and the fixed part.
ADAM_BYTES, BESIDE_BYTES = 12, 200_000_000
RELATIVE = 1e-6
#: Name of a row that reports a failed case.
FAILED = "failed"


def judged(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the table's lines: each target, the measured value, and True if it is met; None if it was not measured."""
    by_case: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_case.setdefault(row["case"], []).append(row)
    copies = [row["bytes_per_second"] for row in by_case.get("copy", ())]
    adam = next((row for row in by_case.get("update", ()) if row["what"] == "adam"), None)
    (torch,) = by_case.get("torch") or [{}]
    lines = []
    if adam is not None and copies:
        share = adam["bytes_per_second"] / max(copies)
        lines.append(_line("fused Adam", f"at least {ADAM_SHARE:.0%} of a copy", f"{share:.1%}", share >= ADAM_SHARE))
    if adam is not None and torch.get("seconds"):
        ratio = adam["seconds"] / torch["seconds"]
        lines.append(_line("fused Adam", "no slower than torch's", f"{ratio:.2f} of its time", ratio <= 1))
    elif torch:
        lines.append(_line("fused Adam", "no slower than torch's", torch["note"], None))
    for row in by_case.get("codecs", ()):
        if row["target"] is not None:
            target, measured = (f"{row[name] / 1e9:,.0f} GB/s" for name in ("target", "kernels"))
            lines.append(_line(f"{row['what']} encodes", target, measured, row["kernels"] >= row["target"]))
    for row in by_case.get("exact", ()):
        measured = "the same bytes" if row["identical"] else f"{row['relative']:.1e} apart"
        is_near = row["relative"] <= RELATIVE
        lines.append(_line(f"100 steps of {row['what']}", f"{RELATIVE:g} relative", measured, is_near))
    for row in by_case.get("run", ()):
        if row["what"] == "difference":
            measured = f"{row['relative']:.1e} apart; {row['step_ratio']:.2f} of the step time without a device"
            is_near = row["relative"] <= RELATIVE
            lines.append(_line("BSP, 2 servers, 2 workers", f"{RELATIVE:g} relative", measured, is_near))
    for row in by_case.get(FAILED, ()):
        lines.append(_line(f"case {row['what']}", "is measured", row["error"].partition("\n")[0][:54], False))
    for row in by_case.get("memory", ()):
        most = ADAM_BYTES * row["elements"] + BESIDE_BYTES
        lines.append(_line("memory with Adam", f"at most {most:,} bytes", f"{row['bytes']:,}", row["bytes"] <= most))
    return lines


def _line(case: str, target: str, measured: str, met: bool | None) -> dict[str, Any]:
    return {"case": case, "target": target, "measured": measured, "met": met}


def measure(device: Device, options: argparse.Namespace) -> dict[str, Any]:
    """Measure the chosen cases. Print each row when it is ready, and write the file after each case."""
    rows: list[dict[str, Any]] = []
    results: dict[str, Any] = {}
    for case in options.cases:
        try:
            for row in CASES[case](device, options):
                _add(rows, {"case": case, **row})
        except Exception as error:  # Any error: time on a device is rare, and the other cases are worth it.
            _add(rows, {"case": FAILED, "what": case, "error": f"{type(error).__name__}: {error}"})
        results = {"device": device.name, "elements": options.elements, "rows": rows, "targets": judged(rows)}
        if options.out:
            options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return results


def _add(rows: list[dict[str, Any]], row: dict[str, Any]) -> None:
    rows.append(row)
    print("  ".join(f"{name}={_shown(value)}" for name, value in row.items()), flush=True)


def _shown(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    made = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description="Benefit of a CUDA device for psdist.")
    made.add_argument("--device", default="cuda", help="cuda or cuda:N (default: %(default)s)")
    made.add_argument("--elements", type=int, default=100_000_000, help="float32 parameters (default: %(default)s)")
    made.add_argument("--rounds", type=int, default=7, help="rounds of each measurement (default: %(default)s)")
    made.add_argument("--times", type=int, default=10, help="launches in a round (default: %(default)s)")
    made.add_argument("--threads", type=int, default=4, help="kernel threads of a server (default: %(default)s)")
    made.add_argument("--steps", type=int, default=30, help="steps of the whole runs (default: %(default)s)")
    made.add_argument("--run-elements", type=int, default=25_000_000, help="parameters there (default: %(default)s)")
    made.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="CASE", help=", ".join(CASES))
    made.add_argument("--out", type=Path, metavar="FILE", help="write the results as JSON there")
    return made


def main(arguments: Sequence[str] | None = None, opened: Callable[[str], Device] = open_device) -> int:
    """Measure and print the table. The exit status is 1 if a target is missed or a case failed, 2 without a device.

    opened: opens the device.
    """
    options = parser().parse_args(arguments)
    try:
        device = opened(options.device)
    except PsdistError as error:
        print(f"python -m benchmarks.gpu: {error}", file=sys.stderr)
        return 2
    results = measure(device, options)
    print(f"\n{device.name}, {options.elements:,} parameters")
    for line in results["targets"]:
        verdict = {True: "yes", False: "NO", None: "not measured"}[line["met"]]
        print(f"  {line['case']:32}{line['target']:32}{line['measured']:56}{verdict}")
    return int(any(line["met"] is False for line in results["targets"]))


if __name__ == "__main__":
    sys.exit(main())

"""Snapshots as JSON, from commit records and manifests, and as tables for people, from that."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.table import Table
from rich.text import Text

from psdist.cli.status_table import SNAPSHOT_COLUMNS, make_console, make_table, moment, snapshot_row, steps
from psdist.consistency import kind_of
from psdist.launcher.final_snapshot import size
from psdist.launcher.local import plural
from psdist.monitoring.json_form import values
from psdist.snapshots.format import CommitRecord, ParametersState
from psdist.snapshots.reader import CommittedSnapshot, Unreadable

_SHOWN_TENSORS = 40


# --- the JSON forms ---------------------------------------------------------------------------------------------------


def record(one: CommitRecord | Unreadable) -> dict[str, Any]:
    """Return a commit record. ``error`` says why it cannot be used, and is empty if it can. Times are in seconds, sizes
    in bytes."""
    if isinstance(one, Unreadable):
        return {"sequence": one.sequence, "path": one.path, "error": one.error.message}
    names = ("bytes", "time", "seconds", "reason", "epoch", "manifest_digest")
    return {
        **values(one, "sequence", "path"),
        "error": "",
        **values(one, "directory", "run_id"),
        "steps": dict(one.steps),
        **values(one, *names),
    }


def described(found: CommittedSnapshot) -> dict[str, Any]:
    """Return a snapshot and its content."""
    manifest = found.manifest
    return record(found.commit) | {
        **values(manifest, "psdist_version", "format"),
        "configuration": dict(manifest.configuration),
        "parameters": [_parameters(state) for state in manifest.parameters],
        "datasets": [
            {**values(state.spec, "name", "size"), "position": asdict(state.position)} for state in manifest.datasets
        ],
        "worker_states": [values(state, "parameters", "rank", "file") for state in manifest.states],
    }


def _parameters(state: ParametersState) -> dict[str, Any]:
    return {
        "name": state.spec.name,
        "step": state.step,
        "elements": state.layout.starts[-1],
        "consistency": kind_of(state.spec.consistency),
        "optimizer": state.spec.optimizer.kind,
        "state_arrays": list(state.state_names),
        "state_since": state.state_since,
        "slices": state.slicing.count,
        "reference_workers": state.reference_workers,
        "tensors": [
            {"name": tensor.name, "shape": list(tensor.shape), "dtype": tensor.dtype} for tensor in state.layout.tensors
        ],
        "files": [{"name": shard.file, "bytes": shard.length, "xxh3_128": shard.digest} for shard in state.shards],
    }


# --- tables -----------------------------------------------------------------------------------------------------------


def show_list(records: list[dict[str, Any]]) -> None:
    """Print the list of snapshots."""

    def row(one: dict[str, Any]) -> list[str | Text]:
        if one["error"]:
            return [str(one["sequence"]), one["path"], "", "", "", "", Text(one["error"], style="red")]
        return [str(one["sequence"]), *snapshot_row(one)]

    make_console().print(make_table(("number", *SNAPSHOT_COLUMNS), map(row, records)))


def show_one(one: dict[str, Any]) -> None:
    """Print a snapshot with its content."""
    console = make_console()
    console.print(Text(f"{one['directory']}: run {one['run_id']}, step {steps(one['steps'])}", style="bold"))
    taken = f"taken {moment(one['time'])} ({one['reason']}) in {one['seconds']:.1f} s, {size(one['bytes'])}"
    console.print(Text(f"number {one['sequence']}, {taken}, psdist {one['psdist_version']}, format {one['format']}"))
    # 0 workers: none are left when the last snapshot of a run is taken.
    settings = [f"{name} {value}" for name, value in sorted(one["configuration"].items()) if str(value) != "0"]
    if settings:
        console.print(Text(", ".join(settings)))
    for parameters in one["parameters"]:
        console.print(Text(f"\n{_headline(parameters)}", style="bold"))
        console.print(_tensors(parameters["tensors"]))
    if states := one["worker_states"]:
        ranks = ", ".join(f"rank {state['rank']} of {state['parameters']}" for state in states)
        console.print(Text(f"\nhanded in by workers: {ranks}"))
    if one["datasets"]:
        console.print(_datasets(one["datasets"]))


def show_verified(report: dict[str, Any]) -> None:
    """Print the result for each snapshot that was verified."""
    console = make_console()
    for one in report["snapshots"]:
        if one["ok"]:
            console.print(Text(f"{one['name']}: good, {size(one['bytes'])}"))
        else:
            console.print(Text(f"{one['name']}: bad: {one['error']}", style="red"))


def show_exported(report: dict[str, Any]) -> None:
    """Print the files that were written."""
    console = make_console()
    for file in report["files"]:
        console.print(Text(file))
    what = f"{report['tensors']} tensors, {size(report['bytes'])}"
    console.print(Text(f"{what}, of step {steps(report['steps'])} ({report['snapshot']})"))
    if report["overflowed"]:
        lost = f"warning: {report['overflowed']:,} elements are too large for the dtype and became infinite"
        console.print(Text(lost, style="yellow"))
    for sentence in report["left_out"]:
        console.print(Text(f"warning: {sentence}", style="yellow"))


def show_deleted(report: dict[str, Any]) -> None:
    """Print the snapshots that were deleted."""
    for name in report["deleted"]:
        print(f"deleted {name}")
    if not report["deleted"]:
        print("nothing to delete")


def _headline(one: dict[str, Any]) -> str:
    arrays = f" ({', '.join(one['state_arrays'])})" if one["state_arrays"] else ""
    return (
        f"{one['name']}: step {one['step']}, {one['elements']:,} elements, {one['optimizer']}{arrays}, "
        f"{one['consistency']}, {plural(len(one['files']), 'file')}"
    )


def _tensors(tensors: list[dict[str, Any]]) -> Table:
    rows = [
        [tensor["name"], tensor["dtype"], "x".join(map(str, tensor["shape"])) or "scalar"]
        for tensor in tensors[:_SHOWN_TENSORS]
    ]
    if more := tensors[_SHOWN_TENSORS:]:
        rows.append([f"and {len(more)} more", "", ""])
    return make_table(("tensor", "dtype", "shape"), rows)


def _datasets(datasets: list[dict[str, Any]]) -> Table:
    rows = [
        [
            one["name"],
            f"{one['size']:,}",
            str(one["position"]["data_epoch"]),
            str(sum(count for _, count in one["position"]["done"])),
        ]
        for one in datasets
    ]
    return make_table(("data set", "samples", "data epoch", "ranges done"), rows)

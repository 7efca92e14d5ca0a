"""``psdist snapshot``: takes a snapshot of a run, and lists, shows, verifies, exports and deletes those in a storage.

Only ``save`` needs a run: the others read a directory or a URL. Results go to standard output, progress and warnings to
standard error. Exit status 1 means that something is corrupt, missing, or unreadable. The keys of the JSON forms are
stable, and tables for people are made from them.
"""

from __future__ import annotations

import asyncio
import re
import sys
from argparse import Namespace
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rich.text import Text

from psdist.cli.commands import Command, Group, Leaf, show
from psdist.cli.tables import SNAPSHOT_COLUMNS, moment, print_lines, snapshot_row, steps, table
from psdist.cli.target import ask, find_target, target_flags
from psdist.cli.terminal import bytes_bar, count_bar
from psdist.consistency import kind_of
from psdist.errors import ConfigurationError, InternalError, PsdistError, SnapshotCorruptError, UnknownSnapshotError
from psdist.launcher import scheduler_calls
from psdist.launcher.events import plural
from psdist.launcher.scheduler_calls import size
from psdist.monitoring.run_json import snapshot_info, values
from psdist.settings.config import storage_text
from psdist.settings.exit_codes import FAILURE, OK
from psdist.settings.flags import CommandLine, Flag, integer, named_file, one_of, text
from psdist.settings.programs import FORMAT_FLAG
from psdist.snapshots import format as layout
from psdist.snapshots import reader
from psdist.snapshots.format import CommitRecord, ParametersState
from psdist.snapshots.opening import open_storage
from psdist.snapshots.reader import CommittedSnapshot, Unreadable
from psdist.snapshots.storage import Storage

if TYPE_CHECKING:
    from psdist.v1.scheduler_pb2 import SaveSnapshotResponse

_PROGRAM: Final = "psdist snapshot"
_SUFFIXES: Final = {".npz": "npz", ".pt": "torch", ".pth": "torch", ".bin": "torch"}
_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?) ?([kmgt]?)(i?)b?", re.IGNORECASE)

# No variable sets the flags of commands on a storage.
_FORMAT: Final = replace(FORMAT_FLAG, twin=False)
_STEP: Final = Flag("--step", "the newest snapshot of this step", integer(0, 1 << 62), None, "N", twin=False)
_NAME: Final = Flag(
    "--snapshot", "the snapshot of this name or number, as list shows them", text, "", "NAME", twin=False
)


def file_size(value: str) -> int:
    """Return the bytes of ``5GB``, ``500 MiB`` or ``1000``."""
    found = _SIZE.fullmatch(value.strip())
    if found is None or (found[3] and not found[2]):
        raise ValueError(f"{value!r:.40} is not a size: write 5GB, 500MiB or a number of bytes")
    power = " kmgt".index(found[2].lower()) if found[2] else 0
    size = int(float(found[1]) * (1024 if found[3] else 1000) ** power)
    if size < 1:
        raise ValueError(f"{value!r:.40} is too small: it must be at least 1 byte")
    return size


# --- commands ---------------------------------------------------------------------------------------------------------


def _save(given: Namespace, environ: Mapping[str, str]) -> int:
    target = find_target(given, environ)
    with bytes_bar("saving") as bar:
        say = scheduler_calls.SaveProgress(lambda text: print(text, file=sys.stderr, flush=True))

        def on_answer(answer: SaveSnapshotResponse) -> None:
            bar(answer.bytes_done, answer.bytes)
            if not sys.stderr.isatty():
                say(answer)

        def save(call: Callable[..., Any]) -> Awaitable[SaveSnapshotResponse | None]:
            return scheduler_calls.save_snapshot(call, given.run_id, "on demand", on_answer)

        last = ask(target, given.timeout, save)
    if last is None or not last.HasField("committed"):
        raise InternalError("the scheduler ended the call before the snapshot was committed: try again")
    report = snapshot_info(last.committed) | {"unchanged": last.unchanged}
    show(given.format, report, lambda _: print(scheduler_calls.committed_text(last)))
    return OK


async def _list(given: Namespace) -> int:
    storage = _open(given)
    found = [record(one) for one in await reader.commits(storage)]
    if not found:
        raise _nothing(storage)
    show(given.format, found, show_list)
    return OK


async def _show(given: Namespace) -> int:
    found = await _choose(_open(given), given)
    show(given.format, described(found), show_one)
    return OK


async def _verify(given: Namespace) -> int:
    storage = _open(given)
    results = [result for one in await _records(storage, given) if (result := await _verify_one(storage, one))]
    report = {"storage": storage.url, "ok": all(one["ok"] for one in results), "snapshots": results}
    show(given.format, report, show_verified)
    return OK if report["ok"] else FAILURE


async def _verify_one(storage: Storage, one: Any) -> dict[str, Any] | None:
    """Return the result for one snapshot; None if the run deleted it meanwhile."""
    values = record(one)
    error = values["error"]
    if isinstance(one, Unreadable):
        return {"name": one.path, "ok": False, "error": error, "bytes": 0}
    try:
        with bytes_bar(f"verifying {one.directory}") as bar:
            await reader.verify(storage, await reader.load_manifest(storage, one), bar)
    except SnapshotCorruptError as problem:
        if not await reader.is_committed(storage, one):
            return None
        error = problem.message
    except PsdistError as problem:
        error = problem.message
    return {"name": one.directory, "ok": not error, "error": error, "bytes": one.bytes}


async def _export(given: Namespace) -> int:
    from psdist.snapshots.export import FILE_BYTES_MAX, ExportOptions, export

    if given.out is None:
        raise ConfigurationError("say where to write with --out FILE")
    options = ExportOptions(
        format=given.format or _SUFFIXES.get(given.out.suffix.lower(), "safetensors"),
        dtype=given.dtype,
        parameters=tuple(filter(None, given.parameters.split(","))),
        file_bytes_max=given.max_file_size or FILE_BYTES_MAX,
        overwrite=given.overwrite,
    )
    storage = _open(given)
    found = await _choose(storage, given)
    with bytes_bar("exporting") as bar:
        written = await export(storage, found.manifest, given.out, options, bar)
    report = {
        "snapshot": found.commit.directory,
        "steps": dict(found.commit.steps),
        "files": [str(file) for file in written.files],
        "tensors": written.tensors,
        "bytes": written.bytes,
        "overflowed": written.overflowed,
        "left_out": list(written.left_out),
    }
    show(given.report, report, show_exported)
    return OK


async def _delete(given: Namespace) -> int:
    if given.step is None and not given.snapshot and given.keep_last is None:
        raise ConfigurationError("say which with --step N, --snapshot NAME or --keep-last N")
    storage = _open(given)
    doomed = _beyond(await _records(storage, given), given.keep_last or 0)
    names = [one.path if isinstance(one, Unreadable) else one.directory for one in doomed]
    if doomed and not given.yes:
        _confirm(f"Delete {', '.join(names)} from {storage.url}?")
    with count_bar("deleting", "snapshots") as bar:
        for number, one in enumerate(doomed):
            bar(number, len(doomed), names[number])
            await storage.delete([one.path])
            if not isinstance(one, Unreadable):
                files = await storage.list(layout.directory_path(one.directory))
                await storage.delete(file.path for file in files)
    show(given.format, {"storage": storage.url, "deleted": names}, show_deleted)
    return OK


def _beyond(records: Sequence[Any], keep_last: int) -> Sequence[Any]:
    """Return those of ``records`` (the newest first) that are older than the newest ``keep_last`` readable ones."""
    readable = [at for at, record in enumerate(records) if not isinstance(record, Unreadable)]
    if keep_last > len(readable):
        return ()
    return records[readable[keep_last - 1] + 1 if keep_last else 0 :]


def _confirm(question: str) -> None:
    if not sys.stdin.isatty():
        raise ConfigurationError("standard input is not a terminal, so the deletion cannot be confirmed: add --yes")
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise SystemExit(FAILURE)


# --- finding ----------------------------------------------------------------------------------------------------------


def _open(given: Namespace) -> Storage:
    place = storage_text(given.words[0])
    if not place:
        raise ConfigurationError(f"{given.words[0]!r:.80} is not a storage: name a directory or a URL")
    return open_storage(place)


def _matches(given: Namespace, one: Any) -> bool:
    """Return True if the flags select a commit record, readable or not."""
    steps = getattr(one, "steps", {})
    name = getattr(one, "directory", "")
    if given.step is not None and given.step not in steps.values():
        return False
    return given.snapshot in ("", name, one.path, str(one.sequence))


async def _records(storage: Storage, given: Namespace) -> list[Any]:
    """Return the commit records that the flags select; of a step only the newest. Raises UnknownSnapshotError."""
    found = await reader.commits(storage)
    chosen = [one for one in found if _matches(given, one)]
    if not chosen:
        raise _nothing(storage, given, found)
    return chosen[:1] if given.step is not None else chosen


async def _choose(storage: Storage, given: Namespace) -> CommittedSnapshot:
    """Return the newest complete snapshot that the flags select. Newer incomplete ones are reported."""
    async for found in reader.usable(storage, where=lambda commit: _matches(given, commit)):
        for skipped in found.skipped:
            print(f"psdist: warning: skipped an unusable snapshot: {skipped}", file=sys.stderr, flush=True)
        return found
    raise _nothing(storage, given, await reader.commits(storage))


def _nothing(storage: Storage, given: Namespace | None = None, found: Sequence[Any] = ()) -> Exception:
    if given is not None and found:
        wanted = f"step {given.step}" if given.step is not None else given.snapshot
        steps = sorted({step for one in found for step in getattr(one, "steps", {}).values()})
        there = f"{len(found)} others, of the steps {', '.join(map(str, steps[-20:]))}"
        return UnknownSnapshotError(f"{storage.url} has no snapshot {wanted}; it has {there}")
    below = _runs_below(storage.url)
    hint = f"; below it are the runs {', '.join(below[:20])}" if below else ""
    return UnknownSnapshotError(f"{storage.url} has no snapshots{hint}")


def _runs_below(url: str) -> list[str]:
    """Return the names of directories in a local directory that have snapshots."""
    if "://" in url or not Path(url).is_dir():
        return []
    return sorted(path.parent.name for path in Path(url).glob("*/commits") if path.is_dir())


# --- the table of commands --------------------------------------------------------------------------------------------


def _offline(
    name: str,
    description: str,
    command: Callable[[Namespace], Coroutine[Any, Any, int]],
    *flags: Flag,
    epilog: str = " ",
) -> Leaf:
    """Return a command that needs a storage only."""
    line = CommandLine(f"{_PROGRAM} {name}", description, flags, words=("STORAGE",), epilog=epilog)
    return Leaf(lambda: line, lambda given, environ: asyncio.run(command(given)))


def _export_leaf() -> Leaf:
    from psdist.snapshots import export

    return _offline(
        "export",
        "Writes the weights of a snapshot for other programs: one file or, past a size, several with an index.",
        _export,
        Flag("--out", "the file to write", named_file, None, "FILE", twin=False),
        _STEP,
        _NAME,
        Flag("--format", f"{', '.join(export.FORMATS)} (default: by the name of the file, else safetensors)",
             one_of(*export.FORMATS), None, "FORMAT", twin=False),
        Flag("--dtype", f"dtype of floating-point tensors: {', '.join(export.DTYPES)} (default: each one's own)",
             one_of(*export.DTYPES), None, "DTYPE", twin=False),
        Flag("--parameters", "only these parameter sets, by name, separated by commas", text, "", "NAMES", twin=False),
        Flag("--max-file-size", "start another file past this size, such as 500MiB (default 5GB)", file_size, None,
             "SIZE", twin=False),
        Flag("--overwrite", "replace existing files", twin=False),
        replace(_FORMAT, name="--report"),
        epilog="Example: psdist snapshot export psdist-runs/digits --out model.safetensors --dtype bfloat16",
    )  # fmt: skip


SNAPSHOT: Final = Group(
    _PROGRAM,
    "Snapshots of a run. STORAGE is the --storage-path of psdist run: a directory or a URL (s3://, gs://, az://).",
    (
        Command("save", "take a snapshot of a training run now", lambda: Leaf(
            lambda: CommandLine(
                f"{_PROGRAM} save",
                "Takes a snapshot of a run and waits until it is committed. Training continues meanwhile.",
                target_flags(),
            ),
            _save,
        )),
        Command("list STORAGE", "list the committed snapshots, the newest first", lambda: _offline(
            "list", "Lists the committed snapshots, the newest first.", _list, _FORMAT,
        )),
        Command("show STORAGE", "show the content of one: parameters, tensors, data sets, settings", lambda: _offline(
            "show", "Shows the content of a snapshot.", _show, _STEP, _NAME, _FORMAT,
        )),
        Command("verify STORAGE", "read every byte of every snapshot", lambda: _offline(
            "verify",
            "Reads every byte of every snapshot, or of one, and compares it with the recorded digests. Exit status 1: "
            "a file, which is named, is corrupt or missing; or there is no snapshot.",
            _verify, _STEP, _NAME, _FORMAT,
        )),
        Command("export STORAGE", "weights as safetensors, npz or torch files: --out model.safetensors", _export_leaf),
        Command("delete STORAGE", "remove some: --step 100, --snapshot NAME or --keep-last 3", lambda: _offline(
            "delete",
            "Removes snapshots: its commit record first, then its files.",
            _delete, _STEP, _NAME,
            Flag("--keep-last", "all but this number of the newest", integer(0), None, "N", twin=False),
            Flag("--yes", "do not ask", twin=False),
            _FORMAT,
            epilog="Do not delete the newest snapshot of a training run: it may have to roll back to it.",
        )),
    ),
    "Each command has --help. Unless flags name a snapshot, show and export take the newest.",
)  # fmt: skip


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

    columns = ("number", *SNAPSHOT_COLUMNS)
    print_lines(table(columns, map(row, records)) or [Text("  ".join(columns), "bold")])


def show_one(one: dict[str, Any]) -> None:
    """Print a snapshot with its content."""
    lines = [Text(f"{one['directory']}: run {one['run_id']}, step {steps(one['steps'])}", "bold")]
    taken = f"taken {moment(one['time'])} ({one['reason']}) in {one['seconds']:.1f} s, {size(one['bytes'])}"
    lines.append(Text(f"number {one['sequence']}, {taken}, psdist {one['psdist_version']}, format {one['format']}"))
    # 0 workers: none are left when the last snapshot of a run is taken.
    settings = [f"{name} {value}" for name, value in sorted(one["configuration"].items()) if str(value) != "0"]
    if settings:
        lines.append(Text(", ".join(settings)))
    for parameters in one["parameters"]:
        lines += [Text(), Text(_headline(parameters), "bold"), *_tensors(parameters["tensors"])]
    if states := one["worker_states"]:
        ranks = ", ".join(f"rank {state['rank']} of {state['parameters']}" for state in states)
        lines += [Text(), Text(f"handed in by workers: {ranks}")]
    print_lines([*lines, *_datasets(one["datasets"])])


def show_verified(report: dict[str, Any]) -> None:
    """Print the result for each snapshot that was verified."""
    print_lines(
        Text(f"{one['name']}: good, {size(one['bytes'])}")
        if one["ok"]
        else Text(f"{one['name']}: bad: {one['error']}", "red")
        for one in report["snapshots"]
    )


def show_exported(report: dict[str, Any]) -> None:
    """Print the files that were written."""
    what = f"{report['tensors']} tensors, {size(report['bytes'])}"
    lines = [*map(Text, report["files"]), Text(f"{what}, of step {steps(report['steps'])} ({report['snapshot']})")]
    if report["overflowed"]:
        lost = f"warning: {report['overflowed']:,} elements are too large for the dtype and became infinite"
        lines.append(Text(lost, "yellow"))
    print_lines([*lines, *(Text(f"warning: {sentence}", "yellow") for sentence in report["left_out"])])


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


def _tensors(tensors: list[dict[str, Any]]) -> list[Text]:
    rows = [
        [tensor["name"], tensor["dtype"], "x".join(map(str, tensor["shape"])) or "scalar"]
        for tensor in tensors[:_SHOWN_TENSORS]
    ]
    if more := tensors[_SHOWN_TENSORS:]:
        rows.append([f"and {len(more)} more", "", ""])
    return table(("tensor", "dtype", "shape"), rows)


def _datasets(datasets: list[dict[str, Any]]) -> list[Text]:
    rows = [
        [
            one["name"],
            f"{one['size']:,}",
            str(one["position"]["data_epoch"]),
            str(sum(count for _, count in one["position"]["done"])),
        ]
        for one in datasets
    ]
    return table(("data set", "samples", "data epoch", "ranges done"), rows)

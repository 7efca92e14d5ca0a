"""``psdist report``: writes one HTML file about a run, live or finished.

A live run's scheduler is asked; the summary of a finished one is read from its storage.
"""

from __future__ import annotations

import asyncio
import io
import sys
from argparse import Namespace
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from psdist.cli.commands import written_whole
from psdist.cli.target import SchedulerChoice, ask, find_target, target_flags
from psdist.errors import ConfigurationError, PsdistError, SchedulerUnreachableError, StorageError
from psdist.launcher.local import STORAGE_DIRECTORY
from psdist.settings.config import storage_text
from psdist.settings.exit_codes import OK
from psdist.settings.flags import CommandLine, Flag, text

if TYPE_CHECKING:
    from psdist.monitoring.run_summary import Summary
    from psdist.snapshots.storage import Storage


def command_line() -> CommandLine:
    """Return the command line of ``psdist report``."""
    return CommandLine(
        "psdist report",
        "Writes one self-contained HTML file about a run, live or finished: configuration, curves, phases of each "
        "worker, faults, snapshots, environment. --format json writes the summary itself.",
        (
            Flag("--out", "file to write; - for standard output", text, "run.html", "FILE", twin=False),
            Flag(
                "--storage-path", "storage of a finished run: a directory or URL (default: the run that is live, else "
                f"{STORAGE_DIRECTORY}/RUN_ID of --run-id)", storage_text, "", "PATH",
            ),
            *target_flags(),
        ),
    )  # fmt: skip


def run(given: Namespace, environ: Mapping[str, str]) -> int:
    """Write the report; returns the exit status.

    Raises StorageError if no summary is found, SnapshotCorruptError if all are damaged, ConfigurationError.
    """
    from psdist.monitoring import dashboard, run_state, run_summary

    summary = _find(given, environ)
    is_json = given.format == "json"
    content = run_summary.to_bytes(summary) if is_json else dashboard.saved_page(run_state.saved_run(summary)).encode()
    if given.out == "-":
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(encoding="utf-8")  # In any locale, as the page says.
        sys.stdout.write(content.decode())
        return OK
    with written_whole(Path(given.out), ", or - for standard output") as file:
        file.write(content.decode())
    print(f"{given.out}: run {summary.run_id} ({summary.state}), {len(content) / 1000:.0f} kB")
    return OK


def _find(given: Namespace, environ: Mapping[str, str]) -> Summary:
    """Return the summary: of a live run, else of the newest file in the storage."""
    if given.storage_path:
        return asyncio.run(_read(given.storage_path, given.run_id))
    try:
        return _ask(find_target(given, environ), given.timeout)
    except SchedulerUnreachableError as error:
        default = Path(STORAGE_DIRECTORY, given.run_id).absolute() if given.run_id else None
        if default is not None and default.is_dir():
            return asyncio.run(_read(str(default), given.run_id))
        raise SchedulerUnreachableError(
            f"{error}. For a finished run pass --storage-path with its storage, or --run-id in the directory where it "
            "was started"
        ) from None


def _ask(target: SchedulerChoice, timeout_seconds: float) -> Summary:
    from psdist.monitoring import run_summary
    from psdist.v1 import scheduler_pb2 as pb

    async def talk(call: Callable[..., Awaitable[Any]]) -> bytes:
        data: bytes = (await call("GetSummary", pb.GetSummaryRequest(), timeout_seconds)).summary
        return data

    return run_summary.parse(ask(target, timeout_seconds, talk), f"the summary of {target.origin}")


async def _read(place: str, run_id: str) -> Summary:
    """Return the newest readable summary in a storage. Damaged ones are skipped if an older one is readable."""
    from psdist.monitoring import run_summary
    from psdist.snapshots.opening import open_storage

    storage: Storage = open_storage(place)
    found = await run_summary.runs(storage)
    if not found or run_id not in ("", *found):
        what = f"run {run_id!r}" if run_id else "a run"
        raise StorageError(
            f"{storage.url} has no summary of {what}{': it has ' + ', '.join(found) if found else ''}. Runs write it "
            "once a minute and at their end, if they have a storage and a worker has trained"
        )
    if not run_id and len(found) > 1:
        raise ConfigurationError(f"{storage.url} has summaries of several runs: choose one of {', '.join(found)} by "
                                 "--run-id")  # fmt: skip
    failure: PsdistError | None = None
    for _, path in await run_summary.paths(storage, run_id or found[0]):
        try:
            return await run_summary.read(storage, path)
        except PsdistError as error:
            failure = failure or error
    raise failure or StorageError(f"{storage.url} lost its summary while it was read: try again")

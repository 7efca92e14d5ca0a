"""Whom a command asks: a run's scheduler, found by flags, by the environment, or among the runs on this machine."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from psdist.errors import InvalidArgumentError, PsdistError, SchedulerUnreachableError
from psdist.launch.run_record import RunRecord, RunRegistry, notes_directory
from psdist.settings.config import address_text, check_run_id, find_scheduler, find_token, read_address
from psdist.settings.exit_codes import FAILURE, UNAVAILABLE, USAGE
from psdist.settings.flags import Flag, fail, one_of, seconds

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SchedulerChoice:
    """Whom to ask. ``origin`` says how it was found, for messages."""

    address: str
    token: str
    origin: str


def target_flags() -> tuple[Flag, ...]:
    """Flags of every command that asks a scheduler."""
    return (
        Flag("--scheduler", "the scheduler", address_text, "", "HOST:PORT"),
        Flag("--run-id", "which of the runs on this machine", check_run_id, "", "NAME"),
        Flag("--token-file", "file with the run's token (or set PSDIST_TOKEN)", Path, None, "FILE", twin=False),
        Flag("--format", "table or json", one_of("table", "json"), "table", "FORMAT"),
        Flag("--timeout", "longest wait for an answer", seconds(0.01), 5.0, "SECONDS"),
    )


def find_target(scheduler: str, run_id: str, token_file: Path | None, environ: Mapping[str, str]) -> SchedulerChoice:
    """The scheduler to ask. Raises InvalidArgumentError, or SchedulerUnreachableError where there is no run."""
    address = scheduler or find_scheduler(environ)
    if not address and environ.get("PSDIST_SCHEDULER_FILE") and not run_id:
        address = read_address(Path(environ["PSDIST_SCHEDULER_FILE"]))
    if address:
        return SchedulerChoice(address, find_token(environ, token_file=token_file), "--scheduler or PSDIST_SCHEDULER")
    note = _choose(RunRegistry(notes_directory(environ)).live(), run_id)
    token = find_token({"PSDIST_TOKEN_FILE": note.token_file}, token_file=token_file)
    return SchedulerChoice(note.address, token, f"run {note.run_id} on this machine, pid {note.pid}")


def _choose(notes: list[RunRecord], run_id: str) -> RunRecord:
    names = ", ".join(note.run_id for note in notes)
    matching = [note for note in notes if run_id in ("", note.run_id)]
    if not matching:
        what = f"no run named {run_id} is" if run_id else "no run is"
        others = f"; there are {names}" if names else ""
        raise SchedulerUnreachableError(f"{what} running on this machine{others}: pass --scheduler HOST:PORT")
    if len(matching) > 1:
        raise InvalidArgumentError(f"several runs are running on this machine: choose one of {names} by --run-id")
    if not matching[0].address:
        raise SchedulerUnreachableError(f"the scheduler of run {matching[0].run_id} is not up yet: try again")
    return matching[0]


def ask(target: SchedulerChoice, timeout_seconds: float, talk: Callable[[Any, Any], Awaitable[T]]) -> T:
    """What ``talk(stub, metadata)`` returns. Raises SchedulerUnreachableError, which says what was tried, and what the
    scheduler answers."""
    import asyncio

    return asyncio.run(_ask(target, timeout_seconds, talk))


async def _ask(target: SchedulerChoice, timeout_seconds: float, talk: Callable[[Any, Any], Awaitable[T]]) -> T:
    import grpc

    from psdist.v1 import scheduler_pb2_grpc
    from psdist.wire import auth, limits, status
    from psdist.wire.channels import open_channel

    unreachable = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
    async with open_channel(target.address, limits.CONTROL_MESSAGE_BYTES) as channel:
        try:
            return await talk(scheduler_pb2_grpc.SchedulerServiceStub(channel), auth.metadata(target.token))
        except grpc.aio.AioRpcError as error:
            if error.code() in unreachable:
                raise SchedulerUnreachableError(
                    f"no scheduler answers at {target.address} ({target.origin}; tried for {timeout_seconds:g} s): "
                    f"{error.details()}"
                ) from None
            raise status.from_call(error, f"scheduler {target.address}") from None


def or_fail(program: str, command: Callable[[], T]) -> T:
    """What ``command`` returns; its errors end the program with a message and the status that they have."""
    try:
        return command()
    except SchedulerUnreachableError as error:
        fail(program, str(error), UNAVAILABLE)
    except InvalidArgumentError as error:
        fail(program, str(error), USAGE)
    except PsdistError as error:
        fail(program, str(error), FAILURE)

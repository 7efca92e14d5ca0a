"""The scheduler that a command talks to: named by flags or the environment, or found among the runs on this machine."""

from __future__ import annotations

import os
import sys
import threading
from argparse import Namespace
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from psdist.errors import InvalidArgumentError, PsdistError, SchedulerUnreachableError
from psdist.launcher.run_record import RunRecord, RunRegistry, records_directory
from psdist.monitoring.dashboard import KEY_FILE, read_key, view_key
from psdist.security.tls import Credentials
from psdist.settings import exit_codes
from psdist.settings.config import find_scheduler, find_token, given_credentials, read_address
from psdist.settings.flags import Flag, seconds
from psdist.settings.programs import CREDENTIAL_FLAGS, FORMAT_FLAG, SCHEDULER_FLAG, run_id_flag

if TYPE_CHECKING:
    import grpc

T = TypeVar("T")

_TLS_NAMES: Final = frozenset({"tls_ca", "tls_cert", "tls_key"})
#: Time for a command to close its connection and print the reason after its time limit.
_CLOSING_SECONDS: Final = 0.5


@dataclass(frozen=True, slots=True)
class SchedulerChoice:
    """A scheduler, and the credentials for it. ``origin`` says in messages how it was found. dashboard_key: opens the
    dashboard of a run of this user on this machine; empty if it is not known."""

    address: str
    credentials: Credentials
    origin: str
    dashboard_key: str = ""


def target_flags() -> tuple[Flag, ...]:
    """Return the flags of every command that talks to a scheduler."""
    return (
        SCHEDULER_FLAG,
        run_id_flag("name of the run on this machine"),
        *CREDENTIAL_FLAGS,
        FORMAT_FLAG,
        Flag("--timeout", "longest wait for an answer", seconds(0.01), 5.0, "SECONDS"),
    )


def find_target(given: Namespace, environ: Mapping[str, str]) -> SchedulerChoice:
    """Return the scheduler that the parsed ``target_flags`` name. Raises InvalidArgumentError if several are possible,
    SchedulerUnreachableError if there is none."""
    run_id = given.run_id
    address = given.scheduler or find_scheduler(environ)
    if not address and environ.get("PSDIST_SCHEDULER_FILE") and not run_id:
        address = read_address(Path(environ["PSDIST_SCHEDULER_FILE"]))
    if address:
        return SchedulerChoice(address, given_credentials(given, environ), "--scheduler or PSDIST_SCHEDULER")
    record = choose_run(run_id, environ)
    if not record.address:
        raise SchedulerUnreachableError(f"the scheduler of run {record.run_id} is not up yet: try again")
    # Runs of 'psdist run' use no TLS, even if the environment names files of another run.
    if ignored := sorted(_TLS_NAMES & given.explicit):
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in ignored)
        raise InvalidArgumentError(
            f"run {record.run_id} on this machine uses no TLS, so {flags} would have no effect: leave it out, or name "
            "the scheduler of another run by --scheduler HOST:PORT"
        )
    token = find_token({"PSDIST_TOKEN_FILE": record.token_file}, token_file=given.token_file)
    file = Path(record.directory, KEY_FILE)
    key = read_key(file) if file.is_symlink() else "" if given.token_file else view_key(token, record.run_id)
    origin = f"run {record.run_id} on this machine, pid {record.pid}"
    return SchedulerChoice(record.address, Credentials(token), origin, key)


def choose_run(run_id: str, environ: Mapping[str, str]) -> RunRecord:
    """Return the run of this name on this machine; the only one if the name is empty. Raises SchedulerUnreachableError
    if there is none, InvalidArgumentError if there are several."""
    records = RunRegistry(records_directory(environ)).live()
    names = ", ".join(record.run_id for record in records)
    matching = [record for record in records if run_id in ("", record.run_id)]
    if not matching:
        what = f"no run named {run_id} is" if run_id else "no run is"
        remedy = f"choose one of {names} by --run-id, or pass" if names else "start one by psdist run, or pass"
        raise SchedulerUnreachableError(f"{what} running on this machine: {remedy} --scheduler HOST:PORT")
    if len(matching) > 1:
        raise InvalidArgumentError(f"several runs are running on this machine: choose one of {names} by --run-id")
    return matching[0]


@contextmanager
def time_limit(target: SchedulerChoice, timeout_seconds: float) -> Iterator[None]:
    """End the program with exit status 69 if the block takes longer than ``timeout_seconds``, for any reason: on
    a busy machine that may be the import of grpc, or a connection that does not close."""
    text = (
        f"psdist: error: no answer of the scheduler at {target.address} within {timeout_seconds:g} s (--timeout), "
        "connecting included: it may be frozen or cut off, or this machine busy. Pass a longer --timeout"
    )

    def give_up() -> None:
        with suppress(OSError):
            os.write(sys.stderr.fileno(), f"{text}\n".encode())
        os._exit(exit_codes.UNAVAILABLE)

    # If there is time, the call's own limit fires first; its message says more.
    timer = threading.Timer(timeout_seconds + _CLOSING_SECONDS, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def ask(target: SchedulerChoice, timeout_seconds: float, talk: Callable[[Callable[..., Any]], Awaitable[T]]) -> T:
    """Return the result of ``talk``, which gets ``call`` of ``scheduler_at``. Raises the scheduler's error, or
    SchedulerUnreachableError, which says what was tried."""
    import asyncio

    return asyncio.run(ask_on_loop(target, timeout_seconds, talk))


async def ask_on_loop(
    target: SchedulerChoice, timeout_seconds: float, talk: Callable[[Callable[..., Any]], Awaitable[T]]
) -> T:
    """Do the same as ``ask`` on a running loop."""
    import grpc

    from psdist.security.tls import raise_cause
    from psdist.wire.scheduler_connection import scheduler_at

    try:
        async with scheduler_at(target.address, target.credentials) as call:
            return await talk(call)
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.UNAVAILABLE:
            await raise_cause(target.address, target.credentials)
        raise _failure(target, timeout_seconds, error) from None


def _failure(target: SchedulerChoice, timeout_seconds: float, error: grpc.aio.AioRpcError) -> PsdistError:
    """Return the error of a failed call: SchedulerUnreachableError, which says what was tried, or the scheduler's."""
    import grpc

    from psdist.wire import status

    if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        return SchedulerUnreachableError(
            f"no scheduler answers at {target.address} ({target.origin}; tried for {timeout_seconds:g} s): "
            f"{error.details()}"
        )
    return status.from_call(error, f"scheduler {target.address}")


def status_and_samples(timeout_seconds: float, after: int = 0) -> Callable[[Callable[..., Any]], Awaitable[Any]]:
    """Return a talk that has the status of a run, and its samples after a number."""

    async def talk(call: Callable[..., Awaitable[Any]]) -> tuple[Any, Any]:
        from psdist.v1 import scheduler_pb2 as pb

        status = await call("GetStatus", pb.GetStatusRequest(), timeout_seconds)
        return status, (await call("GetSamples", pb.GetSamplesRequest(after=after), timeout_seconds)).samples

    return talk

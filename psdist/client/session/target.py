"""The scheduler that a client connects to, and the client's identity: from arguments, the environment, or a file that
is waited for."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Final, Literal

from psdist.client.session.registration import SchedulerTarget
from psdist.errors import ConfigurationError, InvalidArgumentError, SchedulerUnreachableError
from psdist.security.tls import TlsFiles
from psdist.settings.config import ClientSettings, TransportName, client_settings, read_address
from psdist.types import check_name

_POLL_SECONDS: Final = 0.02


async def find_target(
    scheduler: str | None,
    token: str | None,
    tls: TlsFiles | Literal[False] | None,
    run_id: str | None,
    worker_id: str | None,
    rank: int | None,
    transport: TransportName | None,
    timeout: float,
) -> tuple[SchedulerTarget, ClientSettings]:
    """Return the scheduler's address with the identity, and the other settings. Arguments are those of ``AsyncClient``.

    timeout: seconds for which to wait for the file.

    Raises InvalidArgumentError, InvalidNameError, ConfigurationError, SchedulerUnreachableError.
    """
    if rank is not None and (isinstance(rank, bool) or not isinstance(rank, int) or rank < 0):
        raise InvalidArgumentError(f"rank={rank!r} is out of range: use a whole number of 0 or more")
    if worker_id is not None:
        check_name(worker_id, "worker_id")
    # The file is waited for here, where the wait can be cancelled, not by client_settings.
    environ = {name: value for name, value in os.environ.items() if name != "PSDIST_SCHEDULER_FILE"}
    settings = client_settings(environ, scheduler=scheduler, token=token, tls=tls, run_id=run_id, transport=transport)
    address, source = settings.scheduler, "the argument" if scheduler else "PSDIST_SCHEDULER"
    if not address and (file := os.environ.get("PSDIST_SCHEDULER_FILE")):
        address, source = await _await_address(Path(file), timeout), f"the file {file} of PSDIST_SCHEDULER_FILE"
    if not address:
        raise ConfigurationError(
            "no scheduler is named: run the script with 'psdist run script.py', or set PSDIST_SCHEDULER=HOST:PORT, "
            "or pass psdist.Client('HOST:PORT'); psdist.init() starts a cluster of its own where there is none"
        )
    target = SchedulerTarget(
        address,
        source,
        settings.credentials,
        settings.run_id,
        worker_id or settings.worker_id or "",
        settings.rank if rank is None else rank,
        settings.world_size if settings.world_size > 1 or "WORLD_SIZE" in environ else 0,
        settings.host,
    )
    return target, settings


async def _await_address(file: Path, timeout: float) -> str:
    try:
        async with asyncio.timeout(timeout):
            while not (address := read_address(file)):  # noqa: ASYNC110 - another process writes it
                await asyncio.sleep(_POLL_SECONDS)
    except TimeoutError:
        raise SchedulerUnreachableError(
            f"no scheduler left its address in {file} (PSDIST_SCHEDULER_FILE) within {timeout:g} s: is it running, "
            "with this --address-file?"
        ) from None
    return address

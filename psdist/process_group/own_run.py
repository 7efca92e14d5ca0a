"""A run that torch's own ranks start: under torchrun, and other launchers that name no scheduler.

Rank 0 starts a scheduler and a server, and puts their address and the run's token into torch's store, where the other
ranks find them. Whoever can read the store can join the run, as with gloo; the scheduler itself listens on loopback.

Ranks on several machines are refused, unless ``PSDIST_INSECURE`` says that their network is private: the scheduler then
listens on an address that the others can reach.

Rank 0 ends last: it waits for the others at its exit, because the scheduler ends with it. If it is killed, the others
on its machine end with an error that names it.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import os
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist

from psdist import addresses
from psdist.client.context import Context, init, init_for_all
from psdist.client.process import loop
from psdist.client.process.blocking import on_loop
from psdist.errors import ConfigurationError, PsdistError, WorkerLostError
from psdist.link import process_state
from psdist.settings.config import INSECURE_VARIABLE
from psdist.settings.flags import is_switched_on

_ATTEMPT: Final = "TORCHELASTIC_RESTART_COUNT"
#: Longest wait of rank 0 for the others to end.
_END_SECONDS: Final = 60.0
_POLL_SECONDS: Final = 0.1


def join(store: Any, rank: int, size: int) -> Context:
    """Join the run of these ranks. store: torch's.

    Raises ConfigurationError if these are not all ranks, if they are on several machines, or if rank 0 could not start
    the run.
    """
    if dist.is_initialized() and size < dist.get_world_size():
        raise ConfigurationError(
            f"the first group of the backend psdist has {size} of {dist.get_world_size()} ranks: all of them start the "
            "run together. Make a group of all ranks with it first"
        )
    for name, value in (("RANK", rank), ("WORLD_SIZE", size), ("LOCAL_RANK", rank)):
        os.environ.setdefault(name, str(value))  # Processes of torch.multiprocessing have none of them.
    key = f"psdist/run/{os.environ.get(_ATTEMPT, '')}"  # torchrun's store outlives its attempts.
    if rank == 0:
        return _start(store, key, size)
    found = json.loads(store.get(key))
    if "error" in found:
        raise ConfigurationError(f"rank 0 could not start the run: {found['error']}")
    if found["host"] != _host() and addresses.is_loopback(addresses.parse_address(found["scheduler"])[0]):
        raise ConfigurationError(
            f"rank {rank} is on {_host()} and rank 0 on {found['host']}, whose scheduler listens on loopback: start "
            "the script once per node with 'psdist-worker', which has torchrun's flags. If the network is private, "
            f"{INSECURE_VARIABLE}=1 on all nodes lets torchrun start it, too, without encryption"
        )
    context = init(scheduler=found["scheduler"], token=found["token"], run_id=found["run_id"], tls=False)
    if found["scope"] == process_state.own_scope() != "":
        loop.shared().call(on_loop(lambda: _watch(context, found["pid"])))
    return context


def _start(store: Any, key: str, size: int) -> Context:
    try:
        context, others = init_for_all(size, _address(size))
    except PsdistError as error:
        store.set(key, json.dumps({"error": error.message}))
        raise
    store.set(key, json.dumps({"host": _host(), "pid": os.getpid(), "scope": process_state.own_scope(), **others}))
    atexit.register(_await_others, context, os.getpid())
    return context


def _address(size: int) -> str | None:
    """Return the address on which the scheduler is to listen; None for loopback."""
    spans_machines = int(os.environ.get("LOCAL_WORLD_SIZE", size)) < size
    return addresses.own_address() if spans_machines and is_switched_on(os.environ, INSECURE_VARIABLE) else None


def _watch(context: Context, pid: int) -> None:
    """End this worker's calls with an error that names rank 0 once its process has ended. Runs on psdist's loop."""
    view = context.client.session.membership.view
    error = WorkerLostError(
        f"rank 0 is gone: its process {pid} has ended, and with it the scheduler and the server of this run"
    )
    try:
        watched = os.pidfd_open(pid)
    except OSError:
        view.on_fatal(error)
        return

    def ended() -> None:
        asyncio.get_running_loop().remove_reader(watched)
        os.close(watched)
        view.on_fatal(error)

    asyncio.get_running_loop().add_reader(watched, ended)


def _host() -> str:
    """Return a name that two machines do not share, nor two boots of one."""
    return f"{socket.gethostname()}/{Path('/proc/sys/kernel/random/boot_id').read_text(encoding='ascii').strip()[:8]}"


def _await_others(context: Context, pid: int) -> None:
    """Wait until the other workers have left, up to a limit. Their calls that need this rank fail first."""
    if os.getpid() != pid:
        return
    pause, until = threading.Event(), time.monotonic() + _END_SECONDS
    with suppress(PsdistError):
        if dist.is_initialized():
            dist.destroy_process_group()
        while len(context.info().workers) > 1 and time.monotonic() < until:
            pause.wait(_POLL_SECONDS)

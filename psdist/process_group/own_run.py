"""A run that torch's own ranks start: under torchrun, and other launchers that name no scheduler.

Rank 0 starts a scheduler and a server, and puts their address and the run's token into torch's store, where the other
ranks find them. Whoever can read the store can join the run, as with gloo; the scheduler itself listens on loopback.

Ranks on several machines are refused, unless ``PSDIST_INSECURE`` says that their network is private: the scheduler then
listens on an address that the others can reach.

Rank 0 ends last: it waits for the others when it has left the run, because the scheduler ends with it. If it is killed,
the others on its machine end with an error that names it.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import multiprocessing
import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from itertools import count
from multiprocessing import util
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist
from torch._C._distributed_c10d import (
    HashStore,  # missing in torch's stubs
    PrefixStore,  # missing in torch's stubs
)
from torch.distributed.rendezvous import rendezvous

from psdist import addresses
from psdist.client.context import Context, init, init_for_all
from psdist.client.session import loop
from psdist.client.session.loop import on_loop, placed
from psdist.errors import ConfigurationError, InvalidArgumentError, PsdistError, WaitTimeoutError, WorkerLostError
from psdist.link import processes
from psdist.settings.config import INSECURE_VARIABLE
from psdist.settings.flags import is_switched_on

_ATTEMPT: Final = "TORCHELASTIC_RESTART_COUNT"
#: Longest wait for the other ranks, if torch's process group states none: torch's own for its stores.
_STORE_SECONDS: Final = 300.0
_POLL_SECONDS: Final = 0.05
#: Counts the runs that this process has joined: all ranks join the same ones.
_joins: Final = itertools.count()


def join_all(arguments: Mapping[str, Any]) -> Context:
    """Join the run of all ranks of torch's default process group, or of ``env://`` if there is none.

    arguments: those of ``psdist.init``, which says when this is called. Raises as ``join``.
    """
    if dist.is_initialized():
        return join(dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size(), arguments)
    limit = timedelta(seconds=arguments.get("connect_timeout") or _STORE_SECONDS)
    store, rank, size = next(rendezvous("env://", timeout=limit))
    return join(store, rank, size, arguments)


def join(store: Any, rank: int, size: int, arguments: Mapping[str, Any] | None = None) -> Context:
    """Join the run of these ranks. The environment may state another place, such as a launcher's.

    store: torch's, of all ranks.
    arguments: those of ``psdist.init``, except for the place and the scheduler.

    Raises ConfigurationError if these are not all ranks, if they are on several machines, or if rank 0 could not start
    the run, or another rank not join it; WaitTimeoutError if a rank is missing for the store's time limit.
    """
    if dist.is_initialized() and size < dist.get_world_size():
        raise ConfigurationError(
            f"the first group of the backend psdist has {size} of {dist.get_world_size()} ranks: all of them start the "
            "run together. Make a group of all ranks with it first"
        )
    # torchrun's store outlives its attempts, and a script may join again after it has left.
    shared = PrefixStore(f"psdist/run/{os.environ.get(_ATTEMPT, '')}/{next(_joins)}", store)
    shared.set(f"host/{rank}", _host())
    arguments = arguments or {}
    if arguments.get("rank", rank) != rank:
        raise InvalidArgumentError(f"psdist.init(rank={arguments['rank']}) in rank {rank} of {size}: leave it out")
    context = _start(shared, size, arguments) if rank == 0 else _follow(shared, rank, arguments)
    if rank and multiprocessing.parent_process() is not None:  # Forked, it runs no functions of atexit.
        util.Finalize(None, context._close_at_exit, exitpriority=0)
    return context


def told_by(rank: int, shared: PrefixStore, what: str) -> str:
    """Return a text that a rank has put into the store. Raises WaitTimeoutError.

    The store is asked again and again: while its own ``get`` waits, no signal is handled.
    """
    key, pause = f"{what}/{rank}", threading.Event()
    limit: timedelta = shared.timeout  # type: ignore[attr-defined]  # missing in torch's stubs
    until = time.monotonic() + limit.total_seconds()
    while not shared.check([key]):
        if time.monotonic() >= until:
            raise WaitTimeoutError(
                f"rank {rank} did not join the run within the time limit of init_process_group (all ranks call "
                f"psdist.init() if one does): torch's store has no {key!r} after {limit}"
            )
        pause.wait(_POLL_SECONDS)
    text: bytes = shared.get(key)
    return text.decode()


def _placed(rank: int, hosts: Sequence[str]) -> AbstractContextManager[None]:
    """Let the environment state this process's place among the ranks."""
    here = [number for number, host in enumerate(hosts) if host == hosts[rank]]
    return placed(rank, len(hosts), here.index(rank), len(here))


def _follow(shared: PrefixStore, rank: int, arguments: Mapping[str, Any]) -> Context:
    """Join the run that rank 0 has started."""
    found = json.loads(told_by(0, shared, "run"))
    if "error" in found:
        raise ConfigurationError(f"rank 0 could not start the run: {found['error']}")
    try:
        with _placed(rank, found["hosts"]):
            named = {name: found[name] for name in ("scheduler", "token", "run_id")}
            context = init(**{**arguments, **named, "tls": False})
    except PsdistError as error:
        shared.set(f"joined/{rank}", error.message)
        raise
    shared.set(f"joined/{rank}", "")
    if found["scope"] == processes.own_scope() != "":
        loop.shared().call(on_loop(lambda: _watch(context, found["pid"])))
    return context


def _start(shared: PrefixStore, size: int, arguments: Mapping[str, Any]) -> Context:
    """Start the run, and wait until the others have joined: if this process ended first, they would find nothing."""
    try:
        hosts = [told_by(rank, shared, "host") for rank in range(size)]
        with _placed(0, hosts):
            context, others = init_for_all(size, _address(hosts), arguments)
    except PsdistError as error:
        shared.set("run/0", json.dumps({"error": error.message}))
        raise
    place = {"hosts": hosts, "pid": os.getpid(), "scope": processes.own_scope()}
    shared.set("run/0", json.dumps(place | others))
    for rank in range(1, size):
        if text := told_by(rank, shared, "joined"):
            raise ConfigurationError(f"rank {rank} could not join the run: {text}")
    return context


def _address(hosts: Sequence[str]) -> str | None:
    """Return the address on which the scheduler is to listen; None for loopback. Raises ConfigurationError."""
    other = next((rank for rank, host in enumerate(hosts) if host != hosts[0]), None)
    if other is None:
        return None
    if not is_switched_on(os.environ, INSECURE_VARIABLE):
        raise ConfigurationError(
            f"rank {other} is on {hosts[other]} and rank 0 on {hosts[0]}: start the script once per node with "
            f"'psdist-worker', which has torchrun's flags. If the network is private, {INSECURE_VARIABLE}=1 on all "
            "nodes lets torchrun start it, too, without encryption"
        )
    return addresses.own_address()


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


#: Ranks in the run of the default group's ranks, and numbers of the default groups of this process.
_world: Final[list[int]] = []
_made: Final = count()


def ranks_in_run(options: Any, mine: int) -> list[int]:
    """Return the members' ranks in the run. mine: that of this process.

    The first default group numbers the ranks as the run does. A later one may number them otherwise: the ranks tell
    each other by torch's store.
    """
    if options.global_ranks_in_group:
        return [_world[rank] if rank < len(_world) else rank for rank in options.global_ranks_in_group]
    ranks, number, store = list(range(options.group_size)), next(_made), options.store
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if isinstance(store, HashStore):  # Each process has its own.
        _world[:] = ranks
        return ranks
    shared = PrefixStore(f"psdist/group/{number}", options.store)
    shared.set(f"rank/{options.group_rank}", str(mine))
    if number:
        ranks = [int(told_by(rank, shared, "rank")) for rank in ranks]
    _world[:] = ranks
    return ranks

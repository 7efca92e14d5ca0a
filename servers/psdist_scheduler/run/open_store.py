"""Opens the store that a scheduler's settings name: a file, memory, or a prefix in etcd, whose leader it becomes."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

from psdist.errors import ConfigurationError, StorageError
from psdist.machine import make_directory
from psdist.security.tls import TlsFiles
from psdist.settings import exit_codes
from psdist.settings.config import EtcdLocation
from psdist_scheduler.run.run_store import Store
from psdist_scheduler.run.sqlite_store import SqliteStore

logger = logging.getLogger("psdist.scheduler")


def open_store(
    place: Path | EtcdLocation | None,
    run_id: str,
    new_run_id: Callable[[], str],
    *,
    optional: bool = False,
    standby: bool = False,
    wait: Callable[[float], None] = time.sleep,
    tls: TlsFiles | None = None,
) -> tuple[Store, str]:
    """Open the store at ``place`` (None: memory). Returns it with the run's name.

    That is ``run_id`` or, if that is empty, the store's or ``new_run_id()``.

    optional: True to use memory if the directory cannot be created or written.
    standby: True to wait, in etcd, until no other scheduler leads the run. False waits only as long as the lease of one
        that has died may last.
    wait: waits some seconds, or raises what ends the process.
    tls: identity for etcd, if the place needs one.

    Raises ConfigurationError, StorageError; SystemExit if the run ended in order while this process waited.
    """
    if isinstance(place, EtcdLocation):
        return _open_etcd(place, tls if place.secure else None, run_id, new_run_id, standby, wait)
    if place is not None and optional and (refusal := _make_directory(place.parent)):
        logger.warning(
            "this scheduler cannot be restarted without losing the run (choose a file with --store): %s", refusal
        )
        place = None
    if place is None:
        return Store(), run_id or new_run_id()
    store = SqliteStore(place, run_id, new_run_id)
    return store, store.run_id


def _open_etcd(
    place: EtcdLocation,
    tls: TlsFiles | None,
    run_id: str,
    new_run_id: Callable[[], str],
    standby: bool,
    wait: Callable[[float], None],
) -> tuple[Store, str]:
    from psdist_scheduler.run import etcd_client  # Other runs start without it.
    from psdist_scheduler.run.etcd_client import EtcdClient
    from psdist_scheduler.run.etcd_store import ENDED, EtcdStore

    client = EtcdClient(place.endpoints, tls)
    mine = etcd_client.Leader(socket.gethostname(), os.getpid())
    claim = etcd_client.Leadership(client, f"{place.prefix}/leader".encode(), mine)
    until = time.monotonic() + 2 * etcd_client.LEASE_SECONDS

    before: etcd_client.Leader | None = None
    try:
        while True:
            try:
                leader = claim.take()
            except StorageError as error:
                # The leader ends, too, if etcd does not answer for long: a standby that ended could not follow it.
                if not standby or before is None:
                    raise
                logger.warning("still waiting to lead the run at %s: %s", place, error)
                leader = before
            if leader is None:
                break
            if leader != before:
                logger.info("waiting to lead the run at %s: %s leads it", place, leader)
            before = leader
            if not standby and time.monotonic() > until:
                raise ConfigurationError(
                    f"{leader} leads the run at --store {place}: end that scheduler first, or wait for its end with "
                    "--standby"
                )
            wait(etcd_client.POLL_SECONDS)
        if before and client.get(f"{place.prefix}/".encode() + ENDED, etcd_client.START_SECONDS) is not None:
            logger.info("the run at %s has ended", place)
            raise SystemExit(exit_codes.OK)
        store = EtcdStore(client, place, claim, run_id, new_run_id)
    except BaseException:  # Also at a signal: the next scheduler need not wait for the end of the lease.
        claim.resign()
        client.close()
        raise
    return store, store.run_id


def _make_directory(path: Path) -> str:
    """Create a directory for stores, for this user only. Returns why it cannot be used; empty if it can."""
    try:
        make_directory(path, 0o700)
    except OSError as error:
        return f"{path} cannot be made: {error.strerror}"
    return "" if os.access(path, os.W_OK | os.X_OK) else f"{path} cannot be written"

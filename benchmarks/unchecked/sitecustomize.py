"""Imported by every Python of a run that has this directory on its path: servers accept every push, unchecked.

They do not check sender, incarnation, duplicates or the open step, and do not store what only these checks need. Such a
server is wrong as soon as anything is sent twice; it exists for comparison.
"""

import sys
from typing import Any


def _bsp_pushed(self: Any, state: Any, event: Any, producer: Any) -> Any:
    from psdist_server.core import bsp_shard

    waiters = state.next_waiters if state.busy else state.waiters
    rank = self.members[event.worker_id].rank
    state.open[producer] = bsp_shard._Contribution(event.token, rank, event.abstain)
    waiters[event.token] = (False, False)
    return self._try_apply(state)


def _async_pushed(self: Any, state: Any, event: Any, producer: Any) -> Any:
    from psdist_server.core import async_shard

    self.producers[producer].taken.add(state.index)  # its size is the clock's measure, checked or not
    state.queue.append(async_shard._Push(event, producer))
    return self._try_apply(state)


def _no_refusal(self: Any, event: Any) -> None:
    return None


def install() -> None:
    """Replace the checks of this process's shard machines."""
    from psdist_server.core.async_shard import AsyncShard
    from psdist_server.core.bsp_shard import BspShard

    for machine, pushed in ((BspShard, _bsp_pushed), (AsyncShard, _async_pushed)):
        machine._refusal, machine._pushed = _no_refusal, pushed


if "psdist_server" in sys.orig_argv:
    install()

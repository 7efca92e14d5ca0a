"""Ranks in the run of the members of a process group, which torch may number otherwise."""

from __future__ import annotations

from itertools import count
from typing import Any, Final

from torch._C._distributed_c10d import HashStore, PrefixStore  # missing in torch's stubs

from psdist.process_group import own_run

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
        ranks = [int(own_run.told_by(rank, shared, "rank")) for rank in ranks]
    _world[:] = ranks
    return ranks

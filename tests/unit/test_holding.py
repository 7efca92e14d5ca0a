"""A holding: what a map makes of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest

from psdist import BSP, optim
from psdist.errors import UnknownParametersError
from psdist.types import ParametersEntry, ParametersSpec, Replica, Shard
from psdist_server.holding import Holding
from psdist_server.pool import KernelPool
from psdist_server.replicator import Network

ME, OTHER = Replica("server-0", 1), Replica("server-1", 1)


async def test_before_it_is_ready_one_that_was_being_filled_may_get_the_place_of_one_that_is_gone() -> None:
    """The values are uploaded again, so nothing is missing of its copy."""
    spec = ParametersSpec("p", optim.SGD(lr=1.0), BSP(), slice_elements=4096)
    entry = ParametersEntry(spec=spec, total=4096, shards=(Shard(OTHER, 1, (), (ME,)),))
    pool: KernelPool[Any, Any] = KernelPool(1)
    holding = Holding(entry, ME, pool, cast(Network, None), lambda *_: None)
    await holding.update(entry, 1)
    await holding.update(replace(entry, shards=(Shard(ME, 2),)), 2)
    with pytest.raises(UnknownParametersError, match="0 of 1 slices"):
        holding.check_installed()
    assert sorted(holding.shards) == [0]
    await holding.close()
    pool.close()

"""Changes of a parameter store by new maps."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest

from psdist import ASP, BSP, optim
from psdist.errors import UnknownParametersError
from psdist.types import ParametersEntry, ParametersMember, ParametersSpec, Replica, Shard
from psdist_server.core.replication import ReplicaUpdate
from psdist_server.core.shard import SliceRecord
from psdist_server.kernels.arrays import DenseParameters
from psdist_server.kernels.pool import KernelPool
from psdist_server.store.parameter_store import ParameterStore
from psdist_server.store.stream_to_replica import ReplicaNetwork

ME, OTHER = Replica("server-0", 1), Replica("server-1", 1)


async def test_before_it_is_ready_one_that_was_being_filled_may_get_the_place_of_one_that_is_gone() -> None:
    """The values are uploaded again, so nothing is missing of its copy."""
    spec = ParametersSpec("p", optim.SGD(lr=1.0), BSP(), slice_elements=4096)
    entry = ParametersEntry(spec=spec, total=4096, shards=(Shard(OTHER, 1, (), (ME,)),))
    pool = KernelPool(1)
    network = cast(ReplicaNetwork, SimpleNamespace(carriers=()))
    store = ParameterStore(entry, DenseParameters(entry), ME, pool, network, lambda *_: None)
    await store.update(entry, 1)
    await store.update(replace(entry, shards=(Shard(ME, 2),)), 2)
    with pytest.raises(UnknownParametersError, match="0 of 1 slices"):
        store.check_installed()
    assert sorted(store.router.machines) == [0]
    await store.close()
    pool.close()


async def test_a_copy_keeps_no_entry_of_a_life_that_is_over_even_where_its_update_came_late() -> None:
    """It may come after the map that ends the life, from a primary that has not got that map: it is kept until the
    next, and not for ever."""
    spec = ParametersSpec("p", optim.SGD(lr=1.0), ASP(), slice_elements=4096)
    first, second = (ParametersMember("worker-0", incarnation, 0) for incarnation in (1, 2))
    shards = (Shard(OTHER, 1, (ME,)),)
    entry = ParametersEntry(spec=spec, total=4096, shards=shards, ready=True, members=(first,))
    pool = KernelPool(1)
    network = cast(ReplicaNetwork, SimpleNamespace(carriers=()))
    store = ParameterStore(entry, DenseParameters(entry), ME, pool, network, lambda *_: None)
    await store.update(entry, 1)
    machine = store.backups.machines[0]
    machine.start_copy(1, 0)
    machine.state(0, SliceRecord())
    machine.end()
    await store.update(replace(entry, members=(second,)), 2)
    machine.update(1, ReplicaUpdate(1, 0, 0, (("worker-0", 1),), 0))
    machine.update(1, ReplicaUpdate(2, 0, 1, (("worker-0", 2),), 0))
    assert machine.records[0].producers == {("worker-0", 1): 1, ("worker-0", 2): 1}
    await store.update(replace(entry, members=(second, ParametersMember("worker-1", 1, 1))), 3)
    assert machine.records[0].producers == {("worker-0", 2): 1}
    await store.close()
    pool.close()

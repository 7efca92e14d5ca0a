"""Makes the machine of a shard for the consistency mode of its parameter set."""

from __future__ import annotations

from collections.abc import Iterable

from psdist.consistency import BSP, SSP, Consistency
from psdist.types import ParametersMember
from psdist_server.core.async_shard import AsyncShard
from psdist_server.core.bsp_shard import BspShard
from psdist_server.core.records import Records


def make_shard(
    indices: Iterable[int],
    members: Iterable[ParametersMember],
    consistency: Consistency,
    clipping: bool,
    reference_workers: int = 0,
    records: Records | None = None,
    departed: tuple[ParametersMember, ...] = (),
) -> BspShard | AsyncShard:
    """The machine for one shard of parameters with this consistency.

    clipping: BSP only: a step is aggregated first and applied when its global norm is known.
    reference_workers: BSP only: what ``BSP.resize_lr`` compares with.
    departed: SSP and ASP: workers that were lost and may continue their pushes.
    records: what is known of each slice, where the shard was another's before; else all slices are new.
    """
    if isinstance(consistency, BSP):
        return BspShard(indices, members, consistency, clipping, reference_workers, records)
    staleness = consistency.staleness if isinstance(consistency, SSP) else None
    return AsyncShard(indices, members, staleness, consistency.staleness_lr == "inverse", records, departed)

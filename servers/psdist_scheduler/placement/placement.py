"""Placement: the number of shards of a vector, and the server of each. Pure.

Slices do not depend on the number of servers (``psdist.types.Slicing``). Slice i is in shard i % shards. Shards go to
servers by the longest-processing-time rule (Graham 1969): the largest shard next, to the server that holds the fewest
elements, counting all other parameter sets. Ties go to the smaller server id. So the placement depends only on its
arguments.

Balance: Servers that held equally many elements before hold the same number afterwards, to within one slice. In general
the gap between the fullest and the emptiest server is at most the larger of the previous gap and one shard.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from psdist.errors import InvalidArgumentError, LimitExceededError
from psdist.optim import Override, group_of
from psdist.types import SHARDS_PER_SERVER, GroupRange, Layout, ParametersEntry, Slicing, choose_slice_elements
from psdist.wire.limits import SLICES_MAX
from psdist_scheduler.events.cluster_state import name_some


def choose_slicing(total: int, slice_elements: int, *, between_hosts: bool = False) -> Slicing:
    """Return the slicing of ``total`` elements. Raises LimitExceededError.

    slice_elements: elements per slice; 0 lets psdist choose.
    between_hosts: True if uncompressed slices travel between hosts.
    """
    slicing = Slicing(total, slice_elements or choose_slice_elements(total, between_hosts=between_hosts))
    if slicing.count > SLICES_MAX:
        raise LimitExceededError(
            f"{total} elements in slices of {slice_elements} are {slicing.count} slices, more than the limit of "
            f"{SLICES_MAX}: leave slice_elements at 0",
            slices=slicing.count,
            limit=SLICES_MAX,
        )
    return slicing


def shard_elements(slicing: Slicing, shards: int) -> list[int]:
    """Return the number of elements in each of ``shards`` shards (1 to ``slicing.count``)."""
    full, extra = divmod(slicing.count, shards)
    elements = [(full + (number < extra)) * slicing.slice_elements for number in range(shards)]
    elements[(slicing.count - 1) % shards] -= slicing.count * slicing.slice_elements - slicing.total
    return elements


def held_elements(entries: Iterable[ParametersEntry]) -> dict[str, int]:
    """Return the number of elements of ``entries`` that each server holds."""
    held: dict[str, int] = {}
    for entry in entries:
        if entry.shards:
            for owner, elements in zip(entry.primaries, shard_elements(entry.slicing, len(entry.shards)), strict=True):
                held[owner] = held.get(owner, 0) + elements
    return held


def place(slicing: Slicing, servers: Sequence[str], held: Mapping[str, int]) -> tuple[str, ...]:
    """Return the owner of each shard; empty for an empty vector.

    held: elements that servers hold already.
    """
    shards = min(slicing.count, SHARDS_PER_SERVER * len(servers))
    if shards == 0:
        return ()
    sizes = shard_elements(slicing, shards)
    load = {server: held.get(server, 0) for server in sorted(servers)}
    owners = [""] * shards
    for number in sorted(range(shards), key=lambda shard: -sizes[shard]):
        owner = min(load, key=lambda server: (load[server], server))
        owners[number] = owner
        load[owner] += sizes[number]
    return tuple(owners)


def check_overrides(layout: Layout, overrides: Sequence[Override]) -> None:
    """Raise InvalidArgumentError if an override's pattern matches no tensor."""
    unmatched = list(overrides)
    for tensor in layout.tensors:
        if not unmatched:
            return
        unmatched = [item for item in unmatched if not group_of(tensor.name, [item])]
    if unmatched:
        names, pattern = name_some([tensor.name for tensor in layout.tensors]), unmatched[0].pattern
        raise InvalidArgumentError(
            f"override {pattern!r} matches no tensor of {names}: correct the pattern or leave it out", pattern=pattern
        )


def group_ranges(layout: Layout, overrides: Sequence[Override]) -> tuple[GroupRange, ...]:
    """Return the element ranges with an override, ascending. Adjacent ranges of one group are merged."""
    ranges: list[GroupRange] = []
    if not overrides:
        return ()
    for tensor, start, stop in zip(layout.tensors, layout.offsets, layout.offsets[1:], strict=False):
        group = group_of(tensor.name, overrides) if start < stop else 0
        if group == 0:
            continue
        if ranges and ranges[-1].stop == start and ranges[-1].group == group:
            start = ranges.pop().start
        ranges.append(GroupRange(start, stop, group))
    return tuple(ranges)

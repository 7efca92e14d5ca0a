"""The pauses of training that faults cause: long times between two acknowledged pushes of one worker. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from psdist.chaos.report import Injected


def longest_pauses(moments: Sequence[float], faults: Sequence[Injected], until: float) -> list[float]:
    """Return the longest pause of one worker that each fault caused, in seconds.

    A pause counts for the faults that struck during it, or else for the last one before it. One that a frozen server
    shares with a killed one counts only for the frozen one: it lasts as long as the lease.

    moments: of the worker's acknowledgements.
    faults: in their order.
    until: when the last fault's effects were over.
    """
    longest = [0.0] * len(faults)
    for before, after in itertools.pairwise(moments):
        if after > faults[0].at and before < until:
            for number in _causes(before, after, faults):
                longest[number] = max(longest[number], after - before)
    return longest


def _causes(before: float, after: float, faults: Sequence[Injected]) -> list[int]:
    during = [number for number, fault in enumerate(faults) if before < fault.at < after]
    if not during:
        return [sum(fault.at <= before for fault in faults) - 1]
    return [number for number in during if faults[number].kind.endswith("freeze")] or during

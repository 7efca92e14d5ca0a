"""Errors of ``monitored_barrier``, in the words that scripts and PyTorch's tests know from gloo."""

from __future__ import annotations

from datetime import timedelta

from psdist.errors import WaitTimeoutError


def monitored_error(error: WaitTimeoutError, rank: int, limit: timedelta, wait_all_ranks: bool) -> WaitTimeoutError:
    """Return the error of a monitored barrier.

    error: that of the barrier, whose details name the absent ranks.
    rank: the rank that raises the error.
    wait_all_ranks: name all absent ranks, instead of the first one.
    """
    absent = error.details.get("absent", "").split(", ")
    if rank:
        return WaitTimeoutError(
            f"Rank {rank} successfully reached monitoredBarrier, but received errors while waiting for send/recv from "
            f"rank 0: {error.message}",
            **error.details,
        )
    named = f"Ranks {', '.join(absent)}" if wait_all_ranks and len(absent) > 1 else f"Rank {absent[0]}"
    milliseconds = round(limit.total_seconds() * 1000)
    return WaitTimeoutError(f"{named} failed to pass monitoredBarrier in {milliseconds} ms", **error.details)

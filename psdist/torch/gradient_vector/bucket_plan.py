"""Assignment of tensors to buckets, and detection of complete buckets.

Invariants: A bucket is a contiguous range of the layout, so only neighbouring buckets share slices. Every tensor is in
exactly one bucket. Each bucket completes once per step.

Values and sending are in ``gradients``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from psdist.errors import InvalidArgumentError


class BucketPlan:
    """Divides tensors into buckets and counts the tensors of a step that are ready.

    sizes: bytes of each tensor, in the layout's order.
    bucket_bytes: a bucket ends with the tensor that brings it to this size. Backward passes reach the last layers
        first, so buckets are filled from the last tensor on.
    """

    def __init__(self, sizes: Sequence[int], bucket_bytes: int) -> None:
        self.buckets: list[tuple[int, ...]] = []
        self._bucket_of = [0] * len(sizes)
        members: list[int] = []
        held = 0
        for number in reversed(range(len(sizes))):
            members.append(number)
            held += sizes[number]
            if held >= bucket_bytes or number == 0:
                for member in members:
                    self._bucket_of[member] = len(self.buckets)
                self.buckets.append(tuple(reversed(members)))
                members, held = [], 0
        self._missing = [len(bucket) for bucket in self.buckets]

    def start_step(self) -> None:
        """Start a step: no tensor is ready."""
        self._missing = [len(bucket) for bucket in self.buckets]

    def on_ready(self, number: int) -> tuple[int, ...]:
        """Mark tensor ``number`` as ready. Returns the bucket that it completes, or an empty tuple."""
        bucket = self._bucket_of[number]
        self._missing[bucket] -= 1
        return () if self._missing[bucket] else self.buckets[bucket]


def named_buckets(tensors: Mapping[str, Tensor], bucket_bytes: int, last: Iterable[str]) -> list[list[str]]:
    """Return the names of the tensors of each bucket, the last tensors first.

    tensors, bucket_bytes: as for ``BucketPlan``; they are pushed as float32.
    last: names in front of those of the last bucket.
    """
    names = list(tensors)
    plan = BucketPlan([4 * one.numel() for one in tensors.values()], bucket_bytes)
    buckets = [[names[number] for number in bucket] for bucket in plan.buckets]
    buckets[-1] = [*last, *buckets[-1]]
    return buckets


def bucket_bytes_of(bucket_cap_mb: float) -> int:
    """Convert MiB to bytes. Raises InvalidArgumentError."""
    if (
        isinstance(bucket_cap_mb, bool)
        or not isinstance(bucket_cap_mb, int | float)
        or not 0 < bucket_cap_mb <= 1 << 20
    ):
        raise InvalidArgumentError(f"bucket_cap_mb={bucket_cap_mb!r} is out of range: use MiB above 0")
    return max(1, int(bucket_cap_mb * (1 << 20)))

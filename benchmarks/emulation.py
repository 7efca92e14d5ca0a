"""An emulated accelerator: computing for a fixed time without using the CPU.

A step computes for ``compute_seconds``: the first third is the forward pass. In the other two thirds the backward pass
makes gradients ready, bucket by bucket, at an even pace, the last at the very end.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

FORWARD_SHARE = 1 / 3


@dataclass(frozen=True)
class Schedule:
    """Times at which the buckets' gradients are ready."""

    compute_seconds: float
    buckets: int

    @property
    def ready_seconds(self) -> list[float]:
        """Return the seconds from the step's start until bucket 0, 1, ... is ready."""
        forward = self.compute_seconds * FORWARD_SHARE
        backward = self.compute_seconds - forward
        return [forward + backward * (number + 1) / self.buckets for number in range(self.buckets)]


def compute_until(moment: float) -> None:
    """Block until ``time.perf_counter()`` says ``moment``, as a thread does that waits for its accelerator."""
    time.sleep(max(0.0, moment - time.perf_counter()))

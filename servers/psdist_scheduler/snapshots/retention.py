"""When a snapshot is due by the policy, and which are kept. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from psdist.snapshots.format import CommitRecord
from psdist.snapshots.policy import SavePolicy


def surplus(commits: Sequence[CommitRecord], policy: SavePolicy, pinned: Collection[str]) -> tuple[CommitRecord, ...]:
    """Those of ``commits`` (the newest first) that are not kept, the oldest first. ``pinned``: directories that are in
    use. Kept are the newest ``keep_last``, and of every ``keep_every`` steps the first that is there."""
    kept = {commit.directory for commit in commits[: policy.keep_last]} | set(pinned)
    stretches: set[int] = set()
    for commit in reversed(commits):
        if policy.keep_every and (stretch := step_of(commit) // policy.keep_every) not in stretches:
            stretches.add(stretch)
            kept.add(commit.directory)
    return tuple(commit for commit in reversed(commits) if commit.directory not in kept)


def step_of(commit: CommitRecord) -> int:
    """The highest step in it, over all parameters."""
    return max(commit.steps.values(), default=0)


def next_multiple(step: int, interval: int) -> int:
    """The first multiple of ``interval`` after ``step``."""
    return (step // interval + 1) * interval


def trained(versions: Mapping[str, int], saved: Mapping[str, int]) -> bool:
    """Whether anything was trained since the snapshot whose steps ``saved`` has; empty where there is none."""
    return any(version > saved.get(name, 0) for name, version in versions.items())

"""The last snapshot of a run whose workers end together: wanted, under way, or taken. Pure.

When it is wanted, all workers have stopped pushing, at steps that no slice can pass meanwhile. When the servers have
agreed to its cut, the workers leave, one after another. Their leaving may close steps that were begun, and these must
not be saved. So this snapshot stays the last until somebody trains again. If it fails, no later step is saved.

Not here: the attempt (``attempt``), workers (``stops``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from psdist.snapshots.format import CommitRecord
from psdist_scheduler.snapshots.attempt import Attempt


@dataclass(slots=True)
class EndSnapshot:
    """steps: of the cut, by BSP parameters; None where it is not wanted, or not any more. attempt: that takes it; 0 for
    none. commit: that it was taken as. agreed: ``steps`` as workers agreed on them, also when it has failed."""

    steps: Mapping[str, int] | None = None
    attempt: int = 0
    commit: CommitRecord | None = None
    agreed: Mapping[str, int] = field(default_factory=dict)

    def want(self, steps: Mapping[str, int]) -> None:
        """It is to be taken at ``steps``."""
        self.steps, self.attempt, self.commit, self.agreed = dict(steps), 0, None, dict(steps)

    def be(self, commit: CommitRecord) -> None:
        """A snapshot that is there has all of it."""
        self.steps, self.attempt, self.commit, self.agreed = None, 0, commit, {}

    def forget(self) -> None:
        """Somebody trains again, or the run goes back."""
        self.steps, self.attempt, self.commit, self.agreed = None, 0, None, {}

    def ended(self, attempt: int, commit: CommitRecord | None) -> None:
        """An attempt has ended for good: with a commit, or without."""
        if attempt == self.attempt != 0:
            self.steps, self.commit = None, commit

    def passed(self, steps: Mapping[str, int]) -> str:
        """Why no snapshot may be taken at ``steps``; empty if one may."""
        for name, agreed in self.agreed.items():
            if steps.get(name, agreed) > agreed:
                return (
                    f"the workers ended together at step {agreed} of {name!r}, which is at step {steps[name]} now: "
                    "what follows is of some of them. The newest snapshot before that stays the last"
                )
        return ""

    def is_safe(self, attempt: Attempt | None) -> bool:
        """Whether nothing that workers do can change it any more."""
        if self.steps is None:
            return True
        mine = attempt is not None and attempt.number == self.attempt
        return mine and attempt is not None and attempt.phase in ("cutting", "committing") and not attempt.kept.missing

"""The last snapshot of a run whose workers end together: wanted, taken, or failed. Pure.

When it is wanted, all workers have stopped pushing, at steps that no slice can pass meanwhile. When the servers have
agreed to its cut, the workers leave, one after another. Their leaving may close steps that were begun, and these must
not be saved. So this snapshot stays the last until somebody trains again. If it fails, no later step is saved.

Not here: the attempt (``attempt``), workers (``stops``).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto

from psdist.snapshots.format import CommitRecord
from psdist_scheduler.snapshots.attempt import Attempt, AttemptPhase


class EndState(Enum):
    """Where the last snapshot of a run is."""

    NONE = auto()
    WANTED = auto()
    TAKEN = auto()
    FAILED = auto()


class EndSnapshot:
    """steps: at which the workers ended, by BSP parameter set. attempt: that takes it; 0 for none. commit: that it was
    taken as; None before."""

    def __init__(self) -> None:
        self.forget()

    def want(self, steps: Mapping[str, int]) -> None:
        """The last snapshot is to be taken at ``steps``."""
        self._set(EndState.WANTED, steps)

    def forget(self) -> None:
        """Somebody trains again, or the run goes back."""
        self._set(EndState.NONE, {})

    def be(self, commit: CommitRecord) -> None:
        """A snapshot that is there has all of it."""
        self._set(EndState.TAKEN, {}, commit)

    def try_by(self, attempt: int) -> None:
        """This attempt takes it."""
        self.attempt = attempt

    def ended(self, attempt: int, commit: CommitRecord | None) -> None:
        """An attempt has ended for good: with a commit, or without."""
        if attempt == self.attempt != 0:
            self._set(EndState.TAKEN if commit else EndState.FAILED, self.steps, commit)

    def check(self, steps: Mapping[str, int]) -> str:
        """Why no snapshot may be taken at ``steps``, in which case this one has failed; empty if one may."""
        for name, agreed in self.steps.items():
            if steps.get(name, agreed) > agreed:
                self._set(EndState.FAILED, self.steps)
                return (
                    f"the workers ended together at step {agreed} of {name!r}, which is at step {steps[name]} now: "
                    "what follows is of some of them. The newest snapshot before that stays the last"
                )
        return ""

    def is_safe(self, attempt: Attempt | None) -> bool:
        """Whether nothing that workers do can change it any more."""
        if self.state is not EndState.WANTED:
            return True
        if attempt is None or attempt.number != self.attempt:
            return False
        return attempt.phase >= AttemptPhase.CUTTING and not attempt.kept.missing

    def _set(self, state: EndState, steps: Mapping[str, int], commit: CommitRecord | None = None) -> None:
        self.state, self.steps, self.commit, self.attempt = state, dict(steps), commit, 0

"""Ways for the data of a call besides parts, which all ranks of a group must be able to go."""

from __future__ import annotations

from typing import Protocol

from psdist.collectives.core.plan import Plan


class Moves(Protocol):
    """Movement of one call's data."""

    def needs(self, peer: int) -> bool:
        """True if the call cannot end without more from a rank."""

    def slowest(self) -> list[int]:
        """Return the ranks that the movement waits for."""


class GroupRoute(Protocol):
    """A way that this rank can go."""

    def fits(self, plan: Plan) -> bool:
        """True if the data of a call may go this way."""

    def moves(self, plan: Plan) -> Moves:
        """Return the movement of the next call, which all ranks make."""

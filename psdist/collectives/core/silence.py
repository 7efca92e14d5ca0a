"""Time for which a peer has given no sign of life, by repeated looks at its link."""

from __future__ import annotations

from typing import Final

#: Looks per time limit.
LOOKS: Final = 8
#: Pauses between two looks, in intervals, after which this process itself was stopped or starved.
_OWN_STALL: Final = 3.0


class PeerSilence:
    """Silence of one peer. interval: seconds between two looks."""

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self._looked: float | None = None
        self._since: float | None = None

    def look(self, now: float, *, is_silent: bool) -> float:
        """Return the seconds of silence at this look.

        Time in which this process did not look does not count: it may have been stopped itself.
        """
        gap = 0.0 if self._looked is None else now - self._looked
        self._looked = now
        if not is_silent:
            self._since = None
        elif self._since is None:
            self._since = now - self._interval  # It has been silent since the previous look.
        elif gap > _OWN_STALL * self._interval:
            self._since += gap
        return 0.0 if self._since is None else now - self._since

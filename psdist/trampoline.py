"""A queue of effects, which bounds the depth of calls. Machines return effects; carrying one out may cause others."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any


class Trampoline:
    """Carries out effects one after the other, in order. Effects that this causes are carried out after those in the
    queue, so no handler is called while another one runs.

    handlers: a function for each class of effects. It may be filled later.
    """

    def __init__(self) -> None:
        self.handlers: dict[type[Any], Callable[[Any], None]] = {}
        self._effects: deque[object] = deque()
        self._is_running = False

    def run(self, effects: Iterable[object]) -> None:
        """Carry out ``effects``: before this returns, unless a handler calls it."""
        self._effects.extend(effects)
        if self._is_running:
            return
        self._is_running = True
        try:
            while self._effects:
                effect = self._effects.popleft()
                self.handlers[type(effect)](effect)
        finally:
            self._is_running = False

"""The gradient arena of one handle, and whether a server may have its file.

After a push that did not end well a server may read the arena for as long as it likes. So the arena is renewed: a file
that no server has takes its place, with the same content at the same address.

Not here: the memory file (``psdist.wire.shm``), which servers have it (``attachment``).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from numpy.typing import NDArray

from psdist.client.process.off_loop import in_thread
from psdist.types import DType
from psdist.wire import fd_passing
from psdist.wire.shm import GradientArena, reason_of


class OfferedArena:
    """An arena of ``elements`` gradients of ``dtype``. It is made when a server is to be shared with."""

    def __init__(self, elements: int, dtype: DType) -> None:
        self.elements = elements
        self.dtype: DType = dtype
        #: Counts the files that were in the place of the arena, so that who waited can see that it is another.
        self.generation = 0
        self._arena: GradientArena | None = None
        self._offered = False
        #: Called before other pages lie at the arena's addresses, and its memory is given back.
        self.before_replaced: Callable[[], None] = lambda: None

    async def prepare(self) -> str:
        """Makes the arena. Returns why that cannot be; empty if it is there."""
        if self._arena is None:
            fd_passing.sweep()
            try:
                # In a thread, because clearing a large file takes longer than heartbeats may.
                self._arena = await in_thread(partial(GradientArena.create, self.elements, self.dtype))
            except OSError as error:
                return reason_of(error)
        elif self._arena.has_holes:
            try:
                await in_thread(self._arena.fill)
            except OSError as error:
                return reason_of(error)
        return "" if self._arena.shareable else "no room in shared memory for another arena"

    def offer(self) -> GradientArena:
        """The arena, of which a server gets the file."""
        assert self._arena is not None
        self._offered = True
        return self._arena

    @property
    def gradients(self) -> NDArray[Any] | None:
        """The whole gradient vector, if there is an arena and it is float32."""
        return self._arena.flat if self._arena is not None and self.elements and self.dtype == "float32" else None

    @property
    def is_offered(self) -> bool:
        """Whether a server may have the arena's file."""
        return self._arena is not None and self._offered

    def release(self) -> None:
        """Gives the arena's memory back to the system until it is written again. No push is under way."""
        if self._arena is not None:
            self.before_replaced()
            self._arena.release()

    def renew(self) -> None:
        """Puts a file that no server has in the place of the arena."""
        assert self._arena is not None
        self._offered = False
        self.generation += 1
        self.before_replaced()
        self._arena.renew()

    def close(self) -> None:
        """Ends the arena."""
        self.generation += 1
        if self._arena is not None:
            self.before_replaced()
            self._arena.close()

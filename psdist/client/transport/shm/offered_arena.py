"""The gradient arena of one handle, or of several that take turns with it, and whether a server may have its file.

After a push that did not end well a server may read the arena for as long as it likes. So the arena is detached from
its file, and the memory, with its content and addresses, is this process's own. It is shared anew, by another file,
when the user is known not to write to it: in the next push, or when all buckets of a step were given.

Not here: the memory file (``psdist.wire.shm``), which servers have it (``attachment``).
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any, Protocol

from numpy.typing import NDArray

from psdist.errors import InvalidArgumentError
from psdist.off_loop import in_thread, off_loop
from psdist.types import DType
from psdist.wire import fd_passing
from psdist.wire.shm import GradientArena, reason_of


class ArenaUser(Protocol):
    """A handle that has its gradients in an arena."""

    def on_pages_replaced(self) -> None:
        """Is called before other pages lie at the arena's addresses, or none."""

    def on_detached(self) -> None:
        """Is called before servers lose the arena: those that were given it are not to be used any more."""


class OfferedArena:
    """An arena of ``elements`` gradients of ``dtype``. It is made when a server is to be shared with."""

    def __init__(self, elements: int, dtype: DType) -> None:
        self.elements = elements
        self.dtype: DType = dtype
        self._users: list[ArenaUser] = []
        self._arena: GradientArena | None = None
        #: Counts how often its memory was given back: a server may have seen holes.
        self.releases = 0
        #: Why there is no file, once one could not be had.
        self.no_file = ""
        self._making = asyncio.Lock()
        self._is_detaching = False

    # --- users --------------------------------------------------------------------------------------------------------

    def join(self, user: ArenaUser) -> None:
        """``user`` has its gradients here from now on."""
        self._users.append(user)

    async def leave(self, user: ArenaUser) -> None:
        """``user`` has its gradients here no more. Its last push has ended. Without users the arena ends."""
        if self._users == [user]:
            await self.detach()
        self._users = [one for one in self._users if one is not user]

    def check_like(self, other: OfferedArena) -> None:
        """Raises InvalidArgumentError where the gradients of ``other`` cannot lie here."""
        if (self.elements, self.dtype) != (other.elements, other.dtype):
            raise InvalidArgumentError(
                f"{other.elements:,} gradients in {other.dtype} cannot take turns with {self.elements:,} in "
                f"{self.dtype}: sizes and dtypes on the wire must be the same"
            )

    # --- its memory ---------------------------------------------------------------------------------------------------

    async def prepare(self) -> str:
        """Makes the arena. Returns why that cannot be; empty if it is there."""
        async with self._making:
            try:
                if self._arena is None:
                    fd_passing.sweep()
                    # In a thread, because clearing a large file takes longer than heartbeats may.
                    self._arena = await in_thread(partial(GradientArena.create, self.elements, self.dtype))
                elif self._arena.has_holes:
                    await in_thread(self._arena.fill)
            except OSError as error:
                return reason_of(error)
        return self.no_file

    async def share(self) -> None:
        """Has a file again, after ``detach``. Nobody writes to the arena meanwhile."""
        async with self._making:
            if self._arena is not None and self.is_detached:
                self._pages_replaced()
                try:
                    await in_thread(self._arena.share)
                except OSError as error:
                    self.no_file = reason_of(error)

    @property
    def is_detached(self) -> bool:
        """Whether there is no file until ``share`` is called."""
        if self._arena is None or self.no_file:
            return False
        return self._is_detaching or not self._arena.shareable

    def offer(self) -> GradientArena:
        """The arena, of which a server gets the file."""
        assert self._arena is not None
        return self._arena

    @property
    def gradients(self) -> NDArray[Any] | None:
        """The whole gradient vector, if there is an arena and it is float32."""
        return self._arena.flat if self._arena is not None and self.elements and self.dtype == "float32" else None

    @property
    def is_shared(self) -> bool:
        """Whether several handles take turns with it."""
        return len(self._users) > 1

    async def release(self) -> None:
        """Gives the arena's memory back to the system until it is written again. No push is under way."""
        if self._arena is not None:
            self.releases += 1
            self._pages_replaced()
            await off_loop(self.elements, self._arena.release)

    async def detach(self) -> None:
        """Leaves the file to the servers that have it. Anybody may write to the arena meanwhile."""
        for user in self._users:
            user.on_detached()
        if self._arena is not None:
            self._is_detaching = True
            async with self._making:
                self._pages_replaced()
                try:
                    await off_loop(self.elements, self._arena.detach)
                finally:
                    self._is_detaching = False

    def _pages_replaced(self) -> None:
        for user in self._users:
            user.on_pages_replaced()

"""Gradient arena of one handle, or of several that take turns with it, and its file offered to servers.

After a failed push, a server may read the arena for as long as it likes. The arena is therefore detached from its file,
and the memory becomes private to this process with its content and addresses. It is shared again by a new file when the
user is known not to write to it: in the next push, or once all buckets of a step were given.

``psdist.wire.shm`` implements the memory file, and ``attachment`` knows which servers hold it.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any, Protocol

from numpy.typing import NDArray

from psdist.errors import InvalidArgumentError
from psdist.link import fd_passing
from psdist.off_loop import in_thread, off_loop
from psdist.types import DType
from psdist.wire.shm import GradientArena, reason_of


class ArenaUser(Protocol):
    """Handle with its gradients in an arena."""

    def on_pages_replaced(self) -> None:
        """Called before the pages at the arena's addresses are replaced or removed."""

    def on_detached(self) -> None:
        """Called before servers lose the arena. Attachments made with it must not be used any more."""


class OfferedArena:
    """Arena of ``elements`` gradients of ``dtype``, created when the first server is to share it."""

    def __init__(self, elements: int, dtype: DType) -> None:
        self.elements = elements
        self.dtype: DType = dtype
        self._users: list[ArenaUser] = []
        self._arena: GradientArena | None = None
        #: Number of times that its memory was returned to the system: a server may have seen holes.
        self.releases = 0
        #: Reason that there is no file, once creating one has failed.
        self.no_file = ""
        self._making = asyncio.Lock()
        self._is_detaching = False

    # --- users --------------------------------------------------------------------------------------------------------

    def join(self, user: ArenaUser) -> None:
        """Add a user of the arena."""
        self._users.append(user)

    async def leave(self, user: ArenaUser) -> None:
        """Remove a user whose last push has ended. The last user to leave ends the arena."""
        if self._users == [user]:
            await self.detach()
        self._users = [one for one in self._users if one is not user]

    def check_like(self, other: OfferedArena) -> None:
        """Raise InvalidArgumentError if gradients of ``other`` do not fit this arena."""
        if (self.elements, self.dtype) != (other.elements, other.dtype):
            raise InvalidArgumentError(
                f"{other.elements:,} gradients in {other.dtype} cannot take turns with {self.elements:,} in "
                f"{self.dtype}: sizes and dtypes on the wire must be the same"
            )

    # --- memory -------------------------------------------------------------------------------------------------------

    async def prepare(self) -> str:
        """Create the arena. Return why that is impossible; empty on success."""
        async with self._making:
            try:
                if self._arena is None:
                    fd_passing.sweep()
                    # In a thread, because clearing a large file takes longer than the heartbeat interval.
                    self._arena = await in_thread(partial(GradientArena.create, self.elements, self.dtype))
                elif self._arena.has_holes:
                    await in_thread(self._arena.fill)
            except OSError as error:
                return reason_of(error)
        return self.no_file

    async def share(self) -> None:
        """Create a new file after ``detach``. Nobody may write to the arena during the call."""
        async with self._making:
            if self._arena is not None and self.is_detached:
                self._pages_replaced()
                try:
                    await in_thread(self._arena.share)
                except OSError as error:
                    self.no_file = reason_of(error)

    @property
    def is_detached(self) -> bool:
        """True if there is no file until ``share`` is called."""
        if self._arena is None or self.no_file:
            return False
        return self._is_detaching or not self._arena.shareable

    def offer(self) -> GradientArena:
        """Return the arena, for sending its file to a server."""
        assert self._arena is not None
        return self._arena

    @property
    def gradients(self) -> NDArray[Any] | None:
        """Whole gradient vector if there is an arena and it is float32."""
        return self._arena.flat if self._arena is not None and self.elements and self.dtype == "float32" else None

    @property
    def is_shared(self) -> bool:
        """True if several handles take turns with it."""
        return len(self._users) > 1

    async def release(self) -> None:
        """Return the arena's memory to the system until it is written again. No push may be in progress."""
        if self._arena is not None:
            self.releases += 1
            self._pages_replaced()
            await off_loop(self.elements, self._arena.release)

    async def detach(self) -> None:
        """Leave the file to the servers that hold it. Anybody may write to the arena during the call."""
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

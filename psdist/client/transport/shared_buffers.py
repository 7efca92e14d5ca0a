"""Memory that one handle shares with servers on its host: its gradients, and all weights as one vector.

An ``OfferedArena`` holds the gradients of one handle, or of several that take turns with it. After a failed push, a
server may read the arena for as long as it likes. The arena is therefore detached from its file, and the memory becomes
private to this process with its content and addresses. It is shared again by a new file when the user is known not to
write to it: in the next push, or once all buckets of a step were given.

A ``WeightsView`` is one vector over the memory of several servers. It stays at its address, since the user may be
reading it. A shard that moved is mapped from the memory of its new primary, where the bytes are equal. A shard whose
primary shares no memory keeps its bytes.

``psdist.link.arenas`` implements the memory files, and ``shm`` knows which servers share memory.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

from numpy.typing import NDArray

from psdist.client.core.flat_vector import Flat
from psdist.errors import InvalidArgumentError
from psdist.link import fd_passing
from psdist.link.arenas import GradientArena, MappedVector, Piece, WeightsArena, reason_of
from psdist.off_loop import in_thread, off_loop
from psdist.types import DType, ParametersEntry, Replica

logger = logging.getLogger("psdist")

#: Arenas that the shards are to be mapped from, by shard; None keeps the bytes.
Moves = Mapping[int, WeightsArena | None]
#: Returns the weights arena of a server, or None if it shares none.
ArenaOf = Callable[[Replica], WeightsArena | None]


class ArenaUser(Protocol):
    """Handle with its gradients in an arena."""

    #: Called before the pages at the arena's addresses are replaced or removed.
    before_replaced: Callable[[], None]

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
        self._no_file = ""
        #: True if there is no file until ``share`` is called.
        self.is_detached = False
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
        return self._no_file

    async def share(self) -> None:
        """Create a new file after ``detach``. Nobody may write to the arena during the call."""
        async with self._making:
            if self._arena is not None and self.is_detached:
                self._pages_replaced()
                try:
                    await in_thread(self._arena.share)
                except OSError as error:
                    self._no_file = reason_of(error)
                self._note_file()

    def allow_file(self) -> None:
        """Let ``share`` try again to create a file, although that has failed."""
        self._no_file = ""
        self._note_file()

    def _note_file(self) -> None:
        """Update ``is_detached``. Called when something that it follows from has changed."""
        arena = self._arena
        has_file = arena is None or (arena.shareable and not self._is_detaching)
        self.is_detached = not has_file and not self._no_file

    @property
    def memory(self) -> GradientArena:
        """The arena itself, once ``prepare`` has created it."""
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
            self._note_file()
            async with self._making:
                self._pages_replaced()
                try:
                    await off_loop(self.elements, self._arena.detach)
                finally:
                    self._is_detaching = False
                    self._note_file()

    def _pages_replaced(self) -> None:
        for user in self._users:
            user.before_replaced()


class WeightsView:
    """Vector of all weights, and the origin of its parts."""

    def __init__(self) -> None:
        self._mapped: MappedVector | None = None
        #: Origin of each shard in the vector: the server and the nonce of its memory.
        self._shown: dict[int, tuple[Replica, bytes]] = {}
        #: False after the kernel refused a mapping: weights are copied from then on.
        self._works = True

    def vector(self, entry: ParametersEntry, arena_of: ArenaOf) -> Flat | None:
        """Return the vector, with each shard mapped from its primary in ``arena_of``, or None if that is
        impossible."""
        if self._mapped is None:
            self._mapped = MappedVector(entry.total)
            self.show(entry, self.moves(entry, arena_of, lambda server: True))
        return self._mapped.vector if self._works else None

    def show(self, entry: ParametersEntry, moved: Moves) -> None:
        """Map the shards of ``moves``. Runs in a thread, because it unmaps pages."""
        if self._mapped is None or not self._works:
            return
        slicing, count = entry.slicing, len(entry.shards)
        pieces = (
            Piece(slicing.bounds(index)[0], moved[index % count], slicing.size(index))
            for index in range(slicing.count)
            if index % count in moved
        )
        try:
            self._works = self._mapped.show(pieces)
        except OSError as error:
            logger.info("weights of %r are copied: %s", entry.spec.name, reason_of(error))
            self._works = False
        for number, arena in moved.items():
            if arena is not None:
                self._shown[number] = entry.shards[number].primary, arena.nonce

    def moves(
        self,
        entry: ParametersEntry,
        arena_of: ArenaOf,
        is_live: Callable[[Replica], bool],
    ) -> Moves:
        """Return the shards that must be mapped from other memory. They count as unmapped until ``show`` has ended.
        Empty before ``vector`` is called.

        Only a live server frees memory. The memory of a lost server lasts as long as it is mapped, so it is shown until
        the next primary shares memory.
        """
        moved: dict[int, WeightsArena | None] = {}
        for number, shard in enumerate(entry.shards if self._mapped is not None else ()):
            shown, arena = self._shown.get(number), arena_of(shard.primary)
            if arena is not None and shown != (shard.primary, arena.nonce):
                moved[number] = arena
            elif arena is None and shown is not None and shown[0] != shard.primary and is_live(shown[0]):
                moved[number] = None
            elif arena is not None or shown is None or shown[0] == shard.primary:
                continue
            self._shown.pop(number, None)
        return moved

    def shows(self, shard: int, arena: WeightsArena) -> bool:
        """True if the vector shows the shard from ``arena``."""
        shown = self._shown.get(shard)
        return self._works and shown is not None and shown[1] == arena.nonce

    def close(self) -> None:
        """Drop the vector. It is unmapped once the user drops its arrays, too."""
        self._mapped = None

"""All weights of a parameter set as one vector over the memory of its servers.

The vector, which the user may be reading, stays at its address. A shard that moved is shown in the memory of its new
primary, where the bytes are the same. A shard whose primary is not shared with is kept as it is.

Not here: which servers are shared with (``attachment``), how memory is mapped (``psdist.wire.shm``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from psdist.client.core.partition import Flat
from psdist.client.transport.shm.stream import SharedStream
from psdist.types import ParametersEntry, Replica
from psdist.wire.shm import MappedVector, Piece, WeightsArena, reason_of

logger = logging.getLogger("psdist")

#: By shard, the stream of the memory that it is to be shown in; None to keep the bytes.
Moves = Mapping[int, SharedStream | None]


class WeightsView:
    """The vector, and what it shows."""

    def __init__(self) -> None:
        self._mapped: MappedVector | None = None
        #: Whose memory the vector shows, by shard, and the nonce of that memory.
        self._shown: dict[int, tuple[Replica, bytes]] = {}
        #: False after the kernel refused a mapping: weights are copied from then on.
        self._works = True

    def vector(self, entry: ParametersEntry, stream_to: Callable[[Replica], SharedStream | None]) -> Flat | None:
        """The vector, which shows each shard where ``stream_to`` says that its primary is. None if that cannot be."""
        if self._mapped is None:
            self._mapped = MappedVector(entry.total)
            self.show(entry, self.moves(entry, stream_to, lambda server: True))
        return self._mapped.vector if self._works else None

    def show(self, entry: ParametersEntry, moved: Moves) -> None:
        """Show shards where ``moves`` says that they are. In a thread: pages that were shown are unmapped."""
        if self._mapped is None or not self._works:
            return
        slicing, count = entry.slicing, len(entry.shards)
        pieces = (
            Piece(slicing.bounds(index)[0], stream.weights if stream is not None else None, slicing.size(index))
            for index in range(slicing.count)
            if (number := index % count) in moved
            for stream in (moved[number],)
        )
        try:
            self._works = self._mapped.show(pieces)
        except OSError as error:
            logger.info("weights of %r are copied: %s", entry.spec.name, reason_of(error))
            self._works = False
        for number, stream in moved.items():
            if stream is not None:
                self._shown[number] = entry.shards[number].primary, stream.weights.nonce

    def moves(
        self,
        entry: ParametersEntry,
        stream_to: Callable[[Replica], SharedStream | None],
        is_live: Callable[[Replica], bool],
    ) -> Moves:
        """The shards that are to be shown in other memory. They count as not shown until ``show`` has ended. Returns
        nothing before ``vector`` was called.

        Only a live server gives memory back. That of one that is gone lasts as long as it is mapped, so it is shown
        until the next primary is shared with.
        """
        moved: dict[int, SharedStream | None] = {}
        for number, shard in enumerate(entry.shards if self._mapped is not None else ()):
            shown, stream = self._shown.get(number), stream_to(shard.primary)
            if stream is not None and shown != (shard.primary, stream.weights.nonce):
                moved[number] = stream
            elif stream is None and shown is not None and shown[0] != shard.primary and is_live(shown[0]):
                moved[number] = None
            elif stream is not None or shown is None or shown[0] == shard.primary:
                continue
            self._shown.pop(number, None)
        return moved

    def shows(self, shard: int, arena: WeightsArena) -> bool:
        """Whether the vector shows the shard as it is in ``arena``."""
        shown = self._shown.get(shard)
        return self._works and shown is not None and shown[1] == arena.nonce

    def close(self) -> None:
        """Lets go of the vector. It is unmapped when the user lets go of its arrays, too."""
        self._mapped = None

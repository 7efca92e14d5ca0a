"""All weights of a parameter set as one vector over the memory of its servers.

The vector stays at its address, since the user may be reading it. A shard that moved is mapped from the memory of its
new primary, where the bytes are equal. A shard whose primary shares no memory keeps its bytes.

``attachment`` knows which servers share memory, and ``psdist.wire.shm`` maps it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from psdist.client.core.flat_vector import Flat
from psdist.client.transport.shm.stream import SharedStream
from psdist.types import ParametersEntry, Replica
from psdist.wire.shm import MappedVector, Piece, WeightsArena, reason_of

logger = logging.getLogger("psdist")

#: Streams whose memory the shards are to be mapped from, by shard; None keeps the bytes.
Moves = Mapping[int, SharedStream | None]


class WeightsView:
    """Vector of all weights, and the origin of its parts."""

    def __init__(self) -> None:
        self._mapped: MappedVector | None = None
        #: Origin of each shard in the vector: the server and the nonce of its memory.
        self._shown: dict[int, tuple[Replica, bytes]] = {}
        #: False after the kernel refused a mapping: weights are copied from then on.
        self._works = True

    def vector(self, entry: ParametersEntry, stream_to: Callable[[Replica], SharedStream | None]) -> Flat | None:
        """Return the vector, with each shard mapped from its primary in ``stream_to``, or None if that is
        impossible."""
        if self._mapped is None:
            self._mapped = MappedVector(entry.total)
            self.show(entry, self.moves(entry, stream_to, lambda server: True))
        return self._mapped.vector if self._works else None

    def show(self, entry: ParametersEntry, moved: Moves) -> None:
        """Map the shards of ``moves``. Runs in a thread, because it unmaps pages."""
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
        """Return the shards that must be mapped from other memory. They count as unmapped until ``show`` has ended.
        Empty before ``vector`` is called.

        Only a live server frees memory. The memory of a lost server lasts as long as it is mapped, so it is shown until
        the next primary shares memory.
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
        """True if the vector shows the shard from ``arena``."""
        shown = self._shown.get(shard)
        return self._works and shown is not None and shown[1] == arena.nonce

    def close(self) -> None:
        """Drop the vector. It is unmapped once the user drops its arrays, too."""
        self._mapped = None

"""All weights of a parameter set as one vector over the memory of its servers.

The vector, which the user may be reading, stays at its address. A shard that moved is shown in the memory of its new
primary, where the bytes are the same. A shard whose primary is not shared with is kept as it is.

Not here: which servers are shared with (``attachment``), how memory is mapped (``psdist.wire.shm``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from psdist.client.core.partition import Flat
from psdist.client.transport.shm.stream import SharedStream
from psdist.types import ParametersEntry, Replica
from psdist.wire.shm import MappedVector, Piece, WeightsArena, reason_of

logger = logging.getLogger("psdist")


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
        self.update(entry, stream_to)
        return self._mapped.vector if self._works else None

    def update(self, entry: ParametersEntry, stream_to: Callable[[Replica], SharedStream | None]) -> None:
        """Shows each shard where it is now. Does nothing before ``vector`` was called."""
        if self._mapped is None:
            return
        slicing, count = entry.slicing, len(entry.shards)
        moved = self._moves(entry, stream_to)
        if not moved or not self._works:
            return
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

    def _moves(
        self, entry: ParametersEntry, stream_to: Callable[[Replica], SharedStream | None]
    ) -> dict[int, SharedStream | None]:
        """The shards that are to be shown in other memory, and the stream of that memory; None to keep the bytes."""
        moved: dict[int, SharedStream | None] = {}
        for number, shard in enumerate(entry.shards):
            shown, stream = self._shown.get(number), stream_to(shard.primary)
            if stream is not None and shown != (shard.primary, stream.weights.nonce):
                moved[number] = stream
                self._shown[number] = shard.primary, stream.weights.nonce
            elif stream is None and shown is not None and shown[0] != shard.primary:
                moved[number] = None
                del self._shown[number]
        return moved

    def shows(self, shard: int, arena: WeightsArena) -> bool:
        """Whether the vector shows the shard as it is in ``arena``."""
        shown = self._shown.get(shard)
        return self._works and shown is not None and shown[1] == arena.nonce

    def close(self) -> None:
        """Lets go of the vector. It is unmapped when the user lets go of its arrays, too."""
        self._mapped = None

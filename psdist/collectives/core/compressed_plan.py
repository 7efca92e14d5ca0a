"""All-reduce of encoded contributions, slice by slice.

Each rank encodes its contribution once. Contributions to a slice are decoded and added to zeros in rank order, as on a
server. Either every rank does so for all slices, or each slice has an owner, which encodes the result again and sends
it to the others. All ranks decode the same bytes.

Invariants: Each slice of each rank is received once. Nothing is decoded before it was checked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from psdist.collectives.core.header import Header
from psdist.collectives.core.plan import Bytes, Outgoing, Plan
from psdist.collectives.core.reductions import QUIET
from psdist.compression import segments
from psdist.errors import InvalidArgumentError
from psdist.types import Slicing

Floats = NDArray[np.float32]
#: Encodes the result of a slice, which is in its place, by its number.
EncodeResult = Callable[[int], bytes]

#: Elements of a slice, whose payload is at most one part.
SLICE_ELEMENTS: Final = 1 << 17


class CompressedPlan(Plan):
    """All-reduce of encoded float32 arrays. Part 2 i is a contribution to slice i, part 2 i + 1 its result.

    call: the header, without sizes.
    payloads: this rank's contribution, by slice.
    out: memory for the result, float32[n].
    divisor: the number that the sum is divided by.
    encode_result: None if every rank adds up all slices.
    """

    def __init__(
        self,
        call: Header,
        rank: int,
        peers: Sequence[int],
        payloads: Sequence[Bytes],
        out: Floats,
        *,
        divisor: int = 1,
        encode_result: EncodeResult | None = None,
    ) -> None:
        self._ranks = sorted((rank, *peers))
        self._rank = rank
        self._payloads = payloads
        self._out = out
        self._divisor = divisor
        self._encode_result = encode_result
        self._slicing = Slicing(out.size, SLICE_ELEMENTS)
        #: By slice, the contributions that have arrived, by rank.
        self._arrived: dict[int, dict[int, Bytes]] = {}
        #: Bytes of the part that was checked last, and parts that are being received.
        self._checked = 0
        self._received: dict[tuple[int, int], Bytes] = {}
        super().__init__(call, peers, {}, {})

    def _owner(self, index: int) -> int:
        return self._ranks[index % len(self._ranks)]

    def _slices_for(self, rank: int) -> Iterable[int]:
        """Return the slices that a rank adds up."""
        slices = range(self._slicing.count)
        return slices if self._encode_result is None else (i for i in slices if self._owner(i) == rank)

    def _expected(self, peer: int) -> set[int]:
        expected = {2 * index for index in self._slices_for(self._rank)}
        if self._encode_result is not None:
            expected |= {2 * index + 1 for index in self._slices_for(peer)}
        return expected

    def initial(self, peer: int) -> Iterable[Outgoing]:
        return [Outgoing(peer, 2 * index, self._payloads[index]) for index in self._slices_for(peer)]

    def check(self, peer: int, part: int, size: int) -> None:
        if part not in self.missing[peer] or not 0 < size <= segments.payload_limit(self._slicing.size(part // 2)):
            raise InvalidArgumentError(f"rank {peer} sent an unexpected part {part} of {size} bytes of {self.call}")
        self._checked = size

    def place(self, peer: int, part: int) -> Bytes:
        memory = self._received[peer, part] = np.empty(self._checked, np.uint8)
        return memory

    def start(self) -> None:
        if not self.peers:
            for index in range(self._slicing.count):
                self._decode(index, [self._payloads[index]], self._divisor)

    def received(self, peer: int, part: int) -> Iterable[Outgoing]:
        super().received(peer, part)
        index, payload = part // 2, self._received.pop((peer, part))
        segments.check(payload, self._slicing.size(index))
        if part % 2:
            self._decode(index, [payload])
            return ()
        arrived = self._arrived.setdefault(index, {self._rank: self._payloads[index]})
        arrived[peer] = payload
        if len(arrived) < len(self._ranks):
            return ()
        del self._arrived[index]
        return self._add_up(index, [arrived[rank] for rank in self._ranks])

    def _add_up(self, index: int, payloads: Sequence[Bytes]) -> Iterable[Outgoing]:
        self._decode(index, payloads, self._divisor)
        if self._encode_result is None:
            return ()
        encoded = np.frombuffer(self._encode_result(index), np.uint8)
        self._decode(index, [encoded])
        return [Outgoing(peer, 2 * index + 1, encoded) for peer in self.peers]

    @QUIET
    def _decode(self, index: int, payloads: Sequence[Bytes], divisor: int = 1) -> None:
        """Write the sum of encoded values, divided, to a slice of the result."""
        out = self._out[slice(*self._slicing.bounds(index))]
        out.fill(0.0)
        for payload in payloads:
            segments.accumulate(payload, out)
        if divisor != 1:
            np.true_divide(out, divisor, out=out)

"""``compression="auto"``: choose the codec with the shortest pushes, given the speed of links and encoder. Pure.

The candidates are those that train as well as float32 (docs/compression-results.md): none, Int8 and Int4, with error
feedback. Sparse codecs delay part of the gradient for longer, so they are left to the user.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from psdist.compression.regions import regions
from psdist.compression.specifications import Codec, Compressor, Float32, Int4, Int8
from psdist.types import Layout

#: Bytes per element of each candidate: its bits, plus one float32 scale per block.
CANDIDATES: Final[Mapping[Codec, float]] = {codec: codec.bits / 8 + 4 / codec.block for codec in (Int8(), Int4())}
#: Assumed encoder speed, in bytes of float32 input per second, for a codec that was not measured.
USUAL_SPEED: Final = 4e9
#: Smallest relative saving in push time for which a codec is used.
_GAIN: Final = 0.1
#: Below this many elements a push is short in any case.
_SMALL_ELEMENTS: Final = 1 << 16


class Choice(NamedTuple):
    """Chosen codec, and the reason in words."""

    codec: Codec
    reason: str


def compressed_elements(layout: Layout) -> int:
    """Return the number of elements in tensors that a codec would compress. Vectors and small tensors are excluded."""
    found = regions(layout.tensors, Int8())
    return sum(region.size for region in found if isinstance(region.codec, Compressor))


def choose(layout: Layout, remote: float, link: float, speeds: Mapping[Codec, float]) -> Choice:
    """Return the codec for gradients of ``layout``.

    remote: fraction of the elements that does not stay on this host.
    link: bytes per second that this worker can send to servers on other hosts, in total.
    speeds: measured encoder speed per codec, in bytes of float32 input per second.
    """
    total, compressed = layout.total, compressed_elements(layout)
    if not remote:
        return Choice(Float32(), "none: all servers share memory with this worker")
    if compressed < _SMALL_ELEMENTS:
        return Choice(Float32(), f"none: only {compressed} elements are in tensors that could be compressed")
    plain = 4 * total * remote / link
    found = {
        codec: 4 * total / speeds.get(codec, USUAL_SPEED)
        + (4 * (total - compressed) + bytes_each * compressed) * remote / link
        for codec, bytes_each in CANDIDATES.items()
    }
    codec = min(found, key=lambda one: found[one])
    about = f"a push takes {1e3 * plain:.1f} ms in float32 at {link / 1e6:,.0f} MB/s, and {1e3 * found[codec]:.1f} ms"
    if found[codec] > (1 - _GAIN) * plain:
        return Choice(Float32(), f"none: {about} by {type(codec).__name__}")
    return Choice(codec, f"{type(codec).__name__}: {about} by it")

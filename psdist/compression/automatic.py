"""``compression="auto"``: which codec makes pushes fastest, by the speed of the links and of encoding. Pure.

It chooses among codecs with which training goes as without (docs/compression.md): none, Int8 and Int4, with error
feedback. What is left out for longer, as by sparse codecs, is for the user to decide.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from psdist.compression.regions import regions
from psdist.compression.specifications import Codec, Compressor, Float32, Int4, Int8
from psdist.types import Layout

#: By codec, bytes of an element: its bits, and a float32 for each block.
CANDIDATES: Final[Mapping[Codec, float]] = {codec: codec.bits / 8 + 4 / codec.block for codec in (Int8(), Int4())}
#: Float32 input that a codec encodes in a second, in bytes, where that was not measured.
USUAL_SPEED: Final = 4e9
#: A codec must make pushes at least so much shorter.
_GAIN: Final = 0.1
#: Fewer elements are pushed in a moment in any case.
_SMALL_ELEMENTS: Final = 1 << 16


class Choice(NamedTuple):
    """A codec, and why it is used."""

    codec: Codec
    reason: str


def compressed_elements(layout: Layout) -> int:
    """Elements of the tensors that a codec would compress: not of vectors and small ones."""
    found = regions(layout.tensors, Int8())
    return sum(region.size for region in found if isinstance(region.codec, Compressor))


def choose(layout: Layout, remote: float, link: float, speeds: Mapping[Codec, float]) -> Choice:
    """The codec for gradients of ``layout``.

    remote: the part of the elements that does not stay on this host. link: bytes per second that this worker can send
    to servers of other hosts, all together. speeds: by codec, bytes of float32 per second that it encodes.
    """
    total, compressed = layout.total, compressed_elements(layout)
    if not remote:
        return Choice(Float32(), "none: all servers share memory with this worker")
    if compressed < _SMALL_ELEMENTS:
        return Choice(Float32(), f"none: no more than {compressed} elements are in tensors that could be compressed")
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

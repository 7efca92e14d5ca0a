"""Assignment of codecs to tensors, by the user or automatically, and the division of the flat vector by codec. Pure.

A region is a range of the flat vector with one codec. A compressed tensor is a region of its own; adjacent
uncompressed tensors form one region.

``compression="auto"`` chooses the codec with the shortest pushes, given the speed of links and encoder, among those
that train as well as float32 (docs/internals/compression-results.md): none, Int8 and Int4, with error feedback. Sparse
codecs delay part of the gradient for longer, so they are left to the user.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Final, NamedTuple

from psdist.compression.specifications import Auto, Cast, Codec, Compressor, Float32, Int4, Int8
from psdist.errors import InvalidArgumentError, check_integer
from psdist.types import Layout, TensorSpec

#: Smallest tensor that is ever compressed. The limit on payload bytes follows from it.
MIN_ELEMENTS: Final = 64
_ELEMENTS_LAST: Final = 2**62
#: Bytes per element of each candidate: its bits, plus one float32 scale per block.
CANDIDATES: Final[Mapping[Codec, float]] = {codec: codec.bits / 8 + 4 / codec.block for codec in (Int8(), Int4())}
#: Assumed encoder speed, in bytes of float32 input per second, for a codec that was not measured.
USUAL_SPEED: Final = 4e9
#: Smallest relative saving in push time for which a codec is used.
_GAIN: Final = 0.1
#: Below this many elements a push is short in any case.
_SMALL_ELEMENTS: Final = 1 << 16


@dataclass(frozen=True)
class PerTensor(Codec):
    """Codec for each tensor, chosen by name.

    codecs: shell-style patterns (``fnmatch``, case-sensitive) to codecs. The first match counts; a tensor without a
    match stays float32.
    min_elements: tensors with fewer elements stay float32. At least 64.
    min_vector: one-dimensional tensors with fewer elements, such as biases and norms, stay float32. At least 64.
    Raises InvalidArgumentError, also for a nested PerTensor or Auto.
    """

    codecs: Mapping[str, Codec]
    min_elements: int = 1024
    min_vector: int = 65536

    def __post_init__(self) -> None:
        if not isinstance(self.codecs, Mapping):
            raise InvalidArgumentError(f"codecs={self.codecs!r:.60}: use a mapping of patterns to codecs")
        for pattern, codec in self.codecs.items():
            if not isinstance(pattern, str) or not isinstance(codec, Codec) or isinstance(codec, PerTensor | Auto):
                raise InvalidArgumentError(f"codecs: {pattern!r:.60}: {codec!r:.60} is not a pattern and a codec")
        check_integer("min_elements", self.min_elements, MIN_ELEMENTS, _ELEMENTS_LAST)
        check_integer("min_vector", self.min_vector, MIN_ELEMENTS, _ELEMENTS_LAST)
        object.__setattr__(self, "codecs", MappingProxyType(dict(self.codecs)))

    def __eq__(self, other: object) -> bool:
        """Compare patterns in order: the first match counts."""
        return isinstance(other, PerTensor) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def _key(self) -> tuple[object, ...]:
        return tuple(self.codecs.items()), self.min_elements, self.min_vector

    def __reduce__(self) -> tuple[type[PerTensor], tuple[dict[str, Codec], int, int]]:
        """Support copying and pickling: a read-only view of a mapping supports neither."""
        return PerTensor, (dict(self.codecs), self.min_elements, self.min_vector)

    def codec_of(self, tensor: TensorSpec) -> Codec:
        """Return the codec of a tensor."""
        smallest = self.min_vector if len(tensor.shape) <= 1 else self.min_elements
        if tensor.size < max(smallest, self.min_elements):
            return Float32()
        return next((codec for pattern, codec in self.codecs.items() if fnmatchcase(tensor.name, pattern)), Float32())

    def unmatched(self, tensors: Iterable[TensorSpec]) -> tuple[str, ...]:
        """Return the patterns that match no tensor's name."""
        names = [tensor.name for tensor in tensors]
        return tuple(one for one in self.codecs if not any(fnmatchcase(name, one) for name in names))


def send_differences(codecs: Iterable[Codec]) -> bool:
    """True if a push with these codecs sends differences to an estimate (EF21)."""
    return any(isinstance(codec, Compressor) and codec.feedback == "ef21" for codec in codecs)


@dataclass(frozen=True)
class Region:
    """Elements [start, stop) of the flat vector that share one codec.

    shape: shape of the tensor; of a vector if the region joins several tensors.
    """

    start: int
    stop: int
    codec: Codec
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.stop - self.start


def regions(tensors: Iterable[TensorSpec], codec: Codec) -> tuple[Region, ...]:
    """Divide the flat vector into regions, in order.

    codec: a PerTensor, or any other codec, which then applies to all tensors with PerTensor's default thresholds.
    """
    policy = codec if isinstance(codec, PerTensor) else PerTensor({"*": codec})
    found: list[Region] = []
    at = 0
    for tensor in tensors:
        if not tensor.size:
            continue
        region = Region(at, at + tensor.size, policy.codec_of(tensor), tuple(tensor.shape))
        if found and isinstance(region.codec, Cast) and found[-1].codec == region.codec:
            start = found.pop().start
            region = Region(start, region.stop, region.codec, (region.stop - start,))
        found.append(region)
        at += tensor.size
    return tuple(found)


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

"""Which codec each tensor has, and the flat vector cut into regions by it.

A region is a range of the flat vector with one codec. A tensor that is compressed is a region of its own; adjacent
tensors that are not are one region. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Final

from psdist.compression.specifications import Auto, Cast, Codec, Compressor, Float32
from psdist.errors import InvalidArgumentError, check_integer
from psdist.types import TensorSpec

#: Less is never compressed: the limit of a payload's bytes follows from it.
MIN_ELEMENTS: Final = 64
_ELEMENTS_LAST: Final = 2**62


@dataclass(frozen=True)
class PerTensor(Codec):
    """A codec for each tensor: that of the first pattern which matches its name (shell style), else none.

    min_elements: smaller tensors stay float32.
    min_vector: smaller tensors of one dimension, such as biases and norms, stay float32.
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
        """The first pattern that matches counts, so their order does."""
        return isinstance(other, PerTensor) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def _key(self) -> tuple[object, ...]:
        return tuple(self.codecs.items()), self.min_elements, self.min_vector

    def __reduce__(self) -> tuple[type[PerTensor], tuple[dict[str, Codec], int, int]]:
        """For copies and other processes: a read-only view of a mapping has neither."""
        return PerTensor, (dict(self.codecs), self.min_elements, self.min_vector)

    def codec_of(self, tensor: TensorSpec) -> Codec:
        """The codec of a tensor."""
        smallest = self.min_vector if len(tensor.shape) <= 1 else self.min_elements
        if tensor.size < max(smallest, self.min_elements):
            return Float32()
        return next((codec for pattern, codec in self.codecs.items() if fnmatchcase(tensor.name, pattern)), Float32())

    def unmatched(self, tensors: Iterable[TensorSpec]) -> tuple[str, ...]:
        """The patterns that match no tensor's name."""
        names = [tensor.name for tensor in tensors]
        return tuple(one for one in self.codecs if not any(fnmatchcase(name, one) for name in names))


def send_differences(codecs: Iterable[Codec]) -> bool:
    """Whether a push by these codecs is a difference to an estimate (EF21)."""
    return any(isinstance(codec, Compressor) and codec.feedback == "ef21" for codec in codecs)


@dataclass(frozen=True)
class Region:
    """Elements [start, stop) of the flat vector, which have one codec.

    shape: of the tensor; that of a vector where the region is made of several.
    """

    start: int
    stop: int
    codec: Codec
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of elements."""
        return self.stop - self.start


def regions(tensors: Iterable[TensorSpec], codec: Codec) -> tuple[Region, ...]:
    """The flat vector in regions, in order. A codec that is no PerTensor holds for all tensors, with its defaults."""
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

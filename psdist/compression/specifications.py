"""Codecs as specifications, their assignment to tensors, and the division of the flat vector by codec. Pure.

A ``Cast`` encodes a whole gradient. A ``Compressor`` encodes one tensor at a time, in segments
(``psdist.compression.segments``), and may use error feedback: the part that one push leaves out (the residual) is
added to the next one.

A region is a range of the flat vector with one codec. A compressed tensor is a region of its own; adjacent
uncompressed tensors form one region.

``compression="auto"`` chooses the codec with the shortest pushes, given the speed of links and encoder, among those
that train as well as float32 (docs/internals/compression-results.md): none, Int8 and Int4, with error feedback. Sparse
codecs delay part of the gradient for longer, so they are left to the user.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, NamedTuple

from psdist.errors import InvalidArgumentError, LimitExceededError, UnknownCodecError, check_integer
from psdist.types import DType, Layout, TensorSpec

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

ErrorFeedback = bool | Literal["ef21"]

_SEED_LAST = 2**63 - 1
_BLOCK_LAST = 65536
_WARM_UP_RATIO = 0.25
#: A momentum of 1 would never forget anything.
_MOMENTUM_LAST = 0.9999


@dataclass(frozen=True)
class Codec:
    """Encoding of gradients on the wire. Abstract."""


@dataclass(frozen=True)
class Cast(Codec):
    """Codec that casts the elements to ``dtype``, in order (CODEC_RAW on the wire). Abstract."""

    dtype: ClassVar[DType]

    def encode(self, values: NDArray[np.float32], out: NDArray[Any] | None = None) -> NDArray[Any]:
        """Return the elements in the wire's dtype.

        The result is ``values`` itself if no cast is needed, else ``out`` or a new array.

        values: float32[n], contiguous.
        out: contiguous, of the wire's dtype, shape [n].
        Raises DTypeMismatchError and ShapeMismatchError.
        """
        if self.dtype == "float32":
            return values
        from psdist.compression import casts  # The scheduler knows codecs, and casts nothing: it needs no numpy.

        casts.interpret_first()
        out = casts.empty(values.size, self.dtype) if out is None else out
        casts.narrow(values, out)
        return out


@dataclass(frozen=True)
class Float32(Cast):
    """No compression: gradients as float32."""

    dtype: ClassVar[DType] = "float32"


@dataclass(frozen=True)
class Float16(Cast):
    """Gradients as IEEE float16: half the bytes, 5 exponent bits.

    Gradients beyond 65,504 overflow to Inf, which the server rejects (NonFiniteGradientError).
    """

    dtype: ClassVar[DType] = "float16"


@dataclass(frozen=True)
class BFloat16(Cast):
    """Gradients as bfloat16: half the bytes, the range of float32, 8 bits of precision."""

    dtype: ClassVar[DType] = "bfloat16"


@dataclass(frozen=True)
class Auto(Codec):
    """Automatic choice among the codecs that train as well as float32 (``client.automatic_compression``).

    It is made when the parameters are opened, from the speed of the links and of the encoder: the codec with the
    shortest pushes wins.
    """


@dataclass(frozen=True)
class Compressor(Codec):
    """Codec that encodes each tensor separately. Abstract.

    error_feedback: treatment of the part of a gradient that a push leaves out, the residual.
    - True: add the residual to the next push (Seide et al., 2014; Karimireddy et al., arXiv 1901.09847).
    - False: discard it.
    - "ef21": encode the difference between the gradient and an estimate that the worker and the servers both hold. The
      updated estimate takes the gradient's place (EF21, Richtarik et al., arXiv 2106.05203). Servers store one float32
      estimate per worker. All codecs of a parameter set use "ef21", or none does.
    - None: True for a biased codec, else False.
    residual_decay: factor in (0, 1] applied to the residual before it is added. Needs ``error_feedback=True``.
    Raises InvalidArgumentError for a bad value.
    """

    error_feedback: ErrorFeedback | None = field(default=None, kw_only=True)
    residual_decay: float = field(default=1.0, kw_only=True)

    def __post_init__(self) -> None:
        given: object = self.error_feedback
        if not (given is None or isinstance(given, bool) or (isinstance(given, str) and given == "ef21")):
            raise InvalidArgumentError(f'error_feedback={self.error_feedback!r:.40}: use True, False, "ef21" or None')
        check_number("residual_decay", self.residual_decay, 0.0, 1.0)
        if self.residual_decay != 1.0 and self.feedback is not True:
            raise InvalidArgumentError(
                f"residual_decay={self.residual_decay!r:.40} needs error feedback that has a residual: "
                "error_feedback=True"
            )

    @property
    def is_biased(self) -> bool:
        """True if the mean of the decoded values differs from the encoded value."""
        return True

    @property
    def feedback(self) -> ErrorFeedback:
        """The error feedback in effect: True, False or "ef21"."""
        return self.is_biased if self.error_feedback is None else self.error_feedback


@dataclass(frozen=True)
class Integers(Compressor):
    """Codec that rounds to ``bits``-bit integers times a scale per block of a tensor. Abstract.

    scale = max |x| / (2^(bits - 1) - 1) over the block; code = round(x / scale), ties to even.

    block: elements per float32 scale, 16 to 65,536.
    stochastic: round up or down at random so that the mean is unbiased (QSGD, Alistarh et al., arXiv 1610.02132).
    seed: seed of the random rounding, 0 to 2^63 - 1.
    """

    bits: ClassVar[int]
    block: int = 256
    stochastic: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("block", self.block, 16, _BLOCK_LAST)
        check_integer("seed", self.seed, 0, _SEED_LAST)
        if not isinstance(self.stochastic, bool):
            raise InvalidArgumentError(f"stochastic={self.stochastic!r:.40}: use True or False")

    @property
    def is_biased(self) -> bool:
        """False with random rounding, which is unbiased."""
        return not self.stochastic


@dataclass(frozen=True)
class Int8(Integers):
    """Integers from -127 to 127 times the block's scale: a quarter of the bytes of float32."""

    bits: ClassVar[int] = 8


@dataclass(frozen=True)
class Int4(Integers):
    """Integers from -7 to 7 times the block's scale: an eighth of the bytes of float32."""

    bits: ClassVar[int] = 4
    block: int = 128


@dataclass(frozen=True)
class Int2(Integers):
    """-1, 0 or 1 times the block's largest magnitude: a sixteenth of the bytes of float32, plus scales."""

    bits: ClassVar[int] = 2
    block: int = 64


@dataclass(frozen=True)
class TopK(Compressor):
    """The ``ratio`` of a tensor's elements with the largest magnitude, as float32.

    ratio: in (0, 1]. At least one element is sent.
    warm_up: number of a worker's pushes over which the ratio falls geometrically from 0.25. A run that resumes from a
        snapshot counts the pushes before it, whatever their codec.
    momentum: momentum correction of deep gradient compression (Lin et al., arXiv 1712.01887). The worker accumulates
        its gradients as u = momentum * u + g and selects from u plus the residual; u is reset to 0 for sent elements.
        In [0, 0.9999]; 0 turns it off. Needs ``error_feedback=True``.
    """

    ratio: float = 0.01
    momentum: float = 0.0
    warm_up: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("ratio", self.ratio, 0.0, 1.0)
        check_integer("warm_up", self.warm_up, 0, _SEED_LAST)
        if self.momentum != 0.0:
            check_number("momentum", self.momentum, 0.0, _MOMENTUM_LAST)
            check_momentum(self, self)

    def ratio_at(self, ordinal: int) -> float:
        """Return the ratio for push number ``ordinal``, counted from 0."""
        if ordinal >= self.warm_up or self.ratio >= _WARM_UP_RATIO:
            return self.ratio
        return float(_WARM_UP_RATIO * (self.ratio / _WARM_UP_RATIO) ** (ordinal / self.warm_up))


@dataclass(frozen=True)
class ChunkedTopK(Compressor):
    """The ``k`` elements with the largest magnitude in each ``chunk`` elements of a tensor.

    k: 1 to ``chunk``. A shorter last chunk sends its proportional share.
    chunk: 16 to 65,536.
    bits: width of the values. 32: float32. 16: bfloat16. 8: integers times the chunk's scale. 2: sign, and one bit
        that selects the chunk's scale or twice the scale.
    """

    k: int = 64
    chunk: int = 4096
    bits: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("chunk", self.chunk, 16, _BLOCK_LAST)
        check_integer("k", self.k, 1, self.chunk)
        if self.bits not in (32, 16, 8, 2):
            raise InvalidArgumentError(f"bits={self.bits!r:.40}: use 32, 16, 8 or 2")


@dataclass(frozen=True)
class RandomK(Compressor):
    """One element out of every 1 / ``ratio`` of a tensor, at a random position drawn for each push.

    Both sides derive the positions from a key, so they are not sent. Without error feedback the values are divided by
    the ratio, which makes their mean unbiased.

    ratio: in (0, 1]; 1 / ratio is at most 65,536.
    seed: seed of the positions, 0 to 2^63 - 1.
    """

    ratio: float = 0.01
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("ratio", self.ratio, 0.0, 1.0)
        check_integer("1 / ratio", self.period, 1, _BLOCK_LAST)
        check_integer("seed", self.seed, 0, _SEED_LAST)

    @property
    def period(self) -> int:
        """One element out of this many is sent."""
        return round(min(1.0 / self.ratio, 2.0**31))  # 1 / ratio may be infinite.


@dataclass(frozen=True)
class OneBit(Compressor):
    """Signs, times the mean magnitude of each ``block`` elements of a tensor.

    This is the scaled sign of Karimireddy et al. (arXiv 1901.09847), block by block.

    block: elements per float32 scale, 16 to 65,536.
    """

    block: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("block", self.block, 16, _BLOCK_LAST)


@dataclass(frozen=True)
class PowerSGD(Compressor):
    """Low-rank approximation of matrices (PowerSGD, Vogels et al., arXiv 1905.13727).

    Each push makes one step of power iteration and sends P (rows x rank) and Q (rank x columns), with P Q near the
    gradient. A tensor of more than two dimensions is reshaped to a matrix with its first dimension as rows. A tensor
    that would not shrink is sent as float32.

    rank: columns of P, 1 to 255.
    seed: seed of the initial Q, 0 to 2^63 - 1.
    """

    rank: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("rank", self.rank, 1, 255)
        check_integer("seed", self.seed, 0, _SEED_LAST)


@dataclass(frozen=True)
class Chain(Compressor):
    """Sparse codec whose values are encoded by a second codec.

    sparse: TopK, ChunkedTopK with ``bits=32``, or RandomK; it selects the elements. Its own error_feedback and
        residual_decay stay unset: they are arguments of the chain.
    values: BFloat16(), Int8() or Int2() with default arguments; only BFloat16() with RandomK.
    chunk: elements of the tensor, sent or not, per scale of the values. ChunkedTopK uses its own chunk instead.
    Raises InvalidArgumentError for any other combination.
    """

    sparse: TopK | ChunkedTopK | RandomK
    values: Codec
    chunk: int = 4096

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("chunk", self.chunk, 16, _BLOCK_LAST)
        if not isinstance(self.sparse, TopK | ChunkedTopK | RandomK):
            raise InvalidArgumentError(f"sparse={self.sparse!r:.60}: use TopK, ChunkedTopK or RandomK")
        if isinstance(self.sparse, RandomK) and type(self.values) is not BFloat16:
            raise InvalidArgumentError(f"values={self.values!r:.60}: use BFloat16() with RandomK")
        if type(self.values) not in _VALUE_BITS or self.values != type(self.values)():
            raise InvalidArgumentError(f"values={self.values!r:.60}: use plain BFloat16(), Int8() or Int2()")
        if self.sparse.error_feedback is not None or self.sparse.residual_decay != 1.0:
            raise InvalidArgumentError(f"sparse={self.sparse!r:.60}: error_feedback and residual_decay are the chain's")
        if isinstance(self.sparse, ChunkedTopK) and self.sparse.bits != 32:
            raise InvalidArgumentError(f"bits={self.sparse.bits} of a ChunkedTopK in a chain: leave it out")
        if isinstance(self.sparse, TopK):
            check_momentum(self.sparse, self)

    @property
    def bits(self) -> int:
        """Width of each value in bits."""
        return _VALUE_BITS[type(self.values)]


_VALUE_BITS: dict[type[Codec], int] = {BFloat16: 16, Int8: 8, Int2: 2}


def check_momentum(sparse: TopK, whole: Compressor) -> None:
    """Check that ``whole``, the codec that contains ``sparse``, has a residual if ``sparse`` has momentum.

    Raises InvalidArgumentError otherwise: there would be nothing to accumulate.
    """
    if sparse.momentum and whole.feedback is not True:
        raise InvalidArgumentError(
            f"momentum={sparse.momentum!r:.40} accumulates what is not sent yet, which needs error_feedback=True"
        )


def check_number(name: str, value: object, low: float, high: float) -> None:
    """Raise InvalidArgumentError unless ``value`` is a number in (low, high]."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not low < value <= high or math.isnan(value):
        raise InvalidArgumentError(f"{name}={value!r:.40} is out of range: use a number above {low:g}, up to {high:g}")


# --- weights on their way to workers: ``pull_compression``, and its text in settings ----------------------------------

# Such a codec encodes the difference between a slice's weights and the copy that workers hold. It treats the slice as
# one vector, regardless of tensor boundaries, so that servers need not know the tensors.

PULL_CODECS: Final[dict[str, type[Compressor]]] = {
    one.__name__: one for one in (Int8, Int4, Int2, OneBit, TopK, ChunkedTopK, RandomK)
}
_PULL_NAMES: Final = ", ".join(PULL_CODECS)
#: Longest accepted text. A codec with all its arguments takes less than half of it.
_TEXT_LENGTH: Final = 256
_CALL: Final = re.compile(r"([A-Za-z0-9]+)\((.*)\)")
_ARGUMENT: Final = re.compile(r"([a-z_]+)=(True|False|[-+0-9.e]+)")


def check_pull_codec(codec: Codec) -> Compressor:
    """Return ``codec`` if it can encode weights.

    Raises UnknownCodecError for another kind of codec, and InvalidArgumentError for an argument that makes no sense
    for weights.
    """
    if type(codec) not in PULL_CODECS.values() or not isinstance(codec, Compressor):
        hint = ": pull_dtype sends weights in 16 bits" if "16" in type(codec).__name__ else ""
        raise UnknownCodecError(f"pull_compression={codec!r:.60} cannot send weights: use one of {_PULL_NAMES}{hint}")
    if codec.error_feedback is not None or codec.residual_decay != 1.0:
        raise InvalidArgumentError(
            f"pull_compression={codec!r:.100}: leave out error_feedback and residual_decay. The part of a difference "
            "that is not sent is always in the next one"
        )
    if isinstance(codec, TopK) and (codec.momentum or codec.warm_up):
        raise InvalidArgumentError(f"pull_compression={codec!r:.100}: momentum and warm_up are for gradients only")
    return codec


def pull_codec_to_text(codec: Codec) -> str:
    """Return the text that ``pull_codec_from_text`` parses: the constructor call, with all applicable arguments."""
    given = check_pull_codec(codec)
    values = {field.name: getattr(given, field.name) for field in fields(given)}
    used = [f"{name}={value!r}" for name, value in values.items() if name not in ("error_feedback", "residual_decay")]
    return f"{type(given).__name__}({', '.join(used)})"


def pull_codec_from_text(text: str) -> Compressor:
    """Return the codec that ``text`` describes.

    Raises UnknownCodecError for an unknown codec, InvalidArgumentError for an unknown argument or a bad value, and
    LimitExceededError for a text that is too long.
    """
    if len(text) > _TEXT_LENGTH:
        raise LimitExceededError(
            f"pull_compression {text!r:.60}... has {len(text)} characters (at most {_TEXT_LENGTH}): use one of "
            f"{_PULL_NAMES}"
        )
    call = _CALL.fullmatch(text)
    kind = PULL_CODECS.get(call[1]) if call is not None else None
    if call is None or kind is None:
        raise UnknownCodecError(f"pull_compression {text!r:.60} is unknown: use one of {_PULL_NAMES}")
    arguments: dict[str, Any] = {}
    for part in call[2].split(", ") if call[2] else ():
        one = _ARGUMENT.fullmatch(part)
        if one is None or one[1] not in (field.name for field in fields(kind)):
            raise InvalidArgumentError(f"pull_compression {text!r:.100}: {part!r:.60} is not an argument of {call[1]}")
        arguments[one[1]] = _parsed(one[2])
    return check_pull_codec(kind(**arguments))


def _parsed(text: str) -> bool | int | float:
    if text in ("True", "False"):
        return text == "True"
    try:
        return float(text) if any(mark in text for mark in ".e") else int(text)
    except ValueError:
        raise InvalidArgumentError(f"{text!r:.60} is not a number") from None


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

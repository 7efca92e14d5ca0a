"""Training steps of psdist, as the benchmarks make them: a parameter set of a given size, with gradients that exist
before the clock starts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from psdist import optim
from psdist.consistency import ASP, BSP, SSP, Consistency
from psdist.errors import InvalidArgumentError
from psdist.types import WIRE_DTYPES, DType

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from psdist import Client
    from psdist.compression import Codec

#: Default number of elements of one tensor.
LAYER_ELEMENTS: Final = 1 << 20
#: Characters that names must not have.
_PUNCTUATION = re.compile(r"[^A-Za-z0-9.]+")
#: Columns of a tensor, at most: codecs do not encode vectors, so the tensors are matrices.
_COLUMNS: Final = 1024
#: Steps before the clock starts: the first ones touch new memory, compile kernels, and attach shared memory.
WARM_STEPS: Final = 3

CONSISTENCIES: Final[dict[str, Consistency]] = {"bsp": BSP(), "ssp": SSP(staleness=2), "asp": ASP()}
OPTIMIZERS: Final[dict[str, optim.Optimizer]] = {
    "adam": optim.Adam(),
    "adamw": optim.AdamW(),
    "sgd": optim.SGD(lr=0.01),
    "momentum": optim.SGD(lr=0.01, momentum=0.9),
    "adagrad": optim.Adagrad(),
    "rmsprop": optim.RMSprop(),
    "lion": optim.Lion(),
    "ftrl": optim.FTRL(),
}


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """The measured case. Raises InvalidArgumentError for an unknown name or an impossible size.

    copy: plain calls with separate arrays, instead of gradient buffers and weights that are read in place.
    layer_elements: elements of one tensor; the last may be smaller.
    slice_elements: as in ``client.parameters``.
    compression, pull_compression: a codec or its name; "" for ``wire_dtype``.
    """

    params: int = 25_000_000
    wire_dtype: DType = "float32"
    consistency: str = "bsp"
    optimizer: str = "adam"
    copy: bool = False
    layer_elements: int = LAYER_ELEMENTS
    slice_elements: int = 0
    compression: Codec | str = ""
    pull_compression: Codec | str = ""

    def __post_init__(self) -> None:
        for name, number in (("params", self.params), ("layer_elements", self.layer_elements)):
            if number < 1:
                raise InvalidArgumentError(f"{name}={number} is out of range: use 1 or more")
        for what, value, known in (
            ("wire_dtype", self.wire_dtype, WIRE_DTYPES),
            ("consistency", self.consistency, tuple(CONSISTENCIES)),
            ("optimizer", self.optimizer, tuple(OPTIMIZERS)),
        ):
            if value not in known:
                raise InvalidArgumentError(f"{what}={value!r:.60} is unknown: use one of {', '.join(known)}")

    @property
    def name(self) -> str:
        """The name of the parameter set. Different settings in the same run have different names."""
        layers = "" if self.layer_elements == LAYER_ELEMENTS else f"-{self.layer_elements}"
        pulls = f"-{_PUNCTUATION.sub('-', str(self.pull_compression))}" if self.pull_compression else ""
        slices = f"-s{self.slice_elements}" if self.slice_elements else ""
        codecs = f"{self.wire_dtype}-{self.consistency}-{self.optimizer}"
        return f"psdist-bench/{self.params}-{codecs}{layers}{slices}{pulls}"

    def layers(self) -> dict[str, int]:
        """Return the number of elements of each tensor, by name."""
        starts = range(0, self.params, self.layer_elements)
        return {f"layer.{n:05}": min(self.layer_elements, self.params - start) for n, start in enumerate(starts)}

    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments of ``client.parameters``."""
        ones = np.ones(self.layer_elements, np.float32)
        return {
            "name": self.name,
            "init": {name: _matrix(ones[:size]) for name, size in self.layers().items()},
            "optimizer": OPTIMIZERS[self.optimizer],
            "consistency": CONSISTENCIES[self.consistency],
            "slice_elements": self.slice_elements,
            "compression": self.compression or self.wire_dtype,
            "pull_dtype": "float32" if self.pull_compression else self.wire_dtype,
            "pull_compression": self.pull_compression or None,
        }

    def gradients(self, buffers: Mapping[str, NDArray[Any]] | None, rank: int) -> Mapping[str, NDArray[Any]]:
        """Return the gradients to push: written into ``buffers``, or into new arrays if it is None.

        rank: workers have different gradients, since servers warn of equal ones.
        """
        values = np.random.default_rng(rank).standard_normal(self.layer_elements, dtype=np.float32)
        if buffers is None:
            return {name: _matrix(values[:size].copy()) for name, size in self.layers().items()}
        for buffer in buffers.values():
            buffer[...] = _matrix(values[: buffer.size])
        return buffers


def _matrix(values: NDArray[Any]) -> NDArray[Any]:
    return values.reshape(-1, math.gcd(values.size, _COLUMNS))


def vary(gradients: Mapping[str, NDArray[Any]]) -> None:
    """Change one number, for the next step: unchanged buffers would cause a warning."""
    first = next(iter(gradients.values()))
    first.flat[0] = -first.flat[0]


class StepBench:
    """A worker of the benchmark, which joins the parameter set and makes steps."""

    def __init__(self, client: Client, settings: BenchSettings) -> None:
        self.settings = settings
        self.parameters = client.parameters(**settings.arguments())
        self.gradients = settings.gradients(None if settings.copy else self.parameters.gradient_buffers(), client.rank)

    def step(self) -> None:
        """Make a step: push the gradients and pull the new weights."""
        vary(self.gradients)
        self.parameters.push_pull(self.gradients, copy=self.settings.copy)

    def make(self, steps: int) -> None:
        """Make ``steps`` steps after the warm-up."""
        for _ in range(WARM_STEPS + steps):
            self.step()

"""The gradient vector of one handle: gathers the user's arrays in it, and checks them before anything is sent.

Not here: what is sent of it, and when (``parameters``, ``bucket_step``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from psdist.client.core import partition
from psdist.client.core.partition import Flat
from psdist.client.stale_buffers import StaleBufferCheck
from psdist.errors import InvalidArgumentError
from psdist.types import DType, Layout, NonFinite


class GradientVector:
    """Where the gradients of ``layout`` are put together.

    dtype: in which they are sent. NaN and Inf are looked for in that dtype, and ``non_finite`` says what they are.
    shared: the vector in memory that is shared with servers, if there is any when it is first needed.
    stale: looks for buffers that nobody writes to.
    """

    def __init__(
        self,
        layout: Layout,
        dtype: DType,
        non_finite: NonFinite,
        shared: Callable[[], NDArray[Any] | None],
        stale: StaleBufferCheck,
    ) -> None:
        self._layout = layout
        self._dtype = dtype
        self._non_finite = non_finite
        self._shared = shared
        self._stale = stale
        self._buffers: dict[str, NDArray[np.float32]] = {}

    @cached_property
    def vector(self) -> Flat:
        """The vector. It stays at its address until ``release_memory``."""
        shared = self._shared()
        return np.zeros(self._layout.total, np.float32) if shared is None else shared

    def release_memory(self) -> None:
        """Lets go of the vector. It is another one when it is next needed, unless it is shared."""
        self._buffers = {}
        self.__dict__.pop("vector", None)

    def buffers(self) -> dict[str, NDArray[np.float32]]:
        """Views of the vector, by tensor name."""
        self._buffers = self._buffers or partition.split(self._layout, self.vector)
        return dict(self._buffers)

    def gather(self, gradients: Mapping[str, ArrayLike], number: int) -> Flat | None:
        """The vector with all of these gradients in it, or None to abstain. number: of the push.

        Raises UnknownTensorError, MissingTensorError, ShapeMismatchError, DTypeMismatchError, NonFiniteGradientError.
        """
        flat = self.vector
        if self._are_buffers(gradients):
            self._stale.on_push(number, flat)
        else:
            flat = partition.flatten(self._layout, gradients, self.vector)
        if partition.is_finite(flat, self._dtype):
            return flat
        if self._non_finite == "reject":
            raise partition.non_finite(self._layout, flat, self._dtype)
        return None

    def _are_buffers(self, gradients: Mapping[str, ArrayLike]) -> bool:
        """Whether these are the very arrays of ``buffers``, about which nothing is to be checked."""
        mine = self._buffers
        return (
            isinstance(gradients, Mapping)
            and 0 < len(gradients) == len(mine)
            and all(gradients.get(name) is array for name, array in mine.items())
        )

    def check_bucket(self, gradients: object) -> None:
        """Raises InvalidArgumentError for what can be no bucket."""
        if isinstance(gradients, str) or not isinstance(gradients, Iterable):
            raise InvalidArgumentError(f"a bucket is a dict of arrays or a list of names, not {gradients!r:.80}")
        if not isinstance(gradients, Mapping) and not self._buffers:
            raise InvalidArgumentError("a bucket of names means gradient_buffers(): call that first, and fill them")

    def gather_bucket(self, numbers: tuple[int, ...], gradients: Mapping[str, ArrayLike] | Iterable[str]) -> bool:
        """Gathers the gradients of these tensors; names mean that they are in the vector. Returns False to abstain.

        Raises as ``gather``.
        """
        if isinstance(gradients, Mapping):
            partition.flatten_some(self._layout, numbers, gradients, self.vector)
        for number in numbers:
            part = self.vector[self._layout.offsets[number] : self._layout.offsets[number + 1]]
            if not partition.is_finite(part, self._dtype):
                if self._non_finite == "reject":
                    raise partition.non_finite(self._layout, self.vector, self._dtype, numbers)
                return False
        return True

    def on_last_bucket(self, gradients: object, number: int) -> None:
        """The last bucket of step ``number`` is gathered: all of the step's gradients are in the vector."""
        if not isinstance(gradients, Mapping):
            self._stale.on_push(number, self.vector)

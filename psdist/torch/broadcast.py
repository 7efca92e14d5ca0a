"""Tensors that all workers take over from one of them.

A parameter set whose optimizer is a mean carries them: one worker's values count, and those of the others count for
nothing. So what a snapshot has of such a set is never used again: each step brings all values anew.

Not here: values that workers get which join later, or that a resumed run begins with (``values.share_fixed``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from psdist.client.context import Context
from psdist.client.sync_client import Client
from psdist.optim import Mean
from psdist.torch.values import take_finite, to_finite

#: A tensor that says of which step the values are. In a step that nobody gave values for it is of an earlier one.
_STEP: Final = "psdist/step"
#: float32 has such numbers exactly.
_STEPS: Final = 1 << 20
#: Ranks that are told apart.
_RANKS: Final = 4096


class TensorBroadcast:
    """Gives ``tensors`` the values that one worker has. All workers make the same calls.

    name: of the parameter set for that. The others contribute nothing to its steps, so the mean is what one pushed.
    tensors: gives those of now, always of the same names and shapes; a module may replace a buffer by another tensor.
    """

    def __init__(self, client: Client, name: str, tensors: Callable[[], Mapping[str, Tensor]]) -> None:
        self._all = tensors
        found = self._tensors()
        self._handle = client.parameters(name, _values(found, 0), Mean()) if found else None
        self._dropped = 0

    def _tensors(self) -> dict[str, Tensor]:
        return {key: tensor for key, tensor in self._all().items() if tensor.numel()}

    def send(self, *, is_source: bool) -> bool:
        """Makes one step: the source's values are in all workers' tensors. Returns False, in all workers, where none
        was the source, because that one is gone; tensors are as they were then. Raises as ``Parameters.push_pull``."""
        if self._handle is None:
            return True
        tensors, number = self._tensors(), 1 + self._handle.step % _STEPS
        values = self._handle.push_pull(_values(tensors, number), copy=False, weight=float(is_source))
        if values[_STEP][0] != number:
            dropped, self._dropped = self._dropped, self._handle.statistics().dropped
            return self._dropped > dropped  # Then it is this worker that was away, and the others had their source.
        if not is_source:
            for key, tensor in tensors.items():
                take_finite(tensor, values[key])
        return True

    def release_memory(self) -> None:
        """Gives the memory of the values back, until the next step."""
        if self._handle is not None:
            self._handle.release_memory()


def _values(tensors: Mapping[str, Tensor], number: int) -> dict[str, NDArray[np.float32]]:
    return {_STEP: np.full(1, number, np.float32)} | {key: to_finite(tensor) for key, tensor in tensors.items()}


class LowestRank:
    """The lowest rank of the workers that make the same calls, on which they agree by a step of a parameter set.

    name: of that set. The lowest rank changes when its worker is gone.
    """

    def __init__(self, context: Context, name: str) -> None:
        self._mine = context.rank % _RANKS
        self._flags = np.zeros(_RANKS, np.float32)
        self._flags[self._mine] = 1.0
        self._handle = context.client.parameters(name, {"ranks": np.zeros(_RANKS, np.float32)}, Mean())
        self._lowest = self._find()

    def _find(self) -> int:
        return int(np.flatnonzero(self._handle.push_pull({"ranks": self._flags}, copy=False)["ranks"])[0])

    def send(self, broadcast: TensorBroadcast) -> None:
        """Gives all workers the values that the one of lowest rank has."""
        while not broadcast.send(is_source=self._mine == self._lowest):
            self._lowest = self._find()

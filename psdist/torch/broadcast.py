"""Broadcast of tensors from one worker to all others.

The tensors travel through a ``ServerMean``. Only the source's push has a weight, so the mean equals the source's
values. Every step replaces all values, so a snapshot of such a set is never used.

Not here: initial values of workers that join later or of a resumed run (``values.share_fixed``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from psdist.client.context import Context
from psdist.client.means import ServerMean
from psdist.client.session.membership import unless_dropped
from psdist.client.sync_client import Bucket, Client
from psdist.torch.values import take_finite, to_finite

#: Number of ranks that can be told apart.
_RANKS: Final = 4096
#: Tensor with the number of the step that its values belong to. A step without a source repeats an earlier number.
_STEP: Final = "psdist/step"
#: Step numbers wrap here. float32 represents all smaller integers exactly.
_STEPS: Final = 1 << 20


class TensorBroadcast:
    """Copies ``tensors`` from one worker to all others. All workers make the same calls.

    name: parameter set that carries the tensors.
    tensors: returns the current tensors, always with the same names and shapes. A module may replace a buffer by
        another tensor.
    """

    def __init__(self, client: Client, name: str, tensors: Callable[[], Mapping[str, Tensor]]) -> None:
        self._all = tensors
        found = self._tensors()
        self._handle = ServerMean(client, name).open(_values(found, 0)) if found else None
        self._dropped = 0
        #: Latest values that the source sent without waiting.
        self._sent: Bucket | None = None

    def _tensors(self) -> dict[str, Tensor]:
        return {key: tensor for key, tensor in self._all().items() if tensor.numel()}

    def send(self, *, is_source: bool, waits: bool = True) -> bool:
        """Run one broadcast step: afterwards all workers hold the source's values.

        waits: False lets the source continue before the others take the values.

        Returns False, in all workers, if no worker was the source because it has left. Tensors are unchanged then.
        Raises as ``Parameters.push_pull``.
        """
        if self._handle is None:
            return True
        if self._sent is not None:
            unless_dropped(self._sent.wait)
            self._sent = None
        tensors, number = self._tensors(), 1 + self._handle.step % _STEPS
        if is_source and not waits:
            sent = self._handle.push_pull_async
            self._sent = unless_dropped(lambda: sent(_values(tensors, number)))
            return True
        values = self._handle.push_pull(_values(tensors, number), copy=False, weight=float(is_source))
        if values[_STEP][0] != number:
            dropped, self._dropped = self._dropped, self._handle.statistics().dropped
            return self._dropped > dropped  # A drop means that this worker missed the step; the others had a source.
        if not is_source:
            for key, tensor in tensors.items():
                take_finite(tensor, values[key])
        return True

    def release_memory(self) -> None:
        """Free the buffers of the values until the next step."""
        if self._handle is not None:
            self._handle.release_memory()


def _values(tensors: Mapping[str, Tensor], number: int) -> dict[str, NDArray[np.float32]]:
    return {_STEP: np.full(1, number, np.float32)} | {key: to_finite(tensor) for key, tensor in tensors.items()}


class LowestRank:
    """Lowest rank among the workers that make the same calls, agreed on by a step of a parameter set.

    name: parameter set for the agreement. The lowest rank changes when its worker leaves.
    """

    def __init__(self, context: Context, name: str) -> None:
        self._mine = context.rank % _RANKS
        self._ranks = ServerMean(context.client, name)
        self._lowest = self._find()

    def _find(self) -> int:
        taking_part = np.zeros(_RANKS, np.float32)
        taking_part[self._mine] = 1.0
        return int(np.flatnonzero(self._ranks.exchange({"ranks": taking_part})["ranks"])[0])

    def send(self, broadcast: TensorBroadcast, *, waits: bool = True) -> None:
        """Broadcast the values of the worker with the lowest rank. waits: as for ``TensorBroadcast.send``."""
        while not broadcast.send(is_source=self._mine == self._lowest, waits=waits):
            self._lowest = self._find()

    def send_once(self, client: Client, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Broadcast ``tensors`` of that worker through the parameter set ``name``, and free the buffers."""
        broadcast = TensorBroadcast(client, name, lambda: tensors)
        self.send(broadcast)
        broadcast.release_memory()

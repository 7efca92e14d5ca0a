"""Exchange of one number of each worker through the servers."""

from __future__ import annotations

from typing import Final

import numpy as np

from psdist.client.context import Context
from psdist.client.session.membership import OnDrop
from psdist.optim import Mean

#: Number of ranks that can be told apart.
RANKS: Final = 4096


class RankNumbers:
    """Exchange of one number of each rank, by a step of a parameter set. All workers make the same calls.

    name: the parameter set.
    on_drop: as for ``Client.parameters``.
    """

    def __init__(self, context: Context, name: str, on_drop: OnDrop = "warn") -> None:
        self._mine = context.rank % RANKS
        self._numbers = np.zeros(RANKS, np.float32)
        self._handle = context.client.parameters(name, {"ranks": np.zeros(RANKS, np.float32)}, Mean(), on_drop=on_drop)

    def exchange(self, number: int) -> dict[int, int]:
        """Return the numbers of the workers that take part, by rank. number: 1 to 65,536.

        Raises as ``Parameters.push_pull``.
        """
        self._numbers[self._mine] = number
        means = self._handle.push_pull({"ranks": self._numbers}, copy=False)["ranks"]
        ranks = np.flatnonzero(means)
        return {int(rank): round(float(means[rank]) * len(ranks)) for rank in ranks}

"""Means of all workers' values through the servers: parameter sets whose optimizer is a mean.

In BSP a push of such a set returns the mean of its step, so each step is a collective of the workers that train. All of
them make the same calls, and get the same bytes; nobody waits for a worker that died.

``ServerMean`` is the small collective. ``ScriptWeights`` are the guards of gradients whose weights only the scripts
hold. Means over the links between workers are ``all_reduce`` of a group (``psdist.collectives``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from psdist.client.session.membership import OnDrop
from psdist.client.sync_client import Client, Parameters
from psdist.compression import Codec
from psdist.consistency import BSP, Reduction, with_reduction
from psdist.errors import FencedError, LateWorkerError, NonFiniteGradientError
from psdist.optim import Mean
from psdist.types import MasterDType

logger = logging.getLogger("psdist")

Arrays = Mapping[str, NDArray[Any]]
T = TypeVar("T")


class ServerMean:
    """Mean of all workers' values, a few numbers or some tensors.

    name: parameter set that carries the values. The first call creates it.
    reduction, on_drop, master_dtype, slice_elements: as for ``Client.parameters``.
    """

    def __init__(
        self,
        client: Client,
        name: str,
        *,
        reduction: Reduction = "mean",
        on_drop: OnDrop = "warn",
        master_dtype: MasterDType = "float32",
        slice_elements: int = 0,
    ) -> None:
        self._client = client
        self._name = name
        self._consistency = with_reduction(BSP(), reduction)
        self._on_drop = on_drop
        self._master_dtype = master_dtype
        self._slice_elements = slice_elements
        self._handle: Parameters | None = None

    def open(self, values: Arrays) -> Parameters:
        """Create the parameter set, of the names and shapes of ``values``, unless it exists. All workers call this."""
        if self._handle is None:
            self._handle = self._client.parameters(
                self._name, {name: np.zeros_like(value) for name, value in values.items()}, Mean(), self._consistency,
                on_drop=self._on_drop, master_dtype=self._master_dtype, slice_elements=self._slice_elements,
            )  # fmt: skip
        return self._handle

    def exchange(self, values: Arrays, weight: float = 1.0) -> Arrays:
        """Return the means by name, valid until the next call. Raises as ``Parameters.push_pull``.

        weight: of this worker's values; 0 contributes nothing.
        """
        return self.open(values).push_pull(values, copy=False, weight=weight)


def push_finite(push: Callable[[], T], clear: Callable[[], None]) -> T:
    """Return the result of a push, which is made again after ``clear`` if its gradients are not finite.

    clear: replaces the gradients by zeros, and sets the flag by which the other workers learn of it.
    """
    try:
        return push()
    except NonFiniteGradientError:
        clear()
    return push()


@dataclass(frozen=True)
class ScriptWeights:
    """Guards of scripts that hold the weights themselves: no worker can join them, or return.

    face: psdist's name for what averages their gradients.
    keeper: the name of that which keeps the weights on the servers.
    """

    face: str
    keeper: str

    def open(
        self,
        client: Client,
        name: str,
        zeros: Arrays,
        *,
        reduction: Reduction,
        compression: Codec | str | None,
        master_dtype: MasterDType,
        on_drop: OnDrop = "warn",
    ) -> Parameters:
        """Create the parameter set of the gradients, and warn if it resumes. Arguments: as for ``Client.parameters``.

        Raises LateWorkerError if others already train with it, and as ``Client.parameters``.
        """
        if client.joins_late(name):
            raise LateWorkerError(
                f"this worker started, or restarted, when {name!r} was in use: only the scripts of {self.face} hold "
                "the weights, so no worker can join them, and the others continue without this one. To train with all "
                "workers stop the run and start it again from a checkpoint of the script; a script that has opened its "
                f"context again passes another name=. {self.keeper} keeps the weights on the servers, and takes "
                "workers back"
            )
        handle = client.parameters(
            name, zeros, Mean(), with_reduction(BSP(), reduction), compression=compression, on_drop=on_drop,
            master_dtype=master_dtype,
        )  # fmt: skip
        if handle.restored:
            logger.warning(
                "%r resumes from snapshot %s, which contains neither weights nor optimizer of a script that uses %s: "
                "both start with the script's current values. Load the script's own checkpoint first, or use %s, whose "
                "runs resume from snapshots",
                name, handle.restored, self.face, self.keeper,
            )  # fmt: skip
        return handle

    def expelled(self) -> FencedError:
        """Return the error of a worker that missed a step."""
        return FencedError(
            "this worker was expelled, and the others made a step without it: its model differs from theirs now. Stop "
            f"the run and start it again from a checkpoint, or use {self.keeper}, whose weights are on the servers"
        )

"""``average``: the mean of all workers' gradients, for a script that keeps its optax chain.

The gradients are a parameter set with ``psdist.optim.Mean`` as its optimizer, so in BSP a push returns the step's mean.

Invariant: All workers get the same bytes. Scripts that start with equal parameters therefore stay equal.
"""

from __future__ import annotations

from typing import Any, Final
from weakref import WeakKeyDictionary

import numpy as np

from psdist.client.context import Context, init
from psdist.client.means import ScriptWeights, push_finite
from psdist.client.sync_client import Client
from psdist.compression import Codec
from psdist.consistency import Reduction
from psdist.errors import InvalidArgumentError
from psdist.jax.trees import TreeForm

_WEIGHTS: Final = ScriptWeights("psdist.jax.average", "psdist.jax.parameters")
#: Tensor that is above 0 if gradients of any worker are not finite. No leaf's name begins with a dot.
_OVERFLOWS: Final = ".overflows"


class _Averager:
    """Parameter set that averages trees of one form."""

    def __init__(
        self, context: Context, name: str, form: TreeForm, reduction: Reduction, compression: Codec | str | None
    ) -> None:
        self.form = form
        self.settings = reduction, compression
        zeros = {key: np.zeros(shape, form.master_dtype) for key, shape in zip(form.names, form.shapes, strict=True)}
        zeros[_OVERFLOWS] = np.zeros(1, np.float32)
        self.handle = _WEIGHTS.open(
            context.client, name, zeros, reduction=reduction, compression=compression,
            master_dtype=form.master_dtype, on_drop="ignore",
        )  # fmt: skip
        self._dropped = self.handle.statistics().dropped

    def average(self, tree: Any, form: TreeForm, weight: float) -> Any:
        """Return the mean of all workers' trees. form: that of ``tree``."""
        arrays = self.form.arrays(tree, "average") | {_OVERFLOWS: np.zeros(1, np.float32)}

        def clear() -> None:
            arrays.update({key: np.full_like(array, key == _OVERFLOWS) for key, array in arrays.items()})

        answer = push_finite(lambda: self.handle.push_pull(arrays, copy=False, weight=weight), clear)
        if self.handle.statistics().dropped > self._dropped:
            raise _WEIGHTS.expelled()
        if answer[_OVERFLOWS][0] > 0:
            answer = {name: np.full_like(array, np.nan) for name, array in answer.items()}
        return self.form.tree(answer, like=form)


_averagers: WeakKeyDictionary[Client, dict[str, _Averager]] = WeakKeyDictionary()


def average(
    gradients: Any,
    *,
    reduction: Reduction = "mean",
    weight: float = 1.0,
    compression: Codec | str | None = None,
    name: str = "gradients",
    context: Context | None = None,
) -> Any:
    """Return the mean of all workers' gradients, as a tree with the structure, dtypes and sharding of ``gradients``.

    All workers make the same calls, with trees of one structure, and wait for each other. Call it between the jitted
    function that computes the gradients and the one that applies them. It also averages other trees, such as the
    statistics of normalization layers or metrics, under another name.

    gradients: arrays of float32, bfloat16, float16 or float64. The mean is computed in float32 and rounded once; in
        float64 if the first tree with this name has a leaf of that dtype.
    reduction: "sum" adds up and does not divide. The same in all calls with a name.
    weight: weight in the mean, such as the number of samples behind the gradients. 0 contributes nothing.
    compression: codec of gradients, as for ``Client.parameters``. The same in all calls with a name.
    name: name of the parameter set. Each structure has its own.
    context: None uses the context of ``psdist.init()``: a script without a launcher gets its own gradients back.

    If gradients of any worker are not finite, those of all workers become NaN, so that ``optax.apply_if_finite`` and
    loss scales skip the step everywhere.

    Raises InvalidArgumentError inside ``jax.jit``, for leaves that are no arrays, and for a tree with another structure
    or shape than before; DTypeMismatchError; LateWorkerError if the others started without this worker; FencedError if
    this worker was expelled and the others continued; and the errors of ``psdist.init`` and ``Parameters.push_pull``.
    """
    form = TreeForm(gradients, "average")
    context = init() if context is None else context
    averagers = _averagers.setdefault(context.client, {})
    if name not in averagers:
        averagers[name] = _Averager(context, name, form, reduction, compression)
    averager = averagers[name]
    if (reduction, compression) != averager.settings:
        raise InvalidArgumentError(
            f"average: {name!r} has {_text(*averager.settings)} since its first call, and "
            f"{_text(reduction, compression)} is asked for: give the other trees another name="
        )
    return averager.average(gradients, form, weight)


def _text(reduction: Reduction, compression: Codec | str | None) -> str:
    return f"reduction={reduction!r}, compression={compression!r:.200}"

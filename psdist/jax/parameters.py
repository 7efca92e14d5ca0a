"""``parameters``, whose weights live on the servers, and ``average``, for a script that keeps its optax chain.

Invariant: A returned tree owns its memory. Later steps do not change it, so trees may be kept, donated or compared.

The gradients of ``average`` are a parameter set with ``psdist.optim.Mean`` as its optimizer, so in BSP a push returns
the step's mean.

Invariant: All workers get the same bytes. Scripts that start with equal parameters therefore stay equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final
from weakref import WeakKeyDictionary

import numpy as np

from psdist.client.context import Context, init
from psdist.client.means import ScriptWeights, push_finite
from psdist.client.parameters import Statistics
from psdist.client.session.membership import OnDrop
from psdist.client.sync_client import Client, Parameters
from psdist.compression import Codec
from psdist.consistency import BSP, Consistency, Reduction, with_reduction
from psdist.errors import ClosedError, InvalidArgumentError
from psdist.jax.trees import TreeForm
from psdist.optim import Optimizer
from psdist.types import DType, MasterDType, NonFinite

#: Names of the sets that each client has opened as trees. A second tree would silently get the first one's weights.
_opened: WeakKeyDictionary[Client, set[str]] = WeakKeyDictionary()


class TreeParameters:
    """Parameter set of a pytree. Created by ``parameters``.

    context: this script's place in its run, with ``rank`` and ``world_size``.
    handle: the set's handle, for calls that this class lacks, such as ``release_memory``.
    """

    def __init__(self, context: Context, handle: Parameters, form: TreeForm) -> None:
        self.context = context
        self.handle = handle
        self._form = form
        self._is_closed = False

    @property
    def name(self) -> str:
        """Name of the parameter set."""
        return self.handle.name

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the leaves, for ``psdist.optim.override``: the keys of their paths, joined by dots."""
        return self.handle.names

    @property
    def step(self) -> int:
        """Number of the next step: in BSP that of all workers, in SSP and ASP this worker's pushes since its start."""
        return self.handle.step

    @property
    def version(self) -> int:
        """Number of updates that the newest weights seen here contain."""
        return self.handle.version

    @property
    def lr_factor(self) -> float | None:
        """Factor on the learning rate of the next pushes, for rates that follow no schedule of psdist.jax. See
        ``Parameters.lr_factor``."""
        return self.handle.lr_factor

    @lr_factor.setter
    def lr_factor(self, factor: float | None) -> None:
        self.handle.lr_factor = factor

    @property
    def settings(self) -> dict[int, dict[str, float]] | None:
        """Other hyperparameters of the next pushes, by group of the optimizer: 0 is its own, i that of override i. See
        ``Parameters.settings``."""
        return self.handle.settings

    @settings.setter
    def settings(self, settings: Mapping[int, Mapping[str, float]] | None) -> None:
        self.handle.settings = settings

    def pull(self) -> Any:
        """Return the weights: a tree with the structure, dtypes and sharding of the initial tree.

        Raises ClosedError, and as ``Parameters.pull``.
        """
        self._check_open()
        return self._form.tree(self.handle.pull(copy=False))

    def push(self, gradients: Any, weight: float = 1.0) -> None:
        """Send the gradients of the next step, a tree like that of the weights. Raises as ``push_pull``."""
        self._check_open()
        self.handle.push(self._form.arrays(gradients, "push"), weight)

    def push_pull(self, gradients: Any, weight: float = 1.0) -> Any:
        """Make one step: send the gradients, and return the weights that include it, like ``pull``.

        gradients: tree with the structure and shapes of the weights, and any of their dtypes. It may be freed or
            donated after the call.
        weight: weight in the mean of the step (BSP), such as the number of samples behind the gradients.

        Raises InvalidArgumentError for a tree with another structure or shape, for leaves that are no arrays, and
        inside ``jax.jit``; DTypeMismatchError; ClosedError; and as ``Parameters.push_pull``.
        """
        self._check_open()
        arrays = self._form.arrays(gradients, "push_pull")
        return self._form.tree(self.handle.push_pull(arrays, copy=False, weight=weight))

    def statistics(self) -> Statistics:
        """Return the counters of the handle."""
        return self.handle.statistics()

    def close(self) -> None:
        """Release this process's memory for gradients and weights. The servers keep the weights, and the context stays
        open. Later calls raise ClosedError. Closing again does nothing."""
        if not self._is_closed:
            self._is_closed = True
            self.handle.release_memory()

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError(f"the parameters {self.name!r} are closed: make new ones, with another name=")

    def __repr__(self) -> str:
        return f"<TreeParameters {self.handle!r}>"


def parameters(
    tree: Any,
    optimizer: Optimizer,
    consistency: Consistency | None = None,
    *,
    reduction: Reduction = "mean",
    compression: Codec | str | None = None,
    pull_dtype: DType = "float32",
    pull_compression: Codec | str | None = None,
    master_dtype: MasterDType | None = None,
    non_finite: NonFinite = "reject",
    slice_elements: int = 0,
    on_drop: OnDrop = "warn",
    reset_optimizer: bool = False,
    name: str = "model",
    context: Context | None = None,
) -> TreeParameters:
    """Create a parameter set from a pytree, or join it.

    tree: initial values: arrays of float32, bfloat16, float16 or float64, on devices of this process. All workers start
        with those of the lowest rank.
    optimizer: a specification, made by a function such as ``psdist.jax.adam``, or by psdist.optim.
    consistency: psdist.BSP() by default, SSP(n) or ASP().
    reduction: "sum" adds the workers' gradients up and does not divide them, for losses that are sums over the samples
        of a batch. BSP only.
    compression, pull_dtype, pull_compression, non_finite, slice_elements, on_drop, reset_optimizer: as for
        ``Client.parameters``.
    master_dtype: dtype of weights, state and arithmetic on the servers, for all leaves. None: "float64" if a leaf has
        that dtype, else "float32".
    name: name of the parameter set. Each tree of a script has its own.
    context: None uses the context of ``psdist.init()``: a script without a launcher trains alone.

    Raises InvalidArgumentError for an optax optimizer, which servers cannot run, for a name that was used before, and
    for leaves that cannot be trained; DTypeMismatchError; and the errors of ``psdist.init`` and ``Client.parameters``.
    """
    _check_optimizer(optimizer)
    form = TreeForm(tree, "parameters")
    mode = with_reduction(BSP() if consistency is None else consistency, reduction)
    context = init() if context is None else context
    names = _opened.setdefault(context.client, set())
    if name in names:
        raise InvalidArgumentError(
            f"this script made the parameters {name!r} before, and their weights are on the servers: a new tree would "
            "continue with these. Give it another name="
        )
    handle = context.client.parameters(
        name, form.arrays(tree, "parameters"), optimizer, mode, compression=compression, pull_dtype=pull_dtype,
        non_finite=non_finite, slice_elements=slice_elements, on_drop=on_drop, reset_optimizer=reset_optimizer,
        pull_compression=pull_compression, master_dtype=master_dtype or form.master_dtype,
    )  # fmt: skip
    names.add(name)
    return TreeParameters(context, handle, form)


def _check_optimizer(optimizer: Any) -> None:
    if isinstance(optimizer, Optimizer):
        return
    if hasattr(optimizer, "init") and hasattr(optimizer, "update"):
        raise InvalidArgumentError(
            "an optax optimizer is a pair of functions, which servers cannot run: use the function of psdist.jax with "
            "the same name and arguments, such as psdist.jax.adam(1e-3), or keep the optax chain in the script and "
            "give it psdist.jax.average(gradients)"
        )
    raise InvalidArgumentError(
        f"optimizer is of type {type(optimizer).__name__}: pass the result of a function such as "
        "psdist.jax.adam, or a specification of psdist.optim"
    )


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

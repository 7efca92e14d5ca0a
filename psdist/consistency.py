"""Consistency modes: rules for when a slice is updated, and when it may be read.

These are specifications; ``psdist_server.core`` enforces them on the servers.

* ``BSP``: step t is applied once every member has contributed (bulk-synchronous parallel, Valiant 1990). Exact: the
  result depends neither on arrival order nor on the number of servers.
* ``SSP``: each push is applied on arrival; a worker may be at most ``staleness`` clocks ahead of the slowest one
  (stale synchronous parallel, Ho et al., NIPS 2013).
* ``ASP``: each push is applied on arrival, and no worker waits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, Final, Literal

from psdist.errors import InvalidArgumentError, check_integer

StalenessLr = Literal["none", "inverse"]
ResizeLr = Literal["none", "linear", "sqrt"]
Reduction = Literal["mean", "sum"]
_COUNT_MAX = 1 << 20


def check_reduction(value: str) -> None:
    """Raise InvalidArgumentError unless ``value`` is a Reduction."""
    if value not in ("mean", "sum"):
        raise InvalidArgumentError(f"reduction={value!r:.60} is unknown: use 'mean' or 'sum'")


def _check_staleness_lr(value: str) -> None:
    if value not in ("none", "inverse"):
        raise InvalidArgumentError(f"staleness_lr={value!r} is unknown: use 'none' or 'inverse'")


@dataclass(frozen=True)
class BSP:
    """Synchronous steps: update t is the optimizer applied to the weighted mean of all members' gradients of step t.

    backup_workers: number of members that a step need not wait for; their late contributions are dropped (Chen et al.
        2016, "Revisiting Distributed Synchronous SGD"). Above 0, the result depends on who is late.
    resize_lr: factor on the learning rate of a step with n contributors in a run that began with m: "none" 1, "linear"
        n / m (Goyal et al. 2017, arXiv 1706.02677), "sqrt" (n / m) ** 0.5 (Krizhevsky 2014, arXiv 1404.5997).
    reduction: "sum" applies the weighted sum of the gradients instead of their mean, for losses that are sums over the
        samples of a batch. It grows with the number of workers by itself, so ``resize_lr`` must be "none" then.
    Raises InvalidArgumentError for a value out of its range.
    """

    backup_workers: int = 0
    resize_lr: ResizeLr = "none"
    reduction: Reduction = "mean"

    def __post_init__(self) -> None:
        check_integer("backup_workers", self.backup_workers, 0, _COUNT_MAX)
        check_reduction(self.reduction)
        if self.resize_lr not in ("none", "linear", "sqrt"):
            raise InvalidArgumentError(f"resize_lr={self.resize_lr!r} is unknown: use 'none', 'linear' or 'sqrt'")
        if self.reduction == "sum" and self.resize_lr != "none":
            raise InvalidArgumentError(
                f"reduction='sum' with resize_lr={self.resize_lr!r}: a sum grows with the number of workers by itself. "
                "Leave resize_lr out, or use reduction='mean'"
            )

    def lr_scale(self, contributors: int, reference: int) -> float:
        """Return the factor on the learning rate of a step.

        contributors: number of workers that contributed to the step.
        reference: number of workers when the parameter set was placed.
        """
        if self.resize_lr == "none" or not contributors or not reference:
            return 1.0
        ratio = contributors / reference
        return ratio if self.resize_lr == "linear" else math.sqrt(ratio)


@dataclass(frozen=True)
class SSP:
    """Bounded staleness: each push is applied on arrival, by itself.

    staleness: clocks (completed pushes) that a worker may be ahead of the slowest member; 0 is a barrier per step.
    staleness_lr: "inverse" divides the learning rate by 1 + the gradient's staleness in versions; "none" does not.
    Raises InvalidArgumentError for a value out of its range.
    """

    staleness: int
    staleness_lr: StalenessLr = "none"

    def __post_init__(self) -> None:
        check_integer("staleness", self.staleness, 0, _COUNT_MAX)
        _check_staleness_lr(self.staleness_lr)


@dataclass(frozen=True)
class ASP:
    """Fully asynchronous: each push is applied on arrival, and no worker waits.

    staleness_lr: "inverse" divides the learning rate by 1 + the gradient's staleness in versions; "none" does not.
    Raises InvalidArgumentError for a value out of its range.
    """

    staleness_lr: StalenessLr = "none"

    def __post_init__(self) -> None:
        _check_staleness_lr(self.staleness_lr)


Consistency = BSP | SSP | ASP


def with_reduction(consistency: Consistency, reduction: Reduction) -> Consistency:
    """Return the mode with "sum" if ``reduction`` says so, else unchanged.

    Raises InvalidArgumentError for an unknown reduction, and for "sum" outside BSP.
    """
    check_reduction(reduction)
    if reduction == "mean":
        return consistency
    if not isinstance(consistency, BSP):
        raise InvalidArgumentError(
            f"reduction='sum' in {type(consistency).__name__}, which applies each push by itself, so that all "
            "gradients are added up already: leave reduction out, or use BSP"
        )
    return replace(consistency, reduction=reduction)


def sums(consistency: Consistency) -> bool:
    """Return True if gradients are added up and not divided."""
    return isinstance(consistency, BSP) and consistency.reduction == "sum"


KINDS: Final[dict[str, type[Consistency]]] = {"bsp": BSP, "ssp": SSP, "asp": ASP}


def kind_of(consistency: Consistency) -> str:
    """Return the key of a mode in ``KINDS``."""
    return type(consistency).__name__.lower()


#: Largest weight of a gradient in a mean, and the inverse of the smallest.
_WEIGHT_LAST = 1e18


def check_weight(weight: Any, consistency: Consistency) -> float:
    """Return the weight of a gradient in the mean of its step, as float.

    weight: 0, 1, or in BSP a number from 1e-18 to 1e18. numpy numbers, and arrays and tensors without dimensions, are
        accepted.
    Raises InvalidArgumentError for anything else, including booleans.
    """
    is_scalar = getattr(weight, "ndim", None) == 0 and hasattr(weight, "item")
    number = weight.item() if is_scalar else weight
    is_number = isinstance(number, Real) and not isinstance(number, bool)
    if is_number and number in (0, 1):  # Allowed in every mode.
        return float(number)
    if not isinstance(consistency, BSP):
        raise InvalidArgumentError(
            f"weight={weight!r:.40}: {type(consistency).__name__} applies each push by itself, so there is no mean "
            "to weight. Use BSP, or scale the gradient"
        )
    if not is_number or not 1 / _WEIGHT_LAST <= number <= _WEIGHT_LAST:
        raise InvalidArgumentError(
            f"weight={weight!r:.40} is out of range: use a number from 1e-18 to 1e18, or 0 to contribute nothing"
        )
    return float(number)

"""Consistency: when a slice may be updated, and when it may be read. These are specifications only; the gates that
enforce them run on the servers (``psdist_server.core.gates``).

* ``BSP``: step t is applied once every member has contributed (Valiant 1990, bulk-synchronous parallel). Exact: the
  result does not depend on arrival, nor on the number of servers.
* ``SSP``: each push is applied when it arrives; a worker may be at most ``staleness`` clocks ahead of the slowest
  (Ho et al., NIPS 2013, stale synchronous parallel).
* ``ASP``: each push is applied when it arrives, and no worker waits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import Any, Final, Literal

from psdist.errors import InvalidArgumentError, check_integer

StalenessLr = Literal["none", "inverse"]
ResizeLr = Literal["none", "linear", "sqrt"]
_COUNT_MAX = 1 << 20


def _check_staleness_lr(value: str) -> None:
    if value not in ("none", "inverse"):
        raise InvalidArgumentError(f"staleness_lr={value!r} is unknown: use 'none' or 'inverse'")


@dataclass(frozen=True)
class BSP:
    """Synchronous steps.

    backup_workers: so many members need not be waited for in a step; their late contributions are dropped (Chen et al.
        2016, "Revisiting Distributed Synchronous SGD"). With more than 0 the result depends on who is late.
    resize_lr: what the learning rate of a step is multiplied by when other than the number of workers that began takes
        part in it, n of m: "none" 1, "linear" n / m (Goyal et al. 2017), "sqrt" (n / m) ** 0.5 (Krizhevsky 2014).
    """

    backup_workers: int = 0
    resize_lr: ResizeLr = "none"

    def __post_init__(self) -> None:
        check_integer("backup_workers", self.backup_workers, 0, _COUNT_MAX)
        if self.resize_lr not in ("none", "linear", "sqrt"):
            raise InvalidArgumentError(f"resize_lr={self.resize_lr!r} is unknown: use 'none', 'linear' or 'sqrt'")

    def lr_scale(self, contributors: int, reference: int) -> float:
        """Factor on the learning rate of a step with so many contributors; ``reference`` is how many there were at the
        beginning."""
        if self.resize_lr == "none" or not contributors or not reference:
            return 1.0
        ratio = contributors / reference
        return ratio if self.resize_lr == "linear" else math.sqrt(ratio)


@dataclass(frozen=True)
class SSP:
    """Bounded staleness.

    staleness: clocks (completed pushes) that a worker may be ahead of the slowest member; 0 is a barrier per step.
    staleness_lr: "inverse" divides the learning rate by 1 + the gradient's staleness in versions.
    """

    staleness: int
    staleness_lr: StalenessLr = "none"

    def __post_init__(self) -> None:
        check_integer("staleness", self.staleness, 0, _COUNT_MAX)
        _check_staleness_lr(self.staleness_lr)


@dataclass(frozen=True)
class ASP:
    """Fully asynchronous.

    staleness_lr: "inverse" divides the learning rate by 1 + the gradient's staleness in versions.
    """

    staleness_lr: StalenessLr = "none"

    def __post_init__(self) -> None:
        _check_staleness_lr(self.staleness_lr)


Consistency = BSP | SSP | ASP
KINDS: Final[dict[str, type[Consistency]]] = {"bsp": BSP, "ssp": SSP, "asp": ASP}


def kind_of(consistency: Consistency) -> str:
    """The key of a mode in ``KINDS``."""
    return type(consistency).__name__.lower()


#: What a gradient may count for in a mean, and the inverse of the least.
_WEIGHT_LAST = 1e18


def check_weight(weight: Any, consistency: Consistency) -> float:
    """Returns the weight of a gradient in the mean of its step: 0, 1, or in BSP a number from 1e-18 to 1e18. Raises
    InvalidArgumentError for another one, and for booleans.

    Numbers of numpy, and arrays and tensors without dimensions, are numbers, too.
    """
    is_scalar = getattr(weight, "ndim", None) == 0 and hasattr(weight, "item")
    number = weight.item() if is_scalar else weight
    is_number = isinstance(number, Real) and not isinstance(number, bool)
    if is_number and number in (0, 1):  # These count in every mode.
        return float(number)
    if not isinstance(consistency, BSP):
        raise InvalidArgumentError(
            f"weight={weight!r:.40}: in {type(consistency).__name__} each push is applied by itself, so there is "
            "no mean in which it could count for more. Use BSP, or scale the gradient"
        )
    if not is_number or not 1 / _WEIGHT_LAST <= number <= _WEIGHT_LAST:
        raise InvalidArgumentError(
            f"weight={weight!r:.40} is out of range: use a number from 1e-18 to 1e18, or 0 to contribute nothing"
        )
    return float(number)

"""Parameters of a server for property tests of updates."""

from __future__ import annotations

import numpy as np

from psdist import BSP, optim
from psdist.consistency import Reduction
from psdist.types import GroupRange, ParametersEntry, ParametersSpec, Replica, Shard
from psdist_server.kernels.arrays import DenseParameters

#: One case per kernel. The first groups of two have their own hyperparameters.
SPECS: list[optim.Optimizer] = [
    optim.SGD(lr=0.1, weight_decay=0.1),
    optim.SGD(lr=0.1, momentum=0.9, dampening=0.3, overrides=(optim.override("*", lr=0.5),)),
    optim.SGD(lr=0.1, momentum=0.9, nesterov=True),
    optim.Adam(lr=0.1, schedule=optim.Linear(5, warmup_steps=2), overrides=(optim.override("*", eps=0.1),)),
    optim.AdamW(lr=0.1),
    optim.Adagrad(lr=0.1, lr_decay=0.1),
    optim.RMSprop(),
    optim.RMSprop(momentum=0.9),
    optim.RMSprop(centered=True),
    optim.RMSprop(centered=True, momentum=0.5),
    optim.Lion(lr=0.1, weight_decay=0.1),
    optim.FTRL(lr=0.5, l1=0.3, l2=0.2),
    optim.Mean(),
    optim.ASGD(lr=0.1, t0=1.0, lambd=0.1, maximize=True),
    optim.Rprop(lr=0.1),
    optim.Adam(lr=0.1, overrides=(optim.override("*", amsgrad=True),)),
    optim.Adam(lr=0.1, amsgrad=True, overrides=(optim.override("*", decoupled_weight_decay=True, amsgrad=False),)),
    optim.AdamW(lr=0.1, amsgrad=True),
    optim.Adamax(lr=0.1),
    optim.NAdam(lr=0.1, weight_decay=0.1),
    optim.RAdam(lr=0.1, betas=(0.9, 0.8), maximize=True),
    optim.Adadelta(),
    optim.RMSprop(momentum=0.9, overrides=(optim.override("*", centered=True, momentum=0.0),)),
]
SLICE = 5000  # more than a block, but not a multiple of one
TOTAL = 4 * SLICE - 700
REDUCTIONS: tuple[Reduction, ...] = ("mean", "sum")


def make(
    spec: optim.Optimizer, since: int = 0, reduction: Reduction = "mean"
) -> tuple[DenseParameters, tuple[GroupRange, ...]]:
    """Create the parameters.

    since: version of the slices at which their optimizer state begins.
    """
    ranges = (GroupRange(100, 6000, 1), GroupRange(9000, 9001, 1)) if spec.overrides else ()
    entry = ParametersEntry(
        spec=ParametersSpec("p", spec, BSP(reduction=reduction), slice_elements=SLICE),
        total=TOTAL,
        shards=(Shard(Replica("server-0", 1)),),
        ranges=ranges,
        ready=True,
        state_since=since,
    )
    dense = DenseParameters(entry)
    dense.hold(range(dense.slicing.count))
    for index in dense.indices:
        start, stop = dense.slicing.bounds(index)
        dense.install(index, np.linspace(-1, 1, TOTAL, dtype=np.float32)[start:stop], since)
    return dense, ranges

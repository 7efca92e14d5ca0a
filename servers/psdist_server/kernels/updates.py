"""Table of the fused updates: one kernel per optimizer and variant."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from psdist.compression.compiled import Kernel
from psdist_server.kernels import adam_updates, adaptive_updates, descent_updates

_MODULES: Final = (descent_updates, adam_updates, adaptive_updates)
#: Kernels by name.
UPDATES: Final[Mapping[str, Kernel]] = {
    name: value for module in _MODULES for name, value in vars(module).items() if isinstance(value, Kernel)
}


def kernel_of(kind: str, values: Mapping[str, float]) -> Kernel:
    """Return the kernel for one group of an optimizer, by kind and hyperparameters.

    It takes the group's state arrays in the order of ``Optimizer.group_state_names``.
    """
    name = "adamw" if kind == "adam" and values["decoupled_weight_decay"] else kind
    if values.get("centered"):
        name += "_centered"
    if values.get("momentum"):
        name += "_nesterov" if values.get("nesterov") else "_momentum"
    if values.get("amsgrad"):
        name += "_amsgrad"
    return UPDATES[name]

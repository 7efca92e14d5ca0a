"""Saved states of optimizers that come to an optimizer of the other kind.

The state of psdist's optimizers is on the servers, and what ``state_dict`` returns has settings alone. torch's own
optimizers refuse it with the remedy: training that continued with an empty state would differ without notice.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Final

import torch

from psdist.errors import InvalidArgumentError

#: Key of a saved state that marks it as one of psdist's optimizers.
KEY: Final = "psdist"


def has_settings_alone(state_dict: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> bool:
    """Return True if this is a state of torch's form with this optimizer's settings, and nothing for any parameter.

    So are states from before the first step, and all of SGD without momentum.
    """
    saved, groups = state_dict.get("param_groups", ()), optimizer.param_groups
    sizes = [len(group.get("params", ())) for group in saved]
    if state_dict.get("state", True) or sizes != [len(group["params"]) for group in groups]:
        return False
    return all(name in group for group in saved for name in optimizer.defaults)


def refuse_in_torch() -> None:
    """Let torch's optimizers refuse the states of psdist's. A second call changes nothing."""
    load = torch.optim.Optimizer.load_state_dict
    if hasattr(load, "refuses_psdist"):
        return

    @functools.wraps(load)
    def load_state_dict(self: torch.optim.Optimizer, state_dict: Any) -> None:
        own = state_dict.get(KEY) if isinstance(state_dict, Mapping) else None
        if own is not None:
            raise InvalidArgumentError(
                f"this state is of psdist's parameter set {own.get('name')!r} at step {own.get('step')}, and has "
                f"settings alone: what torch.optim.{type(self).__name__} keeps for each parameter is on the servers, "
                "and in the run's snapshots. To continue the run, wrap the model first, and start it with its earlier "
                "--run-id and --storage-path; to continue without the servers, load a snapshot by "
                "psdist.torch.load_optimizer_state; to begin with an empty state, do not load this one"
            )
        load(self, state_dict)

    load_state_dict.refuses_psdist = True  # type: ignore[attr-defined]  # a mark
    torch.optim.Optimizer.load_state_dict = load_state_dict  # type: ignore[method-assign]  # for all optimizers

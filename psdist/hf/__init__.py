"""Hugging Face's Trainer and Accelerate, with the weights on parameter servers. Needs the extra ``hf``.

``Trainer`` replaces ``transformers.Trainer``, and ``Accelerator`` replaces ``accelerate.Accelerator``. Import this
package before ``TrainingArguments`` or an accelerator is made: from then on the first of them in a launched script
makes the run's workers the default process group of torch.distributed, and starts no other. Without a launcher it
starts nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

try:
    from accelerate import PartialState as _PartialState
    from accelerate.utils import parse_flag_from_env as _parse_flag_from_env
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "psdist.hf needs Accelerate, and its Trainer needs Transformers: pip install accelerate transformers",
        name=error.name,
    ) from error

from psdist.hf.accelerator import Accelerator
from psdist.process_group import start

if TYPE_CHECKING:
    from psdist.hf.trainer import Trainer

__all__ = ["Accelerator", "Trainer"]


def _after_start(make: Callable[..., None]) -> Callable[..., None]:
    """Return Accelerate's method that finds this process's place, with a start of the process group before it."""

    @wraps(make)
    def make_state(state: Any, cpu: bool = False, **keywords: Any) -> None:
        if not state._shared_state and start() and not torch.cuda.is_available():
            # On a machine without a GPU, Accelerate otherwise takes each worker for a script alone.
            os.environ.setdefault("ACCELERATE_USE_CPU", "true")
            cpu = cpu or _parse_flag_from_env("ACCELERATE_USE_CPU")
        make(state, cpu, **keywords)

    return make_state


# TrainingArguments and accelerators both begin with it.
_PartialState.__init__ = _after_start(_PartialState.__init__)


def __getattr__(name: str) -> Any:
    """Import Trainer on first use: Transformers takes seconds to import, and Accelerate works without it."""
    if name != "Trainer":
        raise AttributeError(f"module 'psdist.hf' has no attribute {name!r}")
    try:
        found = import_module("psdist.hf.trainer").Trainer
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise ModuleNotFoundError(
            "psdist.hf.Trainer needs Transformers: pip install transformers", name="transformers"
        ) from error
    globals()[name] = found
    return found

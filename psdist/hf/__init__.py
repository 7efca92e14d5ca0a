"""Hugging Face's Trainer and Accelerate, with the weights on parameter servers. Needs the extra ``hf``.

``Trainer`` replaces ``transformers.Trainer``, and ``Accelerator`` replaces ``accelerate.Accelerator``. Import this
package before ``TrainingArguments`` or an accelerator is made: in a launched script the import makes the run's workers
the default process group of torch.distributed, so that neither starts another. Without a launcher it starts nothing.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

try:
    import accelerate as _accelerate
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

if start() and not torch.cuda.is_available():
    # On a machine without a GPU, Accelerate otherwise takes each worker for a script alone.
    os.environ.setdefault("ACCELERATE_USE_CPU", "true")
del _accelerate


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

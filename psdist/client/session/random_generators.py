"""States of the process's random generators, those of Python's ``random``, ``numpy.random`` and torch, as arrays."""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

logger = logging.getLogger("psdist")

#: Prefix of their names among the states of a worker in a snapshot.
RANDOM: Final = "psdist-random."


def save() -> dict[str, NDArray[Any]]:
    """Return the states. torch's are among them once torch is imported, and CUDA's once it is in use."""
    _, words, following = random.getstate()
    _, key, position, has_gauss, gauss = np.random.get_state(legacy=True)
    state: dict[str, NDArray[Any]] = {
        "python": np.array(words, np.uint32),
        "python.gauss": np.array([] if following is None else [following], np.float64),
        "numpy": np.array([*key, position, has_gauss], np.uint32),
        "numpy.gauss": np.array([gauss], np.float64),
    }
    if (torch := sys.modules.get("torch")) is not None:
        state["torch"] = torch.get_rng_state().numpy()
        if torch.cuda.is_initialized():
            state |= {f"cuda.{number}": one.numpy() for number, one in enumerate(torch.cuda.get_rng_state_all())}
    return state


def restore(state: Mapping[str, NDArray[Any]]) -> None:
    """Restore the states of ``save``; nothing if it is empty. Logs a warning for torch's if torch is not imported."""
    if not state:
        return
    gauss = state["python.gauss"].tolist()
    random.setstate((3, tuple(state["python"].tolist()), gauss[0] if gauss else None))
    *key, position, has_gauss = state["numpy"].tolist()
    np.random.set_state(("MT19937", np.array(key, np.uint32), position, has_gauss, state["numpy.gauss"][0]))
    if "torch" not in state:
        return
    torch = sys.modules.get("torch")
    if torch is None:
        logger.warning("the state of torch's random generator is not restored: import torch before keep_state()")
        return
    torch.set_rng_state(torch.from_numpy(state["torch"].copy()))
    for number in range(torch.cuda.device_count() if "cuda.0" in state else 0):
        if (one := state.get(f"cuda.{number}")) is not None:
            torch.cuda.set_rng_state(torch.from_numpy(one.copy()), number)

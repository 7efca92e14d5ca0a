"""The arithmetic of the optimizers becomes CUDA C that devices take; what has no translation is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from psdist.device.device import ARCHITECTURES, compile_source
from psdist.errors import InternalError
from psdist_server.kernels import device_parameters as source
from psdist_server.kernels.device_parameters import ARRAYS, SCALARS, update_source
from psdist_server.kernels.updates import UPDATES


@pytest.mark.parametrize(
    "architecture", [ARCHITECTURES[0], *(pytest.param(one, marks=pytest.mark.long) for one in ARCHITECTURES[1:])]
)
def test_the_kernels_of_all_optimizers_are_compiled_for_devices(architecture: str) -> None:
    text = update_source(*UPDATES)
    assert text.count(" update_") == len(UPDATES) == 21
    assert compile_source(text, architecture)[:4] == b"\x7fELF"


def test_no_optimizer_has_more_arrays_or_scalars_than_a_kernel_takes() -> None:
    for kernel in UPDATES.values():
        count = kernel.element.__code__.co_argcount
        scalars = kernel.signature.args[-1].count
        assert count - scalars - 1 <= ARRAYS and scalars <= SCALARS


def _power(w: Any, g: Any, rate: Any) -> Any:
    return w - rate * g**2


def _logarithm(w: Any, g: Any, rate: Any) -> Any:
    return w - rate * np.log(g)


def _loop(w: Any, g: Any, rate: Any) -> Any:
    for _ in range(2):
        w = w - rate * g
    return w


def _wide(w: Any, g: Any, rate: Any) -> Any:
    return w - rate * g * 0.5


def test_what_has_no_translation_is_refused() -> None:
    for element in [_power, _logarithm, _loop, _wide]:
        with pytest.raises(InternalError, match="no CUDA C"):
            source._kernel("broken", element)

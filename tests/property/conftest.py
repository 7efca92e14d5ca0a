"""Fixtures for tests of kernels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from psdist.compression.kernel_runtime import Kernel


@pytest.fixture(scope="module", params=["compiled", "interpreted"])
def execution(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run a test with compiled and with interpreted kernels."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "interpreted":
            patch.setattr(Kernel, "__call__", _interpret)
        yield request.param


def _interpret(kernel: Kernel, *arguments: Any) -> Any:
    assert kernel.interpreted is not None, kernel.__name__
    return kernel.interpreted(*arguments)

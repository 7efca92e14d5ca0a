"""The encoders' kernels compile for devices."""

from __future__ import annotations

import pytest

from psdist.device.compile import ARCHITECTURES, compile_source, nvrtc
from psdist.device.memory import codec_source


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_source_is_compiled_for_devices(architecture: str) -> None:
    nvrtc()
    assert compile_source(codec_source(), architecture)[:4] == b"\x7fELF"

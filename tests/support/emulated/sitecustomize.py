"""Gives servers that are started with ``--device cuda`` a device on the processor. Found where a test puts this folder
into PYTHONPATH; programs have no flag for it.

Where the file that HOST_DEVICE_LOST names exists, the device of the server that HOST_DEVICE_OF names fails at its next
kernel, once: the file is gone then, so that the server that is started again has one that works.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any


def _is_device_server() -> bool:
    words = sys.orig_argv
    return "psdist_server" in words and any(word.startswith("cuda") for word in words)


def _install() -> None:
    from psdist.gpu import device
    from tests.support.host_device import HostDevice

    class ServerDevice(HostDevice):
        """A device that may fail."""

        def launch(self, *arguments: Any) -> None:
            lost = Path(os.environ.get("HOST_DEVICE_LOST", "none"))
            if lost.exists() and os.environ["HOST_DEVICE_OF"] in sys.orig_argv:
                lost.unlink()
                self.failure = "an illegal memory access was encountered"
            super().launch(*arguments)

    device.open_device = lambda name: ServerDevice()  # type: ignore[assignment, return-value]


if _is_device_server():
    _install()

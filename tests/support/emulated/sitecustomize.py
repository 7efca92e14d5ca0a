"""Give servers that are started with ``--device cuda`` a device emulated on the CPU.

Python finds this module if a test puts its folder into PYTHONPATH; programs have no flag for it. If the file named by
HOST_DEVICE_LOST exists, the device of the server named by HOST_DEVICE_OF fails at its next kernel, once: it removes
the file, so that the restarted server has a working device.
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
    from psdist.device import device
    from tests.support.host_device import HostDevice

    class ServerDevice(HostDevice):
        """Device that may fail."""

        def launch(self, *arguments: Any) -> None:
            lost = Path(os.environ.get("HOST_DEVICE_LOST", "none"))
            if lost.exists() and os.environ["HOST_DEVICE_OF"] in sys.orig_argv:
                lost.unlink()
                self.failure = "an illegal memory access was encountered"
            super().launch(*arguments)

    device.open_device = lambda name: ServerDevice()  # type: ignore[assignment, return-value]


if _is_device_server():
    _install()

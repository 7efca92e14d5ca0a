"""A client without device arrays imports nothing of them."""

from __future__ import annotations

import subprocess
import sys


def test_nothing_of_a_device_is_imported_without_one() -> None:
    code = (
        "import sys, psdist, psdist.client.parameters, psdist.client.encoding, psdist.client.core.encoder\n"
        "print([name for name in sys.modules if name.startswith(('cupy', 'psdist.client.device', "
        "'psdist.device.coders', 'psdist.client.device_encoder', 'psdist.device.memory'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

"""psdist works without torch and JAX, and its parts for them name the missing package."""

from __future__ import annotations

import subprocess
import sys

import pytest

_ALONE = (
    "import sys, psdist, psdist.client.context; psdist.init, psdist.optim.Adam, psdist.Client; "
    "sys.exit(bool({'torch', 'jax'} & sys.modules.keys()))"
)


@pytest.mark.parametrize(
    ("program", "status", "said"),
    [
        (_ALONE, 0, ""),
        ("import sys; sys.modules['jax'] = None; import psdist.jax", 1, "psdist.jax needs JAX: pip install jax"),
        ("import sys; sys.modules['torch'] = None; import psdist.torch", 1, "needs PyTorch: pip install torch"),
    ],
)
def test_packages_are_imported_by_the_part_for_them_alone(program: str, status: int, said: str) -> None:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == status and said in done.stderr, done.stderr

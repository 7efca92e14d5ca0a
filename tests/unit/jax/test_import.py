"""psdist works without JAX, and psdist.jax says what it needs."""

from __future__ import annotations

import subprocess
import sys

import pytest

_WITHOUT = "import sys; sys.modules['jax'] = None; import psdist.jax"
_ALONE = "import sys, psdist, psdist.client.context; sys.exit('jax' in sys.modules)"


@pytest.mark.parametrize(
    ("program", "status", "said"), [(_WITHOUT, 1, "psdist.jax needs JAX: pip install jax"), (_ALONE, 0, "")]
)
def test_only_psdist_jax_imports_jax(program: str, status: int, said: str) -> None:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == status and said in done.stderr, done.stderr

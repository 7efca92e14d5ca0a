"""The fused updates are those that ``tests.kernel_wrappers`` writes, and numba caches them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests import kernel_wrappers

#: Prints whether an update is in the cache, and how many times it was then loaded from there.
_START = """
from psdist_server.kernels.updates import UPDATES
update = UPDATES["mean"]
print(update.is_cached, sum(update.compile().stats.cache_hits.values()))
"""


def test_updates_are_current() -> None:
    assert kernel_wrappers.TARGET.read_text(encoding="utf-8") == kernel_wrappers.generated(), (
        "run python -m tests.kernel_wrappers"
    )


def test_a_second_start_compiles_nothing(tmp_path: Path) -> None:
    environ = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    starts = [
        subprocess.run([sys.executable, "-c", _START], env=environ, capture_output=True, text=True, check=True)
        for _ in range(2)
    ]
    assert [start.stdout.split() for start in starts] == [["False", "0"], ["True", "1"]]

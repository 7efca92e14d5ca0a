"""Run PyTorch's tests with both backends, and write ``docs/torch-suite.md``: ``python -m tests.torch_suite``.

The exit status is 1 if a test passes with gloo and not with psdist. PATTERN as an argument runs the tests whose names
contain it, and writes nothing.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch

from tests.test_tidy import ROOT
from tests.torch_suite import suite
from tests.torch_suite.page import page

_RANKS = 4


def main(pattern: str = "") -> int:
    """Run the tests. Returns the exit status."""
    tests = [name for name in suite.names() if pattern in name]
    with tempfile.TemporaryDirectory() as directory:
        logs = {backend: Path(directory) / backend for backend in ("gloo", "psdist")}
        gloo, psdist = (suite.run(backend, tests, _RANKS, log) for backend, log in logs.items())
        worse = suite.worse(gloo, psdist)
        if worse:
            print(logs["psdist"].read_text(encoding="utf-8"), file=sys.stderr)
    for name in worse:
        print(f"{name} passes with gloo, and with psdist: {psdist[name]}")
    if not pattern:
        version = torch.__version__.partition("+")[0]
        (ROOT / "docs/torch-suite.md").write_text(page(gloo, psdist, version, str(_RANKS)), encoding="utf-8")
    print(f"{len(tests)} tests, {len(worse)} fail with psdist and pass with gloo")
    return bool(worse)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

"""A frozen application, whose ``sys.executable`` is itself, that trains alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_SCRIPT = """
import sys
sys.frozen, sys.executable = True, sys.argv[1]
import psdist
with psdist.init() as context:
    print("trains alone:", context.world_size)
"""


@pytest.mark.parametrize("has_python", [False, True])
def test_a_frozen_application_does_not_start_itself(tmp_path: Path, has_python: bool) -> None:
    application, started = tmp_path / "application", tmp_path / "started"
    application.write_text(f"#!/bin/sh\ntouch {started}\n")
    application.chmod(0o700)
    environment = {**os.environ, **({"PSDIST_PYTHON": sys.executable} if has_python else {})}
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, str(application)], env=environment, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert not started.exists()
    if has_python:
        assert done.returncode == 0 and "trains alone: 1" in done.stdout, done.stderr
    else:
        assert "ConfigurationError" in done.stderr and "set PSDIST_PYTHON to a Python" in done.stderr, done.stderr

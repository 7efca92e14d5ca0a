"""The image's recipe, without a container engine: everything of psdist that it runs exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from psdist.cli.main import PSDIST

DOCKERFILE = Path(__file__).resolve().parents[2] / "servers" / "Dockerfile"


def test_the_kernels_are_compiled_by_a_command_that_exists(capsys: pytest.CaptureFixture[str]) -> None:
    steps = re.findall(r"^RUN ((?:.*\\\n)*.*)$", DOCKERFILE.read_text(), re.M)
    (command,) = [step.split() for step in steps if "psdist" in step.split()[0] or "psdist_server" in step]
    assert command == ["psdist", "warmup"]
    with pytest.raises(SystemExit) as help_shown:
        PSDIST.run([command[1], "--help"], {})
    assert help_shown.value.code == 0 and "kernels" in capsys.readouterr().out

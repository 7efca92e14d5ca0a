"""An engine of containers with the image of psdist."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

from tests.support.tree import ROOT

#: The first build downloads the dependencies.
BUILD_SECONDS = 900
TRAIN_SECONDS = 240


def _compose() -> list[str] | None:
    """Return the command of Compose 1.29 or of v2, or nothing if neither is installed."""
    if shutil.which("docker-compose"):
        return ["docker-compose"]
    if shutil.which("docker") and subprocess.run(["docker", "compose", "version"], capture_output=True).returncode == 0:
        return ["docker", "compose"]
    return None


def _why_not() -> str:
    if not shutil.which("docker") or _compose() is None:
        return "no docker with Compose is installed"
    if subprocess.run(["docker", "info"], capture_output=True, check=False).returncode != 0:
        return "no container engine answers to 'docker info'"
    return ""


@pytest.fixture(scope="module")
def engine() -> list[str]:
    """Command of Compose, with the image built. Skips the test if there is no engine."""
    if reason := _why_not():
        pytest.skip(reason)
    command = _compose() or []
    _run([*command, "build", "scheduler"], BUILD_SECONDS)
    return command


def _run(command: list[str], timeout_seconds: float, **environ: str) -> str:
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        timeout=timeout_seconds,
        env={**os.environ, **environ},
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
    return done.stdout

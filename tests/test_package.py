"""What the wheel installs: the three import roots with their stubs and type marker, the commands, and nothing else."""

from __future__ import annotations

import configparser
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOTS = {"psdist", "psdist_server", "psdist_scheduler"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel as ``pip install .`` would build it, without fetching anything."""
    pytest.importorskip("hatchling", reason="hatchling is not installed")
    target = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(target), str(ROOT)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = target.glob("*.whl")
    return zipfile.ZipFile(path)


def _names(wheel: zipfile.ZipFile, *, meta: bool) -> list[str]:
    return [name for name in wheel.namelist() if (".dist-info/" in name) == meta]


def test_three_import_roots_and_no_others(wheel: zipfile.ZipFile) -> None:
    assert {name.split("/")[0] for name in _names(wheel, meta=False)} == ROOTS


def test_every_module_is_there(wheel: zipfile.ZipFile) -> None:
    folders = [ROOT / "psdist", ROOT / "servers/psdist_server", ROOT / "servers/psdist_scheduler"]
    wanted = {path.relative_to(folder.parent).as_posix() for folder in folders for path in folder.rglob("*.py")}
    assert wanted <= set(wheel.namelist())
    assert "psdist/py.typed" in wheel.namelist()


def test_nothing_but_code_is_there(wheel: zipfile.ZipFile) -> None:
    kinds = {Path(name).suffix for name in _names(wheel, meta=False)}
    assert kinds <= {".py", ".pyi", ".typed", ".html", ".css", ".js"}


def test_commands_and_license(wheel: zipfile.ZipFile) -> None:
    meta = {name.split("/", 1)[1]: name for name in _names(wheel, meta=True)}
    commands = configparser.ConfigParser()
    commands.read_string(wheel.read(meta["entry_points.txt"]).decode())
    assert set(commands["console_scripts"]) == {"psdist", "psdist-scheduler", "psdist-server", "psdist-worker"}
    assert b"Apache License" in wheel.read(meta["licenses/LICENSE"])

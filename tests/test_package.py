"""The wheel installs the three import roots with their stubs and type marker, the commands, and nothing else."""

from __future__ import annotations

import configparser
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOTS = {"psdist", "psdist_server", "psdist_scheduler"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Wheel as ``pip install .`` would build it, without any downloads."""
    pytest.importorskip("hatchling", reason="hatchling is not installed")
    target = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(target), str(ROOT)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = target.glob("*.whl")
    return zipfile.ZipFile(path)


def test_an_editable_install_is_folders_that_type_checkers_follow(tmp_path: Path) -> None:
    """Check for a .pth file with paths: an import hook would make psdist's types unknown to mypy and editors."""
    pytest.importorskip("hatchling", reason="hatchling is not installed")
    program = "import sys; from hatchling.build import build_editable; build_editable(sys.argv[1])"
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], cwd=ROOT, check=True, capture_output=True)
    (path,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(path) as editable:
        (name,) = (name for name in editable.namelist() if name.endswith(".pth"))
        folders = [Path(line) for line in editable.read(name).decode().splitlines()]
    found = {root for root in ROOTS for folder in folders if (folder / root / "__init__.py").is_file()}
    assert found == ROOTS and (folders[0] / "psdist/py.typed").is_file()


def _names(wheel: zipfile.ZipFile, *, meta: bool) -> list[str]:
    return [name for name in wheel.namelist() if (".dist-info/" in name) == meta]


def test_the_readme_lists_all_extras() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (table,) = re.findall(r"^\| extra \| brings .*?\n\n", (ROOT / "README.md").read_text(), re.M | re.S)
    listed = [name for cell in re.findall(r"^\| (`[^|]*)\|", table, re.M) for name in re.findall(r"`(\w+)`", cell)]
    assert sorted(listed) == sorted(extras)


def test_three_import_roots_and_no_others(wheel: zipfile.ZipFile) -> None:
    assert {name.split("/")[0] for name in _names(wheel, meta=False)} == ROOTS


def test_every_module_is_there(wheel: zipfile.ZipFile) -> None:
    folders = [ROOT / "psdist", ROOT / "servers/psdist_server", ROOT / "servers/psdist_scheduler"]
    wanted = {path.relative_to(folder.parent).as_posix() for folder in folders for path in folder.rglob("*.py")}
    wanted |= {path.relative_to(folder.parent).as_posix() for folder in folders for path in folder.rglob("*.cu")}
    assert wanted <= set(wheel.namelist())
    assert "psdist/py.typed" in wheel.namelist()


def test_nothing_but_code_is_there(wheel: zipfile.ZipFile) -> None:
    kinds = {Path(name).suffix for name in _names(wheel, meta=False)}
    assert kinds <= {".py", ".cu", ".pyi", ".typed", ".html", ".css", ".js", ".txt", ".sh", ".yaml"}


def test_commands_and_license(wheel: zipfile.ZipFile) -> None:
    meta = {name.split("/", 1)[1]: name for name in _names(wheel, meta=True)}
    commands = configparser.ConfigParser()
    commands.read_string(wheel.read(meta["entry_points.txt"]).decode())
    assert set(commands["console_scripts"]) == {"psdist", "psdist-scheduler", "psdist-server", "psdist-worker"}
    assert b"Apache License" in wheel.read(meta["licenses/LICENSE"])

"""Scripts that cannot be run are refused with the remedy, and errors of scripts have one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from psdist.errors import ConfigurationError
from psdist.launcher.plan import SchedulerAddress, ScriptSettings
from psdist.launcher.script_checks import ScriptKind, check_script, remedy_for


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "pkg" / "sub").mkdir(parents=True)
    for name in ("pkg/__init__.py", "pkg/sub/__init__.py", "pkg/sub/train.py", "train.py", "n.ipynb"):
        (tmp_path / name).touch()
    for name, text in {
        "windows.sh": "#!/bin/sh\r\n", "strange.sh": "#!/nonexistent/sh -e\n", "bare.sh": "echo\n",
        "x.sh": "#!/bin/sh\n", "binary": "\x7fELF\0", "polyglot.py": "#!/bin/sh\n",
    }.items():  # fmt: skip
        (tmp_path / name).write_bytes(text.encode())
        (tmp_path / name).chmod(0o755)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("kind", "name", "words"),
    [
        (ScriptKind.FILE, "python", "leave python out"),
        (ScriptKind.FILE, "train", "did you mean train.py?"),
        (ScriptKind.FILE, "trian.py", "did you mean train.py?"),
        (ScriptKind.FILE, "pkg.sub.train", "write --module pkg.sub.train"),
        (ScriptKind.FILE, "nothing.py", "nothing.py does not exist"),
        (ScriptKind.FILE, "pkg", "is a directory without a __main__.py"),
        (ScriptKind.FILE, "n.ipynb", "psdist.launch"),
        (ScriptKind.FILE, "x.sh", "no Python script, but a script of /bin/sh: pass --no-python"),
        (ScriptKind.FILE, "binary", "no Python script, but a program: pass --no-python"),
        (ScriptKind.MODULE, "pkg/sub/train.py", "write --module pkg.sub.train"),
        (ScriptKind.MODULE, "no_such_module.train", "there is no module named no_such_module"),
        (ScriptKind.PROGRAM, "./nothing.sh", "does not exist"),
        (ScriptKind.PROGRAM, "pkg", "is a directory"),
        (ScriptKind.PROGRAM, "x.sh", "write ./x.sh"),
        (ScriptKind.PROGRAM, "./windows.sh", "CR LF"),
        (ScriptKind.PROGRAM, "./strange.sh", "/nonexistent/sh, which the first line of ./strange.sh names"),
        (ScriptKind.PROGRAM, "./bare.sh", "names no interpreter"),
        (ScriptKind.PROGRAM, "./n.ipynb", "chmod +x ./n.ipynb"),
    ],
)
def test_a_script_that_cannot_be_run_is_refused_with_the_remedy(kind: ScriptKind, name: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(words)):
        check_script(kind, name)


def test_a_file_that_hides_psdist_is_refused(folder: Path) -> None:
    (folder / "pkg" / "psdist.py").touch()
    for kind, name in ((ScriptKind.FILE, "pkg/psdist.py"), (ScriptKind.FILE, "pkg/__init__.py")):
        with pytest.raises(ConfigurationError, match=r"pkg/psdist.py hides the package psdist"):
            check_script(kind, name)
    check_script(ScriptKind.MODULE, "pkg.sub.train")


def test_other_scripts_are_accepted() -> None:
    for kind, names in {
        ScriptKind.FILE: ("train.py", "polyglot.py"),
        ScriptKind.MODULE: ("pkg.sub.train", "sys", "json.tool"),
        ScriptKind.PROGRAM: ("./x.sh", "./binary", "sh"),
    }.items():
        for name in names:
            check_script(kind, name)


def test_an_error_of_the_script_has_a_remedy(folder: Path) -> None:
    relative = ["  File ...", "ImportError: attempted relative import with no known parent package"]
    shown = remedy_for(ScriptKind.FILE, "pkg/sub/train.py", relative)
    assert shown.endswith(f"in {folder}, psdist run --module pkg.sub.train")
    missing = remedy_for(ScriptKind.FILE, "train.py", ["ModuleNotFoundError: No module named 'nix'"])
    assert "install 'nix' there" in missing
    (folder / "numpy.py").touch()
    for line in (
        "ModuleNotFoundError: No module named 'numpy.typing'; 'numpy' is not a package",
        "AttributeError: partially initialized module 'numpy' has no attribute 'zeros' (most likely due to a circular",
    ):
        assert (
            remedy_for(ScriptKind.FILE, "train.py", [line])
            == f"{folder}/numpy.py hides the package of that name: rename it"
        )
    assert remedy_for(ScriptKind.FILE, "train.py", ["ModuleNotFoundError: No module named 'psdist.init'"]) == ""
    assert "dmesg" in remedy_for(ScriptKind.PROGRAM, "x", [], 137) and "FAULT" in remedy_for(
        ScriptKind.FILE, "x", [], 139
    )
    assert remedy_for(ScriptKind.FILE, "train.py", [], 143) == ""
    assert remedy_for(ScriptKind.FILE, "train.py", ["ValueError: No module named 'nix'"]) == ""


def test_processes_write_utf_8_in_any_locale() -> None:
    link = SchedulerAddress(address="127.0.0.1:1")
    assert link.environment({})["PYTHONIOENCODING"] == "utf-8:surrogateescape"
    assert link.environment({"PYTHONIOENCODING": "latin-1"})["PYTHONIOENCODING"] == "latin-1"
    assert ScriptSettings(command=("train.py",)).kind is ScriptKind.FILE

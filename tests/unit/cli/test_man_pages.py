"""Manual pages: one for each program and command, with all flags, which mandoc and groff render without a warning."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from psdist.cli.completion import nodes
from tests import man_pages


def test_each_command_has_a_page_with_its_flags() -> None:
    pages = man_pages.pages()
    assert {"psdist.1", "psdist-run.1", "psdist-config-show.1", "psdist-scheduler.1"} <= pages.keys()
    for node in nodes():
        page = pages[f"{node.path.replace(' ', '-')}.1"]
        assert all(f"\\fB{flag.name.replace('-', chr(92) + '-')}\\fR" in page for flag in node.flags)
    assert "psdist\\-config\\-show(1)" in pages["psdist-config.1"]


@pytest.mark.parametrize(
    "command", [("mandoc", "-Tlint", "-W", "warning"), ("groff", "-man", "-ww", "-Tutf8", "-z")], ids=lambda one: one[0]
)
def test_pages_render_without_warnings(command: tuple[str, ...], tmp_path: Path) -> None:
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    man_pages.main(tmp_path)
    files = sorted(map(str, tmp_path.glob("*.1")))
    done = subprocess.run([*command, *files], capture_output=True, text=True, check=False, timeout=120)
    assert len(files) > 30 and (done.returncode, done.stdout, done.stderr) == (0, "", "")

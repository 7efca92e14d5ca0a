"""The programs that the pages show run as they stand there: what the pages tell is true."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from psdist.launch.embedded import EmbeddedCluster

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_commands_of_the_wire_page_make_stubs(tmp_path: Path) -> None:
    """As a reader runs them in a copy of the repository. The stubs are those that its client imports."""
    (commands,) = re.findall(r"```sh\n(.*?)```", (DOCS / "wire.md").read_text(), re.S)
    (tmp_path / "proto").symlink_to(DOCS.parent / "proto")
    lines = [line for line in commands.splitlines() if not line.startswith("pip ")]
    assert len(lines) < len(commands.splitlines())
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    subprocess.run(["bash", "-ec", "\n".join(lines)], cwd=tmp_path, env=environment, check=True, timeout=240)
    made = {path.relative_to(tmp_path / "stubs").as_posix() for path in (tmp_path / "stubs").rglob("*.py")}
    names = ("common", "scheduler", "server")
    assert made == {f"psdist/v1/{name}_pb2{kind}.py" for name in names for kind in ("", "_grpc")}


def test_the_client_of_the_wire_page_trains(tmp_path: Path) -> None:
    script = _program_of("wire.md", tmp_path)
    cluster = EmbeddedCluster(servers=2)
    try:
        environment = os.environ | {"PSDIST_SCHEDULER": cluster.address, "PSDIST_TOKEN": cluster.token}
        done = subprocess.run(
            [sys.executable, str(script)], capture_output=True, text=True, check=False, env=environment, timeout=240
        )
    finally:
        cluster.close()
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"\[(0\.999\d+ ?){4}\]\n", done.stdout), done.stdout


def test_the_program_of_the_page_on_use_trains(tmp_path: Path) -> None:
    script = _program_of("use.md", tmp_path)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"0\.878 after 20 steps by \w+\n", done.stdout), done.stdout


def _program_of(page: str, directory: Path) -> Path:
    """The only Python program of a page, as a file."""
    (code,) = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.S)
    script = directory / "program.py"
    script.write_text(code)
    return script

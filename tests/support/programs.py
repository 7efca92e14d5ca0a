"""Programs of psdist that a test starts in a directory."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import psutil


class Programs:
    """A directory with a script, and the programs started in it."""

    def __init__(self, path: Path, script: str) -> None:
        self.path = path
        self.started: list[subprocess.Popen[str]] = []
        (path / "train.py").write_text(script)
        self.environ = {**os.environ, "XDG_RUNTIME_DIR": str(path), "TMPDIR": str(path)}

    def start(self, command: str, *arguments: str, cwd: Path | None = None, **environ: str) -> subprocess.Popen[str]:
        """Start ``psdist``, ``psdist-scheduler``, ``psdist-server`` or ``psdist-worker``."""
        program = ["-c", f"from psdist.cli import main; main.{command.removeprefix('psdist-')}()"]
        process = subprocess.Popen(
            [sys.executable, *(["-m", "psdist.cli.main"] if command == "psdist" else program), *arguments],
            env={**self.environ, **environ},
            cwd=cwd or self.path,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self.started.append(process)
        return process

    def run(self, command: str, *arguments: str, cwd: Path | None = None, **environ: str) -> tuple[int, str]:
        """Run a command to its end. Returns status and output."""
        return end(self.start(command, *arguments, cwd=cwd, **environ))

    def close(self) -> None:
        """End the programs and all that they started."""
        for process in self.started:
            if process.poll() is None:
                family = psutil.Process(process.pid).children(recursive=True)
                process.kill()
                psutil.wait_procs(family, timeout=240)
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


def end(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Return the status and the rest of the output."""
    text, _ = process.communicate()
    return process.returncode, text


def until(process: subprocess.Popen[str], pattern: str) -> re.Match[str]:
    """Read a process's lines up to one with ``pattern``."""
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        if match := re.search(pattern, line):
            return match
    raise AssertionError(f"no {pattern!r} in:\n{''.join(seen)}")

"""``psdist run`` of a script, for tests that end or stop its processes at known points."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil


class Run:
    """Run of ``script`` with these arguments, in ``path``. As a context manager it is stopped at the end."""

    def __init__(
        self, path: Path, script: str, *arguments: str, transport: str = "auto", flags: tuple[str, ...] = ()
    ) -> None:
        (path / "train.py").write_text(script)
        command = [sys.executable, "-m", "psdist.cli.main", "run", "--nproc-per-node", "2"]
        defaults = () if "--nservers" in flags else ("--nservers", "2")
        self.process = subprocess.Popen(
            [*command, *defaults, *flags, "train.py", *arguments],
            env={**os.environ, "XDG_RUNTIME_DIR": str(path), "TMPDIR": str(path)} | {"PSDIST_TRANSPORT": transport},
            cwd=path,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self.family = psutil.Process(self.process.pid)
        #: All lines read so far.
        self.seen: list[str] = []

    @classmethod
    def ended(
        cls,
        path: Path,
        script: str,
        *arguments: str,
        transport: str = "auto",
        flags: tuple[str, ...] = (),
        timeout: float = 240,
    ) -> tuple[int, str]:
        """Run ``script`` to its end. Return the exit status and the output."""
        with cls(path, script, *arguments, transport=transport, flags=flags) as run:
            return run.end(timeout)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def until(self, pattern: str, count: int = 1, timeout: float = 240) -> re.Match[str]:
        """Read lines until ``count`` of them match the pattern. Return the last match."""
        assert self.process.stdout is not None
        late = threading.Timer(timeout, self._kill)
        late.start()
        try:
            while count:
                line = self.process.stdout.readline()
                self.seen.append(line)
                assert line, f"no {pattern!r} in {''.join(self.seen)}"
                if found := re.search(pattern, line):
                    count -= 1
        finally:
            late.cancel()
        return found

    def child(self, *words: str) -> psutil.Process:
        """Return the first descendant with all these words in its command line."""
        return self.children(*words)[0]

    def children(self, *words: str) -> list[psutil.Process]:
        """Return the descendants with all these words in their command lines."""
        family = self.family.children(recursive=True)
        return [child for child in family if set(words) <= set(_words(child))]

    def end(self, timeout: float = 240) -> tuple[int, str]:
        """Return the exit status and the remaining output."""
        assert self.process.stdout is not None
        late = threading.Timer(timeout, self._kill)
        late.start()
        try:
            # Not ``communicate``, which ignores lines that were read ahead.
            text = self.process.stdout.read()
            return self.process.wait(), text
        finally:
            late.cancel()

    def kill_all(self) -> None:
        """Kill the launcher and all its descendants before any notices the end of another."""
        family = [self.family, *self.family.children(recursive=True)]
        for process in family:
            process.send_signal(signal.SIGSTOP)
        for process in family:
            process.kill()
        psutil.wait_procs(family[1:], timeout=60)

    def stop(self) -> None:
        """Kill the launcher and all its descendants."""
        self._kill()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def _kill(self) -> None:
        children = self.family.children(recursive=True) if self.process.poll() is None else []
        self.process.kill()
        self.process.wait()
        for child in children:
            if child.is_running() and child.status() == psutil.STATUS_STOPPED:
                child.resume()
        _, alive = psutil.wait_procs(children, timeout=60)
        for child in alive:
            child.kill()


def _words(process: psutil.Process) -> list[str]:
    """Return a process's command line; empty if it has ended meanwhile."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []

"""A directory with scripts, and the launchers started there."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import psutil

_SCHEDULER = """
import os, sys
from psdist.settings.programs import scheduler_settings
settings = scheduler_settings(sys.argv[1:])
print("pid", os.getpid(), flush=True)
if os.environ.get("STAND_IN") == "mute scheduler":
    os.read(settings.lifeline_fd, 1)
draft = str(settings.address_file) + ".draft"
with open(draft, "w") as file:
    file.write("127.0.0.1:9\\n")
os.replace(draft, settings.address_file)
if os.environ.get("STAND_IN") == "scheduler dies":
    sys.exit("the scheduler's last words")
os.read(settings.lifeline_fd, 1)
"""
_SERVER = """
import os, sys
from psdist.settings.programs import server_settings
settings = server_settings(sys.argv[1:])
assert settings.credentials.token and settings.scheduler_address() == "127.0.0.1:9" and settings.run_id
print("pid", os.getpid(), settings.server_id, settings.kernel_threads, flush=True)
if os.environ.get("STAND_IN") == "server dies" and settings.server_id == "server-1":
    print("the server's last words", file=sys.stderr, flush=True)
    os.kill(os.getpid(), 9)
os.read(settings.lifeline_fd, 1)
"""
#: A worker's script whose arguments set the actions of each rank.
_WORKER = """
import os, signal, subprocess, sys, time
rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
def connect():
    open(os.environ["PSDIST_CONNECTED_FILE"], "x").close()
for word in sys.argv[1:]:
    who, _, what = word.rpartition(":")
    if who and who not in (str(rank), f"{rank}.{attempt}"):
        continue
    if what == "connect":
        connect()
    elif what == "fail":
        raise RuntimeError(f"boom in attempt {attempt}")
    elif what == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif what == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    elif what == "child":
        child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
        print("pid", child.pid)
    elif what == "meet":  # A FIFO is opened when both ends are.
        os.open("meeting", os.O_RDONLY if rank else os.O_WRONLY)
    elif what == "wait":
        print("pid", os.getpid())
        signal.pause()
    elif what.startswith("exit"):
        sys.exit(int(what[4:]))
    else:
        print(what, attempt)
"""


class Launched:
    """A command under test. Its two outputs are merged, in order, unless ``stderr`` names a destination for the
    second."""

    def __init__(self, argv: list[str], environ: dict[str, str], cwd: Path, stderr: int = subprocess.STDOUT) -> None:
        self.process = subprocess.Popen(
            argv,
            env=environ,
            cwd=cwd,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
        )
        self.lines: list[str] = []

    def until(self, pattern: str, count: int = 1) -> list[re.Match[str]]:
        """Read lines until ``pattern`` was found in ``count`` of all lines so far. Returns the matches."""
        assert self.process.stdout is not None
        found = [match for line in self.lines if (match := re.search(pattern, line))]
        while len(found) < count:
            line = self.process.stdout.readline()
            assert line, "\n".join([f"no {pattern!r} in:", *self.lines])
            self.lines.append(line.rstrip("\n"))
            found += filter(None, [re.search(pattern, line)])
        return found

    def end(self) -> tuple[int, str]:
        """Return the exit status and everything printed."""
        assert self.process.stdout is not None
        self.lines += self.process.stdout.read().splitlines()
        self.process.stdout.close()
        return self.process.wait(), "\n".join(self.lines)

    def close(self) -> None:
        """Clean up a command that a failed test left behind."""
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.process.wait()


class Stage:
    """A directory with the script and the stand-ins, and the environment in which commands run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        for name, program in (("psdist_scheduler", _SCHEDULER), ("psdist_server", _SERVER)):
            (path / "stand_ins" / name).mkdir(parents=True)
            (path / "stand_ins" / name / "__init__.py").touch()
            (path / "stand_ins" / name / "__main__.py").write_text(program)
        (path / "work").mkdir()
        (path / "work" / "train.py").write_text(_WORKER)
        self.launched: list[Launched] = []
        self.mark = uuid.uuid4().hex
        inherited = os.pathsep.join(filter(None, [str(path / "stand_ins"), os.environ.get("PYTHONPATH")]))
        self.environ = {
            **os.environ,
            "PYTHONPATH": inherited,
            "XDG_RUNTIME_DIR": str(path),
            "TMPDIR": str(path),
            "STAGE_MARK": self.mark,
        }

    def start(self, *arguments: str, command: str = "run", **environ: str) -> Launched:
        """Start ``psdist COMMAND``."""
        argv = [sys.executable, "-m", "psdist.cli.main", command, *arguments]
        return self.start_program(argv, environ)

    def start_program(
        self, argv: list[str], environ: Mapping[str, str] = MappingProxyType({}), stderr: int = subprocess.STDOUT
    ) -> Launched:
        """Start any program."""
        self.launched.append(Launched(argv, {**self.environ, **environ}, self.path / "work", stderr))
        return self.launched[-1]

    def run(self, *arguments: str, command: str = "run", **environ: str) -> tuple[int, str]:
        """Run ``psdist COMMAND`` to its end."""
        return self.start(*arguments, command=command, **environ).end()

    def processes(self) -> list[psutil.Process]:
        """Return all live processes that were started on this stage."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("STAGE_MARK") == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def assert_clean(self) -> None:
        """Check that no process, directory or note is left."""
        _, alive = psutil.wait_procs(self.processes(), timeout=60)
        assert [process.cmdline() for process in alive] == []
        assert list(self.path.glob("psdist-*")) == []
        assert list(self.path.glob("psdist/**/*.json")) == []


@contextlib.contextmanager
def on_stage(path: Path) -> Iterator[Stage]:
    """A stage. Checks at the end that nothing is left of it."""
    built = Stage(path)
    try:
        yield built
    finally:
        for process in built.processes():
            process.kill()
        for launched in built.launched:
            launched.close()

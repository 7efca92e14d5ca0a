"""``psdist run --debug-worker`` on a terminal, with a real run: a breakpoint in one of three workers."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.programs import Programs

_LIMIT_SECONDS = 120.0
#: ``LATE`` is printed by the others five times as long after the breakpoint as every limit of the run.
_FLAGS = ("--nproc-per-node", "3", "--nservers", "1", "--worker-timeout", "1", "--failure-timeout", "0.5")
_LATE = "waited five times the limits"

#: Worker 0 stops before step 3. Its heartbeats end there in the asyncio API, and go on in the other one.
_SCRIPT = f"""
import asyncio, hashlib, sys, threading
import numpy as np
import psdist
from psdist.collectives.workers import AsyncCollectives

def stop(rank, step):
    if step != 3 or "stop" not in sys.argv:
        return
    if rank == 0:
        breakpoint()
    else:
        threading.Timer(5.0, print, ["{_LATE}"]).start()

SETTINGS = {{"w": np.zeros((30, 20), np.float32)}}, psdist.optim.Adam(), psdist.BSP()

def blocking():
    context = psdist.init()
    client, group = context.client, context.join_group()
    weights = client.parameters("model", *SETTINGS)
    gradients = np.random.default_rng(context.rank)
    for step in range(6):
        stop(context.rank, step)
        gradient = gradients.standard_normal((30, 20), np.float32)
        group.all_reduce(gradient, timeout=1.0)
        values = weights.push_pull({{"w": gradient}})
        client.barrier("step", timeout=1.0)
    return values["w"]

async def asynchronous():
    async with psdist.AsyncClient() as client:
        weights = await client.parameters("model", *SETTINGS)
        group = await AsyncCollectives(client.session).join_group()
        gradients = np.random.default_rng(client.rank)
        for step in range(6):
            stop(client.rank, step)
            gradient = gradients.standard_normal((30, 20), np.float32)
            await group.all_reduce(gradient, timeout=1.0)
            values = await weights.push_pull({{"w": gradient}})
            await client.barrier("step", timeout=1.0)
        return values["w"]

found = asyncio.run(asynchronous()) if "async" in sys.argv else blocking()
print("digest", hashlib.sha256(found.tobytes()).hexdigest())
"""


class Terminal:
    """A program on a terminal of its own, which it reads from and may hand on."""

    def __init__(self, argv: list[str], environ: dict[str, str], path: Path) -> None:
        self._outside, inside = pty.openpty()
        self.process = subprocess.Popen(
            argv, stdin=inside, stdout=inside, stderr=inside, env=environ, cwd=path, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip
        os.close(inside)
        self.text = ""
        self._seen = 0

    def until(self, text: str) -> None:
        """Read until ``text`` has appeared after the part that an earlier call found."""
        deadline = time.monotonic() + _LIMIT_SECONDS
        while (found := self.text.find(text, self._seen)) < 0:
            assert self._read(deadline), self.text
        self._seen = found + len(text)

    def write(self, text: str) -> None:
        """Press these keys."""
        os.write(self._outside, text.encode())

    def end(self) -> tuple[int, str]:
        """Return the exit status and everything that was shown."""
        deadline = time.monotonic() + _LIMIT_SECONDS
        while self._read(deadline):
            pass
        return self.process.wait(_LIMIT_SECONDS), self.text

    def close(self) -> None:
        """End what a failed test has left."""
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait()
        os.close(self._outside)

    def _read(self, deadline: float) -> bool:
        assert select.select([self._outside], [], [], max(0.0, deadline - time.monotonic()))[0], self.text
        try:
            self.text += os.read(self._outside, 65536).decode(errors="replace").replace("\r\n", "\n")
        except OSError:  # Nobody has the other side open any more.
            return False
        return True


class Stage(Programs):
    """A directory with the script, and the runs started in it."""

    def on_terminal(self, *arguments: str) -> closing[Terminal]:
        """Start ``psdist run`` on a terminal."""
        argv = [sys.executable, "-m", "psdist.cli.main", "run", *arguments]
        environ = {**os.environ, "XDG_RUNTIME_DIR": str(self.path), "TMPDIR": str(self.path), "NO_COLOR": "1"}
        return closing(Terminal(argv, environ, self.path))


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with closing(Stage(tmp_path, _SCRIPT)) as made:
        yield made


def digests(text: str) -> set[str]:
    """Return the workers' different weights."""
    found = re.findall(r"digest (\w+)", text)
    assert len(found) == 3, text
    return set(found)


@pytest.mark.parametrize("api", ["blocking", "async"])
def test_all_wait_for_a_worker_at_a_breakpoint_and_the_run_stays_exact(stage: Stage, api: str) -> None:
    status, undisturbed = stage.run("psdist", "run", *_FLAGS, "--worker-timeout", "60", "train.py", api)
    assert status == 0, undisturbed
    with stage.on_terminal(*_FLAGS, "--debug-worker", "0", "train.py", api, "stop") as terminal:
        terminal.until("(Pdb) ")
        terminal.write("p 40 + 2\r")
        terminal.until("\n42\n(Pdb) ")
        terminal.write("\x1b[A\r")  # The arrow repeats the command, so readline has the terminal.
        terminal.until("\n42\n(Pdb) ")
        terminal.write("\x03")
        terminal.until("(Pdb) ")
        terminal.until(f"[worker 1] {_LATE}\n")
        terminal.write("c\r")
        status, text = terminal.end()
    assert status == 0, text
    assert digests(text) == digests(undisturbed)
    assert "expelled" not in text and "[worker 0]" not in text, text


def test_leaving_the_debugger_ends_the_run(stage: Stage) -> None:
    with stage.on_terminal(*_FLAGS, "--debug-worker", "0", "train.py", "blocking", "stop") as terminal:
        terminal.until("(Pdb) ")
        terminal.write("q\r")
        status, text = terminal.end()
    assert status == 1, text
    assert "psdist: the debugger of worker 0 was left: the run ends\n" in text
    assert "restart" not in text and "BdbQuit" not in text, text


def test_ctrl_c_in_the_worker_with_the_terminal_ends_the_run(stage: Stage) -> None:
    (stage.path / "idle.py").write_text("import signal, psdist\npsdist.init()\nprint('ready')\nsignal.pause()\n")
    with stage.on_terminal("--nservers", "1", "--debug-worker", "0", "idle.py") as terminal:
        terminal.until("ready\n")
        terminal.write("\x03")
        status, text = terminal.end()
    assert status == 130 and "SIGINT: stopping all processes" in text, text


@pytest.mark.parametrize(
    ("call", "status", "error"),
    [
        ("breakpoint()", 78, "breakpoint() in worker 0, which has no terminal: psdist run --debug-worker 0"),
        ("import pdb; pdb.set_trace(); print()", 1, "a worker without a terminal: psdist run --debug-worker 0"),
    ],
)
def test_a_breakpoint_without_a_terminal_names_the_flag(stage: Stage, call: str, status: int, error: str) -> None:
    (stage.path / "stops.py").write_text(f"import psdist\npsdist.init()\n{call}\n")
    ended, text = stage.run("psdist", "run", "--nservers", "1", "stops.py")
    assert ended == status and error in text and "restart" not in text.replace("not restarted", ""), text


def test_the_debugged_worker_is_one_of_the_run(stage: Stage) -> None:
    status, text = stage.run("psdist", "run", "--nproc-per-node", "2", "--debug-worker", "2", "train.py")
    assert status == 2 and "--debug-worker 2 is not among the 2 workers of --nproc-per-node" in text, text

"""How runs end whose programs are started one by one, as on several machines: the exit status of each."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from psdist.launch.process import free_port

_COMMANDS = {
    "scheduler": (sys.executable, "-m", "psdist_scheduler"),
    "server": (sys.executable, "-m", "psdist_server"),
    "agent": (sys.executable, "-c", "import sys; from psdist.cli.main import worker; sys.exit(worker())"),
}
_WAITS = """
import os
import numpy as np, psdist
with psdist.init() as context:
    open(f"came-{context.rank}", "w").close()
    context.client.parameters("p", {"w": np.zeros(4, np.float32)}, psdist.optim.SGD(lr=1.0))
"""
#: Of one wait; only a program that hangs takes so long.
_HANGS_SECONDS = 120.0


class Programs:
    """Programs of one run in ``path``. The scheduler leaves its address in a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, *arguments: str, **variables: str) -> None:
        """Starts a program: scheduler, server or agent, as its name begins."""
        role = name.partition("-")[0]
        environment = {key: value for key, value in os.environ.items() if not key.startswith("PSDIST_")}
        environment |= {"XDG_STATE_HOME": str(self.path), "XDG_RUNTIME_DIR": str(self.path), **variables}
        place = ("--address-file" if role == "scheduler" else "--scheduler-file", str(self.path / "address"))
        with (self.path / f"{name}.log").open("wb") as log:
            self._processes[name] = subprocess.Popen(
                [*_COMMANDS[role], *place, *arguments], env=environment, cwd=self.path, stdin=subprocess.DEVNULL,
                stdout=log, stderr=log,
            )  # fmt: skip

    def statuses(self) -> Mapping[str, int]:
        """The exit status of each program, once all have ended."""
        until = time.monotonic() + _HANGS_SECONDS
        try:
            return {name: each.wait(until - time.monotonic()) for name, each in self._processes.items()}
        except subprocess.TimeoutExpired:
            pytest.fail(f"not all have ended\n{self.text}")

    def script(self, name: str, text: str) -> str:
        """Writes a script of workers. Returns its name."""
        (self.path / name).write_text(text)
        return name

    def text_of(self, name: str) -> str:
        """Everything that a program printed."""
        return (self.path / f"{name}.log").read_text("utf-8", "replace")

    @property
    def text(self) -> str:
        """Everything that was printed."""
        return "\n".join(f"--- {name}\n{self.text_of(name)}" for name in self._processes)

    def stop(self) -> None:
        """Ends whatever still runs. Workers end with their agents."""
        for process in self._processes.values():
            if process.poll() is None:
                process.kill()
                process.wait()


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    made = Programs(tmp_path)
    yield made
    made.stop()


@pytest.mark.long
@pytest.mark.timeout(300)
def test_scripts_that_never_come_end_the_run_everywhere(programs: Programs) -> None:
    """One of two nodes is never started."""
    programs.start("scheduler", "--min-workers", "2", "--start-timeout", "10")
    programs.start("server")
    programs.start("agent-0", "--nnodes", "2", "--node-rank", "0", programs.script("waits.py", _WAITS))
    programs.start("agent-1", "--nnodes", "2", programs.script("other.py", _WAITS))
    assert set(programs.statuses().values()) == {65}, programs.text
    for name in ("scheduler", "server", "agent-0", "agent-1"):
        assert "did not start within 10 s (--start-timeout)" in programs.text_of(name), programs.text
    assert "not restarted" in programs.text_of("agent-0")


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("script", ["raise RuntimeError('no data')", "print('all done')"])
def test_an_agent_that_gives_up_ends_the_others_with_its_reason(programs: Programs, script: str) -> None:
    """Without any time limit. A script that succeeds without psdist.init() is waited for as vainly as one that
    fails."""
    programs.start("scheduler", "--min-workers", "2")
    programs.start("server")
    programs.start("agent-0", "--nnodes", "2", "--node-rank", "0", programs.script("waits.py", _WAITS))
    programs.start("agent-1", "--nnodes", "2", "--node-rank", "1", programs.script("fails.py", script))
    statuses = dict(programs.statuses())
    assert statuses.pop("agent-1") == (1 if "raise" in script else 0), programs.text
    assert set(statuses.values()) == {65}, programs.text
    reason = "worker 1 failed: exit code 1" if "raise" in script else "its scripts ended without having called"
    for name in statuses:
        assert re.search(f"the launcher on .* gave up: {reason}", programs.text_of(name)), programs.text


def test_a_script_looks_for_its_scheduler_as_long_as_its_launcher(programs: Programs) -> None:
    """It always looked for a minute."""
    free = programs.script("alone.py", "import psdist\npsdist.init()")
    (programs.path / "address").write_text(f"127.0.0.1:{free_port('127.0.0.1')}\n")
    programs.start(
        "agent",
        "--start-timeout",
        "0",
        "--max-restarts",
        "0",
        "--nnodes",
        "1",
        "--node-rank",
        "0",
        "--run-id",
        "r",
        free,
    )
    assert programs.statuses() == {"agent": 69}, programs.text
    assert "in 1 s and" in programs.text_of("agent")

"""Ends of runs whose programs are started one by one, as on several machines: the exit status of each program.

Every status that ``exit_codes.TABLE`` gives a role is named by ``ends`` at a test of this file, or by ``ELSEWHERE``.
"""

from __future__ import annotations

import ast
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import psutil
import pytest

from psdist.addresses import free_port
from psdist.settings import exit_codes

_COMMANDS = {
    "scheduler": (sys.executable, "-m", "psdist_scheduler"),
    "server": (sys.executable, "-m", "psdist_server"),
    "agent": (sys.executable, "-c", "import sys; from psdist.cli.main import worker; sys.exit(worker())"),
    "command": (sys.executable, "-m", "psdist.cli.main"),
    "script": (sys.executable,),
}
#: A status and a role of the table.
Pair = tuple[int, str]
F = TypeVar("F", bound=Callable[..., None])
_REFUSED = "test_a_script_is_not_restarted_that_would_be_refused_again"
#: Tests of real processes in other files: a folder of tests, the file and the test.
ELSEWHERE: Mapping[Pair, tuple[str, str]] = {
    (0, "command"): ("integration/launch/test_cli.py", "test_version"),
    (1, "script"): ("integration/launch/test_refused_scripts.py", _REFUSED),
    (69, "scheduler"): ("integration/scheduler/test_scheduler.py", "test_a_taken_port_is_named"),
    (70, "scheduler"): ("chaos/test_lost_runs.py", "test_a_run_continues_or_ends_everywhere"),
    (70, "server"): ("chaos/test_lost_runs.py", "test_a_run_continues_or_ends_everywhere"),
    (70, "script"): ("chaos/test_lost_runs.py", "test_a_run_continues_or_ends_everywhere"),
    (70, "launcher"): ("chaos/test_lost_runs.py", "test_a_run_continues_or_ends_everywhere"),
    (71, "server"): (
        "integration/device/test_device_servers.py",
        "test_a_lost_device_ends_its_server_and_the_run_goes_on_from_the_copies",
    ),
    (74, "launcher"): (
        "integration/snapshots/test_snapshot_cli.py", "test_a_storage_that_breaks_costs_the_snapshot_and_nothing_else",
    ),
    (74, "command"): ("integration/launch/test_launch_streams.py", "test_other_commands_say_that_their_output_is_lost"),
    (78, "server"): ("integration/launch/test_cli.py", "test_a_wrong_token_has_one_status_everywhere"),
    (78, "command"): ("integration/launch/test_cli.py", "test_a_wrong_token_has_one_status_everywhere"),
    (78, "script"): ("integration/launch/test_refused_scripts.py", _REFUSED),
    (78, "launcher"): (
        "integration/launch/test_refused_scripts.py", _REFUSED,
    ),
    (128, "launcher"): ("integration/launch/test_launch_run.py", "test_signals_end_everything"),
}  # fmt: skip
_named: set[Pair] = set()
_TESTS = Path(__file__).resolve().parents[2]
_WAITS = """
import os
import numpy as np, psdist
with psdist.init() as context:
    open(f"came-{context.rank}", "w").close()
    context.client.parameters("p", {"w": np.zeros(4, np.float32)}, psdist.optim.SGD(lr=1.0))
"""
_TRAINS = """
import numpy as np, psdist
with psdist.init() as context:
    weights = context.client.parameters("p", {"w": np.zeros(4, np.float32)}, psdist.optim.SGD(lr=1.0))
    print("weights", weights.push_pull({"w": np.ones(4, np.float32)})["w"].tolist())
"""
_LATE_COMMAND = """
import sys, threading
from pathlib import Path
import grpc.aio
from psdist.cli import main, servers
from psdist.v1 import scheduler_pb2_grpc
from psdist.wire import scheduler_connection, status
Path("imported").touch()
while not Path("go").exists():
    threading.Event().wait(0.01)
sys.argv = ["psdist", "drain", "server-0", "--scheduler", Path("address").read_text().strip()]
main.main()
"""
#: How each program finds the scheduler. The others get the address from their arguments.
_PLACES = {"scheduler": "--address-file", "server": "--scheduler-file", "agent": "--scheduler-file"}
#: Limit of one wait; only a program that hangs reaches it.
_HANGS_SECONDS = 120.0


def ends(*pairs: Pair) -> Callable[[F], F]:
    """Name the statuses that a test produces."""
    _named.update(pairs)
    return lambda test: test


class Programs:
    """Programs of one run in ``path``. The scheduler leaves its address in a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, *arguments: str, **variables: str) -> None:
        """Start a program: scheduler, server, agent, command or script, as its name begins."""
        role = name.partition("-")[0]
        environment = {key: value for key, value in os.environ.items() if not key.startswith("PSDIST_")}
        environment |= {"XDG_STATE_HOME": str(self.path), "XDG_RUNTIME_DIR": str(self.path), **variables}
        place = (_PLACES[role], str(self.path / "address")) if role in _PLACES else ()
        with (self.path / f"{name}.log").open("wb") as log:
            self._processes[name] = subprocess.Popen(
                [*_COMMANDS[role], *place, *arguments], env=environment, cwd=self.path, stdin=subprocess.DEVNULL,
                stdout=log, stderr=log,
            )  # fmt: skip

    def statuses(self, *names: str) -> Mapping[str, int]:
        """Return the exit status of each program, or of the named ones, once they have ended."""
        until = time.monotonic() + _HANGS_SECONDS
        try:
            return {name: self._processes[name].wait(until - time.monotonic()) for name in names or self._processes}
        except subprocess.TimeoutExpired:
            pytest.fail(f"not all have ended\n{self.text}")

    def script(self, name: str, text: str) -> str:
        """Write a script of workers. Returns its name."""
        (self.path / name).write_text(text)
        return name

    def text_of(self, name: str) -> str:
        """Return everything that a program printed."""
        return (self.path / f"{name}.log").read_text("utf-8", "replace")

    @property
    def text(self) -> str:
        """Return everything that was printed."""
        return "\n".join(f"--- {name}\n{self.text_of(name)}" for name in self._processes)

    def process(self, name: str) -> psutil.Process:
        """Return a started program."""
        return psutil.Process(self._processes[name].pid)

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition that no program reports."""
        pause, until = threading.Event(), time.monotonic() + _HANGS_SECONDS
        while not condition():
            assert time.monotonic() < until, self.text
            pause.wait(0.02)

    def stop(self) -> None:
        """End all programs that still run. Workers end with their agents."""
        for process in self._processes.values():
            if process.poll() is None:
                process.kill()
                process.wait()


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    made = Programs(tmp_path)
    yield made
    made.stop()


@ends((65, "scheduler"), (65, "server"), (65, "script"), (65, "launcher"))
@pytest.mark.long
@pytest.mark.timeout(300)
def test_scripts_that_never_come_end_the_run_everywhere(programs: Programs) -> None:
    """Check a run of two nodes whose second node never starts."""
    programs.start("scheduler", "--min-workers", "2", "--start-timeout", "10")
    programs.start("server")
    programs.start("agent-0", "--nnodes", "2", "--node-rank", "0", programs.script("waits.py", _WAITS))
    programs.start("agent-1", "--nnodes", "2", programs.script("other.py", _WAITS))
    assert set(programs.statuses().values()) == {65}, programs.text
    for name in ("scheduler", "server", "agent-0", "agent-1"):
        assert "did not start within 10 s (--start-timeout)" in programs.text_of(name), programs.text
    assert re.search("worker 0 failed: exit code 65 .*not restarted", programs.text_of("agent-0")), programs.text


@ends((1, "launcher"))
@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("script", ["raise RuntimeError('no data')", "print('all done')"])
def test_an_agent_that_gives_up_ends_the_others_with_its_reason(programs: Programs, script: str) -> None:
    """Check an agent without any time limit. A script that succeeds without psdist.init() never arrives, just like one
    that fails."""
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


@ends((69, "script"), (69, "launcher"))
def test_a_script_looks_for_its_scheduler_as_long_as_its_launcher(programs: Programs) -> None:
    """Check the time for which a script looks: it used to be a minute in every case."""
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
    assert "worker 0 failed: exit code 69" in programs.text_of("agent")


@ends((0, "scheduler"), (0, "server"), (0, "script"), (0, "launcher"))
def test_a_run_over_tls_trains_and_ends_well_everywhere(programs: Programs) -> None:
    programs.start("command", "certs", "init", "--host", "localhost", str(programs.path))
    assert programs.statuses() == {"command": 0}, programs.text

    def files(role: str) -> dict[str, str]:
        names = {"PSDIST_TLS_CA": "ca", "PSDIST_TLS_CERT": role, "PSDIST_TLS_KEY": f"{role}-key"}
        return {variable: str(programs.path / f"{name}.pem") for variable, name in names.items()}

    arguments = ("--min-workers", "2", "--min-servers", "2", "--idle-timeout", "0.5")
    programs.start("scheduler", *arguments, **files("scheduler"))
    for number in range(2):
        programs.start(f"server-{number}", **files("server"))
    for number in range(2):
        programs.start(f"agent-{number}", "--nnodes", "2", programs.script("trains.py", _TRAINS), **files("worker"))
    assert set(programs.statuses().values()) == {0}, programs.text
    assert programs.text.count("weights [-1.0, -1.0, -1.0, -1.0]") == 2, programs.text
    words = ("warning", "error", "refused", "alone", "Traceback")
    assert not [line for line in programs.text.splitlines() for word in words if word in line], programs.text


@ends((2, "scheduler"), (2, "server"), (2, "launcher"), (2, "command"))
def test_a_wrong_command_line_starts_nothing(programs: Programs) -> None:
    wrong = {"scheduler": ("--port", "x"), "server": ("--port", "x"), "agent": ("--nnodes", "0", "x.py")}
    for name, arguments in (wrong | {"command": ("status", "--watch=x")}).items():
        programs.start(name, *arguments)
    assert set(programs.statuses().values()) == {2}, programs.text


@ends((69, "server"), (69, "command"), (1, "command"), (66, "script"), (66, "launcher"))
def test_programs_that_find_nothing_or_come_too_late(programs: Programs) -> None:
    nobody = f"127.0.0.1:{free_port('127.0.0.1')}"
    (programs.path / "address").write_text(f"{nobody}\n")
    (programs.path / "snapshots").mkdir()
    programs.start("server", "--start-timeout", "0.1")
    programs.start("command-status", "status", "--scheduler", nobody)
    programs.start("command-verify", "snapshot", "verify", str(programs.path / "snapshots"))
    late = programs.script("late.py", "import psdist\nraise psdist.errors.LateWorkerError('training had begun')")
    programs.start("agent", "--nnodes", "1", "--node-rank", "0", late)
    expected = {"server": 69, "command-status": 69, "command-verify": 1, "agent": 66}
    assert programs.statuses() == expected, programs.text
    assert "worker 0 failed: exit code 66" in programs.text_of("agent")


@ends((128, "command"))
def test_an_interrupted_command_ends_by_the_signal(programs: Programs) -> None:
    """Check a command that waits for a scheduler that accepts connections and sends nothing."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(_HANGS_SECONDS)
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        programs.start("command", "status", "--timeout", "100", "--scheduler", address)
        with silent.accept()[0]:
            programs.process("command").send_signal(signal.SIGINT)
            assert programs.statuses() == {"command": 128 + signal.SIGINT}, programs.text


@ends((128, "script"))
@pytest.mark.long
def test_a_script_that_is_told_to_end_ends_by_the_signal(programs: Programs) -> None:
    endless = "while True: p.push_pull({'w': np.ones(4, np.float32)})"
    setup = _WAITS.replace("context.client", "p = context.client")
    name = programs.script("trains.py", f"{setup}    open('trains', 'w').close()\n    {endless}\n")
    programs.start("script", name)
    programs.until((programs.path / "trains").exists)
    programs.process("script").send_signal(signal.SIGTERM)
    assert programs.statuses() == {"script": 128 + signal.SIGTERM}, programs.text


@ends((70, "command"))
@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_command_hears_that_the_run_is_lost(programs: Programs) -> None:
    """Check a command that has imported everything before the loss: the scheduler answers for only 5 s after it."""
    programs.start("scheduler")
    programs.start("server")
    waits = "import threading\n" + _WAITS + "    open('trains', 'w').close()\n    threading.Event().wait()\n"
    programs.start("agent", "--nnodes", "1", "--node-rank", "0", "--max-restarts", "0", programs.script("w.py", waits))
    programs.until((programs.path / "trains").exists)
    programs.start("script", programs.script("command.py", _LATE_COMMAND))
    programs.until((programs.path / "imported").exists)
    programs.process("server").kill()
    programs.until(lambda: "the run ends" in programs.text_of("scheduler"))
    (programs.path / "go").touch()
    assert programs.statuses("script", "scheduler") == {"script": 70, "scheduler": 70}, programs.text


def test_each_status_of_each_role_is_named_by_a_test_of_real_processes() -> None:
    assert not _named & ELSEWHERE.keys()
    assert _named | ELSEWHERE.keys() == {(row.status, role) for row in exit_codes.TABLE for role in row.roles}
    constants = {value for name, value in vars(exit_codes).items() if name.isupper() and isinstance(value, int)}
    assert constants == {row.status for row in exit_codes.TABLE}
    for file, test in set(ELSEWHERE.values()):
        tree = ast.parse((_TESTS / file).read_text())
        names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        assert test in names, f"{file} has no {test}"

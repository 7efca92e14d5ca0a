"""Programs whose standard streams are closed, on a full disk or on a terminal that is gone. Also the lifeline of a
script's own cluster, which must not be a standard stream, nor be held by a forked process."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.launch_stage import Stage, on_stage

_RUN = (sys.executable, "-m", "psdist.cli.main", "run")
_VERSION = (sys.executable, "-m", "psdist.cli.main", "version")
#: Unless this is set, Python's streams hold back output that could not be written.
_BUFFERED = {"PYTHONUNBUFFERED": ""}
#: Redirections that a shell applies to the standard streams of a program that it starts.
_CLOSED = ("<&-", ">&-", "2>&-", "<&- >&- 2>&-")
#: All of them, and each alone only by make long.
_CLOSED_BRIEFLY = [_CLOSED[-1], *(pytest.param(one, marks=pytest.mark.long) for one in _CLOSED[:-1])]


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with on_stage(tmp_path) as built:
        yield built


def redirected(streams: str, *argv: str) -> list[str]:
    """Return the command with its streams redirected as by a shell."""
    return ["sh", "-c", f'exec "$@" {streams}', "sh", *argv]


def done(streams: str, *argv: str, **environ: str) -> tuple[int, str, str]:
    """Return status, output and errors of a program."""
    ended = subprocess.run(
        redirected(streams, *argv),
        env={**os.environ, **_BUFFERED, **environ},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    return ended.returncode, ended.stdout, ended.stderr


# --- streams that cannot be written -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("streams", "titles"),
    [(">/dev/full", ["standard output"]), ("2>/dev/full", ["standard error"]), (">/dev/full 2>/dev/full", [])],
)
def test_a_full_disk_ends_no_run(stage: Stage, streams: str, titles: list[str]) -> None:
    flags = ("--nproc-per-node", "2")
    # A restart is announced before it is made.
    argv = (*_RUN, *flags, "train.py", "connect", "1.0:fail", "hello", "hello")
    run = stage.start_program(redirected(streams, *argv), _BUFFERED)
    status, text = run.end()
    assert status == 0, text
    assert "Traceback" not in text.replace("[worker 1] Traceback", ""), text
    assert [line.partition(" psdist: ")[2] for line in run.lines if "cannot be written" in line] == [
        f"{title} cannot be written: No space left on device; lines are lost" for title in titles
    ]
    stage.assert_clean()


def test_a_run_whose_messages_are_lost_can_be_stopped(stage: Stage) -> None:
    run = stage.start_program(redirected("2>/dev/full", *_RUN, "train.py", "connect", "wait"), _BUFFERED)
    run.until(r"\[worker 0\] pid \d+")
    run.process.send_signal(signal.SIGTERM)
    assert run.end()[0] == 143
    stage.assert_clean()


def test_a_terminal_that_is_gone_ends_no_run(stage: Stage) -> None:
    terminal, end = os.openpty()
    try:
        run = stage.start_program([*_RUN, "train.py", "connect", "wait"], _BUFFERED, stderr=end)
    finally:
        os.close(end)
    run.until(r"\[worker 0\] pid \d+")
    os.close(terminal)
    run.process.send_signal(signal.SIGTERM)
    status, text = run.end()
    assert status == 143
    assert "psdist: standard error cannot be written: Input/output error; lines are lost" in text
    stage.assert_clean()


#: A bar as of tqdm, and a line in between. With an argument worker 0 then waits for the other side of this FIFO.
_BARS = """
import os, sys
open(os.environ["PSDIST_CONNECTED_FILE"], "x").close()
for step in range(200):
    print(f"\\r{step:3}%|#", end="", file=sys.stderr, flush=True)
    if step == 100:
        print("half")
        if sys.argv[1:] and os.environ["RANK"] == "0":
            open(sys.argv[1]).close()
print("\\r100%|##", file=sys.stderr)
"""


def test_a_progress_bar_is_one_line_in_a_pipe_and_in_files(stage: Stage) -> None:
    (stage.path / "work" / "bars.py").write_text(_BARS)
    flags = ("--nproc-per-node", "2", "--log-dir", "logs", "--run-id", "r")
    status, text = stage.run(*flags, "bars.py")
    assert status == 0, text
    for rank in "01":
        assert f"[worker {rank}] half" in text.splitlines()
        assert [line for line in text.splitlines() if line.startswith(f"[worker {rank}] ") and "%" in line] == [
            f"[worker {rank}] 100%|##"
        ]
        log = (stage.path / "work" / "logs" / "r" / f"worker-{rank}.log").read_text()
        assert sorted(log.splitlines()) == ["100%|##", "half"]
    stage.assert_clean()


def test_the_first_worker_s_bar_stays_in_place_on_a_terminal(stage: Stage) -> None:
    (stage.path / "work" / "bars.py").write_text(_BARS)
    os.mkfifo(stage.path / "work" / "go")
    outside, inside = os.openpty()
    argv = [*_RUN, "--nproc-per-node", "2", "bars.py", "go"]
    run = stage.start_program(argv, {"TERM": "xterm", "NO_COLOR": "1"}, stderr=inside)
    os.close(inside)
    shown = b""
    while b"\r\x1b[K[worker 0] 100%|#" not in shown:
        shown += os.read(outside, 65536)
    (stage.path / "work" / "go").open("w").close()
    with contextlib.suppress(OSError):  # Nobody has the other side open any more.
        while data := os.read(outside, 65536):
            shown += data
    os.close(outside)
    assert run.end()[0] == 0, shown
    lines = shown.decode().split("\r\n")
    assert [line.count("[worker 1]") for line in lines if "[worker 1]" in line] == [1], "its last state alone"
    # Worker 0 has the same line, after states that were erased.
    assert [line.rpartition("\x1b[K")[2] for line in lines if "[worker 0]" in line][-1] == "[worker 0] 100%|##", lines
    assert sum("[worker 0] 100%|##" in line for line in lines) == 1, lines
    stage.assert_clean()


def test_a_log_directory_on_a_full_disk_ends_no_run(stage: Stage) -> None:
    logs = stage.path / "work" / "logs" / "r"
    logs.mkdir(parents=True)
    (logs / "worker-0.log").symlink_to("/dev/full")
    status, text = stage.run("--log-dir", "logs", "--run-id", "r", "train.py", "connect", "hello")
    assert status == 0 and "Traceback" not in text, text
    assert text.count("the log file of worker 0 can no longer be written: No space left on device") == 1
    stage.assert_clean()


#: Raises at the launcher's first message after the start, as a defect would, and prints how the run ended.
_DEFECT = """
import asyncio
from pathlib import Path
from psdist.launcher.output import Output, Routing
from psdist.launcher.plan import SchedulerAddress, ScriptSettings, WorkersPlan
from psdist.launcher.run_metrics import MetricsOptions, RunMetrics
from psdist.launcher.runner import ProcessPlan, Runner
from psdist.launcher.shutdown import RunPolicy

class Defect(Output):
    def say(self, message):
        raise RuntimeError(message)

script = ScriptSettings(command=("true",), no_python=True)
workers = WorkersPlan(script, SchedulerAddress(), Path("/nowhere"), ("127.0.0.1", 1))
plan = ProcessPlan(workers, {"PATH": "/usr/bin:/bin"}, RunPolicy(restarts_max=0))
metrics = RunMetrics(MetricsOptions(), "run", None, range(1))
runner = Runner(plan, Defect(Routing(), lambda rank: rank), metrics)
print("status", asyncio.run(asyncio.wait_for(runner.run(), 30)).status)
"""


def test_a_message_that_fails_takes_no_other_effect_with_it() -> None:
    status, text, errors = done("", sys.executable, "-c", _DEFECT)
    assert status == 0 and text == "status 0\n", errors
    assert "RuntimeError: " in errors and "never used psdist" in errors


@pytest.mark.parametrize(
    "argv",
    [
        _VERSION,
        (*_VERSION[:-1], "--help"),
        # More than the stream's buffer, so that it is written before the command ends.
        (sys.executable, "-c", "from psdist.cli import main; main._end(lambda: print('x' * 100_000) or 0)"),
    ],
)
def test_other_commands_say_that_their_output_is_lost(argv: tuple[str, ...]) -> None:
    lost = "psdist: standard output cannot be written: No space left on device\n"
    assert done(">/dev/full", *argv) == (74, "", lost)
    assert done(">/dev/full 2>/dev/full", *argv) == (74, "", "")
    assert done(">/dev/full", *argv, PYTHONUNBUFFERED="1") == (74, "", lost)


def test_another_file_on_a_full_disk_is_not_taken_for_the_output() -> None:
    code = "from psdist.cli import main; main._end(lambda: open('/dev/full', 'wb', 0).write(b'x'))"
    status, text, errors = done("", sys.executable, "-c", code)
    assert status == 1 and text == ""
    assert errors.startswith("Traceback") and "standard output" not in errors


# --- closed streams ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("streams", _CLOSED_BRIEFLY)
def test_closed_streams_end_no_run(stage: Stage, streams: str) -> None:
    run = stage.start_program(redirected(streams, *_RUN, "train.py", "connect", "hello"), _BUFFERED)
    status, text = run.end()
    assert status == 0 and "Traceback" not in text, text
    assert ("[worker 0] hello 0" in text) == (">&-" not in streams.split())
    stage.assert_clean()


@pytest.mark.parametrize("streams", _CLOSED)
def test_closed_streams_fail_no_command(streams: str) -> None:
    status, text, errors = done(streams, *_VERSION)
    assert status == 0 and errors == ""
    assert text.startswith("psdist ") == (">&-" not in streams.split())


@pytest.mark.parametrize("streams", _CLOSED_BRIEFLY)
def test_closed_streams_end_no_scheduler(streams: str) -> None:
    lifeline, end = os.pipe()
    # It starts, finds that nobody holds the other end, and stops in order.
    os.close(end)
    code = "from psdist.cli.main import scheduler; scheduler()"
    flags = ("--port", "0", "--run-id", "r", "--lifeline-fd", str(lifeline))
    try:
        ended = subprocess.run(
            redirected(streams, sys.executable, "-c", code, *flags),
            env={**os.environ, "PSDIST_TOKEN": "t" * 32},
            pass_fds=(lifeline,),
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
    finally:
        os.close(lifeline)
    assert ended.returncode == 0, ended.stderr


# --- the cluster of a script without a launcher -----------------------------------------------------------------------

#: Prints the lifeline and the standard streams of a cluster's children.
_EMBEDDED = """
import os, sys
from psdist.launcher.embedded import EmbeddedCluster

cluster = EmbeddedCluster(1)
with open(sys.argv[1], "w") as report:
    end = os.stat(cluster._lifeline.held).st_ino
    print(cluster._lifeline.held > 2, file=report)
    for child in cluster.processes:
        links = {int(name): os.readlink(f"/proc/{child.pid}/fd/{name}") for name in os.listdir(f"/proc/{child.pid}/fd")}
        print(min(n for n, link in links.items() if link == f"pipe:[{end}]") > 2, {0, 1, 2} <= set(links), file=report)
cluster.close()
"""


@pytest.mark.parametrize("streams", _CLOSED_BRIEFLY)
def test_a_lifeline_is_no_standard_stream(streams: str, tmp_path: Path) -> None:
    status, _, errors = done(streams, sys.executable, "-c", _EMBEDDED, str(tmp_path / "report"))
    assert status == 0, errors
    assert (tmp_path / "report").read_text() == "True\nTrue True\nTrue True\n"


#: Waits until the server answers, and stays.
_CLIENT = """
import signal, sys
import numpy, psdist

address, token, run_id = sys.argv[1:]
client = psdist.Client(address, token, run_id=run_id)
client.parameters("p", {"w": numpy.zeros(4, "float32")}, psdist.optim.SGD(lr=0.1))
print("up", flush=True)
signal.pause()
"""
#: The client is a process of its own, so that the script has no threads when it forks.
_FORKS = """
import gc, os, signal, subprocess, sys, weakref
from psdist.launcher.embedded import EmbeddedCluster

closed = EmbeddedCluster(1)
closed.close()
reference = weakref.ref(closed)
del closed
gc.collect()
assert reference() is None
cluster = EmbeddedCluster(1)
command = [sys.executable, "-c", sys.argv[1], cluster.address, cluster.token, cluster.run_id]
client = subprocess.Popen(command, stdout=subprocess.PIPE)
assert client.stdout.readline() == b"up\\n"
print("services", *(process.pid for process in cluster.processes), flush=True)
# Only one of the two prints from now on: their lines might be mixed.
if os.fork() == 0:
    print("forked", os.getpid(), flush=True)
signal.pause()
"""
#: The child of ``psdist.launch``, with a program in place of the launcher.
_LAUNCHED = """
import os, signal, sys
from psdist.launcher.launch import RunProcess

waits = "import os, sys; os.read(int(sys.argv[1].partition('=')[2]), 1)"
run = RunProcess([sys.executable, "-c", waits], ())
print("services", run._process.pid, flush=True)
if os.fork() == 0:
    print("forked", os.getpid(), flush=True)
signal.pause()
"""


@pytest.mark.parametrize("program", [_FORKS, _LAUNCHED], ids=["cluster", "run"])
def test_a_forked_process_keeps_nothing_of_a_killed_script(stage: Stage, program: str) -> None:
    # Without the stand-ins for scheduler and server.
    environ = {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    script = stage.start_program([sys.executable, "-c", program, _CLIENT], environ)
    (services,) = script.until(r"^services [\d ]+")
    (forked,) = script.until(r"^forked (\d+)")
    with contextlib.ExitStack() as stack:
        # They report an exit even if nobody reaps orphans.
        *ends, other = [os.pidfd_open(int(pid)) for pid in (*services[0].split()[1:], forked[1])]
        for end in (*ends, other):
            stack.callback(os.close, end)
        script.process.kill()
        for end in ends:
            assert select.select([end], [], [], 60)[0]
        assert not select.select([other], [], [], 0)[0]
        signal.pidfd_send_signal(other, signal.SIGKILL)

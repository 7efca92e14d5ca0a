"""``psdist run`` with real processes: how a run ends, its last output, and that nothing is left of it.

The launcher is under test, so scheduler and servers are stand-ins that only keep the contract of their processes
(flags, address file, lifeline); ``test_launch_training`` runs the real ones. Scripts communicate by lines, and tests
wait for lines.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.launch_stage import Launched, Stage, on_stage


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with on_stage(tmp_path) as built:
        yield built


# --- good ends --------------------------------------------------------------------------------------------------------


def test_all_end_well(stage: Stage) -> None:
    words = ("--nproc-per-node", "2", "--nservers", "3", "train.py", "connect", "hello")
    status, text = stage.run(*words, OMP_NUM_THREADS="")
    assert status == 0, text
    assert "[worker 0] hello 0" in text and "[worker 1] hello 0" in text
    assert re.search(
        r"^\d\d:\d\d:\d\d psdist: run \S+: 3 servers, 2 workers; .*psdist status --run-id \S+$", text, re.M
    )
    assert len(re.findall("OMP_NUM_THREADS=1", text)) == 1
    stage.assert_clean()


def test_while_it_runs_it_is_noted_and_then_not_any_more(stage: Stage) -> None:
    run = stage.start("--run-id", "noted", "--nservers", "1", "train.py", "connect", "wait")
    run.until(r"\[server 0\] pid \d+ server-0")
    run.until(r"\[worker 0\] pid")
    # The launcher adds the address to the note when it next looks; the servers read it from the file itself.
    note = stage.path / "psdist" / "runs" / "noted.json"
    values = json.loads(note.read_text())
    directory = Path(values["directory"])
    assert values["pid"] == run.process.pid and note.stat().st_mode & 0o777 == 0o600
    assert directory.stat().st_mode & 0o777 == 0o700 and Path(values["token_file"]).stat().st_mode & 0o777 == 0o600
    refused, text = stage.run("--run-id", "noted", "train.py")
    assert refused == 2 and "noted" in text and str(run.process.pid) in text
    run.process.send_signal(signal.SIGTERM)
    assert run.end()[0] == 143
    stage.assert_clean()


def test_log_files_and_filters(stage: Stage) -> None:
    flags = ("--nproc-per-node", "2", "--run-id", "r", "--log-dir", "logs", "--local-ranks-filter", "1")
    status, text = stage.run(*flags, "train.py", "connect", "hello")
    logs = stage.path / "work" / "logs" / "r"
    assert status == 0 and "[worker 1] hello 0" in text and "[worker 0]" not in text
    assert (logs / "worker-0.log").read_text() == (logs / "worker-1.log").read_text() == "hello 0\n"
    status, text = stage.run("-r", "3", "--log-dir", "more", "--run-id", "r", "train.py", "connect", "hello")
    assert status == 0 and "[worker 0]" not in text
    assert (stage.path / "work" / "more" / "r" / "worker-0.log").read_text() == "hello 0\n"


def test_modules_and_programs(stage: Stage) -> None:
    status, text = stage.run("-m", "train", "connect", "as-module")
    assert status == 0 and "[worker 0] as-module 0" in text
    status, text = stage.run("--no-python", "sh", "-c", "echo shell $RANK of $WORLD_SIZE; : > $PSDIST_CONNECTED_FILE")
    assert status == 0 and "[worker 0] shell 0 of 1" in text


def test_a_file_named_like_a_standard_module_breaks_nothing(stage: Stage) -> None:
    (stage.path / "work" / "argparse.py").write_text("raise SystemExit('mine')\n")
    (stage.path / "work" / "train.sh").write_text(": > $PSDIST_CONNECTED_FILE\n")
    argv = [sys.executable, "-P", "-m", "psdist.cli.main", "run", "--no-python", "sh", "train.sh"]
    status, text = Launched(argv, stage.environ, stage.path / "work").end()
    assert status == 0, text


# --- bad ends ---------------------------------------------------------------------------------------------------------


def test_a_failed_worker_is_restarted_with_its_rank(stage: Stage) -> None:
    status, text = stage.run("--nproc-per-node", "2", "train.py", "connect", "1.0:fail", "1.1:segfault", "ended")
    assert status == 0, text
    assert "restart 1 of 3" in text and "SIGSEGV; restart 2 of 3" in text
    assert "[worker 1] ended 2" in text and "[worker 0] ended 0" in text
    stage.assert_clean()


def test_a_script_that_fails_before_it_connects_is_run_once(stage: Stage) -> None:
    (stage.path / "work" / "typo.py").write_text("import psdist\nthis is no Python\n")
    status, text = stage.run("typo.py")
    assert status == 1 and text.count("SyntaxError") == 1 and "restart 1" not in text, text
    assert text.splitlines()[-1].endswith(
        "(it failed before psdist.init() had connected, as it would again: not restarted)"
    )
    stage.assert_clean()


def test_a_traceback_that_the_console_had_is_not_repeated(stage: Stage) -> None:
    flags = ("--nproc-per-node", "2", "--max-restarts", "1")
    status, text = stage.run(*flags, "train.py", "connect", "0:wait", "1:fail")
    assert status == 1
    assert text.count("RuntimeError: boom in attempt 1") == 1 and "last lines" not in text
    assert text.splitlines()[-1].endswith(" psdist: worker 1 failed: exit code 1 (--max-restarts 1 used up)")
    stage.assert_clean()


def test_a_traceback_that_the_console_did_not_have_comes_last(stage: Stage) -> None:
    flags = ("--nproc-per-node", "2", "--max-restarts", "0", "--local-ranks-filter", "0")
    status, text = stage.run(*flags, "train.py", "connect", "0:wait", "1:fail")
    assert status == 1
    end = text[text.index("psdist: last lines of worker 1") :].splitlines()
    assert end[1] == "  | Traceback (most recent call last):"
    assert end[-2] == "  | RuntimeError: boom in attempt 0"
    assert end[-1].endswith(" psdist: worker 1 failed: exit code 1")
    stage.assert_clean()


def test_after_a_failure_who_does_not_end_is_killed_without_the_stop_timeout(stage: Stage) -> None:
    flags = ("--nproc-per-node", "2", "--max-restarts", "0", "--stop-timeout", "3600")
    os.mkfifo(stage.path / "work" / "meeting")
    status, text = stage.run(*flags, "train.py", "0:deaf", "meet", "connect", "0:wait", "1:fail")
    assert status == 1 and "worker 0 did not end within 1 s of SIGTERM: killed" in text
    stage.assert_clean()


@pytest.mark.parametrize(
    ("what", "status", "words"),
    [("exit7", 7, "exit code 7"), pytest.param("segfault", 139, "SIGSEGV", marks=pytest.mark.long)],
)
def test_the_status_is_the_scripts(stage: Stage, what: str, status: int, words: str) -> None:
    got, text = stage.run("--max-restarts", "0", "train.py", "connect", what)
    assert got == status
    assert f"worker 0 failed: {'killed by ' if status > 128 else ''}{words}" in text.splitlines()[-1]
    stage.assert_clean()


def test_a_worker_that_leaves_without_connecting_while_another_waits(stage: Stage) -> None:
    status, text = stage.run("--nproc-per-node", "2", "train.py", "0:connect", "0:wait", "1:bye")
    assert status == 65
    assert " psdist: worker 1 ended without connecting" in text.splitlines()[-1]
    stage.assert_clean()


def test_a_script_that_never_uses_psdist(stage: Stage) -> None:
    status, text = stage.run("--nproc-per-node", "2", "train.py", "bye")
    assert status == 0
    assert len(re.findall("never used psdist", text)) == 1
    stage.assert_clean()


@pytest.mark.parametrize(
    ("stand_in", "who", "words"),
    [("server dies", "server 1", "killed by SIGKILL; the only copy"), ("scheduler dies", "scheduler", "exit code 1; ")],
)
def test_a_server_or_scheduler_that_is_dead_for_good_ends_the_run(
    stage: Stage, stand_in: str, who: str, words: str
) -> None:
    status, text = stage.run("--nproc-per-node", "2", "train.py", "connect", "wait", STAND_IN=stand_in)
    assert status == 70
    assert f" psdist: {who} died: {words}" in text.splitlines()[-1]
    assert f"the {who.split()[0]}'s last words" in text and "last lines" not in text
    stage.assert_clean()


def test_a_scheduler_that_does_not_come_up(stage: Stage) -> None:
    flags = ("--start-timeout", "0.2", "--nservers", "1")
    status, text = stage.run(*flags, "train.py", "connect", "wait", STAND_IN="mute scheduler")
    assert status == 70
    assert "within 0.2 s (--start-timeout)" in text.splitlines()[-1]
    stage.assert_clean()


# --- signals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("signum", "status"),
    [
        (signal.SIGINT, 130),
        # The same path; the statuses are checked without processes.
        *(pytest.param(*one, marks=pytest.mark.long) for one in ((signal.SIGTERM, 143), (signal.SIGHUP, 129))),
    ],
)
def test_signals_end_everything(stage: Stage, signum: int, status: int) -> None:
    run = stage.start("--nproc-per-node", "2", "train.py", "connect", "child", "wait")
    run.until(r"pid \d+", 2 * 2 + 2 + 1)
    run.process.send_signal(signum)
    assert run.end()[0] == status
    stage.assert_clean()


#: An agent that gets its ranks by flags, and asks no scheduler for them.
_AGENT = ("--nnodes", "1", "--node-rank", "0", "--scheduler", "127.0.0.1:9")


@pytest.mark.parametrize(
    ("program", "flags"), [("main", ("run",)), pytest.param("worker", _AGENT, marks=pytest.mark.long)]
)
def test_a_hangup_that_is_ignored_from_the_start_stays_ignored(
    stage: Stage, program: str, flags: tuple[str, ...]
) -> None:
    code = f"from psdist.cli import main; main.{program}()"
    argv = ["nohup", sys.executable, "-c", code, *flags, "train.py", "connect", "ready", "meet", "bye"]
    os.mkfifo(stage.path / "work" / "meeting")
    run = stage.start_program(argv, {"PSDIST_TOKEN": "t" * 32})
    run.until(r"\[worker 0\] ready")
    run.process.send_signal(signal.SIGHUP)
    # The worker continues only now, and opening both ends waits for nobody.
    meeting = os.open(stage.path / "work" / "meeting", os.O_RDWR)
    status, text = run.end()
    os.close(meeting)
    assert status == 0 and "[worker 0] bye 0" in text and "SIGHUP" not in text, text
    stage.assert_clean()


def test_an_interrupt_that_is_ignored_from_the_start_ends_the_run(stage: Stage) -> None:
    # A shell starts the background jobs of a script in this way.
    code = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); from psdist.cli.main import main; main()"
    run = stage.start_program([sys.executable, "-c", code, "run", "train.py", "connect", "wait"])
    run.until(r"\[worker 0\] pid \d+")
    run.process.send_signal(signal.SIGINT)
    assert run.end()[0] == 130
    stage.assert_clean()


@pytest.mark.parametrize(
    "signum", [signal.SIGTERM, *(pytest.param(one, marks=pytest.mark.long) for one in (signal.SIGINT, signal.SIGHUP))]
)
def test_a_signal_after_the_end_of_the_run_changes_nothing(stage: Stage, signum: int) -> None:
    # It arrives while Python ends: after the run, and before the process has exited.
    late = f"import atexit, signal; atexit.register(lambda: [signal.raise_signal({signum:d})])"
    program = f"{late}; from psdist.cli.main import main; main()"
    stage.launched.append(
        Launched([sys.executable, "-c", program, "run", "train.py", "connect"], stage.environ, stage.path / "work")
    )
    status, text = stage.launched[-1].end()
    assert status == 0, text
    assert "Traceback" not in text
    stage.assert_clean()


def test_a_second_signal_does_not_wait_for_the_deaf(stage: Stage) -> None:
    run = stage.start("train.py", "connect", "deaf", "wait")
    run.until(r"\[worker 0\] pid \d+")
    run.process.send_signal(signal.SIGINT)
    run.until("repeat the signal to kill")
    # Signals in the first second count as the same stop.
    while run.process.poll() is None:
        run.process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            run.process.wait(0.2)
    status, text = run.end()
    assert status == 130 and "SIGINT again: all processes are killed" in text
    stage.assert_clean()


def test_the_deaf_are_killed_after_the_grace(stage: Stage) -> None:
    run = stage.start("--stop-timeout", "2", "train.py", "connect", "deaf", "wait")
    run.until(r"\[worker 0\] pid \d+")
    run.process.send_signal(signal.SIGTERM)
    status, text = run.end()
    assert status == 143 and "worker 0 did not end within 2 s" in text
    stage.assert_clean()


def test_a_killed_launcher_leaves_no_process(stage: Stage) -> None:
    """Check that the processes of the scripts are gone, too. SIGKILL leaves no time for any cleanup."""
    run = stage.start("--run-id", "killed", "--nproc-per-node", "2", "train.py", "connect", "deaf", "child", "wait")
    run.until(r"pid \d+", 2 * 2 + 2 + 1)
    assert len(stage.processes()) >= 1 + 4 + 2 + 1 + 1
    run.process.kill()
    run.process.wait()
    run.end()
    _, alive = psutil.wait_procs(stage.processes(), timeout=60)
    assert [process.cmdline() for process in alive] == []
    # The next command removes the note and the directory.
    assert stage.run("train.py", "connect")[0] == 0
    stage.assert_clean()


def test_a_reader_that_goes_away_ends_the_run(stage: Stage) -> None:
    run = stage.start("train.py", "connect", *["line"] * 20_000, "wait")
    run.until("line")
    assert run.process.stdout is not None
    run.process.stdout.close()
    assert run.process.wait() == 141
    stage.assert_clean()


def test_background_processes_of_a_script_end_with_it(stage: Stage) -> None:
    status, text = stage.run("train.py", "connect", "child", "bye")
    assert status == 0, text
    stage.assert_clean()


# --- wrong use --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["absent.py"], ["absent.py", "does not exist"]),
        ([], ["no script"]),
        (["--nservers", "0", "train.py"], ["--nservers", "0", "at least 1"]),
        (["--replicas", "2", "--nservers", "1", "train.py"], ["--replicas 2", "--nservers 1", "different servers"]),
        (["--replicas", "3", "--nservers", "3", "train.py"], ["--replicas", "3", "at most 2"]),
        (["--nproc-per-node", "0", "train.py"], ["--nproc-per-node", "0", "at least 1"]),
        (["-m", "absent_module.x"], ["absent_module"]),
        (["--no-python", "absent-program"], ["absent-program"]),
        (["-m", "--no-python", "train"], ["--module", "--no-python"]),
        (["."], ["__main__.py"]),
        (["--log-dir", "train.py", "train.py"], ["--log-dir", "train.py"]),
        (["--bogus", "train.py"], ["--bogus"]),
    ],
)
def test_wrong_use_starts_nothing(stage: Stage, arguments: list[str], words: list[str]) -> None:
    status, text = stage.run(*arguments)
    assert status == 2, text
    assert all(word in text for word in words), text
    assert "pid" not in text and "Traceback" not in text
    stage.assert_clean()


def test_a_misplaced_flag_gets_a_hint(stage: Stage) -> None:
    status, text = stage.run("train.py", "connect", "--nproc-per-node")
    assert status == 0
    assert len(re.findall(r"hint: --nproc-per-node after train.py", text)) == 1

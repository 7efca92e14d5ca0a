"""Lines, prefixes, files and last words of processes; environments of workers; notes of runs."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psdist.errors import ConfigurationError
from psdist.launcher import reaper
from psdist.launcher.events import ProcessKey
from psdist.launcher.output import STDERR, STDOUT, Output, Routing, discard, last_words, line_as_json, parse_streams
from psdist.launcher.plan import SchedulerAddress, ScriptSettings, WorkersPlan
from psdist.launcher.process import LineSplitter
from psdist.launcher.run_record import RunRegistry, records_directory
from psdist.wire.limits import OUTPUT_LINE_BYTES_MAX

WORKER = ProcessKey("worker", 5)
SERVER = ProcessKey("server", 1)


@given(st.lists(st.text(st.characters(exclude_characters="\r\n", codec="utf-8"), max_size=20), max_size=10), st.data())
def test_lines_do_not_depend_on_how_they_arrive(lines: list[str], data: st.DataObject) -> None:
    ends = [data.draw(st.sampled_from(["\n", "\r\n"])) for _ in lines]
    stream = "".join(line + end for line, end in zip(lines, ends, strict=True)).encode()
    splitter, got, position = LineSplitter(), [], 0
    while position < len(stream):
        step = data.draw(st.integers(1, 7))
        got += splitter.feed(stream[position : position + step])
        position += step
    assert got + splitter.close() == lines


def test_progress_bars_and_lines_without_end() -> None:
    splitter = LineSplitter()
    assert splitter.feed(b"10%\r20%\r") == [] and splitter.bar == "20%"
    assert splitter.feed(b"30%") == [] and splitter.bar == "30%"
    assert splitter.close() == ["30%"] and splitter.bar == ""
    assert splitter.feed(b"\r 0%\r 50%\rerror\n\r100%") == ["error"] and splitter.bar == "100%"
    assert splitter.feed(b"\n\r 7%\r   \r") == ["100%"] and not splitter.bar.strip() and splitter.close() == []
    assert splitter.feed(b"no bar") == [] and splitter.bar == "" and splitter.feed(b"\r") == []
    assert splitter.feed(b"\n") == ["no bar"]
    assert splitter.feed(b"x" * (OUTPUT_LINE_BYTES_MAX + 1)) == ["x" * OUTPUT_LINE_BYTES_MAX]
    assert splitter.close() == ["x"]
    assert splitter.feed(b"\xff\n") == ["\ufffd"]


def test_with_json_every_line_is_an_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = Output(Routing(log_dir=tmp_path), lambda rank: rank, as_json=True)
    output.clear_lines(WORKER)
    output.say("worker 5 failed")
    output.show_lines(WORKER, STDOUT, ["loss 1.0", "", '{"event": "x", "rank": 7}', "{not json", '{"a": 1} b'])
    output.clear_lines(SERVER)
    output.show_lines(SERVER, STDERR, ["text"])
    output.close()
    said = capsys.readouterr().err.splitlines()
    assert json.loads(said[0]).items() >= {"event": "worker 5 failed", "level": "info", "role": "launcher"}.items()
    assert json.loads(said[1]).items() >= {"server": "server-1", "stream": "stderr", "message": "text"}.items()
    # The log file has the lines as they were written.
    assert len((tmp_path / "worker-5.log").read_text().splitlines()) == 5 and len(said) == 2


def test_a_workers_lines_as_json_have_its_rank_and_their_stream() -> None:
    place = {"role": "worker", "worker": "worker-5", "rank": 5, "stream": "stdout"}
    for line in ("loss 1.0", "", "{not json", '{"a": 1} b', "[1]", "\ud800"):
        found = json.loads(line_as_json(WORKER, STDOUT, line))
        assert found.pop("timestamp") and found == {"message": line, **place}
    assert json.loads(line_as_json(WORKER, STDOUT, '{"event": "x", "rank": 7}')) == {**place, "event": "x", "rank": 7}


def test_last_words_are_the_traceback_or_the_last_lines_unless_the_console_had_them() -> None:
    step, warning, bye = (STDOUT, "step 1"), (STDERR, "warning"), (STDOUT, "bye")
    traceback = [(STDERR, "Traceback (most recent call last):"), (STDERR, "E: x")]
    out, both = frozenset((STDOUT,)), frozenset((STDOUT, STDERR))
    for tail, hidden, words in [
        ([step, warning, *traceback, bye], both, ["Traceback (most recent call last):", "E: x"]),
        ([step, warning], both, ["step 1", "warning"]),
        ([], both, []),
        ([step, *traceback], out, []),
        ([step, *traceback], frozenset[int](), []),
        ([step], out, ["step 1"]),
    ]:
        assert last_words(tail, hidden) == words


def test_streams_in_torchruns_notation() -> None:
    assert parse_streams("3") == {None: 3}
    assert parse_streams("0:1,2:3") == {0: 1, 2: 3}
    for wrong in ("", "4", "a:1", "1,2", "0:1,3", ":1"):
        with pytest.raises(ConfigurationError):
            parse_streams(wrong)


def test_routing(tmp_path: Path) -> None:
    assert Routing(log_dir=tmp_path).to_file(0, STDOUT) and not Routing().to_file(0, STDOUT)
    redirected = Routing(log_dir=tmp_path, redirects={None: 3}, tee={1: 2})
    assert redirected.to_file(0, STDOUT) and not redirected.to_console(0, STDOUT)
    assert redirected.to_console(1, STDERR) and not redirected.to_console(1, STDOUT)
    shown = Routing(local_ranks_filter=frozenset({1}))
    assert shown.to_console(1, STDOUT) and not shown.to_console(0, STDERR) and shown.to_console(None, STDERR)


def test_lines_go_to_their_stream_and_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = Output(Routing(log_dir=tmp_path / "logs"), lambda rank: rank - 4, "trainer")
    output.clear_lines(WORKER)
    output.show_lines(WORKER, STDOUT, ["a", "b"])
    output.show_lines(WORKER, STDERR, ["c"])
    output.clear_lines(ProcessKey("scheduler", 0))
    output.show_lines(ProcessKey("scheduler", 0), STDERR, ["d"])
    output.report(WORKER)
    output.close()
    captured = capsys.readouterr()
    assert captured.out == "[trainer 5] a\n[trainer 5] b\n"
    assert captured.err == "[trainer 5] c\n[scheduler] d\n"
    assert (tmp_path / "logs" / "worker-5.log").read_text() == "a\nb\nc\n"
    assert (tmp_path / "logs" / "scheduler.log").read_text() == "d\n"


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Put a full disk behind ``sys.stdout`` or ``sys.stderr``."""
    with contextlib.ExitStack() as stack:

        def put(name: str) -> None:
            stream = open("/dev/full", "w")  # noqa: SIM115
            stack.callback(stream.close)
            stack.callback(discard, stream)
            monkeypatch.setattr(sys, name, stream)

        yield put


@pytest.mark.parametrize(
    ("name", "stream", "title"), [("stdout", STDOUT, "standard output"), ("stderr", STDERR, "standard error")]
)
def test_a_full_disk_is_said_once_on_the_other_stream(
    full: Callable[[str], None], capsys: pytest.CaptureFixture[str], name: str, stream: int, title: str
) -> None:
    full(name)
    output = Output(Routing(), lambda rank: rank)
    output.on_broken = lambda: pytest.fail("no reader is gone")
    output.clear_lines(WORKER)
    for _ in range(3):
        output.show_lines(WORKER, stream, ["lost"])
    output.show_lines(WORKER, STDERR if stream == STDOUT else STDOUT, ["seen"])
    output.close()
    # Nothing is left that could fail once more.
    getattr(sys, name).flush()
    captured = capsys.readouterr()
    said, seen = (captured.err + captured.out).splitlines()
    assert said.endswith(f" psdist: {title} cannot be written: No space left on device; lines are lost")
    assert seen == "[worker 5] seen"


def test_two_full_disks_raise_nothing(full: Callable[[str], None]) -> None:
    full("stdout")
    full("stderr")
    output = Output(Routing(), lambda rank: rank)
    output.on_broken = lambda: pytest.fail("no reader is gone")
    output.clear_lines(WORKER)
    output.show_lines(WORKER, STDOUT, ["lost"])
    output.say("lost")
    output.close()


def test_a_stream_that_can_be_written_again_is_kept(
    tmp_path: Path, full: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    full("stdout")
    output = Output(Routing(), lambda rank: rank)
    output.clear_lines(WORKER)
    output.show_lines(WORKER, STDOUT, ["held"])
    with (tmp_path / "room").open("w") as room:
        os.dup2(room.fileno(), sys.stdout.fileno())
    output.show_lines(WORKER, STDOUT, ["later"])
    output.close()
    sys.stdout.write("last")
    sys.stdout.flush()
    assert (tmp_path / "room").read_text().endswith("[worker 5] later\nlast")


def test_a_log_file_on_a_full_disk_is_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "worker-5.log").symlink_to("/dev/full")
    output = Output(Routing(log_dir=tmp_path), lambda rank: rank)
    output.clear_lines(WORKER)
    output.show_lines(WORKER, STDOUT, ["a"])
    output.show_lines(WORKER, STDOUT, ["b"])
    output.close()
    captured = capsys.readouterr()
    assert captured.out == "[worker 5] a\n[worker 5] b\n"
    (said,) = captured.err.splitlines()
    assert said.endswith("the log file of worker 5 can no longer be written: No space left on device")


def test_a_worker_gets_torchruns_environment_and_nothing_of_an_outer_run(tmp_path: Path) -> None:
    link = SchedulerAddress(file=tmp_path / "scheduler", token_file=tmp_path / "token", run_id="inner")
    plan = WorkersPlan(
        script=ScriptSettings(command=("true",), no_python=True, processes=2, start_timeout_seconds=9.5),
        link=link,
        connected_directory=tmp_path,
        master=("127.0.0.1", 29),
        first_rank=2,
        world_size=4,
        node_rank=1,
    )
    outer = {
        "PSDIST_SCHEDULER": "outer:1",
        "PSDIST_TOKEN": "outer",
        "DMLC_PS_ROOT_URI": "outer",
        "RANK": "9",
        "HOME": "/",
    }
    got = dict(plan.spec(3, 1, outer).environment)
    assert got == {
        "HOME": "/",
        "PSDIST_SCHEDULER_FILE": str(tmp_path / "scheduler"),
        "PSDIST_TOKEN_FILE": str(tmp_path / "token"),
        "PSDIST_RUN_ID": "inner",
        "OMP_NUM_THREADS": "1",
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "ROLE_NAME": "worker",
        "ROLE_RANK": "3",
        "ROLE_WORLD_SIZE": "4",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29",
        "TORCHELASTIC_RESTART_COUNT": "1",
        "TORCHELASTIC_MAX_RESTARTS": "3",
        "TORCHELASTIC_RUN_ID": "inner",
        "PYTHONIOENCODING": "utf-8:surrogateescape",
        "PSDIST_START_TIMEOUT": "9.5",
        "PSDIST_CONNECTED_FILE": str(tmp_path / "3.1"),
        "PYTHONBREAKPOINT": "psdist.settings.debugging.on_breakpoint",
    }
    assert plan.spec(3, 1, {"OMP_NUM_THREADS": "6"}).environment["OMP_NUM_THREADS"] == "6"


def test_the_guard_kills_what_was_not_struck_out() -> None:
    assert reaper.remaining_groups(
        [b"+10\n", b"+11\n", b"-10\n", b"+1\n", b"+0\n", b"nonsense\n", b"+\n", b"-99\n"]
    ) == {11}


def test_notes_of_runs(tmp_path: Path) -> None:
    registry = RunRegistry(tmp_path / "runs")
    note = registry.claim("mine", tmp_path / "token", tmp_path / "psdist-mine")
    assert (tmp_path / "runs" / "mine.json").stat().st_mode & 0o777 == 0o600
    note = registry.listening(note, "127.0.0.1:5")
    assert registry.live() == [note]
    with pytest.raises(ConfigurationError, match=f"pid {os.getpid()}"):
        registry.claim("mine", tmp_path / "token", tmp_path / "psdist-mine")
    registry.remove("mine")
    assert registry.live() == []


def test_records_lie_in_a_directory_of_this_user(tmp_path: Path) -> None:
    environ = {"XDG_RUNTIME_DIR": str(tmp_path), "TMPDIR": str(tmp_path / "t")}
    assert records_directory(environ) == tmp_path / "psdist" / "runs"
    fallback = tmp_path / "t" / f"psdist-runs-{os.geteuid()}"
    for unusable in ("", "relative", str(tmp_path / "absent")):
        assert records_directory({**environ, "XDG_RUNTIME_DIR": unusable}) == fallback


def test_what_others_may_write_is_neither_read_nor_written(tmp_path: Path) -> None:
    directory = tmp_path / "runs"
    registry = RunRegistry(directory)
    for name in ("mine", "shared", "linked"):
        registry.claim(name, tmp_path / "token", tmp_path / "psdist-mine")
    (directory / "shared.json").chmod(0o644)
    (directory / "linked.json").rename(tmp_path / "elsewhere.json")
    (directory / "linked.json").symlink_to(tmp_path / "elsewhere.json")
    assert [record.run_id for record in registry.live()] == ["mine"]
    assert (directory / "shared.json").exists()
    directory.chmod(0o755)
    registry.claim("late", tmp_path / "token", tmp_path / "psdist-mine")
    registry.remove("mine")
    assert registry.live() == [] and not (directory / "late.json").exists() and (directory / "mine.json").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_records_of_others_are_not_read(tmp_path: Path) -> None:
    registry = RunRegistry(tmp_path / "runs")
    registry.claim("theirs", tmp_path / "token", tmp_path / "psdist-theirs")
    os.chown(tmp_path / "runs" / "theirs.json", 12345, 12345)
    assert registry.live() == []
    registry.claim("mine", tmp_path / "token", tmp_path / "psdist-mine")
    os.chown(tmp_path / "runs", 12345, 12345)
    assert registry.live() == []


def test_stale_notes_are_swept_with_their_directory(tmp_path: Path) -> None:
    registry = RunRegistry(tmp_path / "runs")
    (tmp_path / "psdist-old").mkdir()
    (tmp_path / "psdist-old" / "token").write_text("t")
    (tmp_path / "precious").mkdir()
    for name, directory in (("old", "psdist-old"), ("forged", "precious")):
        registry.claim(name, tmp_path / "token", tmp_path / directory)
        path = tmp_path / "runs" / f"{name}.json"
        # The pid is alive, but it is another process than the one that wrote the note.
        path.write_text(json.dumps({**json.loads(path.read_text()), "pid_started": 1}))
    (tmp_path / "runs" / "broken.json").write_text("[]")
    (tmp_path / "runs" / "broken.json").chmod(0o600)
    assert registry.live() == []
    assert list((tmp_path / "runs").iterdir()) == []
    assert not (tmp_path / "psdist-old").exists() and (tmp_path / "precious").exists()


_LOST = "is lost: its session broke, and its port refuses connections"


def test_a_lost_server_is_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = Output(Routing(log_dir=tmp_path), lambda rank: rank)
    scheduler = ProcessKey("scheduler", 0)
    for key in (scheduler, WORKER):
        output.clear_lines(key)
    output.note_loss("server-1")  # The launcher names its exit.
    output.show_lines(scheduler, STDERR, [f"00:22:40 WARNING psdist.scheduler: server-1 {_LOST}"])
    output.show_lines(WORKER, STDERR, [f"00:22:40 WARNING psdist: server-1 {_LOST}", "server-1 is lost: the script's"])
    for _ in range(2):  # A server whose process lives: the first process that notices says it.
        output.show_lines(scheduler, STDERR, [f"00:22:40 WARNING psdist.scheduler: server-2 {_LOST}"])
    output.close()
    assert capsys.readouterr().err.splitlines() == [
        "[worker 5] server-1 is lost: the script's",
        f"[scheduler] 00:22:40 WARNING psdist.scheduler: server-2 {_LOST}",
    ]
    assert (tmp_path / "worker-5.log").read_text().count("is lost") == 2


@pytest.mark.parametrize("plain", [True, False])
def test_an_error_is_red_on_a_terminal(plain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("NO_COLOR", "1" if plain else "")
    output = Output(Routing(), lambda rank: rank)
    output.say("worker 0 failed", is_error=True)
    output.say("snapshots are in x")
    output.clear_lines(WORKER)
    output.show_lines(WORKER, STDERR, ["12:00:00 ERROR psdist: the run ends", "ERROR of the script"])
    first, second, logged, own = screen.getvalue().splitlines()
    assert logged.endswith("12:00:00 ERROR psdist: the run ends" + ("" if plain else "\x1b[0m"))
    assert own.endswith(" ERROR of the script")
    assert first.startswith("\x1b[31m") == first.endswith("\x1b[0m") == (not plain)
    assert first.removesuffix("\x1b[0m").endswith("psdist: worker 0 failed") and "\x1b" not in second

"""The commands' interface: help, version, unknown words; and that ``psdist run`` starts without heavy imports."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from psdist.launcher.embedded import EmbeddedCluster


def call(*arguments: str, program: str = "main") -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-c", f"from psdist.cli import main; main.{program}()", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def test_help_of_every_command() -> None:
    status, text, _ = call("--help")
    assert status == 0
    for command in ("run", "status", "explain", "version"):
        assert command in text
        status, own, _ = call(command, "--help")
        assert status == 0 and own.startswith(f"usage: psdist {command}")
    status, text, _ = call("--help", program="worker")
    assert status == 0 and text.startswith("usage: psdist-worker [flags] script.py")
    assert "--nproc-per-node" in text and "--nproc_per_node" not in text


PROGRAMS = {
    "psdist run": ("main", "run"),
    "psdist status": ("main", "status"),
    "psdist explain": ("main", "explain"),
    "psdist snapshot list": ("main", "snapshot", "list"),
    "psdist-scheduler": ("scheduler",),
    "psdist-server": ("server",),
    "psdist-worker": ("worker",),
}


def test_help_shows_defaults_as_one_would_write_them() -> None:
    for program in PROGRAMS:
        name, *words = PROGRAMS[program]
        _, text, _ = call(*words, "--help", program=name)
        defaults = re.findall(r"\(default (.*?)\)", " ".join(text.split()))
        assert not [default for default in defaults if re.search(r"[(){}<>\[\]']|None|\d\.0$", default)], defaults


def test_help_begins_with_the_five_flags_that_matter() -> None:
    for program, first in [
        ("run", ["--nproc-per-node", "--nservers", "--replicas", "--run-id", "--storage-path"]),
        ("worker", ["--scheduler", "--nnodes", "--nproc-per-node", "--run-id", "--token-file"]),
        ("scheduler", ["--host", "--port", "--min-workers", "--min-servers", "--storage-path"]),
        ("server", ["--scheduler", "--host", "--port", "--server-id", "--token-file"]),
    ]:
        _, text, _ = call("run", "--help") if program == "run" else call("--help", program=program)
        groups = dict(re.findall(r"^([a-z ]+):\n((?:  .*\n?)+)", text, re.M))
        assert re.findall(r"^  (--[a-z-]+)", groups["most used"], re.M) == first
        assert next(iter(groups)) == "most used" and "timeouts" in groups and list(groups)[-1] == "other flags"


def test_a_server_waits_for_the_name_of_its_scheduler_and_then_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check a resolver that refuses the name, and one that does not answer at all."""
    monkeypatch.setenv("PSDIST_TOKEN", "secret")
    flags = ("--host", "0.0.0.0", "--insecure", "--start-timeout", "0.5", "--scheduler", "scheduler.invalid:7000")
    status, _, text = call(*flags, program="server")
    assert status == 69 and "the scheduler's name scheduler.invalid did not resolve within 0.5 s" in text
    assert "Traceback" not in text


_CLIENT = "import psdist; psdist.init(scheduler='192.0.2.1:7')"


def test_no_program_sends_its_token_to_another_machine_in_plaintext(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PSDIST_TOKEN", "secret")
    there = ("--scheduler", "192.0.2.1:7")
    (tmp_path / "train.py").write_text("print('started')")
    refused = [
        call(*there, program="server"),
        call(*there, str(tmp_path / "train.py"), program="worker"),
        *(call(*words, *there) for words in (["status"], ["events"], ["snapshot", "save"], ["explain"])),
    ]
    script = subprocess.run([sys.executable, "-c", _CLIENT], capture_output=True, text=True, check=False)
    refused.append((script.returncode, script.stdout, script.stderr))
    for status, shown, text in refused:
        assert status != 0 and "started" not in shown
        assert "the token would be sent to 192.0.2.1:7" in text and "--insecure (PSDIST_INSECURE=1)" in text, text


#: As on a machine that is so busy that the import takes minutes.
_SLOW_IMPORT = """
import sys, threading
class Slow:
    def find_spec(self, name, *_):
        if name == "grpc":
            threading.Event().wait()
sys.meta_path.insert(0, Slow())
from psdist.cli import main
main.main()
"""


def test_a_time_limit_bounds_the_whole_command() -> None:
    argv = ["status", "--scheduler", "127.0.0.1:9", "--timeout", "0.1"]
    done = subprocess.run([sys.executable, "-c", _SLOW_IMPORT, *argv], capture_output=True, text=True, check=False)
    assert done.returncode == 69
    (line,) = done.stderr.splitlines()
    assert "127.0.0.1:9 within 0.1 s (--timeout)" in line and "may be frozen" in line and "longer --timeout" in line


def test_version() -> None:
    status, text, _ = call("version")
    assert status == 0 and text.startswith("psdist ")
    assert call("--version")[1] == text


def test_unknown_words() -> None:
    status, _, text = call("frobnicate")
    assert status == 2 and "'frobnicate'" in text
    commands = "run, config, status, events, trace, stacks, explain, report, snapshot, scale, drain, doctor"
    assert f"{commands}, token, generate, certs, warmup, completion and version" in text
    for word, answer in {
        "runn": "did you mean psdist run?",
        "train.py": "to run a script, psdist run train.py",
        "worker": "psdist-scheduler, psdist-server, psdist-worker",
    }.items():
        status, _, text = call(word)
        assert status == 2 and answer in text, text
    status, _, text = call()
    assert status == 2 and text.startswith("usage: psdist")
    status, _, text = call("version", "--loud")
    assert status == 2 and "--loud" in text


@pytest.mark.parametrize("arguments", [("main", "status"), ("server",), ("worker", "x.py")], ids=" ".join)
def test_a_wrong_token_has_one_status_everywhere(
    arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PSDIST_TOKEN", "w" * 32)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.py").write_text("import psdist; psdist.init()")
    program, *rest = arguments
    words = rest[:1] if program == "main" else []
    with closing(EmbeddedCluster(servers=1)) as cluster:
        status, _, text = call(*words, "--scheduler", cluster.address, *rest[len(words) :], program=program)
    assert status == 78 and "token is missing or wrong" in text, text


def test_scale_and_drain_refuse_what_makes_no_sense() -> None:
    for arguments, words in (
        (("scale", "schedulers", "3"), ("'schedulers'", "servers and workers")),
        (("scale", "servers", "0"), ("servers", "at least 1")),
        (("scale", "workers", "0"), ("workers", "at least 1")),
        (("scale", "servers"), ("N",)),
        (("drain",), ("SERVER",)),
        (("drain", "server-1", "server-2"), ("server-2",)),
    ):
        status, text, error = call(*arguments)
        assert status == 2 and not text and all(word in error for word in words), error
    for arguments in (("scale", "servers", "3"), ("scale", "workers", "3"), ("drain", "server-1")):
        status, _, error = call(*arguments, "--scheduler", "127.0.0.1:1")
        assert status == 69 and "127.0.0.1:1" in error, error


@pytest.mark.parametrize("module", ["psdist.cli.run", "psdist.cli.worker", "psdist.settings.config"])
def test_launchers_import_nothing_heavy(module: str) -> None:
    """Check imports: a launcher must start quickly, and must not have imported grpc when it forks."""
    program = f"import sys, {module}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    heavy = {"grpc", "numpy", "numba", "obstore", "psutil", "rich", "structlog", "xxhash"}
    assert not heavy & set(loaded)


def test_status_tells_several_runs_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from psdist.cli import target as commands
    from psdist.errors import InvalidArgumentError, SchedulerUnreachableError
    from psdist.launcher.run_record import RunRegistry, records_directory
    from psdist.settings.flags import CommandLine

    environ = {"XDG_RUNTIME_DIR": str(tmp_path)}
    registry = RunRegistry(records_directory(environ))
    (tmp_path / "token").write_text("secret\n")
    for number, name in enumerate(("a", "b")):
        registry.listening(registry.claim(name, tmp_path / "token", tmp_path), f"127.0.0.1:{number + 1}")
    registry.claim("starting", tmp_path / "token", tmp_path)

    def find(scheduler: str, run_id: str, environ: dict[str, str]) -> commands.SchedulerChoice:
        words = [*(("--scheduler", scheduler) if scheduler else ()), *(("--run-id", run_id) if run_id else ())]
        return commands.find_target(CommandLine("status", "", commands.target_flags()).parse(words, environ), environ)

    with pytest.raises(InvalidArgumentError, match="a, b, starting"):
        find("", "", environ)
    target = find("", "b", environ)
    assert (target.address, target.credentials.token) == ("127.0.0.1:2", "secret")
    assert str(os.getpid()) in target.origin
    with pytest.raises(SchedulerUnreachableError, match="not up yet"):
        find("", "starting", environ)
    with pytest.raises(SchedulerUnreachableError, match="--scheduler"):
        find("", "c", environ)
    assert find("h:1", "", environ).address == "h:1"
    assert find("", "", {**environ, "PSDIST_SCHEDULER": "h:2"}).address == "h:2"


@pytest.mark.parametrize("words", [("run", "train.py"), ("warmup",), ("worker", "--scheduler", "h:1", "train.py")])
def test_a_working_directory_that_is_gone_is_said_in_words(tmp_path: Path, words: tuple[str, ...]) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    program, arguments = ("worker", words[1:]) if words[0] == "worker" else ("main", words)
    script = f"import os; os.rmdir({str(gone)!r}); from psdist.cli import main; main.{program}()"
    done = subprocess.run([sys.executable, "-c", script, *arguments], cwd=gone, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert "the working directory does not exist any more" in done.stderr and "Traceback" not in done.stderr


def test_the_package_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "psdist", "version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("psdist ") and not done.stderr

"""A program's own process: signals before and after its event loop handles them, and messages about limits."""

from __future__ import annotations

import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from psdist.errors import ConfigurationError
from psdist.settings import own_process
from psdist.settings.programs import check_machine

BOTH = [signal.SIGTERM, signal.SIGINT]


def run(script: str) -> subprocess.CompletedProcess[str]:
    head = "import asyncio, os, signal, sys, uvloop\nfrom psdist.settings import own_process\n"
    return subprocess.run(
        [sys.executable, "-c", head + script], capture_output=True, text=True, check=False, timeout=100
    )


@pytest.mark.parametrize("number", BOTH)
def test_a_program_that_cleans_up_exits(number: signal.Signals) -> None:
    done = run(f"""
own_process.exit_on([{number:d}])
try:
    signal.raise_signal({number:d})
finally:
    print("cleaned up")
""")
    assert (done.returncode, done.stdout, done.stderr) == (128 + number, "cleaned up\n", "")


@pytest.mark.parametrize("number", BOTH)
def test_a_service_that_starts_ends_at_once(number: signal.Signals) -> None:
    done = run(
        f"own_process.end_on(own_process.SERVICE_SIGNALS)\nsignal.raise_signal({number:d})\nprint('not reached')"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_signal_that_is_ignored_stays_so() -> None:
    done = run("""
signal.signal(signal.SIGHUP, signal.SIG_IGN)
own_process.exit_on([signal.SIGHUP])
own_process.end_on([signal.SIGHUP])
print(signal.getsignal(signal.SIGHUP).name)
""")
    assert (done.stdout, done.stderr) == ("SIG_IGN\n", "")


def test_a_service_whose_sigterm_is_ignored_ends_by_ctrl_c_only() -> None:
    """As under Slurm, which signals all processes of a job. Shells ignore SIGINT for commands in the background."""
    done = run("""
async def work():
    ended = asyncio.Event()
    own_process.handle(ended.set)
    signal.raise_signal(signal.SIGTERM)
    await asyncio.sleep(0)
    assert not ended.is_set()
    signal.raise_signal(signal.SIGINT)
    await ended.wait()
    return 7

for number in own_process.SERVICE_SIGNALS:
    signal.signal(number, signal.SIG_IGN)
own_process.end_on(own_process.SERVICE_SIGNALS)
sys.exit(uvloop.run(own_process.ignored_after(work())))
""")
    assert (done.returncode, done.stdout, done.stderr) == (7, "", "")


@pytest.mark.parametrize("fails", [False, True])
def test_signals_after_a_services_work_change_nothing(fails: bool) -> None:
    done = run(f"""
async def work():
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    for number in own_process.SERVICE_SIGNALS:
        loop.add_signal_handler(number, ended.set)
    signal.raise_signal(signal.SIGTERM)
    await ended.wait()
    if {fails}:
        raise ValueError
    return 7

try:
    status = uvloop.run(own_process.ignored_after(work()))
except ValueError:
    status = 8
for number in own_process.SERVICE_SIGNALS:
    signal.raise_signal(number)
sys.exit(status)
""")
    assert (done.returncode, done.stdout, done.stderr) == (7 + fails, "", "")


# --- limits: they and the disks are faked ----------------------------------------------------------------------------

_INFINITE = resource.RLIM_INFINITY


class Limits:
    """The limits of a process; changes are recorded."""

    def __init__(self, files: tuple[int, int], addresses: int) -> None:
        self.files, self.addresses = files, addresses

    def getrlimit(self, kind: int) -> tuple[int, int]:
        return self.files if kind == resource.RLIMIT_NOFILE else (self.addresses, self.addresses)

    def setrlimit(self, kind: int, values: tuple[int, int]) -> None:
        assert kind == resource.RLIMIT_NOFILE
        self.files = values


def limited(
    monkeypatch: pytest.MonkeyPatch, files: tuple[int, int] = (1024, 4096), addresses: int = _INFINITE
) -> Limits:
    limits = Limits(files, addresses)
    monkeypatch.setattr(resource, "getrlimit", limits.getrlimit)
    monkeypatch.setattr(resource, "setrlimit", limits.setrlimit)
    return limits


@pytest.mark.parametrize(
    ("files", "children", "after"),
    [
        ((1024, 4096), 10, (1024, 4096)),
        ((32, 4096), 10, (64, 4096)),
        ((32, _INFINITE), 10, (64, _INFINITE)),
        ((_INFINITE, _INFINITE), 10_000, (_INFINITE, _INFINITE)),
    ],
)
def test_a_limit_that_may_be_raised_is_raised_as_far_as_needed(
    files: tuple[int, int], children: int, after: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = limited(monkeypatch, files)
    own_process.require_for_launcher(children)
    assert limits.files == after


def test_too_few_files_are_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    limited(monkeypatch, (32, 32))
    with pytest.raises(ConfigurationError, match=r"may open 32 files, and needs 44 to start 5 .*'ulimit -n 4096'"):
        own_process.require_for_launcher(5)


def test_too_few_addresses_are_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    limited(monkeypatch, addresses=600_000 << 10)
    with pytest.raises(ConfigurationError, match=r"may map 600000 KiB .*'ulimit -v unlimited'"):
        own_process.require_for_launcher(1)


@pytest.mark.parametrize(("files", "addresses"), [((32, 32), _INFINITE), ((1024, 1024), 600_000 << 10)])
def test_a_service_ends_with_one_line(
    files: tuple[int, int], addresses: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    limited(monkeypatch, files, addresses)
    with pytest.raises(SystemExit) as ended:
        check_machine("psdist-server")
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 69 and line.startswith("psdist-server: error: this process may") and "ulimit" in line


def test_a_full_temporary_directory_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert own_process.make_private_directory("psdist-").parent == tmp_path
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=4096))
    with pytest.raises(ConfigurationError, match=rf"{tmp_path} has 4096 bytes free, .* set TMPDIR"):
        own_process.make_private_directory("other-")
    assert not list(tmp_path.glob("other-*"))


def test_a_temporary_directory_that_cannot_be_written_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "absent"))
    with pytest.raises(ConfigurationError, match=r"no room .* set TMPDIR"):
        own_process.make_private_directory("psdist-")

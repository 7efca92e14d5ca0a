"""Signals that arrive while a program of psdist starts, or when it is ending: no traceback, no file, the right status.

Each program sends the signals to itself at a known point.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

SIGNALS = [signal.SIGTERM, signal.SIGINT]
#: Statements that send the signal at a point of ``psdist run``.
_RUN = """
import signal, sys
from psdist.cli import main
from psdist.launcher import local, runner

def sends(function):
    def sending(*arguments):
        result = function(*arguments)
        signal.raise_signal(signal.{name})
        return result
    return sending

{place} = sends({place})
sys.argv[1:] = ["run", "train.py"]
main.main()
"""
#: Statements that send the signal to a service when it starts, or print a line when it waits for signals.
_SERVICE = """
import runpy, signal, sys
import psdist.settings.programs
from {service} import app

last = app.{last}

def ready(*arguments):
    last(*arguments)
    print("ready", flush=True)

if {starts}:
    psdist.settings.programs.check_machine = lambda program: signal.raise_signal(signal.{name})
app.{last} = ready
sys.argv[1:] = {arguments}
runpy.run_module("{service}", run_name="__main__")
"""
#: Per service, the last function of its ``app`` that is called before it waits for signals, and arguments.
_SERVICES = {
    "psdist_scheduler": ("_write_address", ["--address-file", "address", "--port", "0"]),
    "psdist_server": ("_stop_on_signals", ["--scheduler", "127.0.0.1:1", "--port", "0"]),
}


def start(path: Path, script: str) -> subprocess.Popen[str]:
    """Start a program in ``path``."""
    return subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=path,
        env=os.environ | {"XDG_RUNTIME_DIR": str(path), "TMPDIR": str(path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def end(program: subprocess.Popen[str]) -> tuple[int, str]:
    """Return exit status and errors of a program."""
    with program:
        _, errors = program.communicate(timeout=240)
        return program.returncode, errors


@pytest.mark.parametrize(
    ("place", "name"),
    [
        ("local._make_link", signal.SIGINT),
        ("runner.Runner._announce", signal.SIGTERM),
        ("runner.Runner._announce", signal.SIGHUP),
    ],
)
def test_a_launcher_that_starts_leaves_nothing_behind(tmp_path: Path, place: str, name: signal.Signals) -> None:
    (tmp_path / "train.py").touch()
    status, text = end(start(tmp_path, _RUN.format(place=place, name=name.name)))
    assert status == 128 + name and "Traceback" not in text, text
    assert not list(tmp_path.glob("psdist-*")) and not list(tmp_path.glob("psdist/runs/*.json"))


@pytest.mark.parametrize(("service", "name"), list(zip(_SERVICES, SIGNALS, strict=True)))
def test_a_service_that_starts_is_ended_by_the_signal(tmp_path: Path, service: str, name: signal.Signals) -> None:
    last, arguments = _SERVICES[service]
    script = _SERVICE.format(service=service, last=last, arguments=arguments, starts=True, name=name.name)
    assert end(start(tmp_path, script)) == (0, "")


@pytest.mark.parametrize(("service", "name"), list(zip(_SERVICES, SIGNALS, strict=True)))
def test_signals_that_come_again_do_not_change_the_status(tmp_path: Path, service: str, name: signal.Signals) -> None:
    last, arguments = _SERVICES[service]
    script = _SERVICE.format(service=service, last=last, arguments=arguments, starts=False, name=name.name)
    program, pause = start(tmp_path, script), threading.Event()
    assert program.stdout is not None and program.stdout.readline() == "ready\n"
    while program.poll() is None:
        program.send_signal(name)
        pause.wait(0.002)
    status, text = end(program)
    assert status == 0 and "Traceback" not in text, text

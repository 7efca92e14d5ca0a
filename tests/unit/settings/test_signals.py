"""Signals before and after the event loop of a program handles them: nothing is printed, and the status is right."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

BOTH = [signal.SIGTERM, signal.SIGINT]


def run(script: str) -> subprocess.CompletedProcess[str]:
    head = "import asyncio, os, signal, sys, uvloop\nfrom psdist.settings import signals\n"
    return subprocess.run(
        [sys.executable, "-c", head + script], capture_output=True, text=True, check=False, timeout=100
    )


@pytest.mark.parametrize("number", BOTH)
def test_a_program_that_cleans_up_exits(number: signal.Signals) -> None:
    done = run(f"""
signals.exit_on([{number:d}])
try:
    signal.raise_signal({number:d})
finally:
    print("cleaned up")
""")
    assert (done.returncode, done.stdout, done.stderr) == (128 + number, "cleaned up\n", "")


@pytest.mark.parametrize("number", BOTH)
def test_a_service_that_starts_ends_at_once(number: signal.Signals) -> None:
    done = run(f"signals.end_on(signals.SERVICE_SIGNALS)\nsignal.raise_signal({number:d})\nprint('not reached')")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_signal_that_is_ignored_stays_so() -> None:
    done = run("""
signal.signal(signal.SIGHUP, signal.SIG_IGN)
signals.exit_on([signal.SIGHUP])
signals.end_on([signal.SIGHUP])
print(signal.getsignal(signal.SIGHUP).name)
""")
    assert (done.stdout, done.stderr) == ("SIG_IGN\n", "")


def test_a_service_whose_sigterm_is_ignored_ends_by_ctrl_c_only() -> None:
    """As under Slurm, which signals all processes of a job. Shells ignore SIGINT for commands in the background."""
    done = run("""
async def work():
    ended = asyncio.Event()
    signals.handle(ended.set)
    signal.raise_signal(signal.SIGTERM)
    await asyncio.sleep(0)
    assert not ended.is_set()
    signal.raise_signal(signal.SIGINT)
    await ended.wait()
    return 7

for number in signals.SERVICE_SIGNALS:
    signal.signal(number, signal.SIG_IGN)
signals.end_on(signals.SERVICE_SIGNALS)
sys.exit(uvloop.run(signals.ignored_after(work())))
""")
    assert (done.returncode, done.stdout, done.stderr) == (7, "", "")


@pytest.mark.parametrize("fails", [False, True])
def test_signals_after_a_services_work_change_nothing(fails: bool) -> None:
    done = run(f"""
async def work():
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    for number in signals.SERVICE_SIGNALS:
        loop.add_signal_handler(number, ended.set)
    signal.raise_signal(signal.SIGTERM)
    await ended.wait()
    if {fails}:
        raise ValueError
    return 7

try:
    status = uvloop.run(signals.ignored_after(work()))
except ValueError:
    status = 8
for number in signals.SERVICE_SIGNALS:
    signal.raise_signal(number)
sys.exit(status)
""")
    assert (done.returncode, done.stdout, done.stderr) == (7 + fails, "", "")

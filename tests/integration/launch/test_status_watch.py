"""``psdist status --watch`` on a terminal with a real scheduler: it shows the run, and restores the terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time

import pytest

from psdist.launcher.embedded import EmbeddedCluster

LIMIT_SECONDS = 120.0


def read_until(descriptor: int, found: bytearray, text: bytes) -> None:
    """Read from a terminal until ``text`` has appeared; fails after LIMIT_SECONDS, or when the other side is gone."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while text not in found:
        assert select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0], bytes(found[-2000:])
        found += os.read(descriptor, 65536)


@pytest.mark.parametrize(
    ("end", "status"),
    [
        pytest.param(signal.SIGTERM, 128 + signal.SIGTERM, id="SIGTERM"),
        pytest.param(b"\x03", 0, id="Ctrl-C", marks=pytest.mark.long),
    ],
)
def test_it_shows_a_run_and_restores_the_terminal(end: signal.Signals | bytes, status: int) -> None:
    cluster = EmbeddedCluster(servers=1, run_id="digits")
    outside, inside = pty.openpty()
    fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    before = termios.tcgetattr(inside)
    words = ["-m", "psdist", "status", "--watch", "--scheduler", cluster.address, "--timeout", "60"]
    environ = {**os.environ, "TERM": "xterm-256color", "PSDIST_TOKEN": cluster.token}
    child = subprocess.Popen([sys.executable, *words], stdin=inside, stdout=inside, stderr=inside, env=environ)
    try:
        shown = bytearray()
        read_until(outside, shown, b"\x1b[?1049h")
        read_until(outside, shown, b"digits: ")
        read_until(outside, shown, b"1 server live")
        if isinstance(end, bytes):
            os.write(outside, end)
        else:
            child.send_signal(end)
        read_until(outside, shown, b"\x1b[?1049l")
        assert child.wait(LIMIT_SECONDS) == status, bytes(shown[-2000:])
        assert termios.tcgetattr(inside) == before
    finally:
        child.kill()
        child.wait()
        os.close(outside)
        os.close(inside)
        cluster.close()

"""Freed message buffers stay with the process, unless the user says otherwise."""

from __future__ import annotations

import subprocess
import sys

import pytest

from psdist.wire import malloc_options

#: Frees blocks of 1 MiB that were touched, again and again, and tells how many pages had to be made.
CODE = """
import resource
from psdist.wire import malloc_options
done = malloc_options.keep_buffers()
def touch():
    blocks = [bytearray(b"x") * (1 << 20) for _ in range(8)]
touch()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    touch()
print(done, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(**environ: str) -> tuple[str, int]:
    """What a new process says: whether it was done, and page faults."""
    answer = subprocess.run([sys.executable, "-c", CODE], env=environ, capture_output=True, text=True, check=True)
    done, count = answer.stdout.split()
    return done, int(count)


@pytest.mark.skipif(sys.platform != "linux", reason="mallopt is glibc's")
def test_freed_buffers_are_kept_unless_the_user_says_otherwise() -> None:
    done, few = faults()
    untouched, many = faults(PSDIST_MALLOC="default")
    assert (done, untouched) == ("True", "False")
    assert few < 1000 < 10_000 < many


def test_a_system_without_it_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(malloc_options.ctypes, "CDLL", lambda name: object())
    assert malloc_options.keep_buffers() is False

"""Freed message buffers stay with the process, unless the user says otherwise."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest

from psdist import machine

#: Frees blocks of 1 MiB that were touched, again and again, and prints how many pages had to be made.
CODE = """
import resource
from psdist import machine
done = machine.keep_buffers()
def touch():
    blocks = [bytearray(b"x") * (1 << 20) for _ in range(8)]
touch()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    touch()
print(done, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


#: Prints the number of heaps.
COUNTED = """
import ctypes, re
libc = ctypes.CDLL(None)
libc.open_memstream.restype = ctypes.c_void_p
text, size = ctypes.c_char_p(), ctypes.c_size_t()
stream = ctypes.c_void_p(libc.open_memstream(ctypes.byref(text), ctypes.byref(size)))
libc.malloc_info(0, stream)
libc.fclose(stream)
print(len(re.findall(rb"<heap nr", text.value)))
"""

#: Allocates in eight threads concurrently.
HEAPS = """
import threading
from psdist import machine
machine.keep_buffers()
meeting = threading.Barrier(8)
def touch():
    meeting.wait()
    block = bytes(1 << 20)
    meeting.wait()
threads = [threading.Thread(target=touch) for _ in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""

#: Trains in a script without a launcher.
TRAINS = """
import numpy as np
import psdist
with psdist.init(transport="grpc") as context:
    weights = context.client.parameters("p", {"w": np.zeros(1 << 20, np.float32)}, psdist.optim.SGD(lr=1.0))
    for _ in range(3):
        weights.push_pull({"w": np.ones(1 << 20, np.float32)})
"""


#: Frees blocks of 2 MiB below one that stays, and prints how much of them is still resident.
RETURNED = """
import psutil
from psdist import machine
machine.keep_buffers()
print(machine.give_back_buffers())
resident = lambda: psutil.Process().memory_info().rss
blocks = [bytes(b"x" * (2 << 20)) for _ in range(32)]
before, blocks = resident(), blocks[-1:]
print((before - resident()) >> 20)
"""


def heaps(code: str = HEAPS, **environ: str) -> int:
    """Return the number of heaps of a new process that has run ``code``."""
    command = [sys.executable, "-c", code + COUNTED]
    return int(subprocess.run(command, env=environ, capture_output=True, check=True).stdout)


def faults(**environ: str) -> tuple[str, int]:
    """Run a new process. Return whether the settings were applied, and its page faults."""
    answer = subprocess.run([sys.executable, "-c", CODE], env=environ, capture_output=True, text=True, check=True)
    done, count = answer.stdout.split()
    return done, int(count)


@pytest.mark.skipif(sys.platform != "linux", reason="mallopt is glibc's")
def test_freed_buffers_are_kept_unless_the_user_says_otherwise() -> None:
    done, few = faults()
    untouched, many = faults(PSDIST_MALLOC="default")
    assert (done, untouched) == ("True", "False")
    assert few < 1000 < 10_000 < many


@pytest.mark.skipif(sys.platform != "linux", reason="mallopt is glibc's")
def test_threads_share_one_heap_unless_the_user_says_otherwise() -> None:
    """Check the number of heaps: each would keep free buffers of its own."""
    assert heaps() == machine.HEAPS
    assert heaps(MALLOC_ARENA_MAX="5") == 5
    assert heaps(PSDIST_MALLOC="default") > 5


@pytest.mark.skipif(sys.platform != "linux", reason="mallopt is glibc's")
def test_a_script_has_one_heap_whatever_threads_its_client_starts() -> None:
    """Check that there is one. The heaps of the first threads of gRPC grew by 6 to 12 MB together, in minutes."""
    assert heaps(TRAINS, **os.environ) == machine.HEAPS


@pytest.mark.skipif(sys.platform != "linux", reason="mallopt is glibc's")
def test_freed_blocks_go_back_where_that_is_wanted() -> None:
    answer = subprocess.run([sys.executable, "-c", RETURNED], env={}, capture_output=True, text=True, check=True)
    done, freed = answer.stdout.split()
    assert done == "True" and int(freed) >= 60


def test_a_system_without_it_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    assert machine.keep_buffers() is False
    assert machine.give_back_buffers() is False

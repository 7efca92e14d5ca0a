"""SIGTERM in a worker's script: nothing is raised in the middle of an operation, and the script ends after an agreed
step.

Scripts have a loop thread and a client outside any run. Each runs in its own process, because the signal, its handler
and the thread belong to the process. Later tests drive the handler alone, on virtual time.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import pytest

from psdist import errors
from psdist.client.session import script as script_side
from psdist.client.session.script import EXIT_STATUS, SigtermHandler
from tests.simulation.loop import SimLoop

HEAD = """
import asyncio, os, signal, sys, threading
import psdist.client.session.script as module
from psdist.client.session import loop
from psdist.client.session.script import sigterm
from psdist.errors import ClosedError

class Client:
    def __init__(self):
        self.asked, self.may_leave = threading.Event(), asyncio.Event()
    async def request_stop(self):
        self.asked.set()
        await self.may_leave.wait()
    async def close(self, reason="closed"):
        loop.release(self)
        print("leaves:", reason, flush=True)

async def open_client():
    client = Client()
    loop.claim(client)
    return client

async def answer():
    return "answered"

async def looked():
    return sigterm.read_signals()

began = threading.Event()
async def ever():
    began.set()
    await asyncio.Event().wait()

def let_leave():
    client.asked.wait()
    thread.loop.call_soon_threadsafe(client.may_leave.set)

def term():
    signal.raise_signal(signal.SIGTERM)  # To this very thread.

thread = loop.shared()
client = thread.call(open_client())
"""
INSTALL = "thread.end_on_sigterm()\n"


def run(script: str, head: str = HEAD + INSTALL) -> tuple[int, list[str], str]:
    """Return status, lines and errors of a script."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", head + script],
        env=os.environ, capture_output=True, text=True, check=False, timeout=100,
    )  # fmt: skip
    return done.returncode, done.stdout.splitlines(), done.stderr


def test_a_signal_while_the_interpreter_exits_is_ignored_until_the_clients_are_closed() -> None:
    """An exception in a callback of atexit would be printed as ignored, with its traceback."""
    close = """
handled = threading.Event()
handle = module.SigtermHandler.on_signal
def on_signal(self, *arguments):
    try:
        handle(self, *arguments)
    finally:
        thread.loop.call_soon_threadsafe(handled.set)
async def close(self, reason="closed"):
    loop.release(self)
    while not handled.is_set():  # A signal that arrives just before a wait does not end it.
        signal.pthread_kill(threading.main_thread().ident, signal.SIGTERM)
        await asyncio.sleep(0.01)
    print("leaves:", reason, flush=True)
module.SigtermHandler.on_signal, Client.close = on_signal, close
"""
    status, lines, error = run("", HEAD + close + INSTALL)
    assert (status, lines, error) == (0, ["leaves: closed"], "")
    late = "import atexit, os, signal\natexit.register(lambda: os.kill(os.getpid(), signal.SIGTERM))\n"
    status, lines, error = run("", late + HEAD + INSTALL)
    assert (status, lines, error) == (-signal.SIGTERM, ["leaves: closed"], "")


def test_a_script_that_has_ended_is_ended_by_the_signals_default() -> None:
    """Python would print an exception in a callback at exit, or while it waits for threads, and continue."""
    for ends in ["", "thread.call(client.close(), ending=True)\n"]:
        for place in ["callback", "thread"]:
            callback = """
import atexit
def finish():
    term()
    term()
    print("not reached")
atexit.register(finish)
"""
            waiting = """
def work():
    main = threading.main_thread()
    main.join()
    while True:  # A signal that arrives just before a wait does not end it.
        signal.pthread_kill(main.ident, signal.SIGTERM)
        threading.Event().wait(0.01)
threading.Thread(target=work).start()
"""
            status, lines, error = run(ends + {"callback": callback, "thread": waiting}[place])
            assert (status, lines, error) == (-signal.SIGTERM, ["leaves: closed"] * bool(ends), "")


@dataclass(frozen=True)
class Script:
    """Script that receives SIGTERM, with the exit status and output that it must have."""

    status: int
    lines: list[str]
    text: str
    head: str = HEAD + INSTALL


SCRIPTS = {
    "ctrl c while the interpreter exits does not keep clients from leaving": Script(
        0,
        ["leaves: closed", "default_int_handler"],
        "",
        "import atexit, signal\natexit.register(lambda: print(signal.getsignal(signal.SIGINT).__name__))\n"
        + HEAD
        + """
async def close(self, reason="closed"):
    loop.release(self)
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
    await asyncio.sleep(0.05)
    print("leaves:", reason, flush=True)
Client.close = close
"""
        + INSTALL,
    ),
    "nothing is raised before the end is agreed on": Script(
        EXIT_STATUS,
        ["asked True leaving False", "answered", "leaves: stopped"],
        """
term()
print("asked", sigterm.asked, "leaving", sigterm.leaving)
print(thread.call(answer()))
let_leave()
thread.call(ever())
print("not reached")
""",
    ),
    "calls under way are given up": Script(
        EXIT_STATUS,
        ["this worker is being stopped: no more calls are possible", "ends", "leaves: stopped"],
        """
def other():
    try:
        thread.call(ever())
    except ClosedError as error:
        print(error)
        ended.set()

ended = threading.Event()
threading.Thread(target=other).start()
began.wait()
began.clear()

def stop():
    began.wait()
    os.kill(os.getpid(), signal.SIGTERM)
    let_leave()

threading.Thread(target=stop).start()
try:
    thread.call(ever())
finally:
    ended.wait()
    print("ends")
""",
    ),
    "a finalizer does not swallow it": Script(
        EXIT_STATUS,
        ["the finalizer continues", "leaves: stopped"],
        """
class Finalized:
    def __del__(self):
        term()
        print("the finalizer continues")

Finalized()
let_leave()
thread.call(ever())
print("not reached")
""",
    ),
    "a script that makes no call is ended by the next signal": Script(
        EXIT_STATUS,
        ["continues", "leaves: stopped"],
        """
module.AGAIN_SECONDS = 0.05
term()
print("continues")
let_leave()
while True:
    signal.pause()
""",
    ),
    # Check that the script may take its time afterwards, for example to save its results.
    "an end that was raised by a call is not raised again": Script(
        EXIT_STATUS,
        ["has saved", "leaves: stopped"],
        """
module.AGAIN_SECONDS = 0.01
term()
let_leave()
try:
    thread.call(ever())
finally:
    # Ten times as long, by the clock of the loop that would send it.
    print(thread.call(asyncio.sleep(0.1, "has saved"), reading=True))
""",
    ),
    "a second signal ends the script immediately": Script(
        EXIT_STATUS,
        ["raised", "leaves: stopped"],
        """
module.TOGETHER_SECONDS = 0
term()
try:
    term()
except SystemExit:
    print("raised")
    raise
""",
    ),
    "without an open client there is nothing to agree on": Script(
        EXIT_STATUS,
        ["leaves: closed"],
        """
thread.call(client.close(), ending=True)
term()
print("not reached")
""",
    ),
    # Check a main thread that waits in C, which no signal interrupts, until the shutdown is agreed.
    "the loop knows of a signal that the interpreter has not come to": Script(
        EXIT_STATUS,
        ["agreed while 0", "1", "leaves: stopped"],
        """
import ctypes
c = ctypes.CDLL(None)
mutex, condition = ctypes.create_string_buffer(128), ctypes.create_string_buffer(128)

def stop():
    c.pthread_mutex_lock(mutex)  # Free when the main thread waits.
    c.pthread_mutex_unlock(mutex)
    os.kill(os.getpid(), signal.SIGTERM)
    client.asked.wait()
    print("agreed while", sigterm._signals)
    c.pthread_cond_signal(condition)

c.pthread_mutex_lock(mutex)
threading.Thread(target=stop).start()
c.pthread_cond_wait(condition, mutex)
print(sigterm._signals)
let_leave()
thread.call(ever())
""",
    ),
    "a handler that the script installs later has the say": Script(
        0,
        ["own", "False False", "leaves: closed"],
        """
signal.signal(signal.SIGTERM, lambda *arguments: print("own"))
term()
print(thread.call(looked()), sigterm.asked)
""",
    ),
    "a forked process ends by its signals and the worker does not": Script(
        0,
        ["-15", "False False", "leaves: closed"],
        """
import warnings
warnings.simplefilter("ignore")  # Newer Pythons warn of forks in programs with threads.
child = os.fork()
if not child:
    threading.Event().wait()
os.kill(child, signal.SIGTERM)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(thread.call(looked()), sigterm.asked)
""",
    ),
    "a script that continues may only read": Script(
        0,
        ["raised", "raised", "answered", "raised", "leaves: stopped"],
        """
term()
let_leave()
for _ in range(2):
    try:
        thread.call(ever())
    except SystemExit:
        print("raised")
print(thread.call(answer(), reading=True))
try:
    thread.call(answer())
except SystemExit:
    print("raised")
""",
    ),
    "calls that the end needs are not given up": Script(
        0,
        ["finished", "leaves: stopped"],
        """
async def finish():
    client.may_leave.set()
    while not sigterm.leaving:
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    return "finished"

term()
print(thread.call(finish(), ending=True))
""",
    ),
    "a handler of the scripts own is left alone": Script(
        0,
        ["mine", "False answered", "leaves: closed"],
        "term()\nprint(sigterm.asked, thread.call(answer()))",
        HEAD + "signal.signal(signal.SIGTERM, lambda *_: print('mine'))\n" + INSTALL,
    ),
    "another thread installs nothing": Script(
        0,
        ["True", "leaves: closed"],
        "print(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)",
        HEAD + "t = threading.Thread(target=thread.end_on_sigterm)\nt.start()\nt.join()\n",
    ),
    "a script that reads signals continues to read them": Script(
        EXIT_STATUS,
        ["True", "leaves: stopped"],
        """
term()
print(os.read(read, 10) == bytes([signal.SIGTERM]))
let_leave()
thread.call(ever())
""",
        HEAD
        + """
read, write = os.pipe()
os.set_blocking(write, False)
signal.set_wakeup_fd(write)
"""
        + INSTALL,
    ),
    "one caller is distinguished from several": Script(
        0,
        ["True", "False", "leaves: closed"],
        """
print(thread.has_one_caller)
t = threading.Thread(target=lambda: thread.call(answer()))
t.start()
t.join()
print(thread.has_one_caller)
""",
    ),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script(name: str) -> None:
    script = SCRIPTS[name]
    status, lines, error = run(script.text, script.head)
    assert (status, lines, error) == (script.status, script.lines, "")


# --- the handler alone ------------------------------------------------------------------------------------------------


async def pass_time(seconds: float) -> None:
    """Let ``seconds`` pass on the running loop, which is simulated."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SimLoop)
    await loop.after(seconds)


class Client:
    """Client that may leave after some seconds, or whose shutdown fails."""

    def __init__(self, seconds: float, error: Exception | None = None) -> None:
        self.seconds = seconds
        self.error = error

    async def request_stop(self) -> None:
        await pass_time(self.seconds)
        if self.error is not None:
            raise self.error

    def watch_signals(self, look: Any) -> None:
        raise AssertionError


class Clock:
    """Handler of some clients on a loop of virtual time, with the times of cancelled calls and repeated signals."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *clients: Client) -> None:
        self.loop = SimLoop(random.Random(0))
        self.handler = SigtermHandler()
        self.handler.attach(self.loop, lambda: clients, lambda: self.given_up.append(self.loop.time() - self.begin))
        self.given_up: list[float] = []
        self.again: list[float] = []
        self.begin = self.loop.time()
        monkeypatch.setattr(script_side.signal, "pthread_kill", self._kill)

    def _kill(self, thread: int, number: int) -> None:
        assert number == signal.SIGTERM
        self.again.append(self.loop.time() - self.begin)

    def run(self, seconds: float, then: Any = None) -> None:
        """Receive SIGTERM while the script makes no call for ``seconds``; then run ``then``."""

        async def script() -> None:
            self.handler.on_signal(signal.SIGTERM, None)
            await pass_time(seconds)
            if then is not None:
                then()

        self.loop.run(script(), 1000)


def test_all_clients_may_leave_before_calls_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, Client(1), Client(4), Client(2, errors.ClosedError("broken")))
    clock.run(3)
    assert not clock.handler.leaving and not clock.given_up
    clock = Clock(monkeypatch, Client(1), Client(4), Client(2, errors.ClosedError("broken")))
    clock.run(5)
    assert clock.handler.leaving and clock.given_up == [4] and not clock.again


def test_the_signal_comes_again_as_long_as_the_script_makes_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, Client(2))
    clock.run(35)
    assert clock.again == [12, 22, 32]
    later = script_side.time.monotonic() + 35
    monkeypatch.setattr(script_side.time, "monotonic", lambda: later)
    with pytest.raises(SystemExit) as raised:
        clock.handler.on_signal(signal.SIGTERM, None)
    assert raised.value.code == EXIT_STATUS == 143


def test_signals_that_come_together_are_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when an engine signals the launcher and its workers, and the launcher passes the signal on."""
    clock, now = Clock(monkeypatch, Client(2)), 7.0
    monkeypatch.setattr(script_side.time, "monotonic", lambda: now)
    clock.run(1, lambda: clock.handler.on_signal(signal.SIGTERM, None))
    now += script_side.TOGETHER_SECONDS - 0.01
    clock.handler.on_signal(signal.SIGTERM, None)
    assert not clock.handler.raised
    now += 0.02
    with pytest.raises(SystemExit):
        clock.handler.on_signal(signal.SIGTERM, None)


def test_a_script_that_was_told_is_not_sent_the_signal_again(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, Client(2))

    def call() -> None:
        with pytest.raises(SystemExit):
            clock.handler.check()

    clock.run(15, call)
    assert clock.again == [12]

    clock.loop.run(pass_time(60), 1000)
    assert clock.again == [12]


def test_calls_are_refused_once_this_worker_may_leave() -> None:
    handler = SigtermHandler()
    handler.asked = True
    handler.check()
    handler.leaving = True
    for reading in (True, False):  # The script must learn of it before it reads more data.
        with pytest.raises(SystemExit):
            handler.check(reading=reading)
        handler.raised = False
    handler.raised = True
    handler.check(reading=True)
    with pytest.raises(SystemExit):
        handler.check()


def test_why_a_worker_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    handler = SigtermHandler()
    monkeypatch.delattr(sys, "last_value", raising=False)
    assert handler.reason() == "closed"
    assert handler.reason(ValueError()) == "failed"
    assert handler.reason(SystemExit()) == handler.reason(SystemExit(0)) == "closed"
    assert handler.reason(SystemExit(1)) == handler.reason(SystemExit("no data")) == "failed"
    monkeypatch.setattr(sys, "last_value", ValueError(), raising=False)
    assert handler.reason() == "failed"
    handler.asked = True
    assert handler.reason(SystemExit(143)) == "stopped"

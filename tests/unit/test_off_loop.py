"""Work in a thread, including at interpreter shutdown."""

from __future__ import annotations

import subprocess
import sys

#: The loop gets work while the interpreter waits for the threads of executors, and after that.
SCRIPT = """
import asyncio
import atexit
import concurrent.futures.thread
import threading
import time

from psdist.off_loop import in_thread


def ask(when):
    print(when, asyncio.run_coroutine_threadsafe(in_thread(lambda: threading.current_thread().name), loop).result())


def ask_at_the_end():
    while not concurrent.futures.thread._shutdown:  # Nothing tells when it becomes so.
        time.sleep(0.01)
    ask("ending:")


loop = asyncio.new_event_loop()
threading.Thread(target=loop.run_forever, name="loop", daemon=True).start()
ask("running:")
atexit.register(ask, "ended:")
concurrent.futures.ThreadPoolExecutor().submit(ask_at_the_end)
"""


def test_work_is_done_while_the_interpreter_ends() -> None:
    """The loop does it if no executor accepts it."""
    script = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120)
    assert script.stdout.splitlines() == ["running: asyncio_0", "ending: loop", "ended: loop"], script.stderr

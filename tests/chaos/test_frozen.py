"""Each example, in each of its modes, with a worker that is frozen past its lease and then thaws: the run ends, or
reports the reason by a typed error. No process waits forever.

``SEED`` in the environment selects the worker, and the push at which it is frozen.
"""

from __future__ import annotations

import os
import random
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.launched import Run

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SEED = int(os.environ.get("SEED", "0"))
#: Each worker of every run makes at least this many pushes before the frozen one ends.
PUSHES = 40
#: Promised time limit, in seconds.
END_SECONDS = 60.0

#: Runs an example that stops its own process once, at the requested place.
_SCRIPT = """
import os, runpy, signal, sys
from psdist.client import async_client, sync_client
from psdist.client.transport.shm import ShmConnection

rank, place, number, example, *arguments = sys.argv[1:]
pushes, stopped = 0, os.environ["RANK"] != rank

def stop(now):
    global stopped
    if now and not stopped:
        stopped = True
        print("rank", rank, "stops", place, "after", pushes, "pushes, as", os.getpid(), flush=True)
        signal.raise_signal(signal.SIGSTOP)  # To this very thread: one to the process would let it run on a little.

def push_pull(parameters, *arguments, **settings):
    global pushes
    stop(place == "between" and pushes == int(number))
    pushes += 1
    return pushed(parameters, *arguments, **settings)

def send(connection, message):
    sent(connection, message)
    stop(place == "within" and pushes == int(number))

async def close(client, *arguments):
    stop(place == "leaving")
    await closed(client, *arguments)

pushed, sync_client.Parameters.push_pull = sync_client.Parameters.push_pull, push_pull
sent, ShmConnection.send = ShmConnection.send, send
closed, async_client.AsyncClient.close = async_client.AsyncClient.close, close
sys.path.insert(0, os.path.dirname(example))
sys.argv = [example, *arguments]
runpy.run_path(example, run_name="__main__")
"""


@pytest.fixture
def runs() -> Iterator[list[Run]]:
    made: list[Run] = []
    yield made
    for run in made:
        run.stop()


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("place", ["between", "within", "leaving"])
@pytest.mark.parametrize(
    "words",
    [
        ("quickstart.py",),
        ("elastic.py", "--epochs", "4"),
        ("digits.py", "--epochs", "3", "--consistency", "bsp"),
        ("digits.py", "--epochs", "3", "--consistency", "ssp"),
        ("digits.py", "--epochs", "3", "--consistency", "asp"),
    ],
    ids=lambda words: "-".join((words[0].removesuffix(".py"), *words[4:])),
)
def test_a_run_with_a_frozen_worker_ends(tmp_path: Path, runs: list[Run], words: tuple[str, ...], place: str) -> None:
    seed = f"{words} {place} {SEED}"
    print("seed", seed)
    rng = random.Random(seed)
    rank, number = rng.randrange(2), rng.randrange(5, PUSHES)
    example, *arguments = words
    script = (str(rank), place, str(number), str(EXAMPLES / example), *arguments)
    run = Run(tmp_path, _SCRIPT, *script, flags=("--worker-timeout", "1"))
    runs.append(run)
    frozen = int(run.until(rf"rank {rank} stops {place} after \d+ pushes, as (\d+)")[1])
    run.until(rf"worker-{rank} .*is lost")
    os.kill(frozen, signal.SIGCONT)
    status, text = run.end(END_SECONDS)
    everything = "".join(run.seen) + text
    print(everything)
    assert status != -signal.SIGKILL, f"a hang, {END_SECONDS:g} s after the worker resumed:\n{everything}"
    if status:
        assert re.search(r"psdist\.errors\.\w+Error", everything), everything
    else:
        assert "Traceback" not in everything, everything

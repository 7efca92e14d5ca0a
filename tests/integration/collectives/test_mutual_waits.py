"""Two workers that make two calls in opposite orders, for every pair of kinds of calls: those that can never end raise
MutualWaitError at both workers, and the others end."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys

import pytest

#: Calls that wait for the other worker to make them, and calls that end by themselves.
WAITING = ("step", "barrier", "collective", "message", "new_group")
ENDING = ("dataset", "snapshot")
#: Workers that make another group twice make the same calls in any order.
SAME = ("new_group", "new_group")

_SCRIPT = """
import itertools
import sys
import time
from pathlib import Path

import numpy as np

import psdist

KINDS, folder = sys.argv[1].split(","), Path(sys.argv[2])
context = psdist.init()
client, rank = context.client, context.rank
values = np.ones(4, np.float32)


def meet(name):
    '''Wait by other means than psdist until both workers are here.'''
    (folder / f"{name}.{rank}").touch()
    while not (folder / f"{name}.{1 - rank}").exists():
        time.sleep(0.01)


def step(name):
    parameters = client.parameters(name, {"a": values}, psdist.optim.SGD(1.0))
    parameters.push_pull({"a": values})
    return lambda: parameters.push_pull({"a": values})


def collective(name):
    group = context.new_group()
    group.barrier()
    return lambda: group.all_reduce(values, timeout=600)


def message(name):
    group = context.new_group()
    group.barrier()
    if rank == 0:
        return lambda: group.send(values, 1, async_op=True).wait()
    return lambda: group.recv(values.copy(), 0)


def dataset(name):
    ranges = iter(client.dataset(name, size=100, range_size=10))
    return lambda: next(ranges)


PREPARE = {
    "step": step,
    "barrier": lambda name: lambda: client.barrier(name),
    "collective": collective,
    "message": message,
    "new_group": lambda name: lambda: context.new_group().barrier(),
    "dataset": dataset,
    "snapshot": lambda name: client.snapshot,
}

for pair in itertools.combinations_with_replacement(KINDS, 2):
    name = "-".join(pair)
    made = [PREPARE[kind](f"{name}-{number}") for number, kind in enumerate(pair)]
    order = (0, 1) if rank == 0 else (1, 0)
    meet(f"begin-{name}")
    began, groups, outcome = time.monotonic(), 0, "ok"
    for number in order:
        try:
            groups += pair[number] == "new_group"
            made[number]()
        except psdist.PsdistError as error:
            outcome = f"{type(error).__name__} {error}"
            break
    print(f"PAIR {name} rank {rank} {time.monotonic() - began:.1f} s: {outcome}", flush=True)
    for number in order[1:]:
        if outcome != "ok" and pair[number] in ("collective", "message"):
            # A worker that catches its error and continues must not release the other one.
            try:
                made[number]()
                print(f"RELEASED {name} by rank {rank}", flush=True)
            except psdist.PsdistError:
                pass
    meet(f"end-{name}")
    for _ in range(pair.count("new_group") - groups):
        context.new_group()
    for number in (0, 1):
        if outcome != "ok" and pair[number] == "step":
            made[number]()  # Continues the push that failed, and makes it where it was not made.
print("done", flush=True)
"""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[float, str]]]:
    """Seconds and outcome of each worker, by pair."""
    path = tmp_path_factory.mktemp("waits")
    (path / "script.py").write_text(_SCRIPT)
    command = [sys.executable, "-m", "psdist", "run", "--nproc-per-node", "2", "--storage-path", str(path / "storage")]
    arguments = [str(path / "script.py"), ",".join((*WAITING, *ENDING)), str(path)]
    ended = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=550, check=False)
    output = ended.stdout + ended.stderr
    assert ended.returncode == 0 and output.count("done") >= 2, output
    assert "RELEASED" not in output, output
    found: dict[str, list[tuple[float, str]]] = {}
    for name, seconds, outcome in re.findall(r"PAIR (\S+) rank \d ([\d.]+) s: (.*)", output):
        found.setdefault(name, []).append((float(seconds), outcome))
    return found


def test_a_pair_of_waits(outcomes: dict[str, list[tuple[float, str]]]) -> None:
    for pair in list(itertools.combinations_with_replacement((*WAITING, *ENDING), 2)):
        found = outcomes["-".join(pair)]
        assert len(found) == 2
        if pair == SAME or set(pair) & set(ENDING):
            assert [outcome for _, outcome in found] == ["ok", "ok"]
        for seconds, outcome in found:
            assert seconds < 10
            if outcome != "ok":
                assert "worker-0" in outcome and outcome.startswith("MutualWaitError") and ", which waits " in outcome
        assert {"ok"} != {outcome for _, outcome in found} or pair == SAME or set(pair) & set(ENDING)

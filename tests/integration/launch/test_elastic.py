"""Servers and workers that join and leave during training: ``psdist scale``, ``psdist drain``, agents that join,
workers that are asked to leave, an elastic run below its minimum, and runs that cannot continue.

Each push adds one to every weight, so the weights show how often pushes were counted.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import grpc
import pytest

from psdist.monitoring.run_json import status_json
from psdist.v1 import scheduler_pb2, scheduler_pb2_grpc
from psdist.wire import auth
from tests.support.launched import Run
from tests.support.programs import Programs, until

#: Script that trains until the file "stop" exists. All workers learn of it by the weights, so that in BSP all stop at
#: the same step. A step takes a while, as with a model: the other processes need the processors, too.
_TRAIN = """
import atexit, os, sys, time
import numpy as np
import psdist

mode, count = sys.argv[1], 300_000
context = psdist.init()
weights = context.client.parameters(
    "model", {"stop": np.zeros(1, np.float32), "w": np.zeros(count, np.float32)}, psdist.optim.SGD(lr=1.0),
    {"bsp": psdist.BSP(), "ssp": psdist.SSP(4), "asp": psdist.ASP()}[mode], slice_elements=1 << 13)
began, rank = weights.step, context.rank
atexit.register(lambda: print("rank", rank, "pushed", weights.step - began, flush=True))
print("rank", rank, "begins", flush=True)
gradient = {"stop": np.zeros(1, np.float32), "w": np.full(count, -1.0, np.float32)}
values = weights.pull()
while not values["stop"][0]:
    gradient["stop"][0] = -float(os.path.exists("stop"))
    time.sleep(0.01)
    values = weights.push_pull(gradient)
    if mode == "bsp":
        assert (values["w"] == weights.version).all(), (weights.version, np.unique(values["w"]))
    if weights.step % 10 == 0:
        print("rank", rank, "made step", weights.step, flush=True)
context.client.barrier("done")
print("rank", rank, "sees", np.unique(weights.pull()["w"]), flush=True)
"""
_COPIES = ("--nservers", "2", "--replicas", "2")


class Stage(Programs):
    """A run in a directory, and the commands that are run there."""

    def __init__(self, path: Path, script: str) -> None:
        super().__init__(path, script)
        self.launcher: Run | None = None

    def launch(self, mode: str, *flags: str) -> Run:
        """Start ``psdist run`` with two workers."""
        self.launcher = Run(self.path, _TRAIN, mode, flags=flags)
        return self.launcher

    def psdist(self, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        argv = [sys.executable, "-m", "psdist.cli.main", *arguments]
        return subprocess.run(
            argv, env=self.environ | environ, cwd=self.path, capture_output=True, text=True, timeout=240
        )

    def until(self, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Poll the status until ``holds`` accepts it; the scheduler may be away meanwhile.

        The status is read here ten times a second, not by commands: those would take processor time from the run.
        """
        deadline = time.monotonic() + 200
        process = self.started[0] if self.launcher is None else self.launcher.process
        while True:
            shown = self._status()
            if shown and holds(shown):
                return shown
            assert time.monotonic() < deadline, shown
            with contextlib.suppress(subprocess.TimeoutExpired):
                raise AssertionError(f"ended with {process.wait(0.1)}")

    def _status(self) -> dict[str, Any]:
        """Return the status as ``psdist status`` shows it, or an empty dict if the scheduler does not answer."""
        if self.launcher is None:
            address, token = (self.path / "scheduler").read_text().strip(), "secret"
        else:
            note = json.loads(next(self.path.glob("psdist/runs/*.json")).read_text())
            address, token = note["address"], Path(note["token_file"]).read_text().strip()
        with grpc.insecure_channel(address) as channel:
            stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
            try:
                answer = stub.GetStatus(scheduler_pb2.GetStatusRequest(), metadata=auth.metadata(token), timeout=60)
            except grpc.RpcError:
                return {}
        return status_json(answer)

    def services(self) -> dict[str, str]:
        """Start a scheduler and a server. Returns the environment of agents."""
        here = ("--run-id", "elastic", "--log-level", "warning")
        self.start("psdist-scheduler", "--address-file", "scheduler", *here, PSDIST_TOKEN="secret")
        self.start("psdist-server", "--scheduler-file", "scheduler", *here, PSDIST_TOKEN="secret")
        return {"PSDIST_TOKEN": "secret", "PSDIST_SCHEDULER_FILE": str(self.path / "scheduler")}

    def finish(self) -> tuple[int, str]:
        """Let the training end. Returns the run's exit status and everything that it printed."""
        (self.path / "stop").touch()
        assert self.launcher is not None
        status, text = self.launcher.end()
        return status, "".join(self.launcher.seen) + text


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with closing(Stage(tmp_path, _TRAIN)) as built:
        yield built
        if built.launcher is not None:
            built.launcher.stop()


def copies(status: dict[str, Any]) -> dict[str, int]:
    """Number of complete copies, by server."""
    held: dict[str, int] = {}
    for one in status["parameters"]:
        for shard in one["shards"]:
            for server in (shard["primary"], *shard["backups"]):
                held[server] = held.get(server, 0) + 1
    return held


def settled(status: dict[str, Any], *servers: str) -> bool:
    """True if exactly these servers hold all shards, each shard twice, and nothing is moving."""
    shards = [shard for one in status["parameters"] for shard in one["shards"]]
    whole = all(len(shard["backups"]) == 1 and not shard["filling"] for shard in shards)
    return whole and sorted(copies(status)) == sorted(servers)


# --- servers ----------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_servers_come_and_go_while_training_runs(stage: Stage) -> None:
    run = stage.launch("bsp", *_COPIES)
    run.until("made step 10$")
    scaled = stage.psdist("scale", "servers", "3")
    # Its output depends on whether the launcher listens yet, which it does from its third second on.
    assert scaled.returncode == 0, scaled
    stage.until(lambda status: settled(status, "server-0", "server-1", "server-2"))
    drained = stage.psdist("drain", "server-0")
    assert drained.returncode == 0 and "server-0 holds nothing and may be stopped" in drained.stdout, drained
    stage.until(lambda status: settled(status, "server-1", "server-2", "server-3"))
    fewer = stage.psdist("scale", "servers", "2", "--format", "json")
    assert json.loads(fewer.stdout)["drained"] == ["server-3"], fewer
    status = stage.until(lambda status: settled(status, "server-1", "server-2"))
    assert status["servers_wanted"] == 2 and status["replicas"] == 2
    run.until("server 3 holds nothing")
    run.until("made step")
    code, text = stage.finish()
    assert code == 0 and "Traceback" not in text, text
    for words in ("server 2 is started", "server 0 holds nothing", "server 3 is started", "server 3 holds nothing"):
        assert words in text, text


# --- workers ----------------------------------------------------------------------------------------------------------


def live_ranks(status: dict[str, Any]) -> list[int]:
    return sorted(m["rank"] for m in status["members"] if m["state"] == "live" and m["role"] == "worker")


@pytest.mark.parametrize("mode", ["bsp", pytest.param("asp", marks=pytest.mark.long)])
def test_the_launcher_starts_and_stops_workers(stage: Stage, mode: str) -> None:
    run = stage.launch(mode, *_COPIES)
    run.until("made step 10$")
    scaled = stage.psdist("scale", "workers", "4")
    assert scaled.returncode == 0 and "workers: 2 in the run, 4 wanted of its launcher" in scaled.stdout, scaled
    run.until("psdist: worker 3 is started: 4 workers are wanted")
    run.until("rank 3 made step")
    fewer = json.loads(stage.psdist("scale", "workers", "1", "--format", "json").stdout)
    assert (fewer["workers_before"], fewer["workers_wanted"], fewer["launchers"]) == (4, 1, 1)
    stage.until(lambda status: live_ranks(status) == [0])
    run.until("rank 0 made step", 2)
    more = stage.psdist("scale", "workers", "2")
    assert more.returncode == 0, more
    # No rank is assigned twice, and some were reserved for workers that might have been started: ranks 2 to 5 for four,
    # 6 for one.
    run.until("rank 7 made step")
    code, text = stage.finish()
    assert code == 0 and "Traceback" not in text and "failed" not in text, text
    assert sorted(re.findall(r"worker ([1-3]) is (started|stopped)", text)) == [
        ("1", "stopped"), ("2", "started"), ("2", "stopped"), ("3", "started"), ("3", "stopped"),
    ]  # fmt: skip
    if mode == "asp":
        total = sum(int(count) for count in re.findall(r"rank \d pushed (\d+)", text))
        assert re.findall(r"sees \[(\d+)\.\]", text) == [str(total)] * 2, text


def test_one_death_does_not_end_the_others_of_an_elastic_agent(stage: Stage) -> None:
    environ = stage.services()
    flags = ("--nnodes", "1:4", "--max-restarts", "0", "--nproc-per-node", "3")
    agent = stage.start("psdist-worker", *flags, *_FILE, "train.py", "bsp", **environ)
    until(agent, "made step 10$")
    status = stage.until(lambda status: sum(member["role"] == "worker" for member in status["members"]) == 3)
    (victim,) = [member["pid"] for member in status["members"] if member["rank"] == 1]
    os.kill(victim, signal.SIGKILL)
    failed = until(agent, "psdist: worker 1 failed: (.*)")[1]
    assert failed == "killed by SIGKILL; the run is elastic, so others continue: worker 0, worker 2"
    version = status["parameters"][0]["version_max"] or 0  # None until a server has reported one.
    stage.until(lambda status: (status["parameters"][0]["version_max"] or 0) > version + 20)
    (stage.path / "stop").touch()
    assert agent.stdout is not None
    text = agent.stdout.read()
    assert agent.wait(240) == 0, text
    assert re.findall(r"rank (\d) sees", text) in (["0", "2"], ["2", "0"])


_FILE = ("--scheduler-file", "scheduler")

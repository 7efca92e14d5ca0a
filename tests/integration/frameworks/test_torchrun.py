"""The backend ``psdist`` without a launcher of psdist: torchrun, and processes of torch.multiprocessing."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore  # missing in torch's stubs

from psdist.client.session.membership import ClusterView
from psdist.errors import ConfigurationError, InvalidArgumentError, WaitTimeoutError, WorkerLostError
from psdist.process_group import own_run
from tests.support.tree import ROOT

_HEAD = """
import os
import re
import signal
import threading

import torch
import torch.distributed as dist

import psdist
import psdist.torch_backend

psdist.torch_backend.register()  # As torch does for an installed package.


def say(*words):
    os.write(1, f"{' '.join(map(str, words))}\\n".encode())  # Two processes write, and none within a line of the other.


def start(**place):
    dist.init_process_group("psdist", **place)
    total = torch.ones(3)
    dist.all_reduce(total)
    assert total.tolist() == [dist.get_world_size()] * 3
"""
_TORCHRUN = """
start()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
model(torch.ones(2, 4)).sum().backward()
assert psdist.init().rank == dist.get_rank()  # The same run.
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
if os.environ.get("KILLED") == str(dist.get_rank()) and attempt == "0":
    os.kill(os.getpid(), signal.SIGKILL)
dist.barrier()
say("done", dist.get_rank(), attempt)
"""
#: Scripts without the backend psdist. Rank 0 has less to do after the common steps, and leaves first.
_TRAINED = """
import psdist.torch


def train(rank):
    for kind in ("optimizer", "ddp"):
        with psdist.init() as context:
            torch.manual_seed(0)
            model = torch.nn.Linear(2, 1)
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            if kind == "optimizer":
                optimizer = psdist.torch.DistributedOptimizer(model, optimizer)
            else:
                model = psdist.torch.DistributedDataParallel(model)
            start = {"w": torch.zeros(2).numpy()}
            handle = context.client.parameters("own", start, psdist.optim.SGD(), psdist.ASP())
            for _ in range(3):
                optimizer.zero_grad()
                (model(torch.ones(1, 2)) - rank).square().mean().backward()
                optimizer.step()
            if rank:
                for _ in range(20):
                    handle.push_pull({"w": torch.ones(2).numpy()})
            weights = [one.tolist() for one in model.parameters()]
            say("done", rank, context.rank, context.world_size, kind, weights)
"""
_SPAWNED = (
    _TRAINED
    + """
def main(rank):
    dist.init_process_group("gloo", init_method=f"file://{__file__}.store", rank=rank, world_size=2)
    train(rank)


if __name__ == "__main__":
    torch.multiprocessing.start_processes(main, nprocs=2, start_method="%s")
"""
)
_STARTED = """
def main(rank):
    os.environ["WORLD_SIZE"] = "1"  # As PyTorch's examples have it: the number of nodes.
    start(rank=rank, world_size=2, init_method=f"file://{__file__}.store")
    dist.destroy_process_group()
    start(rank=1 - rank, world_size=2, init_method=f"file://{__file__}.other")
    found = torch.zeros(2)
    dist.all_gather_into_tensor(found, torch.tensor([10.0 + rank]))
    assert found.tolist() == [11, 10], "the ranks have other numbers"
    group = dist.new_group([0])
    if rank == 1:  # Rank 0 ends meanwhile: it must wait.
        for _ in range(100):
            dist.all_reduce(torch.ones(1), group=group)
    assert os.environ["WORLD_SIZE"] == "1"
    say("done", rank)


if __name__ == "__main__":
    torch.multiprocessing.start_processes(main, nprocs=2, start_method="%s")
"""


def ran(path: Path, script: str, *launcher: str, environment: dict[str, str] | None = None) -> tuple[int, str]:
    """Run a script. Returns its exit status and output."""
    path.write_text(_HEAD + script)
    command = [sys.executable, "-W", "ignore", *launcher, str(path)]
    prefix = [f"{name}={value}" for name, value in (environment or {}).items()]
    ended = subprocess.run(["env", *prefix, *command], capture_output=True, text=True, timeout=300, check=False)
    return ended.returncode, ended.stdout + ended.stderr


def torchrun(path: Path, *flags: str, **environment: str) -> tuple[int, str]:
    """Run a script in two processes of torchrun."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *flags)
    return ran(path, _TORCHRUN, *launcher, environment=environment)


def test_torchrun_trains_with_the_scheduler_of_rank_0(tmp_path: Path) -> None:
    status, output = torchrun(tmp_path / "script.py")
    assert status == 0 and output.count("done") == 2, output
    assert output.count("a scheduler and one server are started for 2 workers") == 1


@pytest.mark.long
@pytest.mark.parametrize("killed", ["0", "1"])
def test_torchrun_starts_the_ranks_again(tmp_path: Path, killed: str) -> None:
    status, output = torchrun(tmp_path / "script.py", "--max-restarts", "1", KILLED=killed)
    assert status == 0 and output.count("done 0 1") == output.count("done 1 1") == 1, output


@pytest.mark.long
def test_a_killed_rank_ends_the_others(tmp_path: Path) -> None:
    status, output = torchrun(tmp_path / "script.py", KILLED="0")
    assert status == 1 and "WorkerLostError: rank 0 is gone" in output, output


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.long)])
def test_processes_of_torch_multiprocessing(tmp_path: Path, method: str) -> None:
    status, output = ran(tmp_path / "script.py", _STARTED % method)
    assert status == 0 and output.count("done") == 2, output


def has_trained_together(output: str) -> bool:
    """Return True if both workers of a run of two ended with the same weights, twice."""
    ended = [line.split(maxsplit=4) for line in output.splitlines() if line.startswith("done")]
    places = sorted(tuple(line[1:4]) for line in ended)
    return places == [("0", "0", "2")] * 2 + [("1", "1", "2")] * 2 and len({line[4] for line in ended}) == 2


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.long)])
def test_ranks_of_another_backend_train_together(tmp_path: Path, method: str) -> None:
    status, output = ran(tmp_path / "script.py", _SPAWNED % method)
    assert status == 0 and has_trained_together(output), output
    assert output.count("a scheduler and one server are started for 2 workers") == 2


def test_torchrun_needs_no_process_group(tmp_path: Path) -> None:
    script = _TRAINED + "train(int(os.environ['RANK']))"
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    status, output = ran(tmp_path / "script.py", script, *launcher)
    assert status == 0 and has_trained_together(output), output


def test_a_rank_that_fails_ends_without_waiting_for_the_others(tmp_path: Path) -> None:
    failing = _SPAWNED.replace(
        "    train(rank)",
        "    with psdist.init():\n        assert rank, 'failed here'\n        threading.Event().wait()",
    )
    status, output = ran(tmp_path / "script.py", failing % "fork")
    assert status == 1 and "failed here" in output, output


def test_a_run_of_some_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    with pytest.raises(ConfigurationError, match=r"2 of 4 ranks: .* Make a group of all ranks with it first"):
        own_run.join(dist.HashStore(), 0, 2)


@pytest.fixture
def first_join(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the next run be the first that this process joins."""
    monkeypatch.setattr(own_run, "_joins", itertools.count())
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)


def _store(hosts: Sequence[str], **found: Any) -> dist.HashStore:
    """Return the store of a run. found: the facts that rank 0 has told."""
    store = dist.HashStore()
    store.set("psdist/run//0/run/0", json.dumps({"hosts": hosts} | found))
    return store


@pytest.mark.usefixtures("first_join")
def test_a_run_that_rank_0_could_not_start() -> None:
    with pytest.raises(ConfigurationError, match="rank 0 could not start the run: no memory"):
        own_run.join(_store(["one"], error="no memory"), 1, 2)


def test_a_rank_that_never_calls_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    store = dist.HashStore()
    store.set_timeout(timedelta(milliseconds=1))
    with pytest.raises(
        WaitTimeoutError, match=r"rank 1 did not join the run within the time limit of init_process_group"
    ):
        own_run.join(store, 0, 3)


def test_a_rank_that_cannot_join_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_run, "init_for_all", lambda *_: (None, {}))
    shared = PrefixStore("run", dist.HashStore())
    for rank in range(3):
        shared.set(f"host/{rank}", "one")
    shared.set("joined/1", "")
    shared.set("joined/2", "no memory")
    with pytest.raises(ConfigurationError, match="rank 2 could not join the run: no memory"):
        own_run._start(shared, 3, {})


def test_another_rank_than_torchs_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match=r"init\(rank=2\) in rank 1 of 3"):
        own_run.join(dist.HashStore(), 1, 3, {"rank": 2})


@pytest.mark.usefixtures("first_join")
def test_the_given_place_comes_before_that_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in processes that a script starts, whose environment has the number of nodes, or an outer launcher's place."""
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "7")):
        monkeypatch.setenv(name, value)
    seen: dict[str, str | None] = {}

    def init(**given: Any) -> SimpleNamespace:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        seen.update({name: os.environ.get(name) for name in names} | given)
        return SimpleNamespace()

    monkeypatch.setattr(own_run, "init", init)
    place = {"scheduler": "192.0.2.1:7", "token": "secret", "run_id": "one"}
    store = _store(["one", "two", "two"], scope="elsewhere", pid=1, **place)
    own_run.join(store, 2, 3, {"request_timeout": 5.0})
    expected = {"RANK": "2", "WORLD_SIZE": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert seen == expected | place | {"tls": False, "request_timeout": 5.0}
    assert store.get("psdist/run//0/joined/2") == b""
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["LOCAL_RANK"]) == ("0", "1", "7")
    assert "LOCAL_WORLD_SIZE" not in os.environ


def test_the_scheduler_listens_beyond_loopback_only_if_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_run.addresses, "own_address", lambda: "192.0.2.1")
    monkeypatch.delenv("PSDIST_INSECURE", raising=False)
    assert own_run._address(["one", "one"]) is None
    with pytest.raises(
        ConfigurationError, match=r"rank 2 is on two and rank 0 on one: .* per node with 'psdist-worker'.*_INSECURE=1"
    ):
        own_run._address(["one", "one", "two"])
    monkeypatch.setenv("PSDIST_INSECURE", "yes")
    assert own_run._address(["one", "two"]) == "192.0.2.1"
    assert own_run._address(["one", "one"]) is None
    monkeypatch.setenv("PSDIST_INSECURE", "perhaps")
    with pytest.raises(ConfigurationError, match="PSDIST_INSECURE: 'perhaps' is neither 1 nor 0"):
        own_run._address(["one", "two"])


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process


async def test_the_end_of_rank_0_ends_the_membership_of_the_others(process: subprocess.Popen[bytes]) -> None:
    session = SimpleNamespace(membership=SimpleNamespace(view=ClusterView()))
    place: Any = SimpleNamespace(client=SimpleNamespace(session=session))
    own_run._watch(place, process.pid)
    view = session.membership.view
    assert view.fatal is None
    process.kill()
    while view.fatal is None:
        await view.changed()
    assert isinstance(view.fatal, WorkerLostError) and f"rank 0 is gone: its process {process.pid}" in str(view.fatal)
    assert process.poll() is not None  # Reaped: its id names no process any more.
    session.membership.view = ClusterView()
    own_run._watch(place, process.pid)
    assert isinstance(session.membership.view.fatal, WorkerLostError)


@pytest.mark.parametrize(
    ("example", "flags"),
    [
        ("accelerate_loop", ("--epochs", "2")),
        pytest.param("hf_trainer", ("--steps", "20", "--output", "out"), marks=pytest.mark.long),
        pytest.param("lightning_fit", (), marks=pytest.mark.long),
    ],
)
def test_frameworks_train_as_under_the_launcher(tmp_path: Path, example: str, flags: tuple[str, ...]) -> None:
    def results(*launcher: str) -> list[str]:
        command = [sys.executable, "-W", "ignore", "-m", *launcher, str(ROOT / f"examples/{example}.py"), *flags]
        ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=500, check=False)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return re.findall(r"(?:accuracy [\d.]+%|loss [\d.]+ after|epoch \d+  accuracy [\d.]+%)", ended.stdout)

    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    found = results(*torchrun)
    assert found and found == results("psdist", "run", "--nproc-per-node", "2", "--storage-path", "none")

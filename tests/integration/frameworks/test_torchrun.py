"""The backend ``psdist`` without a launcher of psdist: torchrun, and processes of torch.multiprocessing."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from psdist.client.session.cluster_view import ClusterView
from psdist.errors import ConfigurationError, WorkerLostError
from psdist.process_group import own_run

_HEAD = """
import os
import signal

import torch
import torch.distributed as dist

import psdist
import psdist.torch_backend

psdist.torch_backend.register()  # As torch does for an installed package.


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
print("done", dist.get_rank(), attempt)
"""
_SPAWNED = """
def main(rank):
    os.environ["MASTER_ADDR"] = "localhost"
    start(rank=rank, world_size=2, init_method=f"file://{__file__}.store")
    dist.destroy_process_group()
    print("done", rank)


if __name__ == "__main__":
    torch.multiprocessing.spawn(main, nprocs=2)
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


@pytest.mark.long
def test_processes_of_torch_multiprocessing(tmp_path: Path) -> None:
    status, output = ran(tmp_path / "script.py", _SPAWNED)
    assert status == 0 and output.count("done") == 2, output


def test_a_run_of_some_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    with pytest.raises(ConfigurationError, match=r"2 of 4 ranks: .* Make a group of all ranks with it first"):
        own_run.join(dist.HashStore(), 0, 2)


@pytest.mark.parametrize(
    ("found", "text"),
    [
        ({"error": "no memory"}, "rank 0 could not start the run: no memory"),
        (
            {"host": "elsewhere/1", "scheduler": "127.0.0.1:1"},
            "rank 1 is on .* and rank 0 on elsewhere/1, .* once per node with 'psdist-worker'.* PSDIST_INSECURE=1 on",
        ),
    ],
)
def test_a_run_that_cannot_be_joined(found: dict[str, str], text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    store = dist.HashStore()
    store.set("psdist/run/", json.dumps(found))
    with pytest.raises(ConfigurationError, match=text):
        own_run.join(store, 1, 2)


def test_ranks_of_another_machine_join_if_rank_0_lets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    store, place = dist.HashStore(), {"scheduler": "192.0.2.1:7", "token": "secret", "run_id": "one"}
    store.set("psdist/run/", json.dumps({"host": "elsewhere/1", "pid": 1, "scope": "elsewhere", **place}))
    monkeypatch.setattr(own_run, "init", lambda **given: given)
    assert own_run.join(store, 1, 2) == place | {"tls": False}


@pytest.mark.parametrize(
    ("local_size", "insecure", "spans"), [("2", "1", False), ("1", "", False), ("1", "0", False), ("1", "yes", True)]
)
def test_the_scheduler_listens_beyond_loopback_only_if_told_to(
    local_size: str, insecure: str, spans: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local_size)
    monkeypatch.setenv("PSDIST_INSECURE", insecure)
    monkeypatch.setattr(own_run.addresses, "own_address", lambda: "192.0.2.1")
    assert own_run._address(2) == ("192.0.2.1" if spans else None)
    monkeypatch.setenv("PSDIST_INSECURE", "perhaps")
    if local_size == "1":
        with pytest.raises(ConfigurationError, match="PSDIST_INSECURE: 'perhaps' is neither 1 nor 0"):
            own_run._address(2)


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

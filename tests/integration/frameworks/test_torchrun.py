"""The backend ``psdist`` without a launcher of psdist: torchrun, and processes of torch.multiprocessing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from psdist.errors import ConfigurationError
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
        ({"host": "elsewhere/1"}, "rank 1 is on .* and rank 0 on elsewhere/1: .* once per node with 'psdist-worker'"),
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

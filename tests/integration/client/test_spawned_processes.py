"""Processes that ``multiprocessing`` spawns from a script: their errors name the missing guard of the main module."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from psdist.launcher.embedded import EmbeddedCluster

#: A data loader's process, as in a script that was only tried with fork.
_UNGUARDED = """
import multiprocessing, psdist
context = psdist.init()
process = multiprocessing.get_context("spawn").Process(target=print)
process.start()
process.join()
print("status", process.exitcode)
context.close()
"""
_WORKER_IN_A_CHILD = """
import multiprocessing, psdist
def train():
    psdist.init()
if __name__ == "__main__":
    with psdist.init():
        process = multiprocessing.get_context("spawn").Process(target=train)
        process.start()
        process.join()
        print("status", process.exitcode)
"""


_SEVERAL = """
import multiprocessing, psdist
def train(number):
    with psdist.init({arguments}) as context:
        print(context.rank, context.world_size)
if __name__ == "__main__":
    processes = [multiprocessing.get_context("{method}").Process(target=train, args=(each,)) for each in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    print("status", *(process.exitcode for process in processes))
"""


def run(path: Path, script: str, **variables: str) -> subprocess.CompletedProcess[str]:
    (path / "train.py").write_text(script)
    return subprocess.run(
        [sys.executable, "train.py"], cwd=path, env=os.environ | variables, capture_output=True, text=True, timeout=240
    )


_FORKS = """
{imports}
import os, sys
with psdist.init() as context:
    for _ in range(2):
        os.waitpid(os.fork() or os._exit(0), 0)
"""


@pytest.mark.parametrize(
    ("imports", "setting", "count"),
    [
        ("import grpc, psdist", {}, 1),
        ("import psdist, grpc", {}, 0),
        pytest.param("import grpc, psdist", {"GRPC_ENABLE_FORK_SUPPORT": "0"}, 0, marks=pytest.mark.long),
    ],
)
def test_a_fork_is_warned_about_once_if_grpc_was_imported_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, imports: str, setting: dict[str, str], count: int
) -> None:
    monkeypatch.delenv("GRPC_ENABLE_FORK_SUPPORT", raising=False)
    done = run(tmp_path, _FORKS.format(imports=imports), **setting)
    assert done.returncode == 0 and done.stderr.count("imported grpc before psdist") == count, done.stderr


def test_a_script_without_the_guard_does_not_train_in_its_data_loader(tmp_path: Path) -> None:
    done = run(tmp_path, _UNGUARDED)
    assert (done.returncode, done.stdout) == (0, "status 1\n"), done.stderr
    assert "ConfigurationError" in done.stderr and 'if __name__ == "__main__":' in done.stderr


def test_a_second_process_of_a_rank_is_told_why_the_rank_is_taken(tmp_path: Path) -> None:
    with closing(EmbeddedCluster(1)) as cluster:
        named = {"PSDIST_SCHEDULER": cluster.address, "PSDIST_TOKEN": cluster.token, "RANK": "0", "WORLD_SIZE": "1"}
        done = run(tmp_path, _WORKER_IN_A_CHILD, **named)
    assert (done.returncode, done.stdout) == (0, "status 1\n"), done.stderr
    assert "DuplicateMemberError: rank 0 is taken" in done.stderr and "--nproc-per-node" in done.stderr
    assert 'if __name__ == "__main__":' in done.stderr and done.stderr.count("DuplicateMemberError") == 1


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.long)])
def test_processes_of_a_script_do_not_train_alone_without_notice(tmp_path: Path, method: str) -> None:
    done = run(tmp_path, _SEVERAL.format(arguments="", method=method))
    assert (done.returncode, done.stdout) == (0, "status 1 1\n"), done.stderr
    assert done.stderr.count("ConfigurationError: this process was started by multiprocessing") == 2
    assert "'psdist run'" in done.stderr and "psdist.init(alone=True)" in done.stderr


def test_processes_of_a_search_train_alone(tmp_path: Path) -> None:
    place = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}  # Those of the parent.
    done = run(tmp_path, _SEVERAL.format(arguments="alone=True", method="fork"), **place)
    assert (done.returncode, sorted(done.stdout.split())) == (0, ["0", "0", "0", "0", "1", "1", "status"]), done.stderr

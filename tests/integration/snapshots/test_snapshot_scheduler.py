"""The scheduler and servers as separate programs, as containers run them: when asked to end, they save the training
first. A second scheduler on the same storage takes over, and the first one saves no more. Real processes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from psdist import AsyncClient, optim
from psdist.consistency import BSP
from psdist.errors import SnapshotFailedError
from psdist.settings.config import await_address
from psdist.snapshots import reader
from psdist.snapshots.format import CommitRecord
from psdist.snapshots.opening import open_storage
from tests.support.mounted import Mount

_SECONDS = 60


class Programs:
    """Schedulers and servers; ``directory`` holds their files and the storage. naming: how the run is named."""

    naming: tuple[str, ...] = ("--run-id", "run")

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.storage = directory / "storage"
        self.started: list[subprocess.Popen[bytes]] = []
        names = ("PSDIST_STORAGE_PATH", "PSDIST_SCHEDULER", "PSDIST_TOKEN")
        self.environ = {key: value for key, value in os.environ.items() if key not in names}

    def scheduler(self, name: str, *flags: str, port: str = "0") -> tuple[subprocess.Popen[bytes], str]:
        """Start a scheduler. Returns it and its address."""
        path = self.directory / f"{name}.address"
        settings = ["--storage-path", str(self.storage), "--address-file", str(path), "--port", port, *self.naming]
        process = self._start("psdist_scheduler", *settings, "--host", "127.0.0.1", *flags)
        return process, await_address(path, _SECONDS)

    def server(self, scheduler: str) -> subprocess.Popen[bytes]:
        """Start a server."""
        return self._start("psdist_server", "--scheduler", scheduler, "--host", "127.0.0.1")

    def _start(self, module: str, *flags: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", module, *flags, "--log-level", "error"]
        self.started.append(subprocess.Popen(command, env=self.environ, stdin=subprocess.DEVNULL))
        return self.started[-1]

    async def commits(self) -> list[CommitRecord]:
        """Return the committed snapshots, oldest first."""
        found = await reader.commits(open_storage(str(self.storage)))
        assert all(isinstance(commit, CommitRecord) for commit in found)
        return [commit for commit in reversed(found) if isinstance(commit, CommitRecord)]


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    programs = Programs(tmp_path)
    yield programs
    for process in programs.started:
        if process.poll() is None:
            process.kill()
        process.wait()


async def _train(scheduler: str, steps: int) -> list[float]:
    """Train this many steps in a worker that then leaves. Returns its weights."""
    async with AsyncClient(scheduler) as client:
        start: dict[str, Any] = {"w": np.zeros(10, np.float32)}
        weights = await client.parameters("p", start, optim.SGD(lr=1.0), BSP())
        for _ in range(steps):
            await weights.push({"w": np.full(10, -1.0, np.float32)})
        values: list[float] = (await weights.pull())["w"].tolist()
        return values


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    assert process.wait(_SECONDS) == 0


async def test_what_was_trained_is_saved_before_the_end(programs: Programs) -> None:
    scheduler, address = programs.scheduler("first")
    server = programs.server(address)
    assert await _train(address, 3) == [3.0] * 10
    _end(server)
    _end(scheduler)
    (commit,) = await programs.commits()
    assert (commit.steps, commit.reason) == ({"p": 3}, "at the end")
    scheduler, address = programs.scheduler("second")
    server = programs.server(address)
    assert await _train(address, 2) == [5.0] * 10
    _end(scheduler)
    assert [commit.steps for commit in await programs.commits()] == [{"p": 3}, {"p": 5}]
    server.kill()


async def test_a_second_scheduler_takes_over(programs: Programs) -> None:
    _, first = programs.scheduler("first")
    programs.server(first)
    start: dict[str, Any] = {"w": np.zeros(10, np.float32)}
    async with AsyncClient(first) as client:
        weights = await client.parameters("p", start, optim.SGD(lr=1.0), BSP())
        await weights.push({"w": np.full(10, -1.0, np.float32)})
        await client.snapshot(timeout=_SECONDS)
        _, second = programs.scheduler("second")
        programs.server(second)
        async with AsyncClient(second) as other:
            resumed = await other.parameters("p", start, optim.SGD(lr=1.0), BSP())
            await resumed.push({"w": np.full(10, -1.0, np.float32)})
            await other.snapshot(timeout=_SECONDS)
            await weights.push({"w": np.full(10, -5.0, np.float32)})
            for _ in range(2):
                with pytest.raises(SnapshotFailedError, match=r"another scheduler's, which has taken over"):
                    await client.snapshot(timeout=_SECONDS)
            await resumed.push({"w": np.full(10, -1.0, np.float32)})
            info = await other.snapshot(timeout=_SECONDS)
            assert (await resumed.pull())["w"].tolist() == [3.0] * 10
    commits = await programs.commits()
    assert [commit.steps for commit in commits] == [{"p": 1}, {"p": 2}, {"p": 3}] and info.sequence == 3
    directories = {path.name for path in (programs.storage / "snapshots").iterdir()}
    assert directories == {commit.directory for commit in commits}


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    mounted = Mount(tmp_path / "disk", "size=1m")
    yield mounted
    mounted.close()


async def test_a_storage_that_cannot_be_written_any_more_does_not_keep_a_scheduler_from_coming_back(
    programs: Programs, mount: Mount
) -> None:
    programs.storage = mount.path / "storage"
    kept = ("--store", str(programs.directory / "store.sqlite"))
    first, address = programs.scheduler("first", *kept)
    programs.server(address)
    gradient = {"w": np.full(10, -1.0, np.float32)}
    async with AsyncClient(address) as client:
        weights = await client.parameters("p", {"w": np.zeros(10, np.float32)}, optim.SGD(lr=1.0), BSP())
        await weights.push(gradient)
        first.kill()
        first.wait()
        assert mount.remount("size=1m", readonly=True)
        programs.scheduler("again", *kept, port=address.rpartition(":")[2])
        await weights.push(gradient)
        with pytest.raises(SnapshotFailedError, match=r"[Rr]ead-only"):
            await client.snapshot(timeout=_SECONDS)
        assert mount.remount("size=1m")
        await weights.push(gradient)
        assert (await client.snapshot(timeout=_SECONDS)).steps == {"p": 3}


async def test_a_run_that_nobody_named_goes_on_under_its_name(programs: Programs) -> None:
    """Check that it resumes from its store after a crash, and from its snapshots after its end, when the store is
    gone."""
    programs.naming = ()
    store = ("--store", str(programs.directory / "store"), "--idle-timeout", "0.5")
    for name, ends in (("crashes", False), ("ends", True), ("goes-on", True)):
        scheduler, address = programs.scheduler(name, *store)
        if not ends:
            scheduler.kill()
            scheduler.wait()
            continue
        server = programs.server(address)
        await _train(address, 2)
        assert await asyncio.to_thread(scheduler.wait, _SECONDS) == server.wait(_SECONDS) == 0
    first, second = await programs.commits()
    assert (first.run_id, first.steps, second.steps) == (second.run_id, {"p": 2}, {"p": 4})


def test_a_storage_that_cannot_be_written_keeps_a_scheduler_from_beginning(programs: Programs, mount: Mount) -> None:
    programs.storage = mount.path / "storage"
    assert mount.remount("size=1m", readonly=True)
    command = [sys.executable, "-m", "psdist_scheduler", "--storage-path", str(programs.storage), "--run-id", "run"]
    ended = subprocess.run(command, env=programs.environ, capture_output=True, text=True, timeout=_SECONDS, check=False)
    assert ended.returncode == 69 and f"{programs.storage} cannot be written: Read-only" in ended.stderr, ended.stderr

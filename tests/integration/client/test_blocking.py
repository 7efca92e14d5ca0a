"""No event loop of a run blocks for long with a large model: at least 128 MiB in 2,000 tensors, half of them with an
override.

Measured by the processor time of the loop's thread in one turn, which a busy machine changes little. Sizes at which a
mistake cannot be missed are left to ``python -m benchmarks.blocking --bytes 4294967296`` and ``--tensors 20000``.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import blocking
from psdist import AsyncClient, optim
from psdist.launcher.embedded import EmbeddedCluster
from psdist.settings.programs import server_settings
from psdist.types import ClusterMap
from psdist_server import app
from psdist_server.kernels.memory import WeightsMemory
from psdist_server.server_session import ServerSession

#: Before memory was allocated in threads, servers blocked for 300 ms, and workers for 800, by 256 MiB.
LIMIT_SECONDS = 0.1
#: Megabytes of weights, copies and transport.
CASES = [
    (128, 2, "shm"),
    # The same with larger weights and other carriers.
    *(pytest.param(256, *case, marks=pytest.mark.long) for case in ((2, "shm"), (1, "shm"), (2, "tcp"))),
]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("megabytes", "copies", "transport"), CASES)
def test_no_loop_works_for_long_in_one_turn(tmp_path: Path, megabytes: int, copies: int, transport: str) -> None:
    case = blocking.Case(megabytes << 20, 2000, copies, transport)
    for number, phases in enumerate((["snapshot", "kill", "drain"], ["restore"])):
        monitored = tmp_path / f"monitor-{number}"
        monitored.mkdir()
        status, text = blocking.start(case, tmp_path, monitored, phases, steps=3)
        # Nobody is lost by a silence. Without a second copy the run goes back to its snapshot, which expels all.
        assert status == 0 and "silent" not in text and (copies == 1 or "expelled" not in text), text
        roles = {file.stem.partition("-")[0] for file in monitored.glob("*.jsonl")}
        assert roles == {"launcher", "scheduler", "server", "worker"}
        working = {
            file.name: max(turns, key=lambda turn: float(turn["cpu"]))
            for file in monitored.glob("*.jsonl")
            if (turns := blocking.turns_in(file))
        }
        assert not {name: turn for name, turn in working.items() if turn["cpu"] > LIMIT_SECONDS}


async def test_a_server_opens_its_session_before_it_has_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check a server whose shards are known as soon as it registers, for example when it replaces a dead server.
    Allocating their memory may take longer than the scheduler waits for a session."""
    opened = threading.Event()
    begin_stream, make_room = ServerSession.begin_stream, WeightsMemory.make_room

    def open_session(link: ServerSession) -> ClusterMap:
        opened.set()
        return begin_stream(link)

    def make_room_later(memory: WeightsMemory, indices: Iterable[int]) -> None:
        assert opened.wait(60)
        make_room(memory, indices)

    with closing(EmbeddedCluster(servers=2, replicas=2, failure_timeout=600)) as cluster:
        async with AsyncClient(cluster.address, cluster.token) as client:
            init = {"w": np.ones(1 << 20, np.float32)}
            weights = await client.parameters("model", init=init, optimizer=optim.SGD())
            cluster.processes[1].kill()
            while not (gone := [m for m in (await client.status()).members if m.state == "lost"]):
                pass
            monkeypatch.setattr(ServerSession, "begin_stream", open_session)
            monkeypatch.setattr(WeightsMemory, "make_room", make_room_later)
            words = ["--scheduler", cluster.address, "--server-id", gone[0].member_id, "--host", "127.0.0.1"]
            settings = server_settings(words, {"PSDIST_TOKEN": cluster.token})
            serving = asyncio.create_task(app._serve(settings, cluster.address, None))
            while any(shard.filling or not shard.backups for shard in (await shards_of(client))):
                assert not serving.done(), serving.result()
            assert opened.is_set()
            await weights.push_pull({"w": np.zeros(1 << 20, np.float32)})
            os.kill(os.getpid(), signal.SIGTERM)
            assert await serving == 0


async def shards_of(client: AsyncClient) -> Sequence[Any]:
    """Return the shards of the only parameter set."""
    return (await client.status()).parameters[0].entry.shards

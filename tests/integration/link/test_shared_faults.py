"""Faults of shared memory: no room, nothing shared, liars, and processes that are killed. Either training continues or
the error is clear; nothing is left in the shared-memory file system.

Real scheduler, servers and worker processes. Each update adds 1 to every weight for a mean gradient of -1, so the
weights show all contributions.
"""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path

import grpc
import grpc.aio
import numpy as np
import pytest

import psdist
from psdist import AsyncClient, AsyncParameters
from psdist.client.transport.shm import attach
from psdist.errors import ClosedError, InvalidArgumentError, ServerLostError, SharingUnavailableError, WaitTimeoutError
from psdist.launcher.embedded import EmbeddedCluster
from psdist.link import processes
from psdist.link.arenas import GradientArena, WeightsArena
from psdist.security.tls import Credentials
from psdist.types import Slicing
from psdist.v1 import common_pb2
from psdist.v1 import server_pb2 as pb
from psdist.wire import auth, channels
from tests.support.clients import connected, until
from tests.support.contributions import until_pushed

SIZE = 1 << 20
SGD = psdist.optim.SGD(lr=1.0)


def init() -> dict[str, np.ndarray]:
    return {"w": np.zeros(SIZE, np.float32)}


def gradient(value: float = -1.0) -> dict[str, np.ndarray]:
    return {"w": np.full(SIZE, value, np.float32)}


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    assert not list(processes.DIRECTORY.glob("psdist-*"))


@contextmanager
def file_limit(size: int) -> Iterator[None]:
    """Limit the size of files that this process, and those started meanwhile, can make."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


async def opened(clients: list[AsyncClient], name: str) -> list[AsyncParameters]:
    return list(await asyncio.gather(*(client.parameters(name, init(), SGD) for client in clients)))


# --- no room ----------------------------------------------------------------------------------------------------------


async def test_a_worker_without_room_falls_back_and_says_so(cluster: EmbeddedCluster) -> None:
    async with connected(cluster, {}) as clients:
        with file_limit(1 << 20):
            (handle,) = await opened(clients, "no-room")
            values = (await handle.push_pull(gradient()))["w"]
        assert set(values.tolist()) == {1.0}
        assert handle.statistics().transport == "tcp"
        reasons = set(handle.statistics().transports.values())
        assert all("no room in shared memory" in reason and "ulimit -f" in reason for reason in reasons)


async def test_a_server_without_room_falls_back_and_says_so() -> None:
    with file_limit(3 << 20):
        small = await asyncio.to_thread(EmbeddedCluster, 1)
    try:
        async with connected(small, {}) as clients:
            (handle,) = await opened(clients, "no-room")
            assert set((await handle.push_pull(gradient()))["w"].tolist()) == {1.0}
            assert "no room in shared memory" in handle.statistics().transports["server-0"]
    finally:
        await asyncio.to_thread(small.close)


async def test_shm_where_there_is_no_room_fails_clearly(cluster: EmbeddedCluster) -> None:
    async with connected(cluster, {"transport": "shm"}) as clients:
        (handle,) = await opened(clients, "must-share")
        with file_limit(1 << 20), pytest.raises(SharingUnavailableError, match=r"no room.*transport='auto'"):
            await handle.push_pull(gradient())
        # Nothing was sent, and the script continues once there is room again.
        assert set((await handle.push_pull(gradient()))["w"].tolist()) == {1.0}
        assert handle.statistics().transport == "shm"


# --- not the same memory ----------------------------------------------------------------------------------------------

_SEEN = """
import sys
import numpy as np
import psdist
with psdist.Client(transport=sys.argv[1]) as client:
    weights = client.parameters(sys.argv[2], {"w": np.zeros(1 << 20, np.float32)}, psdist.optim.SGD(lr=1.0))
    try:
        print(set(weights.push_pull({"w": np.full(1 << 20, -1.0, np.float32)})["w"].tolist()))
    except psdist.errors.SharingUnavailableError as error:
        print("refused:", error)
    print(weights.statistics().transports)
"""


@pytest.mark.skipif(
    not shutil.which("unshare") or subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode != 0,
    reason="needs mount namespaces",
)
@pytest.mark.parametrize("transport", ["auto", "shm"])
async def test_another_shared_memory_file_system_is_another_host(cluster: EmbeddedCluster, transport: str) -> None:
    script = f'mount -t tmpfs none {processes.DIRECTORY} && exec "$0" -c "$1" {transport} apart-{transport}'
    process = await asyncio.create_subprocess_exec(
        *("unshare", "--mount", "sh", "-c", script, sys.executable, _SEEN),
        env={**os.environ, "PSDIST_SCHEDULER": cluster.address, "PSDIST_TOKEN": cluster.token},
        stdout=subprocess.PIPE,
    )
    output = (await process.communicate())[0].decode()
    assert process.returncode == 0
    assert "do not see the same" in output
    assert ("{1.0}" in output) == (transport == "auto") and ("refused" in output) == (transport == "shm")


class Liar:
    """Share handler that is correct except for one fault."""

    def __init__(self, lie: str) -> None:
        self.lie = lie

    async def serve(self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
        async for data in requests:
            attach = pb.ShareRequest.FromString(data).attach
            weights = WeightsArena.create(1, 100 if self.lie != "size" else 5000)
            other = WeightsArena.create(1, 100)
            fd, connection = await processes.receive_file(attach.socket)
            with connection:
                nonce = GradientArena.open(fd, 100, "float32").nonce
                if self.lie != "silence":
                    processes.send_file(connection, weights.fd)
            attached = pb.Attached(nonce=nonce, weights_nonce=weights.nonce)
            if self.lie == "nonce":
                attached.nonce = bytes(16)
            if self.lie == "weights":
                attached.weights_nonce = other.nonce
            await context.write(pb.ShareResponse(attached=attached).SerializeToString())


@pytest.mark.parametrize(
    ("lie", "reason"),
    [
        ("nonce", "another nonce"),
        ("weights", "does not belong to"),
        ("size", "bytes, but needs"),
        ("silence", "closed the connection"),
        ("", ""),
    ],
)
async def test_a_server_that_lies_is_not_shared_with(lie: str, reason: str) -> None:
    server = channels.make_server(Credentials("secret"))
    port = channels.bind(server, "127.0.0.1", 0, Credentials())
    handlers = {"Share": grpc.stream_stream_rpc_method_handler(Liar(lie).serve)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("psdist.v1.ServerService", handlers),))
    await server.start()
    async with channels.open_channel(f"127.0.0.1:{port}", Credentials()) as channel:
        await channel.channel_ready()  # On a busy machine one attempt to connect may take longer than its limit.
        call = channel.stream_stream("/psdist.v1.ServerService/Share")(metadata=auth.metadata("secret"))
        arena = GradientArena.create(100, "float32")
        attaching = attach(call, pb.Attach(dtype=common_pb2.DTYPE_FLOAT32), arena, Slicing(100, 4096), "the server")
        if lie:
            with pytest.raises(SharingUnavailableError, match=reason):
                await attaching
        else:
            theirs, connection = await attaching
            connection.close()
            assert theirs.weights.size == 100
        call.cancel()
    await server.stop(0)


async def test_why_a_server_ended_the_stream_is_told_to_calls_under_way(cluster: EmbeddedCluster) -> None:
    async with connected(cluster, {"transport": "shm"}, {"transport": "shm"}) as clients:
        handles = await opened(clients, "reason")
        await asyncio.gather(*(handle.push_pull(gradient()) for handle in handles))
        waiting = asyncio.create_task(handles[0].push_pull(gradient()))
        await until(lambda: under_way(handles[0]))
        for stream in handles[0].participation.shared_memory.connections.values():
            stream.connection.send(b"no message")
        with pytest.raises(InvalidArgumentError, match="not a valid"):
            await waiting
        # It attaches again.
        results = await asyncio.gather(*(handle.push_pull(gradient()) for handle in handles))
        assert set(results[0]["w"].tolist()) == {2.0}


async def test_a_connection_that_breaks_is_made_again_and_the_step_counts_once(cluster: EmbeddedCluster) -> None:
    async with connected(cluster, {"transport": "shm"}, {"transport": "shm"}) as clients:
        handles = await opened(clients, "broken-line")
        await asyncio.gather(*(handle.push_pull(gradient()) for handle in handles))
        waiting = asyncio.create_task(handles[0].push_pull(gradient()))
        await until(lambda: under_way(handles[0]))
        for stream in handles[0].participation.shared_memory.connections.values():
            assert stream.connection._transport is not None
            stream.connection._transport.abort()
        results = await asyncio.gather(waiting, handles[1].push_pull(gradient()))
        assert set(results[0]["w"].tolist()) == set(results[1]["w"].tolist()) == {2.0}


# --- pushes that do not end well --------------------------------------------------------------------------------------


async def test_what_a_given_up_push_left_in_the_arena_is_not_changed_by_what_is_written_next(
    cluster: EmbeddedCluster,
) -> None:
    async with connected(cluster, {"request_timeout": 0.5, "transport": "shm"}, {}) as clients:
        handles = await opened(clients, "given-up")
        await asyncio.gather(*(handle.push_pull(gradient()) for handle in handles))
        buffer = await handles[0].gradient_buffers()
        buffer["w"][...] = -3.0
        with pytest.raises(WaitTimeoutError):
            await handles[0].push_pull(buffer)
        # The servers have the gradient and read it once the other has pushed; later writes do not reach them.
        assert set(buffer["w"].tolist()) == {-3.0}
        buffer["w"][...] = 1e6
        other = asyncio.create_task(handles[1].push_pull(gradient()))
        values = (await handles[0].push_pull(buffer))["w"]
        assert set(values.tolist()) == set((await other)["w"].tolist()) == {3.0}
        assert handles[0].statistics().ignored > 0 and handles[0].statistics().transport == "shm"
        # And the buffers are still at the same place, and shared.
        buffer["w"][...] = -5.0
        results = await asyncio.gather(handles[0].push_pull(buffer), handles[1].push_pull(gradient()))
        assert set(results[0]["w"].tolist()) == {6.0}


@pytest.mark.parametrize("transport", ["shm", "tcp", "grpc"])
async def test_what_is_written_after_closing_in_the_middle_of_a_push_reaches_nobody(
    cluster: EmbeddedCluster, transport: str
) -> None:
    async with connected(cluster, {"transport": transport}, {}) as clients:
        handles = await opened(clients, f"closed-{transport}")
        buffer = await handles[0].gradient_buffers()
        buffer["w"][...] = -3.0
        pushing = asyncio.create_task(handles[0].push(buffer))
        await until_pushed(clients[1], f"closed-{transport}")
        await clients[0].close()
        with pytest.raises(ClosedError):
            await pushing
        buffer["w"][...] = 1e6
        values = set((await handles[1].push_pull(gradient()))["w"].tolist())
        # Some slices may not have arrived over the other transports before the end.
        assert values == {2.0} if transport == "shm" else values <= {1.0, 2.0}


async def test_weights_after_a_given_up_push_stand_still_for_their_reader(cluster: EmbeddedCluster) -> None:
    """Check that in-place weights do not change. The other workers can finish the step that the given-up push left at
    the servers, and write the weights."""
    async with connected(cluster, {"request_timeout": 0.5, "transport": "shm"}, {}) as clients:
        handles = await opened(clients, "moving")
        await asyncio.gather(*(handle.push_pull(gradient()) for handle in handles))
        buffer = await handles[0].gradient_buffers()
        buffer["w"][...] = -3.0
        with pytest.raises(WaitTimeoutError):
            await handles[0].push(buffer)
        seen = (await handles[0].pull(copy=False))["w"]
        assert set(seen.tolist()) == {1.0}
        assert set((await handles[1].push_pull(gradient()))["w"].tolist()) == {3.0}
        assert set(seen.tolist()) == {1.0}
        await handles[0].push(buffer)  # already taken
        # After a push that ended well, weights are read in place again.
        seen = (await handles[0].pull(copy=False))["w"]
        shared = handles[0].participation.shared_memory.weights
        assert set(seen.tolist()) == {3.0} and shared is not None and np.shares_memory(seen, shared)


async def test_a_worker_that_unmaps_its_arena_in_the_middle_of_a_step(cluster: EmbeddedCluster) -> None:
    async with connected(cluster, {}, {}) as clients:
        handles = await opened(clients, "unmapped")
        pushing = asyncio.create_task(handles[0].push_pull(gradient(-3.0)))
        await until_pushed(clients[1], "unmapped")
        pushing.cancel()
        await asyncio.gather(pushing, return_exceptions=True)
        await clients[0].close()
        values = (await handles[1].push_pull(gradient()))["w"]
        assert set(values.tolist()) == {2.0}


# --- processes that are killed ----------------------------------------------------------------------------------------

_WORKER = """
import sys
import numpy as np
import psdist
client = psdist.Client(transport="shm")
weights = client.parameters(sys.argv[1], {"w": np.zeros(1 << 20, np.float32)}, psdist.optim.SGD(lr=1.0))
gradient = weights.gradient_buffers()
gradient["w"][...] = -3.0
print("joined", flush=True)
sys.stdin.readline()
while True:
    weights.push_pull(gradient, copy=False)
"""


class Worker:
    """Process that takes part as rank 1. It waits for a command and then pushes without a pause."""

    def __init__(self, cluster: EmbeddedCluster, name: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", _WORKER, name],
            env={**os.environ, "PSDIST_SCHEDULER": cluster.address, "PSDIST_TOKEN": cluster.token}
            | {"RANK": "1", "WORLD_SIZE": "2"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def joined(self) -> None:
        """Wait until it is a member."""
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "joined\n"

    def push(self) -> None:
        """Let it start pushing."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()


@asynccontextmanager
async def joined(
    cluster: EmbeddedCluster, name: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[AsyncClient, AsyncParameters, Worker]]:
    """This process as rank 0 and another as rank 1, both members before the first step."""
    monkeypatch.setenv("WORLD_SIZE", "2")  # both are waited for
    worker = Worker(cluster, name)
    try:
        async with connected(cluster, {}) as (client,):
            (handle,), _ = await asyncio.gather(opened([client], name), asyncio.to_thread(worker.joined))
            worker.push()
            yield client, handle, worker
    finally:
        worker.process.kill()
        with worker.process:  # closes its pipes
            pass


async def test_a_worker_killed_while_servers_hold_its_arena_has_contributed(
    cluster: EmbeddedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with joined(cluster, "killed-holding", monkeypatch) as (client, handle, worker):
        await until_pushed(client, "killed-holding")
        worker.process.kill()
        values = (await handle.push_pull(gradient()))["w"]
        assert set(values.tolist()) == {2.0}  # the mean of -3 and -1


@pytest.mark.parametrize("steps", [20, 27, 34])
async def test_a_worker_killed_while_servers_read_its_arena(
    cluster: EmbeddedCluster, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with joined(cluster, f"killed-reading-{steps}", monkeypatch) as (_, handle, worker):
        for _ in range(steps):
            await handle.push_pull(gradient(), copy=False)
        killing = asyncio.create_task(handle.push_pull(gradient(), copy=False))
        await until(lambda: killing.done() or under_way(handle))
        worker.process.kill()
        await killing
        values = (await handle.push_pull(gradient()))["w"]
        # Both were in each step, with 2 for their mean; in the last two steps the other may be missing, in any slice.
        assert handle.version == steps + 2
        assert set(values.tolist()) <= {2.0 * steps + more for more in (2.0, 3.0, 4.0)}


def under_way(handle: AsyncParameters) -> bool:
    """True if a call was sent over shared memory and is unanswered."""
    return any(stream.calls for stream in handle.participation.shared_memory.connections.values())


async def test_a_killed_server_ends_calls_at_once() -> None:
    # The cause must not be its silence.
    with closing(EmbeddedCluster(2, failure_timeout=600.0)) as lost:
        async with connected(lost, {"transport": "shm"}, {"transport": "shm"}) as clients:
            handles = await opened(clients, "lost")
            await asyncio.gather(*(handle.push_pull(gradient()) for handle in handles))
            view = (await asyncio.gather(*(handle.pull(copy=False) for handle in handles)))[0]["w"]
            waiting = asyncio.create_task(handles[0].push_pull(gradient()))
            await until(lambda: under_way(handles[0]))
            lost.processes[1].kill()
            with pytest.raises(ServerLostError):
                await asyncio.wait_for(waiting, 60.0)
            # The weights that were read in place are still readable.
            assert set(view.tolist()) == {1.0}


# --- what killed processes leave --------------------------------------------------------------------------------------

_STALE = """
import os, signal, sys
from psdist.link import processes
with processes.listening() as (name, _):
    print("listening", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def stale() -> Iterator[Path]:
    """Socket of a killed process."""
    subprocess.run([sys.executable, "-c", _STALE], stdout=subprocess.DEVNULL, check=False)
    (socket,) = processes.DIRECTORY.glob("psdist-*")
    yield socket
    socket.unlink(missing_ok=True)


async def test_a_dead_runs_socket_is_swept_by_the_next_worker(cluster: EmbeddedCluster, stale: Path) -> None:
    async with connected(cluster, {}) as clients:
        (handle,) = await opened(clients, "after-a-dead-run")
        await handle.pull()
        assert stale.name not in os.listdir(processes.DIRECTORY)


def test_a_dead_runs_socket_is_swept_by_the_next_server(stale: Path) -> None:
    with closing(EmbeddedCluster(servers=1)) as cluster:
        with psdist.Client(cluster.address, cluster.token, transport="grpc") as client:
            client.parameters("p", {"w": np.zeros(1, np.float32)}, SGD)
        assert not stale.exists()


def test_the_end_of_a_run_sweeps_what_its_workers_left(tmp_path: Path) -> None:
    (tmp_path / "dies.py").write_text(_STALE)
    done = subprocess.run(
        [sys.executable, "-m", "psdist.cli.main", "run", "--nservers", "1", "--max-restarts", "0", "dies.py"],
        env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path), "TMPDIR": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0 and "listening" in done.stdout + done.stderr
    assert not list(processes.DIRECTORY.glob("psdist-*"))

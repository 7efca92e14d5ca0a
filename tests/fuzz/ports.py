"""Bytes at every port and socket of live processes: ``python -m tests.fuzz.ports``, and again with ``--tls``.

Places: the gRPC ports; the servers' ports for TCP connections and the workers' ports for links, each before and after
a connection has identified itself; the Unix socket of a worker that shares memory; and the HTTP ports (``pages``).
Inputs are random bytes, valid frames with random messages, and changed copies of valid bytes. The checks are those of
``tests.fuzz.rpcs``, and that the pages still answer.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

import grpc.aio

from psdist import errors
from psdist.link import processes
from psdist.link.arenas import GradientArena
from psdist.security.roles import Role
from psdist.v1 import common_pb2, server_pb2, worker_pb2
from psdist.wire.status import DETAIL_KEY
from tests.fuzz.http2 import Ended
from tests.fuzz.inputs import OPEN_SECONDS, Input, converse, frame, tell
from tests.fuzz.pages import PAGES, require_pages
from tests.fuzz.rpcs import FuzzFailure, check_growth, verdict
from tests.fuzz.run import MEMBER, FuzzedRun

_PORT_SET: Final = "fuzz-asp"
_ELEMENTS: Final = 33 * 77 + 1
_AT_ONCE: Final = 8
_BATCH: Final = 200


# --- places -----------------------------------------------------------------------------------------------------------


async def grpc_port(one: Input) -> str:
    """A gRPC port of the scheduler or a server."""
    addresses = [one.run.address, *one.run.servers.values()]
    port = int(one.rng.choice(sorted(addresses)).rpartition(":")[2])
    return await tell(one, one.noise() if one.rng.random() < 0.3 else one.http2(), port)


async def tcp_stranger(one: Input) -> str:
    """The port for TCP connections, by a stranger."""
    kind = server_pb2.ShareRequest.DESCRIPTOR
    data = one.noise() if one.rng.random() < 0.5 else one.frames(kind, has_payloads=True)
    return await tell(one, data, one.rng.choice(one.run.tcp_ports))


async def tcp_worker(one: Input) -> str:
    """The same port, by a worker whose connection was promised."""
    call = _stub(one, "Connect")
    try:
        identity = _identity(one)
        await call.write(server_pb2.ConnectRequest(identity=identity).SerializeToString())
        answer = server_pb2.ConnectResponse.FromString(await _read(call))
        opening = frame(server_pb2.ShareRequest(open=server_pb2.OpenConnection(nonce=answer.nonce)))
        data = one.frames(server_pb2.ShareRequest.DESCRIPTOR, has_payloads=True, opening=opening)
        return await tell(one, data, answer.port, role=Role.WORKER, always=True)
    finally:
        call.cancel()


async def unix_socket(one: Input) -> str:
    """The Unix socket of a worker that shares its memory."""
    call = _stub(one, "Share")
    arena = GradientArena.create(_ELEMENTS, "float32")
    try:
        with processes.listening() as (name, listener):
            attach = server_pb2.Attach(identity=_identity(one), socket=name, dtype=common_pb2.DTYPE_FLOAT32)
            await call.write(server_pb2.ShareRequest(attach=attach).SerializeToString())
            swapping = asyncio.create_task(processes.swap_files(listener, arena.fd))
            reading = asyncio.create_task(_read(call))
            await asyncio.wait({swapping, reading}, return_when=asyncio.FIRST_COMPLETED)
            if not swapping.done():
                swapping.cancel()
                await asyncio.wait({swapping})
                await reading
                return "refused"
            fd, connection = swapping.result()
            os.close(fd)
        with connection:
            await reading
            reader, writer = await asyncio.open_unix_connection(sock=connection)
            kind = server_pb2.ShareRequest.DESCRIPTOR
            data = one.noise() if one.rng.random() < 0.2 else one.frames(kind, has_payloads=False)
            return (await converse((reader, writer), data))[0]
    finally:
        call.cancel()
        arena.detach()


async def link_stranger(one: Input) -> str:
    """The port of a worker, by a stranger."""
    kind = worker_pb2.PeerFrame.DESCRIPTOR
    data = one.noise() if one.rng.random() < 0.5 else one.frames(kind, has_payloads=True)
    return await tell(one, data, one.rng.choice(one.run.worker_ports), is_service=False)


async def link_worker(one: Input) -> str:
    """The port of a worker, by another worker."""
    which = one.rng.randrange(len(one.run.worker_ports))
    receiver = one.run.workers[f"trainer-{which}"]
    hello = worker_pb2.PeerHello(
        token=one.run.token, run_id=one.run.run_id, sender=one.run.workers[MEMBER], receiver=receiver, pid=1
    )
    opening = frame(worker_pb2.PeerFrame(hello=hello))
    data = one.frames(worker_pb2.PeerFrame.DESCRIPTOR, has_payloads=True, opening=opening)
    return await tell(one, data, one.run.worker_ports[which], is_service=False, role=Role.WORKER, always=True)


PLACES: Final[dict[str, Callable[[Input], Awaitable[str]]]] = {
    "grpc": grpc_port,
    "tcp-stranger": tcp_stranger,
    "tcp-worker": tcp_worker,
    "unix": unix_socket,
    "link-stranger": link_stranger,
    "link-worker": link_worker,
    **PAGES,
}


def _stub(one: Input, method: str) -> Any:
    server = one.rng.choice(sorted(one.run.servers.values()))
    path = f"/psdist.v1.ServerService/{method}"
    return one.run.channel(server).stream_stream(path)(metadata=one.run.metadata, timeout=OPEN_SECONDS)


def _identity(one: Input) -> server_pb2.Identity:
    member = one.run.workers[MEMBER]
    return server_pb2.Identity(
        run_id=one.run.run_id,
        worker_id=MEMBER,
        incarnation=member.incarnation,
        epoch=one.run.epoch,
        parameters=_PORT_SET,
    )


async def _read(call: Any) -> bytes:
    answer = await call.read()
    if answer is grpc.aio.EOF:
        raise FuzzFailure(f"a stream ended before its answer: {await call.code()}: {await call.details()}")
    return bytes(answer)


# --- running ----------------------------------------------------------------------------------------------------------


async def fuzz_place(run: FuzzedRun, name: str, numbers: Sequence[int], seed: int) -> Counter[str]:
    """Send inputs to one place, several at a time."""
    outcomes: Counter[str] = Counter()
    left = iter(numbers)

    async def work() -> None:
        for number in left:
            try:
                outcome = await PLACES[name](Input(run, random.Random(f"{seed}/{name}/{number}")))
            except grpc.aio.AioRpcError as error:  # Another call may have ended the member's incarnation.
                outcome = verdict(_ended(error))
            outcomes[outcome] += 1

    async with asyncio.TaskGroup() as tasks:
        for _ in range(_AT_ONCE):
            tasks.create_task(work())
    return outcomes


def _ended(error: grpc.aio.AioRpcError) -> Ended:
    details = dict(error.trailing_metadata() or ())
    return Ended(error.code().value[0], error.details() or "", bytes(details.get(DETAIL_KEY, b"")))


async def fuzz(arguments: argparse.Namespace) -> None:
    """Fuzz all places in turns."""
    run = FuzzedRun(has_tls=arguments.tls)
    totals = {name: Counter[str]() for name in arguments.only or PLACES}
    began = time.monotonic()
    try:
        await run.open()
        base = dict[str, int]()
        for first in range(arguments.first, arguments.first + arguments.inputs, _BATCH):
            for name, total in totals.items():
                count = min(_BATCH, arguments.first + arguments.inputs - first)
                total += await checked(run, name, range(first, first + count), arguments.seed)
            base = base or run.resident_mib()
            if time.monotonic() - began > arguments.seconds:
                break
        check_growth(base, run.resident_mib())
        print(f"memory {base}, then {run.resident_mib()} MiB; open files {run.files()}")
        print(f"the training beside it: {await run.end_training()} steps, all exact")
    finally:
        await run.close()
        for name, total in totals.items():
            print(f"{name:15} {total.total():7} inputs: {dict(total.most_common())}")
        print(f"seed {arguments.seed}; {time.monotonic() - began:.0f} s")


async def checked(run: FuzzedRun, name: str, numbers: range, seed: int) -> Counter[str]:
    """Run a batch, and look at the processes. Raises FuzzFailure with the command that repeats it."""
    failure, outcomes = "", Counter[str]()
    try:
        outcomes = await fuzz_place(run, name, numbers, seed)
        await run.refresh()
        await require_pages(run)
    except* (FuzzFailure, OSError, grpc.aio.AioRpcError, errors.PsdistError, TimeoutError) as group:
        failure = f"{type(group.exceptions[0]).__name__}: {group.exceptions[0]}"
    if (trouble := run.trouble()) or failure:
        flags = f"--seed {seed} --only {name} --first {numbers.start}{' --tls' if run.certificates else ''}"
        again = f"python -m tests.fuzz.ports {flags}"
        raise FuzzFailure("\n".join([failure, *trouble, f"again: {again} --inputs {len(numbers)}"]))
    return outcomes


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.ports", description=__doc__)
    parser.add_argument("--inputs", type=int, default=20_000, help="for each place")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="end earlier, after this time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first input")
    parser.add_argument("--only", nargs="*", choices=PLACES, default=[])
    parser.add_argument("--tls", action="store_true", help="ports with TLS: bytes inside and outside of it")
    try:
        asyncio.run(fuzz(parser.parse_args()))
    except FuzzFailure as failure:
        print(failure, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""``pyarrow.flight``, gRPC in C++: the bytes of a step travel to servers that return them. No psdist in it.

Runs in an environment of its own. Role ``server`` echoes each record batch of a DoExchange; ``client`` (the worker)
keeps an exchange open with every server, writes its share of the bytes in batches of 1 MiB and reads equally many.
Writing and reading have a thread each, since Flight's calls block; they let other threads run.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import flight

from benchmarks import turns

BATCH_BYTES = 1 << 20
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
SCHEMA = pa.schema([("payload", pa.uint8())])


def batch_sizes(settings: turns.Settings) -> list[list[int]]:
    """Bytes of the batches for each server, as ``echo`` divides them."""
    total = settings.params * ITEM_BYTES[settings.wire_dtype]
    sizes = [min(BATCH_BYTES, total - start) for start in range(0, total, BATCH_BYTES)]
    return [sizes[server :: settings.servers] for server in range(settings.servers)]


class Echo(flight.FlightServerBase):
    """Server that returns every batch."""

    def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        """Echo one exchange. Flight calls this in a thread per exchange."""
        writer.begin(reader.schema)
        for batch in _batches(reader):
            writer.write_batch(batch)


def _batches(reader: Any) -> Iterator[Any]:
    while True:
        try:
            yield reader.read_chunk().data
        except StopIteration:
            return


class Exchange:
    """A client's exchange with one server. sizes: bytes of the batches of a step."""

    def __init__(self, address: str, sizes: list[int]) -> None:
        self._client = flight.FlightClient(f"grpc://{address}")
        self._writer, self._reader = self._client.do_exchange(flight.FlightDescriptor.for_command(b""))
        self._writer.begin(SCHEMA)
        by_size = {size: _batch(size) for size in set(sizes)}
        self._batches = [by_size[size] for size in sizes]

    def write(self) -> None:
        """Write the batches of one step."""
        for batch in self._batches:
            self._writer.write_batch(batch)

    def read(self) -> None:
        """Read the batches of one step."""
        for batch in self._batches:
            assert self._reader.read_chunk().data.num_rows == batch.num_rows


def _batch(size: int) -> Any:
    """Return a record batch of so many bytes."""
    return pa.record_batch([pa.Array.from_buffers(pa.uint8(), size, [None, pa.py_buffer(bytes(size))])], schema=SCHEMA)


def make_step(exchanges: list[Exchange], pool: ThreadPoolExecutor) -> Callable[[], None]:
    """One step of the client."""

    def step() -> None:
        calls = [pool.submit(call) for one in exchanges for call in (one.write, one.read)]
        for call in calls:
            call.result()

    return step


def address_file(number: int) -> Path:
    """Return the file to which server ``number`` writes its address."""
    return turns.directory() / f"server-{number}"


def serve(settings: turns.Settings) -> None:
    """Run a server until the benchmark ends."""
    server = Echo("grpc://127.0.0.1:0")
    threading.Thread(target=server.serve, daemon=True).start()
    draft = address_file(settings.rank).with_suffix(".draft")
    draft.write_text(f"127.0.0.1:{server.port}")
    draft.rename(address_file(settings.rank))
    turns.serve(lambda steps: [])
    os._exit(0)  # Flight's own shutdown waits for the exchanges.


def take_turns(settings: turns.Settings) -> None:
    """Run the client."""
    sizes = batch_sizes(settings)
    for number in range(settings.servers):
        while not address_file(number).exists():
            time.sleep(0.02)  # There is no event when a server has written its address.
    addresses = [address_file(number).read_text() for number in range(settings.servers)]
    exchanges = [Exchange(address, mine) for address, mine in zip(addresses, sizes, strict=True)]
    with ThreadPoolExecutor(2 * settings.servers) as pool:
        step = make_step(exchanges, pool)
        turns.serve(lambda steps: turns.timed(step, steps), {"pyarrow": pa.__version__})
    os._exit(0)


def main() -> None:
    """Take turns until the benchmark ends."""
    settings = turns.settings()
    if settings.role == "server":
        serve(settings)
    else:
        take_turns(settings)


if __name__ == "__main__":
    main()

"""One rank of a contender of ``benchmarks.collectives``: ``psdist``, ``gloo`` or ``openmpi``.

An order names the bytes of an array and a number of calls. One more call comes first, which is not counted.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from benchmarks import turns

Call = Callable[[Any], object]
#: Returns an array of some float32 elements.
Allocate = Callable[[int], Any]


def _ordinary(elements: int) -> Any:
    return np.empty(elements, np.float32)


def serve(call: Call, allocate: Allocate = _ordinary) -> None:
    """Carry out orders until the benchmark ends."""
    line = turns.connect()
    line.send({})
    try:
        while (order := line.receive()) is not None:
            array = allocate(int(order["bytes"]) // 4)
            array[:] = 1
            line.send(_turn(call, array, int(order["calls"])))
    finally:
        line.close()


def _turn(call: Call, array: Any, calls: int) -> dict[str, Any]:
    """Return the seconds of each call, and the processor time of one."""
    call(array)
    before = time.process_time()
    seconds = turns.timed(lambda: call(array), calls)
    return {"seconds": seconds, "processor": (time.process_time() - before) / calls}


def psdist() -> None:
    """All-reduces of a group of all workers. Argument: "ordinary" arrays, or "registered" buffers."""
    from psdist import init

    with init() as context:
        group = context.collectives
        allocate = cache(group.allocate_buffer) if sys.argv[2] == "registered" else _ordinary
        serve(lambda array: group.all_reduce(array, "max", out=array), allocate)


def gloo() -> None:
    """All-reduces of torch's default group. Arguments: rank, size."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = f"file://{turns.directory() / 'rendezvous'}"
    dist.init_process_group("gloo", init_method=store, rank=int(sys.argv[2]), world_size=int(sys.argv[3]))
    serve(lambda array: dist.all_reduce(torch.from_numpy(array), dist.ReduceOp.MAX))
    dist.destroy_process_group()


def openmpi() -> None:
    """All-reduces of all ranks of mpirun."""
    from mpi4py import MPI

    serve(lambda array: MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, array, MPI.MAX))


if __name__ == "__main__":
    {"psdist": psdist, "gloo": gloo, "openmpi": openmpi}[sys.argv[1]]()

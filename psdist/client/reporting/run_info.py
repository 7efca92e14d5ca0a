"""``RunInfo``: a worker's place in its run, and the run's members."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class RunInfo:
    """A worker's place in its run, and the run's members at the moment of the call.

    run_id: name of the run.
    worker_id: this worker's name in the run.
    incarnation: number of registrations under this name, including the current one.
    rank: this worker's number, from 0.
    world_size: workers of the run, as its launcher set it.
    local_rank: this worker's number on its machine, from 0.
    workers: names of the current workers.
    servers: names of the current servers.
    transports: for each open parameter set, how each of its servers is reached: "shm", "tcp" or "grpc".
    backend: "psdist".
    """

    run_id: str
    worker_id: str
    incarnation: int
    rank: int
    world_size: int
    local_rank: int
    workers: tuple[str, ...]
    servers: tuple[str, ...]
    transports: Mapping[str, Mapping[str, str]]
    backend: Literal["psdist"] = "psdist"

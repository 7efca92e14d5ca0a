"""Settings of a chaos run, declared with the flags of ``python -m tests.chaos``. ``--fault`` is declared
there: it needs the list of faults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from psdist.settings.config import TransportName
from psdist.settings.flags import integer, one_of, seconds, setting
from tests.support.chaos.workload import Mode


@dataclass(frozen=True, kw_only=True)
class ChaosSettings:
    """Settings of a chaos run.

    fault: a key of ``injections.FAULTS``.
    compare: True to also make an undisturbed run of as many steps, and compare the bytes.
    """

    fault: str = "server-kill"
    kills: int = setting("number of faults, one after the other", integer(0, 100_000), 100, "N")
    mode: Mode = setting("bsp, ssp or asp", one_of(*get_args(Mode)), "bsp", "NAME", name="--consistency")
    servers: int = setting("servers", integer(1, 64), 3, "N", name="--nservers")
    workers: int = setting("workers", integer(1, 64), 2, "N", name="--nproc")
    replicas: int = setting("copies of each shard", integer(1, 2), 2, "R")
    lease_seconds: float = setting(
        "lease of servers, and of frozen workers", seconds(0.05), 2.0, name="--failure-timeout"
    )
    down_seconds: float = setting(
        "time for which a scheduler stays down and workers are busy; longest time for which others are frozen or cut "
        "off", seconds(), 4.0,
    )  # fmt: skip
    pace_seconds: float = setting("shortest time between two pushes", seconds(), 0.002)
    transport: TransportName = setting("auto, shm, tcp or grpc", one_of(*get_args(TransportName)), "auto", "NAME")
    load: int = setting("busy processes for each core, beside the run", integer(0, 64), 0, "N")
    seed: int = setting("seed of targets and moments", integer(0), 0, "N")
    compare: bool = True

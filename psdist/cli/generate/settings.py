"""Settings of every engine's files: the run, and the sizes of its parts."""

from __future__ import annotations

from dataclasses import dataclass

from psdist.errors import ConfigurationError
from psdist.settings.config import check_run_id
from psdist.settings.flags import integer, setting, torchrun_setting
from psdist.settings.programs import SERVERS_TITLE
from psdist.snapshots.policy import parse_interval
from psdist.wire.limits import REPLICAS_MAX, WORLD_MAX


def interval_text(value: str) -> str:
    """Return a time between snapshots as it was given. Raises ConfigurationError."""
    parse_interval(value)
    return value


@dataclass(frozen=True, kw_only=True)
class GeneratedRun:
    """Settings that all engines share. Raises ConfigurationError for values that exclude each other.

    command: the script and its arguments.
    """

    command: tuple[str, ...] = ()
    name: str = setting("name of the run's job", check_run_id, "psdist", "NAME")
    nodes: int = setting("machines, or pods, with workers", integer(1, WORLD_MAX), 1, "N")
    processes: int = torchrun_setting("--nproc-per-node", "workers on each of them", integer(1, 4096), 1, "N")
    servers: int = setting(
        "servers that share the parameters", integer(1, 1024), 2, "N", name="--nservers", group=SERVERS_TITLE
    )
    replicas: int = setting(
        "copies of each shard, on different servers: with 2 nothing is lost when a server dies",
        integer(1, REPLICAS_MAX), 1, "N", group=SERVERS_TITLE,
    )  # fmt: skip
    save_interval: str = setting("time between snapshots: 100 (steps), 30s, 5m, 2h", interval_text, "10m", "EVERY")

    def __post_init__(self) -> None:
        if not self.command:
            raise ConfigurationError("no script given: name one after the flags, such as train.py")
        if self.servers < self.replicas:
            raise ConfigurationError(
                f"--replicas {self.replicas} needs as many servers, not --nservers {self.servers}: raise --nservers"
            )
        if self.workers > WORLD_MAX:
            raise ConfigurationError(
                f"--nodes {self.nodes} times --nproc-per-node {self.processes} is {self.workers}, but a run has at "
                f"most {WORLD_MAX} workers: lower one of them"
            )

    @property
    def workers(self) -> int:
        """Workers of the run."""
        return self.nodes * self.processes

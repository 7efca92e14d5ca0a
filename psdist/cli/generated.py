"""``psdist generate``: its commands, the settings that all engines share, and the templates of their files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module, resources
from importlib.resources.abc import Traversable
from typing import Final

from psdist.cli.commands import Command, Group
from psdist.errors import ConfigurationError, InternalError
from psdist.settings.config import check_run_id
from psdist.settings.flags import integer, setting, torchrun_setting
from psdist.settings.programs import SERVERS_TITLE
from psdist.snapshots.policy import parse_interval
from psdist.wire.limits import REPLICAS_MAX, WORLD_MAX

GENERATE: Final = Group(
    "psdist generate",
    "Files that run psdist under an engine that places and restarts processes.",
    (
        Command(
            "slurm", "print an sbatch script: --nodes 4 train.py > job.sh",
            lambda: import_module("psdist.cli.slurm"),
        ),
        Command(
            "k8s", "write files for Kubernetes: --out run --image registry/train:1 train.py",
            lambda: import_module("psdist.cli.k8s"),
        ),
    ),
    "Each command has --help.",
)  # fmt: skip


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


_PLACE: Final = re.compile(r"@([A-Z][A-Z_]*)@")


def template_names(folder: str) -> list[str]:
    """Return the names of all templates below a folder, in order."""
    return sorted(_names(_root() / folder, folder))


def read_template(name: str) -> str:
    """Return the text of a template."""
    return _root().joinpath(name).read_text(encoding="utf-8")


def places(name: str) -> set[str]:
    """Return the places in a template."""
    return set(_PLACE.findall(read_template(name)))


def fill(name: str, values: Mapping[str, object]) -> str:
    """Return the text of a template with each ``@NAME@`` replaced. A line that a value leaves empty is removed.

    Raises InternalError for a place without a value.
    """
    if missing := places(name) - values.keys():
        raise InternalError(f"the template {name} has no values for {', '.join(sorted(missing))}")
    lines = []
    for line in read_template(name).splitlines():
        filled = _PLACE.sub(lambda found: str(values[found[1]]), line)
        if filled.strip() or not line.strip():
            lines.append(filled)
    return "\n".join(lines) + "\n"


def _root() -> Traversable:
    return resources.files(__package__) / "templates"


def _names(folder: Traversable, path: str) -> list[str]:
    found = []
    for entry in folder.iterdir():
        name = f"{path}/{entry.name}"
        found += _names(entry, name) if entry.is_dir() else [name]
    return found

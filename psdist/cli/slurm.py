"""``psdist generate slurm``: an sbatch script that starts scheduler, servers and workers in one job."""

from __future__ import annotations

import re
import shlex
import sys
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from psdist.cli.generated import GeneratedRun, fill
from psdist.cli.run import SCRIPT_USAGE
from psdist.errors import ConfigurationError
from psdist.settings.config import check_run_id
from psdist.settings.exit_codes import OK, Reaction, Role, statuses
from psdist.settings.flags import CommandLine, flags_of, integer, read, setting
from psdist.wire.limits import WORLD_MAX

_WORD: Final = re.compile(r"[A-Za-z0-9_.,:@=+/-]{1,100}")
_TIME: Final = re.compile(r"\d{1,6}(:\d{1,2}){0,2}|\d{1,4}-\d{1,2}(:\d{1,2}){0,2}")
_SLURM_TITLE: Final = "Slurm"
#: A regular expression for the statuses of processes that a signal ended.
_SIGNALS: Final = "129|1[3-9][0-9]"
#: Ports of jobs, in a range that systems do not give to other connections.
_PORT: Final = "$((20000 + SLURM_JOB_ID % 5000 * 2))"
_START_SECONDS: Final = 600


def option_word(value: str) -> str:
    """Return the value of an option of sbatch if it needs no quotes. Raises ConfigurationError."""
    if not _WORD.fullmatch(value):
        raise ConfigurationError(f"{value!r:.100} is not possible: use 1 to 100 of A-Z a-z 0-9 _ . , : @ = + / -")
    return value


def time_text(value: str) -> str:
    """Return a time limit of Slurm. Raises ConfigurationError."""
    if not _TIME.fullmatch(value):
        raise ConfigurationError(f"{value!r:.40} is not a time of Slurm: write minutes, HH:MM:SS or DAYS-HH:MM:SS")
    return value


@dataclass(frozen=True, kw_only=True)
class SlurmSettings(GeneratedRun):
    """Settings of one Slurm job. service_nodes: 0 if servers share the workers' nodes."""

    time_limit: str = setting(
        "time limit of the job, as sbatch takes it (default: the partition's)", time_text, "", "TIME", name="--time",
        group=_SLURM_TITLE,
    )  # fmt: skip
    partition: str = setting("partition of the job", option_word, "", "NAME", group=_SLURM_TITLE)
    account: str = setting("account of the job", option_word, "", "NAME", group=_SLURM_TITLE)
    cpus_per_node: int | None = setting(
        "processors of each node (default: all, by --exclusive)", integer(1, 4096), None, "N", group=_SLURM_TITLE
    )
    gpus_per_node: int = setting("GPUs of each node, for its workers", integer(0, 64), 0, "N", group=_SLURM_TITLE)
    service_nodes: int = setting(
        "further nodes that run only scheduler and servers (default: they share the workers' nodes)",
        integer(0, WORLD_MAX), 0, "N", group=_SLURM_TITLE,
    )  # fmt: skip
    run_id: str = setting(
        "name of the run (default: the job's name and number)", check_run_id, "", "NAME", group=_SLURM_TITLE
    )
    storage_path: str = setting(
        "directory that all nodes share, or URL (s3://, gs://, az://), for snapshots (default: psdist-runs/RUN_ID "
        "below the directory of sbatch)", str, "", "PATH", group=_SLURM_TITLE,
    )  # fmt: skip
    notice_seconds: int = setting(
        "time before the time limit, or in a preemption, at which the run saves and ends", integer(10, 65535), 120,
        group=_SLURM_TITLE,
    )  # fmt: skip
    requeues_max: int = setting(
        "restarts of a job that has lost its servers or its storage", integer(0, 1000), 3, "N", name="--max-requeues",
        group=_SLURM_TITLE,
    )  # fmt: skip
    port: int = setting(
        "port of the scheduler; 0 derives one from the job's number", integer(0, 65534), 0, "PORT", group=_SLURM_TITLE
    )

    @property
    def server_nodes(self) -> int:
        """Nodes with servers: the first ones."""
        return min(self.servers, self.service_nodes or self.nodes)


def command_line() -> CommandLine:
    """Return the command line of ``psdist generate slurm``."""
    return CommandLine(
        "psdist generate slurm",
        "Prints an sbatch script that runs a script with psdist: scheduler and servers on the first nodes, workers on "
        "all of them. Slurm's signal before the time limit ends in a snapshot, and the requeued job resumes from it.",
        flags_of(SlurmSettings),
        SCRIPT_USAGE,
        "Example: psdist generate slurm --nodes 4 --nproc-per-node 8 --time 4:00:00 train.py > job.sh; sbatch job.sh. "
        "psdist run, not this program, reads PSDIST_ variables.",
        first=("--nodes", "--nproc-per-node", "--nservers", "--replicas", "--time"),
    )


def run(given: Namespace, environ: Mapping[str, str]) -> int:
    """Print the script."""
    print(script(read(SlurmSettings, given, command=tuple(given.command))), end="")
    return OK


def script(settings: SlurmSettings) -> str:
    """Return the text of the sbatch script."""
    values = {
        "JOB_NAME": settings.name,
        "ALL_NODES": settings.nodes + settings.service_nodes,
        "OPTIONS": "\n".join(f"#SBATCH --{option}" for option in _options(settings)),
        "NOTICE": settings.notice_seconds,
        "BIN": shlex.quote(str(Path(sys.executable).parent)),
        "RUN_ID": settings.run_id or "$SLURM_JOB_NAME-$SLURM_JOB_ID",
        "STORAGE": _storage(settings.storage_path),
        "PORT": settings.port or _PORT,
        "NODES": settings.nodes,
        "SERVICE_NODES": settings.service_nodes,
        "SERVER_NODES": settings.server_nodes,
        "WORKERS": settings.workers,
        "PROCESSES": settings.processes,
        "SERVERS": settings.servers,
        "REPLICAS": settings.replicas,
        "SAVE_INTERVAL": settings.save_interval,
        "START_TIMEOUT": _START_SECONDS,
        "COMMAND": shlex.join(settings.command),
        "SCHEDULER_RESTARTS": f"{_pattern('scheduler', 'restart')}|{_SIGNALS}",
        "SERVER_RESTARTS": f"{_pattern('server', 'restart')}|{_SIGNALS}",
        # Slurm has no restart of one task, so a restart of the agent is one of the job.
        "REQUEUES": "|".join(map(str, _requeued())),
        "REQUEUES_MAX": settings.requeues_max,
    }
    return fill("slurm.sh", values)


def _options(settings: SlurmSettings) -> list[str]:
    """Return the options of sbatch that depend on the settings."""
    named = {"time": settings.time_limit, "partition": settings.partition, "account": settings.account}
    options = [f"{name}={value}" for name, value in named.items() if value]
    cpus, gpus = settings.cpus_per_node, settings.gpus_per_node
    options.append(f"cpus-per-task={cpus}" if cpus else "exclusive")
    return [*options, f"gpus-per-node={gpus}"] if gpus else options


def _storage(path: str) -> str:
    if not path:
        return "$SLURM_SUBMIT_DIR/psdist-runs/$PSDIST_RUN_ID"
    is_relative = "://" not in path and not path.startswith("/")
    return f"$SLURM_SUBMIT_DIR/{shlex.quote(path)}" if is_relative else shlex.quote(path)


def _pattern(role: Role, *reactions: Reaction) -> str:
    return "|".join(map(str, statuses(role, *reactions)))


def _requeued() -> tuple[int, ...]:
    """Return the statuses of an agent after which the job is requeued: not after an error of the script, which the
    agent has restarted already."""
    return tuple(status for status in statuses("launcher", "restart", "requeue") if status >= 64)

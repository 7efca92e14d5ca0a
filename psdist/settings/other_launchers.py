"""Processes that srun, mpirun and the like start: their ranks, and a refusal if no scheduler is named.

Without a scheduler each of these processes would train alone, on all data, and the last one to write its results would
win. With one, ``psdist-worker`` and scripts take their place from the launcher's variables (``find_task``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from psdist.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class LauncherTask:
    """The place of this process among those that one command of a launcher started.

    launcher: the command, such as ``srun``.
    variable: the variable that has ``rank``; ``count_variable`` has ``count``.
    rank: number of this process, below ``count``, which is at least 2.
    local_rank: its number on this machine.
    local_count: processes on this machine; ``local_rank + 1`` if the launcher does not tell.
    """

    launcher: str
    variable: str
    count_variable: str
    rank: int
    count: int
    local_rank: int = 0
    local_count: int = 1


@dataclass(frozen=True, slots=True)
class _Variables:
    """Variables of one launcher. local_count: empty if it has none that is a plain number."""

    launcher: str
    count: str
    rank: str
    local_rank: str
    local_count: str = ""


#: Slurm's count is that of the step: the shell of an allocation has ``SLURM_NTASKS``, and may start one process.
_SRUN: Final = _Variables("srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID")
#: ``mpirun`` may start its daemons by ``srun``, so Slurm's variables are the last to count.
_LAUNCHERS: Final = (
    _Variables(
        "mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    _Variables(
        "mpirun", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"
    ),
    _Variables(
        "jsrun", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_LOCAL_SIZE"
    ),
    _Variables("mpiexec", "PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    _SRUN,
)  # fmt: skip
#: Variables that tell no place: numbers of processes, and numbers of this one. Process 0 may be the only one.
_SIZES: Final = ("WORLD_SIZE", "HOROVOD_SIZE")
_RANKS: Final = ("PMIX_RANK", "SLURM_PROCID")
_COUNT_DIGITS: Final = 9


def find_task(environ: Mapping[str, str]) -> LauncherTask | None:
    """Return this process's place among those of srun, mpirun, mpiexec or jsrun; None if it is the only one.

    Raises ConfigurationError if the launcher's variables contradict each other.
    """
    for variables in _LAUNCHERS:
        if (count := _number(environ, variables.count)) > 1:
            # srun --mpi=pmi2 sets these, too, without the place on the machine.
            is_srun = variables.count == "PMI_SIZE" and _number(environ, _SRUN.count) == count
            return _task(environ, _SRUN if is_srun else variables, count)
    return None


def _task(environ: Mapping[str, str], variables: _Variables, count: int) -> LauncherTask:
    rank, text = _number(environ, variables.rank, -1), environ.get(variables.rank)
    if not 0 <= rank < count:
        raise ConfigurationError(
            f"{variables.rank} is {text!r:.40}, but {variables.count} is {count}, so it must be 0 to {count - 1}: "
            f"start the program by {variables.launcher}, or unset {variables.count}"
        )
    local_rank = _number(environ, variables.local_rank)
    return LauncherTask(
        variables.launcher, variables.rank, variables.count, rank, count, local_rank,
        max(local_rank + 1, _local_count(environ, variables)),
    )  # fmt: skip


def _local_count(environ: Mapping[str, str], variables: _Variables) -> int:
    if variables is _SRUN:
        counts = _tasks_by_node(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
        node = _number(environ, "SLURM_NODEID")
        return counts[node] if node < len(counts) else 0
    return _number(environ, variables.local_count)


def _tasks_by_node(text: str) -> list[int]:
    """Return the tasks of each node from Slurm's ``2(x3),1``; empty if it is not understood."""
    groups = [re.fullmatch(r"(\d{1,6})(?:\(x(\d{1,5})\))?", part) for part in text.split(",")]
    return [int(each[1]) for each in groups if each for _ in range(int(each[2] or 1))] if all(groups) else []


def first_node(environ: Mapping[str, str]) -> str:
    """Return the first node of this Slurm step, on which task 0 runs; empty outside a step.

    ``SLURM_STEP_NODELIST`` may be ``a[2-4],b7``: every bracket stands for its first number.
    """
    found = re.match(r"(?:[^,\[\]]|\[[^\]]*\])+", environ.get("SLURM_STEP_NODELIST", ""))
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", found[0]) if found else ""


def check_alone(environ: Mapping[str, str], remedy: str) -> None:
    """Raise ConfigurationError if another launcher started this process as one of several. remedy: the way to name the
    scheduler."""
    for name in _SIZES:
        if (count := _number(environ, name)) > 1:
            raise _refusal(name, f"another launcher started {count} processes", environ[name], remedy)
    for each in _LAUNCHERS:
        if (count := _number(environ, each.count)) > 1:
            raise _refusal(each.count, f"{each.launcher} started {count} processes", environ[each.count], remedy)
    for name in _RANKS:
        if _number(environ, name) > 0:
            raise _refusal(name, "another launcher started several processes", environ[name], remedy)


def check_one_run(environ: Mapping[str, str]) -> None:
    """Raise ConfigurationError if ``psdist run`` was started several times by one command, and is no part of another
    run."""
    task = None if environ.get("PSDIST_CONNECTED_FILE") else find_task(environ)
    if task is None:
        return
    name = task.count_variable
    raise ConfigurationError(
        f"{name} is {task.count}: {task.launcher} started psdist run {task.count} times, and each would be a separate "
        "run. Start it once, as one task; or start psdist-worker in its place, with --scheduler HOST:PORT (psdist "
        f"generate slurm writes such a job). If separate runs are what you want, start 'env -u {name} psdist run'"
    )


def _number(environ: Mapping[str, str], name: str, default: int = 0) -> int:
    value = environ.get(name, "")
    return int(value) if value.isascii() and value.isdigit() and len(value) <= _COUNT_DIGITS else default


def _refusal(name: str, started: str, value: str, remedy: str) -> ConfigurationError:
    node = "srun --ntasks-per-node=1 psdist-worker" if name.startswith("SLURM") else "psdist-worker"
    return ConfigurationError(
        f"{name} is {value}, but no scheduler is named: {started}, and each of them would train alone. Start the "
        f"script with 'psdist run' on one machine, or once per node with '{node}', or {remedy}. To train alone in each "
        f"process, unset {name}, or call psdist.init(alone=True)"
    )

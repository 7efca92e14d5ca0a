"""Launchers other than psdist's: they start a script several times without naming a scheduler.

Each of these processes would then train alone, on all data, and the last one to write its results would win.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from psdist.errors import ConfigurationError

#: Variables with the number of processes, and the launcher that sets each. Slurm's count is that of the step: the shell
#: of an allocation has ``SLURM_NTASKS``, and may start one process.
_SIZES: Final = {
    "WORLD_SIZE": "another launcher",
    "SLURM_STEP_NUM_TASKS": "srun",
    "OMPI_COMM_WORLD_SIZE": "mpirun",
    "PMI_SIZE": "mpiexec",
    "MV2_COMM_WORLD_SIZE": "mpirun",
    "JSM_NAMESPACE_SIZE": "jsrun",
}
#: Variable with the number of this process, if its launcher tells no more. Process 0 may be the only one.
_RANK: Final = "PMIX_RANK"


def check_alone(environ: Mapping[str, str], remedy: str) -> None:
    """Raise ConfigurationError if another launcher started this process as one of several. remedy: the way to name the
    scheduler."""
    for name, launcher in _SIZES.items():
        if (count := _number(environ, name)) > 1:
            raise _refusal(name, f"{launcher} started {count} processes", environ[name], remedy)
    if _number(environ, _RANK) > 0:
        raise _refusal(_RANK, "another launcher started several processes", environ[_RANK], remedy)


def _number(environ: Mapping[str, str], name: str) -> int:
    value = environ.get(name, "")
    return int(value) if value.isascii() and value.isdigit() and len(value) < 10 else 0


def _refusal(name: str, started: str, value: str, remedy: str) -> ConfigurationError:
    node = "srun --ntasks-per-node=1 psdist-worker" if name.startswith("SLURM") else "psdist-worker"
    return ConfigurationError(
        f"{name} is {value}, but no scheduler is named: {started}, and each of them would train alone. Start the "
        f"script with 'psdist run' on one machine, or once per node with '{node}', or {remedy}. To train alone in each "
        f"process, unset {name}"
    )

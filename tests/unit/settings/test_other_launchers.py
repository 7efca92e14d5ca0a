"""Processes that another launcher started several times are refused, and those of an allocation's shell are not."""

from __future__ import annotations

import pytest

from psdist.errors import ConfigurationError
from psdist.settings.other_launchers import check_alone

#: As Slurm sets them in the shell of ``salloc`` and in the script of ``sbatch`` with four tasks.
_ALLOCATION = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_NPROCS": "4", "SLURM_NNODES": "2"}
_BATCH = _ALLOCATION | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
_STEP = _BATCH | {"SLURM_STEP_ID": "0"}


@pytest.mark.parametrize(
    "environ",
    [
        {},
        _ALLOCATION,
        _BATCH,
        _ALLOCATION | {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"},  # An interactive step.
        _STEP | {"SLURM_STEP_NUM_TASKS": "1"},
        {"OMPI_COMM_WORLD_SIZE": "1", "PMIX_RANK": "0"},
        {"PMI_SIZE": "1", "PMI_RANK": "0"},
        {"WORLD_SIZE": "1"},
        {"WORLD_SIZE": ""},
    ],
)
def test_one_process_may_train_alone(environ: dict[str, str]) -> None:
    check_alone(environ, "")


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"WORLD_SIZE": "4", "RANK": "0"}, "WORLD_SIZE is 4"),
        (_STEP | {"SLURM_STEP_NUM_TASKS": "4"}, "srun started 4 processes"),
        ({"OMPI_COMM_WORLD_SIZE": "2", "PMIX_RANK": "0"}, "mpirun started 2 processes"),
        ({"PMI_SIZE": "8"}, "PMI_SIZE is 8"),
        ({"PMIX_RANK": "3"}, "PMIX_RANK is 3"),
    ],
)
def test_one_of_several_processes_is_refused_with_the_remedy(environ: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        check_alone(environ, "set PSDIST_SCHEDULER=HOST:PORT")
    text = str(caught.value)
    assert words in text and "no scheduler is named" in text
    assert "psdist run" in text and "psdist-worker" in text and "PSDIST_SCHEDULER=HOST:PORT" in text
    assert "unset" in text and ("srun --ntasks-per-node=1 psdist-worker" in text) == ("srun" in words)

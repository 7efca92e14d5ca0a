"""Places that srun, mpirun and the like give; and processes that they started without a scheduler are refused."""

from __future__ import annotations

import pytest

from psdist.errors import ConfigurationError
from psdist.settings.other_launchers import check_alone, check_one_run, find_task, first_node

#: As Slurm sets them in the shell of ``salloc`` and in the script of ``sbatch`` with four tasks.
_ALLOCATION = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_NPROCS": "4", "SLURM_NNODES": "2"}
_BATCH = _ALLOCATION | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
_STEP = _BATCH | {"SLURM_STEP_ID": "0"}


def test_one_process_may_train_alone() -> None:
    for environ in [
        {},
        _ALLOCATION,
        _BATCH,
        _ALLOCATION | {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"},  # An interactive step.
        _STEP | {"SLURM_STEP_NUM_TASKS": "1"},
        {"OMPI_COMM_WORLD_SIZE": "1", "PMIX_RANK": "0"},
        {"PMI_SIZE": "1", "PMI_RANK": "0"},
        {"WORLD_SIZE": "1"},
        {"WORLD_SIZE": ""},
    ]:
        check_alone(environ, "")


def test_one_of_several_processes_is_refused_with_the_remedy() -> None:
    for environ, words in [
        ({"WORLD_SIZE": "4", "RANK": "0"}, "WORLD_SIZE is 4"),
        (_STEP | {"SLURM_STEP_NUM_TASKS": "4"}, "srun started 4 processes"),
        ({"OMPI_COMM_WORLD_SIZE": "2", "PMIX_RANK": "0"}, "mpirun started 2 processes"),
        ({"PMI_SIZE": "8"}, "PMI_SIZE is 8"),
        ({"PMIX_RANK": "3"}, "PMIX_RANK is 3"),
        (_ALLOCATION | {"SLURM_PROCID": "1"}, "SLURM_PROCID is 1"),
        ({"HOROVOD_SIZE": "2"}, "HOROVOD_SIZE is 2"),
    ]:
        with pytest.raises(ConfigurationError) as caught:
            check_alone(environ, "set PSDIST_SCHEDULER=HOST:PORT")
        text = str(caught.value)
        assert words in text and "no scheduler is named" in text
        assert "psdist run" in text and "psdist-worker" in text and "PSDIST_SCHEDULER=HOST:PORT" in text
        assert (
            "unset" in text
            and "alone=True" in text
            and ("srun --ntasks-per-node=1 psdist-worker" in text) == ("SLURM" in text)
        )


_SRUN = _BATCH | {
    "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "7", "SLURM_STEP_TASKS_PER_NODE": "2(x3),1", "SLURM_PROCID": "5",
    "SLURM_NODEID": "2", "SLURM_LOCALID": "1",
}  # fmt: skip
_OMPI = {
    "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}  # fmt: skip
_HYDRA = {"PMI_SIZE": "4", "PMI_RANK": "2", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
_JSRUN = {
    "JSM_NAMESPACE_SIZE": "2", "JSM_NAMESPACE_RANK": "1", "JSM_NAMESPACE_LOCAL_RANK": "1",
    "JSM_NAMESPACE_LOCAL_SIZE": "2",
}  # fmt: skip


def test_a_task_has_the_place_that_its_launcher_gave() -> None:
    for environ, launcher, place in [
        (_SRUN, "srun", (5, 7, 1, 2)),
        (_SRUN | {"SLURM_NODEID": "3", "SLURM_PROCID": "6", "SLURM_LOCALID": "0"}, "srun", (6, 7, 0, 1)),
        (_SRUN | {"SLURM_STEP_TASKS_PER_NODE": "?"}, "srun", (5, 7, 1, 2)),
        (_SRUN | {"PMI_SIZE": "7", "PMI_RANK": "5"}, "srun", (5, 7, 1, 2)),  # srun --mpi=pmi2
        (_OMPI, "mpirun", (3, 4, 1, 2)),
        (_SRUN | _OMPI, "mpirun", (3, 4, 1, 2)),  # Its daemons are tasks of srun.
        (_HYDRA, "mpiexec", (2, 4, 0, 2)),
        (_SRUN | _HYDRA, "mpiexec", (2, 4, 0, 2)),
        (_JSRUN, "jsrun", (1, 2, 1, 2)),
    ]:
        task = find_task(environ)
        assert task is not None and task.launcher == launcher
        assert (task.rank, task.count, task.local_rank, task.local_count) == place


def test_a_process_on_its_own_has_no_place() -> None:
    for environ in [{}, _BATCH, _BATCH | {"SLURM_STEP_NUM_TASKS": "1"}, {"PMI_SIZE": "x"}]:
        assert find_task(environ) is None


def test_an_impossible_rank_is_refused() -> None:
    for rank in ["7", "-1", "x", ""]:
        with pytest.raises(ConfigurationError, match=f"SLURM_PROCID is '{rank}', but SLURM_STEP_NUM_TASKS is 7"):
            find_task(_SRUN | {"SLURM_PROCID": rank})


def test_the_first_node_of_a_step() -> None:
    for nodes, first in [("n7", "n7"), ("n[3,5-9],m1", "n3"), ("r[01-02]c[3-4]", "r01c3"), ("a,b", "a"), ("", "")]:
        assert first_node({"SLURM_STEP_NODELIST": nodes}) == first


def test_a_run_that_is_started_several_times_by_one_command_is_refused() -> None:
    with pytest.raises(ConfigurationError) as caught:
        check_one_run(_SRUN)
    text = str(caught.value)
    assert "SLURM_STEP_NUM_TASKS is 7" in text and "psdist generate slurm" in text and "env -u" in text
    check_one_run(_BATCH)
    check_one_run(_SRUN | {"PSDIST_CONNECTED_FILE": "/run/0.0"})  # A script that tests another run.

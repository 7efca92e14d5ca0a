"""What all tests share: a clean environment, hypothesis without deadlines, and proof that no process is left behind.

Deadlines are off because a test's first example may pay for an import or a compilation; the suite has a time limit.
There are two profiles: make test takes a part of the examples, and ``--hypothesis-profile=full``, by make long, more.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import psutil
import pytest

import psdist  # noqa: F401  # Before any test imports grpc: processes of data loaders are forked from this one.

hypothesis.settings.register_profile("psdist", deadline=None, max_examples=20)
hypothesis.settings.register_profile("full", deadline=None, max_examples=300)
hypothesis.settings.load_profile("psdist")

#: Inherited by every process that the tests start, however deep, so that survivors can be told from strangers.
_MARK = "PSDIST_TEST_SESSION"
#: In which a process whose parent is gone has ended, also on a machine that does much else.
_ENDING_SECONDS = 30
#: Folders of the tests that other targets than ``make test`` run, by their marker.
_PARTS = {
    "clusters": ("chaos", "integration"),
    "frameworks": ("integration/torch", "integration/frameworks", "integration/jax", "integration/ray"),
}
#: Real runs within ``make test``: one for each promise.
_RUNS = (
    "integration/project/test_docs.py::test_the_program_of_the_page_on_torch_trains",
    "integration/faults/test_failover.py::test_a_killed_server_changes_not_a_bit",
    "integration/faults/test_failover.py::test_a_killed_scheduler_stops_nobody",
    "integration/faults/test_rejoin.py::test_a_frozen_worker_takes_part_again",
    "integration/snapshots/test_snapshot_resume.py"
    "::test_a_lost_server_takes_the_run_back_to_its_snapshot_and_the_same_command_goes_on",
    "integration/launch/test_launch_run.py::test_signals_end_everything",
    "integration/launch/test_run_ends.py::test_a_run_over_tls_trains_and_ends_well_everywhere",
    "integration/collectives/test_launched.py::test_survivors_continue_with_a_killed_worker_that_starts_again",
)
_MARKERS = {Path(__file__).parent / folder: name for name, folders in _PARTS.items() for folder in folders}
#: Of Linux's headers.
_CLONE_NEWNS, _MS_REC, _MS_PRIVATE = 0x00020000, 0x4000, 1 << 18
#: Variables by which a launcher would speak to the tests themselves.
_FOREIGN = (
    "PSDIST_",
    "PET_",
    "DMLC_",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "MASTER_",
    "TORCHELASTIC_",
    "SLURM_",
    "OMPI_",
    "MPI_LOCAL",
    "MV2_",
    "JSM_",
    "PMI",
)


def pytest_configure(config: pytest.Config) -> None:
    """Check the names of the real runs, forget any launcher's variables, and mark all processes to come."""
    for file, _, test in (run.partition("::") for run in _RUNS):
        if f"def {test}(" not in (Path(__file__).parent / file).read_text():
            raise pytest.UsageError(f"{file} has no {test}, which make test is to run: mend _RUNS in tests/conftest.py")
    for name in [name for name in os.environ if name.startswith(_FOREIGN)]:
        del os.environ[name]
    os.environ[_MARK] = uuid.uuid4().hex
    # Some hundred processes import psdist, and two all of the tests: once compiled is enough. Images of containers set
    # this so that nothing lies about, but the kernels' cache does anyway.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    # Tests read the lines of scheduler and servers as a person would.
    os.environ["PSDIST_LOG_FORMAT"] = "console"
    # Runs of tests about other subjects spend no time on snapshots and leave none.
    os.environ["PSDIST_STORAGE_PATH"] = "none"
    # The death of a process is seen by its connections. A server that lives is not to be lost because others had the
    # processor for some seconds; tests of silence say how long it is.
    os.environ["PSDIST_FAILURE_TIMEOUT"] = "10"
    # Threads of torch that wait for each other spin. With more of them than processors most of the tests' time is lost.
    os.environ["OMP_NUM_THREADS"] = "1"
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell sets this for background processes; children would inherit it, and never see an interrupt.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(config, "workerinput"):
        _take_shared_memory_apart()


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """Exempt the modules of tests and libraries from garbage collection: they stay, and each full collection would
    traverse millions of their objects."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def _take_shared_memory_apart() -> None:
    """Gives this process and its children a shared-memory file system of their own: tests look for what is left there,
    and others run beside them. Only root may; without it such a test can see a socket of another's."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS) == 0:
        libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None)
        libc.mount(b"psdist-tests", b"/dev/shm", b"tmpfs", 0, None)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that take long together: those of whole clusters, and of frameworks, which take seconds to
    import."""
    for item in items:
        if item.nodeid.removeprefix("tests/").partition("[")[0] in _RUNS:
            continue
        folders = (item.path.parent, *item.path.parent.parents)
        if (marker := next((_MARKERS[folder] for folder in folders if folder in _MARKERS), None)) is not None:
            item.add_marker(marker)


@pytest.fixture(scope="session", autouse=True)
def no_process_left() -> Iterator[None]:
    """Fails the run if a process that a test started outlives the tests; ends it in any case."""
    yield
    # A compiler of kernels has the lowest priority, and ends when it learns that its server was killed.
    _, survivors = psutil.wait_procs(_survivors(os.environ[_MARK]), timeout=_ENDING_SECONDS)
    commands = [" ".join(process.cmdline()) for process in survivors]
    for process in survivors:
        process.kill()
    assert not commands, f"tests left processes behind: {commands}"


def _survivors(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(_MARK) == mark and not _is_ours(process):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return found


def _is_ours(process: psutil.Process) -> bool:
    """True for helpers of Python's multiprocessing, which live as long as the test process does."""
    return "multiprocessing" in " ".join(process.cmdline()) and process.ppid() == os.getpid()

"""One rank of a run of PyTorch's tests: ``rank.py BACKEND GATES DIRECTORY``.

GATES is the backend by whose name the tests decide whether they run: ``gloo`` or ``mpi``.

DIRECTORY/tests.json lists the tests. Each outcome is a line of DIRECTORY/RANK.jsonl. Every test has a process group and
a directory of its own, so that one that fails does not disturb the next.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import traceback
import unittest
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from tests.torch_suite.host import BackendName, open_monitored_barrier

#: Time for the slowest rank to end a test that has failed on the others.
_LIMIT: Final = timedelta(seconds=400)


def load(backend: str, gates: str) -> ModuleType:
    """Import PyTorch's tests, whose gates see the name ``gates``."""
    os.environ["BACKEND"] = gates
    os.environ["INIT_METHOD"] = "file://unused"
    from torch.testing._internal.distributed import distributed_test as tests

    tests.BACKEND = BackendName(backend)
    # Tests with groups of two ranks take any number of processes for MPI, and 8 for others.
    os.environ["BACKEND"] = "mpi"
    for names in (
        tests.PROFILING_SUPPORTED_BACKENDS,
        tests.CUDA_PROFILING_SUPPORTED_BACKENDS,
        tests.SEND_RECV_PROFILING_SUPPORTED_BACKENDS,
    ):
        names.append(backend)
    for feature in ("gpu", "cuda", "ddp", "subgroup"):
        tests.DistTestCases.backend_feature[feature].add(backend)
    open_monitored_barrier()
    return tests


def make_case(tests: ModuleType) -> type[Any]:
    """Return the class of the tests."""

    class Case(tests.TestDistBackend, tests.DistributedTest._DistTestBase):  # type: ignore[misc, name-defined]
        def _barrier(self, wait_for: int | None = None, timeout: float = 0) -> None:
            barrier(Path(os.environ["TEMP_DIR"]), int(os.environ["WORLD_SIZE"]), self.rank)

    return Case


def barrier(directory: Path, size: int, rank: int) -> None:
    """Wait until all ranks of a test are here. Raises RuntimeError if one has failed. directory: that of the test."""
    pause = threading.Event()
    number = len(list(directory.glob(f"barrier/{rank}.*")))
    (directory / "barrier" / f"{rank}.{number}").touch()
    while len(list(directory.glob(f"barrier/*.{number}"))) < size:
        if (directory / "failed").exists():
            raise RuntimeError("another rank has failed")
        pause.wait(0.02)


class Rank:
    """This process's part of the tests."""

    def __init__(self, backend: str, gates: str, directory: Path) -> None:
        import torch.distributed as dist

        self._tests = load(backend, gates)
        self._case = make_case(self._tests)
        self._backend, self._directory = backend, directory
        self._rank, self._size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._ended = dist.FileStore(str(directory / "ended"), self._size)
        self._outcomes = (directory / f"{self._rank}.jsonl").open("a", encoding="utf-8")

    def run(self, names: list[str]) -> None:
        """Run the tests in order."""
        for number, name in enumerate(names):
            self._record(name, "started", "")
            outcome, reason = self._outcome(number, name)
            if outcome == "failed":
                (self._directory / str(number) / "failed").touch()
            self._record(name, outcome, reason)
            self._ended.set(f"{number} {self._rank}", "")
            self._ended.wait([f"{number} {rank}" for rank in range(self._size)], _LIMIT)

    def _record(self, name: str, outcome: str, reason: str) -> None:
        self._outcomes.write(json.dumps([name, outcome, reason]) + "\n")
        self._outcomes.flush()

    def _outcome(self, number: int, name: str) -> tuple[str, str]:
        """Run a test. Returns its outcome, and the reason for a skip or a failure."""
        try:
            self._run(number, name)
        except unittest.SkipTest as skip:
            return "skipped", str(skip)
        except SystemExit as ended:
            skips = {skip.exit_code: skip.message for skip in self._skips()}
            return ("skipped", skips[ended.code]) if ended.code in skips else ("failed", f"exit {ended.code}")
        except BaseException as error:
            print(f"--- {name}, rank {self._rank}", file=sys.stderr)
            traceback.print_exc()
            return "failed", f"{type(error).__name__}: {error}"
        return "passed", ""

    @staticmethod
    def _skips() -> list[Any]:
        from torch.testing._internal.common_distributed import TEST_SKIPS

        return list(TEST_SKIPS.values())

    def _run(self, number: int, name: str) -> None:
        import torch.distributed as dist
        from torch.testing._internal import common_utils

        place = self._directory / str(number)
        for part in ("barrier", "test_dir", "init_dir"):
            (place / part).mkdir(parents=True, exist_ok=True)
        os.environ["TEMP_DIR"] = str(place)
        self._tests.INIT_METHOD = f"file://{place}/init_dir/shared"
        case = self._case(name)
        if getattr(getattr(self._case, name), "__unittest_skip__", False):
            raise unittest.SkipTest(getattr(self._case, name).__unittest_skip_why__)
        case.rank, case.file_name = self._rank, str(place / "store")
        limit = self._tests.CUSTOM_PG_TIMEOUT.get(name, self._tests.default_pg_timeout)
        dist.init_process_group(
            self._backend, init_method=f"file://{case.file_name}", rank=self._rank, world_size=self._size,
            timeout=timedelta(seconds=limit),
        )  # fmt: skip
        try:
            case._barrier()
            common_utils.set_rng_seed()
            getattr(case, name)()
            case._barrier()
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()


if __name__ == "__main__":
    _directory = Path(sys.argv[3])
    Rank(sys.argv[1], sys.argv[2], _directory).run(json.loads((_directory / "tests.json").read_text(encoding="utf-8")))

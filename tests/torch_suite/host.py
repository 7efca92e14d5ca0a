"""Host of the tests of one file of PyTorch: ``host.py BACKEND FILE OUTCOMES [NAME...]``.

Tests of the names were run before. Each outcome is a line of the file OUTCOMES.

For the backend ``psdist`` every group that the tests ask of gloo is one of psdist, and nothing else is changed. Ranks
are forked from this process, which has imported their modules, with both backends.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import traceback
import unittest
from collections.abc import Iterator
from multiprocessing import context
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final
from unittest import mock

#: Seconds that the ranks of a test may take: as many as PyTorch gives them.
_LIMIT: Final = 300


class BackendName(str):
    """Name of a backend that the tests also take for gloo's, because both run the same tests."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return other == "gloo" or str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


def use_psdist() -> None:
    """Give a group of psdist to whatever asks for one of gloo."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    from psdist import torch_backend
    from psdist.process_group.link_group import LinkGroup, make_group

    torch_backend.register()
    make_group_of_torch, name_of = c10d._new_process_group_helper, c10d.get_backend

    def new_group(size: int, rank: int, ranks: list[int], backend: Any, *args: Any, **keywords: Any) -> Any:
        name = "psdist" if str(backend) in ("gloo", "undefined") else str(backend).replace("gloo", "psdist")
        return make_group_of_torch(size, rank, ranks, c10d.Backend(name), *args, **keywords)

    class Gloo(c10d.ProcessGroupGloo):
        """gloo's constructor, with the options and network devices of gloo, which a group of psdist does not need."""

        def __new__(cls, store: Any, rank: int, size: int, options: Any = None, timeout: Any = None) -> Any:
            limit = c10d.default_pg_timeout if options is None else options._timeout
            return make_group(
                SimpleNamespace(
                    store=store, group_rank=rank, group_size=size, global_ranks_in_group=[], timeout=timeout or limit
                ),
                None,
            )

    def get_backend(group: Any = None) -> str:
        name = name_of(group)
        return BackendName(name) if name == "psdist" else name

    LinkGroup.create_device = c10d.ProcessGroupGloo.create_device
    c10d._new_process_group_helper = new_group
    dist.ProcessGroupGloo = Gloo
    dist.get_backend = get_backend
    open_monitored_barrier()


def open_monitored_barrier() -> None:
    """Let ``dist.monitored_barrier``, which refuses every name but gloo's, call the method of any group."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    gated = distributed_c10d.monitored_barrier

    def opened(*args: Any, **kwargs: Any) -> None:
        with mock.patch.object(distributed_c10d, "get_backend", return_value="gloo"):
            gated(*args, **kwargs)

    dist.monitored_barrier = opened


def fork_ranks() -> None:
    """Let the tests fork their ranks instead of starting Python for each, which takes seconds."""
    import torch

    torch.set_num_threads(1)  # OpenMP with more would wait for threads that a fork does not have.
    context._concrete_contexts["spawn"] = context._concrete_contexts["fork"]


def tests_in(suite: unittest.TestSuite) -> Iterator[unittest.TestCase]:
    """Yield the tests of a suite."""
    for test in suite:
        if isinstance(test, unittest.TestSuite):
            yield from tests_in(test)
        else:
            yield test


class Outcomes(unittest.TestResult):
    """Outcomes as lines of a file. A test that has none ended the process."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._file = path.open("a", encoding="utf-8")

    def _write(self, test: Any, outcome: str, reason: str = "") -> None:
        self._file.write(json.dumps([test.id().partition(".")[2], outcome, reason]) + "\n")
        self._file.flush()

    # unittest calls these methods by name.

    def startTest(self, test: Any) -> None:
        super().startTest(test)
        self._write(test, "started")

    def addSuccess(self, test: Any) -> None:
        self._write(test, "passed")

    def addSkip(self, test: Any, reason: str) -> None:
        self._write(test, "skipped", reason)

    def addFailure(self, test: Any, error: Any) -> None:
        self.addError(test, error)

    def addError(self, test: Any, error: Any) -> None:
        print(f"--- {test.id()}", file=sys.stderr)
        text = "".join(traceback.format_exception(*error))
        print(text, file=sys.stderr, flush=True)
        self._write(test, "failed", text)

    addExpectedFailure = addUnexpectedSuccess = addSuccess


def main(backend: str, file: str, outcomes: str, *before: str) -> None:
    """Run the tests of a file, but not those with the names ``before``."""
    os.environ["DISTRIBUTED_TESTS_DEFAULT_TIMEOUT"] = str(_LIMIT)
    os.environ["BACKEND"] = "gloo"
    path = Path(file)
    sys.argv = [file]
    sys.path[:0] = [str(path.parent), str(path.parents[len(path.parts) - path.parts.index("test") - 2])]
    fork_ranks()
    if backend == "psdist":
        use_psdist()
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = unittest.defaultTestLoader.loadTestsFromModule(module)
    chosen = [test for test in tests_in(found) if test.id().partition(".")[2] not in before]
    unittest.TestSuite(chosen).run(Outcomes(Path(outcomes)))


if __name__ == "__main__":
    main(*sys.argv[1:])

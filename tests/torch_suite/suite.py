"""Runs of PyTorch's tests: starts the ranks under ``psdist run``, and merges their outcomes."""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.support.tree import ROOT
from tests.torch_suite import rank

_SECONDS: Final = 3600


@dataclass(frozen=True)
class Outcome:
    """Outcome of a test: passed, failed or skipped. reason: of a failure or skip."""

    outcome: str
    reason: str = ""


class KeptOutcomes:
    """Outcomes of earlier runs, in a file of their own for each test file and backend.

    They are valid for the same sources only: those of the runner, the version of torch, and for psdist its own code.
    resume: True if valid outcomes replace a run; otherwise they are only written.
    """

    def __init__(self, directory: Path, resume: bool) -> None:
        self._directory, self._resume = directory, resume
        runner = [ROOT / "tests/torch_suite" / name for name in ("host.py", "rank.py", "suite.py")]
        code = [path for place in ("psdist", "servers") for path in (ROOT / place).rglob("*.py")]
        self._digests = {"gloo": _digest(runner), "psdist": _digest(runner + code)}

    def get(self, backend: str, name: str, run: Callable[[], Mapping[str, Outcome]]) -> dict[str, Outcome]:
        """Return the outcomes of the tests in ``name``: kept ones, or those of ``run``, which are kept then."""
        path = self._directory / f"{name.replace('/', '.')}.{backend}.json"
        if self._resume and path.exists():
            digest, outcomes = json.loads(path.read_text(encoding="utf-8"))
            if digest == self._digests[backend]:
                return {test: Outcome(*outcome) for test, outcome in outcomes.items()}
        found = dict(run())
        outcomes = {test: (outcome.outcome, outcome.reason) for test, outcome in found.items()}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".new").write_text(json.dumps([self._digests[backend], outcomes]), encoding="utf-8")
        path.with_suffix(".new").replace(path)
        return found


def _digest(paths: Sequence[Path]) -> str:
    """Return a digest of torch's version and the content of files."""
    digest = hashlib.sha256(importlib.metadata.version("torch").encode())
    for path in sorted(paths):
        digest.update(b"%s %d " % (bytes(path.relative_to(ROOT)), path.stat().st_size) + path.read_bytes())
    return digest.hexdigest()


def names() -> list[str]:
    """Return the names of all tests, read from PyTorch's source: an import would need the environment of a rank."""
    spec = importlib.util.find_spec("torch.testing._internal.distributed.distributed_test")
    assert spec is not None and spec.origin is not None
    module = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    (tests,) = (node for node in ast.walk(module) if isinstance(node, ast.ClassDef) and node.name == "_DistTestBase")
    functions = (node.name for node in tests.body if isinstance(node, ast.FunctionDef))
    return sorted({name for name in functions if name.startswith("test_")})


def run(backend: str, tests: Sequence[str], world_size: int, log: Path) -> dict[str, Outcome]:
    """Run tests with a backend: those for gloo, and those for MPI. log: file for the output of the ranks."""
    found = run_gated(backend, "gloo", tests, world_size, log)
    for_mpi = [name for name, outcome in found.items() if outcome.reason.startswith("Only MPI")]
    return dict(sorted((found | run_gated(backend, "mpi", for_mpi, world_size, log)).items()))


def run_gated(backend: str, gates: str, tests: Sequence[str], world_size: int, log: Path) -> dict[str, Outcome]:
    """Run tests with a backend. gates: the backend whose tests they are.

    A test that ends its run has failed, and the others continue in another run.
    """
    found: dict[str, Outcome] = {}
    while remaining := [name for name in tests if name not in found]:
        with tempfile.TemporaryDirectory() as directory:
            _start(backend, gates, remaining, world_size, Path(directory), log)
            ended = merge(Path(directory), world_size)
        found |= ended or {remaining[0]: Outcome("failed", "the run did not start")}
    return found


def _start(backend: str, gates: str, tests: Sequence[str], world_size: int, directory: Path, log: Path) -> None:
    (directory / "tests.json").write_text(json.dumps(list(tests)), encoding="utf-8")
    command = [sys.executable, "-W", "ignore", "-m", "psdist", "run", "--max-restarts", "0"]
    command += ["--nproc-per-node", str(world_size), rank.__file__, backend, gates, str(directory)]
    environment = os.environ | {"TMPDIR": str(directory), "PYTHONPATH": str(ROOT)}
    with log.open("a", encoding="utf-8") as output:
        subprocess.run(command, stdout=output, stderr=output, timeout=_SECONDS, check=False, env=environment)


def merge(directory: Path, world_size: int) -> dict[str, Outcome]:
    """Return the outcomes of the tests that have started, from those of the ranks."""
    by_test: dict[str, list[Outcome]] = {}
    for number in range(world_size):
        path = directory / f"{number}.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        last = {name: Outcome(outcome, reason) for name, outcome, reason in map(json.loads, lines)}
        for name, outcome in last.items():
            by_test.setdefault(name, []).append(outcome)
    return {name: _merged(outcomes) for name, outcomes in by_test.items()}


def _merged(outcomes: Sequence[Outcome]) -> Outcome:
    """Return the worst outcome of the ranks: one that did not end, a failure, a pass, and a skip by all."""
    order = {"started": 0, "failed": 1, "passed": 2, "skipped": 3}
    worst = min(outcomes, key=lambda outcome: order[outcome.outcome])
    return Outcome("failed", "the process ended") if worst.outcome == "started" else worst


def worse(gloo: Mapping[str, Outcome], psdist: Mapping[str, Outcome]) -> list[str]:
    """Return the tests that pass with gloo and do not pass with psdist."""
    missing = Outcome("failed", "the test did not run")
    return [name for name in gloo if gloo[name].outcome == "passed" != psdist.get(name, missing).outcome]

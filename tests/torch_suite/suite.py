"""Runs of PyTorch's tests: starts the ranks under ``psdist run``, and merges their outcomes."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.test_tidy import ROOT
from tests.torch_suite import rank

_SECONDS: Final = 3600


@dataclass(frozen=True)
class Outcome:
    """Outcome of a test: passed, failed or skipped. reason: of a failure or skip."""

    outcome: str
    reason: str = ""


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

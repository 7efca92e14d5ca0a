"""Run PyTorch's tests with both backends, and write ``docs/internals/torch-suite.md``: ``make torch-suite``.

The exit status is 1 if a test passes with gloo and not with psdist, unless ``REASONS`` has a reason for it. PATTERN as
an argument runs the files and the tests of the wheel whose names contain it, and writes no page.

The outcomes of each file are kept in ``.torch-suite/outcomes``. With ``--resume`` a file is not run again whose
outcomes are those of the present sources: after an interruption, or with gloo after a change of psdist.

Without PyTorch's source only the tests of the wheel are run, a line says why, and nothing is written.
"""

from __future__ import annotations

import sys
import tempfile
from functools import partial
from pathlib import Path

import torch

from tests.support.tree import ROOT
from tests.torch_suite import files, suite
from tests.torch_suite.page import Files, Outcomes, page
from tests.torch_suite.suite import KeptOutcomes

_RANKS = 4
_BACKENDS = ("gloo", "psdist")


def main(pattern: str = "", *, resume: bool = False) -> int:
    """Run the tests. Returns the exit status."""
    kept = KeptOutcomes(files.DIRECTORY / "outcomes", resume)
    place, files_version = _source()
    chosen = [name for name in files.FILES if pattern in name and files_version]
    with tempfile.TemporaryDirectory() as directory:
        found = {name: _compared(kept, place, name, Path(directory)) for name in chosen}
        gloo, psdist = _compared_wheel(kept, pattern, Path(directory))
        is_worse = _report("the wheel", gloo, psdist)
        if is_worse and (log := Path(directory, "psdist")).exists():
            print(log.read_text(encoding="utf-8"), file=sys.stderr)
        for name, pair in found.items():
            is_worse |= _report(name, *pair)
    if not pattern and files_version:
        by_backend = [{name: pair[number] for name, pair in found.items()} for number in range(2)]
        version = torch.__version__.partition("+")[0]
        text = page(gloo, psdist, Files(files_version, *by_backend), version, str(_RANKS))
        (ROOT / "docs/internals/torch-suite.md").write_text(text, encoding="utf-8")
    return is_worse


def _source() -> tuple[Path, str]:
    """Return the folder of PyTorch's test files, and their version; empty if they cannot be had."""
    try:
        return files.source()
    except files.SourceUnavailableError as error:
        print(f"the files of PyTorch's source are skipped: {error}")
        return Path(), ""


def _compared(kept: KeptOutcomes, place: Path, name: str, directory: Path) -> tuple[Outcomes, Outcomes]:
    def run(backend: str) -> Outcomes:
        return files.run(backend, place / name, directory / f"{name.replace('/', '.')}.{backend}")

    gloo, psdist = (kept.get(backend, name, partial(run, backend)) for backend in _BACKENDS)
    print(f"{name}: {len(gloo)} tests", flush=True)
    return gloo, psdist


def _compared_wheel(kept: KeptOutcomes, pattern: str, directory: Path) -> tuple[Outcomes, Outcomes]:
    tests = [name for name in suite.names() if pattern in name]
    runs = {backend: partial(suite.run, backend, tests, _RANKS, directory / backend) for backend in _BACKENDS}
    gloo, psdist = (run() if pattern else kept.get(backend, "the wheel", run) for backend, run in runs.items())
    return gloo, psdist


def _report(where: str, gloo: Outcomes, psdist: Outcomes) -> bool:
    """Print the tests that are worse with psdist. Returns True if there are some without a reason."""
    worse = [name for name in suite.worse(gloo, psdist) if name not in files.REASONS]
    for name in worse:
        print(f"{where}: {name} passes with gloo, and with psdist: {psdist.get(name)}")
    print(f"{where}: {len(gloo)} tests, {len(worse)} fail with psdist and pass with gloo")
    return bool(worse)


if __name__ == "__main__":
    sys.exit(main(*(argument for argument in sys.argv[1:] if argument != "--resume"), resume="--resume" in sys.argv))

"""The page ``docs/internals/torch-suite.md``: the outcome of each of PyTorch's tests with both backends."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Final, NamedTuple

from tests.torch_suite.files import REASONS
from tests.torch_suite.suite import Outcome, worse

Outcomes = Mapping[str, Outcome]

_HEAD: Final = """# PyTorch's tests of a backend

`make torch-suite` runs PyTorch's own tests with the backend `psdist` and with gloo, on the CPU, and writes this page.
It fails if a test passes with gloo and not with psdist, unless a reason is known.

PyTorch {version}.

## Files of PyTorch's source

The files are from Debian's source package `pytorch` {files_version}, since PyTorch's wheel lacks them. A test that
fails with both, for example because PyTorch {version} has changed since, says nothing about either. Ranks are forked,
as the tests do it. For psdist each group that a test asks of gloo is one of psdist: `init_process_group`, `new_group`,
`ProcessGroupGloo`. `torch.distributed.get_backend` gives tests both names. Nothing else of them is changed.

Numbers of tests by outcome:

{rows}

{reasons}

## Tests in PyTorch's wheel

`DistributedTest._DistTestBase` in `torch.testing._internal.distributed.distributed_test`, in {sizes} processes that
`psdist run` starts. To tests that ask for the name of the backend psdist answers as gloo, and, in those for MPI only,
as MPI. `torch.distributed.monitored_barrier` refuses every name but gloo's; its tests call the group's method instead.

| outcome | gloo | psdist |
|---|---|---|
"""


class Files(NamedTuple):
    """Outcomes of test files, by file. version: of PyTorch's source."""

    version: str
    gloo: Mapping[str, Outcomes]
    psdist: Mapping[str, Outcomes]


def page(gloo: Outcomes, psdist: Outcomes, files: Files, version: str, sizes: str) -> str:
    """Return the page. version: of PyTorch. sizes: numbers of processes."""
    counts = [Counter(outcome.outcome for outcome in found.values()) for found in (gloo, psdist)]
    rows = [f"| {kind} | {counts[0][kind]} | {counts[1][kind]} |" for kind in ("passed", "failed", "skipped")]
    head = _HEAD.format(
        version=version, sizes=sizes, files_version=files.version, rows=_rows(files), reasons=_reasons(files)
    )
    parts = [head + "\n".join(rows)]
    passed = [name for name, outcome in psdist.items() if outcome.outcome == "passed"]
    both = [name for name in passed if gloo[name].outcome == "passed"]
    parts += ["### Passed with both", _listed(both)]
    parts += ["### Passed with psdist only", _listed([name for name in passed if name not in both])]
    if failed := [name for name, outcome in psdist.items() if outcome.outcome == "failed"]:
        parts += ["### Failed with psdist", _table({name: psdist[name] for name in failed})]
    parts += ["### Skipped, by PyTorch's reason", _table({n: o for n, o in psdist.items() if o.outcome == "skipped"})]
    return "\n\n".join(parts) + "\n"


#: Outcomes with gloo and with psdist, and their name on the page.
_CASES: Final = {
    ("passed", "passed"): "passed with both",
    ("failed", "failed"): "failed with both",
    ("passed", "failed"): "passed with gloo only",
    ("failed", "passed"): "passed with psdist only",
}


def _rows(files: Files) -> str:
    """Return a line for each file, and one for all."""
    total: Counter[tuple[str, str]] = Counter()
    lines = []
    for file, gloo in files.gloo.items():
        psdist = files.psdist[file]
        counts = Counter((outcome.outcome, psdist[name].outcome) for name, outcome in gloo.items() if name in psdist)
        total += counts
        lines.append(_row(f"`{file}`", counts))
    return "\n".join([*lines, _row("all", total)])


def _row(name: str, counts: Counter[tuple[str, str]]) -> str:
    skipped = sum(count for pair, count in counts.items() if "skipped" in pair)
    found = [f"{counts[pair]} {text}" for pair, text in _CASES.items() if counts[pair]]
    return f"- {name}: {', '.join([*found, *([f'{skipped} skipped'] if skipped else [])])}"


def _reasons(files: Files) -> str:
    """Return a table of the differences by reason."""
    by_reason: dict[str, list[str]] = defaultdict(list)
    for file, gloo in files.gloo.items():
        for name in worse(gloo, files.psdist[file]):
            by_reason[REASONS.get(name, "none")].append(f"`{name}`")
    rows = [f"| {', '.join(names)} | {reason} |" for reason, names in by_reason.items()]
    return (
        "\n".join(["| passes with gloo only | reason |", "|---|---|", *rows])
        if rows
        else "No test passes with gloo only."
    )


def _listed(names: list[str]) -> str:
    return ", ".join(f"`{name.removeprefix('test_')}`" for name in sorted(names)) or "None."


def _table(outcomes: Outcomes) -> str:
    """Return a table of names by reason."""
    by_reason: dict[str, list[str]] = defaultdict(list)
    for name, outcome in outcomes.items():
        by_reason[outcome.reason.splitlines()[0].replace("|", "/")].append(name)
    rows = sorted(by_reason.items(), key=lambda row: (-len(row[1]), row[0]))
    lines = [f"| {reason} | {len(names)} | {_listed(names)} |" for reason, names in rows]
    return "\n".join(["| reason | tests | names |", "|---|---|---|", *lines])

"""The page ``docs/torch-suite.md``: the outcome of each of PyTorch's tests with both backends."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping

from tests.torch_suite.suite import Outcome

_HEAD = """# PyTorch's tests of a backend

PyTorch's wheel has the tests by which its own backends are tested: `DistributedTest._DistTestBase` in
`torch.testing._internal.distributed.distributed_test`. `python -m tests.torch_suite` runs each of them with the backend
`psdist` and with gloo, on the CPU, in {sizes} processes that `psdist run` starts, and writes this page. It fails if a
test passes with gloo and not with psdist.

Most tests ask for the name of the backend before they run. psdist gives the answers of gloo there, and, for the tests
that are for MPI only, those of MPI. Nothing else of the tests is changed. `torch.distributed.monitored_barrier` itself
refuses every name but gloo's; its tests call the method of the group instead.

PyTorch {version}.

| outcome | gloo | psdist |
|---|---|---|
"""


def page(gloo: Mapping[str, Outcome], psdist: Mapping[str, Outcome], version: str, sizes: str) -> str:
    """Return the page. version: of PyTorch. sizes: numbers of processes."""
    counts = [Counter(outcome.outcome for outcome in found.values()) for found in (gloo, psdist)]
    rows = [f"| {kind} | {counts[0][kind]} | {counts[1][kind]} |" for kind in ("passed", "failed", "skipped")]
    parts = [_HEAD.format(version=version, sizes=sizes) + "\n".join(rows)]
    passed = [name for name, outcome in psdist.items() if outcome.outcome == "passed"]
    both = [name for name in passed if gloo[name].outcome == "passed"]
    parts += ["## Passed with both", _listed(both)]
    parts += ["## Passed with psdist only", _listed([name for name in passed if name not in both])]
    if failed := [name for name, outcome in psdist.items() if outcome.outcome == "failed"]:
        parts += ["## Failed with psdist", _table({name: psdist[name] for name in failed})]
    parts += ["## Skipped, by PyTorch's reason", _table({n: o for n, o in psdist.items() if o.outcome == "skipped"})]
    return "\n\n".join(parts) + "\n"


def _listed(names: list[str]) -> str:
    return ", ".join(f"`{name.removeprefix('test_')}`" for name in sorted(names)) or "None."


def _table(outcomes: Mapping[str, Outcome]) -> str:
    """Return a table of names by reason."""
    by_reason: dict[str, list[str]] = defaultdict(list)
    for name, outcome in outcomes.items():
        by_reason[outcome.reason.splitlines()[0].replace("|", "/")].append(name)
    rows = sorted(by_reason.items(), key=lambda row: (-len(row[1]), row[0]))
    lines = [f"| {reason} | {len(names)} | {_listed(names)} |" for reason, names in rows]
    return "\n".join(["| reason | tests | names |", "|---|---|---|", *lines])

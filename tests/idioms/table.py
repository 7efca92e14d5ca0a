"""The table of idioms: each with its declared outcome, and the comparison of outcomes with torch.

``tests/integration/torch/test_torch_idioms.py`` runs all of them and compares outcomes with the declared ones.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from psdist.client.context import Context
from tests.idioms.script import GLOO, OWN, TORCH, Script
from tests.support.tree import ROOT

#: Largest relative difference, by L2 norms, that the rounding of float32 sums explains.
TOLERANCE: Final = 1e-6


@dataclass(frozen=True)
class Outcome:
    """Outcome of an idiom.

    text: clause for the page.
    refusal: pattern of a refusal's message.
    reference: face to compare with, if it is not the idiom's.
    tolerance: largest relative difference, by L2 norms.
    """

    text: str
    refusal: str = ""
    reference: str = ""
    tolerance: float = TOLERANCE

    def complaint(self, result: Result) -> str:
        """Return the difference between this outcome and a result; empty if there is none."""
        if self.refusal:
            found = re.search(self.refusal, result.error)
            return "" if found else f"not refused by {self.refusal!r}: {result}"
        if result.error:
            return f"refused: {result.error}"
        return "" if result.difference <= self.tolerance else f"differs from torch by {result.difference:.2g}"


#: The weights equal torch's up to rounding.
EQUAL = Outcome("equal")
#: Each worker's own gradient is changed before the mean, and a warning says so.
OWN_GRADIENT = Outcome("each worker's own gradient, with a warning that names `average_gradients()`", reference=OWN)

#: Weights of 16 bits differ by their rounding.
ROUNDED = Outcome("equal up to the rounding of bfloat16: gradients are averaged in float32", tolerance=2**-7)
ROUNDED_MASTERS = Outcome("equal up to the rounding of bfloat16: the servers keep float32", tolerance=2**-7)


def refused(pattern: str, remedy: str) -> Outcome:
    """Return the outcome of a script that is refused. pattern: of the message; remedy: a clause for the page."""
    return Outcome(f"refused: {remedy}", pattern)


@dataclass(frozen=True)
class Result:
    """Result of a script: the difference from torch, or the error that refused it."""

    difference: float = 0.0
    error: str = ""


@dataclass(frozen=True)
class Idiom:
    """One row of the table.

    optimizer, ddp: outcomes with one worker and with two.
    reference: face that two workers are compared with; GLOO if the workers' parts do not add up to one process's batch.
    """

    title: str
    section: str
    function: Callable[[Script], Any]
    optimizer: tuple[Outcome, Outcome]
    ddp: tuple[Outcome, Outcome]
    reference: str
    note: str

    @property
    def name(self) -> str:
        """Name of the function, which is part of the names of parameter sets."""
        return self.function.__name__


#: Modules of this package with idioms, which are the sections of the page, and their headings.
SECTIONS: Final = {
    "backward": "Backward passes and gradients",
    "schedules": "Optimizers, groups and schedulers",
    "models": "Models",
    "weights": "Weights",
    "precision": "Dtypes and devices",
    "loops": "Loops",
}
#: All idioms by name, in the order of the page.
IDIOMS: Final[dict[str, Idiom]] = {}

Expected = Outcome | tuple[Outcome, Outcome]


def idiom(
    title: str, *, optimizer: Expected = EQUAL, ddp: Expected = EQUAL, reference: str = TORCH, note: str = ""
) -> Callable[[Callable[[Script], Any]], Callable[[Script], Any]]:
    """Return a decorator that adds a function to the table. title: Markdown; note: of changed lines, or a remedy."""

    def add(function: Callable[[Script], Any]) -> Callable[[Script], Any]:
        assert function.__name__ not in IDIOMS, function.__name__
        section = function.__module__.rpartition(".")[2]
        IDIOMS[function.__name__] = Idiom(
            title, section, function, _pair(optimizer), _pair(ddp), reference, note
        )  # fmt: skip
        return function

    return add


def load() -> dict[str, Idiom]:
    """Import all sections and return their idioms by name."""
    from tests.idioms import backward, loops, models, precision, schedules, weights  # They import this module.

    assert [one.__name__.rpartition(".")[2] for one in (backward, schedules, models, weights, precision, loops)] == [
        *SECTIONS
    ]
    return IDIOMS


def run(one: Idiom, face: str, context: Context | None, rank: int = 0, world: int = 1) -> list[Tensor]:
    """Run an idiom's script and return copies of the tensors to compare. The errors of the script pass."""
    with Script(face, context, one.name, rank, world).running() as script:
        return [tensor.detach().clone() for tensor in _tensors(one.function(script))]


def compare(one: Idiom, face: str, context: Context, rank: int = 0, world: int = 1) -> Result:
    """Run an idiom's script with psdist and its reference, and return the result."""
    try:
        mine = run(one, face, context, rank, world)
    except Exception as error:  # Also those of torch and of Python: the page declares which.
        return Result(error=f"{type(error).__name__}: {error}")
    reference = getattr(one, face)[world - 1].reference or (one.reference if world > 1 else TORCH)
    other = run(one, TORCH, None) if reference == TORCH else run(one, reference, None, rank, world)
    return Result(difference(mine, other))


def difference(some: Iterable[Tensor], others: Iterable[Tensor]) -> float:
    """Return the largest relative difference of a tensor, by L2 norms. NaN counts as infinite."""
    largest = 0.0
    for one, other in zip(some, others, strict=True):
        a, b = one.to(torch.complex128), other.to(torch.complex128)
        assert a.shape == b.shape
        distance = float((a - b).abs().norm() / max(float(b.abs().norm()), 1e-6))
        largest = max(largest, distance if distance == distance else float("inf"))
    return largest


def _tensors(result: Any) -> list[Tensor]:
    if isinstance(result, nn.Module):
        return list(result.parameters())
    if isinstance(result, Tensor):
        return [result]
    return [tensor for one in result for tensor in _tensors(one)]


def _pair(expected: Expected) -> tuple[Outcome, Outcome]:
    return expected if isinstance(expected, tuple) else (expected, expected)


# --- the page ---------------------------------------------------------------------------------------------------------

PAGE: Final = ROOT / "docs/torch-features.md"
_START: Final = "<!-- idioms: python -m tests.idioms -->\n"
_END: Final = "<!-- end of idioms -->\n"


def page() -> str:
    """Return the text of the page, with the idioms as the table has them."""
    head, _, rest = PAGE.read_text(encoding="utf-8").partition(_START)
    sections = "".join(map(_section, SECTIONS))
    return f"{head}{_START}{sections}\n{_END}{rest.partition(_END)[2]}"


def _section(section: str) -> str:
    """Return a table of the idioms that are not equal with both classes, and a list of the others."""
    idioms = [one for one in load().values() if one.section == section]
    equal = [one for one in idioms if {*one.optimizer, *one.ddp} == {EQUAL}]
    rows = [_row(one) for one in idioms if one not in equal]
    head = ["| in the script | `DistributedOptimizer` | `DistributedDataParallel` |", "|---|---|---|"]
    listed = ["Equal with both classes:", "", *(f"- {_title(one)}" for one in equal)]
    return "\n".join([f"\n### {SECTIONS[section]}\n", *head, *rows, "", *listed, ""])


def _row(one: Idiom) -> str:
    return f"| {_title(one)} | {_cell(one.optimizer)} | {_cell(one.ddp)} |".replace("||", "\\|\\|")


def _title(one: Idiom) -> str:
    title = one.title + (" \\*" if one.reference == GLOO else "") + (f" ({one.note})" if one.note else "")
    return title[:1].upper() + title[1:]


def _cell(outcomes: tuple[Outcome, Outcome]) -> str:
    return "; ".join(dict.fromkeys(outcome.text for outcome in outcomes))

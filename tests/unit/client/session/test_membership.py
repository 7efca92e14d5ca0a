"""Work that its incarnation does not survive: run again, dropped, or refused; and the single place that decides it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import psdist
from psdist.client.session.membership import drop_when_fenced, run_in_incarnation, unless_dropped
from psdist.errors import FencedError, InvalidArgumentError

PRODUCT = Path(psdist.__file__).parent
CATCHING = PRODUCT / "client" / "session" / "membership.py"


class Work:
    """Work that fails with FencedError in the first incarnations."""

    def __init__(self, failures: int) -> None:
        self.incarnation = 1
        self.fenced: list[int] = []
        self._failures = failures

    async def run(self) -> str:
        if self.incarnation <= self._failures:
            raise FencedError(f"incarnation {self.incarnation} was silent")
        return f"done by {self.incarnation}"

    async def rejoin(self, error: FencedError, incarnation: int) -> bool:
        assert error.message == f"incarnation {incarnation} was silent"
        self.fenced.append(incarnation)
        self.incarnation += 1
        return True

    def current(self) -> int:
        return self.incarnation


@pytest.mark.parametrize("failures", [0, 1, 3])
async def test_work_runs_again_in_each_next_incarnation(failures: int) -> None:
    work = Work(failures)
    assert await run_in_incarnation(work.run, work.rejoin, work.current) == f"done by {failures + 1}"
    assert work.fenced == list(range(1, failures + 1))


async def test_dropped_work_has_no_result() -> None:
    assert await run_in_incarnation(Work(1).run, drop_when_fenced) is None
    assert await run_in_incarnation(Work(0).run, drop_when_fenced) == "done by 1"


async def test_what_forbids_both_is_raised() -> None:
    async def refuse(error: FencedError, _: int) -> bool:
        raise FencedError(f"not again: {error.message}") from None

    with pytest.raises(FencedError, match="not again: incarnation 1 was silent"):
        await run_in_incarnation(Work(1).run, refuse)


async def test_other_errors_are_not_caught() -> None:
    async def fail() -> None:
        raise InvalidArgumentError("no")

    with pytest.raises(InvalidArgumentError):
        await run_in_incarnation(fail, drop_when_fenced)


def test_a_blocking_call_on_a_dropped_step_has_no_result() -> None:
    def fenced() -> int:
        raise FencedError("dropped")

    assert unless_dropped(fenced) is None and unless_dropped(lambda: 3) == 3


def handlers(tree: ast.AST) -> int:
    """Return how many handlers of a module name FencedError."""
    return sum(
        isinstance(node, ast.ExceptHandler) and node.type is not None and "FencedError" in ast.unparse(node.type)
        for node in ast.walk(tree)
    )


def test_one_module_catches_the_end_of_an_incarnation() -> None:
    found = {path: handlers(ast.parse(path.read_text(encoding="utf-8"))) for path in PRODUCT.rglob("*.py")}
    assert {path: count for path, count in found.items() if count} == {CATCHING: 2}

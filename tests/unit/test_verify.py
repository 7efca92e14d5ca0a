"""``make verify`` runs all of its parts even if some fail, and lists their results in its table."""

from __future__ import annotations

import io
import sys

import pytest
from rich.console import Console

from tests import verify

_PROGRAM = """
import os, sys
print("===== 3 passed, 1 skipped in 0.12s =====", flush=True)
sys.stderr.buffer.write(b"bytes that are no text: \\xff\\n")
sys.exit(os.environ.get("KILLS") == "7")
"""


def shown(results: list[verify.Result], numbers: dict[str, str]) -> str:
    out = io.StringIO()
    Console(file=out, width=140).print(verify.table(results, numbers))
    return out.getvalue()


def test_a_part_is_shown_as_it_runs_and_in_the_table(capfd: pytest.CaptureFixture[str]) -> None:
    results = []
    for kills in ("6", "7"):
        numbers = verify.NUMBERS | {"KILLS": kills}
        results.append(verify.run(verify.Part("chaos", "{KILLS} faults"), numbers, (sys.executable, "-c", _PROGRAM)))
    assert [result.status for result in results] == [0, 1]
    out = capfd.readouterr().out
    assert out.count("3 passed") == 2 and out.count("bytes that are no text") == 2
    table = shown(results, numbers)
    assert "7 faults" in table and table.count("3 passed, 1 skipped") == 2
    assert "FAILED, status 1" in table and "1 FAILED" in table


def test_the_end_of_all_is_that_of_the_worst(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran = []

    def run(part: verify.Part, environ: dict[str, str]) -> verify.Result:
        assert environ["ROUNDS"] == "5" and environ["KILLS"] == verify.NUMBERS["KILLS"]
        ran.append(part.target)
        return verify.Result(part, int(part.target == "long" and failing), 1.0, ())

    monkeypatch.setattr(verify, "run", run)
    monkeypatch.setenv("ROUNDS", "5")
    monkeypatch.delenv("KILLS", raising=False)
    for failing in (True, False):
        assert verify.main() == failing
        assert ran == ["test", "clusters", "frameworks", "long", "torch-suite", "sim", "chaos", "fuzz", "bench"]
        assert len(capsys.readouterr().out.splitlines()) > len(ran)
        ran.clear()


def test_the_parts_are_targets_and_the_numbers_are_the_makefiles() -> None:
    makefile = (verify.ROOT / "Makefile").read_text(encoding="utf-8")
    for part in verify.PARTS:
        assert f"\n{part.target}: " in makefile
    for number in verify.NUMBERS:
        assert f"\n{number} ?= " in makefile and f"$({number})" in makefile

"""No event loop of a run stands still for long, whatever the size of the model: 256 MiB in 2,000 tensors, half of which
an override holds for.

Judged by the processor time of the loop's thread in one turn, which a busy machine changes little. Sizes at which a
mistake cannot be missed are left to ``python -m benchmarks.blocking --bytes 4294967296`` and ``--tensors 20000``.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import blocking

#: Before memory was made in threads, servers worked for 300 ms, and workers for 800.
LIMIT_SECONDS = 0.1
CASES = [
    (2, "shm"),
    # The same with other carriers.
    *(pytest.param(copies, transport, marks=pytest.mark.long) for copies, transport in ((1, "shm"), (2, "tcp"))),
]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("copies", "transport"), CASES)
def test_no_loop_works_for_long_in_one_turn(tmp_path: Path, copies: int, transport: str) -> None:
    case = blocking.Case(256 << 20, 2000, copies, transport)
    for number, phases in enumerate((["snapshot", "kill", "drain"], ["restore"])):
        monitored = tmp_path / f"monitor-{number}"
        monitored.mkdir()
        status, text = blocking.start(case, tmp_path, monitored, phases, steps=3)
        assert status == 0 and "expelled" not in text, text
        roles = {file.stem.partition("-")[0] for file in monitored.glob("*.jsonl")}
        assert roles == {"launcher", "scheduler", "server", "worker"}
        working = {
            file.name: max(turns, key=lambda turn: float(turn["cpu"]))
            for file in monitored.glob("*.jsonl")
            if (turns := blocking.turns_in(file))
        }
        assert not {name: turn for name, turn in working.items() if turn["cpu"] > LIMIT_SECONDS}

"""``psdist.launch`` with real processes: results, errors, Ctrl-C, and that nothing is left of a run.

Scheduler and servers are the stand-ins of ``test_launch_run``, except in the first test.
"""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import psdist
from psdist.errors import LaunchFailedError
from tests.support.launch_stage import Stage, on_stage

#: A program that launches ``train.py`` with its own arguments.
_PROGRAM = """
import sys
import psdist

try:
    psdist.launch("train.py", sys.argv[2:], nservers=1, timeout=float(sys.argv[1]) or None, storage_path="none")
except BaseException as error:
    print(f"caught {type(error).__name__}: {error}", flush=True)
"""


def train(rate: float, *, fails: int) -> dict[str, Any]:
    """Train two steps. The worker ``fails`` raises an error instead of its second."""
    with psdist.init() as context:
        initial = {"w": np.zeros(4, np.float32)}
        weights = context.client.parameters("w", initial, psdist.optim.SGD(rate))
        values = weights.push_pull({"w": np.full(4, context.rank + 1, np.float32)})
        if context.rank == fails:
            raise ValueError(f"worker {fails} of {context.world_size}")
        values = weights.push_pull({"w": np.full(4, context.rank + 1, np.float32)})
        return {"w": values["w"].copy(), "place": (context.rank, context.world_size)}


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with on_stage(tmp_path) as built:
        (built.path / "work" / "program.py").write_text(_PROGRAM)
        yield built


def test_a_function_runs_in_all_workers(capsys: pytest.CaptureFixture[str]) -> None:
    async def cell() -> psdist.LaunchResult:  # As in a notebook, whose cells run in an event loop.
        return psdist.launch(train, [0.5], {"fails": -1}, nproc_per_node=2, nservers=1, storage_path="none")

    result = asyncio.run(cell())
    assert result.status == 0 and [result.returned[rank]["place"] for rank in (0, 1)] == [(0, 2), (1, 2)]
    assert all(np.array_equal(result.returned[rank]["w"], np.full(4, -1.5, np.float32)) for rank in (0, 1))
    assert "1 server, 2 workers" in capsys.readouterr().err
    with pytest.raises(LaunchFailedError, match=r"worker 1 failed: exit code 1") as raised:
        psdist.launch(train, [0.5], {"fails": 1}, nproc_per_node=2, storage_path="none", max_restarts=0)
    assert raised.value.details["rank"] == raised.value.details["status"] == "1"
    assert re.search(r"Traceback.*in train\n.*\nValueError: worker 1 of 2", raised.value.details["traceback"], re.S)
    children = psutil.Process().children(recursive=True)
    assert [child.cmdline() for child in children if "psdist" in " ".join(child.cmdline())] == []


def test_a_script_ends_well_or_with_its_traceback(stage: Stage) -> None:
    program = [sys.executable, "program.py", "0"]
    status, text = stage.start_program([*program, "connect", "hello"]).end()
    assert status == 0 and "[worker 0] hello 0" in text and "caught" not in text, text
    status, text = stage.start_program([*program, "fail"]).end()
    assert status == 0 and "caught LaunchFailedError: worker 0 failed: exit code 1" in text
    assert text.endswith("RuntimeError: boom in attempt 0")
    status, text = stage.start_program([*program, "connect", "wait"], {"STAND_IN": "scheduler dies"}).end()
    assert "caught LaunchFailedError: " in text and "the scheduler's last words" in text
    stage.assert_clean()


def test_ctrl_c_ends_everything_before_it_is_raised(stage: Stage) -> None:
    run = stage.start_program([sys.executable, "program.py", "0", "connect", "wait"])
    run.until(r"\[worker 0\] pid")
    run.process.send_signal(signal.SIGINT)
    run.until("SIGINT: stopping all processes")
    run.until("caught KeyboardInterrupt")
    run.end()
    stage.assert_clean()


def test_a_run_that_takes_too_long_is_ended(stage: Stage) -> None:
    status, text = stage.start_program([sys.executable, "program.py", "2.5", "connect", "wait"]).end()
    assert status == 0 and text.endswith(
        "caught WaitTimeoutError: the run did not end within timeout=2.5 s, and was ended"
    )
    stage.assert_clean()


def test_a_run_ends_with_the_program_that_launched_it(stage: Stage) -> None:
    run = stage.start_program([sys.executable, "program.py", "0", "connect", "wait"], stderr=subprocess.DEVNULL)
    run.until(r"\[worker 0\] pid")
    run.process.kill()
    run.end()
    _, alive = psutil.wait_procs(stage.processes(), timeout=60)
    assert alive == []
    (directory,) = stage.path.glob("psdist-launch-*")  # Only the killed program would have removed it.
    (directory / "report.json").unlink()
    directory.rmdir()
    stage.assert_clean()

"""The examples as a user runs them: by the launcher, on real processes, to the accuracy that the README promises."""

from __future__ import annotations

import ast
import importlib
import re
import sys

import pytest

from tests.support.example_runs import ROOT, run


def accuracies(output: str) -> list[float]:
    """Return the percentages of the final lines (progress lines have the word in the middle)."""
    return [float(number) for number in re.findall(r"^(?:\[worker 0\] )?test accuracy ([\d.]+)%", output, re.M)]


@pytest.fixture(scope="module")
def synchronous(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the output of the example as ``make demo`` runs it on a machine that has compiled no kernels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NUMBA_CACHE_DIR", str(tmp_path_factory.mktemp("kernels")))
        return run("examples/digits.py", "--compare", with_errors=True)


def test_the_demo_on_a_new_machine_is_calm(synchronous: str) -> None:
    assert not re.search(r"warning|error|traceback", synchronous, re.IGNORECASE), synchronous
    assert len(synchronous.splitlines()) <= 40, synchronous


def test_digits_reach_the_accuracy_of_one_process(synchronous: str) -> None:
    through_servers, alone = accuracies(synchronous)
    assert through_servers >= 97.0, synchronous
    assert through_servers >= alone - 0.6, "more than two of the 360 test images behind one process\n" + synchronous
    assert re.search(r"step +\d+ +loss +[\d.]+ +test accuracy +[\d.]+% +[\d,]+ samples/s", synchronous), synchronous


def test_digits_take_the_same_steps_for_any_number_of_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the number of steps: a run may then resume with another number of workers, and late workers name the same
    schedule."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.setattr(sys, "argv", ["digits.py"])
    digits = importlib.import_module("digits")
    options = digits.arguments()
    assert {digits.updates(world, options) for world in range(1, 65)} == {690}
    for world in (1, 2, 3, 64, 500):
        parts = [digits.batches(rank, world, 1, digits.TRAIN_IMAGES, options) for rank in range(world)]
        assert len({len(part) for part in parts}) == 1 and all(len(batch) for part in parts for batch in part)
        assert {int(index) for part in parts for batch in part for index in batch} == set(range(digits.TRAIN_IMAGES))


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [("--consistency", "asp"), ("--consistency", "ssp", "--staleness", "2")],
    ids=lambda words: words[1],
)
def test_digits_without_a_barrier_come_within_a_point(synchronous: str, options: tuple[str, ...]) -> None:
    (accuracy,) = accuracies(run("examples/digits.py", *options))
    assert accuracy >= max(97.0, accuracies(synchronous)[0] - 1.0)


def test_quickstart_finds_the_line() -> None:
    assert "y = 3.00 x -1.00 after 200 steps" in run("examples/quickstart.py")


def test_quickstart_is_short() -> None:
    assert len((ROOT / "examples/quickstart.py").read_text().splitlines()) < 40


#: Examples whose loop is the framework's, so that a callback reports.
CALLBACKS = {"hf_trainer.py", "lightning_fit.py"}
#: Examples of torch's own parallelism, which compare a result at their end.
OF_TORCH = {"torch_fsdp.py", "torch_hybrid.py", "torch_pipeline.py", "torch_tensor_parallel.py"}


def test_every_example_reports_its_loss_in_the_loop() -> None:
    """Check the reports: without them ``psdist run`` would have no progress to show."""
    for name in sorted({path.name for path in (ROOT / "examples").glob("*.py")} - OF_TORCH):
        tree = ast.parse((ROOT / "examples" / name).read_text())
        kinds = ast.ClassDef if name in CALLBACKS else ast.For | ast.While
        loops = [node for node in ast.walk(tree) if isinstance(node, kinds)]
        calls = [node for loop in loops for node in ast.walk(loop) if isinstance(node, ast.Call)]
        reports = [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == "report"]
        assert any({"loss", "samples"} <= {word.arg for word in call.keywords} for call in reports)

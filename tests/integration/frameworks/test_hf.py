"""``psdist.hf`` beside Transformers' Trainer and Accelerate in a single process."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.support.framework_runs import Runs, difference, programs_of
from tests.support.nursery import ROOT, Nursery

# Imported by the nursery alone: every process of the tests would take seconds for it.
pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    made = Nursery("tests.support.hf_work")
    yield made
    made.close()


@pytest.fixture
def runs(nursery: Nursery, tmp_path: Path) -> Runs:
    return Runs(nursery, tmp_path)


def numbers(log: list[dict[str, Any]], name: str) -> list[float]:
    return [entry[name] for entry in log if name in entry]


def check_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert difference(one["weights"], other["weights"]) < 1e-5
    for name in ("eval_loss", "eval_samples", "learning_rate", "step"):
        assert numbers(one["log"], name) == pytest.approx(numbers(other["log"], name), rel=1e-5), name


@pytest.mark.parametrize("kind", ["gpt2", pytest.param("bert", marks=pytest.mark.long)])
def test_a_killed_server_and_an_interrupt_change_nothing(runs: Runs, tmp_path: Path, kind: str) -> None:
    """Kill a server of two with copies; then all workers of a run, which resumes from its last checkpoint."""
    expected = runs.alone("train", kind=kind, directory=str(tmp_path / "alone"), batch=8, uses=False)
    killed = runs.together(
        "train", 2, kind=kind, directory=str(tmp_path / "copies"), batch=4, servers=2, replicas=2, kills_server_at=5
    )
    check_equal(expected, killed[0])
    directory = str(tmp_path / "parts")
    runs.together("train", 2, kind=kind, directory=directory, batch=4, storage=True, kill=[5, [0]], codes=(-9, -9))
    for one in runs.together("train", 2, kind=kind, directory=directory, batch=4, storage=True, resume=True):
        check_equal(expected, one)


def test_a_loop_equals_a_single_process(runs: Runs) -> None:
    """Check shuffling, accumulation, clipping, the schedule, gathering, and the loss of a server."""
    expected = runs.alone("loop", batch=8, uses=False)
    alone = runs.together("loop", 1, batch=8)
    several = runs.together("loop", 2, batch=4, servers=2, replicas=2, kills_server_at=5)
    for one in (*alone, *several):
        assert difference(expected["weights"], one["weights"]) < 1e-5
        assert one["losses"] == pytest.approx(expected["losses"], rel=1e-5)
        assert one["seen"] == expected["seen"]
        assert one["rate"] == pytest.approx(expected["rate"])
    assert [one["main"] for one in several] == [True, False]


def test_a_resumed_loop_reads_each_sample_of_an_epoch_once(runs: Runs) -> None:
    """Resume in the second and the third data epoch, with the default settings of a loader."""
    found = [
        batch
        for seed, stop in ((5, 9), (6, 14), (7, 24))
        for one in runs.together("epochs", 2, storage=True, seed=seed, stop=stop)
        for batch in one
    ]
    orders = [[number for epoch, numbers in found if epoch == one for number in numbers] for one in range(4)]
    assert [sorted(order) for order in orders] == [list(range(48))] * 4
    assert len({tuple(order) for order in orders}) == 4


def test_the_survivor_of_a_lost_worker_finishes(runs: Runs, tmp_path: Path) -> None:
    """Check also that it evaluates the samples that are left."""
    survivor, _ = runs.together(
        "train", 2, kind="bert", directory=str(tmp_path), batch=4, kill=[5, [0]], kills_rank=1, codes=(0, -9)
    )
    assert numbers(survivor["log"], "step")[-1] == 9
    assert len(numbers(survivor["log"], "eval_loss")) == 3


def test_the_examples_run(runs: Runs, tmp_path: Path) -> None:
    directory = str(tmp_path)
    trained = runs.together("program", 2, path="examples/hf_trainer.py", directory=directory)
    loss = re.findall(r"loss (\d\.\d+) after 60 steps\n", trained[0])
    assert len(loss) == 1 and float(loss[0]) < 3.3, trained
    assert not re.search("loss .* after", trained[1])
    looped = runs.together("program", 2, path="examples/accelerate_loop.py", directory=directory)
    assert float(re.findall(r"epoch 6  accuracy ([\d.]+)% of 512\n", looped[0])[0]) > 90, looped
    assert looped[1] == ""


@pytest.mark.long  # Shorter forms of the examples.
def test_the_programs_of_the_page_run(runs: Runs, tmp_path: Path) -> None:
    programs = programs_of("frameworks.md", "psdist.hf", tmp_path)
    assert len(programs) == 2
    for path in programs:
        runs.together("program", 2, path=path, directory=str(tmp_path))


@pytest.mark.parametrize("name", ["hf_trainer", "accelerate_loop", "lightning_fit"])
def test_two_lines_differ(name: str) -> None:
    assert len(re.findall(r"^.*\S  # psdist$", (ROOT / f"examples/{name}.py").read_text(), re.M)) == 2


def test_refusals_name_the_remedy(runs: Runs, tmp_path: Path) -> None:
    remedies = {
        "fsdp": "leave fsdp out. psdist.torch.offload",
        "deepspeed": "leave deepspeed out",
        "auto_find_batch_size": "set the batch size",
        "even_batches": "leave it out",
        "n_gpu": "'psdist run --nproc-per-node 4', or let CUDA_VISIBLE_DEVICES name one",
        "search": "start one run of psdist for each trial",
        "twice": "with another name=, such as name='model-2'",
        "wrapped": "pass the optimizer of torch",
        "type": "leave out deepspeed, fsdp, megatron and parallelism_config",
        "fp8": "use 'bf16', 'fp16' or 'no'",
        "backward": "pass the model and its optimizer to prepare()",
        "no model": "prepare the model in the same call, or before",
        "clip": "psdist.hf.Accelerator(max_grad_norm=2.0)",
        "clip value": "use psdist.hf.Accelerator(max_grad_norm=...) and clip_grad_norm_",
        "uneven": "use 'with optimizer.optimizer.join():'",
    }
    found = runs.alone("messages", directory=str(tmp_path / "trainer"))
    assert found.keys() == remedies.keys()
    assert {name: remedy for name, remedy in remedies.items() if remedy not in found[name]} == {}


def test_a_saved_step_without_its_run_is_refused(runs: Runs, tmp_path: Path) -> None:
    """Check that nobody continues with the weights of a checkpoint and a new optimizer."""
    directory = str(tmp_path / "trainer")
    runs.together("train", 1, kind="bert", directory=directory, batch=4, max_steps=3)
    (error,) = runs.together("train", 1, kind="bert", directory=directory, batch=4, resume=True, codes=(1,))
    assert "the checkpoint is from step 3, but the run is at step 0" in error
    assert "with its earlier --run-id, or train without resume_from_checkpoint" in error

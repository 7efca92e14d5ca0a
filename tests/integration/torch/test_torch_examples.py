"""The PyTorch examples as a user runs them: through psdist, and as plain PyTorch in one process."""

from __future__ import annotations

import gzip
import importlib
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.example_runs import run

ROOT = Path(__file__).resolve().parents[3]
SMALL = ("--steps", "40", "--width", "64", "--layers", "2", "--heads", "2", "--context", "64")


def plain(*words: str) -> str:
    """Return the output of an example without psdist."""
    done = subprocess.run(
        [sys.executable, *words, "--plain"], capture_output=True, text=True, check=False, cwd=ROOT, timeout=240,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def numbers(pattern: str, output: str) -> list[float]:
    """Return the numbers that a pattern finds."""
    return [float(number) for number in re.findall(pattern, output)]


def test_digits_are_read() -> None:
    accuracies = numbers(r"test accuracy ([\d.]+)%", run("examples/torch_mnist.py"))
    assert len(accuracies) == 10
    assert accuracies[-1] >= 95.0


def test_local_steps_read_digits_with_few_bytes() -> None:
    ((accuracy, rounds, sent),) = re.findall(
        r"accuracy ([\d.]+)% after (\d+) rounds, ([\d.]+) MB", run("examples/torch_diloco.py", "--steps", "300")
    )
    assert float(accuracy) >= 93.0
    assert int(rounds) == 6
    assert float(sent) < 1.0


@pytest.mark.long  # Half of this is the same as above.
def test_the_transformer_learns_as_fast_as_without_psdist() -> None:
    through, alone = (numbers(r"loss ([\d.]+)", call("examples/torch_chargpt.py", *SMALL))[-1] for call in (run, plain))
    # Rank 0 prints the loss of its part of a batch.
    assert through == pytest.approx(alone, abs=0.3)


def test_idx_files_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    example = importlib.import_module("torch_mnist")
    images = np.arange(2 * 3 * 4, dtype=np.uint8).reshape(2, 3, 4)
    data = b"\0\0\x08\x03" + np.array(images.shape, ">i4").tobytes() + images.tobytes()
    (tmp_path / "a").write_bytes(data)
    (tmp_path / "b.gz").write_bytes(gzip.compress(data))
    for name in ("a", "b"):
        assert torch.equal(example.read_idx(tmp_path, name), torch.from_numpy(images))
    (tmp_path / "c").write_bytes(data[:-1])
    for name, said in (("c", "is no IDX file"), ("d", "has neither d nor d.gz")):
        with pytest.raises(ValueError, match=said):
            example.read_idx(tmp_path, name)


@pytest.mark.long  # Whole epochs of a script like that for digits, but for its optimizer.
@pytest.mark.parametrize("call", [run, plain])
def test_images_are_told_apart_with_an_optimizer_of_the_script(call: Callable[..., str]) -> None:
    output = call("examples/torch_cifar.py", "--images", "1500", "--epochs", "4", "--width", "8")
    accuracies = numbers(r"test accuracy ([\d.]+)%", output)
    assert len(accuracies) == 4 and accuracies[-1] >= 75.0


def test_batches_of_cifar_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    example = importlib.import_module("torch_cifar")
    random = np.random.default_rng(0)
    records = random.integers(0, 256, (5, 3073), dtype=np.uint8)
    records[:, 0] = [3, 1, 4, 1, 9]
    for name, part in (("data_batch_1", records[:2]), ("data_batch_2", records[2:4]), ("test_batch", records[4:])):
        part.tofile(tmp_path / f"{name}.bin")
    train, test = example.cifar(tmp_path)
    assert (train.tensors[1].tolist(), test.tensors[1].tolist()) == ([3, 1, 4, 1], [9])
    assert train.tensors[0][2, 1, 0, 5].item() == pytest.approx(records[2, 1 + 1024 + 5] / 255 - 0.5)
    for content in (b"", records[0].tobytes()[:-1], b"\x0a" + bytes(3072)):
        (tmp_path / "test_batch.bin").write_bytes(content)
        with pytest.raises(ValueError, match="is no batch of CIFAR-10"):
            example.cifar(tmp_path)
    with pytest.raises(ValueError, match="has no data_batch_1"):
        example.cifar(tmp_path / "none")


@pytest.mark.long  # Scripts in test_torch_resume resume, too.
@pytest.mark.parametrize(
    ("name", "first", "then", "shown"),
    [
        ("torch_mnist", ("--epochs", "1"), ("--epochs", "2"), ["epoch 2"]),
        ("torch_chargpt", ("--steps", "20", *SMALL[2:]), ("--steps", "40", *SMALL[2:]), ["step    40"]),
    ],
)
def test_a_run_that_goes_on_does_so_at_its_step(
    tmp_path: Path, name: str, first: tuple[str, ...], then: tuple[str, ...], shown: list[str]
) -> None:
    command = [sys.executable, "-m", "psdist.cli.main", "run", "--nproc-per-node", "2", "--storage-path", str(tmp_path)]
    for words in (first, then):
        done = subprocess.run(
            [*command, "--run-id", f"goes-on-{name}", f"examples/{name}.py", *words],
            capture_output=True, text=True, check=False, cwd=ROOT, timeout=240,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    assert re.findall(r"(?:step|epoch) +\d+(?=  loss)", done.stdout) == shown


@pytest.mark.parametrize(("name", "count"), [("torch_mnist", 4), ("torch_cifar", 3), ("torch_chargpt", 4)])
def test_a_few_lines_differ(name: str, count: int) -> None:
    marked = re.findall(r"^.*\S  # psdist$", (ROOT / f"examples/{name}.py").read_text(), re.M)
    assert len(marked) == count

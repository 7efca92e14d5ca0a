"""The page of ``benchmarks.convergence``, and the gradients of the models that it trains."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks import convergence, models
from psdist.compression import Float32, PowerSGD, TopK

RUNS = {
    "losses": [(10, 2.0), (20, 1.02)],
    "last": [1.0, 1.04],
    "loss": 1.02,
    "bytes": 4.0,
    "pulled": 2.0,
}


def test_results_are_written_between_the_marks_and_nothing_else_changes(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    begin, end = convergence.RESULTS
    page.write_text(f"before\n\n{begin}\n\nold\n\n{end}\n\nafter\n")
    results = {"digits": {"none": {"without": RUNS}, "TopK(0.01)": {"with": RUNS | {"loss": 2.04, "bytes": 0.06}}}}
    convergence.write(results, page)
    text = page.read_text()
    assert text.startswith(f"before\n\n{begin}\n\n### Digits, 2 seeds") and text.endswith(f"{end}\n\nafter\n")
    assert "old" not in text
    assert "| TopK(0.01) | with | 0.060 | 2.000 | 2.0400 | +100.0% | 1.0000 to 1.0400 | 20 | 82 |" in text
    assert "TopK(0.01)" in (tmp_path / "page-digits.svg").read_text()
    convergence.write(results, page)
    assert page.read_text() == text


def test_what_has_error_feedback_is_trained_without_it_and_both_ways_too() -> None:
    assert convergence.variants(Float32()) == {"without": (Float32(), None)}
    with_feedback = TopK(0.1, error_feedback=True)
    assert convergence.variants(TopK(0.1)) == {
        "with": (with_feedback, None),
        "without": (TopK(0.1, error_feedback=False), None),
        "both ways": (with_feedback, TopK(0.1)),
        "ef21": (TopK(0.1, error_feedback="ef21"), None),
    }
    for codec in (PowerSGD(2), TopK(0.1, warm_up=100)):
        assert set(convergence.variants(codec)) == {"with", "without", "ef21"}


@pytest.mark.parametrize("name", models.MODELS)
def test_gradients_are_differences_of_losses(name: str) -> None:
    model = models.MODELS[name]()
    weights = model.initial(0)
    batch = np.random.default_rng(0).integers(0, model.samples, 16)
    gradients = model.gradients(weights, batch)[1]
    for tensor, gradient in gradients.items():
        where = np.unravel_index(np.abs(gradient).argmax(), gradient.shape)
        losses = []
        for change in (1e-4, -1e-4):
            moved = {key: value.astype(np.float64) for key, value in weights.items()}
            moved[tensor][where] += change
            losses.append(model.gradients(moved, batch)[0])
        assert (losses[0] - losses[1]) / 2e-4 == pytest.approx(gradient[where], rel=1e-3), tensor

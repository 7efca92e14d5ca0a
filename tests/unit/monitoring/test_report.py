"""Reports of a script: kinds of numbers, names, and their limits."""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest

from psdist.errors import InvalidArgumentError, InvalidNameError
from psdist.monitoring.metrics import MEASURED, check_report
from psdist.wire.limits import METRIC_NAME_CHARACTERS_MAX, METRIC_NAMES_MAX

NUMBERS = (
    *(0.5, 1, True, np.float32(0.5), np.int64(3), np.float16(2), np.array(0.25), np.array(7, np.int8)),
    *(Decimal("0.5"), Fraction(1, 4), math.nan, math.inf, -math.inf),
)


def test_numbers_become_floats() -> None:
    for number in NUMBERS:
        report = check_report(number, None, None, {"norm": number})
        assert all(type(value) is float for value in report.values.values())
        assert list(report.values) == ["loss", "norm"]
        np.testing.assert_equal(report.values["norm"], float(number))


def test_tensors_without_dimensions_are_numbers() -> None:
    torch = pytest.importorskip("torch")
    loss = torch.tensor(1.5, requires_grad=True) * 2
    report = check_report(loss, torch.tensor(True), torch.tensor(64), {"lr": torch.tensor(0.5, dtype=torch.bfloat16)})
    assert report.values == {"loss": 3.0, "accuracy": 1.0, "lr": 0.5} and report.samples == 64
    with pytest.raises(InvalidArgumentError, match=r"'loss' is not a number: it is Tensor of shape \(2,\)"):
        check_report(torch.zeros(2), None, None, {})


def test_anything_else_is_refused_by_name() -> None:
    for value in ["0.5", b"1", None, [1.0], {}, 1j, 10**400, np.zeros(1), np.zeros((2, 3)), np.array("x"), object()]:
        with pytest.raises(InvalidArgumentError, match="metric 'norm' is not a number: it is"):
            check_report(0.5, None, None, {"norm": value})


def test_samples_are_a_number_from_0() -> None:
    for samples in [-1, math.nan, math.inf, 1e19, "many"]:
        with pytest.raises(InvalidArgumentError, match="samples"):
            check_report(0.5, None, samples, {})


def test_what_is_not_said_is_not_reported() -> None:
    assert check_report(None, None, None, {}).values == {}
    assert check_report(None, 0.5, 0, {}).samples == 0.0
    assert check_report(0.5, None, None, {}).weight == 1.0 and check_report(0.5, None, 32, {}).weight == 32.0


def test_names_that_are_not_possible() -> None:
    for name in ["", "-x", "/x", ".x", "a b", "é", "x" * (METRIC_NAME_CHARACTERS_MAX + 1), "a\n"]:
        with pytest.raises(InvalidNameError, match="a metric cannot be named"):
            check_report(None, None, None, {name: 1.0})


def test_names_of_psdist_are_its_own() -> None:
    for name in [*MEASURED, "step", "time"]:
        with pytest.raises(InvalidNameError, match="psdist measures"):
            check_report(None, None, None, {name: 1.0})


def test_names_have_a_number() -> None:
    most = {f"x{number}": 1.0 for number in range(METRIC_NAMES_MAX - 1)}
    assert len(check_report(0.5, None, None, most).values) == METRIC_NAMES_MAX
    with pytest.raises(InvalidArgumentError, match=f"{METRIC_NAMES_MAX + 1} metrics are too many"):
        check_report(0.5, 0.5, None, most)
    assert check_report(None, None, None, {"val/loss.x-1": 2, "x" * METRIC_NAME_CHARACTERS_MAX: 1})

"""Buffers that nobody writes to: when a warning is given, and that equal samples alone are no reason for one."""

from __future__ import annotations

import logging
from itertools import count

import numpy as np
import pytest

from psdist.client import gradients
from psdist.client.gradients import StaleBufferCheck


@pytest.fixture
def check() -> StaleBufferCheck:
    return StaleBufferCheck("model")


def push(check: StaleBufferCheck, vector: np.ndarray, numbers: range) -> None:
    for number in numbers:
        check.on_push(number, vector)


@pytest.mark.parametrize("value", [0.0, 1.5])
@pytest.mark.parametrize("size", [1, 100, 1_000_003])
def test_five_pushes_of_the_same_are_warned_of_once(
    check: StaleBufferCheck, caplog: pytest.LogCaptureFixture, size: int, value: float
) -> None:
    vector = np.full(size, value, np.float32)
    push(check, vector, range(5))
    assert not caplog.records
    push(check, vector, range(5, 50))
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert all(word in record.getMessage() for word in ("'model'", "5 pushes", "zero_grad(set_to_none=False)"))


def test_one_element_that_changes_is_enough(check: StaleBufferCheck, caplog: pytest.LogCaptureFixture) -> None:
    vector = np.zeros(1_000_003, np.float32)
    for number in range(100):
        vector[1 + number % 2] += 1  # elements that are not in the sample
        check.on_push(number, vector)
    assert not caplog.records


def test_every_change_begins_the_count_anew(check: StaleBufferCheck, caplog: pytest.LogCaptureFixture) -> None:
    vector, numbers = np.zeros(1000, np.float32), count()
    for _ in range(20):
        vector += 1
        for _ in range(5):
            check.on_push(next(numbers), vector)
    assert not caplog.records
    for _ in range(5):
        check.on_push(next(numbers), vector)
    assert len(caplog.records) == 1


def test_a_push_that_is_made_again_does_not_count(check: StaleBufferCheck, caplog: pytest.LogCaptureFixture) -> None:
    vector = np.zeros(10, np.float32)
    for number in (0, 1, 2, 3, 4):
        for _ in range(10):
            check.on_push(number, vector)
    assert not caplog.records


def test_gradients_of_which_the_sample_says_nothing_are_hashed_a_few_times_only(
    check: StaleBufferCheck, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[object] = []
    digest = gradients.xxhash.xxh3_128_digest
    monkeypatch.setattr(gradients.xxhash, "xxh3_128_digest", lambda data: hashed.append(data) or digest(data))
    vector = np.zeros(100_000, np.float32)
    for number in range(1000):
        vector[1] = number
        check.on_push(number, vector)
    assert len(hashed) <= 20
    hashed.clear()
    other = StaleBufferCheck("other")
    for number in range(1000):
        vector[0] = number  # in the sample
        other.on_push(number, vector)
    assert not hashed

"""States of random generators as arrays."""

from __future__ import annotations

import random
import sys
from typing import Any

import numpy as np
import pytest

from psdist.client.session.worker_state import check_state, restore_random_generators, save_random_generators

torch: Any = pytest.importorskip("torch")


def draw() -> tuple[Any, ...]:
    python = random.random(), random.gauss(0, 1)
    return *python, np.random.random(), np.random.standard_normal(), torch.rand(2).tolist()


def test_all_generators_continue() -> None:
    draw()  # Now each has drawn one of two normal numbers.
    state = save_random_generators()
    check_state("p", state)
    expected = [draw() for _ in range(3)]
    restore_random_generators(state)
    assert [draw() for _ in range(3)] == expected
    restore_random_generators({})
    assert draw() != expected[0]


def test_torch_that_is_not_imported_is_named(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    state = save_random_generators()
    monkeypatch.delitem(sys.modules, "torch")
    assert "torch" not in save_random_generators()
    restore_random_generators(state)
    assert "import torch before keep_state()" in caplog.text

"""States of random generators as arrays."""

from __future__ import annotations

import random
import sys
from typing import Any

import numpy as np
import pytest

from psdist.client.session import random_generators
from psdist.client.session.worker_state import check_state

torch: Any = pytest.importorskip("torch")


def draw() -> tuple[Any, ...]:
    python = random.random(), random.gauss(0, 1)
    return *python, np.random.random(), np.random.standard_normal(), torch.rand(2).tolist()


def test_all_generators_continue() -> None:
    draw()  # Now each has drawn one of two normal numbers.
    state = random_generators.save()
    check_state("p", state)
    expected = [draw() for _ in range(3)]
    random_generators.restore(state)
    assert [draw() for _ in range(3)] == expected
    random_generators.restore({})
    assert draw() != expected[0]


def test_torch_that_is_not_imported_is_named(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    state = random_generators.save()
    monkeypatch.delitem(sys.modules, "torch")
    assert "torch" not in random_generators.save()
    random_generators.restore(state)
    assert "import torch before keep_state()" in caplog.text

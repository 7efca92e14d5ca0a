"""Means of all workers' values through the servers: creation of the sets, and guards."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from psdist.client.means import ScriptWeights, ServerMean, push_finite
from psdist.consistency import BSP
from psdist.errors import LateWorkerError, NonFiniteGradientError
from psdist.optim import Mean


class FakeClient:
    """Client of a run whose other worker gives ones. created: arguments of the sets."""

    def __init__(self, *, is_late: bool = False, restored: str | None = None) -> None:
        self.created: list[Any] = []
        self.joins_late = lambda _: is_late
        self._restored = restored

    def parameters(self, name: str, init: Any, optimizer: Any, consistency: Any, **options: Any) -> Any:
        self.created.append((name, init, optimizer, consistency, options))
        return SimpleNamespace(push_pull=self._push_pull, restored=self._restored)

    def _push_pull(self, values: Any, *, copy: bool, weight: float) -> Any:
        return {name: (weight * value + 1) / (weight + 1) for name, value in values.items()}


def test_a_set_is_created_once_of_zeros() -> None:
    client: Any = FakeClient()
    mean = ServerMean(client, "losses", reduction="sum", master_dtype="float64", on_drop="raise")
    assert client.created == []
    assert mean.exchange({"loss": np.array([3.0])})["loss"] == [2.0]
    assert mean.exchange({"loss": np.array([3.0])}, weight=0.0)["loss"] == [1.0]
    ((name, init, optimizer, consistency, options),) = client.created
    assert (name, init, optimizer, consistency) == ("losses", {"loss": [0.0]}, Mean(), BSP(reduction="sum"))
    assert options == {"on_drop": "raise", "master_dtype": "float64", "slice_elements": 0}


def test_gradients_that_are_not_finite_are_pushed_as_zeros() -> None:
    pushed, gradient = [], [np.inf]

    def push() -> str:
        pushed.append(list(gradient))
        if not np.isfinite(gradient).all():
            raise NonFiniteGradientError("the gradient holds Inf")
        return "means"

    assert push_finite(push, lambda: gradient.__setitem__(0, 0.0)) == "means" and pushed == [[np.inf], [0.0]]
    gradient[0] = np.inf
    with pytest.raises(NonFiniteGradientError):
        push_finite(push, lambda: None)


def test_guards_name_what_holds_the_weights(caplog: pytest.LogCaptureFixture) -> None:
    weights, zeros = ScriptWeights("psdist.some.average", "psdist.some.parameters"), {"w": np.zeros(2)}
    given: Any = {"reduction": "mean", "compression": "int8", "master_dtype": "float32"}
    late: Any = FakeClient(is_late=True)
    with pytest.raises(LateWorkerError, match=r"scripts of psdist\.some\.average hold.*psdist\.some\.parameters keeps"):
        weights.open(late, "g", zeros, **given)
    assert late.created == []
    resumed: Any = FakeClient(restored="000000000002-1-1-abcdef")
    with caplog.at_level(logging.WARNING):
        weights.open(resumed, "g", zeros, **given)
    assert "'g' resumes from snapshot 000000000002-1-1-abcdef" in caplog.text
    assert "use psdist.some.parameters" in caplog.text and "or use psdist.some.parameters" in str(weights.expelled())

"""Writes to a wrapped model's weights, with a fake handle."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from torch import nn

from psdist.consistency import BSP
from psdist.torch.writes import ModelWatch, WeightWrites


class Handle:
    """Parameter set whose worker rejoins in the pull if ``rejoins``."""

    name = "model"
    restored = None

    def __init__(self, *, rejoins: bool) -> None:
        self.spec = SimpleNamespace(consistency=BSP())
        self.step = 5
        self.assigned: list[list[str]] = []
        self._rejoins = rejoins

    def pull(self, *, copy: bool) -> dict[str, Any]:
        """Return zeros, perhaps of a later step."""
        self.step += 3 * self._rejoins
        return {"weight": np.zeros((2, 2), np.float32), "bias": np.zeros(2, np.float32)}

    def assign(self, values: dict[str, Any]) -> None:
        """Record the names."""
        self.assigned.append(sorted(values))


@pytest.mark.parametrize("rejoins", [False, True])
def test_a_worker_that_rejoins_drops_what_it_wrote(caplog: pytest.LogCaptureFixture, rejoins: bool) -> None:
    """The others wrote to the weights of the steps that it missed, so its values would differ from theirs."""
    model = nn.Linear(2, 2)
    trained = dict(model.named_parameters())
    handle: Any = Handle(rejoins=rejoins)
    writes = WeightWrites(handle, model, trained, ModelWatch(model, trained))
    model.weight.data.fill_(1.0)
    writes.send()
    assert handle.assigned == ([] if rejoins else [["weight"]])
    text = "weights that the script wrote before step 5 of 'model' were dropped: this worker continues at step 8"
    assert (text in caplog.text) == rejoins
    assert not writes.watch.written()

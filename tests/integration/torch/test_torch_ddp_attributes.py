"""Attributes of torch's DistributedDataParallel that scripts set or read: they act, or they are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from psdist.client.context import Context
from psdist.errors import InvalidArgumentError
from psdist.torch import DistributedDataParallel
from tests.support.torch_models import BATCHES, loss_of, mlp


def test_the_forward_pass_decides_as_with_torch(alone: Context, name: str) -> None:
    model = DistributedDataParallel(mlp(), name=name)
    with model.no_sync():
        loss = loss_of(model, BATCHES(0))
        assert not model.require_backward_grad_sync
    assert model.require_backward_grad_sync
    loss.backward()
    assert model.handle.step == 0
    loss = loss_of(model, BATCHES(1))
    with model.no_sync():
        with torch.no_grad():
            loss_of(model, BATCHES(2))  # an evaluation decides nothing
        loss.backward()
    assert model.handle.step == 1


class Counting(nn.Module):
    """Model with a buffer that counts its forward passes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        result: torch.Tensor = self.layer(inputs)
        return result


def test_buffers_are_copied_unless_the_attribute_is_false(alone: Context, name: str) -> None:
    model = DistributedDataParallel(Counting(), name=name)
    copies = model._buffers_in_step._handle
    assert model.will_sync_module_buffers() and copies is not None
    for syncs, steps in ((True, 1), (False, 1), (True, 2)):
        model.require_forward_param_sync = syncs
        assert model.will_sync_module_buffers() == syncs
        model(torch.ones(1, 2)).sum().backward()
        assert copies.step == steps
    model.require_forward_param_sync = False
    with pytest.raises(InvalidArgumentError, match=r"join\(\) with require_forward_param_sync=False"), model.join():
        pass


def test_ignored_parameters_and_buffers_belong_to_each_worker(alone: Context, name: str) -> None:
    module = Counting()
    module.own = nn.Linear(2, 1)
    torch.nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        module, ["own.weight", "calls"]
    )
    model = DistributedDataParallel(module, name=name)
    assert model.handle.names[:3] == ("layer.weight", "layer.bias", "own.bias")
    assert model.parameters_to_ignore == {"own.weight", "calls"}
    assert model._buffers_in_step._handle is None
    (model(torch.ones(1, 2)) + module.own(torch.ones(1, 2))).sum().backward()
    assert model.handle.step == 1 and module.own.weight.grad is not None
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["gone"])
    with pytest.raises(InvalidArgumentError, match="'gone' is to be ignored, but the model has no parameter"):
        DistributedDataParallel(module, name=f"{name}-2")


def test_attributes_show_how_the_model_was_wrapped(alone: Context, name: str) -> None:
    cpu = torch.device("cpu")
    model = DistributedDataParallel(mlp(), [cpu], cpu, static_graph=True, broadcast_buffers=None, name=name)
    shown = (model.device, model.device_ids, model.output_device, model.static_graph, model.find_unused_parameters)
    assert shown == (cpu, [cpu], cpu, True, False)
    assert model.broadcast_buffers and not model.gradient_as_bucket_view and not model.will_sync_module_buffers()
    assert getattr(model, "process_group", None) is None
    with pytest.warns(UserWarning, match="leave _set_static_graph"):
        model._set_static_graph()
    model.static_graph = True


@pytest.mark.parametrize(
    ("attribute", "value", "said"),
    [
        ("find_unused_parameters", True, "find_unused_parameters=True is set after the model was wrapped.*pass it to"),
        ("static_graph", True, "pass it to DistributedDataParallel"),
        ("broadcast_buffers", False, "pass it to DistributedDataParallel"),
        ("gradient_as_bucket_view", True, "pass it to DistributedDataParallel"),
        ("parameters_to_ignore", {"0.weight"}, "pass it to DistributedDataParallel"),
        ("device_ids", [0], "pass it to DistributedDataParallel"),
        ("module", nn.Linear(1, 1), "wrap the new one under another name="),
        ("process_group", object(), "psdist has no process groups"),
        ("reducer", object(), "averaged by psdist's servers"),
    ],
)
def test_attributes_without_an_effect_are_refused(
    alone: Context, name: str, attribute: str, value: object, said: str
) -> None:
    model = DistributedDataParallel(mlp(), name="attributes-" + attribute)
    with pytest.raises(InvalidArgumentError, match=said):
        setattr(model, attribute, value)
    with pytest.raises(InvalidArgumentError, match=r"pass static_graph=True"):
        model._set_static_graph()


def test_a_missing_attribute_says_why() -> None:
    model: Any = DistributedDataParallel.__new__(DistributedDataParallel)
    nn.Module.__init__(model)
    with pytest.raises(AttributeError, match="no attribute 'process_group': psdist has no process groups"):
        _ = model.process_group
    with pytest.raises(AttributeError, match="no_such"):
        _ = model.no_such

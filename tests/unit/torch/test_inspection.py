"""Trained tensors of a model, refused models, and forbidden changes of a wrapped model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from psdist import optim
from psdist.errors import DTypeMismatchError, InvalidArgumentError
from psdist.torch import DistributedOptimizer
from psdist.torch.gradients import BucketPlan
from psdist.torch.inspection import ModelParameters, inspect
from psdist.torch.writes import ModelWatch


def frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    model[0].requires_grad_(False)
    return model


def test_frozen_parameters_and_buffers_are_not_trained() -> None:
    tensors = inspect(frozen())
    assert list(tensors.trained) == ["1.weight", "1.bias", "2.weight", "2.bias"]
    assert list(tensors.fixed) == ["0.weight", "0.bias", "1.running_mean", "1.running_var", "1.num_batches_tracked"]


def test_a_tied_weight_appears_once() -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5, bias=False))
    model[1].weight = model[0].weight
    assert list(inspect(model).trained) == ["0.weight"]


def test_only_what_the_optimizer_has_is_trained() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    assert list(inspect(model, model[1].parameters()).trained) == ["1.weight", "1.bias"]
    with pytest.raises(InvalidArgumentError, match="2 parameters that are not the model's"):
        inspect(model[0], model.parameters())


def test_frozen_parameters_of_the_optimizer_are_held_if_servers_can() -> None:
    model = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(6))
    for layer in model[1:]:
        layer.requires_grad_(False)
    model[2].double()
    model[3].weight.data.fill_(-torch.inf)
    model[4].weight = nn.Parameter(torch.ones(2, dtype=torch.int8), requires_grad=False)
    assert list(inspect(model, model.parameters()).trained) == ["0.weight"]
    held = inspect(model, model.parameters(), with_frozen=True)
    assert list(held.trained) == ["0.weight", "1.weight", "5.weight"]
    assert list(held.fixed) == ["2.weight", "3.weight", "4.weight"]
    assert list(inspect(model, with_frozen=True).trained) == ["0.weight"]
    watch = ModelWatch(model, held.trained, model.parameters())
    model[1].requires_grad_(True)
    model[0].requires_grad_(False)
    watch.check()
    model[2].requires_grad_(True)
    with pytest.raises(InvalidArgumentError, match=r"'2\.weight' was unfrozen"):
        watch.check()


def test_names_are_those_of_the_model_before_it_was_compiled() -> None:
    model = nn.Sequential(nn.Linear(2, 3))
    assert list(inspect(torch.compile(model, backend="eager")).trained) == ["0.weight", "0.bias"]


def with_buffer(buffer: Tensor) -> nn.Module:
    model = nn.Linear(2, 2)
    model.register_buffer("extra", buffer)
    return model


def under_inference_mode() -> nn.Module:
    with torch.inference_mode():
        return nn.Linear(2, 2)


def eighth() -> nn.Parameter:
    return nn.Parameter(torch.zeros(2).to(torch.float8_e5m2))


def with_expanded_parameter() -> nn.Module:
    model = nn.Linear(2, 2)
    model.weight = nn.Parameter(torch.ones(2, 1).expand(2, 2))
    return model


def mixed() -> nn.Module:
    return nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2, device="meta")])


def on_two_devices() -> nn.Module:
    """Return a model that computes on two GPUs. Without any, a DataParallel only calls its module."""
    model = nn.DataParallel(nn.Linear(2, 2))
    model.device_ids = [0, 1]
    return model


def test_models_that_cannot_be_trained_are_refused() -> None:
    for make, error, said in [
        (lambda: [1], InvalidArgumentError, "model is of type list: give a torch.nn.Module"),
        (
            lambda: with_buffer(torch.eye(3).to_sparse()),
            InvalidArgumentError,
            "buffer 'extra' has layout torch.sparse_coo",
        ),
        (lambda: with_buffer(torch.ones(1).expand(5)), InvalidArgumentError, "buffer 'extra' is expanded.*clone"),
        (with_expanded_parameter, InvalidArgumentError, "parameter 'weight' is expanded.*clone"),
        (under_inference_mode, InvalidArgumentError, "parameter 'weight' was made under torch.inference_mode"),
        (lambda: nn.ReLU(), InvalidArgumentError, "no parameter to train"),
        (lambda: nn.Linear(2, 2).requires_grad_(False), InvalidArgumentError, "no parameter to train"),
        (lambda: nn.ParameterDict({"w": eighth()}), DTypeMismatchError, "dtype torch.float8_e5m2.*complex64"),
        (lambda: nn.Linear(2, 2, device="meta"), InvalidArgumentError, "on the meta device"),
        (mixed, InvalidArgumentError, "on the meta device"),
        (lambda: nn.LazyLinear(3), InvalidArgumentError, "has no shape yet"),
        (on_two_devices, InvalidArgumentError, "wrapped in DataParallel"),
    ]:
        with pytest.raises(error, match=said):
            DistributedOptimizer(make(), optim.SGD())


def test_several_devices_are_refused() -> None:
    """A machine without an accelerator has only one real device, so the second parameter claims another one."""

    class Elsewhere(nn.Parameter):
        device = torch.device("cuda", 1)

    model = nn.ParameterList([nn.Parameter(torch.zeros(2)), Elsewhere(torch.zeros(2))])
    with pytest.raises(InvalidArgumentError, match=r"'0' is on cpu, but '1' on cuda:1: move the model to one device"):
        inspect(model)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"optimizer": "adam"}, "optimizer is of type str"),
        ({"bucket_cap_mb": 0}, "bucket_cap_mb=0 is out of range"),
        ({"scheduler": 5}, "give the torch scheduler of this torch optimizer"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], said: str) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(InvalidArgumentError, match=said):
        DistributedOptimizer(**{"model": model, "optimizer": torch.optim.SGD(model.parameters())} | arguments)


def replace_layer(model: nn.Module) -> None:
    model[2] = nn.Linear(3, 1)


def unfreeze(model: nn.Module) -> None:
    model[0].requires_grad_(True)


@torch.no_grad()
def write(model: nn.Module) -> None:
    model[2].weight.mul_(2)


def test_changes_of_a_wrapped_model_are_seen() -> None:
    for change, said in [
        (replace_layer, "were added, replaced or removed"),
        (unfreeze, "'0.weight' was unfrozen .*: pass it to the optimizer of torch from the start, frozen"),
        (lambda model: model.bfloat16(), "'1.weight' was cast"),
        (lambda model: model.append(nn.Linear(1, 1)), "were added"),
    ]:
        model = frozen()
        watch = ModelWatch(model, inspect(model).trained)
        watch.check()
        change(model)
        with pytest.raises(InvalidArgumentError, match=said):
            watch.check()


@pytest.mark.parametrize("change", [write, lambda model: model.load_state_dict(frozen().state_dict())])
def test_writes_are_found_and_no_changes(change: Callable[[nn.Module], object]) -> None:
    model = frozen()
    watch = ModelWatch(model, inspect(model).trained)
    change(model)
    watch.check()
    assert "2.weight" in watch.written()
    with pytest.raises(InvalidArgumentError, match="was written to after the backward pass"):
        watch.check_unwritten()
    watch.accept()
    assert not watch.written()


def test_a_batch_norm_that_synchronizes_nothing_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """When the model is wrapped, but not when an optimizer's state is loaded for it."""
    model = torch.compile(nn.Sequential(nn.Linear(2, 3), nn.SyncBatchNorm(3), nn.SyncBatchNorm(3)), backend="eager")
    inspect(model)
    ModelParameters(nn.Sequential(nn.BatchNorm1d(3)))
    assert not caplog.records
    ModelParameters(model)
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("psdist", "WARNING")
    assert record.getMessage().startswith("SyncBatchNorm '1' (one of 2 in the model) computes the statistics of each")
    assert "init_process_group('gloo')" in record.getMessage() and "psdist.torch.SyncBatchNorm" in record.getMessage()
    caplog.clear()
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        ModelParameters(model)
    finally:
        torch.distributed.destroy_process_group()
    assert not caplog.records


def test_buckets_are_filled_from_the_last_tensor_on() -> None:
    for sizes, limit, buckets in [
        ([4, 4, 4], 8, [(1, 2), (0,)]),
        ([100, 1, 1], 8, [(0, 1, 2)]),
        ([1, 100], 8, [(1,), (0,)]),
        ([0, 0], 8, [(0, 1)]),
        ([5], 1, [(0,)]),
    ]:
        plan = BucketPlan(sizes, limit)
        assert plan.buckets == buckets
        for _ in range(2):
            plan.start_step()
            ready = [plan.on_ready(number) for number in range(len(sizes))]
            assert sorted(bucket for bucket in ready if bucket) == sorted(buckets)

"""Signs that a process is one of several, which would each train alone."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

import psdist
from psdist.client.session import loop
from psdist.errors import ConfigurationError

_TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process without a sign, whatever starts the tests."""
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: None)
    for name in ("jax._src.distributed", "ray.train", "torch.distributed"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def _group(size: int) -> Any:
    return SimpleNamespace(is_available=lambda: True, is_initialized=lambda: size > 0, get_world_size=lambda: size)


def _ray(size: int) -> Any:
    return SimpleNamespace(get_context=lambda: SimpleNamespace(get_world_size=lambda: size))


def _jax(size: int | None) -> Any:
    return SimpleNamespace(global_state=SimpleNamespace(num_processes=size))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    "modules",
    [
        {},
        {"jax._src.distributed": _jax(1), "ray.train": _ray(1), "torch.distributed": _group(1)},
        {"jax._src.distributed": _jax(None), "ray.train": SimpleNamespace(), "torch.distributed": _group(0)},
    ],
)
def test_a_process_without_a_sign_may_train_alone(modules: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    loop.check_no_siblings({})


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("name", "module", "words"),
    [
        ("jax._src.distributed", _jax(2), "jax.distributed has 2 processes"),
        ("ray.train", _ray(4), "Ray Train started 4 workers"),
    ],
)
def test_processes_of_frameworks_are_refused(
    name: str, module: Any, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, module)
    with pytest.raises(ConfigurationError, match=words + r".*'psdist run'.*init_process_group.*alone=True"):
        loop.check_no_siblings({})


@pytest.mark.usefixtures("alone")
def test_a_process_of_multiprocessing_is_refused_unless_its_group_says_that_it_is_the_only_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As ``torch.multiprocessing.spawn`` starts one process on a machine with one GPU."""
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: SimpleNamespace(pid=7))
    with pytest.raises(ConfigurationError, match=r"started by multiprocessing \(its parent is process 7\)"):
        loop.check_no_siblings({})
    monkeypatch.setitem(sys.modules, "torch.distributed", _group(1))
    loop.check_no_siblings({})


@pytest.mark.usefixtures("alone")
def test_ranks_are_those_of_an_open_group_or_of_torchruns_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    assert loop.torch_group_size() == 0
    monkeypatch.setitem(sys.modules, "torch.distributed", _group(2))
    assert loop.torch_group_size() == 2
    assert loop.names_torch_store(_TORCHRUN)
    assert not loop.names_torch_store(_TORCHRUN | {"WORLD_SIZE": "1"})
    assert not loop.names_torch_store({name: value for name, value in _TORCHRUN.items() if name != "MASTER_PORT"})
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: SimpleNamespace(pid=7))
    assert not loop.names_torch_store(_TORCHRUN)


def test_alone_contradicts_a_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PSDIST_SCHEDULER", "192.0.2.1:7")
    with pytest.raises(ConfigurationError, match=r"alone=True\) is called, but PSDIST_SCHEDULER names"):
        psdist.init(alone=True)
    with pytest.raises(ConfigurationError, match="but scheduler= names"):
        psdist.init("192.0.2.1:7", alone=True)


def test_a_place_is_stated_for_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    with loop.placed(0, 1, None, 1):
        assert [os.environ[name] for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")] == ["0", "2", "1"]
    assert (os.environ["RANK"], "LOCAL_WORLD_SIZE" in os.environ) == ("3", False)

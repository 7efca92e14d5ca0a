"""Hyperparameters that change while training: those that an optimizer takes, in one form, and those that it refuses."""

from __future__ import annotations

import re

import pytest

from psdist import optim
from psdist.errors import InvalidArgumentError
from psdist.hyperparameters import Setting, by_group

SPEC = optim.SGD(lr=0.1, momentum=0.9, overrides=(optim.override("*.bias", weight_decay=0.5),))


def test_settings_are_sorted_and_only_those_that_differ() -> None:
    changes = {1: {"weight_decay": 0.5, "momentum": 0.8, "lr": 0}, 0: {"lr": 0.1, "weight_decay": 1}}
    settings = SPEC.check_settings(changes)
    assert settings == (Setting(0, "weight_decay", 1.0), Setting(1, "lr", 0.0), Setting(1, "momentum", 0.8))
    assert SPEC.check_settings(by_group(settings)) == settings
    assert SPEC.check_settings({}) == SPEC.check_settings({0: {}, 1: {"weight_decay": 0.5}}) == ()


def test_every_number_can_change_or_is_refused() -> None:
    """A new hyperparameter must be decided here."""
    for spec in [optim.OPTIMIZERS[kind]() for kind in optim.OPTIMIZERS]:
        kept = {
            *("nesterov", "centered", "amsgrad", "maximize", "decoupled_weight_decay"),
            "initial_accumulator_value",
            *(("beta1", "momentum_decay") if spec.kind == "nadam" else ()),
            *(("momentum",) if spec.kind in ("sgd", "rmsprop") else ()),  # It is 0 here.
        }
        refused = set()
        for name, value in spec.setting_defaults(0).items():
            changed = value * 0.5 if value and name != "etaplus" else value + 1.0
            try:
                assert spec.check_settings({0: {name: changed}}) == (Setting(0, name, changed),)
            except InvalidArgumentError as error:
                assert "while training, as" in error.message
                refused.add(name)
        assert refused == kept & set(spec.values())


def test_refused_settings_name_the_remedy() -> None:
    for spec, changes, said in [
        (SPEC, {2: {"lr": 0.1}}, "settings of group 2: use 0 for the optimizer's own, .* up to 1"),
        (SPEC, {-1: {"lr": 0.1}}, "settings of group -1"),
        (SPEC, {"*.bias": {"lr": 0.1}}, r"settings of group '\*\.bias'"),
        (SPEC, {0: {"beta1": 0.1}}, "settings of group 0: SGD has no hyperparameter 'beta1'; it has lr, momentum,"),
        (SPEC, {0: {"lambd_before": 0.1}}, "no hyperparameter 'lambd_before'"),
        (SPEC, {1: {"lr": -0.1}}, "settings of group 1: sgd lr=-0.1 is out of range"),
        (SPEC, {1: {"lr": float("nan")}}, "sgd lr=nan is out of range"),
        (SPEC, {1: {"lr": 1e39}}, "out of range"),
        (SPEC, {1: {"lr": True}}, "out of range"),
        (SPEC, {1: {"lr": "0.1"}}, "out of range"),
        (SPEC, {0: {"momentum": 0.0}}, "cannot change from 0.9 to 0 .*: use a value above 0 in the specification"),
        (SPEC, {0: {"nesterov": 1.0}}, "nesterov cannot change from 0 to 1 while training"),
        (optim.SGD(momentum=0.9, nesterov=True), {0: {"dampening": 0.5}}, "nesterov=True needs"),
        (optim.Adam(), {0: {"beta1": 1.0}}, "adam beta1=1.0 is out of range"),
        (optim.Adam(), {0: {"eps": 0.0}}, "adam eps=0.0 is out of range"),
        (optim.NAdam(), {0: {"beta1": 0.5}}, "the state of earlier updates depends on it"),
        (optim.Rprop(), {0: {"etaplus": 0.5}}, "rprop etaplus=0.5"),
        (optim.Adagrad(), {0: {"initial_accumulator_value": 1.0}}, "takes effect only when the state begins"),
        (SPEC, [(0, "lr", 0.1)], "settings=.* use a mapping such as"),
        (SPEC, {0: 0.1}, "settings=0.1 .* use a mapping such as"),
    ]:
        with pytest.raises(InvalidArgumentError, match=said):
            spec.check_settings(changes)


def test_a_rate_that_no_float32_holds_is_refused() -> None:
    settings = SPEC.check_settings({1: {"lr": 1e35}})
    SPEC.check_rates(1.0, settings)
    with pytest.raises(InvalidArgumentError, match=re.escape("use less, as lr=1e+35 of group 1 times it is beyond")):
        SPEC.check_rates(1e9, settings)


def test_a_setting_that_is_given_twice_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="settings of group 1: 'lr' is given twice"):
        by_group((Setting(1, "lr", 0.1), Setting(1, "lr", 0.2)))

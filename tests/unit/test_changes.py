"""Differences between two settings of parameters, as text, and which of them need a reset of the optimizer's state."""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import permutations
from typing import Any

import pytest

from psdist import optim
from psdist.changes import changes
from psdist.consistency import ASP, BSP, SSP
from psdist.types import ParametersSpec

SPEC = ParametersSpec("mlp", optim.SGD(lr=0.1), BSP())


def texts(before: optim.Optimizer, after: optim.Optimizer) -> list[str]:
    return [f"{change}" for change in changes(replace(SPEC, optimizer=before), replace(SPEC, optimizer=after))]


def needing(before: optim.Optimizer, after: optim.Optimizer) -> list[str]:
    found = changes(replace(SPEC, optimizer=before), replace(SPEC, optimizer=after))
    return [change.name for change in found if change.needs_reset]


def test_equal_settings_have_no_changes() -> None:
    assert changes(SPEC, SPEC) == ()
    assert changes(SPEC, replace(SPEC, slice_elements=5, reset_optimizer=True)) == ()


def test_changes_are_told_as_a_user_would_write_them() -> None:
    assert texts(optim.Adam(), optim.Adam(lr=0.01, betas=(0.9, 0.95), eps=1e-6)) == [
        "lr 0.001 -> 0.01",
        "betas (0.9, 0.999) -> (0.9, 0.95)",
        "eps 1e-08 -> 1e-06",
    ]
    new = optim.SGD(
        lr=0.1,
        schedule=optim.Cosine(1000, warmup_steps=10),
        max_grad_norm=1.0,
        overrides=(optim.override("*.bias", lr=0.2, weight_decay=0.0),),
    )
    assert texts(optim.SGD(lr=0.1), new) == [
        "schedule Constant() -> Cosine(warmup_steps=10, total_steps=1000)",
        "max_grad_norm 0.0 -> 1.0",
        "overrides () -> (override('*.bias', lr=0.2, weight_decay=0.0))",
    ]
    other = replace(SPEC, consistency=SSP(3), non_finite="skip")
    assert [f"{change}" for change in changes(SPEC, other)] == [
        "consistency BSP() -> SSP(staleness=3)",
        "non_finite 'reject' -> 'skip'",
    ]


def test_what_needs_a_reset_comes_first() -> None:
    assert texts(optim.SGD(lr=0.1), optim.SGD(lr=0.2, momentum=0.9)) == ["momentum 0.0 -> 0.9", "lr 0.1 -> 0.2"]
    old, new = optim.SGD(lr=0.1, max_grad_norm=2.0), optim.Lion(lr=0.5, schedule=optim.Step(3))
    assert texts(old, new) == [
        "optimizer SGD(lr=0.1) -> Lion(lr=0.5)",
        "schedule Constant() -> Step(every=3)",
        "max_grad_norm 2.0 -> 0.0",
    ]


def test_long_values_are_cut() -> None:
    many = tuple(optim.override(f"layer{number}", lr=0.1) for number in range(256))
    (text,) = texts(optim.SGD(), optim.SGD(overrides=many))
    assert len(text) < 300 and text.endswith("...")


#: Fields of each optimizer. The change of one with ``!`` needs a reset.
MOMENTS = "lr betas eps weight_decay maximize"
FIELDS: dict[type[optim.Optimizer], str] = {
    optim.SGD: "lr momentum! dampening weight_decay nesterov maximize",
    optim.ASGD: "lr lambd alpha t0 weight_decay maximize",
    optim.Rprop: "lr! etas step_sizes maximize",
    optim.Adam: f"{MOMENTS} decoupled_weight_decay amsgrad!",
    optim.AdamW: f"{MOMENTS} amsgrad!",
    optim.Adamax: MOMENTS,
    optim.NAdam: f"{MOMENTS} decoupled_weight_decay momentum_decay",
    optim.RAdam: f"{MOMENTS} decoupled_weight_decay",
    optim.Adagrad: "lr lr_decay weight_decay initial_accumulator_value! eps maximize",
    optim.Adadelta: "lr rho eps weight_decay maximize",
    optim.RMSprop: "lr alpha eps weight_decay momentum! centered! maximize",
    optim.Lion: "lr betas weight_decay maximize",
    optim.FTRL: "lr beta l1 l2 maximize",
    optim.Mean: "lr",
}
SHARED: dict[str, Any] = {
    "schedule": optim.Cosine(9),
    "max_grad_norm": 1.0,
    "overrides": (optim.override("*", lr=0.5),),
}
PAIRS = {"betas": (0.8, 0.95), "etas": (0.4, 2.0), "step_sizes": (0.1, 2.0)}


def test_every_field_of_every_optimizer() -> None:
    """A new field must be decided here, and in docs/snapshots.md."""
    for kind, names in FIELDS.items():
        decided = {name.rstrip("!"): name.endswith("!") for name in names.split()}
        assert decided.keys() | SHARED.keys() == {field.name for field in fields(kind)}
        for name, needs_reset in decided.items():
            # Nesterov needs momentum before and after.
            base = kind(**({"momentum": 0.5} if name == "nesterov" else {}))
            default = getattr(base, name)
            after = replace(base, **{name: not default if isinstance(default, bool) else PAIRS.get(name, 0.25)})
            for one, other in ((base, after), (after, base)):
                assert needing(one, other) == [name] * needs_reset
                assert [text.split()[0] for text in texts(one, other)] == [name]
                if name not in kind.initial:
                    assert (one.state_names != other.state_names) == needs_reset
        for name, value in SHARED.items():
            is_initial = name == "overrides" and "lr" in kind.initial
            assert needing(kind(), replace(kind(), **{name: value})) == [name] * is_initial


def test_another_momentum_is_arithmetic() -> None:
    for kind in (optim.SGD, optim.RMSprop):
        assert needing(kind(momentum=0.9), kind(momentum=0.5)) == []


def test_overrides_that_change_which_tensors_have_a_state_need_a_reset() -> None:
    for before, after in [
        (optim.SGD(), optim.SGD(overrides=(optim.override("*.bias", momentum=0.9),))),
        (
            optim.SGD(overrides=(optim.override("*.bias", momentum=0.9),)),
            optim.SGD(overrides=(optim.override("*.weight", momentum=0.9),)),
        ),
        (optim.Adam(), optim.Adam(overrides=(optim.override("*", amsgrad=True),))),
        (optim.Adagrad(), optim.Adagrad(overrides=(optim.override("*", initial_accumulator_value=0.5),))),
        (optim.Rprop(), optim.Rprop(overrides=(optim.override("*", lr=0.5),))),
    ]:
        assert needing(before, after) == needing(after, before) == ["overrides"]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (optim.SGD(momentum=0.9), optim.SGD(momentum=0.9, overrides=(optim.override("*.bias", momentum=0.5),))),
        (optim.Adam(), optim.Adam(overrides=(optim.override("*.bias", maximize=True, decoupled_weight_decay=True),))),
        (
            optim.SGD(overrides=(optim.override("*.bias", momentum=0.9),)),
            optim.SGD(overrides=(optim.override("*.bias", momentum=0.5, lr=0.5),)),
        ),
    ],
)
def test_other_overrides_need_no_reset(before: optim.Optimizer, after: optim.Optimizer) -> None:
    assert needing(before, after) == needing(after, before) == []


def test_another_kind_needs_a_reset_even_where_the_arrays_have_the_same_names() -> None:
    for one, other in [*permutations(optim.OPTIMIZERS.values(), 2)]:
        assert needing(one(), other()) == ["optimizer"]


def test_consistency_and_non_finite_do_not_touch_the_state() -> None:
    for before, after in [*permutations([BSP(), BSP(1, "sqrt"), SSP(2), ASP()], 2)]:
        found = changes(replace(SPEC, consistency=before), replace(SPEC, consistency=after, non_finite="skip"))
        assert [(change.name, change.needs_reset) for change in found] == [
            ("consistency", False),
            ("non_finite", False),
        ]

"""The synchronous API for editors and type checkers: its own documentation, and named arguments."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest

import psdist
from psdist.errors import ConfigurationError


def methods(cls: type) -> dict[str, str]:
    """Return the documentation of a class's public methods and properties, by name."""
    return {name: inspect.getdoc(value) or "" for name, value in vars(cls).items() if not name.startswith("_")}


@pytest.mark.parametrize("cls", [psdist.Client, psdist.Parameters, psdist.Bucket], ids=lambda cls: cls.__name__)
def test_each_method_documents_itself(cls: type) -> None:
    documented = {**methods(cls), "the class": inspect.getdoc(cls) or ""}
    assert not [name for name, text in documented.items() if not text or "See ``Async" in text or "see ``Async" in text]


def test_a_call_documents_its_arguments_and_errors() -> None:
    for name in ["pull", "push", "push_pull", "push_pull_async", "keep_state"]:
        text = methods(psdist.Parameters)[name]
        arguments = list(inspect.signature(getattr(psdist.Parameters, name)).parameters)[1:]
        assert all(re.search(rf"\b{argument}(, \w+)*:", text) for argument in arguments) and "Raises" in text


def test_init_takes_the_arguments_of_the_client_by_name() -> None:
    init, client = (inspect.signature(what).parameters for what in (psdist.init, psdist.Client))
    assert [one for one in init.values() if one.name != "alone"] == list(client.values())
    assert all(f"{name}:" in (inspect.getdoc(psdist.init) or "") for name in init)
    with pytest.raises(TypeError, match="rnk"):
        psdist.init(rnk=3)  # type: ignore[call-arg]


def test_init_hands_its_arguments_on(monkeypatch: pytest.MonkeyPatch) -> None:
    from psdist.client import context

    given: list[dict[str, Any]] = []

    def connect(arguments: dict[str, Any]) -> None:
        given.append(arguments)
        raise ConfigurationError("enough")

    monkeypatch.setattr(context, "_connect", connect)
    for call in (psdist.init, lambda: psdist.init("h:1", rank=0, transport="grpc")):
        with pytest.raises(ConfigurationError, match="enough"):
            call()
    assert given == [{}, {"scheduler": "h:1", "rank": 0, "transport": "grpc"}]


def test_all_names_of_the_package_are_there() -> None:
    assert {"consistency", "optim", "compression", "errors", "data"} <= set(psdist.__all__)
    assert all(hasattr(psdist, name) for name in psdist.__all__)

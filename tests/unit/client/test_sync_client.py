"""The synchronous API equals its generator's output for the asyncio API."""

from __future__ import annotations

import ast

import pytest

from tests import sync_client
from tests.sync_client import Module

each_module = pytest.mark.parametrize("module", sync_client.MODULES, ids=lambda module: module.target.stem)


@each_module
def test_the_module_is_up_to_date(module: Module) -> None:
    text = module.target.read_text(encoding="utf-8")
    assert text == sync_client.generated(module), "run python -m tests.sync_client"


@each_module
def test_docstrings_speak_of_the_synchronous_api(module: Module) -> None:
    tree = ast.parse(module.target.read_text(encoding="utf-8"))
    for name in module.sources:
        (node,) = (one for one in tree.body if isinstance(one, ast.ClassDef) and one.name == name)
        texts = [ast.get_docstring(one) or "" for one in (node, *node.body) if hasattr(one, "body")]
        assert not [text for text in texts if "Async" in text or "await" in text or "``Client`` alone" in text]


@each_module
def test_each_table_names_members_that_exist(module: Module) -> None:
    for name, source in module.sources.items():
        _, node = sync_client.find_class(module.target.parent, f"Async{name}")
        members = {one.name for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)}
        calls = source.async_only | source.reading | source.ending | source.optional
        assert {*calls, *dict(source.phases), *dict(source.bodies)} <= members

"""The synchronous API equals its generator's output for the asyncio API."""

from __future__ import annotations

import ast

from tests import sync_client


def test_the_module_is_up_to_date() -> None:
    assert sync_client.TARGET.read_text(encoding="utf-8") == sync_client.generated(), "run python -m tests.sync_client"


def test_docstrings_speak_of_the_synchronous_api() -> None:
    for name in sync_client.SOURCES:
        tree = ast.parse(sync_client.TARGET.read_text(encoding="utf-8"))
        (node,) = (one for one in tree.body if isinstance(one, ast.ClassDef) and one.name == name)
        texts = [ast.get_docstring(one) or "" for one in (node, *node.body) if hasattr(one, "body")]
        assert not [text for text in texts if "Async" in text or "await" in text or "``Client`` alone" in text]


def test_each_table_names_members_that_exist() -> None:
    for name, source in sync_client.SOURCES.items():
        _, node = sync_client.find_class(f"Async{name}")
        members = {one.name for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)}
        named = {*source.async_only, *source.reading, *dict(source.phases), *dict(source.bodies)}
        assert named <= members

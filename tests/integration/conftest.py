"""Fixtures of tests for scripts that have no launcher."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import psdist
from psdist.client.context import Context


@pytest.fixture(scope="module")
def alone() -> Iterator[Context]:
    """Context of a script without a launcher."""
    with psdist.init() as context:
        assert context.world_size == 1
        yield context


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """Name of a parameter set for this test."""
    return "".join(letter if letter.isalnum() else "-" for letter in request.node.name)

"""Clients and their handles can neither be pickled nor copied, and their errors name the alternative."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from psdist.client.async_client import AsyncClient
from psdist.client.datasets import AsyncDataset
from psdist.client.parameters import AsyncParameters
from psdist.client.sync_client import Bucket, Client, Dataset, Parameters
from psdist.errors import InvalidArgumentError


def test_neither_pickled_nor_copied() -> None:
    cls: Any
    for cls in [AsyncClient, Client, AsyncParameters, Parameters, Bucket, AsyncDataset, Dataset]:
        one = cls.__new__(cls)
        # pickle calls __reduce_ex__.
        for duplicate in (lambda one: one.__reduce_ex__(4), copy.copy, copy.deepcopy):
            with pytest.raises(InvalidArgumentError, match=f"a {cls.__name__} cannot be pickled or copied"):
                duplicate(one)

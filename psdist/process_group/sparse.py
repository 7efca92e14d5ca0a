"""All-reduce of sparse tensors: all ranks' indices and values are collected, and added in rank order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce

import numpy as np
import torch
from torch import Tensor

from psdist.collectives.group import AsyncWorkerGroup
from psdist.errors import ShapeMismatchError
from psdist.process_group.work import TensorMemory


async def all_reduce_sparse(group: AsyncWorkerGroup, tensors: Sequence[Tensor], op: str, timeout: float | None) -> None:
    """Add the sparse tensors (COO, on the CPU, of one shape) of all ranks and lists into each of ``tensors``.

    op: "sum" or "avg".
    timeout: seconds for each of the calls.

    Raises ShapeMismatchError if the ranks' shapes differ, or a rank announces more values than the shape has places.
    """
    own = reduce(torch.add, [tensor.detach() for tensor in tensors]).coalesce()
    facts = await group.all_gather(np.array([own._nnz(), own.sparse_dim(), *own.shape]), timeout=timeout)
    if len({tuple(row) for row in facts[:, 1:]}) > 1:
        raise ShapeMismatchError(
            f"ranks give sparse tensors of shapes {[tuple(row[2:]) for row in facts]}: give one shape"
        )
    places = math.prod(own.shape[: own.sparse_dim()])
    if facts[:, 0].min() < 0 or facts[:, 0].max() > places:
        raise ShapeMismatchError(
            f"ranks announce {facts[:, 0].tolist()} values of a sparse tensor with {places} places: give one shape"
        )
    indices = await _gather_uneven(group, own.indices().t(), facts[:, 0], timeout)
    values = await _gather_uneven(group, own.values(), facts[:, 0], timeout)
    total = torch.sparse_coo_tensor(indices.t(), values, own.shape, check_invariants=True).coalesce()
    for tensor in tensors:
        tensor.copy_(total / (group.size * len(tensors)) if op == "avg" else total)


async def _gather_uneven(group: AsyncWorkerGroup, rows: Tensor, counts: np.ndarray, timeout: float | None) -> Tensor:
    """Return the rows of all ranks, one rank after another. counts: number of each rank's rows."""
    memory = [torch.empty((int(count), *rows.shape[1:]), dtype=rows.dtype) for count in counts]
    given = TensorMemory(rows).array
    await group.all_to_all_uneven([given] * group.size, [TensorMemory(one).array for one in memory], timeout=timeout)
    return torch.cat(memory)

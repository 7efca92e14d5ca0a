"""Broadcast of plain values between workers, as JSON."""

from __future__ import annotations

import json
import os
from typing import Any

import torch
import torch.distributed as dist

from psdist.errors import InvalidArgumentError, LimitExceededError
from psdist.wire.limits import VALUE_BYTES_MAX


def broadcast_value(value: Any, source: int = 0) -> Any:
    """Return the value that rank ``source`` gave, on all workers.

    value: None, a boolean, a number, text, a path (which becomes text), or a list or dict of them.

    Raises InvalidArgumentError for other values, LimitExceededError for more than 1 MiB of JSON.
    """
    try:
        content = json.dumps(value, default=os.fspath).encode()
    except (TypeError, ValueError):
        raise InvalidArgumentError(
            f"value of type {type(value).__qualname__} cannot be broadcast: use None, booleans, numbers, text, paths, "
            "and lists and dicts of them, or torch.distributed.broadcast for tensors"
        ) from None
    if not dist.is_initialized():
        return value
    size = torch.tensor(len(content))
    dist.broadcast(size, source)
    if int(size) > VALUE_BYTES_MAX:
        raise LimitExceededError(f"a broadcast value has {int(size)} bytes of JSON: use at most {VALUE_BYTES_MAX}")
    body = torch.zeros(int(size), dtype=torch.uint8)
    if dist.get_rank() == source:
        body.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
    dist.broadcast(body, source)
    return value if dist.get_rank() == source else json.loads(body.numpy().tobytes())

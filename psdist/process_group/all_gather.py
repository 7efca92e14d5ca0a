"""All-gather of bytes through a ``ServerMean``, and broadcasts of plain values by it, as JSON.

Each worker pushes its bytes into its own place and zeros elsewhere, so the mean is each worker's bytes divided by the
number of contributions. A flag per worker travels in each slice. It gives this number, which differs between slices
only if a worker leaves in the middle of a push.

Bytes travel as 16-bit numbers, which float32 represents exactly, also after the division.
"""

from __future__ import annotations

import json
import os
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from psdist.client.means import ServerMean
from psdist.client.sync_client import Client
from psdist.errors import InvalidArgumentError, LimitExceededError
from psdist.types import SLICE_ELEMENTS_MIN
from psdist.wire.limits import COLLECTIVE_BYTES_MAX, COLLECTIVE_WORKERS_MAX, VALUE_BYTES_MAX

#: Elements of a slice, which holds the flags and the words of all workers.
_SLICE: Final = SLICE_ELEMENTS_MIN
#: Slices of a later round of a long exchange.
_SLICES: Final = 32
#: Bytes in front of the payload that give its length.
_PREFIX: Final = 8
_TENSOR: Final = "words"


class AllGather:
    """Collects the bytes of all workers. All workers make the same calls.

    name: prefix of the parameter sets that carry the bytes.

    Raises InvalidArgumentError for more than 512 workers.
    """

    def __init__(self, client: Client, name: str, rank: int, world_size: int) -> None:
        if world_size > COLLECTIVE_WORKERS_MAX:
            raise InvalidArgumentError(
                f"{world_size} workers are too many to exchange values through torch.distributed: use at most "
                f"{COLLECTIVE_WORKERS_MAX}"
            )
        self._places = {count: _Slices(client, f"{name}/{count}", rank, world_size, count) for count in (1, _SLICES)}

    def exchange(self, payload: bytes) -> list[bytes | None]:
        """Return the payload of each rank, and None for ranks that have left the run.

        Raises LimitExceededError for a payload of more than 1 GiB, PushDroppedError if this worker was expelled
        meanwhile, and the errors of ``Parameters.push_pull``.
        """
        sent = len(payload).to_bytes(_PREFIX, "little") + payload
        first = self._places[1]
        received = first.exchange(sent[: first.bytes])
        lengths = [None if part is None else _PREFIX + int.from_bytes(part[:_PREFIX], "little") for part in received]
        whole = [None if part is None else bytearray(part) for part in received]
        longest = max((length for length in lengths if length is not None), default=0)
        if longest > _PREFIX + COLLECTIVE_BYTES_MAX:
            raise LimitExceededError(
                f"a worker gives {longest - _PREFIX} bytes to a collective of torch.distributed: use at most "
                f"{COLLECTIVE_BYTES_MAX}, such as smaller batches of predictions (eval_accumulation_steps)"
            )
        start = first.bytes
        while start < longest:
            more = self._places[_SLICES]
            for rank, part in enumerate(more.exchange(sent[start : start + more.bytes])):
                if part is None or whole[rank] is None:
                    whole[rank] = None
                else:
                    whole[rank] += part  # type: ignore[operator]  # not None, as just checked
            start += more.bytes
        return [
            None if found is None or length is None else bytes(found[_PREFIX:length])
            for found, length in zip(whole, lengths, strict=True)
        ]


class _Slices:
    """A parameter set of ``count`` slices. bytes: the most that one worker sends in an exchange."""

    def __init__(self, client: Client, name: str, rank: int, world_size: int, count: int) -> None:
        self._rank = rank
        self._world_size = world_size
        self._words = (_SLICE - world_size) // world_size
        self.bytes = 2 * self._words * count
        self._sent = np.zeros((count, _SLICE), np.float32)
        self._sent[:, rank] = 1.0
        self._mean = ServerMean(client, name, on_drop="raise", slice_elements=_SLICE)
        self._mean.open({_TENSOR: self._sent.ravel()})

    def exchange(self, part: bytes) -> list[bytes | None]:
        """Return each rank's part, filled with zeros to ``bytes``."""
        words = np.frombuffer(part.ljust(self.bytes, b"\0"), "<u2").reshape(-1, self._words)
        self._sent[:, self._place(self._rank)] = words
        means = self._mean.exchange({_TENSOR: self._sent.ravel()})[_TENSOR].reshape(self._sent.shape)
        contributions = np.rint(1.0 / means[:, : self._world_size].max(axis=1, keepdims=True))
        return [self._part(means, contributions, rank) for rank in range(self._world_size)]

    def _place(self, rank: int) -> slice:
        start = self._world_size + rank * self._words
        return slice(start, start + self._words)

    def _part(self, means: NDArray[np.float32], contributions: NDArray[np.float32], rank: int) -> bytes | None:
        if not means[:, rank].all():
            return None
        words: NDArray[np.uint16] = np.rint(means[:, self._place(rank)] * contributions).astype("<u2")
        return words.tobytes()


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

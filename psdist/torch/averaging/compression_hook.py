"""Communication hook for torch's DistributedDataParallel: gradients are compressed by psdist's codecs.

The buckets of a model are reduced over links between the workers, in a group of their own, whatever the backend of
torch's process group is.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from psdist.client.context import Context, init
from psdist.client.process import loop
from psdist.collectives.compression import AllReduceCompression
from psdist.compression import Codec
from psdist.errors import ClosedError, DTypeMismatchError, InvalidArgumentError, PsdistError

Floats = NDArray[np.float32]


class CompressionState:
    """State of ``compression_hook`` for one model: its codec, and the residual of each parameter.

    compression: a codec or its name, as for pushes. Each parameter is encoded separately.
    process_group: the group of the model; None for all workers of the run. All of its ranks make the object.
    context: this script's place in its run; None uses that of ``psdist.init()``.

    If the gradients of any worker are not finite, those of all workers become NaN, and no residual changes. Raises
    UnknownCodecError, InvalidArgumentError for codecs that all-reduces cannot use, and the errors of ``new_group``.
    """

    def __init__(
        self, compression: Codec | str, process_group: dist.ProcessGroup | None = None, context: Context | None = None
    ) -> None:
        AllReduceCompression(compression)  # Raises an error for a codec that cannot be used.
        self._codec = compression
        context = init() if context is None else context
        ranks = None if process_group is None else dist.get_process_group_ranks(process_group)
        self._group = context.new_group(ranks).wrapped
        #: By the parameters of a bucket.
        self._compressions: dict[tuple[int, ...], AllReduceCompression] = {}
        #: Residuals of parameters in buckets of the first step.
        self._residuals: dict[int, Floats] = {}
        self._order = asyncio.Lock()

    def reduce(self, buffer: Tensor, parameters: Sequence[Tensor]) -> torch.futures.Future[Tensor]:
        """Return the future of a bucket's mean gradients, which are written to ``buffer``.

        buffer: float32[n], on the CPU. parameters: those of the bucket, in order.
        """
        if buffer.dtype != torch.float32 or buffer.device.type != "cpu":
            raise DTypeMismatchError(
                f"a bucket of {buffer.dtype} on {buffer.device} cannot be compressed: use float32 parameters on the CPU"
            )
        compression = self._compression_of(parameters)
        ended: torch.futures.Future[PsdistError | None] = torch.futures.Future()

        def result(future: torch.futures.Future[PsdistError | None]) -> Tensor:
            # torch's C++ code sees errors that a callback raises, and none that Python has set.
            if (error := future.value()) is not None:
                raise RuntimeError(f"{type(error).__name__}: {error}")
            return buffer

        averaged: torch.futures.Future[Tensor] = ended.then(result)
        loop.shared().start(self._run(buffer.numpy(), compression, ended))
        return averaged

    async def _run(
        self, array: Floats, compression: AllReduceCompression, ended: torch.futures.Future[PsdistError | None]
    ) -> None:
        """Average a bucket, and set ``ended`` with the error of it."""
        error: PsdistError | None = ClosedError("the worker leaves the run")
        try:
            await self._reduce(array, compression)
            error = None
        except PsdistError as raised:
            error = raised
        finally:  # In a thread, because callbacks of a script may make calls.
            threading.Thread(target=ended.set_result, args=(error,), name="psdist callbacks", daemon=True).start()

    def _compression_of(self, parameters: Sequence[Tensor]) -> AllReduceCompression:
        """Return the compression of a bucket. After the first step torch forms other buckets, which continue with the
        residuals of their parameters."""
        key = tuple(map(id, parameters))
        if key not in self._compressions:
            for former in [one for one in self._compressions if not set(one).isdisjoint(key)]:
                self._residuals |= zip(former, self._compressions.pop(former).residuals(), strict=True)
            made = self._compressions[key] = AllReduceCompression(self._codec, [tuple(one.shape) for one in parameters])
            made.continue_with([self._residuals.pop(id(one), np.zeros(one.numel(), np.float32)) for one in parameters])
        return self._compressions[key]

    async def _reduce(self, array: Floats, compression: AllReduceCompression) -> None:
        async with self._order:  # The two calls of each bucket follow each other in all ranks.
            is_finite = np.isfinite(array).all()
            if (await self._group.all_reduce(np.array([is_finite]), "min")).all():
                await self._group.all_reduce(array, "avg", out=array, compression=compression)
            else:
                array.fill(np.nan)


def compression_hook(state: CompressionState, bucket: Any) -> torch.futures.Future[Tensor]:
    """Average a bucket of gradients: ``model.register_comm_hook(CompressionState("int8"), compression_hook)``.

    bucket: torch's GradBucket.
    """
    if not isinstance(state, CompressionState):
        raise InvalidArgumentError(
            f"the state of compression_hook is {state!r:.60}: pass psdist.torch.CompressionState('int8')"
        )
    return state.reduce(bucket.buffer(), bucket.parameters())


#: torch compares a hook's annotations as objects, and those of this module are text.
compression_hook.__annotations__ = {}

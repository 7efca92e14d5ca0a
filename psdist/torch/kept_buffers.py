"""A model's buffers, such as running statistics, in the snapshots of its run, and the metadata of its ``state_dict``.

Each worker saves its own buffers and gets them back by rank when the run resumes. A snapshot of step S holds them from
the call that made push S - 1, after the forward pass of its batch.

Not here: initial values of all workers (``values``), buffers shared by the workers (``data_parallel``).
"""

from __future__ import annotations

import logging
from collections.abc import Container, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from psdist.client.session.worker_state import DeferredArray
from psdist.client.sync_client import Client, Parameters
from psdist.snapshots.model_tensors import BUFFERS, DESCRIPTION, ModelDescription
from psdist.torch.inspection import COMPILED
from psdist.torch.values import from_bytes, is_plain, raw_bytes

logger = logging.getLogger("psdist")


class BytesOfTensor(DeferredArray):
    """Bytes of a buffer, read when a snapshot needs them."""

    dtype: ClassVar[np.dtype[Any]] = np.dtype(np.uint8)


class KeptBuffers:
    """Buffers in the ``state_dict`` of ``model``. A module may replace one by another of its shape.

    trained: names of the model's parameter sets.
    fixed: name of the parameter set of ``fixed_tensors``.
    fixed_tensors: frozen parameters and buffers by name.
    aliases: tensors that are the memory of others, and are not saved on their own: their names and those of the others.
    """

    def __init__(
        self,
        model: nn.Module,
        trained: Iterable[str],
        fixed: str,
        fixed_tensors: Mapping[str, Tensor],
        aliases: Mapping[str, str],
    ) -> None:
        buffers = {
            f"{prefix}.{key}".replace(COMPILED, "").removeprefix("."): (module, key)
            for prefix, module in model.named_modules()
            for key, buffer in module._buffers.items()
            if buffer is not None and key not in module._non_persistent_buffers_set
        }
        buffers = {name: place for name, place in buffers.items() if name not in aliases}
        #: Owning module of each buffer, and the buffer's name in it.
        self._places = {name: (module, key) for name, (module, key) in buffers.items() if module._buffers[key].numel()}
        frozen = {name: tensor for name, tensor in fixed_tensors.items() if isinstance(tensor, nn.Parameter)}
        plain = [name for name, tensor in frozen.items() if is_plain(tensor) and tensor.numel()]
        encoded = {name: tensor for name, tensor in frozen.items() if name not in plain}
        encoded |= {name: module._buffers[key] for name, (module, key) in buffers.items()}
        self._description = ModelDescription(
            tuple(trained), fixed, tuple(plain),
            {name: _form(tensor) for name, tensor in encoded.items()}, _aliases(model, buffers, aliases),
        )  # fmt: skip
        self._description_bytes = len(self._description.to_bytes())
        self._is_needed = bool(fixed_tensors or self._description.aliases)
        self._is_restored = False

    def save_in_snapshots(self, client: Client, handle: Parameters) -> None:
        """Save the buffers in snapshots from now on, together with the pushes of ``handle``.

        In a resumed run the buffers become those that the snapshot holds for this rank. Logs a warning if it holds
        none.
        """
        if not self._is_needed:
            return
        handle.keep_state(self._save, self._restore, prefix=BUFFERS)
        if self._places and not self._is_restored and (client.joins_late(handle.name) or handle.restored):
            logger.warning(
                "buffers of %r (%s) start with their initial values instead of those at the run's current step: no "
                "snapshot holds buffers of this worker, or other workers, which have their own, were already training. "
                "Save the model of a worker that has trained from the beginning",
                handle.name, ", ".join(list(self._places)[:4]),
            )  # fmt: skip

    def _save(self) -> dict[str, DeferredArray]:
        state: dict[str, DeferredArray] = {DESCRIPTION: BytesOfTensor(self._description_bytes, self._describe)}
        for name in self._places:
            # On the buffer's device, so that only snapshots copy it from there.
            buffer = self._buffer(name).detach().clone()
            state[name] = BytesOfTensor(buffer.nbytes, partial(_copied_bytes, buffer))
        return state

    def _describe(self) -> NDArray[np.uint8]:
        now = {name: _form(self._buffer(name)) for name in self._places}
        return np.frombuffer(
            replace(self._description, encoded={**self._description.encoded, **now}).to_bytes(), np.uint8
        )

    def _buffer(self, name: str) -> Tensor:
        module, key = self._places[name]
        buffer: Tensor | None = module._buffers[key]
        assert buffer is not None
        return buffer

    def _restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Load buffers from a snapshot's state.

        Called again, on another thread, when the run rolls back to a snapshot.
        """
        for name in state.keys() & self._places.keys():
            buffer = self._buffer(name)
            # By ``data``, because a backward pass under way would refuse a change.
            buffer.data.copy_(from_bytes(state[name], buffer).view_as(buffer))
            self._is_restored = True


def _copied_bytes(buffer: Tensor) -> NDArray[Any]:
    return raw_bytes(buffer).copy()


def _form(tensor: Tensor) -> tuple[str, tuple[int, ...]]:
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)


def _aliases(model: nn.Module, buffers: Container[str], shared: Mapping[str, str]) -> dict[str, str]:
    """Return the other names under which a ``state_dict`` lists tensors.

    buffers: names of those saved one by one.
    shared: names of tensors that are the memory of others.
    """
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        own = {key: one for key, one in module._buffers.items() if key not in module._non_persistent_buffers_set}
        for key, tensor in [*module._parameters.items(), *own.items()]:
            name = f"{prefix}.{key}".replace(COMPILED, "").removeprefix(".")
            if tensor is None:
                continue
            other = shared.get(name) or first.setdefault(id(tensor), name)
            if other != name and name not in buffers:
                aliases[name] = other
    return aliases

"""Names under which this process has wrapped models, so that no model takes the weights of another by accident.

A parameter set outlives the optimizer that was closed, and even the client: a second model of the same layout would
attach to it, as a restarted worker does. A restarted worker is another process, and has wrapped nothing yet.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from psdist.client.sync_client import Client
from psdist.errors import InvalidArgumentError


@dataclass
class _Use:
    """Last use of a name: the wrapped parameters, and their versions when the wrapper was closed."""

    client: weakref.ref[Client]
    shapes: dict[str, tuple[int, ...]]
    parameters: dict[str, weakref.ref[nn.Parameter]]
    versions: dict[str, tuple[int, int]] = field(default_factory=dict)


#: Uses by run, worker and name.
_uses: dict[tuple[str, str, str], _Use] = {}


class WrappedName:
    """Name of a model that is being wrapped.

    name: with a slash at its end for a parameter set per layer.
    is_late: the parameter sets of this name were in use before ``client`` registered.

    Raises InvalidArgumentError if this worker has wrapped another model of the same layout under the name, or if this
    model was written to since its wrapper was closed.
    """

    def __init__(self, client: Client, name: str, trained: Mapping[str, nn.Parameter], *, is_late: bool) -> None:
        self._client = client
        self._key = client.run_id, client.worker_id, name
        self._mine: _Use | None = None
        use, name = _uses.get(self._key), name.removesuffix("/")
        # Parameter sets of another layout are refused with the difference, and those of an earlier run are gone.
        if use is None or use.shapes != _shapes(trained) or not (use.client() is client or is_late):
            return
        if any(use.parameters[key]() is not one for key, one in trained.items()):
            raise InvalidArgumentError(
                f"the parameter set {name!r} holds the weights of another model, which this script wrapped before, and "
                f"this model would take them: give it another name=, such as name={name + '-2'!r}, or in a loop "
                f'name=f"{name}-{{number}}". To continue with the trained weights wrap the first model again'
            )
        for key, one in trained.items():
            if use.client() is client and use.versions.get(key, _version(one)) != _version(one):
                raise InvalidArgumentError(
                    f"parameter {key!r} was written to after close(), but the parameter set {name!r} still holds its "
                    "earlier values, and this call would load them: give another name= to train on from the present "
                    "ones"
                )

    def record(self, trained: Mapping[str, nn.Parameter]) -> None:
        """Record that the parameter sets of this name hold the weights of these parameters."""
        references = {key: weakref.ref(one) for key, one in trained.items()}
        self._mine = _uses[self._key] = _Use(weakref.ref(self._client), _shapes(trained), references)

    def release(self) -> None:
        """Record the present weights as those of the servers, when the wrapper is closed."""
        if self._mine is None:
            return
        found = {key: reference() for key, reference in self._mine.parameters.items()}
        self._mine.versions = {key: _version(one) for key, one in found.items() if one is not None}


def _shapes(trained: Mapping[str, nn.Parameter]) -> dict[str, tuple[int, ...]]:
    return {key: tuple(one.shape) for key, one in trained.items()}


def _version(parameter: nn.Parameter) -> tuple[int, int]:
    return parameter._version, parameter.data_ptr()

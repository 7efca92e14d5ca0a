"""Mean gradients of one model by all-reduces over links, in the place of its parameter set.

The gradients are in one vector, and their means in another, so that a failed step can be made again. Buckets are
reduced in one order in all workers, each as soon as its tensors and the buckets before it are complete. The results
have the bytes of the servers: contributions are added in rank order and divided once.

Not here: who takes part, and failures (``link_steps``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from psdist.client.core.flat_vector import is_finite
from psdist.client.process.loop import Handle
from psdist.client.sync_client import Bucket, Client, Parameters
from psdist.consistency import sums
from psdist.errors import NonFiniteGradientError, PsdistError
from psdist.metrics.interval import Phase
from psdist.torch.averaging.link_steps import LinkSteps

#: Elements in front of the vector: above 0 if a worker was asked to end.
_ENDS: Final = 1
#: float32 represents twice this, and the marker's sign, exactly.
_DIGEST: Final = (1 << 22) - 1


@dataclass
class _LinkStep:
    """A step under way.

    given: buckets of the caller.
    ready: tensors of these.
    calls: all-reduces that have started, in the order of the buckets.
    """

    given: list[LinkBucket] = field(default_factory=list)
    ready: set[str] = field(default_factory=set)
    calls: list[Handle[Any]] = field(default_factory=list)
    is_complete: bool = False


class LinkBucket:
    """Tensors whose gradients were given together. Call ``wait`` for their means once all tensors were given."""

    def __init__(self, owner: LinkGradients, names: Sequence[str]) -> None:
        self.names = names
        #: The same bucket on its way through the servers, after the step failed.
        self.redone: Bucket | None = None
        self._owner = owner

    def wait(self) -> Mapping[str, NDArray[Any]]:
        """Return the means by name: read-only, valid until the next step. Raises as ``Bucket.wait``."""
        self._owner.complete()
        return self._owner.means(self.names) if self.redone is None else self.redone.wait()


class LinkGradients:
    """The part of ``Parameters`` that ``GradientStream`` uses, over links as long as ``steps`` has them.

    wrapped: the parameter set.
    buckets: names of tensors that are reduced together, in order. The last tensors of the set come first.
    marker: a tensor of one element. Only its sign matters.

    Other attributes are those of ``wrapped``.
    """

    def __init__(
        self,
        wrapped: Parameters,
        steps: LinkSteps,
        buckets: Sequence[Sequence[str]],
        client: Client,
        *,
        marker: str,
    ) -> None:
        self.wrapped = wrapped
        self.name = wrapped.name
        self._steps = steps
        self._client = client
        self._marker = marker
        self._op = "sum" if sums(wrapped.spec.consistency) else "avg"
        names = [name for bucket in reversed(buckets) for name in bucket]
        shapes = {tensor.name: tensor.shape for tensor in wrapped.layout.tensors}
        ends = np.cumsum([_ENDS, *(int(np.prod(shapes[name])) for name in names)])
        self._bounds = dict(zip(names, pairwise(ends), strict=True))
        #: Tensors and elements of each bucket. The last one also has the elements in front.
        self._units = [
            (frozenset(names), slice(self._bounds[names[0]][0] if number else 0, self._bounds[names[-1]][1]))
            for number, names in reversed(list(enumerate(reversed(buckets))))
        ]
        self._vector = self._allocate(int(ends[-1]), wrapped.layout.dtype)
        self._result = np.zeros_like(self._vector)
        self._buffers, self._means = (
            {name: vector[slice(*self._bounds[name])].reshape(shapes[name]) for name in names}
            for vector in (self._vector, self._result)
        )
        self._step = _LinkStep()

    def _allocate(self, elements: int, dtype: str) -> NDArray[Any]:
        """Return zeros, which the group's all-reduces read in place if they can."""
        if self._steps.group is not None:
            with suppress(PsdistError):  # The first step fails, too, and is made through the servers.
                return self._steps.group.allocate_buffer(elements, dtype)
        return np.zeros(elements, dtype)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.wrapped, name)

    @property
    def path(self) -> str:
        """Path of the next step: "collectives" or "servers"."""
        return "servers" if self._steps.group is None else "collectives"

    @property
    def step(self) -> int:
        """Number of the next step."""
        return self.wrapped.step + self._steps.counts[self.name]

    @property
    def version(self) -> int:
        """Number of steps whose means this worker has received."""
        return self.wrapped.version + self._steps.counts[self.name]

    def leave(self, reason: str) -> None:
        """Change to the servers, together with all workers."""
        self._steps.leave(reason)

    def gradient_buffers(self, *, is_checked: bool = True) -> dict[str, NDArray[Any]]:
        """See ``Parameters``."""
        return {tensor.name: self._buffers[tensor.name] for tensor in self.wrapped.layout.tensors}

    def push(self, gradients: Mapping[str, NDArray[Any]], weight: float = 1.0, absent: Iterable[str] = ()) -> None:
        """See ``Parameters``. Goes through the servers."""
        self.leave("a step without a gradient of this worker")
        self.wrapped.push(gradients, weight, absent)

    def push_pull_async(
        self, names: Collection[str], weight: float = 1.0, absent: Iterable[str] = ()
    ) -> LinkBucket | Bucket:
        """See ``Parameters``. names: tensors whose gradients are in ``gradient_buffers``."""
        if weight != 1.0:
            self.leave("a worker weights its gradients")
        if not self._steps.begin(self):
            return self._through_servers(names, weight, absent)
        if self._step.is_complete:
            self._step = _LinkStep()
        self._check_finite(names)
        bucket = LinkBucket(self, tuple(names))
        self._step.given.append(bucket)
        self._step.ready.update(names)
        self._start_calls()
        return bucket

    def _through_servers(self, names: Collection[str], weight: float = 1.0, absent: Iterable[str] = ()) -> Bucket:
        return self.wrapped.push_pull_async({name: self._buffers[name] for name in names}, weight, absent)

    def _check_finite(self, names: Iterable[str]) -> None:
        for name in names:
            if not is_finite(self._buffers[name].reshape(-1), self._vector.dtype.name):
                raise NonFiniteGradientError(f"the gradient of {name!r} holds NaN or Inf", tensor=name)

    def _start_calls(self) -> None:
        """Start the all-reduces of the next buckets whose tensors are complete."""
        step, group = self._step, self._steps.group
        assert group is not None
        for names, part in self._units[len(step.calls) :]:
            if not names <= step.ready:
                return
            if part.start == 0:
                self._vector[0] = self._client.session.shutdown.requested
            call = group.all_reduce(self._vector[part], self._op, out=self._result[part], async_op=True)
            step.calls.append(call)

    def means(self, names: Iterable[str]) -> dict[str, NDArray[Any]]:
        """Return the means of the last step over links."""
        return {name: self._means[name] for name in names}

    def complete(self) -> None:
        """Wait for the step under way. If it fails, make it through the servers."""
        step = self._step
        if step.is_complete:
            return
        with self._client.phases.call(Phase.WAIT):
            is_made = self._steps.make(self, lambda: [call.wait() for call in step.calls])
        step.is_complete = True
        if not is_made:
            for bucket in step.given:
                bucket.redone = self._through_servers(bucket.names)
        elif self._result[0] > 0:
            self.leave("a worker was asked to end")

    def share(self, source: int) -> bool:
        """See ``LinkModel``. The means travel as a step of the parameter set that only the source has a part in.

        Slices of a source that dies meanwhile may be of its last push or of an earlier one. So the marker has a digest
        of all other values.
        """
        before, own = self.wrapped.step, self._client.rank == source
        marker = np.full(1, 1 + 2 * _digest(self._means, self._marker) + (self._means[self._marker][0] > 0), np.float32)
        found = self.wrapped.push_pull(self._means | {self._marker: marker}, copy=False, weight=float(own))
        self._steps.counts[self.name] -= self.wrapped.step - before
        digest, is_set = divmod(int(found[self._marker][0]) - 1, 2)
        if digest != _digest(found, self._marker):
            return False
        for name, mean in found.items():
            self._means[name][...] = mean
        self._means[self._marker][0] = is_set
        return True


def _digest(arrays: Mapping[str, NDArray[Any]], marker: str) -> int:
    """Return 22 bits that depend on all values except the marker's and the sign of zeros, which the servers drop."""
    state = xxhash.xxh64()
    for name in sorted(arrays.keys() - {marker}):
        state.update((arrays[name] + np.float32(0.0)).data)
    return state.intdigest() & _DIGEST

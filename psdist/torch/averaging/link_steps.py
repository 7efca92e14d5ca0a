"""Steps that all workers of a context make over their links, and the change to the servers when that ends.

Steps are numbered over all models of a script, which makes them in one order. A step over links fails at some workers
only: others may have its result already. The workers then agree through the servers, which know who is a member. If
some have the result of the step, the lowest of their ranks sends it to the others. Otherwise all make this step through
the servers. All later steps go through the servers.

Invariants: Workers differ by at most one step, because no worker completes a step that another has not begun. A result
is kept until all workers have begun the next step. So all workers use the same result for each step, however a worker
ends.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Final, Protocol
from weakref import WeakKeyDictionary

from psdist.client.context import Context
from psdist.client.sync_client import Client
from psdist.collectives.sync_group import WorkerGroup
from psdist.errors import FencedError, PsdistError, PushDroppedError, SettingsMismatchError
from psdist.torch.averaging.rank_numbers import RankNumbers

logger = logging.getLogger("psdist")

_NAME: Final = "psdist/links"
#: Step numbers wrap here.
_STEPS: Final = 1 << 8
#: Vote of a worker that changes to the servers.
_LEAVES: Final = 0
#: Votes by the argument ``path``.
WISHES: Final = {"servers": 1, "auto": 2, "collectives": 3}

_by_client: Final[WeakKeyDictionary[Client, LinkSteps]] = WeakKeyDictionary()


class LinkModel(Protocol):
    """A model whose steps go over links."""

    name: str

    def share(self, source: int) -> bool:
        """Send the result of the model's last step from rank ``source`` to all workers. Returns False, in all of them,
        if that worker has left."""


class LinkSteps:
    """Steps of one worker over its links. Made by ``of``."""

    def __init__(self, context: Context) -> None:
        self._rank = context.rank
        self._numbers = RankNumbers(context, _NAME, on_drop="raise")
        #: Group of all workers; None before the first vote for links, and after the change to the servers.
        self.group: WorkerGroup | None = None
        self._has_left = False
        self._made = 0
        self._last: LinkModel | None = None
        #: Model whose step is under way.
        self._current: LinkModel | None = None
        #: Steps over links by model.
        self.counts: Counter[str] = Counter()

    @classmethod
    def of(cls, context: Context) -> LinkSteps:
        """Return the object of this context."""
        if context.client not in _by_client:
            _by_client[context.client] = cls(context)
        return _by_client[context.client]

    def vote(self, context: Context, path: str) -> bool:
        """Decide together with all workers if the steps of another model go over links. Returns True if so.

        path: this worker's wish, in ``WISHES``; "auto" accepts links. Raises SettingsMismatchError in all workers if
        some insist on links and others ask for servers.
        """
        votes = self._exchange(WISHES["servers" if self._has_left else path])
        while any(vote == _LEAVES for _, vote in votes.values()):  # Others left when a step failed, and vote later.
            self._agree(votes, None)
            votes = self._exchange(WISHES["servers"])
        wishes = {rank: vote for rank, (_, vote) in votes.items()}
        others = [rank for rank, vote in wishes.items() if vote == WISHES["servers"]]
        if others and WISHES["collectives"] in wishes.values():
            raise SettingsMismatchError(
                f"path='collectives' is asked for, and rank {others[0]} cannot use them, or asks for path='servers': "
                "use path='auto', or the same settings in all workers"
            )
        if others or len(wishes) < 2:
            return False
        # All workers are between two steps. One of them may have joined later.
        if self.group is not None:
            self.group.close()
        self.group, self._made = context.new_group(wishes), 0
        return True

    def begin(self, model: LinkModel) -> bool:
        """Begin a step of ``model``, unless it has begun. Returns False if it must be made through the servers."""
        if self._current not in (None, model):
            self.leave("gradients of several models are computed in one backward pass")
        self._current = model
        return self.group is not None

    def make(self, model: LinkModel, wait: Callable[[], object]) -> bool:
        """Complete a step of ``model``, whose calls ``wait`` waits for. Returns False if it must be made through the
        servers.

        Raises FencedError if the others continued without this worker.
        """
        self._current = None
        if self.group is None:
            return False
        try:
            wait()
        except PsdistError as error:
            return self.leave(error.message, model)
        self._record(model)
        return True

    def _record(self, model: LinkModel) -> None:
        self._made += 1
        self._last = model
        self.counts[model.name] += 1

    def leave(self, reason: str, model: LinkModel | None = None) -> bool:
        """Change to the servers, together with all workers. They notice it in their next step.

        model: that of a step that has failed here. Returns True if the step was made nevertheless: another worker has
        sent its result.
        """
        if self.group is None:
            return False
        group, self.group, self._has_left = self.group, None, True
        if not group.has_ended:
            group.close()
        logger.warning("gradients are averaged through the servers from now on: %s", reason)
        before = self._made
        while not self._agree(self._exchange(_LEAVES), model):
            pass
        return self._made > before

    def _exchange(self, vote: int) -> dict[int, tuple[int, int]]:
        """Return step number and vote of each worker."""
        try:
            numbers = self._numbers.exchange(4 * (self._made % _STEPS) + vote + 1)
        except PushDroppedError:
            raise FencedError(
                "this worker was expelled, and the others continued without it: its model differs from theirs now"
            ) from None
        return {rank: divmod(number - 1, 4) for rank, number in numbers.items()}

    def _agree(self, votes: dict[int, tuple[int, int]], model: LinkModel | None) -> bool:
        """Make the steps of all workers equal. Returns False if that has to be tried again.

        votes: of all workers, some of which leave.
        model: that of the step that has failed here.
        """
        if self.group is not None:  # In a vote on another model.
            self.group.close()
        self.group, self._has_left = None, True
        made = {rank: number for rank, (number, _) in votes.items()}
        ahead = [rank for rank, number in made.items() if (number + 1) % _STEPS not in made.values()]
        if len(ahead) == len(made):
            return True
        is_behind = self._rank not in ahead
        shared = model if is_behind else self._last
        assert shared is not None
        if not shared.share(min(ahead)):
            return False
        if is_behind:
            self._record(shared)
        return True

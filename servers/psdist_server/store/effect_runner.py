"""Carries out the effects of the shard machines: answers to calls, and updates.

Invariants: effects are carried out in the order of the machines. An answer waits until the replicas have what it is
about. Each token is answered at most once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial

from psdist_server.core.events import Aggregate, Apply, Effect, Forget, RefuseSlice, Reply
from psdist_server.store.applier import Applier
from psdist_server.store.pending_gradients import PendingGradients
from psdist_server.store.replicator import Replicator
from psdist_server.store.rpc_call import CallTable, SliceAnswer
from psdist_server.store.statistics import Counters


class EffectRunner:
    """Carries out the effects of the machines of one parameter set."""

    def __init__(
        self,
        calls: CallTable,
        gradients: PendingGradients,
        applier: Applier,
        replicator: Replicator,
        counters: Counters,
        shard_count: int,
    ) -> None:
        self._calls = calls
        self._gradients = gradients
        self._applier = applier
        self._replicator = replicator
        self._counters = counters
        self._shard_count = shard_count
        self._effects: deque[Effect] = deque()
        self._is_running = False

    def run(self, effects: Sequence[Effect]) -> None:
        """Carries effects out in order. Those that follow from them are queued, so that no chain of calls gets too
        deep."""
        self._effects.extend(effects)
        if self._is_running:
            return
        self._is_running = True
        try:
            while self._effects:
                self._run_one(self._effects.popleft())
        finally:
            self._is_running = False

    def _run_one(self, effect: Effect) -> None:
        match effect:
            case Reply():
                self._reply(effect)
            case Apply() | Aggregate():
                self._applier.start(effect)
            case Forget(token):
                self._gradients.discard(token)
            case RefuseSlice(token, error):
                self._gradients.discard(token)
                if (call := self._calls.pop(token)) is not None:
                    self._counters.of(call.identity.worker_id).rejected += 1
                    call.fail(error)

    def _reply(self, effect: Reply) -> None:
        number = effect.index % self._shard_count
        if not self._replicator.is_caught_up(number):
            self._replicator.when_caught_up(number, partial(self._reply, effect))
            return
        call = self._calls.pop(effect.token)
        if call is None:
            return
        if call.is_push:
            counters = self._counters.of(call.identity.worker_id)
            counters.answered(effect.ignored, effect.late, effect.staleness)
        call.answer(effect.token, SliceAnswer(effect.index, effect.version, effect.ignored, effect.staleness))

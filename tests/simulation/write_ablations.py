"""Ablations of runs with writes: proof that ``writes`` detects faults.

They work like those of ``ablations``; ``hunt`` runs seeds until one catches the ablation.
"""

from __future__ import annotations

from typing import Any

from psdist import ASP, BSP
from psdist.client.core.flat_vector import WrittenWeights
from psdist.client.participation import Participation, PendingWrite
from psdist.optim import SGD
from psdist_server.core import async_shard, bsp_shard
from psdist_server.store.applier import Applier
from psdist_server.store.backup_shards import BackupShards
from tests.simulation import writes
from tests.simulation.ablations import Ablation, Put, noted_in, search

#: Number of seeds within which an ablation must be caught.
SEEDS = 400

ABLATIONS: dict[str, Ablation] = {}
_ablation = noted_in(ABLATIONS)


def hunt(name: str, seeds: int = SEEDS) -> tuple[int, str]:
    """See ``ablations.search``."""
    return search(ABLATIONS[name], writes, seeds)


_CALM: dict[str, Any] = {"faults": (), "fault_count": 0, "storage_faults": 0.0, "lives": 40}
_BSP: dict[str, Any] = {"consistency": BSP(), "workers": 3, "lives": 40, "writes": 0.5}
_ASP: dict[str, Any] = {"consistency": ASP(), "optimizer": SGD(lr=1.0), "save_steps": 0}
_ODD: dict[str, Any] = {**_BSP, "odd": 0.5, "waits": 0.0, "steps": 8}
_COPIES: dict[str, Any] = {"replicas": 2, "servers": 3, "storage_faults": 0.0}


@_ablation("a write counts in one update", **{**_CALM, **_ASP})
def _twice(put: Put) -> None:
    assigned = Applier._assigned

    def again(self: Any, effect: Any) -> Any:
        writes = self._gradients.by_token[effect.writer].writes if effect.writer else None
        known = vars(self).setdefault("known", {}) if hasattr(self, "__dict__") else _KNOWN.setdefault(id(self), {})
        last = known.pop(effect.index, None)
        if writes is None and last is not None:
            return last.onto(self._dense.export_weights(effect.index))
        known[effect.index] = writes
        return assigned(self, effect)

    put(Applier, "_assigned", again)


_KNOWN: dict[int, Any] = {}


@_ablation("a repeated push does not write again", **_ASP, faults=("break connections",), fault_count=5, cut=0.3)
def _repeated(put: Put) -> None:
    pushed = async_shard.AsyncShard._pushed

    def again(self: Any, state: Any, event: Any, producer: Any) -> Any:
        is_repeat = event.step < self.producers[producer].sequence or state.index in self.producers[producer].taken
        if is_repeat and event.written and not state.queue:
            state.queue.append(async_shard._Push(event, producer))
            return self._try_apply(state)
        return pushed(self, state, event, producer)

    put(async_shard.AsyncShard, "_pushed", again)


@_ablation("copies get what was written", **{**_CALM, **_COPIES})
def _primary_alone(put: Put) -> None:
    put(BackupShards, "_take_assigned", lambda self, update: None)


@_ablation("writes of all workers are compared", **{**_CALM, **_ODD})
def _uncompared(put: Put) -> None:
    put(bsp_shard, "_compared", lambda contributions: [])


@_ablation("digests are of all slices", **{**_CALM, **_ODD})
def _by_slice(put: Put) -> None:
    put(WrittenWeights, "digest", property(lambda self: bytes(16)))


@_ablation("a refused push is withdrawn", **_ODD, faults=("kill worker", "join worker"), fault_count=4)
def _left_open(put: Put) -> None:
    async def withdraw(self: Any, error: Any) -> bool:
        return True

    put(Participation, "withdraw_push", withdraw)


@_ablation(
    "only earlier attempts are refused again", **{**_ODD, "workers": 2}, servers=3, slices=6,
    faults=("partition worker from server",), fault_count=8, fault_seconds=1.5, think_seconds=0.02, slow=0.1,
)  # fmt: skip
def _refused_twice(put: Put) -> None:
    refuse = bsp_shard.BspShard._refuse_writes

    def all_of_them(self: Any, state: Any, contributions: Any, compared: Any) -> Any:
        return refuse(
            self,
            state,
            contributions,
            [max(compared, key=lambda part: part.attempt)]
            + [part for part in compared if part.attempt == max(one.attempt for one in compared)],
        )

    put(bsp_shard.BspShard, "_refuse_writes", all_of_them)


@_ablation(
    "a write belongs to one push", **{**_BSP, "writes": 1.0}, waits=1.0, odd=0.0, think_seconds=0.4, pulls=0.3,
    faults=("partition worker", "freeze worker"), fault_count=4, worker_lease_seconds=2.0,
)  # fmt: skip
def _for_any_push(put: Put) -> None:
    put(PendingWrite, "_is_due", lambda self, now: self._made is not None)

"""Stand-ins of ``groups`` for links between workers and for calls to the system."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from psdist.collectives import data_route, mesh
from psdist.collectives import mesh as meshes
from psdist.collectives.core import plans
from tests.simulation.environment import running
from tests.simulation.loop import Node
from tests.simulation.peer_links import SimPeerLink


def install() -> Any:
    """Replace links and calls to the system. Arrays of a hundred elements travel as large ones do."""
    stands = [
        (meshes, "PeerLink", SimPeerLink), (meshes, "os", SimpleNamespace(getpid=_pid)),
        (meshes, "processes", _Processes), (mesh, "processes", _Processes),
        (data_route, "are_on_one_host", lambda members: False),
        (plans, "PART_BYTES", 64), (plans, "EAGER_BYTES", 32),
        (plans, "EAGER_REDUCED_BYTES", 48),
    ]  # fmt: skip
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in stands]
    for owner, name, value in stands:
        setattr(owner, name, value)

    def undo() -> None:
        for owner, name, value in before:
            setattr(owner, name, value)

    return undo


def _pid() -> int:
    return int(running().current().name.rpartition("/")[2])


class _Processes:
    """Stand-in for ``psdist.link.processes``: two processes of a host know each other's state."""

    @staticmethod
    def own_scope() -> str:
        return running().current().host

    @staticmethod
    def is_stopped(pid: int) -> bool:
        node: Node = running().nodes_by_pid[pid]
        return node.paused or node.dead

"""``PsdistEnvironment``: a worker's place in its run, as Lightning asks for it."""

from __future__ import annotations

import os

from lightning.pytorch.plugins.environments import ClusterEnvironment

from psdist.process_group import is_launched


class PsdistEnvironment(ClusterEnvironment):
    """Place of a worker that a launcher of psdist, or torchrun, has started; a world of one otherwise."""

    @property
    def creates_processes_externally(self) -> bool:
        """True: the launcher starts the workers."""
        return True

    @property
    def main_address(self) -> str:
        """Address that nothing uses: workers do not connect to each other."""
        return os.environ.get("MASTER_ADDR", "127.0.0.1")

    @property
    def main_port(self) -> int:
        """Port that nothing uses."""
        return int(os.environ.get("MASTER_PORT", "0"))

    @staticmethod
    def detect() -> bool:
        """True if a launcher of psdist, or torchrun, has started this script."""
        return is_launched()

    def world_size(self) -> int:
        """Workers of the run."""
        return self._number("WORLD_SIZE", 1)

    def set_world_size(self, size: int) -> None:
        """Ignore Lightning's own number."""

    def global_rank(self) -> int:
        """This worker's number."""
        return self._number("RANK", 0)

    def set_global_rank(self, rank: int) -> None:
        """Ignore Lightning's own number."""

    def local_rank(self) -> int:
        """This worker's number on its machine."""
        return self._number("LOCAL_RANK", 0)

    def node_rank(self) -> int:
        """Number of this machine."""
        return self._number("GROUP_RANK", 0)

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Accept any numbers: the run has its own."""

    def _number(self, name: str, default: int) -> int:
        return int(os.environ[name]) if is_launched() and name in os.environ else default

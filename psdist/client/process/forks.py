"""Warning about forks while gRPC's fork handlers are active.

They restart gRPC's threads in the forked process, which crashes occasionally (grpcio 1.85: 8 of 50 forks during
training). ``import psdist`` turns them off, but gRPC reads the setting once, when it is imported, and handlers of the
system cannot be removed. So a script that imported gRPC first is warned at its first fork.
"""

from __future__ import annotations

import logging
import os

from psdist.settings.grpc_settings import grpc_came_first

logger = logging.getLogger("psdist")

_is_watching = False


def watch() -> None:
    """Warn at the first fork of this process, if its forks may crash."""
    global _is_watching
    if grpc_came_first and not _is_watching:
        _is_watching = True
        os.register_at_fork(before=_Warning().log)


class _Warning:
    """Warning that is logged once."""

    def __init__(self) -> None:
        self._is_logged = False

    def log(self) -> None:
        if not self._is_logged:
            self._is_logged = True
            logger.warning(
                "this process forks, for a data loader perhaps, and imported grpc before psdist: gRPC's fork handlers "
                "are active, and may crash or block the forked process. Import psdist before grpc, set "
                "GRPC_ENABLE_FORK_SUPPORT=0 in the environment, or start processes by spawn"
            )

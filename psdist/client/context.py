"""``psdist.init()``: the rank and world of this script, and its client.

Under a launcher they come from the environment. Without one the script is a world of one: a scheduler and a server are
started for it, and end with it.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol, Self

from psdist.client import loop
from psdist.client.exit_status import mark_refusals
from psdist.client.sync_client import Client
from psdist.errors import ConfigurationError

_CONFIGURED = ("PSDIST_SCHEDULER", "PSDIST_SCHEDULER_FILE", "DMLC_PS_ROOT_URI")


class _Cluster(Protocol):
    def close(self) -> None:
        """Ends the cluster."""


@dataclass(frozen=True)
class Context:
    """A script's place in its run.

    rank: this worker's number, from 0; world_size: workers of the run; local_rank: number on this machine.
    client: connected.
    """

    rank: int
    world_size: int
    local_rank: int
    client: Client
    _cluster: _Cluster | None = field(default=None, repr=False)

    def close(self) -> None:
        """Leaves the run, and ends the cluster if ``init`` started it. Closing again does nothing."""
        self.__exit__(None, None, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _current
        with _lock:
            if _current is self:
                _current = None
        self.client.__exit__(kind, error, trace)
        if self._cluster is not None:
            self._cluster.close()


_lock = threading.Lock()
_current: Context | None = None


def init(**client_arguments: Any) -> Context:
    """Connects this script to its run and returns its ``Context``. Called again, it returns the same one until that is
    closed.

    ``client_arguments`` are those of ``psdist.Client``. Afterwards SIGTERM ends the script in order. The workers agree
    on a common end, so that the last snapshot is of a step that all have made, and this worker leaves. Then the call
    under way, or the next one, raises SystemExit with status 143 (see ``sigterm``). A handler that the script
    installed, before or after this call, is kept. In other threads than the main one no handler is installed. A process
    that the script forks has the default handling of signals. Under a launcher a script that the run refuses, for
    example with SettingsMismatchError, ends with status 78, and is not restarted.

    Raises ConfigurationError, SchedulerUnreachableError, and what the scheduler refuses with.
    """
    global _current
    with _lock:
        if _current is None:
            mark_refusals()
            _current = _connect(client_arguments)
            loop.shared().end_on_sigterm()
        elif client_arguments:
            raise ConfigurationError("psdist.init() was called before: close that context before passing arguments")
        return _current


def _connect(arguments: dict[str, Any]) -> Context:
    if arguments.get("scheduler") or any(os.environ.get(name) for name in _CONFIGURED):
        client = Client(**arguments)
        return Context(client.rank, client.world_size, client.local_rank, client)
    if int(os.environ.get("WORLD_SIZE") or 1) > 1:
        raise ConfigurationError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but no scheduler is named: start the script with 'psdist run' "
            "or 'psdist-worker' instead of another launcher, or set PSDIST_SCHEDULER=HOST:PORT"
        )
    return _world_of_one(arguments)


def _world_of_one(arguments: dict[str, Any]) -> Context:
    from psdist.launch.embedded import EmbeddedCluster

    cluster = EmbeddedCluster(servers=1)
    try:
        print("psdist: no launcher, so this is a world of one: a scheduler and one server are started", file=sys.stderr)
        named = {"scheduler": cluster.address, "token": cluster.token, "run_id": cluster.run_id}
        client = Client(**(arguments | named))
    except BaseException:
        cluster.close()
        raise
    context = Context(client.rank, client.world_size, client.local_rank, client, cluster)
    # Registered after the loop thread's own exit function, so it runs before: first the client, then the cluster.
    atexit.register(context.close)
    return context

"""The limit on open files of scheduler and servers: raised to what the system allows, with a part kept for files.

Each connection is an open file. Many systems let a process open 1,024 unless it asks for more, so a thousand idle
connections of strangers would keep it from opening its store, a snapshot, or a connection of its own.
"""

from __future__ import annotations

import resource
from contextlib import suppress

from psdist.wire import limits


def raise_limit() -> None:
    """Raise the soft limit on open files to the hard limit, or to what is ever needed if that is less."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 2 * limits.CONNECTIONS_MAX + limits.FILES_RESERVED
    wanted = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):  # Some systems refuse a limit that they report as allowed.
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def connections_max() -> int:
    """Connections that a gRPC port of this process may accept: files stay free for everything else."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if soft == resource.RLIM_INFINITY:
        return limits.CONNECTIONS_MAX
    return min(limits.CONNECTIONS_MAX, max(soft // 2, soft - limits.FILES_RESERVED))

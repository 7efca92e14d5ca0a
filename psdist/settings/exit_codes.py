"""Exit statuses of all programs of psdist. The numbers are stable; 64 and up follow ``sysexits.h``.

Where a worker's script fails, its own status is passed on instead; for a worker killed by signal n that is 128 + n.
"""

from __future__ import annotations

from typing import Final

from psdist.errors import RunNotStartedError

OK: Final = 0
#: A script failed in a way that has no status of its own.
FAILURE: Final = 1
#: The command line is wrong; nothing was started.
USAGE: Final = 2
#: A script ended without having connected, while others wait for it; or the run ended before all had come.
NEVER_CONNECTED: Final = 65
#: A worker came, or came again, when training that it cannot join had begun: it is not started again, and the others go
#: on without it.
LATE: Final = 66
#: No scheduler answers, an address cannot be bound, or the storage of the snapshots cannot be read or written.
UNAVAILABLE: Final = 69
#: What a dead server held is lost, no snapshot can be loaded, the scheduler's record of the run is gone, or servers or
#: the scheduler die again and again. A fenced server ends with it too.
INFRASTRUCTURE: Final = 70
#: The CUDA device of a server failed while it was used. What it held is lost; the run goes on from its copies.
DEVICE_LOST: Final = 71
#: The scripts succeeded, but the snapshot at the end failed.
UNSAVED: Final = 74
#: A script gave psdist wrong settings or arguments, or called what it had closed; the token is wrong, or there is no
#: CUDA device as it was asked for: it would fail again, so it is not started again.
CONFIGURATION: Final = 78
#: Add the number of the signal that ended the command (130 is Ctrl-C, 143 is SIGTERM).
SIGNAL_BASE: Final = 128


def of_ended_run(error: BaseException) -> int:
    """The exit status of every process of a run that ended with ``error``."""
    return NEVER_CONNECTED if isinstance(error, RunNotStartedError) else INFRASTRUCTURE

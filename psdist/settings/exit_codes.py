"""What the exit status of every psdist command means. The numbers are stable; 64 and up follow ``sysexits.h``.

Where a worker's script fails, its own status is passed on instead, and a worker killed by signal n gives 128 + n.
"""

from __future__ import annotations

from typing import Final

OK: Final = 0
#: A script failed in a way that has no status of its own.
FAILURE: Final = 1
#: The command line is wrong; nothing was started.
USAGE: Final = 2
#: A script ended without having connected, while others wait for it.
NEVER_CONNECTED: Final = 65
#: No scheduler answers, an address cannot be bound, or the storage of the snapshots cannot be read or written.
UNAVAILABLE: Final = 69
#: What a dead server held is lost, or servers or the scheduler die again and again.
INFRASTRUCTURE: Final = 70
#: The scripts ended well, but the snapshot at the end, for which a storage was named, failed.
UNSAVED: Final = 74
#: Add the number of the signal that ended the command (130 is Ctrl-C, 143 is SIGTERM).
SIGNAL_BASE: Final = 128

MEANINGS: Final[dict[int, str]] = {
    OK: "all scripts ended well",
    FAILURE: "failed, without a status of its own",
    USAGE: "the command line is wrong; nothing was started",
    NEVER_CONNECTED: "a script ended without having connected, while others wait for it",
    UNAVAILABLE: "no scheduler answers, an address cannot be bound, or the storage cannot be read or written",
    INFRASTRUCTURE: "what a dead server held is lost, or servers or the scheduler die again and again",
    UNSAVED: "the scripts ended well, but the snapshot at the end failed",
    130: "interrupted (Ctrl-C)",
    143: "terminated (SIGTERM)",
}

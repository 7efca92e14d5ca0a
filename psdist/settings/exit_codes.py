"""Exit statuses of all programs of psdist. The numbers are stable; 64 and up follow ``sysexits.h``.

If a worker's script fails, its own status is passed on instead; for a worker killed by signal n that is 128 + n.
``TABLE`` lists for each status the programs that end with it, the cause and the remedy; docs/use.md shows the same
table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from psdist.errors import RunNotStartedError

OK: Final = 0
#: A script failed in a way that has no status of its own.
FAILURE: Final = 1
#: The command line is wrong; nothing was started.
USAGE: Final = 2
#: A script ended without connecting while others wait for it; or the run ended before all members had joined.
NEVER_CONNECTED: Final = 65
#: A worker joined (or rejoined) after training that it cannot join had begun. It is not restarted; the others continue
#: without it.
LATE: Final = 66
#: No scheduler answers, an address cannot be bound, or the storage of the snapshots cannot be read or written.
UNAVAILABLE: Final = 69
#: The state of a dead server is lost, no snapshot can be loaded, the scheduler's record of the run is gone, or servers
#: or the scheduler keep dying. A fenced server ends with it too.
INFRASTRUCTURE: Final = 70
#: The CUDA device of a server failed while in use. Its contents are lost; the run continues from other copies.
DEVICE_LOST: Final = 71
#: The scripts succeeded, but the snapshot at the end failed.
UNSAVED: Final = 74
#: A script passed wrong settings or arguments to psdist, or used an object after closing it; the token is wrong; or the
#: requested CUDA device does not exist. A restart would fail the same way, so there is none.
CONFIGURATION: Final = 78
#: Add the number of the signal that ended the command (130 is Ctrl-C, 143 is SIGTERM).
SIGNAL_BASE: Final = 128


def of_ended_run(error: BaseException) -> int:
    """Return the exit status that every process of a run ends with after ``error``."""
    return NEVER_CONNECTED if isinstance(error, RunNotStartedError) else INFRASTRUCTURE


#: Kinds of programs. "script": a worker under a launcher. "launcher": ``psdist run`` and ``psdist-worker``.
#: "command": any other subcommand of ``psdist``.
Role = Literal["scheduler", "server", "script", "launcher", "command"]


@dataclass(frozen=True, slots=True)
class ExitStatus:
    """One row of the table.

    roles: programs that end with this status.
    remedy: action for the engineer.
    """

    status: int
    roles: tuple[Role, ...]
    cause: str
    remedy: str

    @property
    def text(self) -> str:
        """The status as the documents write it."""
        return "128 + n" if self.status == SIGNAL_BASE else str(self.status)


TABLE: Final = (
    ExitStatus(
        OK,
        ("scheduler", "server", "script", "launcher", "command"),
        "everything ended as it should; of a scheduler or a server also: a signal ended it",
        "nothing",
    ),
    ExitStatus(
        FAILURE,
        ("script", "launcher", "command"),
        "a script failed in a way that has no status of its own, or a command was refused",
        "read the script's traceback, or the command's message",
    ),
    ExitStatus(
        USAGE,
        ("scheduler", "server", "launcher", "command"),
        "the command line is wrong, or names a storage that is not for this run; nothing was started",
        "correct the flag that the message names",
    ),
    ExitStatus(
        NEVER_CONNECTED,
        ("scheduler", "server", "script", "launcher"),
        "a script ended without having called `psdist.init()`, while others wait for it, or the run ended before "
        "training began (`RunNotStartedError`)",
        "look at the machine that the message names, mend the script there, and start the run again",
    ),
    ExitStatus(
        LATE,
        ("script", "launcher"),
        "training that the worker cannot join had begun (`LateWorkerError`); it is not started again, and the "
        "others go on",
        "nothing, or start all workers again from a checkpoint",
    ),
    ExitStatus(
        UNAVAILABLE,
        ("scheduler", "server", "script", "launcher", "command"),
        "no scheduler answers, an address cannot be bound, or the storage or the store cannot be read or written",
        "check that the scheduler runs and that its address is right, or mend what the message names; then start it "
        "again",
    ),
    ExitStatus(
        INFRASTRUCTURE,
        ("scheduler", "server", "script", "launcher", "command"),
        "what a dead server held is lost (`ServerLostError`), no snapshot can be loaded, the scheduler's record of "
        "the run is gone (`RunLostError`), or servers or the scheduler die again and again; of a server also: "
        "others took its place",
        "start the run again, with `--replicas 2` or snapshots if it had neither; a server alone is started again, "
        "empty",
    ),
    ExitStatus(
        DEVICE_LOST,
        ("server",),
        "its CUDA device failed, and what it held is lost; the run goes on from the copies, if there are any",
        "check the device (`nvidia-smi`, the kernel's log), and start the server again",
    ),
    ExitStatus(
        UNSAVED,
        ("launcher", "command"),
        "the scripts succeeded, but the snapshot at the end failed, so that what was trained since the last one is "
        "lost; or a command's standard output cannot be written, as on a full disk",
        "make room in the storage, and start the run again under the same `--run-id`: it goes on from the last "
        "snapshot",
    ),
    ExitStatus(
        CONFIGURATION,
        ("server", "script", "launcher", "command"),
        "a script gave psdist wrong settings or arguments, or called what it had closed; it is another script than "
        "that of the snapshots; the token is missing or wrong; or there is no such CUDA device",
        "correct what the message names; it would fail again, so no launcher has tried",
    ),
    ExitStatus(
        SIGNAL_BASE,
        ("script", "launcher", "command"),
        "signal n ended it: 130 is Ctrl-C, 143 is SIGTERM",
        "nothing; the same command with the same `--run-id` goes on from the last snapshot",
    ),
)

"""Exit statuses of all programs of psdist. The numbers are stable; 64 and up follow ``sysexits.h``.

If a worker's script fails, its own status is passed on instead; for a worker killed by signal n that is 128 + n.
``TABLE`` lists for each status the programs that end with it, the cause and the remedy. ``REACTIONS`` gives for each
role the reaction of an engine. docs/errors.md shows both.
"""

from __future__ import annotations

from collections.abc import Mapping
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
#: No scheduler answers, an address cannot be bound, or the storage of the snapshots, or the scheduler's store, cannot
#: be read or written, as by a scheduler that does not lead its run any more.
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


#: In a script's report about its error (``launcher_reports``): every attempt raises it.
CERTAIN: Final = "certain"
#: In the same place: its debugger ended it.
DEBUGGER_LEFT: Final = "debugger left"


def status_of_ended_run(error: BaseException) -> int:
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
        "success; of a scheduler or a server also: a signal ended it",
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
        "a script ended without calling `psdist.init()` while others wait for it, or the run ended before "
        "training began (`RunNotStartedError`)",
        "fix the script on the machine that the message names, and restart the run",
    ),
    ExitStatus(
        LATE,
        ("script", "launcher"),
        "training that the worker cannot join had begun (`LateWorkerError`); it is not restarted, and the others "
        "continue",
        "nothing, or restart all workers from a checkpoint",
    ),
    ExitStatus(
        UNAVAILABLE,
        ("scheduler", "server", "script", "launcher", "command"),
        "no scheduler answers, an address cannot be bound, or the storage or the store cannot be read or written; of a "
        "scheduler with a store in etcd also: it does not lead its run any more",
        "check that the scheduler runs and that its address is right, or fix the cause that the message names; then "
        "restart it",
    ),
    ExitStatus(
        INFRASTRUCTURE,
        ("scheduler", "server", "script", "launcher", "command"),
        "the state of a dead server is lost (`ServerLostError`), no snapshot can be loaded, the scheduler's record of "
        "the run is gone (`RunLostError`), or servers or the scheduler keep dying; of a server also: others replaced "
        "it",
        "restart the run, with `--replicas 2` or snapshots if it had neither; restart a single server, which joins "
        "empty",
    ),
    ExitStatus(
        DEVICE_LOST,
        ("server",),
        "its CUDA device failed, and the state on it is lost; the run continues from the copies, if there are any",
        "check the device (`nvidia-smi`, the kernel's log), and restart the server",
    ),
    ExitStatus(
        UNSAVED,
        ("launcher", "command"),
        "the scripts succeeded, but the snapshot at the end failed, so that progress since the last one is lost; or a "
        "command's standard output cannot be written, as on a full disk",
        "free space in the storage, and restart the run with the same `--run-id`: it resumes from the last snapshot",
    ),
    ExitStatus(
        CONFIGURATION,
        ("server", "script", "launcher", "command"),
        "a script passed wrong settings or arguments to psdist, or used a closed object; it is not the script of the "
        "snapshots; the token is missing or wrong, its role may not do this, or TLS fails; or there is no such CUDA "
        "device",
        "correct the setting that the message names; launchers do not restart, since it would fail again",
    ),
    ExitStatus(
        SIGNAL_BASE,
        ("script", "launcher", "command"),
        "signal n ended it: 130 is Ctrl-C, 143 is SIGTERM",
        "nothing; the same command with the same `--run-id` resumes from the last snapshot",
    ),
)

#: Reaction of an engine such as Slurm or Kubernetes to an exit. "done": nothing. "restart": start this process
#: again, a limited number of times; the others continue. "requeue": end all processes of the run and start them again
#: with the same run id. "stop": nothing, since every start would end the same way.
Reaction = Literal["done", "restart", "requeue", "stop"]

#: By role and status. A server that others replaced ends with the status of a lost run, but joins again if it is
#: restarted. Signals that no role handles, such as those of a full memory, are under ``SIGNAL_BASE``.
REACTIONS: Final[Mapping[Role, Mapping[int, Reaction]]] = {
    "scheduler": {
        OK: "done",
        USAGE: "stop",
        NEVER_CONNECTED: "stop",
        UNAVAILABLE: "restart",
        INFRASTRUCTURE: "requeue",
        SIGNAL_BASE: "restart",
    },
    "server": {
        OK: "done",
        USAGE: "stop",
        NEVER_CONNECTED: "stop",
        UNAVAILABLE: "restart",
        INFRASTRUCTURE: "restart",
        DEVICE_LOST: "restart",
        CONFIGURATION: "stop",
        SIGNAL_BASE: "restart",
    },
    "script": {
        OK: "done",
        FAILURE: "restart",
        NEVER_CONNECTED: "stop",
        LATE: "stop",
        UNAVAILABLE: "restart",
        INFRASTRUCTURE: "requeue",
        CONFIGURATION: "stop",
        SIGNAL_BASE: "restart",
    },
    "launcher": {
        OK: "done",
        FAILURE: "restart",
        USAGE: "stop",
        NEVER_CONNECTED: "stop",
        LATE: "stop",
        UNAVAILABLE: "restart",
        INFRASTRUCTURE: "requeue",
        UNSAVED: "requeue",
        CONFIGURATION: "stop",
        SIGNAL_BASE: "restart",
    },
}


def statuses(role: Role, *reactions: Reaction) -> tuple[int, ...]:
    """Return the statuses of a role after which an engine should react so, in ascending order. Signals are not among
    them."""
    return tuple(status for status, found in REACTIONS[role].items() if found in reactions and status < SIGNAL_BASE)

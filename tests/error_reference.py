"""The reference of errors and exit statuses, ``docs/errors.md``, from their declarations.

    python -m tests.error_reference > docs/errors.md

``tests/unit/test_error_reference.py`` compares the page with this output. Only the remedies are written here.
"""

from __future__ import annotations

import inspect
import textwrap
from typing import Final

from psdist.errors import BY_CODE, PsdistError
from psdist.settings.exit_codes import REACTIONS, TABLE

_PAGE: Final = """# Errors and exit statuses

`python -m tests.error_reference > docs/errors.md` writes this page.

## Errors

Every error of psdist is a class of `psdist.errors` with a stable code. `PsdistError`, a `RuntimeError`, is the base of
all; `error.code` is the code, and `error.details` holds the offending values as text. An operation that raised an error
has changed nothing, unless its entry says otherwise. Each entry has the code, the class, the gRPC status of a refused
call ([the wire](internals/wire.md#2-errors)), the meaning and the remedy.
"""

_EXIT_STATUSES: Final = """## Exit statuses

| status | of | cause | what to do |
|---|---|---|---|"""

_ROLES: Final = """
A *script* is a worker under a launcher, a *launcher* is `psdist run` or `psdist-worker`, and a *command* is any other
word of `psdist`. A script that fails passes its own status on. A full disk under a launcher's standard output loses
lines, and nothing else.
"""

_ENGINES: Final = """
## Reactions of an engine

An engine such as Slurm or Kubernetes starts the processes of a run, and sees how each of them ends:

- *done*: it ended in order.
- *restart*: start it again, a limited number of times. The others continue meanwhile.
- *requeue*: end all processes of the run and start them again with the same `--run-id`: it resumes from its newest
  snapshot.
- *stop*: every start would end the same way. Ends of other processes of the run follow.

The jobs that `psdist generate` writes do this. A dash: the role does not end with this status.

| status | scheduler | server | script | launcher |
|---|---|---|---|---|"""

#: The classes of ``psdist.errors``: tests may define others.
ERRORS: Final = {code: cls for code, cls in BY_CODE.items() if cls.__module__ == "psdist.errors"}

#: Remedies for the user, by code.
REMEDIES: Final = {
    "invalid_argument": "Correct the value that the message names.",
    "configuration": "Correct the flag, variable or file that the message names.",
    "invalid_name": "Use 1 to 256 of these characters.",
    "unknown_tensor": "Use a name of `Parameters.names`.",
    "missing_tensor": "Pass every tensor of the parameter set.",
    "shape_mismatch": "Pass an array of the declared shape.",
    "dtype_mismatch": "Convert the array to the dtype that the message names.",
    "non_finite_gradient": "Find the NaN or Inf, or open the parameters with `non_finite=\"skip\"`.",
    "unknown_codec": "Use one of the [codecs](codecs.md#all-codecs).",
    "malformed_payload": "Report it, unless you wrote the client: [payload format](internals/payload-format.md).",
    "limit_exceeded": "Send less, or free the resource that the message names.",
    "unauthenticated": "Set `PSDIST_TOKEN` or `--token-file` to the run's token, or to one made from it.",
    "permission_denied": "Use a token of the role that the message names: see [roles](roles.md).",
    "insecure_bind": "Set `--tls-ca`, `--tls-cert` and `--tls-key`, or bind to loopback, or pass `--insecure` and a "
    "token on a private network.",
    "insecure_connect": "Set `--tls-ca`, `--tls-cert` and `--tls-key`, or, on a private network, pass `--insecure` or "
    "set `PSDIST_INSECURE=1`.",
    "tls_handshake": "Follow the message, which names the side and the file; compare both sides by `psdist certs "
    "show`. See [untrusted networks](secure.md).",
    "protocol_mismatch": "Upgrade psdist of the side that the message names.",
    "wrong_run": "Correct the `--run-id` or the address.",
    "duplicate_member": "Choose another id, or wait until the lease of the earlier member ends.",
    "fenced": "Call again: `Client` registers as a new incarnation. `DistributedDataParallel` cannot continue.",
    "not_member": "Open the parameters before using them.",
    "unknown_parameters": "Create the parameter set, or correct its name.",
    "unknown_dataset": "Open the data set, or correct its name.",
    "layout_mismatch": "Pass the same tensors on all workers; use another name for another model.",
    "settings_mismatch": "Pass the same settings on all workers; on resuming see "
    "[what may change](snapshots.md#resuming-with-other-settings).",
    "stale_epoch": "Nothing.",
    "stale_estimate": "Nothing.",
    "future_step": "Push steps in order, without gaps.",
    "written_weights": "Let every worker make the same change of the weights before the same step.",
    "sequence_gap": "Push in order, without gaps.",
    "scheduler_unreachable": "Check that the scheduler runs, its address, and the firewall.",
    "server_unreachable": "Call again with the same gradients: slices that were taken count once.",
    "sharing_unavailable": "Use `transport=\"auto\"`, or remove the reason that the message names.",
    "trace_in_progress": "Wait for the end of the other recording, or end that `psdist trace` by Ctrl-C.",
    "tcp_unavailable": "Use `transport=\"auto\"`, or open the server's `--data-port`.",
    "device_unavailable": "Install the part that the message names ([GPUs](gpu.md#requirements)).",
    "device_lost": "Check the device (`nvidia-smi`, the kernel's log) and restart the process.",
    "stale_term": "Nothing: only servers see it, and the newer primary takes over.",
    "replica_mismatch": "Check the memory of both servers, and start the run from a snapshot.",
    "stale_copy": "Nothing: only servers see it.",
    "server_lost": "Start the run again, with `--replicas 2` or snapshots if it had neither.",
    "run_lost": "Start the run again; it resumes from its newest snapshot if there is one.",
    "run_not_started": "Look at the machine that the message names, fix the script there, and start the run again.",
    "storage": "Check the storage's address, permissions and free space; for etcd, that its members answer.",
    "leadership_lost": "Nothing, if another scheduler has taken over; otherwise look at etcd, and start one again.",
    "no_storage": "Use `psdist run`, or give the scheduler a `--storage-path`.",
    "snapshot_corrupt": "Use an earlier snapshot; `psdist snapshot verify` checks all of them.",
    "unknown_snapshot": "Choose one of `psdist snapshot list`.",
    "snapshot_failed": "Call again once the reason is removed.",
    "wait_timeout": "Look at the members that the message names; then call again.",
    "mutual_wait": "Make all workers call in the same order ([training loops](loops.md#loops-that-count-by-the-step)).",
    "worker_left": "Let all workers open the same parameter sets, and make the same groups, before any of them ends.",
    "uneven_inputs": "Give all workers the same number of batches, or call `join` without raising.",
    "late_worker": "Nothing, or restart all workers from a checkpoint.",
    "launch_failed": "Fix the cause that the traceback shows ([runs from Python](launch.md#results-and-errors)).",
    "push_dropped": "Call again. If it repeats, its process is stopped, or cut off, for longer than `--worker-timeout` "
    "([workers](workers.md#busy-frozen-and-dropped)).",
    "peer_unreachable": "Let workers connect to any port of workers "
    "([collectives](collectives.md#links-and-limits)).",
    "excluded": "Call `context.join_group()`: the others take the worker in at their next step boundary.",
    "worker_lost": "Continue without the worker by `group.reconfigure()`, or make another group once it was restarted.",
    "collective_mismatch": "Make the same calls in the same order on all ranks, then make another group.",
    "closed": "Do not use a client after `close()`.",
    "internal": "Report it with the traceback and the logs.",
}  # fmt: skip


def page() -> str:
    """The text of the page."""
    rows = [f"| {row.text} | {', '.join(row.roles)} | {row.cause} | {row.remedy} |" for row in TABLE]
    entries = [_entry(code, cls) for code, cls in sorted(ERRORS.items())]
    return "\n".join([_PAGE, *entries, _EXIT_STATUSES, *rows, _ROLES + _ENGINES, *_reactions(), ""])


def _reactions() -> list[str]:
    """One row for each status that some role ends with."""
    rows = [(row.text, [REACTIONS[role].get(row.status, "-") for role in REACTIONS]) for row in TABLE]
    return [f"| {text} | {' | '.join(cells)} |" for text, cells in rows if set(cells) != {"-"}]


def _entry(code: str, error: type[PsdistError]) -> str:
    builtin = next(base.__name__ for base in error.__mro__ if base.__module__ == "builtins")
    kind = f", also a `{builtin}`" if builtin != "RuntimeError" else ""
    text = " ".join((inspect.getdoc(error) or "").split()).replace("``", "`")
    entry = f"`{error.__name__}`, `{error.status}`{kind}. {text} *Remedy:* {REMEDIES[code]}"
    return f"### `{code}`\n\n{textwrap.fill(entry, 120, break_on_hyphens=False)}\n"


if __name__ == "__main__":
    print(page(), end="")

"""``python -m tests.simulation [KIND]``: run many seeds, or one with its trace.

KIND: "snapshots"; "ordinary" for runs of ordinary life; "lost" for runs that lose the scheduler's store or their
snapshots; "sets" for scripts that train several parameter sets; "writes" for scripts that write weights; "groups" for
groups of collectives whose members die and are added; or "standby" for runs with two schedulers.
"""

from __future__ import annotations

import sys

from tests.simulation import runner, snapshot_runner

if __name__ == "__main__":
    kind = sys.argv[1] if sys.argv[1:] and sys.argv[1] in runner.KINDS else ""
    arguments = sys.argv[2:] if kind else sys.argv[1:]
    sys.exit(snapshot_runner.main(arguments) if kind == snapshot_runner.KIND else runner.main(kind, arguments))

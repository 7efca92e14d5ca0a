"""``python -m tests.simulation``: many seeds, or one with its trace; ``snapshots`` before the flags: with snapshots."""

from __future__ import annotations

import sys

from tests.simulation import runner, snapshot_runner

if __name__ == "__main__":
    with_snapshots = sys.argv[1:2] == ["snapshots"]
    sys.exit(snapshot_runner.main(sys.argv[2:]) if with_snapshots else runner.main(sys.argv[1:]))

"""``python -m psdist_scheduler``: the scheduler's process."""

from __future__ import annotations

import sys

from psdist.config import scheduler_settings
from psdist_scheduler.app import main

if __name__ == "__main__":
    sys.exit(main(scheduler_settings(sys.argv[1:])))

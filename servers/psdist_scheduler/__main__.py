"""The scheduler's process: ``python -m psdist_scheduler``."""

from __future__ import annotations

import gc
import sys

from psdist.importing import quickly
from psdist.settings import own_process


def main() -> int:
    """Read the command line and run; returns the exit status."""
    own_process.lose_unwritable_lines()
    own_process.end_on(own_process.SERVICE_SIGNALS)
    with quickly():
        from psdist.settings.programs import check_machine, scheduler_settings

        settings = scheduler_settings(sys.argv[1:])
        check_machine("psdist-scheduler")
        # Keep structlog from importing rich for the colours of tracebacks: 5 MB and 65 modules.
        sys.modules.setdefault("rich", None)  # type: ignore[arg-type]  # None: cannot be imported
        from psdist_scheduler import app

        gc.freeze()  # Traversing what is imported would take a tenth of the exit.
    return app.main(settings)


if __name__ == "__main__":
    sys.exit(main())

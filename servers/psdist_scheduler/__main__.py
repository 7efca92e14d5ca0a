"""The scheduler's process: ``python -m psdist_scheduler``."""

from __future__ import annotations

import gc
import sys

from psdist.settings.programs import check_machine, scheduler_settings


def main() -> int:
    """Run the scheduler with the command line's settings. Returns the exit status."""
    gc.disable()  # Scanning imported modules, which stay, would take a tenth of the start and exit.
    settings = scheduler_settings(sys.argv[1:])
    check_machine("psdist-scheduler")
    # structlog imports rich for the colors of tracebacks: 5 MB and 65 modules. None marks a module that cannot be
    # imported, which typeshed does not know.
    sys.modules.setdefault("rich", None)  # type: ignore[arg-type]
    from psdist_scheduler import app

    gc.freeze()
    gc.enable()
    return app.main(settings)


if __name__ == "__main__":
    sys.exit(main())

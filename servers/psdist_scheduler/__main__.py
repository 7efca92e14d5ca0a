"""``python -m psdist_scheduler``: the scheduler's process."""

from __future__ import annotations

import gc
import sys

from psdist.settings.programs import check_machine, scheduler_settings


def main() -> int:
    """Reads the command line and runs; the exit status."""
    gc.disable()  # What is imported stays: to look through it would take a tenth of the start, and of the exit.
    settings = scheduler_settings(sys.argv[1:])
    check_machine("psdist-scheduler")
    # structlog imports it for the colors of tracebacks: 5 MB and 65 modules. None is how Python notes a module that
    # cannot be imported; its stubs do not know that.
    sys.modules.setdefault("rich", None)  # type: ignore[arg-type]
    from psdist_scheduler import app

    gc.freeze()
    gc.enable()
    return app.main(settings)


if __name__ == "__main__":
    sys.exit(main())

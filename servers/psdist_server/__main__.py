"""``python -m psdist_server``: the server's process."""

import gc
import os
import sys

from psdist.importing import quickly
from psdist.settings import own_process


def main() -> int:
    """Read the command line and run; returns the exit status."""
    own_process.lose_unwritable_lines()
    own_process.end_on(own_process.SERVICE_SIGNALS)
    with quickly():
        from psdist.settings.programs import check_machine, server_settings

        settings = server_settings(sys.argv[1:])
        check_machine("psdist-server")
        # Keep numpy from starting a thread per core on import: a server multiplies no matrices.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        from psdist_server.kernels import memory

        memory.leave_out()  # Before numba and structlog are imported.
        from psdist_server import app

        gc.freeze()  # Traversing what is imported would take a tenth of the exit.
    return app.main(settings)


if __name__ == "__main__":
    sys.exit(main())

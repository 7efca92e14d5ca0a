"""``python -m psdist_server``: the server program."""

import gc
import os
import sys

from psdist.settings.programs import check_machine, server_settings


def main() -> int:
    """Reads the command line and runs; the exit status."""
    gc.disable()  # What is imported stays: to look through it would take a tenth of the start, and of the exit.
    settings = server_settings(sys.argv[1:])
    check_machine("psdist-server")
    # A server multiplies no matrices, for which numpy would start a thread for each core when it is imported.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from psdist_server.kernels import memory

    memory.leave_out()  # Before numba and structlog are imported.
    from psdist_server import app

    gc.freeze()
    gc.enable()
    return app.main(settings)


if __name__ == "__main__":
    sys.exit(main())

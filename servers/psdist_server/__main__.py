"""``python -m psdist_server``: the server program."""

import sys

from psdist.config import server_settings
from psdist_server.app import main

if __name__ == "__main__":
    sys.exit(main(server_settings(sys.argv[1:])))

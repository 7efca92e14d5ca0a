"""gRPC's settings, made before it is imported: ``psdist`` imports this module first."""

from __future__ import annotations

import os
import sys
from typing import Final

#: True if gRPC was imported before, and has not read the first setting.
grpc_came_first: Final = "grpc" in sys.modules and "GRPC_ENABLE_FORK_SUPPORT" not in os.environ

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

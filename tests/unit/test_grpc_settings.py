"""gRPC's settings are made before it is imported, for any module of psdist that a script imports first.

Its fork handlers are off, since they occasionally crash forked children, and so is its own log.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import importlib, os, sys

def on_import(event, arguments):
    if event == "import" and arguments[0] == "grpc":
        print(os.environ.get("GRPC_ENABLE_FORK_SUPPORT"), os.environ.get("GRPC_VERBOSITY"), sep="/")

sys.addaudithook(on_import)
importlib.import_module(sys.argv[1])
"""


def imported_with(module: str, **environ: str) -> set[str]:
    """Return the settings at each request for grpc while ``module`` is imported in a new process."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GRPC_")}
    output = subprocess.check_output([sys.executable, "-c", SCRIPT, module], env={**kept, **environ}, text=True)
    return set(output.split())


@pytest.mark.parametrize("module", ["psdist.client.async_client", "psdist.wire.channels"])
def test_they_are_set_when_grpc_is_imported(module: str) -> None:
    assert imported_with(module) == {"0/NONE"}


def test_the_environment_counts() -> None:
    environ = {"GRPC_ENABLE_FORK_SUPPORT": "1", "GRPC_VERBOSITY": "INFO"}
    assert imported_with("psdist.wire.channels", **environ) == {"1/INFO"}


def test_tests_fork_without_them() -> None:
    """Data loaders fork from the tests' own process."""
    assert os.environ["GRPC_ENABLE_FORK_SUPPORT"] == "0"

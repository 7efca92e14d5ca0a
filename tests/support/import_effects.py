"""Effects of importing modules: a fresh interpreter imports them in turn, and reports what each changed in its process.

Packages of others that they import come before them, and count for nothing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

from tests.support.tree import MODULES, ROOT, imports, module_name, parsed

FRAMEWORKS = ("hf", "jax", "lightning", "process_group", "ray", "torch")
#: What the import of psdist itself changes: gRPC reads its settings when it is imported, which comes later.
OF_PSDIST = {"psdist": ["variable GRPC_ENABLE_FORK_SUPPORT", "variable GRPC_VERBOSITY"]}
#: The environment of a script under a launcher, in which psdist would act by itself. Nobody listens there.
LAUNCHED = {
    "PSDIST_CONNECTED_FILE": "/dev/null/connected",
    "PSDIST_SCHEDULER": "127.0.0.1:9",
    "PSDIST_TOKEN": "token",
    **{"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"},
    **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"},
}
_WATCH = """
import json, os, signal, sys

found = {}

def state():
    fds = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    distributed = sys.modules.get("torch.distributed")
    with open(f"/proc/self/task/{os.getpid()}/children") as children:
        return {
            "threads": len(os.listdir("/proc/self/task")),
            "children": children.read(),
            "sockets": sum("socket:" in os.readlink(one) for one in fds if os.path.lexists(one)),
            "process group": distributed is not None and distributed.is_initialized(),
            **{f"variable {name}": value for name, value in os.environ.items()},
            **{f"signal {number}": signal.getsignal(number) for number in signal.valid_signals()},
        }

def note(name):
    global before
    after = state()
    changed = sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))
    found.update({name: changed} if changed else {})
    before = after
"""
_END = "print(json.dumps(found), flush=True)\nos._exit(0)  # Libraries that were imported for nothing need no end.\n"


def effects_of(frameworks: bool) -> dict[str, list[str]]:
    """Return what the imports of psdist and of its modules changed, by module. frameworks: True for the modules for
    frameworks, False for all others."""
    files = {module_name(path): path for path in MODULES if path.relative_to(ROOT).parts[0] in ("psdist", "servers")}
    names = [name for name in sorted(files) if (name.split(".")[1:2] in [[one] for one in FRAMEWORKS]) is frameworks]
    foreign = {one for name in names for one in imports(name, parsed(files[name])) if not one.startswith("psdist")}
    packages = sorted({part for name in foreign for part in (name, name.rpartition(".")[0]) if part})
    script = [
        _WATCH,
        "before = state()\nimport psdist\nnote('psdist')",
        # A name may be none of a module; and some packages are missing, or only for another system.
        *(f"try:\n    import {name}\nexcept ImportError:\n    pass" for name in packages if name != "__future__"),
        "before = state()",
        *(f"import {name}\nnote({name!r})" for name in names),
        _END,
    ]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("GRPC_")}
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(script)], env=environ | LAUNCHED, cwd=ROOT, capture_output=True, text=True,
        check=False, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return found

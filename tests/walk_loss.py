"""Counts the files that the loss of a server passes, in the scheduler, the worker and the other server.

    python -m tests.walk_loss [--list]

One worker trains one small parameter set on two servers with two copies. Calls are recorded by ``sys.setprofile`` in
two windows: an ordinary step, with heartbeats and samples, and a step during which one server is killed. A file counts
if a function of it is called in the second window alone. It is a thermometer: files that were merged without becoming
simpler help nobody.
"""

from __future__ import annotations

import collections
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
_ROLES = ("scheduler", "worker", "server")

#: Records the calls of each process of the run in windows, from one signal to the next; of the worker, by two calls.
_PROBE = """
import json, os, signal, sys, threading
words = " ".join(sys.orig_argv)
role = next((name for name in ("scheduler", "server") if f"psdist_{name}" in words), "worker")
if os.environ.get("WALK_DIRECTORY") and ("psdist_s" in words or "walk_train" in words):
    windows, is_on = [], [False]
    def profile(frame, event, arg):
        if is_on[0] and event == "call" and "/psdist" in (name := frame.f_code.co_filename) and "site-pack" not in name:
            windows[-1].append((name, frame.f_code.co_qualname))
    def toggle(*_):
        is_on[0] = not is_on[0]
        if is_on[0]:
            windows.append([])
        sys.setprofile(profile if is_on[0] else None)
        if not is_on[0]:
            with open(f"{os.environ['WALK_DIRECTORY']}/{role}-{os.getpid()}.json", "w") as file:
                json.dump(windows, file)
    threading.setprofile(profile)
    if role != "worker":
        signal.signal(signal.SIGUSR2, toggle)
    import builtins
    builtins._walk_toggle = toggle
"""
_TRAIN = """
import builtins, signal, time, numpy as np, psutil, psdist
with psdist.init() as context:
    p = context.client.parameters("m", {"w": np.zeros(64, "f4")}, psdist.optim.Adam(lr=1e-3))
    gradients = {"w": np.ones(64, "f4")}
    for _ in range(30):
        p.push_pull(gradients)
    run = psutil.Process().parent().children(recursive=True)
    servers = [q for q in run if "psdist_server" in " ".join(q.cmdline())]
    others = [q for q in run if "psdist_scheduler" in " ".join(q.cmdline())] + servers[1:]
    for kills in (False, True):
        for q in others:
            q.send_signal(signal.SIGUSR2)
        time.sleep(0.3)
        builtins._walk_toggle()
        if kills:
            servers[0].kill()
        p.push_pull(gradients)
        time.sleep(0 if kills else 1.5)
        builtins._walk_toggle()
        for q in others:
            q.send_signal(signal.SIGUSR2)
        time.sleep(0.5)
"""


def walk() -> dict[str, collections.Counter[str]]:
    """Make one run. Returns the number of calls that only the loss causes, by role and file."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "sitecustomize.py").write_text(_PROBE, encoding="utf-8")
        Path(directory, "walk_train.py").write_text(_TRAIN, encoding="utf-8")
        path = os.pathsep.join([directory, os.environ.get("PYTHONPATH", "")])
        command = [str(Path(sys.executable).with_name("psdist")), "run", "--nservers", "2", "--replicas", "2"]
        command += ["--nproc-per-node", "1", "--storage-path", "none", f"{directory}/walk_train.py"]
        environment = os.environ | {"WALK_DIRECTORY": directory, "PYTHONPATH": path}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
        found: dict[str, collections.Counter[str]] = {role: collections.Counter() for role in _ROLES}
        for file in Path(directory).glob("*.json"):
            windows = json.loads(file.read_text(encoding="utf-8"))
            if len(windows) == 2:
                ordinary = {tuple(call) for call in windows[0]}
                names = [name for name, function in windows[1] if (name, function) not in ordinary]
                found[file.name.partition("-")[0]].update(os.path.relpath(name, _ROOT) for name in names)
    if not all(found.values()):
        sys.exit(f"not recorded:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return found


def main() -> None:
    """Print the numbers of files and calls; with ``--list`` the files, too."""
    found = walk()
    for role in _ROLES:
        print(f"{role}: {sum(found[role].values())} calls in {len(found[role])} files")
    print("files in all:", len(set().union(*found.values())))
    if "--list" in sys.argv:
        for role in _ROLES:
            for name, count in found[role].most_common():
                print(f"  {role} {count:5d} {name}")


if __name__ == "__main__":
    main()

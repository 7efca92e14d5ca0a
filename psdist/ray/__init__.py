"""Runs on a Ray cluster: ``psdist.ray.run(train, num_workers=8, num_servers=4)``.

Ray places, restarts and logs the processes. psdist owns membership, recovery and snapshots, as under every launcher.

``run.py`` is the driver's part, which also waits for room. ``actors.py`` has the actors: a scheduler or server is a
child process of its actor, a worker calls the training function. ``actors.py`` also checks the arguments.
"""

from psdist.ray.run import RunResult as RunResult
from psdist.ray.run import run as run

__all__ = ["RunResult", "run"]

"""Runs of frameworks' trainings: a cluster, and workers from a nursery."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import psutil
import torch

from psdist.launcher.embedded import EmbeddedCluster
from tests.support.nursery import ROOT, Job, Nursery


class Runs:
    """Trainings by the functions of a nursery's program, in one directory."""

    def __init__(self, nursery: Nursery, directory: Path) -> None:
        self._nursery = nursery
        self._directory = directory
        self._count = 0

    def alone(self, function: str, **keywords: Any) -> Any:
        """Return the result of a process without a scheduler."""
        return self._results(function, [{}], keywords, [0])[0]

    def together(
        self,
        function: str,
        workers: int,
        *,
        codes: tuple[int, ...] | None = None,
        servers: int = 1,
        replicas: int = 1,
        kills_server_at: int = 0,
        storage: bool = False,
        **keywords: Any,
    ) -> list[Any]:
        """Return the results of all workers of a run.

        codes: expected exit codes, 0 by default. kills_server_at: step at whose end a server is killed. storage: keep
        snapshots, and resume from those of the run before.
        """
        place = self._directory / "storage" if storage else None
        cluster = EmbeddedCluster(servers=servers, replicas=replicas, storage=place, run_id="frameworks")
        try:
            if kills_server_at:
                victim = next(one.pid for one in psutil.Process().children() if "psdist_server" in one.cmdline())
                keywords["kill"] = [kills_server_at, [victim]]
            environs = [
                {
                    "PSDIST_SCHEDULER": cluster.address, "PSDIST_TOKEN": cluster.token, "RANK": str(rank),
                    "WORLD_SIZE": str(workers), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(workers),
                }
                for rank in range(workers)
            ]  # fmt: skip
            return self._results(function, environs, keywords, list(codes or [0] * workers))
        finally:
            cluster.close()

    def _results(
        self, function: str, environs: list[dict[str, str]], keywords: dict[str, Any], codes: list[int]
    ) -> list[Any]:
        self._count += 1
        paths = [self._directory / f"result-{self._count}-{number}" for number in range(len(environs))]
        jobs = [Job(function, str(path), environ, keywords) for path, environ in zip(paths, environs, strict=True)]
        assert self._nursery.run(*jobs) == codes
        return [torch.load(path) if path.exists() else None for path in paths]


def programs_of(page: str, package: str, directory: Path) -> list[str]:
    """Write the Python programs of a page that use a package to files, and return their paths."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(), re.S)
    paths = []
    for number, block in enumerate(block for block in blocks if f"import {package}" in block):
        paths.append(str(directory / f"program-{number}.py"))
        Path(paths[-1]).write_text(block)
    return paths


def difference(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Return the norm of the difference between two states, relative to that of the first."""
    assert one.keys() == other.keys()
    first, second = (torch.cat([state[name].flatten() for name in one]) for state in (one, other))
    return float((first - second).norm() / first.norm())

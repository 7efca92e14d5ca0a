"""The words of ``psdist generate``: one per engine."""

from __future__ import annotations

from importlib import import_module
from typing import Final

from psdist.cli.commands import Command, Group

GENERATE: Final = Group(
    "psdist generate",
    "Files that run psdist under an engine that places and restarts processes.",
    (
        Command(
            "slurm", "print an sbatch script: --nodes 4 train.py > job.sh",
            lambda: import_module("psdist.cli.generate.slurm"),
        ),
        Command(
            "k8s", "write files for Kubernetes: --out run --image registry/train:1 train.py",
            lambda: import_module("psdist.cli.generate.k8s"),
        ),
    ),
    "Each command has --help.",
)  # fmt: skip

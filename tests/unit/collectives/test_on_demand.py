"""Collectives are loaded by the first group, and not by a script that makes none."""

from __future__ import annotations

import subprocess
import sys

from psdist.client.context import Context


def test_a_context_loads_no_collectives() -> None:
    code = (
        f"import sys, {Context.__module__}\n"
        "print(sorted(name for name in sys.modules if name.startswith('psdist.collectives.')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_first_name_is_imported_without_garbage_collections() -> None:
    """Check also that collections are as before afterwards, when they were disabled too."""
    code = (
        "import gc, psdist\n"
        "before = gc.get_stats()[0]['collections']\n"
        "psdist.Client\n"
        "print(gc.get_stats()[0]['collections'] - before < 20, gc.isenabled())\n"
        "gc.disable()\n"
        "psdist.launch\n"
        "print(gc.isenabled())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True", "False"]


def test_the_classes_of_groups_are_public() -> None:
    from psdist import collectives
    from psdist.collectives.sync_group import WorkerGroup

    assert collectives.WorkerGroup is WorkerGroup
    assert all(getattr(collectives, name) for name in collectives.__all__)

"""Script for ``psdist run``: runs the idioms of torch scripts on two workers and prints each result as a line of JSON.

Arguments: the folder of the tests' package; names of idioms, all without any.
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from dataclasses import asdict
from pathlib import Path

import torch
from torch import distributed

sys.path.insert(0, sys.argv[1])

import psdist
from tests.idioms.script import DDP, OPTIMIZER  # the path is an argument
from tests.idioms.table import compare, load


def main() -> None:
    """Run the idioms named on the command line."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    context = psdist.init()
    idioms = load()
    chosen = [one for name, one in idioms.items() if name in sys.argv[2:] or not sys.argv[2:]]
    rendezvous = f"file://{Path(tempfile.gettempdir()) / 'gloo'}"
    distributed.init_process_group("gloo", init_method=rendezvous, rank=context.rank, world_size=2)
    for one in chosen:
        for face in (OPTIMIZER, DDP):
            result = compare(one, face, context, context.rank, context.world_size)
            print(json.dumps({"idiom": one.name, "face": face, "rank": context.rank, **asdict(result)}), flush=True)


if __name__ == "__main__":
    main()

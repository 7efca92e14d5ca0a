"""Other processes of a script: those started together with this one, those that it started, and copies for them.

**Siblings**, as torch, JAX, Ray Train and ``multiprocessing`` know them. Without a scheduler each of them would train
alone, on all data. The ranks of torch can train together, because they share a store. Others are refused. The variables
of launchers are in ``settings.other_launchers``.

**Spawned processes**: the script's training must not run in them. A process started by "spawn" or "forkserver" imports
the script's main module again. Without the guard ``if __name__ == "__main__":`` it would train as well: alone, or as a
second worker of the same rank. Forked processes are refused by ``loop``.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Final, NoReturn

from psdist.errors import ConfigurationError, DuplicateMemberError, InvalidArgumentError
from psdist.settings.other_launchers import check_alone

#: Variables by which torch's ``env://`` finds its store.
_RENDEZVOUS: Final = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def torch_group_size() -> int:
    """Return the size of torch's default process group; 0 if this process has none."""
    dist: Any = sys.modules.get("torch.distributed")
    has_group = dist is not None and dist.is_available() and dist.is_initialized()
    return int(dist.get_world_size()) if has_group else 0


def names_torch_store(environ: Mapping[str, str]) -> bool:
    """True if the environment names torch's store for several ranks, as torchrun sets it, and this is one of them.

    A process of ``multiprocessing`` has inherited these variables: they describe its parent.
    """
    several = environ.get("WORLD_SIZE", "") not in ("", "0", "1") and all(environ.get(name) for name in _RENDEZVOUS)
    return several and multiprocessing.parent_process() is None


def check_no_siblings(environ: Mapping[str, str]) -> None:
    """Raise ConfigurationError if this process is one of several that would each train alone."""
    remedy = "call torch.distributed.init_process_group in each process first, or set PSDIST_SCHEDULER=HOST:PORT"
    check_alone(environ, remedy)
    if sign := _sign():
        raise ConfigurationError(
            f"{sign}, and no scheduler is named: each of such processes would train alone. To train together, start "
            "the script with 'psdist run' or torchrun instead, or call torch.distributed.init_process_group in each "
            "process first. If each process is to train a model of its own, as in a search for hyperparameters, call "
            "psdist.init(alone=True) in each before anything else of psdist"
        )


def _sign() -> str:
    """Return how this process is known to be one of several; empty if it is not."""
    if (count := _jax_processes()) > 1:
        return f"jax.distributed has {count} processes"
    if (count := _ray_train_workers()) > 1:
        return f"Ray Train started {count} workers"
    parent = multiprocessing.parent_process()
    if parent is not None and torch_group_size() != 1:  # A group of one says that there are no others.
        return f"this process was started by multiprocessing (its parent is process {parent.pid})"
    return ""


def _jax_processes() -> int:
    # jax.process_count() would start the devices.
    state = getattr(sys.modules.get("jax._src.distributed"), "global_state", None)
    return int(getattr(state, "num_processes", None) or 0)


def _ray_train_workers() -> int:
    train: Any = sys.modules.get("ray.train")
    with suppress(Exception):  # Outside of a training it has no context. Its errors differ by version.
        return int(train.get_context().get_world_size()) if train is not None else 0
    return 0


@contextmanager
def placed(rank: int, size: int, local_rank: int | None, local_size: int) -> Iterator[None]:
    """Let the environment state this process's place: the given one may be that of a parent, or of another launcher.

    local_rank: None keeps the given one.
    """
    place = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": local_size}
    place |= {} if local_rank is None else {"LOCAL_RANK": local_rank}
    before = {name: os.environ.get(name) for name in place}
    os.environ.update({name: str(value) for name, value in place.items()})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


_GUARD: Final = 'if __name__ == "__main__":'


def check_guarded() -> None:
    """Raise ConfigurationError if ``multiprocessing`` is importing the script's main module in a new process."""
    # Set until the main module is imported. Only afterwards does the process know its parent.
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise ConfigurationError(
            "psdist.init() is called in a process that multiprocessing started (a data loader's, for example), because "
            f"it imports the script's main module: put the script's statements into a function, and call it under "
            f"'{_GUARD}'"
        )


def explained(error: DuplicateMemberError) -> DuplicateMemberError:
    """Return the error of a registration, with the remedy if this process is not the worker itself."""
    if not is_spawned():
        return error
    return DuplicateMemberError(
        f"{error.message}. This process was started by multiprocessing and inherited the rank of the worker that "
        f"started it: call psdist.init() in one of them, under '{_GUARD}', and let the launcher start the workers "
        "(--nproc-per-node)",
        **error.details,
    )


def is_spawned() -> bool:
    """True if ``multiprocessing`` started this process."""
    return multiprocessing.parent_process() is not None


class ProcessBound:
    """Base of classes whose objects are neither copied nor pickled."""

    __slots__ = ()

    def __reduce__(self) -> NoReturn:
        name = type(self).__name__
        raise InvalidArgumentError(
            f"a {name} cannot be pickled or copied: it holds connections of this process. In another process call "
            "psdist.init() or make a client, and send arrays between processes instead"
        )

"""``psdist.ray.run``: the driver's part of a run on a Ray cluster."""

from __future__ import annotations

import os
import secrets
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from psdist.addresses import free_port
from psdist.errors import ConfigurationError, LaunchFailedError, WaitTimeoutError
from psdist.ray.actors import RaySettings
from psdist.security.tokens import require_root
from psdist.settings.exit_codes import OK

try:
    import ray
    from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
    from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

    from psdist.ray.actors import Ended, Returned, SchedulerActor, ServerActor, WorkerActor, WorkerPlace
except ImportError as error:
    raise ConfigurationError(f"psdist.ray needs Ray ({error}): pip install ray") from None

#: Ray restarts scheduler and servers without limit, as psdist ends a run that cannot be saved by an exit status.
_FOR_EVER: Final = -1
#: Calls of a service at a time: one waits for its end, others ask and stop it.
_CALLS: Final = 4
#: Longest wait for servers, and for the scheduler, to end in order once everything is saved.
_STOP_SECONDS: Final = 5.0
_SCHEDULER: Final = "scheduler"
_ONE_CPU: Final = {"CPU": 1.0}


@dataclass(frozen=True, slots=True)
class RunResult:
    """A run that succeeded.

    run_id: name of the run.
    metrics: values that rank 0 reported last, by name (``Context.report``).
    returned: return values of the function by rank.
    storage_path: location of the snapshots; None without them. A later run of the same ``run_id`` resumes from it.
    """

    run_id: str
    metrics: Mapping[str, float] = field(default_factory=dict)
    returned: Mapping[int, Any] = field(default_factory=dict)
    storage_path: str | None = None


def run(
    train_fn: Callable[..., Any],
    config: Any = None,
    *,
    num_workers: int = 1,
    num_servers: int = 1,
    replicas: int = 1,
    resources_per_worker: Mapping[str, float] = _ONE_CPU,
    resources_per_server: Mapping[str, float] = _ONE_CPU,
    storage_path: str | os.PathLike[str] | None = None,
    save_interval: str | None = None,
    run_id: str | None = None,
    max_restarts: int = 3,
    placement_timeout: float = 60.0,
    certs: str | os.PathLike[str] | None = None,
    insecure: bool = False,
) -> RunResult:
    """Train on a Ray cluster: start a scheduler, servers and workers as actors, and return when all have ended.

        def train(config):
            with psdist.init() as context:
                ...

        result = psdist.ray.run(train, {"lr": 0.1}, num_workers=8, num_servers=4, replicas=2)

    train_fn: called by each worker, with ``config`` if that is not None. It joins the run by ``psdist.init()``.
    num_workers, num_servers: how many of each.
    replicas: copies of each shard; with 2 nothing is lost when a server or its node dies.
    resources_per_worker, resources_per_server: what Ray reserves for each, such as ``{"CPU": 4, "GPU": 1}``.
    storage_path: absolute path that all nodes share, or URL, for snapshots; None takes none.
    save_interval: time between snapshots, such as "5m" or "100" (steps); None is 10 minutes.
    run_id: name of the run; None makes one. A run with the name of an earlier one resumes from its newest snapshot.
    max_restarts: restarts of each worker whose process or node dies. An exception of ``train_fn`` ends the run.
    placement_timeout: longest wait in seconds for room in the cluster.
    certs: folder of ``psdist certs`` with the certificates ``scheduler``, ``server`` and ``worker``, which all nodes
        have; all connections then use mutual TLS.
    insecure: True allows plaintext between nodes, for private networks. A cluster of one machine needs neither.

    Without ``ray.init()`` Ray finds or starts the cluster. The scheduler is on the node of this program, so it shares
    that node's fate, and no other's.

    Raises ConfigurationError for wrong arguments, before anything is started; WaitTimeoutError if the cluster has no
    room; LaunchFailedError with the traceback of the worker that failed first, or the last lines of a scheduler or
    server. Ctrl-C saves a snapshot, if there is a storage, ends all actors, and raises KeyboardInterrupt.
    """
    if not callable(train_fn):
        raise ConfigurationError(f"train_fn={train_fn!r:.80} is not a function: pass one")
    settings = RaySettings(
        run_id=run_id or f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}",
        num_workers=num_workers, num_servers=num_servers, replicas=replicas,
        resources_per_worker=resources_per_worker, resources_per_server=resources_per_server,
        storage_path=None if storage_path is None else os.fspath(storage_path), save_interval=save_interval,
        max_restarts=max_restarts, placement_timeout=placement_timeout,
        certs=None if certs is None else Path(certs).absolute(), insecure=insecure,
    )  # fmt: skip
    if not ray.is_initialized():
        ray.init()
    run = _Run(settings.on_nodes({node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}))
    with run.actors():
        return run.train(train_fn, () if config is None else (config,))


class _Run:
    """The actors of one run."""

    def __init__(self, settings: RaySettings) -> None:
        self._settings = settings
        self._token = os.environ.get("PSDIST_TOKEN") or secrets.token_urlsafe(32)
        require_root(self._token)
        self._directory = Path(tempfile.gettempdir(), f"psdist-ray-{secrets.token_hex(16)}")
        self._groups: list[PlacementGroup] = []
        self._services: dict[str, Any] = {}
        self._workers: list[Any] = []

    @contextmanager
    def actors(self) -> Iterator[None]:
        """Start all actors. At the end, kill the remaining ones, free their room, and delete the store."""
        try:
            self._start()
            yield
        finally:
            if _SCHEDULER in self._services:
                ray.wait([self._services[_SCHEDULER].delete_store.remote()], timeout=_STOP_SECONDS)
            for actor in (*self._workers, *self._services.values()):
                ray.kill(actor)
            for group in self._groups:
                remove_placement_group(group)

    def train(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> RunResult:
        """Call the function in all workers, and wait for the end of the run."""
        nodes = ray.get([worker.node.remote() for worker in self._workers])
        calls = {
            worker.run.remote(function, arguments, place): place.rank
            for worker, place in zip(self._workers, _places(nodes), strict=True)
        }
        try:
            returned = self._wait(calls)
        except KeyboardInterrupt:
            self._save()  # While the workers still train, so that all have made its step.
            raise
        self._finish()
        return RunResult(
            self._settings.run_id,
            returned[0].metrics,
            {rank: returned[rank].value for rank in sorted(returned)},
            self._settings.storage_path,
        )

    def _start(self) -> None:
        settings, here = self._settings, ray.get_runtime_context().get_node_id()
        host = settings.host(ray.util.get_node_ip_address())
        port = free_port(host)
        self._scheduler = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        service = {"max_restarts": _FOR_EVER, "max_task_retries": _FOR_EVER, "max_concurrency": _CALLS, "num_cpus": 0}
        self._services[_SCHEDULER] = ray.remote(SchedulerActor).options(
            **service, scheduling_strategy=NodeAffinitySchedulingStrategy(here, soft=False)
        ).remote(settings, self._scheduler, self._directory, self._token)  # fmt: skip
        # Servers on different nodes: psdist keeps the copies of a shard on different hosts.
        servers = self.reserve("servers", settings.resources_per_server, settings.num_servers, "SPREAD")
        workers = self.reserve("workers", settings.resources_per_worker, settings.num_workers, "PACK")
        for number in range(settings.num_servers):
            self._services[f"server-{number}"] = ray.remote(ServerActor).options(
                **service | _resources(settings.resources_per_server), scheduling_strategy=_bundle(servers, number)
            ).remote(settings, number, self._scheduler, self._token)  # fmt: skip
        self._workers = [
            ray.remote(WorkerActor).options(
                **_resources(settings.resources_per_worker), max_restarts=settings.max_restarts,
                max_task_retries=settings.max_restarts, scheduling_strategy=_bundle(workers, rank),
            ).remote(settings, self._scheduler, self._token)
            for rank in range(settings.num_workers)
        ]  # fmt: skip

    def reserve(self, name: str, bundle: Mapping[str, float], count: int, strategy: str) -> PlacementGroup:
        group = reserve(name, bundle, count, strategy, self._settings.placement_timeout)
        self._groups.append(group)
        return group

    def _wait(self, calls: Mapping[Any, int]) -> dict[int, Returned]:
        """Return the ends of the workers, by rank. Raises LaunchFailedError as soon as anything fails for good."""
        returned: dict[int, Returned] = {}
        ends = {service.outcome.remote(): name for name, service in self._services.items()}
        while len(returned) < len(calls):
            waited = [*(call for call, rank in calls.items() if rank not in returned), *ends]
            (ready, *_), _ = ray.wait(waited)
            if ready in ends:
                _check_drained(ends.pop(ready), ready)
                continue
            returned[calls[ready]] = _returned(calls[ready], ready)
        return returned

    def _finish(self) -> None:
        """Save the last snapshot, and end servers and scheduler in order."""
        if problem := self._save():
            raise LaunchFailedError(f"the workers succeeded, but the last snapshot failed: {problem}", status=1)
        scheduler = self._services[_SCHEDULER]
        servers = [service.stop.remote() for service in self._services.values() if service is not scheduler]
        # Nothing is lost if they are killed now. One that waits for room after its node died cannot answer at all.
        ray.wait(servers, num_returns=len(servers), timeout=_STOP_SECONDS)
        ray.wait([scheduler.stop.remote()], timeout=_STOP_SECONDS)

    def _save(self) -> str:
        """Save a snapshot, if there is a storage. Returns the reason if that failed, otherwise an empty text."""
        problem: str = ray.get(self._services[_SCHEDULER].save.remote())
        return problem


def _bundle(group: PlacementGroup, number: int) -> PlacementGroupSchedulingStrategy:
    return PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number)


def _resources(wanted: Mapping[str, float]) -> dict[str, Any]:
    """Return resources as options of an actor."""
    others = {name: amount for name, amount in wanted.items() if name not in ("CPU", "GPU")}
    return {"num_cpus": wanted.get("CPU", 0), "num_gpus": wanted.get("GPU", 0), "resources": others}


def _places(nodes: list[str]) -> list[WorkerPlace]:
    """Return the place of each worker. nodes: the id of each worker's node, by rank."""
    sizes, seen, places = Counter(nodes), Counter[str](), []
    for rank, node in enumerate(nodes):
        places.append(WorkerPlace(rank, len(nodes), seen[node], sizes[node]))
        seen[node] += 1
    return places


def _returned(rank: int, call: Any) -> Returned:
    try:
        returned: Returned = ray.get(call)
    except RayTaskError as error:
        raise LaunchFailedError(f"worker {rank} failed:\n{error}", rank=rank, traceback=str(error)) from error.cause
    except RayActorError as error:
        raise LaunchFailedError(
            f"worker {rank} died, and its restarts (max_restarts=) are used up: {error}", rank=rank
        ) from None
    return returned


def _check_drained(name: str, outcome: Any) -> None:
    """Raise LaunchFailedError for the end of a scheduler or server, unless it is a server that was drained."""
    try:
        ended: Ended = ray.get(outcome)
    except RayActorError as error:
        raise LaunchFailedError(f"the actor of the {name} died for good: {error}") from None
    if ended.status == OK and name != _SCHEDULER:
        return
    last = "\n".join(ended.lines)
    raise LaunchFailedError(f"the {name} ended with exit status {ended.status}:\n{last}", status=ended.status)


def reserve(name: str, bundle: Mapping[str, float], count: int, strategy: str, timeout: float) -> PlacementGroup:
    """Reserve ``count`` bundles of resources, and wait until the cluster has them.

    name: "servers" or "workers", for the error.
    timeout: longest wait in seconds; a cluster that grows on demand needs some.

    Raises WaitTimeoutError, which names the free resources.
    """
    wanted = {resource: amount for resource, amount in bundle.items() if amount}
    group = placement_group([wanted] * count, strategy)
    try:
        ray.get(group.ready(), timeout=timeout)
    except BaseException as error:  # Ctrl-C, too: nobody else knows the group yet.
        remove_placement_group(group)
        if not isinstance(error, GetTimeoutError):
            raise
        free = ray.available_resources()
        needs = ", ".join(f"{amount * count:g} {resource}" for resource, amount in wanted.items())
        has = ", ".join(f"{free.get(resource, 0.0):g} {resource}" for resource in wanted)
        raise WaitTimeoutError(
            f"the cluster has no room for {count} {name} with {_text(wanted)} each ({needs}) after "
            f"placement_timeout={timeout:g} s: free now are {has}. Add nodes, pass a smaller num_{name} or "
            f"resources_per_{name[:-1]}, or wait for other jobs"
        ) from None
    return group


def _text(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {resource}" for resource, amount in resources.items())

"""``psdist.init()``: the rank and world of this script, and its client.

Under a launcher they come from the environment. Ranks of torch that no launcher of psdist has started start a run
together (``process_group.own_run``). Any other script is a world of one: a scheduler and a server are started for it,
and end with it. One of several processes is refused, since each would train alone without notice.
"""

from __future__ import annotations

import atexit
import inspect
import multiprocessing
import os
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from importlib import import_module
from multiprocessing import util
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, Self, SupportsFloat

from numpy.typing import ArrayLike

from psdist.client.async_client import checked_ranks
from psdist.client.session import loop, script
from psdist.client.session.script import print_line, sigterm
from psdist.client.sync_client import Client, Parameters
from psdist.collectives import SILENCE_SECONDS
from psdist.errors import ConfigurationError, DuplicateMemberError, InvalidArgumentError, LateWorkerError
from psdist.monitoring.trackers import PLAIN_SECONDS, ProgressTracker, Tracker
from psdist.monitoring.worker_reports import MetricsPipe, Reporter, RunInfo
from psdist.security.tls import TlsFiles
from psdist.settings.config import MetricsSettings, TransportName, metrics_settings

if TYPE_CHECKING:
    from psdist.collectives.group import AsyncWorkerGroup
    from psdist.collectives.sync_group import WorkerGroup
    from psdist.collectives.workers import AsyncCollectives

_CONFIGURED = ("PSDIST_SCHEDULER", "PSDIST_SCHEDULER_FILE", "DMLC_PS_ROOT_URI")


class _Cluster(Protocol):
    def await_end(self) -> None:
        """Wait until all workers have left, if there are others."""

    def close(self) -> None:
        """End the cluster."""


@dataclass(frozen=True)
class Context:
    """A script's place in its run.

    rank: this worker's number, from 0.
    world_size: workers of the run.
    local_rank: this worker's number on this machine.
    client: connected.
    """

    rank: int
    world_size: int
    local_rank: int
    client: Client
    _cluster: _Cluster | None = field(default=None, repr=False)
    _metrics: MetricsSettings = field(default_factory=MetricsSettings, repr=False)
    _reporter: Reporter = field(init=False, repr=False)
    _groups: _Collectives = field(init=False, repr=False)
    _pid: int = field(default_factory=os.getpid, init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_reporter", _make_reporter(self.client, self.rank, self._metrics))
        object.__setattr__(self, "_groups", _Collectives(self.client))

    def report(
        self,
        loss: SupportsFloat | None = None,
        accuracy: SupportsFloat | None = None,
        samples: SupportsFloat | None = None,
        step: int | None = None,
        **numbers: SupportsFloat,
    ) -> None:
        """Report the results of a step. Call it once per step, or less often.

        loss, accuracy, numbers: the script's values by name: numbers of Python or numpy, arrays or tensors of no
            dimension; NaN and infinities too. Names have 1 to 64 of ``A-Z a-z 0-9 _ . / -``, at most 24 in a script.
            From ``total_steps``, the number of the last step, the launcher's progress line has the time left.
        samples: number of samples behind the values. It weights their means, and samples per second are counted by it.
        step: None is that of the parameter set that was opened first: in BSP the completed steps, in SSP and ASP the
            updates that this worker has seen. Without a parameter set it is the number of reports.

        psdist adds how long the script computed, pushed, waited and pulled, bytes and staleness (docs/metrics.md).
        Reports of about a second are summed up. Then they go to the trackers of ``add_tracker``, and to the launcher,
        which shows and files those of all workers together. The call waits for neither. One thread of a script may call
        it.

        Raises InvalidArgumentError for values that are no numbers, for ``samples`` below 0 or infinite, and for more
        than 24 names; InvalidNameError for names that are invalid or psdist's own; ClosedError. Nothing is reported
        then.
        """
        self._reporter.report(loss, accuracy, samples, step, numbers)

    def info(self) -> RunInfo:
        """Return this worker's place in its run, and the run's members at this moment. Raises ClosedError."""
        return self.client.info()

    def iteration(self) -> AbstractContextManager[None]:
        """Declare one iteration of a script that trains several BSP parameter sets, by ``with context.iteration():``.

        Snapshots, joins and the end of the run then fall between iterations, for all sets at the same one. A script
        that repeats one order of steps (D, G, D, G; or five steps of D to one of G) need not declare iterations,
        because psdist infers them. Declare them if the order depends on data, or if an iteration has more than 2,048
        steps over all sets. All workers make the same steps in the same order, and make no steps outside. Once a script
        has declared an iteration, only declared ones count.
        """
        return self.client.iteration()

    @property
    def collectives(self) -> WorkerGroup:
        """The group of all workers of the run. Once it has ended by an error, this makes another one."""
        if self._groups.world is None or self._groups.world.has_ended:
            self._groups.world = self.new_group()
        return self._groups.world

    def new_group(self, ranks: Iterable[int] | None = None, *, ordered: bool = False) -> WorkerGroup:
        """Return a group of the workers with these ranks, for collectives; None means all.

        Its members make it in the same order as other groups of the same workers. It waits for those that have not
        joined the run. Numbers of ranks in the calls of the group are positions in ``ranks``, which are sorted unless
        they are ``ordered``.

        Raises InvalidArgumentError unless this worker is among them, LimitExceededError, ClosedError, and FencedError.
        """
        return self._groups.new_group(ranks, ordered)

    @property
    def is_alone(self) -> bool:
        """True if the cluster is this process's own, so that no other worker joins."""
        return self.world_size == 1 and self._cluster is not None

    @property
    def is_subset(self) -> bool:
        """True for a context of ``subset``."""
        return False

    def subset(self, ranks: Iterable[int]) -> Context:
        """Return the context of the workers with these ranks in the run, this one among them.

        Parameter sets that are created through it, by ``psdist.torch`` too, are trained by these workers alone; the
        others need not call anything. So each part of a model that is divided among workers can be a set of the workers
        that hold it, under a name of its own. ``rank`` and ``world_size`` count these workers, ``collectives`` is their
        group, and everything else is that of this context, which stays open when the new one is closed.

        Raises InvalidArgumentError unless these are ranks and this worker's is one of them.
        """
        mine, members = self.client.rank, checked_ranks(ranks)
        if mine not in members:
            raise InvalidArgumentError(f"rank {mine} is not among {members}: only members make a subset")
        return _Subset(
            members.index(mine), len(members), self.local_rank, _SubsetClient(self.client, members), _whole=self
        )

    def async_collectives(self) -> AsyncCollectives:
        """Return the groups of this worker for code that runs on psdist's loop thread."""
        return self._groups.started()

    def join_group(
        self,
        name: str = "workers",
        *,
        size: int | None = None,
        size_min: int = 1,
        silence: float | None = SILENCE_SECONDS,
        timeout: float | None = None,
    ) -> WorkerGroup:
        """Join the group ``name``, whose members may die, leave and be added: see ``WorkerGroup.reconfigure``.

        The first workers form it, once ``size`` of them have called this. Later ones wait until the members admit them.
        A worker that was expelled joins again.

        size: None is the number of workers that the run was started with.
        size_min: workers that every successor of the group needs; fewer survivors wait for new ones.
        silence: seconds after which a rank that a call needs is lost if its process is stopped, or its host
            acknowledges nothing. None leaves that to its lease.

        Raises InvalidNameError, InvalidArgumentError, LateWorkerError if the members have completed their work, or have
        ended, WorkerLeftError if workers have ended without the group, and too few are left, WaitTimeoutError after
        ``timeout`` seconds, LimitExceededError, FencedError if the worker may not rejoin, and ClosedError.
        """
        return self._groups.join_group(
            name, size=self.world_size if size is None else size, size_min=size_min, silence=silence, timeout=timeout
        )

    def common_step(self, step: int) -> int:
        """Return ``step`` if it is the same for all workers of this context, which all call this.

        step: next step of the set that this worker trains, its handle's ``step``.

        For workers that hold parts of one model, before their first step: servers have no common step of the parts if a
        worker was killed, because the others may have made a step more or less. Raises LateWorkerError in that case.
        """
        steps = self.collectives.all_gather(step).tolist()
        if len(set(steps)) > 1:
            raise LateWorkerError(
                f"the parts of the model are at different steps ({', '.join(map(str, sorted(set(steps))))}), because "
                "workers were lost within a step: end the run and start it again from a snapshot that has all parts at "
                "one step (--run-id and --no-save-at-end, see docs/internals/strategies.md)"
            )
        return step

    def add_tracker(self, tracker: Tracker) -> None:
        """Also pass this worker's later reports to ``tracker``, about once a second, and call its ``start``.

        An exception of its ``log`` is logged, and the tracker gets nothing more. Raises the exception of ``start``.
        """
        self._reporter.add_tracker(tracker)

    def close(self) -> None:
        """Leave the run, and end the cluster if ``init`` started it. Closing again does nothing."""
        self.__exit__(None, None, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave(kind, error, trace)
        self._await_others(error)
        if self._cluster is not None:
            self._cluster.close()
            atexit.unregister(self._close_at_exit)  # It would keep buffers as large as the model.

    def _await_others(self, error: BaseException | None) -> None:
        """Wait for the workers that need the scheduler of this process, unless it has failed or is being stopped."""
        if self._cluster is not None and sigterm.reason(error) == "closed":
            self._cluster.await_end()

    def _leave(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _current
        with _lock:
            if _current is self:
                _current = None
        self._reporter.close()
        self.client.__exit__(kind, error, trace)

    def _close_at_exit(self) -> None:
        if os.getpid() != self._pid:  # A process that the script forked is no worker, and owns no cluster.
            return
        ended = sys.exc_info()  # In a process of multiprocessing, the error that ends it.
        with sigterm.ignored():
            self._leave(*ended)
        self._await_others(ended[1])
        with sigterm.ignored():
            self.__exit__(*ended)


class _SubsetClient(Client):
    """A client whose parameter sets are trained by some workers. It shares everything with ``client``.

    workers: their ranks in the run, in ascending order.
    """

    def __init__(self, client: Client, workers: Sequence[int]) -> None:
        self.__dict__.update(client.__dict__)
        self.workers = tuple(workers)

    def parameters(
        self, name: str, init: Mapping[str, ArrayLike] | None = None, *arguments: Any, **settings: Any
    ) -> Parameters:
        """Create parameters that these workers train, or attach to some: see ``Client.parameters``."""
        if init is not None:
            settings.setdefault("workers", self.workers)
        return super().parameters(name, init, *arguments, **settings)


class _Collectives:
    """Groups of the workers of a run, made and imported on first use.

    Most scripts exchange gradients through servers alone. The modules of collectives would take an eighth of their
    start.

    client: connected.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._async: AsyncCollectives | None = None
        #: Group of all workers.
        self.world: WorkerGroup | None = None

    def new_group(self, ranks: Iterable[int] | None = None, ordered: bool = False) -> WorkerGroup:
        """See ``Context.new_group``."""
        from psdist.collectives.sync_group import WorkerGroup

        return WorkerGroup(loop.shared().call(loop.on_loop(lambda: self.started().new_group(ranks, ordered=ordered))))

    def join_group(self, name: str, **settings: Any) -> WorkerGroup:
        """See ``Context.join_group``."""
        from psdist.collectives.sync_group import WorkerGroup

        return WorkerGroup(loop.shared().call(self._join_group(name, settings)))

    async def _join_group(self, name: str, settings: dict[str, Any]) -> AsyncWorkerGroup:
        return await self.started().join_group(name, **settings)

    def started(self) -> AsyncCollectives:
        """Return the groups for code on psdist's loop thread."""
        from psdist.collectives.workers import AsyncCollectives

        if self._async is None:
            self._async = AsyncCollectives(self._client.session)
        return self._async


class _SubsetCollectives(_Collectives):
    """Groups that are made through ``whole``. ranks: the members of ``world``, by their ranks in the run."""

    def __init__(self, whole: _Collectives, ranks: Sequence[int]) -> None:
        self._whole = whole
        self._ranks = ranks
        self.world = None

    def new_group(self, ranks: Iterable[int] | None = None, ordered: bool = False) -> WorkerGroup:
        """See ``Context.new_group``; None means all workers of the subset."""
        return self._whole.new_group(self._ranks if ranks is None else ranks, ordered)

    def started(self) -> AsyncCollectives:
        """Return the groups for code on psdist's loop thread."""
        return self._whole.started()


@dataclass(frozen=True)
class _Subset(Context):
    """Context of some workers. _whole: the context that it belongs to."""

    _whole: Context | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        assert self._whole is not None and isinstance(self.client, _SubsetClient)
        object.__setattr__(self, "_reporter", self._whole._reporter)
        object.__setattr__(self, "_groups", _SubsetCollectives(self._whole._groups, self.client.workers))

    @property
    def is_subset(self) -> bool:
        return True

    def __exit__(self, *_: object) -> None:
        """Leave the run open, since it is that of the whole context."""


_lock = threading.RLock()  # The ranks of torch call ``init`` again, with the scheduler of rank 0.
_current: Context | None = None


def init(
    scheduler: str | None = None,
    token: str | None = None,
    *,
    tls: TlsFiles | Literal[False] | None = None,
    run_id: str | None = None,
    worker_id: str | None = None,
    rank: int | None = None,
    connect_timeout: float | None = None,
    request_timeout: float | None = None,
    transport: TransportName | None = None,
    rejoin: bool = True,
    alone: bool = False,
) -> Context:
    """Connect this script to its run and return its ``Context``. Called again without arguments, return the same one
    until it is closed.

    scheduler: host:port; None reads ``PSDIST_SCHEDULER``, else waits for the file of ``PSDIST_SCHEDULER_FILE``. Without
        any of them the ranks of torch's process group, or of torchrun, train together: rank 0 starts a scheduler and a
        server, and all ranks call this. Otherwise a scheduler and a server are started for this script alone.
    token: the run's join token; None reads ``PSDIST_TOKEN``, else the file of ``PSDIST_TOKEN_FILE``.
    tls: files of this worker's TLS identity; None reads ``PSDIST_TLS_CA``, ``PSDIST_TLS_CERT`` and ``PSDIST_TLS_KEY``,
        and uses no TLS without them; False uses no TLS.
    run_id: refuses to join another run; None reads ``PSDIST_RUN_ID``, and joins any run without it.
    worker_id: this worker's name in the run; None lets the scheduler choose ``worker-<rank>``.
    rank: this worker's number; None reads ``RANK``, else the scheduler gives the lowest free one.
    connect_timeout: seconds for which to look for the scheduler; None reads ``PSDIST_START_TIMEOUT``, which launchers
        set to their ``--start-timeout``, else is 60.
    request_timeout: longest time of one pull, push or push_pull, in seconds; None waits as long as its servers live.
    transport: "auto", "shm", "tcp" or "grpc", as for ``Client``; None reads ``PSDIST_TRANSPORT``, else is "auto".
    rejoin: True if a worker that was expelled, because it was silent for longer than its lease, rejoins automatically.
    alone: True to train alone, although other processes were started with this one: for a search in which each process
        trains a model of its own.

    After ``init``, SIGTERM ends the script in order. The workers agree on a common last step, so that the last snapshot
    is of a step that all have made, and this worker leaves. Then the current or next call raises SystemExit with status
    143 (see ``sigterm``). A handler that the script installed, before or after this call, is kept. In threads other
    than the main one no handler is installed. A process that the script forks has the default handling of signals.

    Raises as ``Client``; also ConfigurationError for arguments while the context of an earlier call is open, and for
    one of several processes that name no scheduler: those of other launchers, of ``multiprocessing``, of
    jax.distributed and of Ray Train.
    """
    global _current
    given = {name: value for name, value in locals().items() if value != _DEFAULTS[name]}
    with _lock:
        if _current is None:
            loop.check_guarded()
            script.shorten_tracebacks_alone()
            _current = _connect(given)
            loop.shared().end_on_sigterm()
        elif given:
            raise ConfigurationError("psdist.init() was called before: close that context before passing arguments")
        return _current


def is_open() -> bool:
    """True if a context of ``init`` is open."""
    return _current is not None


def is_placed() -> bool:
    """True if ``init`` without arguments joins a run: it did before, or the environment names a scheduler."""
    return _current is not None or any(os.environ.get(name) for name in _CONFIGURED)


def init_for_all(
    workers: int, host: str | None = None, arguments: Mapping[str, Any] | None = None
) -> tuple[Context, dict[str, str]]:
    """Start a scheduler and a server for ``workers`` workers on this machine, and connect this one, as ``init`` does.

    host: address on which they listen; None is the loopback address.
    arguments: others of ``init``.

    Returns the context, and the arguments of ``init`` for the other workers. The token is among them.
    """
    global _current
    with _lock:
        if _current is not None:
            raise ConfigurationError("psdist.init() was called before: close that context")
        started = f"no launcher of psdist: a scheduler and one server are started for {workers} workers"
        _current, others = _with_own_cluster(arguments or {}, metrics_settings(os.environ), workers, started, host)
        return _current, others


#: The arguments of ``init`` and their defaults, which are those of ``Client``.
_DEFAULTS: Final = {name: parameter.default for name, parameter in inspect.signature(init).parameters.items()}


def _make_reporter(client: Client, rank: int, settings: MetricsSettings) -> Reporter:
    pipe = MetricsPipe(settings.pipe) if settings.pipe else None
    reporter = Reporter(
        rank, client.run_id, client.measure, client.phases, interval_seconds=settings.interval_seconds, pipe=pipe
    )
    if settings.progress == "plain" and (pipe is None or not pipe.is_open):
        reporter.add_tracker(ProgressTracker(_print_line, PLAIN_SECONDS))
    if client.reported is not None:
        reporter.add_tracker(client.reported)
    return reporter


def _print_line(line: str, is_last: bool = False) -> None:
    from psdist.launcher.output import stamped

    print_line(stamped(line))


def _connect(arguments: dict[str, Any]) -> Context:
    metrics, alone = metrics_settings(os.environ), arguments.pop("alone", False)
    variable = next((name for name in _CONFIGURED if os.environ.get(name)), "")
    named = "scheduler=" if arguments.get("scheduler") else variable
    if named and alone:
        raise ConfigurationError(
            f"psdist.init(alone=True) is called, but {named} names the scheduler of a run: leave one of them out"
        )
    if named:
        try:
            client = Client(**arguments)
        except DuplicateMemberError as error:
            raise loop.explained(error) from None
        return Context(client.rank, client.world_size, client.local_rank, client, None, metrics)
    if not alone:
        if loop.torch_group_size() > 1 or loop.names_torch_store(os.environ):
            joined: Context = import_module("psdist.process_group.own_run").join_all(arguments)
            return joined
        loop.check_no_siblings(os.environ)
    started = "no launcher, so this is a world of one: a scheduler and one server are started"
    with loop.placed(0, 1, None, 1) if alone else nullcontext():
        return _with_own_cluster(arguments, metrics, 1, started)[0]


def _with_own_cluster(
    arguments: Mapping[str, Any], metrics: MetricsSettings, workers: int, started: str, host: str | None = None
) -> tuple[Context, dict[str, str]]:
    """Start a cluster that ends with this process. Returns the context and the arguments that name the cluster.

    started: line to print.
    """
    from psdist.launcher.embedded import EmbeddedCluster

    loop.shared().end_on_sigterm()  # From here on SIGTERM raises SystemExit, so that the cluster is closed.
    cluster = EmbeddedCluster(servers=1, workers=workers, host=host, ends_when_idle=workers > 1)
    try:
        _print_line(started)
        named = {"scheduler": cluster.address, "token": cluster.token, "run_id": cluster.run_id}
        client = Client(**{**arguments, **named, "tls": False})
    except BaseException:
        cluster.close()
        raise
    context = Context(client.rank, client.world_size, client.local_rank, client, cluster, metrics)
    # Registered after the loop thread's own exit function, so it runs before: first the client, then the cluster.
    atexit.register(context._close_at_exit)
    if multiprocessing.parent_process() is not None:  # Such a process runs no functions of atexit if it was forked.
        util.Finalize(None, context._close_at_exit, exitpriority=0)
    return context, named

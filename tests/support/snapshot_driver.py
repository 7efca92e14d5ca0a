"""Driver for the scheduler's machine with a storage: servers, workers and the storage answer on command."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from psdist.consistency import BSP, Consistency
from psdist.snapshots.format import CommitRecord, Manifest, ShardFile, digest_of
from psdist.types import ParametersEntry
from psdist_scheduler.decide import cluster_events as ev
from psdist_scheduler.decide import effects as ef
from psdist_scheduler.decide import snapshot_events as sn
from psdist_scheduler.decide.cluster_events import AlignReported
from psdist_scheduler.decide.cluster_state import Member, StoredState
from psdist_scheduler.decide.effects import AlignCommand
from psdist_scheduler.decide.snapshot_attempt import Attempt
from tests.support.scheduler_driver import Driver, caller

DIGEST = "0" * 32


class SnapshotDriver(Driver):
    """Cluster with well-behaved servers and storage.

    Servers accept a cut that no slice has passed, according to ``versions``, and write immediately what is reached;
    the storage accepts everything. Each can be turned off.
    """

    def __init__(self, stored: StoredState | None = None, now: float = 100.0, **settings: Any) -> None:
        history = settings.pop("history", sn.History())
        self.versions: dict[str, int] = {}
        self.history: sn.History | None = history
        self.answering = True
        self.writing = True
        self.storing = True
        self.loading = True
        #: Workers finish the iteration that they are in.
        self.iterating = True
        #: Unanswered commands by session.
        self.commands: list[tuple[int, Any]] = []
        self.works: list[ef.Effect] = []
        self.rolled_back: list[sn.RolledBack] = []
        self.cuts: dict[int, sn.Prepare] = {}
        #: Steps that each server was told to abandon.
        self.finals: list[dict[str, int]] = []
        #: By attempt, session and parameter set.
        self._written: set[tuple[int, int, str]] = set()
        super().__init__(stored, now, history=history, storage="memory://test", **settings)

    # --- a run --------------------------------------------------------------------------------------------------------

    def begin(self, servers: int = 2, workers: int = 1, **settings: Any) -> list[Member]:
        """Start members, and parameters ("mlp" by default); ready unless they are to be loaded or copied."""
        for _ in range(servers):
            self.join("server")
        members = [self.join()[0] for _ in range(workers)]
        for worker in members:
            self.create(worker, **settings)
        if self.map.parameters and self.map.parameters[-1].restore is None:
            self.ask(ev.CommitParameters, members[0], settings.get("name", "mlp"))
        return members

    def train(self, version: int, name: str = "mlp") -> None:
        """Move all slices to a version, and let the servers report it."""
        self.versions[name] = version
        self.beat_versions()
        self.go_on()

    def beat_versions(self) -> None:
        """Send heartbeats of all servers."""
        for session in self.server_sessions():
            self.on(ev.Heartbeat(session, self.map.epoch, tuple(self.versions.items())))

    def save(self, worker: Member | None = None, **next_pushes: int) -> int:
        """Call SaveSnapshot."""
        call = self.number()
        who = caller(worker) if worker else None
        self.on(sn.Save(call, "", "on demand", who, tuple(next_pushes.items())))
        self.go_on()
        return call

    def saved(self, call: int) -> CommitRecord:
        """Return the snapshot in the answer to a call."""
        answer = self.state(call)
        assert isinstance(answer, sn.Saved), answer
        return answer.committed

    @property
    def steps(self) -> list[dict[str, int]]:
        """Steps of the committed snapshots, the oldest first."""
        return [dict(commit.steps) for commit in reversed(self.cluster.snapshots.catalog.commits)]

    def entry(self, name: str = "mlp") -> ParametersEntry:
        """Return parameters as the map shows them."""
        entry = self.map.entry(name)
        assert entry is not None
        return entry

    # --- the others ---------------------------------------------------------------------------------------------------

    def go_on(self) -> None:
        """Let servers, workers and the storage do their work until nothing is left."""
        again = True
        while again:
            again = False
            for session, command in self.take_commands() if self.answering else []:
                again = self.obey(session, command) or again
            servers = self.server_sessions() if self.writing else []
            for number, session in [(number, session) for number in self.cuts for session in servers]:
                again = self._write(number, session) or again
            for effect in self.take_works() if self.storing else []:
                again = self._store(effect) or again
            again = self._load() or again

    def take_commands(self) -> list[tuple[int, Any]]:
        """Take the unanswered commands, by session. The caller answers them."""
        taken, self.commands = self.commands, []
        return taken

    def take_works(self) -> list[ef.Effect]:
        """Take the pending work of the storage. The caller answers for the storage."""
        taken, self.works = self.works, []
        return taken

    def server_sessions(self) -> list[int]:
        """Sessions of servers."""
        members = self.cluster.members
        return [session for server in members.servers if (session := members.sessions.call_of(server.member_id))]

    def obey(self, session: int, command: Any) -> bool:
        """Let a member answer a command. Return True if it did."""
        match command:
            case sn.Prepare(attempt, _, steps):
                stepped = {n: self.versions.get(n, 0) for n, _ in steps if self._is_stepped(n)}
                accepted = all(self.versions.get(name, 0) <= step for name, step in steps if name in stepped)
                if accepted:
                    self.cuts[attempt] = replace(command, directory="")
                self.on(sn.Prepared(session, attempt, accepted, tuple(stepped.items())))
            case sn.Mark(attempt):
                self.on(sn.Marked(session, attempt, tuple((n, v) for n, v in self.versions.items())))
            case sn.TakeCut(attempt, _, final):
                self.finals.append(dict(final))
                self.cuts[attempt] = replace(self.cuts[attempt], directory="cut")
            case sn.End(attempt):
                self.cuts.pop(attempt, None)
            case AlignCommand():
                self.on(self._standing(session, command))
        return True

    def _standing(self, session: int, command: AlignCommand) -> AlignReported:
        """Return a held worker's report: an iteration begins where all slices are."""
        names = self.cluster.alignment.names
        steps = {name: max(self.versions.get(name, 0), self._first_step(name)) for name in names}
        low, high = min(steps.values()), max(steps.values())
        if high - low > 1:  # Not in step: iterations are declared.
            position = sum(steps.values())
            return AlignReported(session, command.number, position, position, 0, True, tuple(steps.items()))
        if command.until is not None and self.iterating:  # The worker runs up to there.
            steps = dict.fromkeys(names, command.until // len(names))
        position = sum(steps.values())
        start = position - position % len(names)
        return AlignReported(session, command.number, position, start, len(names), next=tuple(steps.items()))

    def _first_step(self, name: str) -> int:
        return min((member.first_step for member in self.entry(name).members), default=0)

    def _is_stepped(self, name: str) -> bool:
        return isinstance(self.entry(name).spec.consistency, BSP)

    def _write(self, attempt: int, session: int) -> bool:
        """Let a server write its shards of each parameter set that is at the cut."""
        cut = self.cuts.get(attempt)
        if cut is None or cut.directory != "cut":
            return False
        due = [
            (name, step)
            for name, step in cut.steps
            if self.versions.get(name, 0) >= step and (attempt, session, name) not in self._written
        ]
        server = self.cluster.members.sessions.by_call[session]
        for name, step in due:
            self._written.add((attempt, session, name))
            entry = self.entry(name)
            version = step if self._is_stepped(name) else self.versions.get(name, 0)
            for number, shard in enumerate(entry.shards):
                if shard.primary.server_id == server:
                    self.on(written(session, attempt, entry, number, version))
        return bool(due)

    def _store(self, effect: ef.Effect) -> bool:
        match effect:
            case sn.WriteCommit():
                commit = commit_of(effect.manifest, effect.sequence)
                self.on(sn.Committed(effect.attempt, commit, effect.manifest))
            case sn.Prune(commits):
                self.on(sn.Pruned(tuple(commit.sequence for commit in commits)))
            case sn.ReadHistory():
                self.on(sn.HistoryRead(self.history, "" if self.history else "it does not answer"))
        return True

    def _load(self) -> bool:
        """Let servers load their slices."""
        done = False
        for entry in self.map.parameters if self.loading else ():
            if entry.ready or entry.restore is None:
                continue
            for server, numbers in self.cluster.registry.resume.missing(entry).items():
                session = self.cluster.members.sessions.call_of(server)
                terms = tuple(entry.shards[number].term for number in numbers)
                if session:
                    self.on(sn.Loaded(session, entry.spec.name, entry.generation, tuple(numbers), terms))
                    done = True
        return done

    def _carry_out(self, effects: list[ef.Effect]) -> None:
        super()._carry_out(effects)
        for effect in effects:
            match effect:
                case ef.Answer(call, sn.Prepare() | sn.Mark() | sn.TakeCut() | sn.End() as command):
                    self.commands.append((call, command))
                case ef.Answer(call, AlignCommand(release=False) as command):
                    self.commands.append((call, command))
                case sn.WriteCommit() | sn.RemoveDirectory() | sn.Prune() | sn.ReadHistory():
                    self.works.append(effect)
                case ef.Broadcast(sn.RolledBack() as news):
                    self.rolled_back.append(news)


def written(session: int, attempt: int, entry: ParametersEntry, number: int, version: int) -> sn.Written:
    """Return a server's report on a shard whose slices are all at ``version``."""
    slices = len(range(number, entry.slicing.count, len(entry.shards)))
    name = f"{entry.spec.name}-{number}.safetensors"
    file = ShardFile(name, 100, DIGEST, (version,) * slices, (DIGEST,) * slices)
    names = entry.spec.optimizer.state_names
    return sn.Written(session, attempt, entry.spec.name, number, entry.shards[number].term, file, names)


def commit_of(manifest: Manifest, sequence: int, epoch: int | None = None) -> CommitRecord:
    """Return the record of a manifest."""
    data = manifest.to_bytes()
    return CommitRecord(
        sequence=sequence,
        run_id=manifest.run_id,
        directory=manifest.directory,
        epoch=manifest.epoch if epoch is None else epoch,
        time=1.0,
        seconds=0.5,
        reason=manifest.reason,
        manifest_length=len(data),
        manifest_digest=digest_of(data),
        steps=manifest.steps,
        bytes=manifest.bytes,
    )


def history_of(driver: SnapshotDriver, **base: Any) -> sn.History:
    """Return the history that a storage would hold of a run."""
    catalog = driver.cluster.snapshots.catalog
    return sn.History(catalog.commits, max((c.sequence for c in catalog.commits), default=0), catalog.newest, **base)


class Ready(SnapshotDriver):
    """Driver with members."""

    members: list[Member]

    @property
    def attempt(self) -> Attempt:
        """The attempt under way."""
        assert self.cluster.snapshots.attempt is not None
        return self.cluster.snapshots.attempt


def ready(workers: int = 1, servers: int = 2, consistency: Consistency | None = None, **settings: Any) -> Ready:
    """Return a driver with ready parameters, and a storage."""
    d = Ready(workers_min=workers, **settings)
    d.members = d.begin(servers, workers, consistency=consistency)
    d.go_on()
    return d

"""Nemesis: causes the faults that a run's options name, at times and to victims drawn from its own random stream.

All its faults end at ``heal``: from then on every node runs, every path is free, and the run must finish.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from psdist_scheduler.decide.losses import LAST_COPY_LEASES
from tests.simulation.cluster import READER, World
from tests.simulation.loop import Node
from tests.simulation.network import KEEPALIVE
from tests.simulation.options import CUT_OFF, CUT_OFF_SECONDS, HARMLESS, HELD
from tests.simulation.oracle import Life

#: Largest fraction of its lease for which a server without a second copy may be silent.
_SHORT: Final = 0.25
#: Lengths of cuts between a worker and a server, in seconds.
_CUTS: Final = (0.5, 2.0, 8.0, 20.0, 40.0, CUT_OFF_SECONDS)
#: Time limit, after the lease of a cut-off worker, for the others to train again. They must then push within the same
#: time again.
_GOES_ON_SECONDS: Final = 8.0


class Nemesis:
    """The faults of one run."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._loop = world.loop
        self._network = world.network
        self._rng = world.options.stream("nemesis")
        self._lease = world.options.lease_seconds
        self._healed = False
        self._joined = 0
        #: Until this time, no other short fault may touch a server or the scheduler.
        self._quiet_until = 0.0
        #: End of a long fault that must not be healed sooner.
        self._lasts_until = 0.0
        #: Until this time, the scheduler is cut off, all servers are paused, or some members have not been heard again
        #: since. Two such faults in a row would be one longer fault, and members may wait no longer than one lasts.
        self._apart_until = 0.0
        #: Servers that a fault affects, or affected recently.
        self._struck: set[int] = set()
        #: End of a fault that lasts beyond the time of faults.
        self.lasts_until = 0.0
        #: True while a worker is cut off from a server.
        self._cut_off = False

    async def run(self) -> None:
        """Cause the faults, one after another."""
        options, rng = self._world.options, self._rng
        if not options.faults:
            return
        times = sorted(rng.random() * options.fault_seconds for _ in range(options.fault_count))
        now = 0.0
        for when in times:
            await self._loop.after(when - now)
            now = when
            self._bring(rng.choice(options.faults))
        await self._loop.after(max(0.0, self._lasts_until - self._loop.time()))

    def heal(self) -> None:
        """End all faults."""
        self._healed = True
        world = self._world
        self._network.heal()
        self._network.faults.cut = self._network.faults.slow = 0.0
        for node in (world.scheduler_node, *world.server_nodes.values(), *world.worker_nodes.values()):
            if node is not None:
                node.starved_seconds = 0.0
                self._resume(node)
        if world.scheduler_node is not None and world.scheduler_node.dead:
            world.start_scheduler()
        for server, node in list(world.server_nodes.items()):
            if node.dead and server not in world.stopped_servers:
                world.start_server(server)

    def _bring(self, kind: str) -> None:
        done = self.cause(kind)
        self._loop.trace(f"nemesis {kind} {done}")
        if done:
            self._world.counts[kind] += 1

    def cause(self, kind: str) -> bool:
        """Cause a fault. Returns False if there is no victim for it now."""
        return _KINDS[kind](self)

    # --- victims ------------------------------------------------------------------------------------------------------

    def _worker(self) -> int | None:
        """Return a random worker that trains, or None."""
        world = self._world
        running = [w for w, node in sorted(world.worker_nodes.items()) if w not in world.finished and not node.dead]
        return self._rng.choice(running) if running else None

    def _server(self) -> int | None:
        world = self._world
        running = [s for s, node in sorted(world.server_nodes.items()) if not node.dead and not node.paused]
        return self._rng.choice(running) if running else None

    def _later(self, seconds: float, callback: Callable[..., None], *args: object) -> None:
        self._loop.call_later(seconds, callback, *args, context=self._loop.world.context)

    def _may_be_short(self, seconds: float) -> bool:
        """True if a server may be silent for ``seconds`` now; this also records the silence."""
        now = self._loop.time()
        if now < self._quiet_until:
            return False
        self._quiet_until = now + seconds + 1.5 * self._lease
        return True

    def _short(self) -> float:
        return self._rng.uniform(0.3, 1.0) * _SHORT * self._lease

    # --- processes ----------------------------------------------------------------------------------------------------

    def _kill_worker(self, silent: bool = False) -> bool:
        worker = self._worker()
        if worker is None:
            return False
        world = self._world
        # Before anything exists, the start waits for all workers.
        if worker != READER and not world.created and not world.can_start_worker:
            return False
        world.kill(world.worker_nodes[worker], silent=silent)
        for life in world.lives:
            life.over = life.over or life.worker == worker
        if worker == READER or (world.can_start_worker and (not world.created or self._rng.random() < 0.7)):
            world.promised_lives += worker != READER
            self._later(self._rng.uniform(0.05, 1.0), self._restart_worker, worker)
        else:
            world.finish(worker)
        return True

    def _restart_worker(self, worker: int) -> None:
        if worker == READER:
            self._world.start_reader()
        else:
            self._world.promised_lives -= 1
            self._world.start_worker(worker)

    def _pause(self, node: Node, seconds: float) -> bool:
        if node.paused or node.dead:
            return False
        self._loop.pause(node)
        self._network.watch_silence(node.name, "*")
        self._later(seconds, self._resume, node)
        return True

    def _resume(self, node: Node) -> None:
        if node.paused:
            self._loop.resume(node)

    def _pause_worker(self, low: float = 0.1, high: float = 0.5) -> bool:
        worker = self._worker()
        seconds = self._rng.uniform(low, high) * self._lease
        return worker is not None and self._pause(self._world.worker_nodes[worker], seconds)

    def _hold_interpreter(self) -> bool:
        """Let a worker be silent for longer than its lease, though its process lives."""
        worker = self._worker()
        if worker is None or not self._world.created or (node := self._world.worker_nodes[worker]).paused:
            return False
        seconds = self._rng.uniform(1.2, 3.0) * self._world.options.worker_lease_seconds
        self._lasts_until = max(self._lasts_until, self._loop.time() + seconds)
        node.answers_pings = True
        self._loop.pause(node)
        self._later(seconds, self._resume, node)
        return True

    def _kill_scheduler(self) -> bool:
        node = self._world.scheduler_node
        if node is None or node.dead or node.paused:
            return False
        self._world.kill(node, silent=False)
        self._later(self._rng.uniform(0.05, 2.0), self._restart_scheduler)
        return True

    def _restart_scheduler(self) -> None:
        node = self._world.scheduler_node
        if node is not None and node.dead:
            self._world.start_scheduler()

    def _pause_scheduler(self) -> bool:
        node = self._world.scheduler_node
        if node is None or node.dead:
            return False
        return self._pause(node, min(self._rng.uniform(0.2, 1.5) * self._lease, 0.9 * KEEPALIVE[0]))

    def _pause_server(self) -> bool:
        server, seconds = self._server(), self._short()
        if server is None or not self._may_be_short(seconds):
            return False
        return self._pause(self._world.server_nodes[server], seconds)

    def _starve(self, node: Node | None, seconds: float) -> bool:
        """Slow a node down by 10 to 100 times for a while: others get the processor after each of its handles."""
        if node is None or node.dead or node.starved_seconds:
            return False
        node.starved_seconds = self._rng.uniform(0.0003, 0.005)
        self._later(seconds, setattr, node, "starved_seconds", 0.0)
        return True

    def _starve_worker(self) -> bool:
        worker = self._worker()
        seconds = self._rng.uniform(0.5, 3.0) * self._lease
        return worker is not None and self._starve(self._world.worker_nodes[worker], seconds)

    def _starve_scheduler(self) -> bool:
        return self._starve(self._world.scheduler_node, self._rng.uniform(0.5, 3.0) * self._lease)

    def _join_worker(self) -> bool:
        world = self._world
        if not world.can_start_worker:
            return False
        world.start_worker(10 + self._joined)
        self._joined += 1
        return True

    # --- servers that may be lost -------------------------------------------------------------------------------------

    def _spare_server(self) -> int | None:
        """Return a random server that may be lost: without it, unaffected servers still hold a copy of each shard."""
        world = self._world
        running = [s for s, node in sorted(world.server_nodes.items()) if not node.dead and s not in self._struck]
        spare = [server for server in running if world.can_lose(server, self._struck)]
        return self._rng.choice(spare) if spare else None

    def _strike(self, server: int, seconds: float) -> None:
        """Mark ``server`` as affected. Its copies do not count for ``seconds``, and until it may have been replaced."""
        self._struck.add(server)
        self._later(seconds + 5.0 * self._lease, self._struck.discard, server)

    def _kill_server(self, silent: bool = False) -> bool:
        server = self._spare_server()
        if server is None:
            return False
        self._strike(server, 0.0)
        self._world.kill(self._world.server_nodes[server], silent=silent)
        self._later(self._rng.uniform(0.1, 2.0), self._restart_server, server)
        return True

    def _restart_server(self, server: int) -> None:
        if self._world.server_nodes[server].dead:
            self._struck.discard(server)
            self._world.start_server(server)

    def _freeze_server(self) -> bool:
        server, seconds = self._spare_server(), self._rng.uniform(0.3, 2.5) * self._lease
        if server is None:
            return False
        self._strike(server, seconds)
        return self._pause(self._world.server_nodes[server], seconds)

    def _starve_server(self) -> bool:
        server, seconds = self._spare_server(), self._rng.uniform(0.5, 4.0) * self._lease
        if server is None:
            return False
        self._strike(server, seconds)
        return self._starve(self._world.server_nodes[server], seconds)

    def _starve_all(self) -> bool:
        """Starve all processes together, as on an overloaded machine."""
        world, seconds = self._world, self._rng.uniform(0.5, 3.0) * self._lease
        nodes = (world.scheduler_node, *world.server_nodes.values(), *world.worker_nodes.values())
        return sum(self._starve(node, seconds) for node in nodes) > 0

    def _delay_news(self, server: int | None, *, maps: float, reports: float) -> bool:
        """Delay messages between the scheduler and a server. maps, reports: largest delays, in leases, to and from the
        server."""
        if server is None:
            return False
        name, seconds = f"server-{server}", self._rng.uniform(1.0, 4.0) * self._lease
        self._strike(server, seconds + maps * self._lease)
        for path, leases in ((("scheduler", name), maps), ((name, "scheduler"), reports)):
            self._network.delay_path(*path, self._rng.uniform(0.2, 1.0) * leases * self._lease)
            self._later(seconds, self._network.delay_path, *path, 0.0)
        return True

    def _doubt_filling(self) -> bool:
        """Cut a primary off from the server that it fills, and delay the scheduler's messages to the primary: it learns
        late that the filling was given up and restarted. The primary dies soon after."""
        world = self._world
        if world.scheduler is None:
            return False
        shards = [shard for entry in world.scheduler.cluster.map.parameters for shard in entry.shards]
        names = {host.me: number for number, host in world.hosts.items()}
        pairs = [(names.get(s.primary), names.get(filled)) for s in shards for filled in s.filling]
        pairs = [pair for pair in pairs if None not in pair and not self._struck.intersection(pair)]
        if not pairs:
            return False
        primary, filled = self._rng.choice(pairs)
        ours = [f"server-{primary}", f"server-{filled}"]
        late = self._rng.uniform(3.5, 4.5) * self._lease
        for server in (primary, filled):
            self._strike(server, 2.0 * self._lease)
        self._network.delay_path("scheduler", ours[0], late)
        self._part(ours[:1], ours[1:], self._rng.uniform(2.4, 3.2) * self._lease, one_way=False)
        self._later(late + self._rng.uniform(1.0, 2.4) * self._lease, self._kill_if_spare, primary, filled)
        return True

    def _kill_if_spare(self, server: int, other: int) -> None:
        """Kill a server whose shards have copies elsewhere, as far as the scheduler knows."""
        self._network.delay_path("scheduler", f"server-{server}", 0.0)
        if self._world.can_lose(server, self._struck - {other}) and not self._world.server_nodes[server].dead:
            self._world.counts["killed after a filling in doubt"] += 1
            self._world.kill(self._world.server_nodes[server], silent=False)
            self._later(self._rng.uniform(0.1, 2.0), self._restart_server, server)

    def _skip_maps(self) -> bool:
        """Lose the maps sent to a server together with its session; the next session starts with the newest map."""
        server, seconds = self._spare_server(), self._rng.uniform(0.3, 1.5) * self._lease
        if server is None:
            return False
        names = (f"server-{server}", "scheduler")
        self._strike(server, seconds)
        self._part([names[1]], [names[0]], seconds, one_way=False)
        self._later(0.99 * seconds, self._network.break_some, names, 1.0)
        return True

    def _partition_server(self, others: tuple[str, ...] = ()) -> bool:
        """Cut a server off from ``others``, or from everybody."""
        server, seconds = self._spare_server(), self._rng.uniform(0.2, 3.0) * self._lease
        if server is None:
            return False
        self._strike(server, seconds)
        names = list(others) or [*self._names(), "scheduler"]
        self._part([f"server-{server}"], names, seconds, one_way=self._rng.random() < 0.4)
        return True

    def _split_off(self) -> bool:
        """Cut a server and a worker off from all others, together."""
        server, worker = self._spare_server(), self._worker()
        if server is None or worker is None:
            return False
        seconds = self._rng.uniform(1.0, 4.0) * self._lease
        self._strike(server, seconds)
        ours = [f"server-{server}", f"worker-{worker}"]
        self._part(ours, [name for name in (*self._names(), "scheduler") if name not in ours], seconds, one_way=False)
        return True

    def _cut_both_from_scheduler(self) -> bool:
        """Cut a server and a worker off from the scheduler only."""
        server, worker = self._spare_server(), self._worker()
        if server is None or worker is None:
            return False
        seconds = self._rng.uniform(1.0, 4.0) * self._lease
        self._strike(server, seconds)
        self._part([f"server-{server}", f"worker-{worker}"], ["scheduler"], seconds, one_way=False)
        return True

    def _break_and_kill(self) -> bool:
        """Break connections, and kill a server before they are restored."""
        self._network.break_some(tuple(self._names()), 0.7)
        self._later(self._rng.uniform(0.0, 0.05), self._kill_server)
        return True

    def _partition_servers(self) -> bool:
        other = self._server()
        return other is not None and self._partition_server((f"server-{other}",))

    def _break_session_of_server(self) -> bool:
        server = self._spare_server()
        if server is None:
            return False
        self._strike(server, 0.0)
        return self._network.break_some((f"server-{server}", "scheduler"), 1.0) > 0

    def _join_server(self) -> bool:
        world = self._world
        if len(world.server_nodes) >= 6:
            return False
        world.start_server(len(world.server_nodes))
        return True

    def _drain_server(self) -> bool:
        server = self._server()
        return server is not None and self._world.drain(server)

    # --- the network --------------------------------------------------------------------------------------------------

    def _names(self) -> list[str]:
        world = self._world
        nodes = (*world.worker_nodes.values(), *world.server_nodes.values())
        return [node.name for node in nodes if not node.dead]

    def _part(self, ones: list[str], others: list[str], seconds: float, *, one_way: bool) -> None:
        pairs = [(one, other) for one in ones for other in others if one != other]
        if not one_way or self._rng.random() < 0.5:
            pairs += [(other, one) for one, other in pairs] if not one_way else []
        else:
            pairs = [(other, one) for one, other in pairs]
        for source, target in pairs:
            self._network.block(source, target)
        self._later(seconds, self._join_again, pairs)

    def _join_again(self, pairs: list[tuple[str, str]]) -> None:
        for source, target in pairs:
            self._network.unblock(source, target)

    def _break_connections(self) -> bool:
        return self._network.break_some(tuple(self._names()), 0.5) > 0

    def _partition_worker(self) -> bool:
        worker = self._worker()
        if worker is None:
            return False
        name = f"worker-{worker}"
        others = [*self._names(), "scheduler"]
        self._part([name], others, self._rng.uniform(0.2, 2.5) * self._lease, one_way=self._rng.random() < 0.4)
        return True

    def _partition_worker_server(self) -> bool:
        worker, server = self._worker(), self._server()
        if worker is None or server is None:
            return False
        seconds = self._rng.uniform(0.2, 5.0)
        self._part([f"worker-{worker}"], [f"server-{server}"], seconds, one_way=self._rng.random() < 0.4)
        return True

    def _cut_worker_off_server(self) -> bool:
        """Cut the path of a worker to a server. The others must continue training, if need be without that worker."""
        worker, server, world = self._worker(), self._server(), self._world
        if worker in (None, READER) or server is None or self._cut_off or not world.created:
            return False
        seconds = self._rng.choice(_CUTS) * self._rng.uniform(0.8, 1.0)
        self._cut_off = True
        self._part([f"worker-{worker}"], [f"server-{server}"], seconds, one_way=self._rng.random() < 0.4)
        self.lasts_until = max(self.lasts_until, self._loop.time() + seconds)
        until_goes_on = world.options.worker_lease_seconds + _GOES_ON_SECONDS
        if seconds > until_goes_on + _GOES_ON_SECONDS:
            world.counts["cut off for longer than a lease"] += 1
            self._later(until_goes_on, self._look_who_trains, worker, self._loop.time())
        self._later(seconds, self._not_cut_off)
        return True

    def _not_cut_off(self) -> None:
        self._cut_off = False

    def _look_who_trains(self, cut_off: int, since: float) -> None:
        acked = {life.number: sum(push.acked for push in life.pushes) for life in self._others(cut_off)}
        self._later(_GOES_ON_SECONDS, self._check_they_train, cut_off, since, acked)

    def _check_they_train(self, cut_off: int, since: float, before: dict[int, int]) -> None:
        if self._apart_until > since:
            return  # The scheduler was cut off meanwhile, and could expel nobody.
        for life in self._others(cut_off):
            self._world.counts["trained on beside a cut"] += life.number in before
            if sum(push.acked for push in life.pushes) == before.get(life.number, -1):
                self._world.oracle.violation(
                    f"{life.worker_id} makes no step while worker-{cut_off} is cut off a server"
                )

    def _others(self, worker: int) -> list[Life]:
        return [life for life in self._world.lives if life.joined and not life.over and life.worker != worker]

    def _isolate_scheduler(self) -> bool:
        seconds = self._short()
        if not self._may_be_short(seconds):
            return False
        self._part(["scheduler"], self._names(), seconds, one_way=self._rng.random() < 0.4)
        return True

    def _long(self) -> float:
        """Return the length of a fault: half a second to a minute, mostly a few leases."""
        longest = CUT_OFF_SECONDS
        if not self._world.created:  # An unregistered member gives up after that time.
            longest *= 0.8
        if not HARMLESS.issuperset(self._world.options.faults):
            # Some members may still reach the scheduler, which then eventually gives up the last copy of a shard.
            longest = min(longest, 0.8 * LAST_COPY_LEASES * self._lease)
        seconds = self._rng.choice((self._rng.uniform(0.5, 4.0 * self._lease), self._rng.uniform(0.5, longest)))
        self._lasts_until = max(self._lasts_until, self._loop.time() + seconds)
        return seconds

    def _is_apart(self) -> bool:
        """True if the previous fault may not be over for all."""
        return self._loop.time() < self._apart_until

    def _set_apart(self, seconds: float) -> None:
        self._apart_until = self._loop.time() + seconds + 2.0 * self._lease

    def _cut_scheduler_off(self) -> bool:
        """Cut the scheduler off from everybody."""
        if self._is_apart():
            return False
        seconds = self._long()
        self._set_apart(seconds)
        self._part(["scheduler"], self._names(), seconds, one_way=False)
        return True

    def _cut_scheduler_off_from_some(self) -> bool:
        """Cut the scheduler off from some members, in one or both directions."""
        if self._is_apart():
            return False
        names = self._names()
        some = self._rng.sample(names, self._rng.randint(1, len(names)))
        seconds = self._long()
        self._set_apart(seconds)
        for server in self._world.server_nodes:
            if f"server-{server}" in some:  # The scheduler may give it up, so no other copy may be lost.
                self._strike(server, seconds)
        self._part(["scheduler"], some, seconds, one_way=self._rng.random() < 0.5)
        return True

    def _pause_servers(self, least: int) -> bool:
        """Pause at least ``least`` servers together, or all."""
        living = [node for _, node in sorted(self._world.server_nodes.items()) if not node.dead]
        running = [node for node in living if not node.paused]
        # Either all servers are paused together, or it would be a pause of some of them.
        if not running or (least >= len(living) and (len(running) < len(living) or self._is_apart())):
            return False
        seconds = self._rng.uniform(1.2, 6.0) * self._lease
        self._lasts_until = max(self._lasts_until, self._loop.time() + seconds)
        self._set_apart(seconds)
        count = len(running) if least >= len(running) else self._rng.randint(least, len(running))
        for node in self._rng.sample(running, count):
            self._pause(node, seconds * self._rng.uniform(0.9, 1.0))
        return True

    def _slow_node(self) -> bool:
        name = self._rng.choice([*self._names(), "scheduler"])
        self._network.slow_down(name, self._rng.uniform(0.005, 0.1))
        return True

    def _break_session_of_worker(self) -> bool:
        worker = self._worker()
        return worker is not None and self._network.break_some((f"worker-{worker}", "scheduler"), 1.0) > 0


_KINDS: dict[str, Callable[[Nemesis], bool]] = {
    "kill worker": Nemesis._kill_worker,
    "kill worker host": lambda nemesis: nemesis._kill_worker(silent=True),
    "pause worker": Nemesis._pause_worker,
    "freeze worker": lambda nemesis: nemesis._pause_worker(1.3, 2.5),
    "kill scheduler": Nemesis._kill_scheduler,
    "pause scheduler": Nemesis._pause_scheduler,
    "pause server": Nemesis._pause_server,
    "break connections": Nemesis._break_connections,
    "partition worker": Nemesis._partition_worker,
    "partition worker from server": Nemesis._partition_worker_server,
    CUT_OFF: Nemesis._cut_worker_off_server,
    HELD: Nemesis._hold_interpreter,
    "isolate scheduler briefly": Nemesis._isolate_scheduler,
    "cut scheduler off": Nemesis._cut_scheduler_off,
    "cut scheduler off from some": Nemesis._cut_scheduler_off_from_some,
    "pause most servers": lambda nemesis: nemesis._pause_servers(2),
    "pause all servers": lambda nemesis: nemesis._pause_servers(99),
    "slow node": Nemesis._slow_node,
    "join worker": Nemesis._join_worker,
    "starve worker": Nemesis._starve_worker,
    "starve scheduler": Nemesis._starve_scheduler,
    "break session of worker": Nemesis._break_session_of_worker,
    "kill server": Nemesis._kill_server,
    "kill server host": lambda nemesis: nemesis._kill_server(silent=True),
    "freeze server": Nemesis._freeze_server,
    "partition server": Nemesis._partition_server,
    "split off server and worker": Nemesis._split_off,
    "cut server and worker from scheduler": Nemesis._cut_both_from_scheduler,
    "break connections and kill server": Nemesis._break_and_kill,
    "partition servers": Nemesis._partition_servers,
    "cut server from scheduler": lambda nemesis: nemesis._partition_server(("scheduler",)),
    "break session of server": Nemesis._break_session_of_server,
    "starve server": Nemesis._starve_server,
    "starve all": Nemesis._starve_all,
    "maps come late": lambda nemesis: nemesis._delay_news(nemesis._spare_server(), maps=3.0, reports=0.0),
    "reports come late": lambda nemesis: nemesis._delay_news(nemesis._spare_server(), maps=3.0, reports=0.8),
    "server skips maps": Nemesis._skip_maps,
    "a filling is in doubt": Nemesis._doubt_filling,
    "join server": Nemesis._join_server,
    "drain server": Nemesis._drain_server,
}

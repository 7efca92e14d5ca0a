"""Faults from outside a process: signals by process id, and network namespaces that can be disconnected, and busy
cores.

To the network a namespace is a separate host: it has one address, and all packets to it, from it, or both can be
dropped. Namespaces need root, ``ip`` and ``iptables``; ``namespaces_missing`` says what a machine lacks. Their names
contain the process id of their owner, and ``close`` removes them.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import closing, suppress
from types import TracebackType
from typing import Final, Literal, Self

from psdist.errors import ConfigurationError
from psdist.launcher.process import ReaperProcess
from psdist.machine import usable_cores

Direction = Literal["both", "in", "out"]
_NAMESPACE: Final = re.compile(r"ps(\d+)(?:switch|host\d+)\b")
#: A host's interface on the bridge.
INTERFACE: Final = "eth0"
_COMMAND_SECONDS: Final = 10.0
_CHAINS: Final[dict[Direction, tuple[str, ...]]] = {"both": ("INPUT", "OUTPUT"), "in": ("INPUT",), "out": ("OUTPUT",)}


def kill(pid: int) -> None:
    """Send SIGKILL: the process ends in the middle of its work, and the system closes its connections."""
    _send(pid, signal.SIGKILL)


def freeze(pid: int) -> None:
    """Send SIGSTOP: the process freezes; its connections stay open and silent."""
    _send(pid, signal.SIGSTOP)


def thaw(pid: int) -> None:
    """Send SIGCONT: the process continues as if no time had passed."""
    _send(pid, signal.SIGCONT)


def _send(pid: int, signum: int) -> None:
    if pid <= 1:
        raise ConfigurationError(f"pid={pid} is not a process of this run")
    with suppress(ProcessLookupError):
        os.kill(pid, signum)


# --- network namespaces -----------------------------------------------------------------------------------------------


def namespaces_missing() -> str:
    """Return why this machine cannot make network namespaces with filters; empty if it can."""
    for program in ("ip", "iptables"):
        if shutil.which(program) is None:
            return f"there is no program {program!r}"
    try:
        with closing(WorkerNetwork(1)) as network:
            network.disconnect(0)
            network.heal(0)
    except ConfigurationError as error:
        return str(error)
    return ""


class WorkerNetwork:
    """``hosts`` namespaces behind one bridge; this process's own namespace is at ``gateway``.

    The bridge is in a namespace too, so that no filter of this machine applies to it.
    Raises ConfigurationError if the machine does not allow namespaces; then none is left.
    """

    def __init__(self, hosts: int) -> None:
        self._name = f"ps{os.getpid()}"
        # One of 250 small networks of a range that is reserved for tests (RFC 2544).
        self._prefix = f"198.18.{os.getpid() % 250}"
        self._hosts = 0
        _remove_orphans()
        try:
            run_command("ip", "netns", "add", self.switch)
            run_command("ip", "-n", self.switch, "link", "add", "bridge", "type", "bridge")
            run_command("ip", "-n", self.switch, "link", "set", "bridge", "up")
            self._plug(f"{self._name}up", "uplink")
            run_command("ip", "address", "add", f"{self.gateway}/24", "dev", f"{self._name}up")
            run_command("ip", "link", "set", f"{self._name}up", "up")
            for number in range(hosts):
                self._hosts = number + 1
                self._add(number)
        except ConfigurationError:
            self.close()
            raise

    @property
    def gateway(self) -> str:
        """Address of this process's own namespace on the bridge."""
        return f"{self._prefix}.1"

    @property
    def switch(self) -> str:
        """Name of the namespace that holds the bridge."""
        return f"{self._name}switch"

    def address(self, host: int) -> str:
        """Return the address of a namespace."""
        return f"{self._prefix}.{10 + host}"

    def namespace(self, host: int) -> str:
        """Return the name of a host's namespace."""
        return f"{self._name}host{host}"

    def port(self, host: int) -> str:
        """Return the name of the bridge's interface towards a host."""
        return f"port{host}"

    def inside(self, host: int) -> tuple[str, ...]:
        """Return the prefix of a command line that runs in a namespace; the process keeps its id."""
        return ("ip", "netns", "exec", self.namespace(host))

    def disconnect(self, host: int, direction: Direction = "both") -> None:
        """Drop all packets to and from the namespace from now on, or those of one direction."""
        for chain in _CHAINS[direction]:
            run_command(
                *self.inside(host), "iptables", "-w", "-A", chain, "!", "-i" if chain == "INPUT" else "-o", "lo", "-j",
                "DROP",
            )  # fmt: skip

    def cut(self, host: int, other: int, direction: Direction = "both", but_port: int = 0) -> None:
        """Drop all packets between two namespaces from now on, or those of one direction, as ``host`` sees it.

        but_port: a port of ``other`` that stays reachable; 0 for none.
        """
        ways = {"in": ((host, other, "--sport"),), "out": ((other, host, "--dport"),)}
        # Drop on arrival: the sender's kernel reports an error for a packet that is dropped on its side.
        for at, source, port in (*ways["in"], *ways["out"]) if direction == "both" else ways[direction]:
            but = ("-p", "tcp", "!", port, str(but_port)) if but_port else ()
            run_command(
                *self.inside(at), "iptables", "-w", "-A", "INPUT", "-s", self.address(source), *but, "-j", "DROP"
            )  # fmt: skip

    def heal(self, host: int) -> None:
        """Let all packets pass again."""
        run_command(*self.inside(host), "iptables", "-w", "-F")

    def close(self) -> None:
        """Remove all namespaces. Processes that still run inside keep theirs until they end."""
        for namespace in (*map(self.namespace, range(self._hosts)), self.switch):
            with suppress(ConfigurationError):
                run_command("ip", "netns", "delete", namespace)
        self._hosts = 0
        # Its other end is removed with the namespace, but only later.
        with suppress(ConfigurationError):
            run_command("ip", "link", "delete", f"{self._name}up")

    def _plug(self, link: str, port: str, namespace: str = "") -> None:
        """Connect ``link`` in a namespace (default: this process's own) to a port of the bridge."""
        where = ("-n", namespace) if namespace else ()
        run_command("ip", *where, "link", "add", link, "type", "veth", "peer", "name", port, "netns", self.switch)
        run_command("ip", "-n", self.switch, "link", "set", port, "master", "bridge", "up")

    def _add(self, host: int) -> None:
        namespace = self.namespace(host)
        run_command("ip", "netns", "add", namespace)
        self._plug(INTERFACE, self.port(host), namespace)
        for command in (
            ("address", "add", f"{self.address(host)}/24", "dev", INTERFACE),
            ("link", "set", INTERFACE, "up"),
            ("link", "set", "lo", "up"),
        ):
            run_command("ip", "-n", namespace, *command)


def _remove_orphans() -> None:
    """Remove namespaces whose owner was killed before it could remove them."""
    for line in run_command("ip", "netns", "list").splitlines():
        found = _NAMESPACE.match(line)
        if found and not os.path.exists(f"/proc/{found[1]}"):
            with suppress(ConfigurationError):
                run_command("ip", "netns", "delete", line.split()[0])


def run_command(*command: str) -> str:
    """Return the output of a command. Raises ConfigurationError if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigurationError(f"{command[0]} failed: {error}") from None
    if done.returncode:
        raise ConfigurationError(f"{' '.join(command)!r} failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


_BUSY: Final = (sys.executable, "-I", "-S", "-c", "while True: pass")


class BackgroundLoad:
    """Context manager that runs ``per_core`` busy processes for each core. A reaper ends them if this process dies."""

    def __init__(self, per_core: int) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []
        self._count = per_core * usable_cores()

    def __enter__(self) -> Self:
        if self._count:
            self._reaper = ReaperProcess()
        for _ in range(self._count):
            process = subprocess.Popen(_BUSY, stdin=subprocess.DEVNULL, start_new_session=True)
            self.processes.append(process)
            self._reaper.add(process.pid)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all processes; a second call has no effect."""
        processes, self.processes = self.processes, []
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()
        if processes:
            self._reaper.close()

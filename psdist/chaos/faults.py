"""Faults from outside a process: signals by process id, and network namespaces whose links can be cut.

A namespace is a host of its own as far as the network goes: it has one address, and everything that passes its link may
be dropped, in both directions or in one. It needs root and ``ip`` and ``iptables``; ``namespaces_missing`` says what a
machine lacks. All that is made is named after its owner's process id, and removed by ``close``.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from contextlib import suppress
from typing import Final, Literal

from psdist.errors import ConfigurationError

Cut = Literal["both", "in", "out"]
_COMMAND_SECONDS: Final = 10.0
_CHAINS: Final[dict[Cut, tuple[str, ...]]] = {"both": ("INPUT", "OUTPUT"), "in": ("INPUT",), "out": ("OUTPUT",)}


def kill(pid: int) -> None:
    """SIGKILL: the process ends in the middle of whatever it does, and the system closes its connections."""
    _send(pid, signal.SIGKILL)


def freeze(pid: int) -> None:
    """SIGSTOP: the process stands still; its connections stay open and silent."""
    _send(pid, signal.SIGSTOP)


def thaw(pid: int) -> None:
    """SIGCONT: the process goes on as if no time had passed."""
    _send(pid, signal.SIGCONT)


def _send(pid: int, signum: int) -> None:
    if pid <= 1:
        raise ConfigurationError(f"pid={pid} is no process of ours")
    with suppress(ProcessLookupError):
        os.kill(pid, signum)


# --- network namespaces -----------------------------------------------------------------------------------------------


def namespaces_missing() -> str:
    """Why this machine cannot make network namespaces with filters; empty where it can."""
    for program in ("ip", "iptables"):
        if shutil.which(program) is None:
            return f"there is no program {program!r}"
    try:
        with Network(1) as network:
            network.cut(0)
            network.heal(0)
    except ConfigurationError as error:
        return str(error)
    return ""


class Network:
    """``hosts`` namespaces behind one bridge; this process's own namespace is at ``gateway``.

    Raises ConfigurationError where the machine does not allow it; then nothing is left of it.
    """

    def __init__(self, hosts: int) -> None:
        self._name = f"ps{os.getpid() % 1_000_000}"
        # One of 250 small networks of a range that is set aside for tests (RFC 2544).
        self._prefix = f"198.18.{os.getpid() % 250}"
        self._hosts = 0
        try:
            _run("ip", "link", "add", self._bridge, "type", "bridge")
            _run("ip", "address", "add", f"{self.gateway}/24", "dev", self._bridge)
            _run("ip", "link", "set", self._bridge, "up")
            for number in range(hosts):
                self._hosts = number + 1
                self._add(number)
        except ConfigurationError:
            self.close()
            raise

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def gateway(self) -> str:
        """Address of this process's own namespace on the bridge."""
        return f"{self._prefix}.1"

    def address(self, host: int) -> str:
        """Address of a namespace."""
        return f"{self._prefix}.{10 + host}"

    def inside(self, host: int) -> tuple[str, ...]:
        """What a command line begins with to run in a namespace; the process keeps its id."""
        return ("ip", "netns", "exec", self._namespace(host))

    def cut(self, host: int, what: Cut = "both") -> None:
        """From now on everything to and from the namespace vanishes, or one direction of it."""
        for chain in _CHAINS[what]:
            _run(*self.inside(host), "iptables", "-w", "-A", chain, "!", "-i" if chain == "INPUT" else "-o", "lo",
                 "-j", "DROP")  # fmt: skip

    def heal(self, host: int) -> None:
        """Everything passes again."""
        _run(*self.inside(host), "iptables", "-w", "-F")

    def close(self) -> None:
        """Removes all of it. Processes that still run inside keep their namespace until they end."""
        for number in range(self._hosts):
            with suppress(ConfigurationError):
                _run("ip", "netns", "delete", self._namespace(number))
        self._hosts = 0
        with suppress(ConfigurationError):
            _run("ip", "link", "delete", self._bridge)

    @property
    def _bridge(self) -> str:
        return f"{self._name}b"

    def _namespace(self, host: int) -> str:
        return f"{self._name}n{host}"

    def _add(self, host: int) -> None:
        namespace, outside = self._namespace(host), f"{self._name}v{host}"
        _run("ip", "netns", "add", namespace)
        _run("ip", "link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", namespace)
        _run("ip", "link", "set", outside, "master", self._bridge, "up")
        for command in (
            ("address", "add", f"{self.address(host)}/24", "dev", "eth0"),
            ("link", "set", "eth0", "up"),
            ("link", "set", "lo", "up"),
        ):
            _run("ip", "-n", namespace, *command)


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigurationError(f"{command[0]} failed: {error}") from None
    if done.returncode:
        raise ConfigurationError(f"{' '.join(command)!r} failed: {done.stderr.strip() or done.stdout.strip()}")

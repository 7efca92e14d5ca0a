"""Arguments of ``psdist.ray.run``, and the command lines that follow from them. Nothing of Ray is imported here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from psdist.addresses import is_loopback
from psdist.errors import ConfigurationError
from psdist.launcher.plan import SchedulerAddress, program
from psdist.security.tls import TlsFiles
from psdist.settings.config import check_run_id
from psdist.settings.flags import arguments
from psdist.settings.programs import SchedulerSettings, ServerSettings
from psdist.snapshots.policy import parse_interval
from psdist.wire.limits import REPLICAS_MAX, WORLD_MAX


@dataclass(frozen=True, kw_only=True)
class RaySettings:
    """Arguments of ``psdist.ray.run``, which describes them. Raises ConfigurationError for values out of range."""

    run_id: str
    num_workers: int
    num_servers: int
    replicas: int
    resources_per_worker: Mapping[str, float]
    resources_per_server: Mapping[str, float]
    storage_path: str | None
    save_interval: str | None
    max_restarts: int
    placement_timeout: float
    certs: Path | None
    insecure: bool

    def __post_init__(self) -> None:
        check_run_id(self.run_id)
        _check_count("num_workers", self.num_workers, 1, WORLD_MAX)
        _check_count("num_servers", self.num_servers, 1, 1024)
        _check_count("replicas", self.replicas, 1, REPLICAS_MAX)
        _check_count("max_restarts", self.max_restarts, 0, 1_000_000)
        if self.replicas > self.num_servers:
            raise ConfigurationError(
                f"replicas={self.replicas} needs at least as many servers, not num_servers={self.num_servers}: copies "
                "of a shard are on different servers"
            )
        if not self.placement_timeout > 0:
            raise ConfigurationError(
                f"placement_timeout={self.placement_timeout!r:.40} is not possible: pass seconds above 0"
            )
        if self.save_interval is not None and self.storage_path is None:
            raise ConfigurationError(
                f"save_interval={self.save_interval!r:.40} has no effect without snapshots: pass storage_path="
            )
        if self.save_interval is not None:
            _interval(self.save_interval)
        path = self.storage_path
        if path is not None and "://" not in path and not Path(path).is_absolute():
            raise ConfigurationError(
                f"storage_path={path!r:.200} is relative, and actors have working directories of their "
                "own: pass an absolute path that all nodes share, or a URL such as s3://bucket/run"
            )
        if self.certs is not None and self.insecure:
            raise ConfigurationError("certs= encrypts and insecure=True does not: pass one of them")
        _check_resources("resources_per_worker", self.resources_per_worker)
        _check_resources("resources_per_server", self.resources_per_server)

    def check_network(self, hosts: set[str]) -> None:
        """Raise ConfigurationError if bytes would leave a machine unencrypted without the user's consent.

        hosts: addresses of the cluster's nodes.
        """
        if self.certs is None and not self.insecure and not all(map(is_loopback, hosts)):
            raise ConfigurationError(
                f"the nodes {', '.join(sorted(hosts)[:5])} reach each other over a network, and nothing would be "
                "encrypted: pass certs=, a folder that psdist certs wrote and that all nodes have, or insecure=True "
                "if the network is private"
            )

    def tls(self, role: str) -> TlsFiles | None:
        """Return the identity of a role, from the folder that ``psdist certs`` wrote; None without TLS."""
        if self.certs is None:
            return None
        return TlsFiles(self.certs / "ca.pem", self.certs / f"{role}.pem", self.certs / f"{role}-key.pem")

    def environment(self, role: str, token: str, scheduler: str, base: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of a process: ``base``, with this run in place of any other.

        scheduler: its address.
        """
        link = SchedulerAddress(scheduler, tls=self.tls(role), insecure=self.insecure, run_id=self.run_id)
        return link.environment(base) | {"PSDIST_TOKEN": token}

    def scheduler(self, host: str, port: int, store: Path, lifeline: int) -> tuple[str, ...]:
        """Return the scheduler's command line."""
        flags = arguments(
            SchedulerSettings, None, host=host, port=port, insecure=self._insecure(host), lifeline_fd=lifeline,
            run_id=self.run_id, store=store, storage_path=self.storage_path, workers_min=self.num_workers,
            servers_min=self.num_servers, replicas=self.replicas,
            save_interval=None if self.save_interval is None else _interval(self.save_interval),
        )  # fmt: skip
        return (*program("psdist_scheduler"), *flags)

    def server(self, number: int, host: str, scheduler: str, lifeline: int) -> tuple[str, ...]:
        """Return the command line of a server. A restarted one has the same id."""
        flags = arguments(
            ServerSettings, None, host=host, insecure=self._insecure(host), lifeline_fd=lifeline,
            run_id=self.run_id, scheduler=scheduler, server_id=f"server-{number}",
        )  # fmt: skip
        return (*program("psdist_server"), *flags)

    def _insecure(self, host: str) -> bool:
        return self.certs is None and not is_loopback(host)


def _interval(text: str) -> tuple[int, float]:
    try:
        return parse_interval(text)
    except ValueError as error:
        raise ConfigurationError(f"save_interval={text!r:.40} is not possible: {error}") from None


def _check_count(name: str, value: object, least: int, most: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ConfigurationError(f"{name}={value!r:.40} is not possible: pass a whole number from {least} to {most}")


def _check_resources(name: str, resources: Mapping[str, float]) -> None:
    for resource, amount in resources.items():
        if not isinstance(amount, int | float) or not 0 <= amount < float("inf"):
            raise ConfigurationError(
                f"{name}={{{resource!r:.40}: {amount!r:.40}}} is not possible: pass a number from 0 on"
            )
    if not any(resources.values()):
        raise ConfigurationError(f'{name} reserves nothing: pass an amount above 0, such as {{"CPU": 1}}')

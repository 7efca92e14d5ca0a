"""Arguments of psdist.ray.run, and the command lines that follow from them."""

from pathlib import Path
from typing import Any

import pytest

from psdist.errors import ConfigurationError
from psdist.ray.actors import RaySettings


def settings(**changed: Any) -> RaySettings:
    values: dict[str, Any] = {
        "run_id": "r", "num_workers": 2, "num_servers": 3, "replicas": 2, "resources_per_worker": {"CPU": 1},
        "resources_per_server": {"CPU": 1}, "storage_path": None, "save_interval": None, "max_restarts": 3,
        "placement_timeout": 60.0, "certs": None, "insecure": False,
    }  # fmt: skip
    return RaySettings(**(values | changed))


def test_refuses_wrong_arguments() -> None:
    for changed, message in [
        ({"num_workers": 0}, "num_workers=0 is not possible: pass a whole number from 1"),
        ({"num_servers": 1.5}, "num_servers=1.5 is not possible"),
        ({"num_servers": True}, "num_servers=True is not possible"),
        ({"num_servers": 1}, "replicas=2 needs at least as many servers, not num_servers=1"),
        ({"replicas": 4}, "replicas=4 is not possible: pass a whole number from 1 to 2"),
        ({"max_restarts": -1}, "max_restarts=-1 is not possible: pass a whole number from 0"),
        ({"placement_timeout": 0}, "placement_timeout=0 is not possible: pass seconds above 0"),
        ({"placement_timeout": float("nan")}, "placement_timeout=nan is not possible"),
        ({"save_interval": "5m"}, "save_interval='5m' has no effect without snapshots: pass storage_path="),
        ({"save_interval": "soon", "storage_path": "/s"}, "save_interval='soon' is not possible"),
        ({"storage_path": "runs"}, "storage_path='runs' is relative"),
        ({"certs": Path("/c"), "insecure": True}, "certs= encrypts and insecure=True does not: pass one of them"),
        ({"resources_per_server": {}}, "resources_per_server reserves nothing"),
        ({"resources_per_worker": {"CPU": -1}}, "resources_per_worker={'CPU': -1} is not possible"),
        ({"run_id": "a/b"}, "a/b"),
    ]:
        with pytest.raises(ConfigurationError) as refused:
            settings(**changed)
        assert message in str(refused.value)


def test_refuses_plaintext_between_nodes() -> None:
    for given, hosts in [
        (settings(), {"127.0.0.1", "127.0.0.2"}),
        (settings(insecure=True), {"10.0.0.1", "10.0.0.2"}),
        (settings(certs=Path("/c")), {"10.0.0.1"}),
    ]:
        assert given.on_nodes(hosts) == given and given.host("10.0.0.1") == "10.0.0.1"
    with pytest.raises(ConfigurationError, match=r"10\.0\.0\.1.*nothing would be encrypted: pass certs="):
        settings().on_nodes({"10.0.0.1", "127.0.0.1"})


def test_a_cluster_of_one_machine_uses_its_loopback() -> None:
    """Ray gives a machine its address in the network, also where nothing leaves it."""
    given = settings().on_nodes({"10.0.0.1"})
    assert given.host("10.0.0.1") == "127.0.0.1"
    assert "--insecure" not in given.scheduler(given.host("10.0.0.1"), 5, Path("/d"), 7)
    with pytest.raises(
        ConfigurationError, match=r"10\.0\.0\.2 joined .* run had begun on 10\.0\.0\.1 alone: pass certs="
    ):
        given.host("10.0.0.2")


def test_passes_the_settings_on() -> None:
    given = settings(storage_path="/s", save_interval="100", insecure=True)
    scheduler = given.scheduler("10.0.0.1", 5, Path("/d/store"), 7)
    for flag, value in {
        "--host": "10.0.0.1", "--port": "5", "--store": "/d/store", "--lifeline-fd": "7", "--storage-path": "/s",
        "--min-workers": "2", "--min-servers": "3", "--replicas": "2", "--save-interval": "100steps",
    }.items():  # fmt: skip
        assert scheduler[scheduler.index(flag) + 1] == value
    server = given.server(1, "10.0.0.2", "10.0.0.1:5", 7)
    assert server[server.index("--server-id") + 1] == "server-1"
    assert "--insecure" in scheduler and "--insecure" in server


def test_gives_each_role_its_certificate() -> None:
    given = settings(certs=Path("/c"))
    base = {"HOME": "/h", "PSDIST_SCHEDULER_FILE": "/another/run", "PSDIST_TOKEN": "another"}
    assert given.environment("worker", "t", "10.0.0.1:5", base) == {
        "HOME": "/h",
        "PYTHONIOENCODING": "utf-8:surrogateescape",
        "PSDIST_SCHEDULER": "10.0.0.1:5",
        "PSDIST_TOKEN": "t",
        "PSDIST_RUN_ID": "r",
        "PSDIST_TLS_CA": "/c/ca.pem",
        "PSDIST_TLS_CERT": "/c/worker.pem",
        "PSDIST_TLS_KEY": "/c/worker-key.pem",
    }
    assert settings(insecure=True).environment("worker", "t", "h:5", {})["PSDIST_INSECURE"] == "1"
    assert "--insecure" not in given.server(0, "10.0.0.2", "10.0.0.1:5", 7)

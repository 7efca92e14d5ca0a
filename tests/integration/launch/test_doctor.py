"""``psdist doctor --connect`` with a real cluster: its servers are measured, and a wrong token is found."""

from __future__ import annotations

from contextlib import closing

from psdist.addresses import free_port
from psdist.cli.doctor_checks import Finding, check_cluster
from psdist.launcher.embedded import EmbeddedCluster
from psdist.security.tls import Credentials
from psdist.wire.channels import make_server

SECONDS = 200.0
LINKS = ("link to server-0", "link to server-1")


async def findings(address: str, token: str) -> dict[str, Finding]:
    return {finding.check: finding async for finding in check_cluster(address, Credentials(token), SECONDS)}


async def test_the_way_to_a_cluster_is_checked() -> None:
    with closing(EmbeddedCluster(servers=2)) as cluster:
        found = await findings(cluster.address, cluster.token)
        # Servers may still be starting. The test's time limit ends this.
        while not {"ok", "warn"} >= {found[name].level if name in found else "" for name in LINKS}:
            assert found["token"].level == "ok"
            found = await findings(cluster.address, cluster.token)
        assert {found[name].level for name in ("version", "clock", "port of scheduler", "port of server-0")} == {"ok"}
        assert all("MB/s" in found[name].text for name in LINKS)
        standby = f"127.0.0.1:{free_port('127.0.0.1')}"  # It listens only once it leads.
        found = await findings(f"{standby},{cluster.address}", cluster.token)
        assert found[f"port of scheduler {standby}"].level == "ok" and found["token"].level == "ok"
        assert "standby" in found[f"port of scheduler {standby}"].text
        found = await findings(f"{standby},{standby}", cluster.token)
        assert found[f"port of scheduler {standby}"].level == "fail" and "token" not in found
        found = await findings(cluster.address, "wrong")
        assert found["token"].level == "fail" and "PSDIST_TOKEN" in found["token"].remedy


async def test_a_port_of_another_service_is_found() -> None:
    server = make_server(Credentials())
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        found = await findings(f"127.0.0.1:{port}", "")
        assert found["port of scheduler"].level == "ok" and found["scheduler"].level == "fail"
    finally:
        await server.stop(0)

"""``psdist certs``: files, modes, refusals, and that programs can use the result."""

from __future__ import annotations

import datetime
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from psdist.cli.certs import CERTS
from psdist.security import certificates
from psdist.security.roles import (
    CERTIFICATE_ROLES,
    DOMAIN,
    SERVICE_ROLES,
    is_service_name,
    parse_role_uri,
    role_uri,
    service_name,
)
from psdist.security.tls import TlsFiles
from psdist.settings import exit_codes

HOSTS = ("node-1", "10.0.0.1", "fd00::1")
NOW = datetime.datetime.now(datetime.UTC)


def certs(*words: str) -> int:
    return CERTS.run([str(word) for word in words], {"PSDIST_HOST": "0.0.0.0", "PSDIST_DAYS": "1"})


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        certs(*words)
    assert ended.value.code == exit_codes.USAGE
    return capsys.readouterr().err


def shown(capsys: pytest.CaptureFixture[str], path: Path) -> tuple[int, dict[str, dict[str, Any]]]:
    capsys.readouterr()
    status = certs("show", str(path), "--format", "json")
    return status, {one["file"]: one for one in json.loads(capsys.readouterr().out)}


def test_init_makes_what_programs_need(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / "new" / "certs"
    assert (
        certs("init", str(place), "--host", ",".join(HOSTS[:2]), "--host", HOSTS[2], "--run-id", "r1") == exit_codes.OK
    )
    assert {path.stem for path in place.iterdir()} == {
        "ca",
        "ca-key",
        *CERTIFICATE_ROLES,
        *(f"{role}-key" for role in CERTIFICATE_ROLES),
    }
    for path in place.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == (0o600 if path.name.endswith("-key.pem") else 0o644), path
    for role in CERTIFICATE_ROLES:
        names = TlsFiles(place / "ca.pem", place / f"{role}.pem", place / f"{role}-key.pem").identity().names
        assert ("URI", f"psdist://r1/{role}") in names and ("DNS", DOMAIN) in names
        services = {name for kind, name in names if is_service_name(name)}
        assert services == (
            set(map(service_name, (*certificates.LOOPBACK_HOSTS, *HOSTS))) if role in SERVICE_ROLES else set()
        ), role
    status, found = shown(capsys, place)
    assert status == exit_codes.OK and found["ca.pem"]["role"] == "ca"
    worker = found["worker.pem"]
    assert (worker["role"], worker["run_id"], worker["days_left"], worker["state"]) == ("worker", "r1", 90.0, "valid")
    assert worker["hosts"] == ["localhost", "node-1", "127.0.0.1", "::1", "10.0.0.1", "fd00::1"]
    assert [found[f"{role}.pem"]["hosts"] for role in ("admin", "reader")] == [[], []]
    assert certs("show", str(place)) == exit_codes.OK
    assert "scheduler.pem" in capsys.readouterr().out


def test_nothing_is_replaced_unasked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    certs("init", str(tmp_path))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert "--overwrite" in refused(capsys, "init", str(tmp_path))
    assert "worker.pem" in refused(capsys, "issue", str(tmp_path), "--role", "worker")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert certs("issue", str(tmp_path), "--role", "worker", "--overwrite") == exit_codes.OK
    changed = {path.name for path in tmp_path.iterdir() if path.read_bytes() != before[path.name]}
    assert changed == {"worker.pem", "worker-key.pem"}
    assert certs("init", str(tmp_path), "--overwrite") == exit_codes.OK


def test_issue_uses_the_ca_of_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    certs("init", str(tmp_path))
    assert certs("issue", str(tmp_path), "--role", "worker", "--name", "node-2", "--host", "node-2") == exit_codes.OK
    files = TlsFiles(tmp_path / "ca.pem", tmp_path / "node-2.pem", tmp_path / "node-2-key.pem")
    assert ("DNS", "node-2") in files.identity().names
    # While a CA is replaced its file holds both. The one whose key is here issues.
    other = certificates.make_authority("other", 10, NOW)
    (tmp_path / "ca.pem").write_bytes(other.cert + (tmp_path / "ca.pem").read_bytes())
    assert certs("issue", str(tmp_path), "--role", "reader", "--overwrite") == exit_codes.OK
    assert shown(capsys, tmp_path)[1]["reader.pem"]["issuer"] == f"psdist CA {NOW:%Y-%m-%d}"


def test_a_range_stands_for_its_addresses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    certs("init", str(tmp_path), "--host", "10.0.0.0/30,a")
    hosts = shown(capsys, tmp_path)[1]["server.pem"]["hosts"]
    assert hosts == ["localhost", "a", "127.0.0.1", "::1", "10.0.0.1", "10.0.0.2"]


def test_a_role_alone_is_in_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    certs("init")
    assert certs("issue", "--role", "admin", "--name", "me") == exit_codes.OK
    assert (tmp_path / "certs" / "me.pem").exists() and certs("show") == exit_codes.OK


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("issue", "DIR"), "--role is missing"),
        (("issue", "DIR", "--role", "reader", "--name", "me", "--host", "a"), "names no host. Leave out --host"),
        (("issue", "DIR", "--role", "boss"), "not one of scheduler, server, worker, admin, reader"),
        (("issue", "DIR", "--role", "worker", "--name", "ca"), "name of another file"),
        (("issue", "DIR", "--role", "worker", "--name", "a/b"), "use 1 to 64 of"),
        (("issue", "DIR", "--role", "worker", "--days", "4000"), "the CA expires on"),
        (("issue", "DIR/none", "--role", "worker"), "ca-key.pem cannot be read"),
        (("init", "DIR/new", "--host", "0.0.0.0"), "no address that anybody dials"),
        (("init", "DIR/new", "--host", "node:29600"), "no port"),
        (("init", "DIR/new", "--host", "x.service.psdist.internal"), "a name by which certificates state roles"),
        (("init", "DIR/new", "--days", "0"), "at least 1"),
        (("init", "DIR/new", "--host", "10.0.0.1/24"), "has host bits set"),
        (("init", "DIR/new", "--host", "10.0.0.0/16"), "65536 addresses: name at most 256"),
        (("init", "DIR/ca.pem/x"), "cannot be written"),
        (("show", "DIR/none"), "cannot be read"),
        (("show", "DIR/worker-key.pem"), "no certificate in PEM"),
    ],
)
def test_wrong_use_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str
) -> None:
    certs("init", str(tmp_path))
    assert said in refused(capsys, *(word.replace("DIR", str(tmp_path)) for word in words))


def test_a_failure_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / "certs"
    refused(capsys, "init", str(place), "--host", "bad host")
    assert not place.exists()
    certificates.write(place, {"a": certificates.make_authority("a", 1, NOW)}, overwrite=False)
    assert {path.name for path in place.iterdir()} == {"a.pem", "a-key.pem"}, "no unfinished files"


def test_show_warns_of_the_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    certs("init", str(tmp_path), "--days", "6")
    status, found = shown(capsys, tmp_path)
    assert status == exit_codes.FAILURE and found["worker.pem"]["state"] == "expires soon"
    ca = certificates.make_authority("old", 3000, NOW - datetime.timedelta(days=20))
    old = certificates.issue(ca, "worker", "", (), 10, NOW - datetime.timedelta(days=20))
    (tmp_path / "worker.pem").write_bytes(old.cert)
    status, found = shown(capsys, tmp_path / "worker.pem")
    assert status == exit_codes.UNAVAILABLE and found["worker.pem"]["state"] == "expired"


def test_an_unwritable_folder_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    tmp_path.chmod(0o500)
    assert "cannot be written" in refused(capsys, "init", str(tmp_path / "certs"))


def test_other_uris_are_no_roles() -> None:
    for uri in ["https://r/worker", "psdist://r/boss", "psdist:///worker", "psdist://r", "psdist://r/a/worker"]:
        assert parse_role_uri(uri) is None


def test_role_uris_return() -> None:
    assert [parse_role_uri(role_uri(run, "worker")) for run in ("", "r")] == [("", "worker"), ("r", "worker")]

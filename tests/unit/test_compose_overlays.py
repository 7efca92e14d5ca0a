"""The overlays of docker-compose.yml: their commands are ones that the programs understand."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import yaml

from psdist.settings.flags import flags_of
from psdist.settings.programs import SchedulerSettings, ServerSettings
from tests.support.generated import parse

ROOT = Path(__file__).resolve().parents[2]
BASE = ROOT / "docker-compose.yml"
OVERLAYS = sorted((ROOT / "deploy").glob("compose.*.yml"))
_VARIABLE = re.compile(r"\$\{\w+(?::-(\w*[\w:.]*))?\}")


def services(path: Path) -> dict[str, dict[str, Any]]:
    loaded: dict[str, dict[str, Any]] = yaml.safe_load(path.read_text())["services"]
    return loaded


def test_the_programs_understand_their_commands() -> None:
    for path in [BASE, *OVERLAYS]:
        commands = [
            words
            for service in services(path).values()
            if isinstance(command := service.get("command"), str)
            and (words := shlex.split(_VARIABLE.sub(r"\1", command)))[0] in ("psdist-scheduler", "psdist-server")
        ]
        for words in commands:
            given = parse(words, {})
            assert given.host == "0.0.0.0"


def test_variables_are_those_of_the_programs() -> None:
    for path in OVERLAYS:
        known = {
            "PSDIST_" + flag.dest.upper() for kind in (SchedulerSettings, ServerSettings) for flag in flags_of(kind)
        }
        given = {name for service in services(path).values() for name in service.get("environment") or {}}
        assert {name for name in given if name.startswith("PSDIST_")} <= known | {"PSDIST_TOKEN", "PSDIST_TOKEN_FILE"}


def test_there_is_an_overlay_for_each_promise_of_the_readme() -> None:
    assert {path.name for path in OVERLAYS} == {f"compose.{name}.yml" for name in ("bucket", "etcd", "gpu", "tls")}


def test_only_schedulers_have_the_run_s_own_token() -> None:
    monitoring = ROOT / "deploy/monitoring/docker-compose.yml"
    for path in [BASE, *OVERLAYS, monitoring]:
        for name, service in services(path).items():
            mounts = [volume for volume in service.get("volumes", ()) if "/var/lib/psdist-token:" in f"{volume}:"]
            own = any(volume.startswith("token:") for volume in mounts)
            environment = service.get("environment") or {}
            assert not (own or "PSDIST_TOKEN" in environment) or name in ("tokens", "scheduler", "standby"), (
                path,
                name,
            )
            wanted = {"server": "server", "worker": "worker", "prometheus": "reader"}.get(name)
            assert wanted is None or not mounts or mounts[0].startswith(f"{wanted}-token:"), (path, name)

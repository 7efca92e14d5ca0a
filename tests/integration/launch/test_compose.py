"""``docker-compose up`` with a real container engine, if one answers: it trains, prints an accuracy, and exits with 0.

Each case is a project of its own name and removes its containers and networks afterwards. Compose itself builds the
image once, from ``servers/Dockerfile``.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import uuid
from collections.abc import Iterator

import pytest

from tests.support.containers import BUILD_SECONDS, ROOT, TRAIN_SECONDS, _run
from tests.support.containers import engine as engine  # the fixture

pytestmark = [pytest.mark.docker, pytest.mark.timeout(BUILD_SECONDS + 2 * TRAIN_SECONDS)]


class Project:
    """A Compose project of its own."""

    def __init__(self, command: list[str]) -> None:
        self.name = f"psdist-test-{uuid.uuid4().hex[:12]}"
        self._command = [*command, "--project-name", self.name]

    def compose(self, *words: str, **environ: str) -> str:
        """Run Compose on this project. Returns its output."""
        return _run([*self._command, *words], TRAIN_SECONDS, **environ)

    def containers(self, service: str) -> list[str]:
        """Return the ids of a service's containers, including ended ones."""
        labels = (f"com.docker.compose.project={self.name}", f"com.docker.compose.service={service}")
        filters = [word for label in labels for word in ("--filter", f"label={label}")]
        return _run(["docker", "ps", "--all", "--quiet", "--no-trunc", *filters], 30).split()

    def wait(self, service: str) -> list[int]:
        """Return the exit codes of a service's containers, once all have ended."""
        return [int(code) for code in _run(["docker", "wait", *self.containers(service)], TRAIN_SECONDS).split()]

    def statuses(self) -> dict[str, list[int]]:
        """Exit codes by service, once all of its containers have ended."""
        services = ("scheduler", "server", "worker")
        states = {
            s: [_inspect(c, "{{.State.Status}} {{.State.ExitCode}}") for c in self.containers(s)] for s in services
        }
        return {service: [int(state.removeprefix("exited ")) for state in of] for service, of in states.items()}

    def logs(self, service: str) -> str:
        """Return the output of a service's containers."""
        return self.compose("logs", "--no-color", service)

    def follow(self, service: str) -> subprocess.Popen[str]:
        """Return the command that prints the output of a service's containers until they end."""
        command = [*self._command, "logs", "--no-color", "--follow", service]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)


@pytest.fixture
def project(engine: list[str]) -> Iterator[Project]:
    """A project that is always removed afterwards."""
    project = Project(engine)
    yield project
    project.compose("down", "--volumes", "--timeout", "5")
    assert not [container for service in ("scheduler", "server", "worker") for container in project.containers(service)]


def test_the_commands_of_the_file_in_their_order(project: Project) -> None:
    """Check that a run ends by itself, with all containers, and that the next run resumes from it with another number
    of workers."""
    for number, (workers, words) in enumerate(((2, ()), (4, ("--scale", "worker=4")), (4, ("--scale", "worker=4")))):
        if number == 2:
            project.compose("down")
        output = project.compose("up", *words)
        assert project.statuses() == {"scheduler": [0], "server": [0] * 3, "worker": [0] * workers}, output
        accuracies = re.findall(r"\btest accuracy ([\d.]+)%$", output.replace("\r", ""), re.M)
        assert len(accuracies) == 1 and float(accuracies[0]) >= 97.0, output
        assert ("resuming from step 690" in output) == (number > 0), output
        assert "failed" not in output and "settings" not in output, output
    project.compose("down", "-v")
    assert "resuming from" not in project.compose("up")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may kill a container's process from outside")
def test_a_server_and_the_scheduler_may_die(project: Project) -> None:
    project.compose("up", "--detach")
    with project.follow("worker") as worker:
        assert worker.stdout is not None
        assert any("step" in line for line in worker.stdout), project.logs("worker")
        killed = [project.containers(service)[0] for service in ("server", "scheduler")]
        for container in killed:
            # Not by docker kill, which also asks for the container to stay down.
            os.kill(int(_inspect(container, "{{.State.Pid}}")), signal.SIGKILL)
        worker.stdout.read()
    codes, logs = project.wait("worker"), project.logs("worker")
    assert codes == [0, 0], logs + project.logs("scheduler") + project.logs("server")
    assert re.search(r"\btest accuracy (9[7-9]|100)", logs), logs
    assert project.wait("scheduler") + project.wait("server") == [0] * 4
    assert [_inspect(container, "{{.RestartCount}}") for container in killed] == ["1"] * 2


def test_scheduler_and_servers_stay_where_that_is_wanted(project: Project) -> None:
    project.compose("up", "--detach", PSDIST_IDLE_TIMEOUT="0")
    assert project.wait("worker") == [0, 0]
    assert {_health(container) for container in project.containers("server")} == {"healthy"}
    (scheduler,) = project.containers("scheduler")
    assert "step 690" in _run(["docker", "exec", scheduler, "psdist", "snapshot", "save"], 60)


def test_processes_are_not_root_publish_no_port_and_have_a_token_of_their_own(project: Project) -> None:
    project.compose("up", "--detach", "scheduler")
    (container,) = project.containers("scheduler")
    assert _run(["docker", "exec", container, "id", "-u"], 30).strip() != "0"
    assert not json.loads(_run(["docker", "inspect", "--format", "{{json .NetworkSettings.Ports}}", container], 30))
    token = _run(["docker", "exec", container, "cat", "/var/lib/psdist-token/token"], 30).strip()
    mode = _run(["docker", "exec", container, "stat", "-c", "%a %U", "/var/lib/psdist-token/token"], 30).strip()
    assert len(token) == 43 and mode == "600 psdist"
    assert token not in _run(["docker", "inspect", container], 30)


def test_each_container_has_the_token_of_its_role(project: Project) -> None:
    """Workers run a user's script. Nothing in their containers has the run's own token."""
    project.compose("up", "--detach", PSDIST_IDLE_TIMEOUT="0")
    (scheduler,) = project.containers("scheduler")
    own = _run(["docker", "exec", scheduler, "cat", "/var/lib/psdist-token/token"], 30).strip()
    for role in ("server", "worker"):
        for container in project.containers(role):
            shown = _run(["docker", "exec", container, "sh", "-c", "env; cat /var/lib/psdist-token/*"], 30)
            assert own not in shown and f"psdist.{role}.0." in shown
    assert project.wait("worker") == [0, 0], project.logs("worker")


def test_a_wrong_setting_is_not_tried_for_ever(project: Project) -> None:
    project.compose("up", "--detach", "scheduler", PSDIST_REPLICAS="many")
    (container,) = project.containers("scheduler")
    assert [_run(["docker", "wait", container], TRAIN_SECONDS).strip() for _ in range(2)] == ["2"] * 2
    assert "not a whole number" in project.logs("scheduler")


def test_the_image_is_small(engine: list[str]) -> None:
    assert int(_inspect("psdist", "{{.Size}}")) < 450_000_000


def _health(container: str) -> str:
    return _inspect(container, "{{.State.Health.Status}}")


def _inspect(container: str, template: str) -> str:
    return _run(["docker", "inspect", "--format", template, container], 30).strip()


@pytest.mark.long
def test_the_overlay_with_tls_trains_without_insecure(engine: list[str]) -> None:
    command = [*engine, "-f", "docker-compose.yml", "-f", "deploy/compose.tls.yml"]
    _run([*command, "build", "certs"], BUILD_SECONDS)
    project = Project(command)
    try:
        assert "insecure" not in project.compose("config")
        output = project.compose("up")
        assert project.statuses() == {"scheduler": [0], "server": [0] * 3, "worker": [0] * 2}, output
        assert project.wait("certs") == [0], output
        assert re.search(r"\btest accuracy (9[7-9]|100)", output), output
        assert "Handshake failed" not in output, output
    finally:
        project.compose("down", "--volumes", "--timeout", "5")

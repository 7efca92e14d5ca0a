"""The files for Kubernetes: valid in its releases, safe, and in agreement with psdist's flags and exit statuses."""

from __future__ import annotations

import os
import re
import stat
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from psdist.cli import health, k8s
from psdist.cli.generated import places, template_names
from psdist.errors import ConfigurationError
from psdist.security import tokens
from psdist.security.roles import Role
from psdist.settings.exit_codes import LATE, REACTIONS, SIGNAL_BASE, Reaction
from psdist.settings.flags import read
from psdist.settings.programs import scheduler_settings, server_settings
from psdist.wire.services import LIVE, READY
from tests.support.certificates import make_ca, write_tls
from tests.support.generated import LINES, parse
from tests.support.kustomize import Object, load, render
from tests.support.pods import token_key

kubernetes_validate = pytest.importorskip("kubernetes_validate")
VERSIONS = ("1.29", "1.30", "1.31", "1.32", "1.33", "1.34")
OVERLAYS = ("gpu", "s3", "etcd", "standby", "monitoring", "tls")
#: Kinds of cert-manager, which Kubernetes' schemas lack. Real processes use certificates of these objects elsewhere.
FOREIGN = ("Certificate", "Issuer")
ROLES = {"psdist-scheduler": "scheduler", "psdist-server": "server", "psdist-worker": "launcher"}
FLAGS = ("--image", "registry/train:1", "--nodes", "2", "--nproc-per-node", "4", "--nservers", "3", "--replicas", "2")


def generate(out: Path, *argv: str) -> Path:
    line = k8s.command_line()
    assert k8s.run(line.parse(["--out", str(out), *FLAGS, *argv, "train.py", "a b", "$(HOME)"], {}), {}) == 0
    return out


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return generate(tmp_path_factory.mktemp("k8s") / "run")


def runtime_jobs(root: Path) -> list[Object]:
    """Return the Jobs that Kubeflow's runtime makes, with names."""
    (runtime,) = load(root / "kubeflow/training-runtime.yaml")
    jobs = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    return [
        {"apiVersion": "batch/v1", "kind": "Job", **each["template"],
         "metadata": {"name": f"{runtime['metadata']['name']}-{each['name']}"}}
        for each in jobs
    ]  # fmt: skip


def variants(root: Path) -> dict[str, list[Object]]:
    """Return the objects of the base, of each overlay, and of Kubeflow's runtime."""
    found = {"base": render(root / "storage") + render(root / "base"), "kubeflow": runtime_jobs(root)}
    return found | {name: render(root / "overlays" / name) for name in OVERLAYS}


def pods(objects: list[Object]) -> Iterator[tuple[Object, Object]]:
    """Yield each object that makes pods, with their specification."""
    for each in objects:
        if each["kind"] in ("Deployment", "StatefulSet", "Job"):
            yield each, each["spec"]["template"]["spec"]


def containers(objects: list[Object]) -> Iterator[tuple[Object, Object, Object]]:
    """Yield the main container of each pod with the pod's specification and its object."""
    for each, pod in pods(objects):
        (container,) = pod["containers"]
        yield each, pod, container


def environ(container: Object) -> dict[str, str]:
    """Return a container's variables as Kubernetes would set them."""
    found = {}
    for each in container["env"]:
        value = each.get("value", "1")
        found[each["name"]] = re.sub(r"\$\((\w+)\)", lambda name: found[name[1]], value)
    return found


def find(objects: list[Object], kind: str, name: str) -> Any:
    (found,) = [each for each in objects if (each["kind"], each["metadata"]["name"]) == (kind, name)]
    return found


# --- Kubernetes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "version", [VERSIONS[0], *(pytest.param(each, marks=pytest.mark.long) for each in VERSIONS[1:-1]), VERSIONS[-1]]
)
def test_every_object_is_valid(root: Path, version: str) -> None:
    kinds = set()
    for objects in variants(root).values():
        for each in objects:
            if each["kind"] not in FOREIGN:
                kubernetes_validate.validate(each, version, strict=True)
            kinds.add(each["kind"])
    assert kinds - {*FOREIGN} == {
        "Deployment", "Job", "NetworkPolicy", "PersistentVolumeClaim", "PodDisruptionBudget", "Secret", "Service",
        "StatefulSet",
    }  # fmt: skip


def test_a_mistake_would_be_found(root: Path) -> None:
    job = find(render(root / "base"), "Job", "psdist-workers")
    job["spec"]["backoffLimitPerIndx"] = 1
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job, VERSIONS[0], strict=True)


def test_pods_have_no_rights_that_they_do_not_need(root: Path) -> None:
    for name, objects in variants(root).items():
        for each, pod in pods(objects):
            assert pod["automountServiceAccountToken"] is False, (name, each)
            secure = pod["securityContext"]
            assert secure["runAsNonRoot"] and secure["runAsUser"] > 0
            assert secure["seccompProfile"] == {"type": "RuntimeDefault"}
            assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
            assert not any("hostPath" in volume for volume in pod["volumes"])
            for container in pod["containers"] + pod.get("initContainers", []):
                secure = container["securityContext"]
                assert secure["capabilities"] == {"drop": ["ALL"]} and secure["readOnlyRootFilesystem"]
                assert secure["allowPrivilegeEscalation"] is False
                assert {"cpu", "memory"} <= container["resources"]["limits"].keys()
                assert {"cpu", "memory"} <= container["resources"]["requests"].keys()
                assert re.search(r":(?!latest)[^/]+$", container["image"])


def test_mounts_and_selectors_refer_to_something(root: Path) -> None:
    for name, objects in variants(root).items():
        for each, pod in pods(objects):
            volumes = {volume["name"] for volume in pod["volumes"]}
            mounted = {
                mount["name"]
                for container in pod["containers"] + pod.get("initContainers", [])
                for mount in container["volumeMounts"]
            }
            assert mounted == volumes, (name, each["metadata"]["name"])
        labels = [each["spec"]["template"]["metadata"]["labels"] for each, _ in pods(objects) if name != "kubeflow"]
        for each in objects:
            selector = each["spec"].get("selector") or each["spec"].get("podSelector") if "spec" in each else None
            if selector is not None and each["kind"] != "PersistentVolumeClaim":
                wanted = selector.get("matchLabels", selector)
                assert any(wanted.items() <= found.items() for found in labels), each


def test_names_of_pods_do_not_wait_for_readiness(root: Path) -> None:
    """A pod is ready once it has joined, which takes its name; and a lost scheduler must not take names away."""
    for name, objects in variants(root).items():
        for each in objects:
            if each["kind"] == "Service" and each["spec"].get("clusterIP") == "None":
                assert each["spec"]["publishNotReadyAddresses"] is True, (name, each["metadata"]["name"])


def test_workers_have_shared_memory_of_the_size_of_their_memory(root: Path) -> None:
    for name, objects in variants(root).items():
        for _, pod, container in containers(objects):
            if container["command"] == ["psdist-worker"]:
                (volume,) = [each for each in pod["volumes"] if each["name"] == "shm"]
                limit = container["resources"]["limits"]["memory"]
                assert volume["emptyDir"] == {"medium": "Memory", "sizeLimit": limit}, name
                assert {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"]


def test_a_node_never_has_a_primary_and_its_copy(root: Path, tmp_path: Path) -> None:
    def constraint(folder: Path) -> Object:
        (found,) = find(render(folder / "base"), "StatefulSet", "psdist-servers")["spec"]["template"]["spec"][
            "topologySpreadConstraints"
        ]
        return dict(found)

    # With fewer nodes than servers the least is 0, so that no node gets a second one.
    strict = constraint(root)
    assert (strict["maxSkew"], strict["minDomains"], strict["whenUnsatisfiable"]) == (1, 3, "DoNotSchedule")
    loose = constraint(generate(tmp_path / "one", "--replicas", "1"))
    assert "minDomains" not in loose and loose["whenUnsatisfiable"] == "ScheduleAnyway"


# --- psdist -----------------------------------------------------------------------------------------------------------


def test_every_variable_is_one_of_its_program(root: Path) -> None:
    for name, objects in variants(root).items():
        for _, _, container in containers(objects):
            program = container["command"][0]
            known = {variable for flag in LINES[program]().flags for variable in flag.environment}
            known |= {"PSDIST_TOKEN_FILE", "MASTER_ADDR", "MASTER_PORT", "TRAIN_JOB", "POD_NAME", "POD_INDEX"}
            assert environ(container).keys() <= known, (name, environ(container).keys() - known)


def test_the_programs_understand_their_settings(root: Path, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret")
    token = {"PSDIST_TOKEN_FILE": str(tmp_path / "token")}
    tls = write_tls(tmp_path, make_ca(), "server")
    files = {"PSDIST_TLS_CA": str(tls.ca), "PSDIST_TLS_CERT": str(tls.cert), "PSDIST_TLS_KEY": str(tls.key)}
    for name, objects in variants(root).items():
        for _, _, container in containers(objects):
            variables = environ(container) | token | (files if name == "tls" else {})
            match container["command"][0]:
                case "psdist-scheduler":
                    scheduler = scheduler_settings([], variables)
                    assert (scheduler.workers_min, scheduler.servers_min, scheduler.replicas) == (8, 3, 2)
                    assert scheduler.credentials.token == "secret" and scheduler.port == 29600
                case "psdist-server":
                    server = server_settings([], variables)
                    both = "psdist-scheduler-0.psdist-scheduler:29600,psdist-scheduler-1.psdist-scheduler:29600"
                    assert re.fullmatch(rf"(psdist|1)-scheduler(-0-0\.1)?:29600|{both}", server.scheduler)
                    assert (server.credentials.tls is not None) is (name == "tls") is not server.credentials.insecure
                    assert (server.port, server.data_port) == (29601, 29602)
                case "psdist-worker":
                    torchrun = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "4", "PET_NODE_RANK": "1"}
                    given = parse(["psdist-worker", *_expanded(container["args"])], torchrun | variables)
                    assert given.command == ["train.py", "a b", "$(HOME)"]
                    assert (given.nnodes, given.nproc_per_node, given.node_rank) == ((2, 2), 4, 1)


def _expanded(arguments: list[str]) -> list[str]:
    """Return arguments as a container gets them."""
    assert not any(re.search(r"(?<!\$)(\$\$)*\$\(", each) for each in arguments)
    return [each.replace("$$", "$") for each in arguments]


def test_a_script_gets_its_arguments_as_they_were_given(tmp_path: Path) -> None:
    """Kubernetes takes $$ for $, and YAML does not know the pairs by which JSON writes an emoji."""
    words = ["train.py", "a$$b", "$$(HOME)", "\U0001f600 \u00e9\u2028\x7f\n\t", "\\ud83d", "\"'#: {", ""]
    line = k8s.command_line()
    assert k8s.run(line.parse(["--out", str(tmp_path / "run"), *FLAGS, *words], {}), {}) == 0
    (worker,) = find(render(tmp_path / "run/base"), "Job", "psdist-workers")["spec"]["template"]["spec"]["containers"]
    assert _expanded(worker["args"]) == ["--", *words]


def test_a_name_that_is_no_text_in_yaml_is_refused() -> None:
    for name in ["no", "on", "true", "null", "y"]:
        with pytest.raises(ConfigurationError, match=f"'{name}' is not possible: .*but none of y, n, yes"):
            k8s.name_text(name)


def question(probe: Object, variables: dict[str, str]) -> tuple[int, str | None]:
    """Return port and service of a probe. With TLS a program asks, since Kubernetes speaks none."""
    if variables["PSDIST_INSECURE"] == "1":
        return probe["grpc"]["port"], probe["grpc"].get("service")
    program, flag, module, address, seconds, *service = probe["exec"]["command"]
    assert (program, flag, module) == ("python", "-m", health.__name__) and probe.keys() & {"grpc", "exec"} == {"exec"}
    assert float(seconds) < probe["timeoutSeconds"] <= probe["periodSeconds"] + 5, "an interpreter takes a while"
    return int(address.removeprefix("localhost:")), service[0] if service else None


def test_probes_ask_services_that_exist(root: Path) -> None:
    for name, objects in variants(root).items():
        for each, _, container in containers(objects):
            variables, program = environ(container), container["command"][0]
            asked = {kind: question(container[kind], variables) for kind in container if kind.endswith("Probe")}
            if program == "psdist-worker":
                assert not asked, "an agent serves nothing: its exit status says how it is"
            elif program == "psdist-scheduler" and variables.get("PSDIST_STANDBY"):
                assert not asked, "it listens only once it leads"
            else:
                port, ready = int(variables["PSDIST_PORT"]), READY if program == "psdist-server" else None
                expected = {
                    "startupProbe": (port, LIVE),
                    "readinessProbe": (port, ready),
                    "livenessProbe": (port, LIVE),
                }
                assert asked == expected, (name, each)


def test_pods_have_time_to_end(root: Path) -> None:
    for objects in variants(root).values():
        for _, pod, container in containers(objects):
            variables, grace = environ(container), pod["terminationGracePeriodSeconds"]
            if container["command"] == ["psdist-worker"]:
                assert float(variables["PSDIST_STOP_TIMEOUT"]) + 10 <= grace
                continue
            pause = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
            assert pause + float(variables.get("PSDIST_DRAIN_TIMEOUT", 0)) + 50 <= grace
            if container["command"] == ["psdist-server"]:
                startup = container["startupProbe"]
                assert float(variables["PSDIST_START_TIMEOUT"]) < startup["periodSeconds"] * startup["failureThreshold"]


def reaction(job: Object, status: int) -> Reaction:
    """Return the reaction to a status by a Job's policy. A status without a rule restarts the pod."""
    for rule in job["spec"]["podFailurePolicy"]["rules"]:
        if status in rule.get("onExitCodes", {}).get("values", ()):
            assert rule["onExitCodes"]["operator"] == "In"
            return "requeue" if rule["action"] == "FailJob" and status in (70, 74) else "stop"
    return "restart"


def test_exit_statuses_have_the_reactions_of_the_table(root: Path) -> None:
    job = find(render(root / "base"), "Job", "psdist-workers")
    for status, expected in REACTIONS["launcher"].items():
        if expected != "done":
            assert reaction(job, status + 15 * (status == SIGNAL_BASE)) == expected, status
    failed = [rule["action"] for rule in job["spec"]["podFailurePolicy"]["rules"] if "onExitCodes" in rule]
    values = [
        rule["onExitCodes"]["values"] for rule in job["spec"]["podFailurePolicy"]["rules"] if "onExitCodes" in rule
    ]
    assert failed == ["FailJob", "FailIndex"] and values[1] == [LATE], "the others continue without a late worker"
    assert job["spec"]["backoffLimitPerIndex"] == 3 and job["spec"]["template"]["spec"]["restartPolicy"] == "Never"


def test_the_runtime_fails_for_good_only_where_every_start_would_end_the_same_way(root: Path) -> None:
    for job in runtime_jobs(root):
        (container,) = job["spec"]["template"]["spec"]["containers"]
        for status, expected in REACTIONS[ROLES[container["command"][0]]].items():  # type: ignore[index]
            if expected != "done":
                assert (reaction(job, status) == "stop") == (expected == "stop"), (job["metadata"]["name"], status)
    (runtime,) = load(root / "kubeflow/training-runtime.yaml")
    jobs = {each["name"] for each in runtime["spec"]["template"]["spec"]["replicatedJobs"]}
    assert jobs == {"scheduler", "server", "node"}
    assert runtime["spec"]["template"]["spec"]["successPolicy"]["targetReplicatedJobs"] == ["node"]
    (job,) = load(root / "kubeflow/train-job.yaml")
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]


def test_policies_open_the_ports_of_the_programs(root: Path) -> None:
    policy = find(render(root / "base"), "NetworkPolicy", "psdist-services")
    opened = {port["port"] for port in policy["spec"]["ingress"][0]["ports"]}
    assert opened == {29600, 29601, 29602}
    for _, _, container in containers(render(root / "base")):
        assert {port["containerPort"] for port in container.get("ports", ())} <= opened
    (ports,) = find(render(root / "overlays/monitoring"), "NetworkPolicy", "psdist-metrics")["spec"]["ingress"][0][
        "ports"
    ]
    assert (ports["port"], ports["endPort"]) == (29603, 29606), "one for each worker of a pod"


def test_overlays_change_what_they_say(root: Path) -> None:
    changed = variants(root)
    gpu = {each["metadata"]["name"]: container for each, _, container in containers(changed["gpu"])}
    assert gpu["psdist-workers"]["resources"]["limits"]["nvidia.com/gpu"] == "4"
    assert environ(gpu["psdist-servers"])["PSDIST_DEVICE"] == "cuda"
    for each, _, container in containers(changed["s3"]):
        if each["metadata"]["name"] != "psdist-workers":
            assert container["envFrom"] == [{"secretRef": {"name": "psdist-s3"}}]
    for name in ("etcd", "standby"):
        assert not [each for each in changed[name] if each["kind"] == "PersistentVolumeClaim"]
    (alone,) = [c for each, _, c in containers(changed["etcd"]) if each["metadata"]["name"] == "psdist-scheduler"]
    (led,) = [c for each, _, c in containers(changed["standby"]) if each["metadata"]["name"] == "psdist-scheduler"]
    others = {"PSDIST_STANDBY": "1", "POD_NAME": "1", "PSDIST_ADVERTISE": "1.psdist-scheduler:29600"}
    assert environ(led) == environ(alone) | others
    assert led["volumeMounts"] == alone["volumeMounts"] and led["resources"] == alone["resources"]


def test_more_pods_than_a_certificate_can_name_have_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = generate(tmp_path / "run", "--nodes", "513")
    assert not (root / "overlays/tls").exists() and (root / "overlays/gpu").exists()
    assert "overlays/tls is left out: certificates name each pod, and at most 512" in capsys.readouterr().out


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_tokens_are_secret(root: Path) -> None:
    token, others = root / "base/token", [root / f"base/{role}-token" for role in ("server", "worker", "reader")]
    for path in (token, *others):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600 and len(path.read_text()) > 40
    assert (root / "base/.gitignore").read_text() == "token\n*-token\n"
    assert token.read_text() != (generate(root.parent / "second") / "base/token").read_text()


def test_each_pod_has_the_token_of_its_role(root: Path) -> None:
    """Workers run the script of a user, and a token of more rights would end the run."""
    keys = {"psdist-scheduler": "token", "psdist-server": "server-token", "psdist-worker": "worker-token"}
    for name, objects in variants(root).items():
        for _, pod, container in containers(objects):
            assert token_key(pod) == keys[container["command"][0]], name
    own = (root / "base/token").read_text().strip()
    for role in (Role.SERVER, Role.WORKER, Role.READER):
        assert (root / f"base/{role}-token").read_text().strip() == tokens.create(own, role)


def test_files_are_never_overwritten(root: Path) -> None:
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    with pytest.raises(ConfigurationError, match="has files: choose another --out"):
        generate(root)
    assert before == {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="cannot be written"):
        generate(tmp_path / "file" / "run")


def test_values_that_kubernetes_would_refuse_are_refused() -> None:
    for argv in [
        ["--image", "train"],
        ["--image", "train:latest"],
        ["--image", "r:5000/train"],
        ["--name", "A"],
        ["--name", "a" * 41],
        ["--server-memory", "much"],
        ["--server-memory", "0"],
        ["--snapshot-storage", "0.0Gi"],
        ["--grace", "5"],
        ["--run-id", "a b"],
    ]:
        with pytest.raises(SystemExit) as ended:
            k8s.command_line().parse(["--out", "x", *argv, "train.py"], {})
        assert ended.value.code == 2


@pytest.mark.parametrize("image", ["train:1", "host:5000/a/b_c:v1.2-x", f"train@sha256:{'0' * 64}"])
def test_images_with_a_version_are_taken(image: str) -> None:
    assert k8s.image_text(image) == image


def test_a_directory_is_needed() -> None:
    with pytest.raises(ConfigurationError, match="--out DIR"):
        read(k8s.KubernetesSettings, Namespace(), command=("train.py",))


def test_every_value_has_a_place_and_every_name_survives(tmp_path: Path) -> None:
    settings = read(k8s.KubernetesSettings, Namespace(out=tmp_path, name="other", run_id="007"), command=("train.py",))
    assert set().union(*map(places, template_names("k8s"))) == k8s._values(settings).keys()
    for name, text in k8s.files(settings).items():
        assert "psdist-servers" not in text and "@" not in text, name
        if name.endswith(".yaml"):
            list(yaml.safe_load_all(text))
    assert os.path.isabs(tmp_path)

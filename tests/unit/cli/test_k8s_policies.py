"""The files for Kubernetes comply with a policy linter, apart from the listed exceptions. Runs if checkov is installed.

checkov is not in the extra ``dev``: it brings a hundred packages. ``uv tool install checkov`` makes this test run.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from psdist.cli import k8s
from tests.support.kustomize import Object, load, render

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.skipif(shutil.which("checkov") is None, reason="checkov is not installed"),
]
_OVERLAYS = ("gpu", "s3", "etcd", "standby", "monitoring", "tls")
#: Checks that fail on purpose: in which variants ("" for all), at which kinds ("" for all), and why.
_EXCEPTIONS = {
    "CKV_K8S_15": ("", "", "imagePullPolicy Always: an image of this machine (kind, minikube) would not start"),
    "CKV_K8S_21": ("", "", "default namespace: the user chooses it, by kubectl -n or in a kustomization"),
    "CKV_K8S_43": ("", "", "digest of the image: --image takes one, and is the user's"),
    "CKV_K8S_35": ("s3", "", "secrets in variables: the SDKs of buckets read their keys from these"),
    "CKV_K8S_8": ("standby", "StatefulSet", "liveness: a scheduler that waits listens nowhere, and a lease decides"),
    "CKV_K8S_9": ("standby", "StatefulSet", "readiness: the same"),
}


def variants(root: Path) -> dict[str, list[Object]]:
    """Return the objects of the base, of each overlay, and the pods of Kubeflow's runtime as Jobs."""
    (runtime,) = load(root / "kubeflow/training-runtime.yaml")
    jobs = [
        {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": each["name"]}, **each["template"]}
        for each in runtime["spec"]["template"]["spec"]["replicatedJobs"]
    ]
    overlays = {name: render(root / "overlays" / name) for name in _OVERLAYS}
    return {"base": render(root / "base"), "kubeflow": jobs, **overlays}


def lint(folder: Path) -> tuple[int, set[tuple[str, str, str]]]:
    """Return the number of passed checks, and the failed ones: id, file and kind of the object."""
    argv = ["checkov", "-d", folder, "--framework", "kubernetes", "--quiet", "--skip-download", "-o", "json"]
    ended = subprocess.run(argv, capture_output=True, text=True)
    reports = json.loads(ended.stdout)
    found = reports if isinstance(reports, list) else [reports]
    failed = {
        (check["check_id"], Path(check["file_path"]).stem, check["resource"].partition(".")[0])
        for report in found
        for check in report["results"]["failed_checks"]
    }
    return sum(report["summary"]["passed"] for report in found), failed


def test_the_files_comply_with_the_linter(tmp_path: Path) -> None:
    flags = ("--out", str(tmp_path / "run"), "--nodes", "2", "--nservers", "2", "--replicas", "2")
    assert k8s.run(k8s.command_line().parse([*flags, "train.py"], {}), {}) == 0
    linted = tmp_path / "linted"
    linted.mkdir()
    for name, objects in variants(tmp_path / "run").items():
        (linted / f"{name}.yaml").write_text(yaml.safe_dump_all(objects))
    passed, failed = lint(linted)
    assert passed > 500
    unexpected = {
        (check, variant, kind)
        for check, variant, kind in failed
        if check not in _EXCEPTIONS
        or _EXCEPTIONS[check][0] not in ("", variant)
        or _EXCEPTIONS[check][1] not in ("", kind)
    }
    assert not unexpected
    assert {check for check, _, _ in failed} == _EXCEPTIONS.keys(), "an exception that nothing needs"


def test_the_linter_finds_a_container_that_may_be_privileged(tmp_path: Path) -> None:
    container = {"name": "x", "image": "x:1", "securityContext": {"privileged": True}}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": {"containers": [container]}}
    (tmp_path / "pod.yaml").write_text(yaml.safe_dump(pod))
    assert ("CKV_K8S_16", "pod", "Pod") in lint(tmp_path)[1]

"""The committed stubs equal those that today's proto files give, and the proto files keep buf's STANDARD style."""

from __future__ import annotations

import importlib.resources
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROTOS = sorted(path.relative_to(ROOT / "proto").as_posix() for path in (ROOT / "proto").rglob("*.proto"))
#: Lines by which the generator names its own version. Another minor version otherwise gives the same stubs.
_VERSION = re.compile(
    r"Protobuf Python Version|GRPC_GENERATED_VERSION = |_runtime_version\.|^ +(\d+|''),?$|^ +'psdist/v1/"
)


def test_there_are_protos() -> None:
    assert PROTOS, "no proto file found: this test would pass on nothing"


def test_stubs_are_those_of_the_protos(tmp_path: Path) -> None:
    protoc = pytest.importorskip("grpc_tools.protoc", reason="grpcio-tools is not installed")
    well_known = str(importlib.resources.files("grpc_tools") / "_proto")
    outputs = [f"--{kind}={tmp_path}" for kind in ("python_out", "pyi_out", "grpc_python_out")]
    assert protoc.main(["protoc", f"-I{ROOT / 'proto'}", f"-I{well_known}", *outputs, *PROTOS]) == 0

    fresh = {path.relative_to(tmp_path).as_posix(): _stub(path) for path in tmp_path.rglob("*_pb2*.py*")}
    committed = {path.relative_to(ROOT).as_posix(): _stub(path) for path in (ROOT / "psdist/v1").glob("*_pb2*.py*")}
    stale = sorted(name for name in fresh.keys() | committed.keys() if fresh.get(name) != committed.get(name))
    assert not stale, f"run 'make proto' and commit its changes: {', '.join(stale)}"


@pytest.mark.parametrize("name", PROTOS)
def test_proto_style(name: str) -> None:
    text = (ROOT / "proto" / name).read_text()
    package = ".".join(Path(name).parts[:-1])
    assert f"package {package};" in text, f"{name} must be in the package of its folder, {package}"
    for service in re.findall(r"^service (\w+)", text, re.M):
        assert service.endswith("Service"), f"{name}: service {service} must end in Service"
    for enum, body in re.findall(r"^\s*enum (\w+) \{(.*?)\}", text, re.M | re.S):
        prefix = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", enum).upper()
        values = re.findall(r"^\s*(\w+) = (\d+);", body, re.M)
        assert values[0] == (f"{prefix}_UNSPECIFIED", "0"), f"{name}: {enum} must begin with {prefix}_UNSPECIFIED = 0"
        assert all(value.startswith(f"{prefix}_") for value, _ in values), f"{name}: values of {enum} lack its prefix"


@pytest.mark.parametrize("name", PROTOS)
def test_each_method_has_messages_of_its_own(name: str) -> None:
    text = (ROOT / "proto" / name).read_text()
    for method, request, response in re.findall(r"rpc (\w+)\((?:stream )?(\w+)\) returns \((?:stream )?(\w+)\)", text):
        assert (request, response) == (f"{method}Request", f"{method}Response"), f"{name}: {method}"


def _stub(path: Path) -> list[str]:
    """Return the stub's lines without those that only name the generator's version."""
    return [line for line in path.read_text().splitlines() if not _VERSION.search(line)]

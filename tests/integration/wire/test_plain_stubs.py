"""A client in any language: stubs generated here, run in a process that cannot import psdist's own code.

They are made from proto/, and from the descriptors that are stored of the oldest version that members may speak.
"""

from __future__ import annotations

import gzip
import subprocess
import sys
import sysconfig
from contextlib import closing
from pathlib import Path

import pytest

from psdist.launcher.embedded import EmbeddedCluster
from psdist.wire.limits import OLDEST_PROTOCOL

ROOT = Path(__file__).parents[3]


def generate_stubs(target: Path, stored: bool) -> None:
    source = "-Iproto"
    if stored:
        descriptors = target / "descriptors.binpb"
        compressed = ROOT / f"tests/compat/protocol-{OLDEST_PROTOCOL}.binpb.gz"
        descriptors.write_bytes(gzip.decompress(compressed.read_bytes()))
        source = f"--descriptor_set_in={descriptors}"
    protos = sorted(
        str(path.relative_to(ROOT / "proto")) for path in (ROOT / "proto").rglob("*.proto") if path.stem != "etcd"
    )
    out = [f"--python_out={target}", f"--grpc_python_out={target}"]
    command = [sys.executable, "-m", "grpc_tools.protoc", source, *out, *protos]
    subprocess.run(command, cwd=ROOT, check=True, timeout=240)
    for package in (target / "psdist", target / "psdist" / "v1"):
        (package / "__init__.py").touch()


@pytest.mark.parametrize("stored", [False, True], ids=["today", "stored"])
def test_a_client_of_generated_stubs_alone_registers_creates_pushes_and_pulls(tmp_path: Path, stored: bool) -> None:
    generate_stubs(tmp_path, stored)
    # -S: no .pth files, so psdist consists of the stubs alone; the path adds the folder of grpc itself.
    start = (
        f"import sys, runpy; sys.path[:0] = [{str(tmp_path)!r}]; sys.path.append({sysconfig.get_path('purelib')!r});"
        f"import psdist; assert psdist.__file__.startswith({str(tmp_path)!r}), psdist.__file__;"
        f"runpy.run_path({str(ROOT / 'tests/support/plain_client.py')!r}, run_name='__main__')"
    )
    with closing(EmbeddedCluster(servers=2)) as cluster:
        done = subprocess.run(
            [sys.executable, "-S", "-c", start, cluster.address, cluster.token],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert done.returncode == 0, done.stderr
    expected = [value - 0.5 * (index + 1) - 0.5 for index, value in enumerate([0.5, -1.0, 2.0, 3.5, 4.0])]
    assert done.stdout.strip() == str(expected)

"""Test files of PyTorch's source: where they come from, which are run, and how.

PyTorch's wheel lacks them. Debian's source package ``pytorch`` has them, of an older version than the wheel: a test
that fails with gloo, too, says nothing about psdist. Where that package cannot be had, ``source`` says why.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from tests.support.tree import ROOT
from tests.torch_suite.suite import Outcome

#: The unpacked tests, and outcomes, kept between runs.
DIRECTORY: Final = ROOT / ".torch-suite"
_KEYRING: Final = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
_LIST: Final = f"deb-src [signed-by={_KEYRING}] http://deb.debian.org/debian trixie main\n"
_FETCH_SECONDS: Final = 900
#: A test takes up to 300 s for each of its ranks' time limits.
_FILE_SECONDS: Final = 3600

#: Below test/distributed: files with tests that need no GPU and communicate.
FILES: Final = (
    "test_c10d_gloo.py",
    "test_c10d_common.py",
    "test_c10d_pypg.py",
    "test_c10d_object_collectives.py",
    "test_c10d_logger.py",
    "test_c10d_spawn_gloo.py",
    "test_collective_utils.py",
    "test_functional_api.py",
    "test_pg_wrapper.py",
    "test_backends.py",
    "test_device_mesh.py",
    "algorithms/test_join.py",
    "optim/test_zero_redundancy_optimizer.py",
    "_composable/test_replicate.py",
    "_composable/test_replicate_with_compiler.py",
    "_shard/sharded_tensor/test_sharded_tensor.py",
    "checkpoint/test_checkpoint.py",
    "checkpoint/test_file_system_checkpoint_cpu.py",
    "checkpoint/test_format_utils.py",
    "checkpoint/test_state_dict.py",
    "checkpoint/test_state_dict_utils.py",
    "checkpoint/e2e/test_e2e_save_and_load.py",
    "checkpoint/e2e/test_fine_tuning.py",
    "checkpoint/e2e/test_fsdp_ep.py",
    "checkpoint/e2e/test_pipeline.py",
    "checkpoint/fsdp/test_fsdp_dsd.py",
    "_tensor/test_api.py",
    "_tensor/test_common_rules.py",
    "_tensor/test_dtensor.py",
    "_tensor/test_dtensor_compile.py",
    "_tensor/test_embedding_ops.py",
    "_tensor/test_experimental_ops.py",
    "_tensor/test_init.py",
    "_tensor/test_math_ops.py",
    "_tensor/test_matrix_ops.py",
    "_tensor/test_optimizers.py",
    "_tensor/test_pointwise_ops.py",
    "_tensor/test_random_ops.py",
    "_tensor/test_redistribute.py",
    "_tensor/test_tensor_ops.py",
    "_tensor/test_utils.py",
    "_tensor/test_view_ops.py",
    "_tensor/debug/test_comm_mode.py",
    "_tensor/debug/test_comm_mode_features.py",
    "_tensor/experimental/test_local_map.py",
    "_tensor/experimental/test_register_sharding.py",
    "_tensor/experimental/test_tp_transform.py",
    "tensor/parallel/test_parallelize_api.py",
    "tensor/parallel/test_tp_examples.py",
    "tensor/parallel/test_tp_style.py",
    "pipelining/test_microbatch.py",
    "pipelining/test_backward.py",
)

_WRAPPER: Final = (
    "tests torch's C++ class around groups with `TORCH_DISTRIBUTED_DEBUG=DETAIL`, which takes C++ backends only. "
    "psdist compares all calls of the ranks, in each mode. Its `CollectiveMismatchError` has another text, and ends "
    "the group"
)
_LIMIT: Final = (
    "makes 1,000 to 4,000 calls before it waits, each with a limit of 50 s, which a call of psdist counts from the "
    "moment that it was made: passes on a machine that is not overloaded"
)
#: Tests that may pass with gloo and not with psdist, and why.
REASONS: Final[dict[str, str]] = {
    "TestMiscCollectiveUtilsCPU.test_create_pg_cpu": "asks that the group's name be `gloo`",
    "ProcessGroupGlooTest.test_allgather_stress": _LIMIT,
    "ProcessGroupGlooTest.test_allreduce_coalesced_stress": _LIMIT,
    "ProcessGroupGlooTest.test_gather_stress": _LIMIT,
    "ProcessGroupGlooTest.test_reduce_stress": _LIMIT,
    "ProcessGroupGlooTest.test_scatter_stress": _LIMIT,
    "ProcessGroupGlooWrapperTest.test_collective_hang": _WRAPPER,
    "ProcessGroupGlooWrapperTest.test_collectives_op_mismatch": _WRAPPER,
    "ProcessGroupGlooWrapperTest.test_collectives_op_mismatch_debug_mode": _WRAPPER,
    "ProcessGroupGlooWrapperTest.test_collective_shape_mismatch_debug_mode": _WRAPPER,
    "ProcessGroupGlooWrapperTest.test_collective_shape_mismatch_debug_mode_off": _WRAPPER,
}


class SourceUnavailableError(Exception):
    """PyTorch's test files cannot be had here. The text says why."""


def source() -> tuple[Path, str]:
    """Return the folder test/distributed of PyTorch's source, and its version. Raises SourceUnavailableError."""
    if not (found := [*DIRECTORY.glob("pytorch-*/test/distributed")]):
        _fetch()
        found = [*DIRECTORY.glob("pytorch-*/test/distributed")]
    return found[0], found[0].parents[1].name.partition("-")[2].partition("+")[0]


def _fetch() -> None:
    """Download and unpack the tests, with lists of packages of their own: nothing of this machine changes."""
    if not _KEYRING.exists():
        raise SourceUnavailableError(f"this is no Debian: it lacks {_KEYRING}")
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        (place / "lists/partial").mkdir(parents=True)
        (place / "sources").write_text(_LIST, encoding="ascii")
        options = {"Dir::Etc::sourcelist": "sources", "Dir::Etc::sourceparts": "none", "Dir::State::lists": "lists"}
        flags = [f"-o{name}={place / value}" for name, value in options.items()] + [f"-oDir::Cache={place}"]
        for command in (["update"], ["source", "--download-only", "pytorch"]):
            ended = subprocess.run(
                ["apt-get", "-q", *flags, *command],
                cwd=place, capture_output=True, text=True, timeout=_FETCH_SECONDS, check=False,
            )  # fmt: skip
            if ended.returncode:
                raise SourceUnavailableError(f"apt-get {command[0]} failed: {ended.stderr.strip()[-300:]}")
        _unpack(next(place.glob("pytorch_*.orig.tar.xz")))


def _unpack(archive: Path) -> None:
    name = archive.name.replace("pytorch_", "pytorch-").removesuffix(".orig.tar.xz")
    with tarfile.open(archive) as content:
        for member in content:
            parts = Path(member.name).parts
            if "test" in parts[:2] and member.isfile():
                member.name = str(Path(name, *parts[parts.index("test") :]))
                content.extract(member, DIRECTORY, filter="data")


def run(backend: str, path: Path, log: Path) -> dict[str, Outcome]:
    """Run the tests of a file with a backend. log: file for their output.

    A test that ends its process has failed, and the others continue in another one.
    """
    found: dict[str, Outcome] = {}
    with tempfile.TemporaryDirectory() as directory:
        lines = Path(directory, "outcomes")
        while True:
            status = _host([backend, str(path), str(lines), *found], Path(directory), log)
            text = lines.read_text(encoding="utf-8") if lines.exists() else ""
            count = len(found)
            for name, outcome, reason in map(json.loads, text.splitlines()):
                found[name] = Outcome(outcome, reason)
            if status == 0 or len(found) == count:
                break
    if not found:
        return {path.stem: Outcome("failed", "the file cannot be imported")}
    ended = Outcome("failed", "the process ended")
    return {name: ended if outcome.outcome == "started" else outcome for name, outcome in found.items()}


def _host(arguments: Sequence[str], directory: Path, log: Path) -> int:
    """Run tests in a process. Returns its exit status."""
    environment = os.environ | {"TMPDIR": str(directory), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with log.open("a", encoding="utf-8") as output:
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.torch_suite.host", *arguments],
            cwd=ROOT, env=environment, stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
        try:
            return process.wait(_FILE_SECONDS)
        except subprocess.TimeoutExpired:
            return 1
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # Ranks that a test left.
            process.wait()

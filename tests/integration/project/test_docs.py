"""The programs on the pages run unchanged, and their tables are true."""

from __future__ import annotations

import ast
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import MISSING, fields
from pathlib import Path
from pkgutil import resolve_name

import pytest

import psdist
from psdist import compression
from psdist.cli import run
from psdist.compression.specifications import PULL_CODECS
from psdist.device.coders import coder_of
from psdist.launcher.embedded import EmbeddedCluster
from psdist.monitoring.metrics import MEASURED
from tests.flag_reference import time_limits

DOCS = Path(__file__).resolve().parents[3] / "docs"


def test_the_commands_of_the_wire_page_make_stubs(tmp_path: Path) -> None:
    """Check them in a copy of the repository, as a reader runs them. The stubs must be those that its client
    imports."""
    (commands,) = re.findall(r"```sh\n(.*?)```", (DOCS / "internals/wire.md").read_text(), re.S)
    (tmp_path / "proto").symlink_to(DOCS.parent / "proto")
    lines = [line for line in commands.splitlines() if not line.startswith("pip ")]
    assert len(lines) < len(commands.splitlines())
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    subprocess.run(["bash", "-ec", "\n".join(lines)], cwd=tmp_path, env=environment, check=True, timeout=240)
    made = {path.relative_to(tmp_path / "stubs").as_posix() for path in (tmp_path / "stubs").rglob("*.py")}
    names = ("common", "etcd", "scheduler", "server", "worker")
    assert made == {f"psdist/v1/{name}_pb2{kind}.py" for name in names for kind in ("", "_grpc")}


def test_the_client_of_the_wire_page_trains(tmp_path: Path) -> None:
    script = _program_of("internals/wire.md", tmp_path)
    with closing(EmbeddedCluster(servers=2)) as cluster:
        environment = os.environ | {"PSDIST_SCHEDULER": cluster.address, "PSDIST_TOKEN": cluster.token}
        done = subprocess.run(
            [sys.executable, str(script)], capture_output=True, text=True, check=False, env=environment, timeout=240
        )
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"\[(0\.999\d+ ?){4}\]\n", done.stdout), done.stdout


def test_the_program_of_the_page_on_fast_steps_trains(tmp_path: Path) -> None:
    script = _program_of("fast-steps.md", tmp_path)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"0\.878 after 20 steps by \w+\n", done.stdout), done.stdout


def test_the_program_of_the_page_on_runs_from_python_trains(tmp_path: Path) -> None:
    script = tmp_path / "work.py"
    script.write_text(re.findall(r"```python\n(.*?)```", (DOCS / "launch.md").read_text(), re.S)[1])
    command = [sys.executable, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[-0.5 -0.5 -0.5 -0.5] ('server-0',)\n"


def test_workers_agree_on_a_mean_as_the_page_on_loops_says(tmp_path: Path) -> None:
    script = _program_of("loops.md", tmp_path)
    command = [sys.executable, "-m", "psdist.cli.main", "run", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"accuracy .*", done.stdout) == ["accuracy 0.905"], done.stdout


def test_the_program_of_the_page_on_torch_trains(tmp_path: Path) -> None:
    script = _program_of("torch.md", tmp_path)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"loss 0\.0\d\d after 100 steps\n", done.stdout), done.stdout


def test_the_program_of_the_page_on_jax_trains(tmp_path: Path) -> None:
    script = _program_of("jax.md", tmp_path)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"loss 0\.0\d\d after 200 steps\n", done.stdout), done.stdout


@pytest.mark.long  # The page's whole program runs above.
def test_the_loops_of_the_page_on_jax_train(tmp_path: Path) -> None:
    """Check that both loops make the same steps as the lines that they replace."""
    loop, averaged = re.findall(r"```diff\n(.*?)```", (DOCS / "jax.md").read_text(), re.S)
    plain = [line[1:] for line in loop.splitlines() if not line.startswith("+")]
    assert averaged.splitlines()[0][1:] + "\n" in loop.replace("+    ", ""), "the line before the new one"
    kept = [line.replace("[step]", "[step * world + rank]") for line in plain]
    at = next(number for number, line in enumerate(kept) if "gradients(" in line)
    kept.insert(at + 1, f"    {averaged.splitlines()[1][1:]}")
    parts = {
        "servers": [line[1:] for line in loop.splitlines() if not line.startswith("-")],
        "kept": ["context = psdist.init()", "rank, world = context.rank, context.world_size", *kept],
        "plain": plain,
    }
    lines = [_BEFORE_THE_LOOP_FOR_JAX]
    for name, code in parts.items():
        lines += [*code, f"{name} = params"]
    lines.append("print(max(float(abs(one['w'] - plain['w']).max()) for one in (servers, kept)) < 1e-5)")
    script = tmp_path / "program.py"
    script.write_text("\n".join(["import psdist.jax", *lines]).replace("1000", "20"))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "True\n"


_BEFORE_THE_LOOP_FOR_JAX = """
import jax
import jax.numpy as jnp
import optax


class model:
    init = staticmethod(lambda key, x: {"w": jax.random.normal(key, (3,))})


x = None
batches = jax.random.normal(jax.random.key(1), (1000, 5, 3))
gradients = jax.jit(jax.grad(lambda params, x: jnp.mean((x @ params["w"] - 1.0) ** 2)))
"""


def test_the_program_of_the_page_on_metrics_trains(tmp_path: Path) -> None:
    script = _program_of("metrics.md", tmp_path)
    command = [sys.executable, "-m", "psdist.cli.main", "run", "--nproc-per-node", "2", str(script)]
    environ = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240, cwd=tmp_path, env=environ)
    assert done.returncode == 0, done.stderr
    assert "[worker 0] 1.000 after 100 steps\n" in done.stdout, done.stdout
    assert re.search(r"psdist: step 100  loss \S+  grad_norm \S+  [\d,]+ samples/s  .* 2 workers\n", done.stderr)


def test_the_page_on_metrics_has_each_number() -> None:
    names = [name for cell, *_ in _table("metrics.md", "Measured numbers") for name in re.findall(r"`(\w+)`", cell)]
    assert sorted(names) == sorted(MEASURED)


def test_the_page_on_metrics_has_each_flag() -> None:
    flags = {flag.name: flag.environment[0] for flag in run.command_line().flags if flag.environment}
    rows = _table("metrics.md", "Destinations")
    assert rows and all(flags[cell.strip("`").split()[0].strip("`")] == twin.strip("`") for cell, twin, _ in rows)


def test_the_program_of_the_page_on_optimizers_trains(tmp_path: Path) -> None:
    script = _program_of("optimizers.md", tmp_path)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"\d+ after 100 steps\n", done.stdout), done.stdout


def test_the_readmes_run_ends_at_its_step_also_when_it_is_resumed(tmp_path: Path) -> None:
    script = _program_of("../README.md", tmp_path)
    command = [sys.executable, "-m", "psdist.cli.main", "run", "--run-id", "line", "--nproc-per-node", "2"]
    command += ["--storage-path", str(tmp_path / "runs"), str(script)]
    environ = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")}
    ends = []
    for is_resumed in (False, True):
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=240, cwd=tmp_path, env=environ
        )
        assert done.returncode == 0, done.stderr
        assert ("this run resumes" in done.stdout + done.stderr) == is_resumed
        ends += re.findall(r"^\[worker 0\] (.* after 200 steps)$", done.stdout, re.M)
    assert len(ends) == 2 and ends[0] == ends[1], ends


def test_the_tutorial_has_the_program_of_the_readme() -> None:
    pages = (DOCS / "tutorial.md", DOCS.parent / "README.md")
    first, second = (re.findall(r"```python\n(.*?)```", page.read_text(), re.S) for page in pages)
    assert first == second and len(first) == 1 and len(first[0].splitlines()) <= 20


@pytest.mark.long  # Four processes that import torch.
def test_the_loop_for_torch_resumes_at_its_step(tmp_path: Path) -> None:
    """Check the loop of the README, which is the one of the page on torch."""
    first, second = (
        re.findall(r"```diff\n(.*?)```", (DOCS / page).read_text(), re.S)[0] for page in ("../README.md", "torch.md")
    )
    assert first == second
    script = tmp_path / "train.py"
    lines = [line[1:] for line in first.splitlines() if not line.startswith("-")]
    used = "    print('batches', step, batch.tolist(), flush=True)"
    script.write_text(f"{_BEFORE_THE_LOOP}{chr(10).join(lines)}\n{used}\n")
    command = [sys.executable, "-m", "psdist.cli.main", "run", "--nproc-per-node", "2", "--run-id", "torch"]
    command += ["--storage-path", str(tmp_path / "runs")]
    environ = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")}
    for count, steps in ((8, [0, 1, 2, 3]), (12, [4, 5])):
        done = subprocess.run(
            [*command, str(script), str(count)],
            capture_output=True, text=True, check=False, timeout=240, cwd=tmp_path, env=environ,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        shown = re.findall(r"^\[worker (\d)\] batches (\d+) \[(\d+)\.0\]$", done.stdout, re.M)
        expected = [(rank, step, 2 * step + rank) for step in steps for rank in (0, 1)]
        assert sorted(tuple(map(int, one)) for one in shown) == sorted(expected)


_BEFORE_THE_LOOP = """
import sys

import torch


class Net(torch.nn.Linear):
    def __init__(self):
        super().__init__(1, 1)


def loss_of(model, batch):
    return model(batch).square()


batches = [torch.tensor([float(number)]) for number in range(int(sys.argv[1]))]
"""


def _table(page: str, title: str) -> list[list[str]]:
    """Return the cells of the table below a title of a page, without its head."""
    section = (DOCS / page).read_text().split(f"## {title}\n")[1].split("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def test_the_page_on_debugging_names_errors_that_exist() -> None:
    names = re.findall(r"`(\w+Error)`", (DOCS / "debug.md").read_text())
    rows = _table("debug.md", "Ten common errors")
    assert len(rows) == 10 and [name for name in names if not hasattr(psdist.errors, name)] == []


def test_the_page_on_time_limits_has_each_flag_with_its_programs_and_default() -> None:
    told: dict[tuple[str, str], set[str]] = {}
    for flag, programs, default, _ in _table("timeouts.md", "Flags"):
        names = re.findall(r"`([^`]+)`", programs)
        told[flag.strip("`"), default] = {name if name.startswith("psdist") else f"psdist {name}" for name in names}
    assert told == time_limits()


def test_the_page_on_time_limits_has_each_argument_with_its_default() -> None:
    places: dict[str, tuple[Callable[..., object], ...]] = {
        "connect_timeout": (psdist.init, psdist.Client, psdist.AsyncClient),
        "request_timeout": (psdist.init, psdist.Client, psdist.AsyncClient),
        "client.barrier": (psdist.Client.barrier,),
        "client.snapshot": (psdist.Client.snapshot, psdist.Client.request_snapshot),
        "Bucket.wait": (psdist.Bucket.wait,),
    }
    for name, where, default, _ in _table("timeouts.md", "Arguments"):
        argument, first = name.strip("`"), where.split("`")[1]
        calls = places.pop(argument if argument in places else first)
        defaults = [inspect.signature(call).parameters[argument].default for call in calls]
        assert {"None" if each is None else f"{each:g}" for each in defaults} == {default}
    assert not places


#: Constants behind the rows of fixed times that begin with a number, in the page's order.
_FIXED_TIMES = (
    ("psdist.launcher.supervisor:REPEAT_SECONDS",),
    ("psdist.launcher.shutdown:FAILURE_STOP_SECONDS",),
    ("psdist_scheduler.decide.parameter_creation:RETURN_GRACE_SECONDS",),
    ("psdist.collectives.mesh:RETURN_SECONDS",),
    ("psdist_scheduler.decide.formations:RETURN_SECONDS",),
    ("psdist.client.session.script:AGAIN_SECONDS",),
    ("psdist.client.session.worker_alignment:FINISH_SECONDS",),
    ("psdist.client.session.worker_alignment:ALONE_SECONDS",),
    ("psdist.client.session.barriers:WITHDRAW_SECONDS",),
    ("psdist_scheduler.decide.run_end:SERVERS_END_SECONDS",),
    ("psdist.launcher.shutdown:GRACE_SECONDS",),
    ("psdist_server.snapshots:STALL_SECONDS",),
    ("psdist.client.snapshots:_LAST_SNAPSHOT_SECONDS", "psdist.client.snapshots:_FAILED_SECONDS"),
    ("psdist_scheduler.decide.losses:PATIENCE_SECONDS",),
    ("psdist.launcher.agent:_GIVE_UP_SECONDS",),
    ("psdist_scheduler.app:_FAREWELL_SECONDS",),
    ("psdist.launcher.scheduler_calls:_ANSWER_SECONDS",),
    ("psdist.launcher.scheduler_calls:_STILL_SECONDS",),
)


def test_the_page_on_time_limits_has_the_fixed_times_of_the_code() -> None:
    told = [time for time, _ in _table("timeouts.md", "Fixed times") if re.fullmatch(r"[\d, ]+", time)]
    assert told == [", ".join(f"{resolve_name(name):g}" for name in names) for names in _FIXED_TIMES]


def test_the_page_on_optimizers_has_each_with_its_defaults() -> None:
    rows = _table("optimizers.md", "Optimizers")
    assert [name.strip("`") for name, *_ in rows] == [cls.__name__ for cls in psdist.optim.OPTIMIZERS.values()]
    for name, settings, _ in rows:
        optimizer = getattr(psdist.optim, name.strip("`"))()
        given = dict(pair.split("=") for pair in re.findall(r"`(\w+=[^`]+)`", settings))
        own = {field.name for field in fields(optimizer)} - {"schedule", "max_grad_norm", "overrides"}
        assert own - {"maximize"} == given.keys()
        assert getattr(optimizer, "maximize", None) is (None if name == "`Mean`" else False), "as the page says below"
        assert all(getattr(optimizer, key) == ast.literal_eval(value) for key, value in given.items()), name


def test_the_page_on_codecs_has_each_with_its_defaults() -> None:
    """Check also which codecs can send weights, and which ones a GPU encodes."""
    rows = {row[0].strip("`"): row for row in _table("codecs.md", "All codecs") if len(row) == 7}
    classes = {name: getattr(compression, name) for name in compression.__all__}
    kinds = {name for name, one in classes.items() if isinstance(one, type) and issubclass(one, compression.Codec)}
    assert rows.keys() == kinds - {"Codec", "Cast", "Compressor"}
    names = {(cls.__name__, name) for name, cls in compression.CODECS.items() if isinstance(cls, type)}
    assert names == {(codec, name) for codec, row in rows.items() for name in re.findall(r'"(\w+)"', row[1])}
    for name, (_, text, _, arguments, feedback, weights, gpu) in rows.items():
        own = {field.name: field.default for field in fields(classes[name])}
        given = re.findall(r"`(\w+)=([^`]+)`", arguments)
        assert given == [
            (key, repr(value)) for key, value in own.items()
            if value is not MISSING and key not in ("error_feedback", "residual_decay")
        ]  # fmt: skip
        if text and name != "Auto":
            codec = classes[name]()
            assert (weights == "yes") == (name in PULL_CODECS)
            assert (gpu != "no") == (coder_of(codec) is not None)
            assert (feedback == "none") == (not isinstance(codec, compression.Compressor))


def _program_of(page: str, directory: Path) -> Path:
    """Write the Python program of a page to a file."""
    (code,) = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.S)
    script = directory / "program.py"
    script.write_text(code)
    return script

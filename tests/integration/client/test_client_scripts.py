"""Scripts that use the synchronous client, each in a process of its own: the world of one, Ctrl-C, exit, fork."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from psdist.launcher.embedded import EmbeddedCluster

#: Of the cluster.
SERVERS = 1

HEAD = """
import hashlib, numpy as np, os, psdist, sys, threading
"""


def start(
    script: str, cluster: EmbeddedCluster | None = None, *arguments: str, **variables: str
) -> subprocess.Popen[str]:
    named = {} if cluster is None else {"PSDIST_SCHEDULER": cluster.address, "PSDIST_TOKEN": cluster.token}
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", HEAD + script, *arguments],
        env=os.environ | named | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(script: str, cluster: EmbeddedCluster | None = None, *arguments: str, **variables: str) -> tuple[int, str, str]:
    process = start(script, cluster, *arguments, **variables)
    out, error = process.communicate(timeout=240)
    return process.returncode, out, error


def test_a_world_of_one() -> None:
    code, out, error = run("""
with psdist.init() as context:
    assert psdist.init() is context
    assert (context.rank, context.world_size, context.local_rank) == (0, 1, 0)
    weights = context.client.parameters("p", {"w": np.zeros(3, np.float32)}, psdist.optim.SGD(lr=1.0))
    print(weights.push_pull({"w": -np.ones(3)})["w"].tolist(), weights)
    out = {"w": np.empty(3, np.float32)}
    weights.push({"w": -np.ones(3)})
    assert weights.pull(out=out)["w"] is out["w"]
    print(out["w"].tolist(), weights.version, weights.names, weights.statistics().pushes)
    context.client.barrier()
    assert context.client.parameters("p", {"w": np.zeros(3, np.float32)}, psdist.optim.SGD(lr=1.0)) is weights
try:
    weights.pull()
except psdist.errors.ClosedError as error:
    print(error)
""")
    assert code == 0, error
    assert out.splitlines() == [
        "[1.0, 1.0, 1.0] <Parameters 'p': 1 tensor, 3 elements, version 1, step 1>",
        "[2.0, 2.0, 2.0] 2 ('w',) 2",
        "the client is closed: call psdist.init() again, or make a new client",
    ]
    said = "psdist: no launcher, so this is a world of one: a scheduler and one server are started"
    assert re.fullmatch(rf"\d\d:\d\d:\d\d {said}\n", error), error


def test_a_script_that_just_ends_leaves_politely(cluster: EmbeddedCluster) -> None:
    code, _, error = run("client = psdist.Client(worker_id='careless'); psdist.Client(worker_id='second')", cluster)
    assert (code, error) == (0, "")
    code, out, error = run(
        "with psdist.Client() as c: print({m.member_id: m.state for m in c.status().members})", cluster
    )
    assert code == 0, error
    assert "'careless': 'left'" in out and "'second': 'left'" in out


def test_an_uncaught_error_in_a_world_of_one_ends_everything() -> None:
    code, _, error = run("psdist.init(); raise SystemExit(7)")
    assert code == 7, error


def test_ctrl_c_ends_a_wait_that_it_does_not_wake(cluster: EmbeddedCluster) -> None:
    """Check a signal just before the main thread waits: the system gives the signal to another thread."""
    code, out, error = run(
        """
import signal

client = psdist.Client()

def interrupt():
    while sys._current_frames()[threading.main_thread().ident].f_code.co_name != "_wait":
        pass
    threading.Event().wait(0.2)  # The main thread waits for its lock by then; otherwise the signal is seen immediately.
    signal.pthread_kill(threading.get_ident(), signal.SIGINT)

thread = threading.Thread(target=interrupt)
thread.start()
try:
    client.parameters("never")
except KeyboardInterrupt:
    print("interrupted")
thread.join()
client.close()
""",
        cluster,
    )
    assert (code, out) == (0, "interrupted\n"), error


def test_a_fork_is_refused(cluster: EmbeddedCluster) -> None:
    code, out, error = run(
        """
client = psdist.Client()
child = os.fork()
if child == 0:
    for use in (lambda: client.parameters("p"), psdist.Client):
        try:
            use()
        except psdist.errors.ClosedError as error:
            os.write(1, ("spawn" in str(error) and b"refused\\n") or b"?")
    os._exit(0)
os.waitpid(child, 0)
client.close()
""",
        cluster,
    )
    assert (code, out) == (0, "refused\nrefused\n"), error


def test_several_clients_and_threads(cluster: EmbeddedCluster) -> None:
    code, out, error = run(
        """
with psdist.Client() as first, psdist.Client() as second:
    handles = []
    def create(client):
        handles.append(client.parameters("threads", {"w": np.zeros(5, np.float32)}, psdist.optim.SGD(lr=1.0)))
    def train(handle):
        for _ in range(20):
            handle.push_pull({"w": -np.ones(5)})
    for work, items in ((create, (first, second)), (train, handles)):
        threads = [threading.Thread(target=work, args=(item,)) for item in items]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
    print(first.rank, second.rank, handles[0].pull()["w"].tolist())
""",
        cluster,
    )
    assert (code, out) == (0, "0 1 [20.0, 20.0, 20.0, 20.0, 20.0]\n"), error


def test_a_foreign_launcher_is_told_what_is_missing() -> None:
    code, _, error = run("psdist.init()", WORLD_SIZE="4", RANK="1")
    assert code == 1
    assert "WORLD_SIZE is 4, but no scheduler is named" in error and "psdist run" in error


def test_importing_psdist_loads_nothing_heavy() -> None:
    script = "import sys, psdist; print(sorted({'grpc', 'numpy', 'numba', 'asyncio'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"


def test_every_name_is_there() -> None:
    code, out, error = run(
        "print(*(n for n in psdist.__all__ if getattr(psdist, n) is None), hasattr(psdist, 'nonsense'))"
    )
    assert (code, out.strip()) == (0, "False"), error


#: Pushes compressed gradients that are large enough for compiled kernels, and prints a digest of the weights.
COMPRESSED = """
with psdist.Client(worker_id=sys.argv[1]) as client:
    size, sgd = 1 << 18, psdist.optim.SGD(lr=1.0)
    given = np.random.default_rng(0).standard_normal((2, size)).astype(np.float32)
    weights = client.parameters(sys.argv[1], {"w": np.zeros(size, np.float32)}, sgd, compression="int8")
    for gradient in given:
        weights.push_pull({"w": gradient})
    print(hashlib.sha256(weights.pull()["w"].tobytes()).hexdigest(), flush=True)
    if "wait" in sys.argv:
        threading.Event().wait()
"""


def test_a_compressed_run_does_not_wait_for_the_compiler(cluster: EmbeddedCluster, tmp_path: Path) -> None:
    """Check its first push, its end, and Ctrl-C."""
    empty = {"NUMBA_CACHE_DIR": str(tmp_path)}
    code, interpreted, error = run(COMPRESSED, cluster, "ends", **empty)
    assert code == 0 and all("compiling kernels for" in line for line in error.splitlines()), error
    with start(COMPRESSED, cluster, "interrupted", "wait", **empty) as process:
        assert process.stdout is not None and process.stdout.readline() == interpreted
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=240)
    assert process.returncode and error.rstrip().endswith("KeyboardInterrupt"), error
    # A script that waited would leave all kernels in the cache.
    assert len(list(tmp_path.rglob("*.nbi"))) < 10
    assert run(COMPRESSED, cluster, "compiled")[:2] == (0, interpreted)

"""Flags of other launchers that psdist lacks, with its own for the same purpose.

They are flags of torchrun, Accelerate, Horovod, Ray, mpirun and Slurm. A row is looked up only for an error: an unknown
flag gets its text as the suggestion. Underscores count as hyphens. ``as_arguments`` writes flags as arguments of
``psdist.launch``.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Final

_ALONE: Final = "psdist run trains on this machine alone. On several, start psdist-scheduler, psdist-server and"


def _rows(remedy: str, *flags: str) -> dict[str, str]:
    return dict.fromkeys(flags, remedy)


#: For programs that start workers.
_OF_WORKERS: Final = {
    **_rows(
        "use --nproc-per-node N for the number of workers on a machine",
        "-n", "-np", "--np", "--nprocs", "--num-proc", "--num-procs", "--num-processes", "--processes",
        "--workers", "--num-workers", "--nworkers", "--nworker", "--world-size", "--ntasks", "--ntasks-per-node",
        "--tasks-per-node", "--slots-per-host", "--num-cpus", "--procs-per-node",
    ),
    **_rows(
        "use --nproc-per-node N for the workers, and CUDA_VISIBLE_DEVICES for their devices",
        "-G", "-g", "--gpus", "--num-gpus", "--gpus-per-node", "--gpu-ids", "--gpu", "--devices", "--multi-gpu",
    ),
    **_rows("use --max-restarts N", "--restarts", "--retries", "--max-retries", "--reset-limit", "--num-restarts"),
    **_rows("use --log-dir DIR", "-o", "-e", "--output", "--error", "--output-filename", "--logs", "--log-path"),
    **_rows("use --log-level debug or info", "-v", "--verbose", "--debug"),
    **_rows("use --log-level error", "-q", "--quiet", "--silent"),
    **_rows("use --config FILE: psdist config template prints one", "--config-file", "--conf", "--yaml"),
    **_rows("set OMP_NUM_THREADS=N, which workers inherit", "-c", "--cpus-per-task", "--num-cpu-threads-per-process"),
    **_rows("leave it out: workers inherit the variables of this shell", "-x", "--env", "--export", "--runtime-env"),
    **_rows("start the program under numactl or taskset", "--bind-to", "--map-by", "--cpu-bind", "--numa-binding"),
    **_rows("set it in the script, as with torch.autocast", "--mixed-precision", "--precision", "--dynamo-backend"),
    **_rows("use --start-timeout SECONDS and --stop-timeout SECONDS", "--timeout"),
    "--shutdown-timeout": "use --stop-timeout SECONDS",
    "--use-agent-store": "leave it out: MASTER_ADDR and MASTER_PORT name a free port of rank 0's host",
    "--logs-specs": "use --log-dir DIR with --redirects and --tee",
    "--log-line-prefix-template": "use --role NAME for the prefix of lines",
    "--run-path": "name the script itself",
    "--event-log-handler": "leave it out: psdist status shows events",
    "--virtual-local-rank": "leave it out: LOCAL_RANK is set for each worker",
}  # fmt: skip
_RESUME: Final = (
    "--resume", "--resume-from", "--resume-from-checkpoint", "--continue", "--restore", "--auto-resume", "--requeue",
)  # fmt: skip
_STORAGE: Final = (
    "--checkpoint", "--checkpoint-dir", "--checkpoint-path", "--ckpt-dir", "--save-dir", "--output-dir", "--storage",
    "--snapshot-path", "--snapshot-dir", "--snapshots",
)  # fmt: skip
_NAME: Final = ("-J", "--name", "--job-name", "--job-id", "--run-name", "--experiment-name", "--run")
_SERVERS: Final = ("--servers", "--num-servers", "--server", "--ps", "--num-ps", "--nserver", "-s")
_RESUMES: Final = "give the run a --run-id NAME: with the same name it resumes from its newest snapshot"
_NODES: Final = ("-N", "--nodes", "--num-machines", "--num-nodes", "--min-np", "--max-np", "--min-nodes", "--max-nodes")
_HOSTS: Final = (
    "-H", "-w", "--host", "--hosts", "--hostfile", "--machinefile", "--hostlist", "--nodelist",
    "--host-discovery-script",
)  # fmt: skip
_ADDRESS: Final = ("--address", "--main-process-ip", "--main-process-port", "--rdzv-address", "--ray-address")
_RENDEZVOUS: Final = (
    "--nnodes", "--node-rank", "--machine-rank", "--rdzv-endpoint", "--rdzv-backend", "--rdzv-conf", "--master-addr",
    "--master-port", "--scheduler", "--local-addr",
)  # fmt: skip

#: For ``psdist run`` and ``psdist.launch``.
OF_RUN: Final = {
    **_OF_WORKERS,
    **_rows(_RESUMES, *_RESUME),
    **_rows("use --storage-path PATH for snapshots", *_STORAGE),
    **_rows("use --run-id NAME", *_NAME, "--rdzv-id"),
    **_rows("use --nservers N", *_SERVERS),
    **_rows(f"{_ALONE} psdist-worker --nnodes N", *_NODES),
    **_rows(f"{_ALONE} psdist-worker on each host (psdist generate slurm or k8s writes such a job)", *_HOSTS),
    **_rows(f"{_ALONE} psdist-worker --scheduler HOST:PORT", *_ADDRESS, *_RENDEZVOUS),
    "--standalone": "leave it out: psdist run always trains on this machine alone",
}
#: For ``psdist-worker``.
OF_WORKER: Final = {
    **_OF_WORKERS,
    **_rows(f"{_RESUMES}; psdist-scheduler --storage-path has them", *_RESUME),
    **_rows("pass --storage-path PATH to psdist-scheduler", "--storage-path", *_STORAGE),
    **_rows("use --run-id NAME", *_NAME),
    **_rows("start each psdist-server, and pass --min-servers N to psdist-scheduler", "--nservers", *_SERVERS),
    **_rows("use --nnodes N, or MIN:MAX", *_NODES),
    **_rows("start psdist-worker on each host, as by srun (psdist generate slurm or k8s writes such a job)", *_HOSTS),
    **_rows("use --scheduler HOST:PORT", *_ADDRESS),
    "--machine-rank": "use --node-rank N",
    "--rdzv-conf": "use --start-timeout SECONDS for the longest wait, and psdist-scheduler --join-grace for late nodes",
}
#: For ``psdist-scheduler``.
OF_SCHEDULER: Final = {
    **_rows(_RESUMES, *_RESUME),
    **_rows("use --storage-path PATH for snapshots", *_STORAGE),
    **_rows("use --run-id NAME", *_NAME),
    **_rows("use --min-servers N", "--nservers", *_SERVERS),
    **_rows(
        "use --min-workers N", "-n", "-np", "--np", "--workers", "--num-workers", "--nworkers", "--num-processes",
        "--nproc-per-node", "--world-size", "--ntasks", "--nnodes", *_NODES,
    ),
}  # fmt: skip

_AS_FLAG: Final = re.compile(r"--([a-z][a-z0-9-]*)(?: (\d[\w.:]*|[A-Z][A-Z:]*)\b)?")


def as_arguments(message: str, names: Collection[str]) -> str:
    """Return a message with the flags of these names, as attributes, written as arguments: ``nservers=2``."""

    def argument(match: re.Match[str]) -> str:
        name = match[1].replace("-", "_")
        if name not in names:
            return match[0]
        return f"{name}={match[2]}" if match[2] else name

    return _AS_FLAG.sub(argument, message)

"""The sbatch script, run by bash with recorders in place of Slurm's commands. ``test_slurm`` runs it in Slurm."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from psdist.cli.slurm import SlurmSettings, command_line, script
from psdist.errors import ConfigurationError
from psdist.security import tokens
from psdist.security.roles import Role
from psdist.settings.exit_codes import REACTIONS
from psdist.settings.flags import read
from tests.support.generated import parse

#: Writes its name and its arguments.
_RECORD = """#!/bin/bash
{ flock 9; printf '%s\\0' "${0##*/}" "$@" >&9; printf '\\1' >&9; } 9>> "$CALLS"
"""
_SCONTROL = """case $* in
"show hostnames n[1-3]") printf 'n1\\nn2\\nn3\\n';;
"show node "*) echo "   NodeAddr=${NETWORK:-10.0.0.}${3#n} NodeHostName=$3";;
"show job "*) echo " StartTime=x EndTime=$ENDS Deadline=N/A PreemptTime=$PREEMPTED";;
esac
"""
_SRUN = """for word; do [[ $word != psdist-* ]] || echo "$word $PSDIST_TOKEN" >> "$CALLS.tokens"; done
[[ $* == *psdist-worker* ]] || exit 0
[ -z "$TERM_IT" ] || { kill -TERM $PPID; sleep 0.5; }
exit ${STATUS:-0}
"""
#: Makes tokens. Most tests do not look at them, and need not start an interpreter three times.
_PSDIST = f"""[ -z "$TOKENS" ] || exec {sys.executable} -m psdist.cli.main "$@"
[[ $* != *--out* ]] || exec > "${{@: -1}}"
echo "token of $4"
"""
_SQUEUE = "printf '7.0 scheduler\\n7.2 workers\\n7.1 servers\\n'\n"


def settings(*argv: str) -> SlurmSettings:
    given = command_line().parse([*argv, "train.py", "a b", "$HOME"], {})
    return read(SlurmSettings, given, command=tuple(given.command))


class Job:
    """Run of a generated script. calls: the recorded command lines by program, in order."""

    def __init__(self, path: Path, *argv: str, **environ: str) -> None:
        (path / "scratch").mkdir(exist_ok=True)
        tools = path / "bin"
        tools.mkdir(exist_ok=True)
        bodies = {"scontrol": _SCONTROL, "srun": _SRUN, "squeue": _SQUEUE, "scancel": "", "psdist": _PSDIST}
        for name, body in bodies.items():
            (tools / name).write_text(_RECORD + body)
            (tools / name).chmod(0o755)
        text = script(settings(*argv))
        # The directory of this Python may have Slurm's real commands.
        (path / "job.sh").write_text(re.sub(r"(?m)^export PATH=.*", f"export PATH={tools}:$PATH", text))
        calls = path / "calls"
        calls.unlink(missing_ok=True)
        variables = {
            "CALLS": str(calls), "SLURM_SUBMIT_DIR": str(path), "SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "psdist",
            "SLURM_JOB_NODELIST": "n[1-3]", "TMPDIR": str(path / "scratch"), "TERM_IT": "", "TOKENS": "",
            "ENDS": "Unknown", "PREEMPTED": "None",
        }  # fmt: skip
        self.done = subprocess.run(
            ["bash", "job.sh"], cwd=path, env={**os.environ, **variables, **environ}, text=True, check=False,
            capture_output=True, timeout=60,
        )  # fmt: skip
        lines = [line.split("\0")[:-1] for line in calls.read_text().split("\1")[:-1]]
        self.calls = {name: [line[1:] for line in lines if line[0] == name] for name in bodies}

    def command(self, program: str) -> tuple[list[str], list[str]]:
        """Return the options of srun, and the command of psdist's ``program`` in it."""
        (line,) = [line for line in self.calls["srun"] if program in line]
        at = line.index(program)
        return line[:at], line[at:]

    @property
    def requeues(self) -> bool:
        return ["requeue", "7"] in self.calls["scontrol"]


def test_the_programs_understand_their_commands(tmp_path: Path) -> None:
    job = Job(tmp_path, "--nodes", "3", "--nproc-per-node", "4", "--nservers", "2", "--replicas", "2")
    assert job.done.returncode == 0, job.done.stderr
    srun, argv = job.command("psdist-scheduler")
    scheduler = parse(argv, {})
    assert (scheduler.min_workers, scheduler.min_servers, scheduler.replicas) == (12, 2, 2)
    assert scheduler.port == 20014 and scheduler.storage_path == f"{tmp_path}/psdist-runs/psdist-7"
    assert "--nodelist=n1" in srun and "--gres=none" in srun
    srun, argv = job.command("psdist-server")
    assert parse(argv, {}).host == "0.0.0.0" and "--nodelist=n1,n2" in srun and "--ntasks=2" in srun
    srun, argv = job.command("psdist-worker")
    worker = parse(argv, {})
    assert worker.command == ["train.py", "a b", "$HOME"] and worker.nproc_per_node == 4
    assert {"--nodelist=n1,n2,n3", "--ntasks=3", "--nodes=3"} <= set(srun)
    assert "psdist status --scheduler 10.0.0.1:20014" in job.done.stdout
    assert not job.requeues and not list((tmp_path / ".psdist").iterdir()), "the token is left behind"
    # Numbers of jobs begin again in another cluster, so a store that is left behind would be another run's.
    assert scheduler.store.startswith(str(tmp_path / "scratch")) and not list((tmp_path / "scratch").iterdir())


def test_each_step_has_a_token_of_its_role(tmp_path: Path) -> None:
    """The workers' step runs the user's script. The file is the user's, for commands, and gone after the job."""
    job = Job(tmp_path, TOKENS="1", PSDIST_TOKEN="of another run")
    assert job.done.returncode == 0, job.done
    found = dict(line.split() for line in (tmp_path / "calls.tokens").read_text().splitlines())
    roles = {name: claims and claims.role for name, token in found.items() for claims in [tokens.read(token)]}
    assert roles == {"psdist-scheduler": None, "psdist-server": Role.SERVER, "psdist-worker": Role.WORKER}
    assert found["psdist-worker"] == tokens.create(found["psdist-scheduler"], Role.WORKER)
    (line,) = [line for line in job.calls["psdist"] if "admin" in line]
    assert line[-2:] == ["--out", str(tmp_path / ".psdist/7/token")] and not Path(line[-1]).exists()


def test_nodes_may_have_ipv6_addresses(tmp_path: Path) -> None:
    job = Job(tmp_path, "--nodes", "2", NETWORK="fd00::")
    assert job.done.returncode == 0, job.done.stderr
    assert "psdist status --scheduler [fd00::1]:20014" in job.done.stdout
    for program in ("psdist-scheduler", "psdist-server"):
        assert parse(job.command(program)[1], {}).host == "::"


def test_services_may_have_nodes_of_their_own(tmp_path: Path) -> None:
    job = Job(tmp_path, "--nodes", "2", "--service-nodes", "1", "--nservers", "2", "--port", "7000", "--run-id", "r")
    assert "--nodelist=n1" in job.command("psdist-server")[0] and "--nodes=1" in job.command("psdist-server")[0]
    assert "--nodelist=n2,n3" in job.command("psdist-worker")[0]
    assert parse(job.command("psdist-scheduler")[1], {}).port == 7000
    assert "#SBATCH --nodes=3\n" in (tmp_path / "job.sh").read_text()


def test_services_outlive_the_workers_and_the_scheduler_saves(tmp_path: Path) -> None:
    job = Job(tmp_path, STATUS="143", TERM_IT="1")
    assert job.done.returncode == 143
    assert job.calls["scancel"] == [["--signal=TERM", "7.2"], ["--signal=INT", "7.0"], ["--signal=KILL", "7.1"]]
    assert not job.requeues, "somebody ended the run"


@pytest.mark.parametrize("environ", [{"ENDS": "2020-01-01T00:00:00"}, {"PREEMPTED": "2020-01-01T00:00:00"}])
def test_a_job_that_slurm_cuts_off_is_requeued(tmp_path: Path, environ: dict[str, str]) -> None:
    assert Job(tmp_path, STATUS="143", TERM_IT="1", **environ).requeues
    assert not Job(tmp_path, STATUS="0", TERM_IT="1", **environ).requeues, "the run was complete"


def test_a_job_is_requeued_after_the_statuses_of_the_table(tmp_path: Path) -> None:
    for status, reaction in REACTIONS["launcher"].items():
        # An agent has restarted a failed script itself, and signals are dealt with above.
        expected = reaction == "requeue" or (reaction == "restart" and 1 < status < 128)
        job = Job(tmp_path, STATUS=str(status))
        assert (job.requeues, job.done.returncode in (status, 0)) == (expected, True), status
    assert not Job(tmp_path, STATUS="70", SLURM_RESTART_COUNT="3").requeues, "the limit"


def test_services_are_restarted_after_the_statuses_of_the_table(tmp_path: Path) -> None:
    job = Job(tmp_path)
    for program, role in (("psdist-scheduler", "scheduler"), ("psdist-server", "server")):
        pattern = job.command(program)[0][-1]
        for status, reaction in REACTIONS[role].items():
            assert bool(re.fullmatch(pattern, str(status + 9 * (status == 128)))) == (reaction == "restart"), status


def test_the_loop_around_a_service(tmp_path: Path) -> None:
    line = Job(tmp_path).command("psdist-server")[0]
    loop, name = line[line.index("-c") + 1], line[-2]
    counted = "echo >> count; kill -TERM $$; [ $(wc -l < count) -ge 2 ] && exit 2; exit 69"
    done = subprocess.run(["bash", "-c", loop, name, "69", "bash", "-c", counted], cwd=tmp_path, check=False)
    assert done.returncode == 2 and len((tmp_path / "count").read_text()) == 2


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--replicas", "2", "--nservers", "1"], "--replicas 2"),
        (["--nodes", "1000", "--nproc-per-node", "4096"], "at most"),
    ],
)
def test_sizes_that_exclude_each_other_are_refused(argv: list[str], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        settings(*argv)


def test_values_that_sbatch_would_not_understand_are_refused() -> None:
    for argv in [
        ["--time", "soon"],
        ["--partition", "a b"],
        ["--account", "$(id)"],
        ["--name", "a b"],
        ["--run-id", "a/b"],
        ["--save-interval", "x"],
        ["--notice", "5"],
    ]:
        with pytest.raises(SystemExit) as ended:
            settings(*argv)
        assert ended.value.code == 2


def test_options_of_sbatch() -> None:
    text = script(settings("--time", "1-02:00", "--partition", "gpu", "--account", "a", "--gpus-per-node", "8"))
    assert {"time=1-02:00", "partition=gpu", "account=a", "gpus-per-node=8", "exclusive"} <= set(
        re.findall(r"(?m)^#SBATCH --(.*)$", text)
    )
    assert "cpus-per-task=16" in script(settings("--cpus-per-node", "16"))
    assert "exclusive" not in script(settings("--cpus-per-node", "16"))


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed (apt install shellcheck)")
def test_shellcheck_has_nothing_to_say(tmp_path: Path) -> None:
    (tmp_path / "job.sh").write_text(script(settings()))
    done = subprocess.run(
        ["shellcheck", "--severity=warning", "job.sh"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout

"""Flags, their environment twins and spellings; settings of programs and clients; what is wrong is said."""

from __future__ import annotations

import io
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from psdist.cli import run, worker
from psdist.errors import ConfigurationError, InsecureBindError, InvalidArgumentError, SchedulerUnreachableError
from psdist.launcher.agent import AgentSettings, nodes_text
from psdist.launcher.local import LocalSettings
from psdist.launcher.plan import SchedulerAddress, ServicesPlan, ServicesSettings
from psdist.launcher.process import ProcessSpec
from psdist.launcher.run_record import RunRegistry, records_directory
from psdist.settings import config
from psdist.settings.config import EtcdLocation, client_settings
from psdist.settings.flags import arguments, read
from psdist.settings.programs import ServerSettings, scheduler_settings, server_settings
from psdist.snapshots.policy import DEFAULT_POLICY, SavePolicy, parse_interval


def local(*argv: str) -> LocalSettings:
    """Return the settings of ``psdist run`` with these flags."""
    return read(LocalSettings, run.command_line().parse([*argv, "x.py"], {}))


def test_command_line_before_variable_before_torchruns_before_default() -> None:
    line = run.command_line()
    pet = {"PET_NPROC_PER_NODE": "3"}
    own = {**pet, "PSDIST_NPROC_PER_NODE": "4"}
    assert line.parse(["x.py"], {}).nproc_per_node == 1
    assert line.parse(["x.py"], pet).nproc_per_node == 3
    assert line.parse(["x.py"], own).nproc_per_node == 4
    assert line.parse(["--nproc-per-node", "5", "x.py"], own).nproc_per_node == 5


@pytest.mark.parametrize("spelling", ["--nproc-per-node=4", "--nproc_per_node=4"])
def test_everything_after_the_script_is_the_scripts(spelling: str) -> None:
    given = run.command_line().parse([spelling, "train.py", "--lr", "0.1", "--nproc-per-node", "9", "--", "-h"], {})
    assert given.nproc_per_node == 4
    assert given.command == ["train.py", "--lr", "0.1", "--nproc-per-node", "9", "--", "-h"]


def test_switches_take_no_value_and_short_flags_do() -> None:
    given = run.command_line().parse(["-m", "-r", "1:3", "-t3", "--log-dir", "logs", "pkg.mod", "-m"], {})
    assert given.module is True and given.no_python is False
    assert given.redirects == {1: 3} and given.tee == {None: 3}
    assert given.command == ["pkg.mod", "-m"]


def test_a_double_dash_ends_the_flags() -> None:
    assert run.command_line().parse(["--nservers", "1", "--", "-odd-name.py", "a"], {}).command == ["-odd-name.py", "a"]


def test_misplaced_flags_are_found() -> None:
    line = run.command_line()
    assert line.misplaced(["train.py", "--nproc_per_node=8", "--lr", "1"]) == ["--nproc_per_node"]
    assert line.misplaced(["train.py", "--lr", "1"]) == []


# --- psdist-worker ----------------------------------------------------------------------------------------------------


def agent(*argv: str, **environ: str) -> AgentSettings:
    return worker.agent_settings(worker.command_line().parse([*argv, "x.py"], environ), environ)


def test_ways_to_name_the_scheduler() -> None:
    def address(*argv: str, **environ: str) -> str:
        return worker.scheduler_of(worker.command_line().parse([*argv, "x.py"], environ), environ)[0]

    assert address("--scheduler", "h:1") == "h:1"
    assert address("--rdzv-endpoint", "h:2", PSDIST_SCHEDULER="other:1") == "h:2"
    assert address("--master-addr", "h", "--master-port", "3") == "h:3"
    assert address(PET_MASTER_ADDR="torch", PET_MASTER_PORT="29500", PSDIST_SCHEDULER="h:4") == "h:4"
    assert address(PET_MASTER_ADDR="torch", PET_MASTER_PORT="29500") == "torch:29500"
    assert address(DMLC_PS_ROOT_URI="h", DMLC_PS_ROOT_PORT="5") == "h:5"
    with pytest.raises(InvalidArgumentError, match="--scheduler"):
        address()
    with pytest.raises(InvalidArgumentError, match="--master-port"):
        address("--master-addr", "h")


TASK = {
    "PSDIST_SCHEDULER": "h:1", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3", "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}  # fmt: skip


def test_an_agent_takes_its_place_from_srun() -> None:
    found = agent("--nproc-per-node", "8", **TASK)
    assert (found.nodes, found.node_rank, found.first_local_rank, found.local_world_size) == ((4, 4), 3, 8, 16)
    found = agent("--nnodes", "4", "--node-rank", "3", **TASK)
    assert (found.nodes, found.node_rank, found.first_local_rank, found.local_world_size) == ((4, 4), 3, 1, 2)
    found = agent(**TASK, PET_NNODES="2:8")
    assert (found.nodes, found.node_rank, found.first_local_rank) == ((2, 8), None, 1)
    found = agent("--nnodes", "9", "--node-rank", "5", **TASK | {"SLURM_STEP_NUM_TASKS": "1"})
    assert (found.nodes, found.node_rank, found.first_local_rank) == ((9, 9), 5, 0)


def test_flags_that_contradict_srun_are_refused() -> None:
    for argv, environ, words in [
        (["--nnodes", "2"], {}, "--nnodes is 2, but SLURM_STEP_NUM_TASKS is 4: srun started 4 tasks"),
        ([], {"PET_NNODES": "2"}, "PET_NNODES is 2, but SLURM_STEP_NUM_TASKS is 4"),
        (["--nnodes", "5:6"], {}, "--nnodes is 5:6, but"),
        (["--node-rank", "1"], {}, "--node-rank is 1, but SLURM_PROCID is 3"),
        ([], {"PSDIST_NODE_RANK": "0"}, "PSDIST_NODE_RANK is 0, but SLURM_PROCID is 3"),
    ]:
        with pytest.raises(ConfigurationError, match=words) as caught:
            agent(*argv, **TASK | environ)
        assert "unset SLURM_STEP_NUM_TASKS" in str(caught.value)


def test_a_script_takes_its_place_from_srun() -> None:
    found = client_settings(TASK)
    assert (found.rank, found.world_size, found.local_rank) == (3, 4, 1)
    found = client_settings(TASK | {"RANK": "7", "WORLD_SIZE": "8"})  # A launcher within a task of srun.
    assert (found.rank, found.world_size, found.local_rank) == (7, 8, 0)
    with pytest.raises(ConfigurationError, match="WORLD_SIZE is 8, but SLURM_STEP_NUM_TASKS is 4"):
        client_settings(TASK | {"WORLD_SIZE": "8"})


def test_a_run_of_this_machine_is_found_by_its_id(tmp_path: Path) -> None:
    environ = {"XDG_RUNTIME_DIR": str(tmp_path)}
    RunRegistry(records_directory(environ)).claim("mine", tmp_path / "token", tmp_path / "psdist-mine")
    for flag in ("--run-id", "--rdzv-id"):
        found = agent(flag, "mine", **environ)
        assert (found.scheduler, found.scheduler_file) == ("", tmp_path / "psdist-mine" / "scheduler")
        assert (found.run_id, found.token_file) == ("mine", tmp_path / "token")
        assert (found.nodes_min, found.nodes_max) == (1, 4096)
    assert agent("--run-id", "mine", "--nnodes", "2", "--token-file", "t", **environ).token_file == Path("t")
    with pytest.raises(SchedulerUnreachableError, match=r"no run named other .*: choose one of mine by --run-id"):
        agent("--run-id", "other", **environ)
    named = agent("--run-id", "mine", "--scheduler", "h:1", **environ)
    assert (named.scheduler, named.scheduler_file, named.token_file, named.nodes_max) == ("h:1", None, None, 1)


def test_nodes_and_their_ranks() -> None:
    assert nodes_text("3") == (3, 3) and nodes_text("1:4") == (1, 4)
    for wrong in ("0", "4:1", "a", "1:", ""):
        with pytest.raises(ValueError):
            nodes_text(wrong)
    with pytest.raises(InvalidArgumentError, match="--node-rank 2"):
        agent("--scheduler", "h:1", "--nnodes", "2", "--node-rank", "2")
    with pytest.raises(InvalidArgumentError, match="1:2"):
        agent("--scheduler", "h:1", "--nnodes", "1:2", "--node-rank", "0")


def test_torchruns_habits_are_accepted_with_its_meaning() -> None:
    argv = [
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", "h:1", "--rdzv-id", "x", "--nnodes", "1:3"),
        *("--max-restarts", "3", "--nproc-per-node", "2"),
    ]
    for spelled in (argv, [word.replace("-", "_") if word.startswith("--") else word for word in argv]):
        words = ["--" + word[2:] if word.startswith("__") else word for word in spelled]
        options = agent(*words)
        assert (options.scheduler, options.run_id, options.nodes_min, options.nodes_max) == ("h:1", "x", 1, 3)
        assert (options.restarts_max, options.processes, options.command) == (3, 2, ("x.py",))
    given = worker.command_line().parse([*argv, "--standalone", "x.py"], {})
    assert given.standalone and given.command == ["x.py"]
    assert agent("--rdzv-backend=static", "--master-addr", "h", "--master-port", "3").scheduler == "h:3"


def test_values_that_look_like_flags_are_values() -> None:
    assert worker.command_line().unknown(["--role", "--odd", "--nnodes=--odd", "-r", "3"]) == ""


# --- settings ---------------------------------------------------------------------------------------------------------


def test_scheduler_settings() -> None:
    settings = scheduler_settings(["--min_workers=3", "--insecure", "--host", "0.0.0.0"], {"PSDIST_TOKEN": " t\n"})
    assert (settings.workers_min, settings.insecure, settings.credentials.token, settings.port) == (3, True, "t", 0)


def test_storage_and_policy_of_a_scheduler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = scheduler_settings([], {})
    assert (settings.storage, settings.policy, settings.fresh) == ("", SavePolicy(), False)
    argv = ["--storage-path", "runs/a", "--save-interval", "5m", "--keep-last", "2", "--keep-every", "1000", "--fresh"]
    settings = scheduler_settings([*argv, "--no-save-at-end"], {})
    assert settings.storage == str(tmp_path / "runs" / "a") and settings.fresh and not settings.storage_optional
    assert settings.policy == SavePolicy(seconds=300, keep_last=2, keep_every=1000, at_end=False)
    assert scheduler_settings(["--storage-path", "s3://bucket/runs"], {}).storage == "s3://bucket/runs"
    assert scheduler_settings(["--storage-path", "none"], {"PSDIST_STORAGE_PATH": "elsewhere"}).storage == ""
    assert scheduler_settings([], {"PSDIST_STORAGE_PATH": "/elsewhere"}).storage == "/elsewhere"


def test_where_there_is_a_storage_snapshots_are_taken_every_ten_minutes_by_default() -> None:
    for interval, policy in [
        (None, DEFAULT_POLICY),
        ("10m", DEFAULT_POLICY),
        ("0", SavePolicy()),
        ("7", SavePolicy(steps=7)),
        ("30s", SavePolicy(seconds=30)),
    ]:
        assert SavePolicy(seconds=600) == DEFAULT_POLICY
        given = [] if interval is None else ["--save-interval", interval]
        assert scheduler_settings(["--storage-path", "s3://bucket/a", *given], {}).policy == policy
        assert local(*given).policy == policy
        if interval in (None, "0"):
            assert scheduler_settings(given, {}).policy == SavePolicy()


def services(settings: ServicesSettings, directory: Path, **others: Any) -> ServicesPlan:
    link = SchedulerAddress(file=directory / "scheduler", run_id="digits")
    return ServicesPlan(settings, directory, link, lifeline=7, workers=3, **others)


def test_services_get_no_flags_without_effect(tmp_path: Path) -> None:
    """The variables of the hosts alone serve nothing."""
    plan = services(ServicesSettings(servers=1), tmp_path, metrics_host="::1", dashboard_host="::1")
    for spec in (plan.scheduler({}), plan.server(0, {})):
        assert not [word for word in spec.argv if word.endswith("-host") and word != "--host"], spec.argv
    spec = services(ServicesSettings(servers=1), tmp_path, dashboard=9, dashboard_host="::1").scheduler({})
    assert spec.descriptors == (9,)
    endpoint = scheduler_settings(flags_in(spec), {}).dashboard
    assert endpoint is not None and (endpoint.host, endpoint.descriptor) == ("::1", 9)
    keyed = local("--dashboard", "--dashboard-key-file", str(tmp_path / "key"))
    endpoint = scheduler_settings(flags_in(services(keyed, tmp_path, dashboard=9).scheduler({})), {}).dashboard
    assert endpoint is not None and endpoint.key_file == tmp_path / "key"
    assert "--dashboard-key-file" not in services(keyed, tmp_path).scheduler({}).argv


def test_a_free_port_makes_the_flag_for_its_host_effective(tmp_path: Path) -> None:
    free = local("--dashboard-port", "0", "--dashboard-host", "::1", "--metrics-port", "0", "--metrics-host", "::1")
    assert (free.dashboard_port, free.dashboard_host) == (free.metrics_port, free.metrics_host) == (0, "::1")
    alone = scheduler_settings(("--dashboard-port", "0", "--dashboard-host", "::1"), {}).dashboard
    assert alone is not None and (alone.port, alone.host) == (0, "::1")
    plan = services(ServicesSettings(servers=1), tmp_path, metrics_port=9000, metrics_host="::1")
    metrics = server_settings(flags_in(plan.server(0, {})), {}).metrics
    assert metrics is not None and (metrics.port, metrics.host) == (0, "::1")


@pytest.mark.parametrize("what", ["metrics", "dashboard"])
def test_psdist_run_shows_nothing_beyond_this_machine_unencrypted_unless_told_to(what: str, tmp_path: Path) -> None:
    flags = (f"--{what}-port", "0", f"--{what}-host", "0.0.0.0")
    with pytest.raises(InsecureBindError, match=rf"--{what}-host 0.0.0.0 .*--insecure.*psdist-scheduler with TLS"):
        local(*flags)
    assert local(*flags, "--insecure").insecure
    # So are its processes, workers included.
    plan = services(ServicesSettings(servers=1), tmp_path)
    open_plan = replace(plan, link=replace(plan.link, insecure=True))
    for spec in (open_plan.scheduler({}), open_plan.server(0, {})):
        assert "--insecure" in spec.argv and spec.environment["PSDIST_INSECURE"] == "1"
    assert "--insecure" not in plan.scheduler({}).argv


def flags_in(spec: ProcessSpec) -> tuple[str, ...]:
    return spec.argv[spec.argv.index("-m") + 2 :]


def test_a_plan_passes_its_settings_to_the_scheduler_unchanged(tmp_path: Path) -> None:
    for fresh, optional in [(False, True), (True, False)]:
        for interval, more, policy in [
            (None, {}, DEFAULT_POLICY),
            ((0, 0.0), {}, SavePolicy()),
            ((100, 0.0), {"keep_every": 1000}, SavePolicy(steps=100, keep_every=1000)),
            ((0, 0.25), {"keep_last": 1, "no_save_at_end": True}, SavePolicy(seconds=0.25, keep_last=1, at_end=False)),
        ]:
            settings = ServicesSettings(
                storage_path="s3://bucket/a", save_interval=interval, fresh=fresh, servers=2, replicas=2,
                failure_timeout_seconds=1 / 3, worker_timeout_seconds=86400.125, log_level="debug", **more,
            )  # fmt: skip
            plan = services(settings, tmp_path, storage_optional=optional)
            found = scheduler_settings(
                flags_in(plan.scheduler({}, port=29)), {"PSDIST_KEEP_LAST": "9", "PSDIST_REPLICAS": "1"}
            )
            assert (found.storage, found.policy, found.fresh) == ("s3://bucket/a", policy, fresh)
            assert found.storage_optional == optional
            assert (found.failure_timeout_seconds, found.worker_timeout_seconds) == (1 / 3, 86400.125)
            assert (found.workers_min, found.servers_min, found.replicas, found.port) == (3, 2, 2, 29)
            assert (found.run_id, found.log_level, found.lifeline_fd) == ("digits", "debug", 7)
            assert found.log_format == "console"
            assert (found.store_place, found.address_file) == (tmp_path / "scheduler.sqlite", tmp_path / "scheduler")
            assert (found.start_timeout_seconds, found.join_grace_seconds, found.idle_timeout_seconds) == (0, 0, 0)


def test_a_plan_passes_its_settings_to_the_servers_unchanged(tmp_path: Path) -> None:
    settings = ServicesSettings(devices=("cuda:0", "cpu"), kernel_threads=5, log_level="error", log_format="json")
    plan = services(settings, tmp_path, drain_timeout_seconds=0.0, start_timeout_seconds=2.5)
    found = [server_settings(flags_in(plan.server(number, {})), {}) for number in range(3)]
    assert [server.device for server in found] == ["cuda:0", "cpu", "cuda:0"]
    assert [server.server_id for server in found] == ["server-0", "server-1", "server-2"]
    assert (found[0].kernel_threads, found[0].log_level, found[0].log_format) == (5, "error", "json")
    assert found[0].drain_timeout_seconds == 0
    assert (found[0].start_timeout_seconds, found[0].scheduler_file) == (2.5, tmp_path / "scheduler")


def test_a_plan_refuses_a_setting_without_a_flag() -> None:
    with pytest.raises(TypeError, match="ServerSettings has no flags for colour"):
        arguments(ServerSettings, ServicesSettings(), colour="red")


def test_snapshots_of_a_run_lie_in_a_directory_of_its_own_by_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def storage(*argv: str) -> str | None:
        return local(*argv).resolved("digits").storage_path

    assert storage() == str(tmp_path / "psdist-runs" / "digits")
    assert storage("--storage-path", "here") == str(tmp_path / "here")
    assert storage("--storage-path", "none") == ""
    assert list(tmp_path.iterdir()) == []


def test_intervals() -> None:
    for text, steps, seconds, says in [
        ("100", 100, 0.0, "every 100 steps and at the end, the last 3 kept"),
        ("1step", 1, 0.0, "every step and at the end, the last 3 kept"),
        ("2500 steps", 2500, 0.0, "every 2,500 steps and at the end, the last 3 kept"),
        ("30s", 0, 30.0, "every 30 s and at the end, the last 3 kept"),
        ("1.5H", 0, 5400.0, "every 90 min and at the end, the last 3 kept"),
        ("5m", 0, 300.0, "every 5 min and at the end, the last 3 kept"),
        ("1d", 0, 86400.0, "every 24 h and at the end, the last 3 kept"),
        ("0", 0, 0.0, "at the end, the last 3 kept"),
    ]:
        assert parse_interval(text) == (steps, seconds)
        policy = SavePolicy(steps, seconds)
        assert policy.text == says
        assert parse_interval(policy.interval or "0") == (steps, seconds)


def test_wrong_intervals() -> None:
    for text in ["", "-1", "10 years", "1.5", "1.5steps", "nan", "s", "0.01s", "1e9", "400d", "9" * 40]:
        with pytest.raises(ConfigurationError):
            parse_interval(text)


def test_policies_out_of_range() -> None:
    for wrong in (
        {"steps": -1},
        {"keep_last": 0},
        {"keep_every": -5},
        {"seconds": math.nan},
        {"steps": 1, "seconds": 1.0},
    ):
        with pytest.raises(ConfigurationError):
            SavePolicy(**wrong)
    assert SavePolicy(keep_last=1, keep_every=50, at_end=False).text == (
        "on demand, the last one kept, and one of every 50 steps"
    )


def test_server_settings(tmp_path: Path) -> None:
    assert server_settings([], {"PSDIST_SCHEDULER": "h:1"}).scheduler_address() == "h:1"
    assert server_settings([], {"DMLC_PS_ROOT_URI": "h", "DMLC_PS_ROOT_PORT": "2"}).scheduler == "h:2"
    (tmp_path / "address").write_text("127.0.0.1:77\n")
    assert server_settings(["--scheduler-file", str(tmp_path / "address")], {}).scheduler_address() == "127.0.0.1:77"
    elsewhere = {"PSDIST_TOKEN": "t", "PSDIST_SCHEDULER": "h:1"}
    assert server_settings(["--insecure"], elsewhere).credentials.insecure
    assert not client_settings(elsewhere).credentials.insecure
    assert client_settings(elsewhere | {"PSDIST_INSECURE": "1"}).credentials.insecure


@pytest.mark.parametrize(
    ("argv", "environ", "device"),
    [
        ([], {}, "cpu"),
        ([], {"PSDIST_DEVICE": "cuda:1"}, "cuda:1"),
        (["--device", "CUDA"], {"PSDIST_DEVICE": "cuda:1"}, "cuda"),
    ],
)
def test_the_device_of_a_server(argv: list[str], environ: dict[str, str], device: str) -> None:
    assert server_settings(["--scheduler", "h:1", *argv], environ).device == device


def test_servers_take_devices_in_turn() -> None:
    line = run.command_line()
    given = line.parse(["--server-device", "cuda:0,CUDA:1", "--nservers", "3", "train.py"], {})
    assert read(LocalSettings, given).devices == ("cuda:0", "cuda:1")
    assert read(LocalSettings, line.parse(["train.py"], {"PSDIST_SERVER_DEVICE": "cuda"})).devices == ("cuda",)
    assert local().devices == ("cpu",)


def test_order_of_tokens(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("from-a\n")
    (tmp_path / "b").write_text("from-b\n")
    environ = {"PSDIST_TOKEN": "direct", "PSDIST_TOKEN_FILE": str(tmp_path / "a"), "PSDIST_SCHEDULER": "[::1]:1"}
    assert client_settings(environ, token="given").credentials.token == "given"
    assert client_settings(environ).credentials.token == "direct"
    assert server_settings(["--token-file", str(tmp_path / "b")], environ).credentials.token == "from-b"
    assert server_settings([], environ).credentials.token == "direct"
    del environ["PSDIST_TOKEN"]
    assert client_settings(environ).credentials.token == "from-a"
    assert client_settings({}).credentials.token == ""


def test_a_created_token_is_that_of_the_others_unless_one_was_given(tmp_path: Path) -> None:
    environ = {"PSDIST_TOKEN": "", "PSDIST_TOKEN_FILE": str(tmp_path / "token")}
    token = scheduler_settings(["--create-token"], environ).credentials.token
    assert server_settings(["--scheduler", "[::1]:1"], environ).credentials.token == token
    created = scheduler_settings(["--create-token", "--token-file", str(tmp_path / "other")], environ)
    assert created.credentials.token not in ("", token)
    given = {"PSDIST_TOKEN": "given", "PSDIST_TOKEN_FILE": str(tmp_path / "third")}
    assert scheduler_settings(["--create-token"], given).credentials.token == "given"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "token"]


def test_client_settings() -> None:
    lonely = client_settings({})
    assert (lonely.scheduler, lonely.rank, lonely.world_size, lonely.local_rank) == ("", None, 1, 0)
    environ = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "PSDIST_RUN_ID": "r", "PSDIST_WORKER_ID": "w"}
    settings = client_settings(environ)
    assert (settings.rank, settings.world_size, settings.local_rank) == (3, 4, 1)
    assert (settings.run_id, settings.worker_id) == ("r", "w")
    assert lonely.transport == "auto" and client_settings({"PSDIST_TRANSPORT": "shm"}).transport == "shm"
    assert client_settings({"PSDIST_TRANSPORT": "shm"}, transport="grpc").transport == "grpc"
    hosts = {"": "", "node-3": "node-3", "10.0.0.3": "10.0.0.3", "[fd00::3]": "fd00::3", "fd00::3": "fd00::3"}
    assert {given: client_settings({"PSDIST_LOCAL_ADDR": given}).host for given in hosts} == hosts
    old = {"DMLC_PS_ROOT_URI": "old", "DMLC_PS_ROOT_PORT": "1"}
    assert client_settings(old).scheduler == "old:1"
    assert client_settings({**old, "PSDIST_SCHEDULER": "h:1"}).scheduler == "h:1"
    assert client_settings(old, scheduler="h:2").scheduler == "h:2"


def test_wrong_client_settings() -> None:
    for environ, word in [
        ({"RANK": "one"}, "RANK='one'"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "WORLD_SIZE 2"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE='0'"),
        ({"PSDIST_SCHEDULER": "host"}, "HOST:PORT"),
        ({"PSDIST_TRANSPORT": "rdma"}, "PSDIST_TRANSPORT='rdma' is unknown: use one of auto, shm, tcp, grpc"),
        ({"PSDIST_LOCAL_ADDR": "node-3:80"}, "PSDIST_LOCAL_ADDR='node-3:80' is no host"),
        ({"PSDIST_TOKEN_FILE": "absent"}, "absent"),
        ({"PSDIST_RUN_ID": "a b"}, "'a b'"),
        ({"PSDIST_INSECURE": "perhaps"}, "PSDIST_INSECURE: 'perhaps' is neither 1 nor 0"),
    ]:
        with pytest.raises(InvalidArgumentError, match=word):
            client_settings(environ)


def test_a_scheduler_that_never_leaves_its_address(tmp_path: Path) -> None:
    with pytest.raises(SchedulerUnreachableError, match="address-file"):
        config.await_address(tmp_path / "a", 0.0)


def test_a_store_in_etcd_of_this_machine_or_a_private_network() -> None:
    for given in (("--store", "etcd://127.0.0.1:2379/p"), ("--store", "etcd://10.0.0.1:2379/p", "--insecure")):
        assert isinstance(scheduler_settings(given, {"PSDIST_TOKEN": "x" * 40}).store_place, EtcdLocation)


@pytest.mark.parametrize("plain", ["", "1"])
def test_a_wrong_flag_is_red_on_a_terminal(plain: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Terminal()
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setenv("NO_COLOR", plain)
    with pytest.raises(SystemExit):
        run.command_line().parse(["--no-such-flag"], {})
    first, second = screen.getvalue().splitlines()
    assert first.startswith("\x1b[31mpsdist run: error: ") == (not plain) and "\x1b" not in second

"""Explanations of made runs: each bottleneck, its evidence, the predicted gain, and reasons to wait."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest

from psdist.cli import explain as command
from psdist.cli.target import SchedulerChoice
from psdist.errors import WaitTimeoutError
from psdist.monitoring.explanation import Explanation, Pending, _remaining_link, explain
from psdist.security.tls import Credentials
from tests.support.run_samples import samples, status


def period(
    step: float, compute: float, *, push: float = 0.0, pull: float = 0.0, moved: float = 4e6, transport: str = "tcp",
    name: str = "model",
) -> dict[str, Any]:  # fmt: skip
    """A second of a worker whose steps take ``step`` seconds and move ``moved`` bytes in each direction."""
    seconds = {"compute": compute, "push": push, "wait": step - compute - push - pull, "pull": pull}
    phases = {phase: one / step for phase, one in seconds.items()}
    traffic = {
        "transport": transport,
        "push_codec": "float32",
        "pull_codec": "float32",
        "push_bytes_per_second": moved / step,
        "pull_bytes_per_second": moved / step,
    }
    return {"seconds": 1.0, "phases": phases, "steps_per_second": {name: 1 / step}, "traffic": [traffic]}


def explained(state: Any, found: list[dict[str, Any]]) -> Explanation:
    result = explain(state, found, 10.0)
    assert isinstance(result, Explanation), result
    assert sum(result.parts.values()) == pytest.approx(result.step_seconds)
    return result


def test_a_slow_link_is_named_and_a_codec_would_shorten_its_part() -> None:
    result = explained(status(2), samples(period(0.5, 0.1), period(0.5, 0.1)))
    assert (result.bottleneck, result.culprit) == ("link", "tcp")
    assert result.parts["link"] == pytest.approx(0.4)
    assert "compression=Int8() and pull_compression=Int8()" in result.change.text
    assert result.change.speedup == pytest.approx(0.5 / (0.1 + 0.4 * (1 + 4 / 256) / 4))
    first, second, third = result.sentences
    assert first == "Steps of 'model' take 500 ms, bounded by the link (tcp): 80% of the step."
    assert "a worker sends 4 MB and receives 4 MB a step over tcp" in second
    assert "2.5 times as many steps" in third


def test_a_link_with_int8_gets_a_sparse_codec_and_one_with_that_gets_fewer_pushes() -> None:
    result = explained(status(1), samples(period(0.5, 0.1, moved=1e6)))
    assert "compression=TopK(0.01)" in result.change.text
    large = status(1)
    large["parameters"][0]["elements"] = 100_000_000
    result = explained(large, samples(period(0.5, 0.1, moved=8e6)))
    assert (result.bottleneck, result.change.setting) == ("link", "batches_per_push")


def test_a_codec_shortens_sending_and_the_receiving_that_it_does_not_hide() -> None:
    for sending, push, pull, remaining in [
        (0.0, 1.0, 1.0, 0.25),
        (0.7, 1.0, 1.0, 0.25),
        (1.0, 1.0, 1.0, 0.25),
        (0.0, 0.25, 1.0, 0.4),  # Buffers took the gradient: one direction after the other.
        (0.8, 1.0, 0.25, 0.4),
        (1.0, 1.0, 0.25, 0.25),  # All answers arrive while the gradient is sent.
        (1.0, 0.25, 1.0, 1.0),  # Sending takes all the time, and is not shortened.
    ]:
        assert _remaining_link(2.0, 2 * sending, push, pull, 0.25) == pytest.approx(remaining)


def test_only_the_direction_without_a_codec_is_proposed() -> None:
    worker = period(0.5, 0.1)
    worker["traffic"][0]["push_bytes_per_second"] = 1e6 / 0.5
    result = explained(status(1), samples(worker))
    assert result.change.text == "pull_compression=Int8()"


def idle(cores: float) -> list[dict[str, Any]]:
    """Samples with a busy server on a host with so many idle cores."""
    found = samples(period(0.5, 0.1), period(0.5, 0.1), busy=0.7)
    for sample in found:
        sample["servers"]["server-0"]["idle_cores"] = cores
    return found


def test_a_busy_server_is_named_with_its_threads() -> None:
    result = explained(status(2), samples(period(0.5, 0.1), period(0.5, 0.1), busy=0.7))
    assert (result.bottleneck, result.culprit) == ("server kernel", "server-0")
    assert result.change.setting == "kernel_threads"
    assert result.change.speedup == pytest.approx(0.5 / (0.5 - 0.35 * 0.75))
    result = explained(status(2), idle(1.5))
    assert result.change.speedup == pytest.approx(0.5 / (0.5 - 0.35 * (1 - 1 / 2.5)))
    result = explained(status(2), idle(0.1))  # A second thread would only take the first one's time.
    assert (result.change.setting, result.change.speedup) == ("servers", pytest.approx(0.5 / (0.5 - 0.35 / 2)))
    result = explained(status(2, threads=4), samples(period(0.5, 0.1), period(0.5, 0.1), busy=2.8))
    assert (result.change.setting, "scale servers 2" in result.change.text) == ("servers", True)
    assert result.change.speedup == pytest.approx(0.5 / (0.5 - 0.35 / 2))


def test_a_straggler_is_named_and_backup_workers_would_not_wait_for_it() -> None:
    slow = period(0.5, 0.45)
    result = explained(status(3), samples(period(0.5, 0.1), slow, period(0.5, 0.1)))
    assert (result.bottleneck, result.culprit) == ("straggler", "worker-1")
    assert "backup_workers=1" in result.change.text
    assert result.change.speedup == pytest.approx(0.5 / 0.15)
    # A worker that nobody waits for bounds nothing.
    result = explained(status(3, backup=1), samples(period(0.5, 0.1), slow, period(0.5, 0.1)))
    assert result.bottleneck == "link"


def test_a_slow_sender_is_the_straggler_though_the_others_receive_as_long() -> None:
    for workers in [2, 3, 5]:
        for faster in [-0.001, 0.001]:
            slow, other = period(0.5, 0.1, push=0.349, pull=0.05), period(0.5, 0.1, push=0.05, pull=0.349 + faster)
            result = explained(status(workers), samples(*[other] * (workers - 1), slow))
            assert (result.bottleneck, result.culprit) == ("straggler", f"worker-{workers - 1}")
            assert result.parts["straggler"] == pytest.approx(0.299)
            evidence = "has a slow link: it computes and sends for 449 ms, the others for 150 ms"
            assert f"worker-{workers - 1} {evidence}" in result.evidence
            # The sender is the one that a backup worker replaces.
            result = explained(status(workers, backup=1), samples(*[other] * (workers - 1), slow))
            assert result.parts["straggler"] == 0


@pytest.mark.parametrize(("consistency", "gain"), [("bsp", 0.5 / 0.2), ("ssp", (2 / 0.2 + 1 / 0.5) * 0.5 / 3)])
def test_a_slow_receiver_is_a_straggler_with_its_evidence_and_gain(consistency: str, gain: float) -> None:
    slow, other = period(0.5, 0.1, push=0.05, pull=0.35), period(0.5, 0.1, push=0.05, pull=0.05)
    result = explained(status(3, consistency=consistency), samples(other, slow, other))
    assert (result.bottleneck, result.culprit) == ("straggler", "worker-1")
    evidence = "has a slow link: it computes, sends and receives for 500 ms, the others for 200 ms"
    assert f"worker-1 {evidence}" in result.evidence
    assert result.change.speedup == pytest.approx(gain)


def test_stale_workers_wait_for_the_slowest_and_asynchronous_ones_do_not() -> None:
    found = samples(period(0.5, 0.1), period(0.5, 0.45), period(0.5, 0.1))
    result = explained(status(3, consistency="ssp"), found)
    assert (result.bottleneck, result.change.setting) == ("straggler", "consistency")
    assert result.change.speedup == pytest.approx((2 / 0.15 + 1 / 0.5) * 0.5 / 3)
    alone = samples(period(0.2, 0.15), period(0.5, 0.45), period(0.2, 0.15))
    result = explained(status(3, consistency="asp"), alone)
    assert (result.bottleneck, result.parts["straggler"]) == ("script", 0.0)


def test_a_script_that_computes_needs_more_workers() -> None:
    result = explained(status(2), samples(period(0.5, 0.4), period(0.5, 0.4)))
    assert (result.bottleneck, result.change.unit) == ("script", "batches")
    assert result.change.speedup == pytest.approx(1.5)
    assert "scale workers 3" in result.change.text


def test_small_payloads_make_it_latency() -> None:
    worker = period(0.01, 0.001, moved=4e3, transport="grpc")
    result = explained(status(1), samples(worker))
    assert (result.bottleneck, result.culprit) == ("latency", "grpc")
    assert result.change.speedup == pytest.approx(0.01 / (0.001 + 0.009 / 4))
    assert "PSDIST_TRANSPORT" in result.change.text


def test_over_shared_memory_only_the_copying_of_gradients_is_the_links() -> None:
    result = explained(status(1), samples(period(0.5, 0.1, push=0.3, transport="shm")))
    assert (result.bottleneck, result.change.setting) == ("link", "gradient_buffers")
    assert result.change.speedup == pytest.approx(0.5 / 0.2)
    result = explained(status(1), samples(period(0.5, 0.1, transport="shm")))
    assert result.bottleneck == "latency"


def test_of_several_parameter_sets_the_largest_that_is_pushed_counts_steps() -> None:
    state = status(1)
    small = {**state["parameters"][0], "name": "small", "elements": 10}
    unused = {**state["parameters"][0], "name": "unused", "elements": 1 << 40}
    state["parameters"] += [small, unused]
    worker = period(0.5, 0.4)
    worker["steps_per_second"]["small"] = 20.0
    assert explained(state, samples(worker)).parameters == "model"


def test_long_steps_lengthen_the_window() -> None:
    result = explained(status(1), samples(period(20.0, 15.0), count=110))
    assert result.step_seconds == pytest.approx(20.0)
    assert result.seconds == pytest.approx(100.0)


def test_reasons_to_wait() -> None:
    change: Any
    for change, reason in [
        ({"members": []}, "the run has no live worker"),
        ({"parameters": []}, "no worker has created a parameter set yet"),
        ({"samples": []}, "has reported 0 of 10 s of its training"),
        ({"samples": samples(period(0.5, 0.1), count=4)}, "worker-0 has reported 4 of 10 s of its training"),
        ({"samples": samples(period(20.0, 0.1))}, "worker-0 has completed 1 of 5 steps in 12 s"),
        (
            {"samples": samples(period(20.0, 0.1)), "waiting_for": ["for worker-1 to push"]},
            "worker-0 has completed 1 of 5 steps in 12 s; the run waits for worker-1 to push",
        ),
    ]:
        found = change.pop("samples", samples(period(0.5, 0.1)))
        result = explain(status(1) | change, found, 10.0)
        assert isinstance(result, Pending) and reason in result.reason


def test_a_run_without_server_reports_is_explained_without_its_kernels() -> None:
    found = [sample | {"servers": {}} for sample in samples(period(0.5, 0.1))]
    assert "kernel" not in explained(status(1), found).evidence


def test_the_command_gives_the_reason_when_its_wait_ends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = SchedulerChoice("127.0.0.1:1", Credentials(), "test")
    monkeypatch.setattr(command, "find_target", lambda given, environ: target)
    answers: list[Any] = [Pending("the run has no live worker")]
    monkeypatch.setattr(command, "_explain", lambda *_: answers[0])
    given = Namespace(format="json", timeout=1.0, seconds=10.0, wait=0.0)
    with pytest.raises(WaitTimeoutError, match=r"within 0 s \(--wait\): the run has no live worker"):
        command.run(given, {})
    answers[0] = explain(status(1), samples(period(0.5, 0.4)), 10.0)
    assert command.run(given, {}) == 0
    assert '"bottleneck": "script"' in capsys.readouterr().out


def test_texts_of_members_do_not_control_the_terminal() -> None:
    with pytest.raises(WaitTimeoutError, match=r"the run waits for \?\[31mred"):
        command._wait(lambda: Pending("the run waits for \x1b[31mred"), 0.0)

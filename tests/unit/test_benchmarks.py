"""Pure parts of the benchmarks: figures, direction of ratios, the page, and the lower bound's arithmetic."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from benchmarks import figures, growth, growth_page, network, plan, plot, report
from benchmarks.contenders import ContenderError
from benchmarks.peers import kernel
from benchmarks.psdist_step import BenchSettings
from benchmarks.shaped_hosts import Counters
from psdist.errors import InvalidArgumentError

# --- figures ----------------------------------------------------------------------------------------------------------


def test_a_ratio_above_one_says_that_psdist_is_faster() -> None:
    result = figures.result({"psdist": [[0.1, 0.1]], "gloo": [[0.3, 0.3]]})
    assert result["psdist_ms"] == pytest.approx(100)
    assert result["peers"]["gloo"]["ms"] == pytest.approx(300)
    assert result["peers"]["gloo"]["ratio"] == pytest.approx(3)
    assert json.loads(json.dumps(result)) == result


def test_ratios_are_of_rounds_so_that_a_slow_minute_cancels_out() -> None:
    own, peer = [[0.1], [1.0], [0.1]], [[0.2], [2.0], [0.2]]
    one = figures.comparison(peer, own)
    assert one["ratio"] == pytest.approx(2)
    assert one["spread"] == pytest.approx([2, 2])
    assert one["steps"] == 3
    with pytest.raises(ValueError):
        figures.ratios(peer, own[:2])


def test_percentiles() -> None:
    values = [float(number) for number in range(101)]
    assert [figures.percentile(values[::-1], percent) for percent in (0, 50, 99, 100)] == [0, 50, 99, 100]
    assert figures.percentile([1.0, 2.0], 25) == 1.25
    assert figures.percentile([3.0], 99.9) == 3
    assert figures.spread(values) == [10, 90]
    points = figures.latencies([0.001] * 99 + [0.1])
    assert points["p50"] == pytest.approx(1) and points["p99.9"] > 80 and points["calls"] == 100


# --- the lower bound --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_the_lower_bound_computes_adam_of_the_mean(workers: int) -> None:
    rng = np.random.default_rng(workers)
    size = 5000
    bound = kernel.LowerBound(size, workers)
    for gradient in bound.gradients:
        gradient[...] = rng.standard_normal(size)
    weights, mean, square = bound.weights.copy(), bound.mean.copy(), bound.square.copy()
    for step in (1, 2, 3):
        bound.step()
        kernel.reference(bound.gradients, weights, mean, square, step, 0, size)
    for got, wanted in ((bound.weights, weights), (bound.mean, mean), (bound.square, square)):
        np.testing.assert_allclose(got, wanted, rtol=2e-4, atol=1e-7)
    assert not np.allclose(weights, 1.0)


# --- the measured case ------------------------------------------------------------------------------------------------


def test_layers_hold_all_parameters() -> None:
    layers = BenchSettings(params=(2 << 20) + 5).layers()
    assert list(layers.values()) == [1 << 20, 1 << 20, 5]
    assert BenchSettings(params=1).layers() == {"layer.00000": 1}


def test_settings_that_are_not_possible() -> None:
    for wrong in [{"params": 0}, {"consistency": "x"}, {"optimizer": "x"}, {"wire_dtype": "int8"}]:
        with pytest.raises(InvalidArgumentError, match=str(next(iter(wrong)))):
            BenchSettings(**wrong)


# --- the page ---------------------------------------------------------------------------------------------------------

FACTS = {
    "processor": "P", "cores": 2, "memory_gigabytes": 8, "copy_gigabytes_per_second": {"1": 10.0, "2": 20.0},
    "system": "Linux", "versions": {"python": "3.11"},
}  # fmt: skip


def _step(ratio: float, peer: str = "gloo") -> dict[str, Any]:
    settings = {"workers": 2, "transport": "shm", "wire_dtype": "float32", "consistency": "bsp", "copy": False}
    rounds = {"psdist": [[0.1]], peer: [[0.1 * ratio]]}
    return figures.result(rounds) | {"settings": settings}


def test_the_page_says_which_goals_are_met_and_which_were_not_measured() -> None:
    text = report.page({"shm-2": _step(3.0), "shm-4": _step(3.0)}, FACTS, "")
    lines = {line.split("|")[1].strip(): line for line in text.splitlines() if line.startswith("| ")}
    assert "| 3.00x (3.00 to 3.00): 100.0 against 300.0 ms | yes |" in lines[plan.GOALS[0].case]
    assert "| **no** |" in lines[plan.GOALS[1].case]
    assert "| not measured |" in lines[plan.GOALS[2].case]
    missing = _step(3.0) | {"peers": {"ray": {"missing": "not installed"}}}
    assert "ray: not installed" in report.page({"shm-2": missing}, FACTS, "")


def test_goals_that_are_upper_limits_turn_the_ratio_around() -> None:
    (goal,) = [goal for goal in plan.GOALS if "raw echo's" in goal.case and "1.25" in goal.target]
    measured = goal.judge(_step(0.9, "echo"))
    assert measured.text.startswith("1.11x") and measured.met
    assert not goal.judge(_step(0.7, "echo")).met


def test_every_goal_names_a_run() -> None:
    assert {goal.run for goal in plan.GOALS} <= {one.name for one in plan.RUNS}


# --- between hosts ----------------------------------------------------------------------------------------------------


class FakeRunning:
    """Contender that started no process."""

    name = "psdist"

    def __init__(self, *transports: dict[str, str]) -> None:
        self.facts = [{"transports": one} for one in transports]
        self.turned = 0

    def turn(self, steps: int) -> list[list[float]]:
        self.turned += 1
        return [[1.0] * steps]

    def processor_seconds(self) -> float:
        return 0.5 * self.turned


class FakeHosts:
    """Hosts whose links report more bytes with each call."""

    hosts = 2

    def __init__(self) -> None:
        self.looks = 0

    def counters(self, host: int) -> Counters:
        self.looks += 1
        return Counters(sent=1000 * self.looks, received=10 * self.looks if host else 0)


def test_bytes_are_those_of_the_busiest_host_in_its_own_turns() -> None:
    counted = network.Counted(FakeRunning(), FakeHosts())
    assert counted.turn(3) == [[1.0] * 3]
    assert counted.bytes_per_step() == {"sent": pytest.approx(2000 / 3), "received": pytest.approx(20 / 3)}
    counted.turn(1)
    assert counted.bytes_per_step() == {"sent": pytest.approx(1000), "received": pytest.approx(10)}
    assert counted.processor_ms_per_step() == pytest.approx(250)


def test_a_variant_whose_servers_were_reached_in_another_way_is_no_result() -> None:
    right = {"server-0": "shm", "server-1": "tcp: no socket"}
    network.check_transports(FakeRunning(right, right))
    for wrong in ({"server-0": "shm", "server-1": "grpc"}, {"server-0": "tcp", "server-1": "tcp"}):
        with pytest.raises(ContenderError, match="servers were reached by"):
            network.check_transports(FakeRunning(right, wrong))


def _between(ratio: float) -> dict[str, Any]:
    result = figures.result({"psdist": [[0.1]], "ddp": [[0.1 * ratio]]})
    for one in (result["psdist"], *result["peers"].values()):
        one |= {"bytes_per_step": {"sent": 2e6, "received": 1e6}, "link_share": 0.5, "processor_ms": 7.0}
    return {"rates": {"1gbit": result | {"settings": {"params": 25_000_000}}}}


def test_the_page_has_a_row_for_each_contender_between_hosts() -> None:
    text = report.page({"network": _between(0.96)}, FACTS, "")
    assert "\n1gbit, 25 M parameters:\n" in text and "| ddp | 96 | 0.96x | 2.0 | 1.0 | 50% |" in text
    (goal,) = [goal for goal in plan.GOALS if goal.run == "network"]
    assert goal.judge(_between(0.96)).met and not goal.judge(_between(0.94)).met
    with pytest.raises(KeyError):
        goal.judge({"rates": {}})


# --- growth -----------------------------------------------------------------------------------------------------------


def test_curves_change_one_setting_each() -> None:
    for name, curve in growth.CURVES.items():
        low, high = (curve.settings(value, 20_000_000) for value in (curve.values[0], curve.values[-1]))
        changed = [key for key in vars(low) if getattr(low, key) != getattr(high, key)]
        assert len(changed) == 1, name
    settings = growth.CURVES["tensors"].settings(7, 20)
    assert len(BenchSettings(params=20, layer_elements=settings.layer_elements).layers()) == 7


def test_the_page_of_growth_keeps_its_notes_and_has_a_picture_of_each_curve(tmp_path: Path) -> None:
    points = {"shm": {"1": {"ms": 5.0, "low": 4.0, "high": 6.0}, "2": {"ms": 20.0, "low": 19.0, "high": 21.0}}}
    results = {"machine": FACTS, "servers": {"label": "servers", "points": points | {"tcp": {"2": points["shm"]["2"]}}}}
    path = tmp_path / "growth.md"
    path.write_text("old\n\n## Notes\n\nBy hand.\n")
    growth_page.write(results, path)
    text = path.read_text()
    assert "| 1 | 5.00 (4.00 to 6.00) |  |" in text and "| 2 | 20 (19 to 21) | 20 (19 to 21) |" in text
    assert text.endswith("## Notes\n\nBy hand.\n") and "old" not in text
    assert (tmp_path / "growth-servers.svg").read_text().startswith("<svg ")
    assert "growth-servers.svg" in text and "Workers" not in text


# --- plots ------------------------------------------------------------------------------------------------------------


def test_what_grows_in_proportion_is_a_straight_line_upwards() -> None:
    picture = ElementTree.fromstring(plot.svg("a < b", "x", "y", {"one": [(1, 2), (10, 20), (100, 200)]}))
    (line,) = (one for one in picture if one.tag.endswith("polyline"))
    (x1, y1), (x2, y2), (x3, y3) = (map(float, place.split(",")) for place in line.attrib["points"].split())
    assert x1 < x2 < x3 and y1 > y2 > y3
    assert (y2 - y1) / (x2 - x1) == pytest.approx((y3 - y2) / (x3 - x2), rel=0.01)
    assert "a < b" in [one.text for one in picture]
    for wrong in ({}, {"one": [(0.0, 1.0)]}):
        with pytest.raises(ValueError, match="positive"):
            plot.svg("", "", "", wrong)

"""Metrics of the catalog, and their exposition, which the official parser of the format reads back."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from psdist.monitoring.exporter import METRICS, SECONDS_BOUNDS, Histogram, Readings


def test_names_follow_the_conventions() -> None:
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    for metric in METRICS:
        assert re.fullmatch(r"psdist_[a-z_]+", metric.name) and metric.help.endswith(".")
        assert metric.name.endswith("_total") == (metric.kind == "counter")
        assert (metric.bounds != ()) == (metric.kind == "histogram") and list(metric.bounds) == sorted(metric.bounds)
        # Labels of the page /targets are added to those of each metric.
        assert not {"run", "member", "member_role", "job", "instance", "le"} & set(metric.labels)


@given(st.lists(st.floats(0, 100)))
def test_a_histogram_counts_each_value_once(values: list[float]) -> None:
    histogram = Histogram(SECONDS_BOUNDS)
    for value in values:
        histogram.observe(value)
    for bound, count in zip(SECONDS_BOUNDS, histogram.buckets, strict=False):
        assert count == (str(bound), sum(value <= bound for value in values))
    assert histogram.buckets[-1] == ("+Inf", len(values)) and histogram.total == pytest.approx(sum(values))


def test_what_is_added_is_read_back() -> None:
    readings, histogram = Readings(), Histogram(SECONDS_BOUNDS)
    histogram.observe(0.2)
    readings.add("psdist_members", 3, role="worker", state="live")
    readings.add("psdist_members", 1, role="worker", state='a "quoted"\nname')
    readings.add("psdist_rollbacks_total", 2)
    readings.add_histogram("psdist_step_seconds", histogram, phase="wait")
    text = readings.exposition().decode()
    found = {family.name: family for family in text_string_to_metric_families(text)}
    live, odd = found["psdist_members"].samples
    assert (live.value, live.labels) == (3, {"role": "worker", "state": "live"})
    assert odd.labels["state"] == 'a "quoted"\nname'
    assert found["psdist_rollbacks"].type == "counter" and found["psdist_rollbacks"].samples[0].value == 2
    assert found["psdist_step_seconds"].type == "histogram" and "process_resident_memory_bytes" in found
    assert not any(name.endswith("_created") for name in found)


def test_only_metrics_of_the_catalog_are_accepted() -> None:
    with pytest.raises(KeyError):
        Readings().add("psdist_unknown", 1)
    with pytest.raises(ValueError, match="has the labels"):
        Readings().add("psdist_members", 1, role="worker")

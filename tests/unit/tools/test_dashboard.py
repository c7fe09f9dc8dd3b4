# SPDX-License-Identifier: Apache-2.0
"""The dashboard's file is what its panels give, its queries are well formed, and curves are what PromQL would give."""

from __future__ import annotations

import json
import re

import pytest

from tools import dashboard
from tools.dashboard import Curve, points


def test_the_file_is_what_the_panels_give():
    assert dashboard.DASHBOARD.read_text() == dashboard.text(), "run python -m tools.dashboard write"


def test_it_is_what_grafana_imports():
    board = json.loads(dashboard.text())
    assert {panel["id"] for panel in board["panels"]} == set(range(1, len(dashboard.PANELS) + 1))
    places = [tuple(panel["gridPos"].values()) for panel in board["panels"]]
    assert len(set(places)) == len(places)
    for panel in board["panels"]:
        assert panel["description"] and panel["targets"]
        for target in panel["targets"]:
            assert target["expr"].count("(") == target["expr"].count(")")
            assert re.search(r'\{model_name="\$model_name"\}', target["expr"])


@pytest.mark.parametrize(
    ("curve", "query"),
    [
        (Curve("a", "x_total"), 'sum (rate(x_total{model_name="$model_name"}[$__rate_interval]))'),
        (Curve("a", "x"), 'sum (x{model_name="$model_name"})'),
        (Curve("a", "x_total", by="r"), 'sum by (r) (rate(x_total{model_name="$model_name"}[$__rate_interval]))'),
    ],
)
def test_a_counter_is_asked_for_by_rate_and_a_gauge_as_it_is(curve, query):
    assert curve.promql() == query


SAMPLES = [
    {"at": 0.0, "values": {"x_total": {"a": 1.0, "b": 0.0}, "y_total": {"": 2.0}, "g": {"": 5.0}}},
    {"at": 2.0, "values": {"x_total": {"a": 5.0, "b": 2.0}, "y_total": {"": 6.0}, "g": {"": 7.0}}},
    {"at": 3.0, "values": {"x_total": {"a": 5.0, "b": 2.0}, "y_total": {"": 6.0}, "g": {"": 6.0}}},
]


@pytest.mark.parametrize(
    ("curve", "label", "expected"),
    [
        (Curve("", "x_total"), "", ([2.0, 3.0], [3.0, 0.0])),
        (Curve("", "x_total", by="r"), "b", ([2.0, 3.0], [1.0, 0.0])),
        (Curve("", "x_total", over="y_total"), "", ([2.0], [1.5])),
        (Curve("", "g"), "", ([2.0, 3.0], [7.0, 6.0])),
    ],
)
def test_a_curve_is_the_change_between_samples(curve, label, expected):
    assert points(curve, SAMPLES, label) == expected

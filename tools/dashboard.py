# SPDX-License-Identifier: Apache-2.0
"""The Grafana dashboard, and a picture of the same panels drawn from samples of a run.

Owns: the panels. Each is written down once, as what is divided by what; the PromQL of ``docs/grafana-dashboard.json``
and the curves of the picture both follow from that. Never: a metric that ``/metrics`` does not have (a test asks it).

    python -m tools.dashboard write                        docs/grafana-dashboard.json
    python -m tools.dashboard draw SAMPLES.json PICTURE    the panels, from samples of `python -m benchmarks panels`
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DASHBOARD = ROOT / "docs" / "grafana-dashboard.json"
WINDOW = "$__rate_interval"

HITS = "vllm:prefix_cache_hits_total"
QUERIES = "vllm:prefix_cache_queries_total"
REACHABLE = "vllm_gaudi:prefix_cache_reachable_tokens_total"
MISSES = "vllm_gaudi:prefix_cache_misses_total"


@dataclass(frozen=True)
class Curve:
    """``metric`` per second where it counts, as it is where it does not; divided by another one's where that is named.

    ``by``: a label that makes one curve per value; ``factor`` of the whole.
    """

    says: str
    metric: str
    over: str = ""
    by: str = ""
    factor: float = 1

    def promql(self) -> str:
        top = self._sum(self.metric)
        whole = f"{top} / {self._sum(self.over)}" if self.over else top
        return whole if self.factor == 1 else f"{self.factor:g} * {whole}"

    @property
    def legend(self) -> str:
        return f"{{{{{self.by}}}}}" if self.by else self.says

    def _sum(self, metric: str) -> str:
        grouped = f"sum by ({self.by})" if self.by else "sum"
        inner = f'{metric}{{model_name="$model_name"}}'
        return f"{grouped} (rate({inner}[{WINDOW}]))" if is_counter(metric) else f"{grouped} ({inner})"


@dataclass(frozen=True)
class Panel:
    """``unit``: Grafana's name of it."""

    title: str
    says: str
    unit: str
    curves: tuple[Curve, ...]


PANELS = (
    Panel(
        "Prefix cache: hit of reachable",
        "Of the prompt tokens that were looked up: the share that was reused, and the share that a cache which forgets "
        "nothing would have reused. The gap is what was evicted, or never kept.",
        "percentunit",
        (
            Curve("reused", HITS, over=QUERIES),
            Curve("reachable", REACHABLE, over=QUERIES),
        ),
    ),
    Panel(
        "Requests that missed, by reason",
        "Requests per second that could have hit, or hit more. docs/troubleshooting.md says what to do about each.",
        "reqps",
        (Curve("misses", MISSES, by="reason"),),
    ),
    Panel(
        "Checkpoints",
        "GDN checkpoints per second. Skipped ones found no free block.",
        "ops",
        (
            Curve("saved", "vllm_gaudi:checkpoints_saved_total"),
            Curve("restored", "vllm_gaudi:checkpoints_restored_total"),
            Curve("skipped", "vllm_gaudi:checkpoints_skipped_total"),
        ),
    ),
    Panel(
        "Bytes of checkpoints moved",
        "Between slots and blocks, on one rank.",
        "Bps",
        (Curve("moved", "vllm_gaudi:checkpoint_bytes_moved_total"),),
    ),
    Panel(
        "Pool in use",
        "Share of the pool's blocks that running requests hold. Blocks that only cache something count as free.",
        "percentunit",
        (Curve("in use", "vllm:kv_cache_usage_perc"),),
    ),
    Panel(
        "Slots",
        "A running request has a slot for its GDN states. Requests wait when there is no slot, block or budget left.",
        "short",
        (
            Curve("running", "vllm:num_requests_running"),
            Curve("slots", "vllm_gaudi:state_slots"),
            Curve("waiting", "vllm:num_requests_waiting"),
        ),
    ),
    Panel(
        "Preemptions",
        "Requests per second that lost their blocks and start again from their last checkpoint.",
        "ops",
        (Curve("preempted", "vllm:num_preemptions_total"),),
    ),
    Panel(
        "Time to the first token, mean",
        "Of the requests that got it in the window.",
        "s",
        (Curve("mean", "vllm:time_to_first_token_seconds_sum", over="vllm:time_to_first_token_seconds_count"),),
    ),
)


def is_counter(metric: str) -> bool:
    return metric.endswith(("_total", "_sum", "_count"))


def metrics() -> set[str]:
    """Names of all metrics that the panels ask for."""
    return {name for panel in PANELS for curve in panel.curves for name in (curve.metric, curve.over) if name}


def dashboard() -> dict[str, Any]:
    """What Grafana imports."""
    source = {"type": "prometheus", "uid": "${datasource}"}
    panels = []
    for n, panel in enumerate(PANELS):
        panels.append(
            {
                "id": n + 1,
                "type": "timeseries",
                "title": panel.title,
                "description": panel.says,
                "datasource": source,
                "gridPos": {"h": 8, "w": 12, "x": 12 * (n % 2), "y": 8 * (n // 2)},
                "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
                "targets": [
                    {"refId": chr(ord("A") + i), "datasource": source, "expr": c.promql(), "legendFormat": c.legend}
                    for i, c in enumerate(panel.curves)
                ],
            }
        )
    return {
        "title": "vllm_gaudi",
        "uid": "vllm-gaudi",
        "tags": ["vllm", "gaudi"],
        "schemaVersion": 39,
        "time": {"from": "now-1h", "to": "now"},
        "refresh": "10s",
        "templating": {
            "list": [
                {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"},
                {
                    "name": "model_name",
                    "type": "query",
                    "label": "Model",
                    "datasource": source,
                    "query": "label_values(vllm:num_requests_running, model_name)",
                    "refresh": 1,
                },
            ]
        },
        "panels": panels,
    }


def text() -> str:
    return json.dumps(dashboard(), indent=2) + "\n"


# The picture

Sample = Mapping[str, Any]
"""``at`` seconds, ``values``: metric -> {label value or "": number}."""


def points(curve: Curve, samples: list[Sample], label: str = "") -> tuple[list[float], list[float]]:
    """Times and values of a curve between consecutive samples, as PromQL would give them."""
    at, values = [], []
    for before, after in zip(samples[:-1], samples[1:], strict=True):
        top = _change(curve.metric, before, after, label)
        under = _change(curve.over, before, after, "") if curve.over else 1.0
        if under:
            at.append(after["at"])
            values.append(curve.factor * top / under)
    return at, values


def _change(metric: str, before: Sample, after: Sample, label: str) -> float:
    def total(sample: Sample) -> float:
        found = sample["values"].get(metric, {})
        return float(found.get(label, 0.0)) if label else float(sum(found.values()))

    if not is_counter(metric):
        return total(after)
    return (total(after) - total(before)) / (after["at"] - before["at"])


def draw(samples: list[Sample], path: Path, says: str) -> None:
    """All panels, with the curves that ``samples`` of a run give."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots((len(PANELS) + 1) // 2, 2, figsize=(12, 2.3 * len(PANELS) / 2), layout="constrained")
    for axis, panel in zip(axes.flat, PANELS, strict=False):
        for curve in panel.curves:
            labels = sorted({v for s in samples for v in s["values"].get(curve.metric, {})}) if curve.by else [""]
            for label in labels:
                axis.plot(*points(curve, samples, label), label=label or curve.says, linewidth=1.4)
        axis.set_title(f"{panel.title} ({panel.unit})", fontsize=9)
        axis.set_ylim(bottom=0)
        axis.tick_params(labelsize=7)
        axis.legend(fontsize=7, loc="upper left")
    figure.suptitle(says, fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.dashboard", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("write", "draw"))
    parser.add_argument("samples", nargs="?", type=Path)
    parser.add_argument("picture", nargs="?", type=Path)
    options = parser.parse_args()
    if options.what == "write":
        DASHBOARD.write_text(text())
        print(f"written: {DASHBOARD.relative_to(ROOT)}")
    elif options.samples is None or options.picture is None:
        parser.error("draw needs a file of samples and the name of the picture")
    else:
        taken = json.loads(options.samples.read_text())
        draw(taken["samples"], options.picture, taken["says"])


if __name__ == "__main__":
    main()

"""Settings in which a barrier remains after alignment: MLPs of digits by width, depth and length of training.

    OMP_NUM_THREADS=1 python examples/when_it_fails.py

Each finished cell is a line in docs/records/limits.jsonl, and a second run continues this file. The table and the
picture in docs/limits.md are drawn from the record (`--draw` only draws).
"""

import json
import sys
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from torch import nn

import regauge as rg
from regauge.data import digits
from regauge.report.figures import picture_figure
from regauge.report.pictures import Chart, Series
from regauge_papers.tempered import TemperedJudge

DOCS = Path(__file__).parent.parent / "docs"
RECORDS, PICTURE = DOCS / "records" / "limits.jsonl", DOCS / "limits.png"
WIDTHS, DEPTHS, LENGTHS = (8, 16, 32, 64, 128, 256), (1, 2, 3, 4, 6), (25, 50, 100, 200, 400, 1000)
MIDDLE = {"width": 64, "depth": 2, "steps": 400}
PAIRS = 5
SWEEPS = {"width": WIDTHS, "depth": DEPTHS, "steps": LENGTHS}
METHODS = ("as trained", "as trained, temperature fitted", "weights", "weights and activations")


def cells() -> list[dict[str, int]]:
    """Return the settings of all cells. From cell to cell, only one of width, depth and length of training differs from
    the middle setting.
    """
    found = [{**MIDDLE, name: value} for name, values in SWEEPS.items() for value in values]
    return [cell for k, cell in enumerate(found) if cell not in found[:k]]


def train(cell: dict[str, int], seed: int, inputs: torch.Tensor, targets: torch.Tensor) -> nn.Module:
    """Train one network from its seed: Adam, a learning rate of 0.001, batches of 128."""
    torch.manual_seed(seed)
    widths = [64, *[cell["width"]] * cell["depth"]]
    hidden = [part for a, b in pairwise(widths) for part in (nn.Linear(a, b), nn.ReLU())]
    model = nn.Sequential(*hidden, nn.Linear(widths[-1], 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for rows in torch.randint(len(inputs), (cell["steps"], 128)):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs[rows]), targets[rows]).backward()
        optimizer.step()
    return model


def measure(cell: dict[str, int]) -> dict[str, Any]:
    """Return the barriers of disjoint pairs on test images, in nats, and the accuracy of the endpoints."""
    data = digits()
    inputs, targets = data.train_images.flatten(1), data.train_labels
    barriers: dict[str, list[float]] = {name: [] for name in METHODS}
    accuracies, training = [], None
    test = [(data.test_images.flatten(1), data.test_labels)]
    for pair in range(PAIRS):
        model, other = (train(cell, 2 * pair + k, inputs, targets) for k in range(2))
        a, b = model.state_dict(), other.state_dict()
        symmetry = rg.discover(model, inputs[:4])
        judge, training = rg.Task(model, test), rg.Task(model, [(inputs, targets)])
        moved = {
            "as trained": b,
            "weights": rg.align(a, b, symmetry).params,
            "weights and activations": rg.align(a, b, symmetry, task=training).params,
        }
        for name, params in moved.items():
            barriers[name].append(rg.line(a, params, judge, points=11).barrier)
        tempered = TemperedJudge(judge, training)
        barriers["as trained, temperature fitted"].append(rg.line(a, b, tempered, points=11).barrier)
        accuracies += [judge.evaluate(a)["accuracy"], judge.evaluate(b)["accuracy"]]
    return {**cell, "barriers": barriers, "accuracy": fmean(accuracies)}


def table(records: list[dict[str, Any]]) -> list[str]:
    """Return the lines of the table: the mean barrier of the pairs and its standard error."""
    lines = [
        "| width | hidden layers | steps | accuracy | " + " | ".join(METHODS) + " |",
        "| --- " * (4 + len(METHODS)) + "|",
    ]
    for one in records:
        shown = [f"{fmean(b):.3f} ± {stdev(b) / len(b) ** 0.5:.3f}" for b in (one["barriers"][n] for n in METHODS)]
        about = f"{one['width']} | {one['depth']} | {one['steps']} | {100 * one['accuracy']:.1f}%"
        lines.append(f"| {about} | {' | '.join(shown)} |")
    return lines


def read() -> list[dict[str, Any]]:
    """Return the finished cells, in the order in which they are measured."""
    lines = RECORDS.read_text().splitlines() if RECORDS.exists() else []
    done = [json.loads(line) for line in lines]
    return [one for cell in cells() for one in done if {name: one[name] for name in cell} == cell]


def draw(records: list[dict[str, Any]]) -> None:
    """Draw the barrier against width, depth and length of training, with the other two at their middle setting."""
    charts = []
    for name, values in SWEEPS.items():
        rows = [one for v in values for one in records if {k: one[k] for k in MIDDLE} == {**MIDDLE, name: v}]
        label = {"width": "units in a layer", "depth": "hidden layers", "steps": "steps of training"}[name]
        series = []
        for method in METHODS:
            at, each = [float(one[name]) for one in rows], [one["barriers"][method] for one in rows]
            low, high = [min(b) for b in each], [max(b) for b in each]
            series.append(Series(method, at, [fmean(b) for b in each], low, high))
        charts.append(Chart(f"by {label}", label, "barrier (nats)", tuple(series), is_log_x=name != "depth"))
    picture_figure(tuple(charts)).savefig(PICTURE, dpi=110, facecolor="white")


if __name__ == "__main__":
    for cell in [] if "--draw" in sys.argv else cells():
        if not any({name: one[name] for name in cell} == cell for one in read()):
            with RECORDS.open("a") as file:
                file.write(json.dumps(measure(cell)) + "\n")
    draw(read())
    sys.stdout.write("\n".join(table(read())) + "\n")

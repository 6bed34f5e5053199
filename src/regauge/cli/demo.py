"""`regauge demo`: train small networks on real digits, align and merge them, and write a report."""

import json
from typing import Any

from rich.table import Table

import regauge as rg
from regauge.cli.options import Demo
from regauge.cli.output import show, show_progress, tell
from regauge.report.demo_page import PAGE, PICTURES, RESULTS, demo_page


def run(options: Demo) -> None:
    """Train, align and merge networks, write the folder, and print the table."""
    with show_progress() as progress:
        results, pictures = rg.zoo.run_demo(
            options.out, data=options.data, seed=options.seed, quick=options.quick, progress=progress
        )
    rg.save(pictures, options.out / PICTURES, overwrite=True)
    (options.out / RESULTS).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    (options.out / PAGE).write_text(demo_page(options.out), encoding="utf-8")
    show(summary(results))
    tell(f"report: {options.out / PAGE}")


def summary(results: dict[str, Any]) -> Table:
    """Return the numbers of the report as text for the terminal."""
    data = results["data"]
    table = Table(title=f"{data['name']}: loss and accuracy on {data['test']:,} test images", title_justify="left")
    for title in ("network", "loss", "accuracy", "barrier"):
        table.add_column(title, justify="left" if title == "network" else "right")
    for model in results["models"]:
        ways, barriers = {"naive": "as trained", "aligned": "aligned"}, model["barriers"]
        rows = [
            *((f"{model['name']} {a}, seed {n['seed']}", n, "") for a, n in zip("ABC", model["networks"], strict=True)),
            *((f"mean of A and B, {ways[w]}", model["midpoints"][w], f"{barriers[w]:.3f}") for w in ways),
            *((f"all {len(model['networks'])} merged, {ways[w]}", model["merged"][w], "") for w in ways),
        ]
        for label, values, barrier in rows:
            table.add_row(label, f"{values['loss']:.3f}", f"{values['accuracy']:.1%}", barrier)
        table.add_section()
    return table

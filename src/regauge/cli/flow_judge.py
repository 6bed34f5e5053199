"""`regauge flow judge`: how good and how new drawn networks are, as a table and a page."""

import json
from dataclasses import asdict
from typing import Any

import torch

from regauge import flow
from regauge.checkpoints.writing import require_writable, save_text
from regauge.cli.flow_options import FlowJudge
from regauge.cli.learn_settings import choose_networks
from regauge.cli.options import UsageError
from regauge.cli.output import show_status, tell, tell_table, tell_written
from regauge.cli.zoo_populations import task_on
from regauge.learn.populations import spread
from regauge.names import VERSION
from regauge.report.flow_page import flow_page
from regauge.storage import Store
from regauge.storage.collection import Kept

BATCH = 512
"""Examples of DATA at a time."""
COLUMNS = {
    "name": "",
    "loss": "loss",
    "accuracy": "accuracy",
    "average_loss": "loss of average",
    "distance": "nearest",
    "copied": "copied",
    "repeated": "repeated",
    "spread": "spread",
    "two_sample": "two-sample",
}
"""Columns of the table that is printed; the page has all."""


def judge(options: FlowJudge) -> None:
    """Judge drawn networks."""
    if not options.stores:
        raise UsageError("no store of trained networks is named; give those that the flow was fitted to")
    numbers = options.output.with_suffix(".json")
    require_writable(options.output, overwrite=options.overwrite, suffixes=(".html",))
    require_writable(numbers, overwrite=options.overwrite, suffixes=(".json",))
    with show_status("reading"):
        made = flow.load_flow(options.flow)
        where, checkpoints, split_by = selection_of(made)
        collection, chosen = choose_networks(options.stores, where, checkpoints)
        parts = flow.divide(collection, chosen, split_by=split_by)
        counts = {name: len(part) for name, part in parts.items()}
        if counts != made.about["networks"]:
            raise UsageError(
                f"the flow was fitted to {made.about['networks']['train']} networks, but in these stores there are "
                f"{counts['train']} for training; name the stores that it was fitted to"
            )
        samples = Store.open(options.samples)
        drawn = samples.read(spread(torch.arange(len(samples)).numpy(), options.most))
        task = task_on(samples.architecture, options.data, options.loss, BATCH)
    with show_status("judging"):
        found = flow.judge(
            drawn,
            collection.read(parts["train"]),
            collection.read(spread(parts["test"], options.most)),
            collection.symmetry(0),
            task,
            generator=torch.Generator().manual_seed(options.seed),
        )
    results = {
        "format": "regauge.judgement",
        "version": VERSION,
        "flow": str(options.flow),
        "samples": str(options.samples),
        "store": ", ".join(str(folder) for folder in options.stores),
        "networks": made.about["networks"],
        "settings": made.about["settings"],
        "history": made.about["history"],
        "best": made.about["best"],
        "ended": made.about["ended"],
        "scores": [asdict(score) for score in found.scores],
        "verdict": list(found.verdict),
        "is_working": found.is_working,
        "is_copier": found.is_copier,
        "is_collapsed": found.is_collapsed,
        "one_answer": found.one_answer,
        "losses": found.losses,
        "reliability": found.reliability,
        "places": found.places,
        "share": found.share,
        "seed": options.seed,
    }
    save_text(json.dumps(results, indent=1) + "\n", numbers)
    save_text(flow_page(numbers), options.output)
    facts = {name: results[name] for name in ("verdict", "is_working", "is_copier", "is_collapsed")}
    tell(" ".join(found.verdict), **facts)
    tell_table("scores", [_row(score) for score in results["scores"]])
    tell_written(options.output, numbers)


def selection_of(made: flow.Flow) -> tuple[tuple[str, ...], Kept, str | None]:
    """The conditions on columns, the checkpoints, and the column of the division that a flow was fitted with."""
    known = {"checkpoints": made.about.get("checkpoints"), **made.about.get("selection", {})}
    is_last = known.get("final", known["checkpoints"] == "last")  # as flows of earlier versions told it
    return tuple(known.get("where", ())), "last" if is_last else "all", known.get("split_by") or None


def _row(score: dict[str, Any]) -> dict[str, Any]:
    return {label: score[name] for name, label in COLUMNS.items()}

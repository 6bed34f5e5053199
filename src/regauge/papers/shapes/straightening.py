"""Section 3.4 of paper 003: networks trained onto a flat line, with a hypernetwork and without."""

import functools
from dataclasses import dataclass, replace
from typing import Literal

import torch

import regauge as rg
from regauge.connect.straighten import FlatLine, Straighten, straighten
from regauge.learn.hyper_match import HyperMatching, hyper_match
from regauge.papers.experiment import Run, Scale
from regauge.papers.shapes.alignment import WAYS, ShapeWay, move_second
from regauge.papers.shapes.study import WIDE, Shape, Study, networks, samples, study, task
from regauge.papers.table import Quantity, Record, Row, Table

Kind = Literal["direct", "hypernetwork", "residual hypernetwork"]
STARTS = ("different starts", "weights, permutations", "weights, whole group", "activations, whole group")
HYPER: tuple[tuple[Kind, str], ...] = (
    ("hypernetwork", "different starts"),
    ("residual hypernetwork", "weights, whole group"),
)
"""Ours adds its output to the network, and begins where alignment ends; the paper's does neither."""
QUANTITIES = (
    Quantity("barrier before", 4),
    Quantity("barrier", 4),
    Quantity("end loss before", 4),
    Quantity("end loss", 4),
    Quantity("moved", 2),
    Quantity("distance before", 2),
    Quantity("distance", 2),
)


@dataclass(frozen=True)
class Basin:
    """The settings.

    Attributes:
        study: The networks; of every shape the first pair is used.
        straighten: Training of the weights themselves.
        hyper: Training of encoder and hypernetwork.
        hyper_shapes: Number of shapes with a hypernetwork.
    """

    study: Study
    straighten: Straighten
    hyper: HyperMatching
    hyper_shapes: int


def config(scale: Scale, width: int = 128) -> Basin:
    """Four shapes, one pair of each; two of wide networks, without the hypernetwork, which takes hours there."""
    whole = replace(study(scale, width), pairs=1)
    if scale == "smoke":
        small = HyperMatching(steps=3, batch=50, code=8, widths=(8, 8), embedding=4, hidden=8, points=3)
        return Basin(whole, Straighten(steps=5, batch=50, points=3), small, 1)
    if scale == "cpu" and width > WIDE:
        return Basin(replace(whole, shapes=whole.shapes[:2]), Straighten(steps=100), HyperMatching(), 0)
    if scale == "cpu":
        return Basin(replace(whole, shapes=whole.shapes[:4]), Straighten(), HyperMatching(steps=300, batch=2000), 1)
    return Basin(replace(whole, inr=replace(whole.inr, width=512)), Straighten(), HyperMatching(), len(whole.shapes))


def measure(config: Basin, run: Run) -> Table:
    """Straighten from every alignment; hyper-match from the network as it is."""
    found = networks(config.study, run)
    ways = {way.label: way for way in WAYS}
    starts: list[tuple[Kind, str]] = [("direct", start) for start in STARTS]
    cells: dict[tuple[Kind, str], list[Shape]] = dict.fromkeys(starts, found)
    cells |= dict.fromkeys(HYPER, found[: config.hyper_shapes]) if config.hyper_shapes else {}
    steps = [
        functools.partial(_record, config, kind, ways[start], one, run)
        for (kind, start), shapes in cells.items()
        for one in shapes
    ]
    records = iter(run.each("straightening", steps))
    rows = [
        Row.of(f"{kind}, from: {start}", [[next(records) for _ in shapes]], QUANTITIES)
        for (kind, start), shapes in cells.items()
    ]
    hyper = config.hyper
    told: tuple[str, ...] = ()
    if config.hyper_shapes:
        told = (
            f"hypernetwork: encoder of weight rows {hyper.widths}, code of {hyper.code}, decoder of rows with "
            f"{hyper.hidden} hidden units and row embeddings of {hyper.embedding} (the paper does not give its sizes), "
            f"{hyper.steps} steps with learning rate up to {hyper.optimizer.lr:g}, {config.hyper_shapes} shape(s); "
            "residual: its output is added to the network, which the paper's is not",
        )
    notes = (
        "the paper: hyper-matching makes lines flat, at 1,000 steps for one pair; it gives no numbers",
        config.study.description,
        f"direct: {config.straighten.steps} steps of AdamW on the weights, one-cycle learning rate up to "
        f"{config.straighten.optimizer.lr:g}, {config.straighten.batch:,} samples in each; the loss is the mean of "
        "those at the network and at one point in each quarter of the line",
        *told,
        "moved: how far from where training began; distance: from the first network, at which a network that "
        "collapsed onto it would have none",
        *config.study.notes,
    )
    return Table("Into one basin", notes, QUANTITIES, tuple(rows))


def _record(config: Basin, kind: Kind, way: ShapeWay, one: Shape, run: Run) -> Record:
    settings = (config.study.inr, config.study.fit, config.study.queries, kind)
    hyper = replace(config.hyper, is_residual=kind == "residual hypernetwork")
    how = config.straighten if kind == "direct" else hyper

    def make() -> Record:
        judge = task(config.study, one.name, run)
        symmetry = rg.discover(judge.module, (torch.zeros(2, config.study.inr.in_features),))
        second, _, _ = move_second(way, config.study, one, 0, symmetry, judge, run)
        read = samples(config.study, one.name, run)
        order = torch.randperm(len(read), generator=run.generator("straightening", one.name))
        count = min(len(read), 50_000)
        data = rg.Task(judge.module, [(read.points[order[:count]], read.labels[order[:count]])], judge.criterion)
        generator = run.generator(kind, way.label, one.name)
        done: FlatLine = (
            straighten(one.first, second, data, config.straighten, generator=generator)
            if kind == "direct"
            else hyper_match(one.first, second, data, hyper, generator=generator)
        )
        lines = [rg.line(one.first, end, judge, points=how.points) for end in (second, done.params)]
        return {
            "barrier before": lines[0].barrier,
            "barrier": lines[1].barrier,
            "end loss before": lines[0].table[-1]["loss"],
            "end loss": lines[1].table[-1]["loss"],
            "moved": done.moved,
            "distance before": done.distance_before,
            "distance": done.distance,
        }

    return run.record((*settings, how), f"{one.name}-{way.label.replace(' ', '-').replace(',', '')}", make)

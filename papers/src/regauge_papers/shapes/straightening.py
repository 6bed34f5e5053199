"""Section 3.4 of paper 003: networks trained until the loss on the line between them is small, with and without a
hypernetwork.
"""

from dataclasses import dataclass, replace
from typing import Literal

import regauge as rg
from regauge.connect.straighten import StraightenConfig, straighten
from regauge.learn.hyper_matching import HyperMatchingConfig, hyper_match
from regauge_papers.experiment import Run, Scale
from regauge_papers.shapes.alignment import WAYS
from regauge_papers.shapes.study import WIDE, Study, networks, study
from regauge_papers.table import Quantity, Record, Row, Table

TRAIN = 50_000
"""The largest number of samples on which networks are trained."""
Kind = Literal["direct", "hypernetwork", "residual hypernetwork"]
STARTS = ("different starts", "weights, permutations", "weights, whole group", "activations, whole group")
HYPER: tuple[tuple[Kind, str], ...] = (
    ("hypernetwork", "different starts"),
    ("residual hypernetwork", "weights, whole group"),
)
"""The two hypernetworks, each with the row of the table from which its training starts. The hypernetwork of the paper
starts from unaligned networks. The hypernetwork of this library adds its output to the network, and starts from aligned
networks."""
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
    """Settings: the first pair of networks of every shape, and the training that lowers the loss on lines."""

    study: Study
    straighten: StraightenConfig  # training of the weights themselves
    hyper: HyperMatchingConfig  # training of encoder and hypernetwork
    hyper_shapes: int  # shapes with a hypernetwork


def config(scale: Scale, width: int = 128) -> Basin:
    """Return the settings: one pair for each of four shapes; for wide networks, two shapes and no hypernetwork."""
    whole = replace(study(scale, width), pairs=1)
    if scale == "smoke":
        small = HyperMatchingConfig(steps=3, batch=50, code=8, widths=(8, 8), embedding=4, hidden=8, points=3)
        return Basin(whole, StraightenConfig(steps=5, batch=50, points=3), small, 1)
    if scale == "cpu" and width > WIDE:
        return Basin(replace(whole, shapes=whole.shapes[:2]), StraightenConfig(steps=100), HyperMatchingConfig(), 0)
    if scale == "cpu":
        return Basin(
            replace(whole, shapes=whole.shapes[:4]), StraightenConfig(), HyperMatchingConfig(steps=300, batch=2000), 1
        )
    return Basin(
        replace(whole, inr=replace(whole.inr, width=512)), StraightenConfig(), HyperMatchingConfig(), len(whole.shapes)
    )


def measure(config: Basin, run: Run) -> Table:
    """Train networks for a low loss on the line, starting from every alignment. With a hypernetwork, start only from
    the unaligned network.
    """
    shapes = {one.name: one for one in networks(config.study, run)}
    ways = {way.label: way for way in WAYS}
    starts: list[tuple[Kind, str]] = [("direct", start) for start in STARTS]
    names = {key: list(shapes) for key in starts}
    names |= {key: list(shapes)[: config.hyper_shapes] for key in HYPER if config.hyper_shapes}

    def train(cell: tuple[Kind, str, str]) -> Record:
        kind, start, name = cell
        one = shapes[name]
        second, _, _ = ways[start].move(one, 0)
        data = one.read("straightening", TRAIN, TRAIN)
        generator = run.generator(kind, start, name)
        how: StraightenConfig | HyperMatchingConfig = config.straighten
        if kind == "direct":
            done = straighten(one.first, second, data, config.straighten, generator=generator)
        else:
            how = replace(config.hyper, is_residual=kind == "residual hypernetwork")
            done = hyper_match(one.first, second, data, how, generator=generator)
        before, after = (rg.line(one.first, end, one.judge, points=how.points) for end in (second, done.params))
        return {
            "barrier before": before.barrier,
            "barrier": after.barrier,
            "end loss before": before.table[-1]["loss"],
            "end loss": after.table[-1]["loss"],
            "moved": done.moved,
            "distance before": done.distance_before,
            "distance": done.distance,
        }

    study = config.study
    settings = (*study.key, config.straighten, config.hyper)
    cells = [(*key, name) for key, own in names.items() for name in own]
    records = iter(run.records("straightening", settings, train, cells))
    rows = [
        Row.of(f"{kind}, from: {start}", [[next(records) for _ in own]], QUANTITIES)
        for (kind, start), own in names.items()
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

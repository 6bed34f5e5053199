"""Every number that the five papers print as a result, next to our number: one table for each paper, made from records.

    python benchmarks/headlines.py      # writes docs/measurements/headlines.md

A row without a record states the reason. No number is typed twice: our numbers, n, repeats and controls come from
`docs/records`. The numbers of the papers come from records too, if a record contains them.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from regauge.core.escaping import markdown_table
from regauge_papers.table import Row, Table

ROOT = Path(__file__).parent.parent
RECORDS, PAGE = ROOT / "docs" / "records", ROOT / "docs" / "measurements" / "headlines.md"
HEADER = ["", "paper", "ours", "n", "repeats", "control", "how our run differs"]
HEAD = """# Papers and our numbers, side by side

Each table lists the numbers that a paper prints as its results, and our numbers next to them. Our numbers come from the
records in `docs/records`, and the command `python benchmarks/headlines.py` writes this page. The column n is the number
of cases over which a mean is computed. The column "repeats" is the number of seeds or sets of pairs. Barriers,
distances and errors are better if they are lower. The column "control" shows a simpler method in the same record,
without any network that reads or generates networks. If we have no number, the last column gives the reason. Figures
that show only curves or pictures are on the [pages of each paper](../not_reproduced.md).
"""


@dataclass(frozen=True)
class Headline:
    """A number of a paper.

    Attributes:
        where: The table or figure, and its row.
        record: The record of our number, without "-cpu.json"; empty without a record.
        row: The row of the record.
        quantity: The column of the record.
        differs: The differences from the paper or, without a record, the reason why there is no record.
        control: The row of the control in the same record.
        paper: The printed number, if the record does not contain it.
    """

    where: str
    record: str
    row: str
    quantity: str
    differs: str
    control: str = ""
    paper: str = ""

    def cells(self) -> list[str]:
        """Return the cells of the row in the table."""
        if not self.record:
            return [self.where, self.paper, "", "", "", "", self.differs]
        table = Table.from_json(json.loads((RECORDS / f"{self.record}-cpu.json").read_text("utf-8")))
        rows = {row.label: row for row in table.rows}
        own = rows[self.row]
        printed = own.paper.get(self.quantity) or self.paper
        if self.paper and own.paper.get(self.quantity):
            raise ValueError(f"the record of {self.where!r} has the number of the paper; leave it out here")
        seeds = own.values[self.quantity]
        count = len(seeds) if table.unit else sum(map(len, seeds))
        unit = table.unit or COUNTED[self.record[:3]]
        control = f"{self.control}: {show(table, rows[self.control], self.quantity)}" if self.control else ""
        n = f"{count} {unit}{'s' * (count > 1)}"
        repeats = "1" if table.unit else str(len(seeds))
        return [self.where, printed, show(table, own, self.quantity), n, repeats, control, self.differs]


COUNTED = {"000": "run", "001": "pair", "002": "autoencoder", "003": "pair", "004": "pair"}
"""The unit that n counts in the records of each paper, unless the record names another unit."""


def show(table: Table, row: Row, quantity: str) -> str:
    """Return a number with its error, in the format of the record's tables."""
    cells = Table("", (), tuple(q for q in table.quantities if q.name == quantity), (row,), unit=table.unit).cells()
    return cells[1][cells[0].index(quantity)]


def several(
    places: str, record: str, rows: dict[str, str], quantity: str, differs: str, control: str = "", paper: str = ""
) -> list[Headline]:
    """Return rows of one table of a paper, all from one record, by their names in the paper."""
    return [
        Headline(f"{places}, {where}", record, row, quantity, differs, "" if row == control else control, paper)
        for where, row in rows.items()
    ]


def missing(places: str, rows: dict[str, str], differs: str) -> list[Headline]:
    """Return rows of one table of a paper that we did not measure, with the paper's numbers."""
    return [Headline(f"{places}, {where}", "", "", "", differs, paper=paper) for where, paper in rows.items()]


FLOWS = {
    "Euclidean": "thesis' euclidean flow, its sampler",
    "Euclidean, aligned, transport": "thesis' euclidean flow, aligned, optimal transport, its sampler",
    "Geometric": "thesis' geometric flow, its sampler",
    "Geometric, aligned, transport": "thesis' geometric flow, aligned, optimal transport, its sampler",
    "trained networks": "held-out networks",
}
UCI = "minutes for hours of training, a quarter of the width, 114 test cases for 57"
MNIST = "minutes for hours of training, a quarter of the width, networks of 5 epochs for 25"
NORMAL = "normal, all covariances"
WIDER = "thesis' {} flow, its {}, 32 units"
WRITTEN = "not written: no geometry of the library corresponds to it"
ALIGNED = "not run: alignment to one network changes nothing for an equivariant net"
FLOW_STARTS = "random networks, then {} gradient steps, strength {}"
THESIS_FLOWS = [
    *several(
        "figure 7.2, loss halfway",
        "000-barriers",
        {"as trained": "as trained", "aligned to one network": "aligned to one network"},
        "loss halfway",
        "like for like; 114 cases for 57; the mean over 31,125 pairs of one population",
    ),
    *several("table 7.1, accuracy", "000-uci", FLOWS, "accuracy", UCI, NORMAL),
    *several("table 7.1, loss", "000-uci", FLOWS, "loss", UCI, NORMAL),
    *missing(
        "table 7.1, accuracy and loss",
        {"Euclidean, aligned": "0.998, 0.070", "Geometric, aligned": "0.993, 0.018"},
        ALIGNED,
    ),
    *missing(
        "table 7.1, accuracy and loss",
        {"Normalized (three rows)": "0.993, 0.027; 0.989, 0.030; 0.988, 0.044"},
        WRITTEN,
    ),
    *several("table 7.2, accuracy", "000-mnist", FLOWS, "accuracy", MNIST, NORMAL),
    *several("table 7.2, loss", "000-mnist", FLOWS, "loss", MNIST, NORMAL),
    *missing("table 7.2, accuracy", {"Normalized (two rows)": "0.753, 0.706"}, WRITTEN),
    *missing(
        "table 7.2, divergence",
        {"all rows": "0.00002 to 0.00117"},
        "not comparable: density estimates of sets of outputs, with a kernel that is not named",
    ),
    *several(
        "table 7.3, accuracy on Fashion-MNIST",
        "000-guidance",
        {kind.title(): f"thesis' {kind} flow: guided, strength 0.1" for kind in ("euclidean", "geometric")},
        "accuracy there",
        f"{MNIST}; not reached",
        FLOW_STARTS.format(128, 0.1),
    ),
    *missing("table 7.3, accuracy on Fashion-MNIST", {"Normalized": "0.724"}, WRITTEN),
    *several(
        "table 7.4, accuracy",
        "000-widths",
        {
            "Euclidean": WIDER.format("euclidean", "sampler: drawn"),
            "Euclidean, guided": WIDER.format("euclidean", "equation: guided, strength 20"),
            "Geometric": WIDER.format("geometric", "sampler: drawn"),
            "Geometric, guided": WIDER.format("geometric", "equation: guided, strength 20"),
        },
        "accuracy",
        MNIST,
        f"{FLOW_STARTS.format(100, 20)}, 32 units",
    ),
    *missing(
        "table 7.4, accuracy",
        {"Normalized": "0.203"},
        WRITTEN,
    ),
]
WITHOUT = {name: name for name in ("Naive", "Weight Matching", "Activation Matching", "Sinkhorn", "WM + Sinkhorn")}
LEARNED = {name: name for name in ("Deep-Align", "Deep-Align + Sinkhorn")}
SCALES = "Weight Matching + scales"
MIXED = "Mixed Matching"
LOSSES = {
    "supervised and line": "supervised and line: Deep-Align",
    "supervised and distance": "supervised and distance: Deep-Align",
    "all losses": "all three: Deep-Align",
}
IMAGES = {
    "supervised and line": "Deep-Align",
    "supervised and distance": "Deep-Align by distance",
    "all losses": "Deep-Align by all losses",
}
FIVE = "72 networks for 10,000; a minute of training; one matcher"
MATCHERS = [
    *several("table 1, MNIST", "001-table1", WITHOUT, "barrier", "like for like; 21 pairs for 1,500"),
    *several(
        "table 1, MNIST",
        "001-learned-mnist",
        LEARNED,
        "barrier",
        "1,868 networks for 8,000; 70 CPU minutes; 30 steps of Sinkhorn for 1,000; two matchers",
        SCALES,
    ),
    *several("table 1, MNIST, AUC", "001-table1", WITHOUT, "AUC", "like for like; 21 pairs for 1,500"),
    *several(
        "table 1, CIFAR-10", "001-table1-cifar10", WITHOUT, "barrier", "like for like; 5 pairs; recompressed images"
    ),
    *several(
        "table 1, CIFAR-10, AUC", "001-table1-cifar10", WITHOUT, "AUC", "like for like; 5 pairs; recompressed images"
    ),
    *several(
        "table 1, CIFAR-10",
        "001-learned-ablation-cifar10",
        {"Deep-Align": LOSSES["all losses"]},
        "barrier",
        FIVE,
        MIXED,
    ),
    *several(
        "table 1, CIFAR-10",
        "001-learned-cifar10",
        {"Deep-Align + Sinkhorn": "Deep-Align + Sinkhorn"},
        "barrier",
        "48 networks of one epoch; a minute of training; one matcher",
        SCALES,
    ),
    *several(
        "table 2, CIFAR-10",
        "001-table2",
        WITHOUT,
        "barrier",
        "half of the channels, 4 epochs for 20, 2 pairs",
    ),
    *missing("table 2, CIFAR-10", {"runtime on a GPU": ""}, "not run: our times are CPU seconds"),
    *several(
        "table 2, CIFAR-10",
        "001-learned-cnn",
        LEARNED,
        "barrier",
        "a quarter of the channels, 16 x 16 pixels, 40 networks; a minute of training; one matcher; not reached",
        SCALES,
    ),
    *missing("table 2, STL10", {"all rows": ""}, "not run: the library does not read the data"),
    *missing(
        "table 3, networks trained on other data",
        {"rotated CIFAR-10, Deep-Align": "0.769 ± 0.01", "STL10, Deep-Align": "0.686 ± 0.01"},
        "not run on these data; `learned-transfer` has a matcher of MNIST on rotated and on Fashion-MNIST",
    ),
    *several(
        "table 5, VGG11",
        "001-learned-vgg",
        {"Naive": "Naive", "Sinkhorn": "Sinkhorn", **LEARNED},
        "barrier",
        "an eighth of the channels, 40 networks; a minute of training; one matcher; not reached",
        SCALES,
    ),
    *missing("table 5, VGG16", {"all rows": ""}, "not written"),
    *several(
        "table 6, MNIST",
        "001-learned-ablation",
        LOSSES,
        "barrier",
        "588 networks; a minute of training; one matcher each",
        MIXED,
    ),
    *several("table 6, CIFAR-10", "001-learned-ablation-cifar10", LOSSES, "barrier", f"{FIVE} each", MIXED),
    *several(
        "table 6, CIFAR-10 images",
        "001-learned-images",
        IMAGES,
        "barrier",
        "64 images for 60,000, of 16 x 16 pixels; 40 seconds of training; one matcher each",
        "Weight Matching",
    ),
]
DIGITS = {"ScaleGMN": "whole group", "Neural Graphs": "permutations, message passing"}
SHORT = "30 seconds for 300 epochs; other layers of the same symmetry"
ENCODED = "permutations and signs"
AUTOENCODERS = [
    *several("table 1, test error", "002-digits", DIGITS, "test error", SHORT, "the mean image, for all"),
    *several("table 1, train error", "002-digits", DIGITS, "train error", SHORT),
    *(
        one
        for kind in ("relu", "tanh")
        for quantity in ("L1", "tau")
        for one in several(
            f"table 2, {kind}, {quantity}",
            "002-cnns",
            {"ScaleGMN": f"{kind}: whole group", "Neural Graphs": f"{kind}: permutations"},
            quantity,
            "717 networks for 6,024; 75 seconds for 300 epochs; not reached (an exact canonical form: L1 0, tau 1)",
            f"{kind}: the mean accuracy, for all",
        )
    ),
    *several(
        "figures 3 and 7, lines between copies",
        "002-interpolation",
        {"decoded (no printed number)": f"{ENCODED}: decoded, whole group"},
        "barrier",
        "another layer of the same symmetry; 10 images",
        f"{ENCODED}: generalized Git Re-Basin",
        "near 0",
    ),
]
SHAPES_MISSING = "six shapes for ModelNet40; half of the batch"
SHAPES = [
    *several(
        "figures 3.1 and 3.2, lines after matching by permutations",
        "003-alignment-512",
        {
            "weights (no printed number)": "weights as published, permutations",
            "activations (no printed number)": "activations as published, permutations",
        },
        "barrier",
        SHAPES_MISSING,
        "different starts",
        "a barrier",
    ),
    *several(
        "figure 3.4, distance of codes",
        "003-embeddings",
        {"weights (no printed number)": "weights, permutations"},
        "distance of codes",
        "an encoder of our own; width 64; six shapes for ModelNet40",
        "different starts",
        "shorter",
    ),
    *several(
        "figure 3.8, hyper-matching",
        "003-basin",
        {"line (no printed number)": "hypernetwork, from: different starts"},
        "barrier",
        "one shape, width 128, 300 steps for 1,000; not reached",
        "direct, from: weights, whole group",
        "flat",
    ),
]
SHORTER = "25 epochs for 1,000"
DATA = {"MNIST": SHORTER, "Fashion-MNIST": f"{SHORTER}; one pair", "CIFAR-10": f"{SHORTER}; one pair; accuracy 0.40"}
POSTERIORS = [
    *(
        one
        for data, differs in DATA.items()
        for one in several(
            f"figure 4, {data}",
            "004-figure4",
            {"MLPs, aligned (no printed number)": f"{data}: aligned"},
            "barrier, test",
            differs,
            f"{data}: as inferred",
            "near 0",
        )
    ),
    *(
        Headline(
            f"figures 4 and 5, CIFAR-10, ResNet20 x{width}, aligned (no printed number)",
            "004-resnet20",
            f"ResNet20 x{width}, FRN, CIFAR-10: aligned by permutations",
            "barrier, test",
            "10 epochs on 20,000 images, accuracy 0.54; one pair; not reached",
            f"ResNet20 x{width}, FRN, CIFAR-10: as inferred",
            "small",
        )
        for width in (1, 2)
    ),
    *several(
        "figure 5, MLPs of 512 units",
        "004-figure5",
        {"aligned (no printed number)": "MLP 512: aligned"},
        "barrier, test",
        "30 epochs; 2 pairs",
        "MLP 512: as inferred",
        "near 0",
    ),
    *missing("figure A15, CIFAR-100", {"aligned": "a barrier"}, "not run: the data are missing"),
]
PAPERS = {
    "000: flows over weights (thesis)": THESIS_FLOWS,
    "001: Deep-Align": MATCHERS,
    "002: canonicalizing autoencoders": AUTOENCODERS,
    "003: shapes (thesis; curves, no printed numbers)": SHAPES,
    "004: posteriors (bars, no printed numbers)": POSTERIORS,
}


def draw() -> str:
    """Return the page."""
    parts = [HEAD]
    for paper, headlines in PAPERS.items():
        table = markdown_table(HEADER, [one.cells() for one in headlines])
        parts.append("\n".join([f"## {paper}", "", *table, ""]))
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(draw(), encoding="utf-8")

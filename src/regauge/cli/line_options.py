"""Options of `regauge line`, `regauge plane` and `regauge repair`."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from tyro.conf import arg

from regauge.cli.options import (
    BATCHES_HELP,
    DATA_HELP,
    Batch,
    Checkpoint,
    Checkpoints,
    Held,
    Json,
    Loss,
    MaybePicture,
    Model,
    Output,
    OverwriteAll,
    Picture,
    Seed,
    Test,
    Written,
)

STATISTICS_HELP = (
    "The statistics of batch normalization are recomputed from them for every network, A and B too; from those of "
    "--data where left out."
)


@dataclass(frozen=True, kw_only=True)
class Judging:
    """Settings of running and judging networks, for the commands that evaluate points between them."""

    model: Model = None
    data: Annotated[str, arg(metavar="DATA", help=DATA_HELP)]
    test: Test = None
    loss: Loss = "cross-entropy"
    """The loss that is measured; accuracy too for the cross entropy."""
    batch: Batch = 512
    outputs: tuple[str, ...] = ()
    """Name of the model's output that is compared with the targets, for example logits; the first where left out."""
    overwrite: OverwriteAll = False
    json: Json = False


@dataclass(frozen=True, kw_only=True)
class Between(Judging):
    """Settings of judging networks that lie between others."""

    statistics: Annotated[str | None, arg(metavar="DATA", help=BATCHES_HELP + STATISTICS_HELP)] = None


@dataclass(frozen=True)
class Line(Between):
    """Evaluate a model along a path between two checkpoints: barrier, table and plot."""

    a: Checkpoint
    b: Checkpoint
    path: Literal["straight", "geodesic", "bezier", "chain"] = "straight"
    """The straight line; great circles on the unit spheres of scale-free weights; or a Bezier curve or a polygonal
    chain that is trained first. Align B to A before: no path removes what a symmetry explains."""
    align: bool = False
    """Also align B to A by its weights: both lines, as trained and aligned, are measured and drawn together."""
    points: int = 25
    """Number of networks that are evaluated, the ends included."""
    bends: int = 1
    """Control points of a bezier curve or chain."""
    train: Annotated[str | None, arg(metavar="DATA")] = None
    """Data on which a bezier curve or chain is trained; the examples of --data where left out."""
    steps: int = 300
    """Steps of that training."""
    lr: float = 1e-2
    """Its learning rate at the start."""
    seed: Seed = 0
    output: MaybePicture = None
    """Write the plot to this file, .svg, .png or .pdf, and the table to the same name with .csv."""
    held: Annotated[Held, arg(name="")] = field(default_factory=Held)

    @property
    def trains_on_data(self) -> bool:
        """Whether a path is trained on DATA."""
        return self.train is None and self.path in ("bezier", "chain")


@dataclass(frozen=True)
class Plane(Between):
    """Evaluate a model over the plane through three checkpoints: a contour plot with the three marked, and a table.

    Distances in the plot are distances of the parameters. The command prints its cost beforehand.
    """

    a: Checkpoint
    b: Checkpoint
    c: Checkpoint
    output: Picture
    """The plot, .svg, .png or .pdf; the table gets the same name with .csv."""
    metric: Literal["loss", "accuracy"] = "loss"
    """Metric that is drawn; the table has both."""
    resolution: int = 21
    """Points along the longer side of the grid."""
    margin: float = 0.2
    """Margin of the plot around the three networks, as a share of its longer side without."""


@dataclass(frozen=True)
class Repair(Judging):
    """Renormalize the activations of a merged checkpoint, whose variance averaging makes collapse.

    Every unit gets the mean and the standard deviation over DATA that it has in the endpoints (REPAIR), and running
    statistics of batch normalization are recomputed. Without endpoints only these are.
    """

    merged: Checkpoint
    output: Output
    """The repaired checkpoint: a .safetensors file or a folder."""
    endpoints: Checkpoints = ()
    """The checkpoints that were merged, aligned with one another; unaligned ones with --align."""
    align: bool = False
    """Match the weights of the endpoints to the merged checkpoint first, as they were when it was made of them."""
    weights: tuple[float, ...] = ()
    """Share of each endpoint; equal where left out."""
    always: bool = False
    """Write the repaired checkpoint even where its loss on the data that choose is higher than before."""
    held: Annotated[Held, arg(name="")] = field(default_factory=Held)
    written: Annotated[Written, arg(name="")] = field(default_factory=Written)

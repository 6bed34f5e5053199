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
    "From these data, by default --data, the statistics of batch normalization are recomputed for every network, "
    "including A and B."
)


@dataclass(frozen=True, kw_only=True)
class Judging:
    """Settings for the commands that evaluate networks between other networks: the model, the data and the loss."""

    model: Model = None
    data: Annotated[str, arg(metavar="DATA", help=DATA_HELP)]
    test: Test = None
    loss: Loss = "cross-entropy"
    """The loss that is measured. With cross-entropy, the accuracy is measured, too."""
    batch: Batch = 512
    outputs: tuple[str, ...] = ()
    """Name of the model's output that is compared with the targets, for example logits; by default the first."""
    overwrite: OverwriteAll = False
    json: Json = False


@dataclass(frozen=True, kw_only=True)
class Between(Judging):
    """Settings for evaluating networks that lie between other networks."""

    statistics: Annotated[str | None, arg(metavar="DATA", help=BATCHES_HELP + STATISTICS_HELP)] = None


@dataclass(frozen=True)
class Line(Between):
    """Evaluate a model along a path between two checkpoints: barrier, table and plot."""

    a: Checkpoint
    b: Checkpoint
    path: Literal["straight", "geodesic", "bezier", "chain"] = "straight"
    """straight: the linear path. geodesic: great circles on the spheres of normalized weights. bezier, chain: a curve
    or polygonal chain that is trained first. Align B to A first, or use --align."""
    align: bool = False
    """Also align B to A by weights, and draw both lines together: as trained, and aligned."""
    points: int = 25
    """Number of networks that are evaluated on the path, including both ends."""
    bends: int = 1
    """Number of trained control points of a bezier curve or chain."""
    train: Annotated[str | None, arg(metavar="DATA")] = None
    """Data on which a bezier curve or chain is trained; by default the examples of --data."""
    steps: int = 300
    """Number of training steps of a bezier curve or chain."""
    lr: float = 1e-2
    """Initial learning rate for training a bezier curve or chain."""
    seed: Seed = 0
    output: MaybePicture = None
    """Write the plot to this file (.svg, .png or .pdf), and the table to a .csv file of the same name."""
    held: Annotated[Held, arg(name="")] = field(default_factory=Held)

    @property
    def trains_on_data(self) -> bool:
        """Whether a path is trained on DATA."""
        return self.train is None and self.path in ("bezier", "chain")


@dataclass(frozen=True)
class Plane(Between):
    """Evaluate a model on the plane through three checkpoints, and write a contour plot and a table.

    Distances in the plot are distances between parameters. The command first prints how long it will take.
    """

    a: Checkpoint
    b: Checkpoint
    c: Checkpoint
    output: Picture
    """The plot (.svg, .png or .pdf). The table is written to a .csv file of the same name."""
    metric: Literal["loss", "accuracy"] = "loss"
    """The metric in the plot. The table contains loss and accuracy."""
    resolution: int = 21
    """Number of points along the longer side of the grid."""
    margin: float = 0.2
    """Margin around the three networks, as a share of the longer side of their bounding box."""


@dataclass(frozen=True)
class Repair(Judging):
    """Rescale the units of a merged checkpoint, because averaging reduces the variance of activations (REPAIR).

    Every unit gets the mean and standard deviation over DATA that it has in the endpoints. Running statistics of batch
    normalization are recomputed. Without --endpoints, only the running statistics are recomputed.
    """

    merged: Checkpoint
    output: Output
    """The repaired checkpoint: a .safetensors file or a folder."""
    endpoints: Checkpoints = ()
    """The checkpoints that were merged, aligned with one another. For checkpoints that are not aligned, add --align."""
    align: bool = False
    """First align the endpoints to the merged checkpoint by weights."""
    weights: tuple[float, ...] = ()
    """Merging weight of each endpoint; by default equal."""
    always: bool = False
    """Write the repaired checkpoint even if its loss on --data is higher than before."""
    held: Annotated[Held, arg(name="")] = field(default_factory=Held)
    written: Annotated[Written, arg(name="")] = field(default_factory=Written)

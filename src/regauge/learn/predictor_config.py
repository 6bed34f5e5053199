"""The settings of a predictor."""

from dataclasses import dataclass, field

import torch

from regauge.core.symmetry import Symmetry
from regauge.learn.changes import Change
from regauge.learn.targets import Kind
from regauge.learn.training import Training
from regauge.weightspace.encoder import Values
from regauge.weightspace.heads import Invariant
from regauge.weightspace.layers import Layer
from regauge.weightspace.layers.propagation import Propagation
from regauge.weightspace.metanet import Metanet
from regauge.weightspace.shares import find_readers


@dataclass(frozen=True, kw_only=True)
class PredictorConfig(Training):
    """Settings of a predictor: its net, its training, and how networks are varied.

    Attributes:
        layer: Settings of the net's layers; see `regauge.weightspace.LAYERS`.
        width: The width of the net.
        depth: Number of layers; 0 for a net that reads nothing but what networks compute at probes. Unless given 4, and
            0 with probes, which tell most for their price.
        values: The encoding of single values; standardized unless given.
        reads_moments: Whether the net also begins with the moments of every tensor; see `Metanet`.
        parts: What the net respects by construction; everything that it can unless given.
        widening: Whether a unit that is split in two, its outgoing weights divided among the copies, counts as one; see
            `weightspace.shares`.
        hidden: Width of the head; twice that of the net, and 512 where outputs at probes are read, unless given.
        dropout: Share of its hidden units that are dropped in training; none, and 0.2 with probes, unless given.
        kind: Whether the targets are numbers, classes, or fractions such as accuracies, which are learned by cross
            entropy and stay in [0, 1]; numbers or classes, as they are, unless given.
        augment: Parts of the random elements of the symmetry that move the networks in each step; for what the net does
            not respect.
        changes: Further random changes in each step.
        render: Weight of a second loss in training: the net predicts, besides the target, what the network that it
            reads computes at fixed inputs (mean squared error of standardized outputs). Zero for none.
        probes: Number of learned inputs that the net runs the networks on, or the lengths of the axes of a sheet on
            which they lie, such as `(16, 16)`, along which their outputs are convolved; zero for none. Where weights
            are read, too (`depth`), what reads the outputs is trained first, for half of `seconds` if these are
            given, and what reads the weights next. What comes out is a mean of both, weighed as is best in
            validation, so that it is never worse there than the first alone.
        statistics: Whether boosted trees on plain statistics of layers are fitted too, to compare with.
    """

    layer: Layer = field(default_factory=Propagation)
    width: int = 64
    depth: int | None = None
    values: Values | None = None
    reads_moments: bool = False
    parts: tuple[str, ...] | None = None
    widening: bool = False
    hidden: int | None = None
    dropout: float | None = None
    kind: Kind | None = None
    augment: tuple[str, ...] = ()
    changes: tuple[Change, ...] = ()
    render: float = 0.0
    probes: int | tuple[int, ...] = 0
    statistics: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.render < float("inf"):
            raise ValueError(f"render={self.render} is no weight of a loss; it is at least 0, and 0 means none")
        if not isinstance(self.probes, int):
            object.__setattr__(self, "probes", tuple(self.probes))  # as lists are equal to no tuples
        if (self.probes if isinstance(self.probes, int) else min(self.probes, default=-1) - 1) < 0:
            raise ValueError(f"probes={self.probes} is no number of inputs; it is at least 0, and 0 means none")
        if not self.layers and not self.probes:
            raise ValueError("depth=0 reads nothing but what networks compute at probes; give `probes`, or a depth")
        # Settings that make no net, such as heads that do not divide the width, are told before anything is read.
        axes: dict[str, tuple[str | None, ...]] = {"first": ("units", None), "second": (None, "units")}
        smallest = Symmetry.from_axes(axes).bind({"first": torch.zeros(2, 1), "second": torch.zeros(1, 2)})
        Metanet(
            smallest,
            layer=self.layer,
            head=Invariant(1, self.hidden, self.dropped),
            width=self.width,
            depth=1 if self.depth in (None, 0) else min(self.depth, 1),
            values=self.values,
            readers=find_readers(smallest) if self.widening else (),
            reads_moments=self.reads_moments,
        )

    @property
    def layers(self) -> int:
        """Number of layers."""
        return self.depth if self.depth is not None else 0 if self.probes else 4

    @property
    def dropped(self) -> float:
        """Share of the hidden units that are dropped."""
        return self.dropout if self.dropout is not None else 0.2 if self.probes else 0.0

"""Settings of predictors, autoencoders and matchers. Importing the settings does not import torch, so options are read
fast.
"""

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from regauge.names import later
from regauge.training.training_configs import NetTrainingConfig

if TYPE_CHECKING:
    from regauge.learn.function_losses import FunctionLoss
    from regauge.learn.random_changes import Change
    from regauge.weightspace.decoders import DecoderSettings
    from regauge.weightspace.encoder import Values
    from regauge.weightspace.layers.plan import Layer

Kind = Literal["numbers", "fractions", "classes"]
"""The kind of a predictor's target."""
LineKind = Literal["loss", "outputs"]
"""The loss of a matcher on the linear path: the task's loss, or the distance to the networks' interpolated outputs."""


@dataclass(frozen=True, kw_only=True)
class ReaderConfig(NetTrainingConfig):
    """Settings of a net that reads networks, and of its training.

    Attributes:
        layer: Settings of the net's layers; see `regauge.weightspace.LAYERS`.
        width: Length of the feature vector of each unit inside the net.
        values: Encoding of single weights; by default the weights are standardized.
        parts: Parts of the symmetry, such as permutations, that do not change the result of the net by construction. By
            default, all parts for which the net can guarantee this.
        augment: Parts of the symmetry that the net learns from random copies, because they are not built in. In each
            step, random elements of the parts in `augment` are applied to the networks.
        changes: Further random changes of the networks in each training step, such as noise.
    """

    layer: "Layer" = field(default_factory=later("regauge.weightspace.layers.propagation:Propagation"))
    width: int = 64
    values: "Values | None" = None
    parts: tuple[str, ...] | None = None
    augment: tuple[str, ...] = ()
    changes: "tuple[Change, ...]" = ()


@dataclass(frozen=True, kw_only=True)
class PooledConfig(ReaderConfig):
    """Settings of a net that maps a network to one vector.

    Attributes:
        reads_moments: Whether the net also reads the moments of every tensor: size, mean and extremes.
        widening: Whether a unit that was split into two counts as one unit. With `widening`, the result does not change
            if a network is widened without changing its function. See the argument `readers` of
            `regauge.weightspace.Metanet`.
        hidden: Number of units in the hidden layer of the head, the last part of the net. The default is twice the
            width, or 512 with `probes`.
    """

    reads_moments: bool = False
    widening: bool = False
    hidden: int | None = None


@dataclass(frozen=True, kw_only=True)
class PredictorConfig(PooledConfig):
    """Settings of a predictor: its net, its training, and the random changes of networks.

    Attributes:
        depth: Number of layers that read weights; by default 4, and 0 with probes. With a depth of 0, the net reads
            only the outputs of networks at the probes.
        dropout: Dropout probability of hidden units in the head; by default 0, and 0.2 with probes.
        kind: The kind of the targets: numbers; fractions in [0, 1] such as accuracies, learned by cross entropy; or
            classes. By default strings, booleans and recurring integers are classes, and all other targets are numbers.
        render: Weight of a second loss in training; 0: no second loss. With the second loss, the net also learns to
            predict the outputs of the networks at fixed inputs. The loss is the mean squared error of standardized
            outputs, and needs no labels.
        probes: Number of learned inputs on which the net runs the networks; 0: none. A shape such as `(16, 16)` places
            these inputs on a grid, and the net convolves the outputs along the grid. If `depth` is also positive, the
            part that reads outputs is trained first, for half of `seconds` if given. The part that reads weights is
            trained next. The result averages both parts with the weight that is best in validation.
        linear: Whether the result also includes a linear regression on statistics of the canonical forms of networks.
            The statistics are means, deviations and quantiles of every tensor, and logarithms of their sizes. The fit
            of the regression takes one or two seconds, which do not count as training. The result averages the
            predictions of net and regression with the weight that is best in validation. With `widening`, there is no
            regression.
        statistics: Whether simple baselines are also fitted, for comparison. The baselines are boosted trees and ridge
            regression on statistics of layers, and ridge regression on the parameters of canonical forms.
    """

    depth: int | None = None
    dropout: float | None = None
    kind: Kind | None = None
    render: float = 0.0
    probes: int | tuple[int, ...] = 0
    linear: bool = True
    statistics: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.render < math.inf:
            raise ValueError(f"render={self.render} is not a weight of a loss; give 0 (none) or a positive number")
        if not isinstance(self.probes, int):
            object.__setattr__(self, "probes", tuple(self.probes))  # a list never equals a tuple
        if (self.probes if isinstance(self.probes, int) else min(self.probes, default=-1) - 1) < 0:
            raise ValueError(f"probes={self.probes} is not a number of inputs; give 0 (none) or a positive number")
        if not self.layers and not self.probes:
            raise ValueError("with depth=0, the net reads only outputs at probes; give `probes`, or a positive depth")
        self._try()

    @property
    def layers(self) -> int:
        """The number of layers."""
        return self.depth if self.depth is not None else 0 if self.probes else 4

    @property
    def dropped(self) -> float:
        """The dropout probability of hidden units."""
        return self.dropout if self.dropout is not None else 0.2 if self.probes else 0.0

    def _try(self) -> None:
        """Raise an error if no net can be built from the settings, for example if the number of heads does not divide
        the width.
        """
        import torch

        from regauge.core.symmetry import Symmetry
        from regauge.weightspace.heads.invariant import Invariant
        from regauge.weightspace.metanet import Metanet
        from regauge.weightspace.shares import find_readers

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


@dataclass(frozen=True, kw_only=True)
class AutoencoderConfig(PooledConfig):
    """Settings of an autoencoder: encoder, decoder, loss and training.

    If `changes` transform inputs, the decoder learns to reproduce the transformed networks. If `changes` add noise or
    drop weights, the decoder learns to reproduce the networks before these changes.

    Attributes:
        depth: Number of layers of the encoder.
        dropout: Dropout probability of hidden units in the encoder's head.
        latent: Length of the latent vectors.
        decoder: Settings of the decoder; see `regauge.weightspace.DECODERS`.
        loss: Loss between the outputs of a decoded network and of the original network. The default is the squared
            error, or the criterion of the task if there is one.
        examples: Number of random inputs in each step; by default all inputs.
    """

    depth: int = 2
    dropout: float = 0.0
    latent: int = 128
    decoder: "DecoderSettings" = field(default_factory=later("regauge.weightspace.decoder:MLPDecoder"))
    loss: "FunctionLoss | None" = None
    examples: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.latent < 1 or (self.examples is not None and self.examples < 1):
            raise ValueError(f"latent={self.latent} and examples={self.examples} must be positive")


@dataclass(frozen=True, kw_only=True)
class MatchingConfig(ReaderConfig):
    """Settings of a matcher: its net, its losses, and its training.

    In each step, random changes and elements of the symmetry create copies of networks. The net learns to match the
    units of a copy to the units of the original network.

    Attributes:
        batch: Number of networks in a step; each network is aligned with another network of the batch.
        depth: Number of layers.
        vectors: Length of the feature vectors by which units are matched.
        probes: Number of learned inputs on which the networks are run; the net reads their activations. 0: none.
        supervised: Weight of the loss for recognizing the units of a changed copy (cross entropy); 0: no such loss. The
            copies are not permuted, because the net is equivariant and the loss would be the same.
        line: Weight of the task's loss at a random point between the first network and the second network; 0: no such
            loss. The second network is aligned by soft plans, which can be differentiated.
        line_by: The loss between two networks. "loss": the loss of the task. "outputs": the mean squared difference
            between the outputs at the point and the interpolated outputs of both networks. The second loss is for
            networks that compute different functions. The second loss uses the inputs of the task's batches, but not
            the targets.
        distance: Weight of the squared distance between two networks, relative to their squared norms; 0: no such loss.
        max_iterations: Largest number of Sinkhorn iterations that compute a plan, which is a doubly stochastic matrix.
        tolerance: Largest allowed error of the row sums of a plan.
        checked: Largest number of pairs of networks that are aligned for validation, and for the final scores.

    References:
        Navon et al. (2024), section 4.2. Departures from the paper: each network forms a pair with the next network of
        a batch, and each network is read once. Plans are relative to the element that the vectors choose, so scales,
        signs, half periods and matrices are also matched. The distance is relative. The temperature of plans is
        bounded.
    """

    layer: "Layer" = field(default_factory=later("regauge.weightspace.layers.propagation:Propagation", channels=2))
    changes: "tuple[Change, ...]" = field(default_factory=later("regauge.learn.random_changes:changes_of_copies"))
    batch: int = 32
    depth: int = 3
    vectors: int = 128
    probes: int = 0
    supervised: float = 0.1
    line: float = 1.0
    line_by: LineKind = "loss"
    distance: float = 0.1
    max_iterations: int = 50
    tolerance: float = 1e-3
    checked: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        weights = (self.supervised, self.line, self.distance)
        if not all(0 <= weight < math.inf for weight in weights) or not any(weights):
            raise ValueError(
                f"supervised={self.supervised}, line={self.line}, distance={self.distance}: weights of losses are at "
                "least 0, and one of them is positive"
            )
        if self.probes < 0 or self.max_iterations < 1 or not self.tolerance > 0 or self.checked < 1:
            raise ValueError(
                f"probes={self.probes}, max_iterations={self.max_iterations}, tolerance={self.tolerance}, "
                f"checked={self.checked}: all are positive, and probes may be 0 for none"
            )
        if moving := [change for change in self.changes if change.moves_inputs]:
            raise ValueError(f"{moving[0]} changes the functions of units, which hides copies; leave it out")

"""Settings of flows and of their training. Importing the settings does not import torch, so options are read fast."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from regauge.flow.representation import Representation
from regauge.names import later
from regauge.training.training_configs import NetTrainingConfig

if TYPE_CHECKING:
    from regauge.flow.coupling import Coupling
    from regauge.flow.nets import Net
    from regauge.flow.priors import PriorSettings
    from regauge.flow.times import Times

Predicts = Literal["velocity", "end"]
"""The quantity that the net of a flow predicts."""


@dataclass(frozen=True, kw_only=True)
class Design:
    """The design of a flow: representation of networks, prior, coupling and net.

    Attributes:
        representation: The representation of networks as points.
        prior: The distribution of start points. Default: `FullGaussian` for aligned networks, otherwise
            `MatchedGaussian`.
        coupling: The rule that pairs start points with endpoints in training.
        net: The net that learns the velocity. Default: a perceptron.
        predicts: The output of the net: the velocity, or the endpoint of the path (x1-prediction). If the net predicts
            the endpoint, the velocity at the point x is `log_x(end) / (1 - t)`.
        has_gaussian: Whether the net learns only the difference from the velocity between two normal distributions,
            which has a closed form. If `has_gaussian` is true, an untrained flow samples the normal distribution fitted
            to the networks.
        is_aligned: Whether networks are first aligned to their common mean. After alignment, coordinates belong to
            corresponding units in all networks. Equivariant nets need no alignment, and without alignment they can also
            sample networks of other widths.
    """

    representation: Representation = field(default_factory=Representation)
    prior: "PriorSettings | None" = None
    coupling: "Coupling" = field(default_factory=later("regauge.flow.coupling:Coupling"))
    net: "Net" = field(default_factory=later("regauge.flow.nets:Perceptron"))
    predicts: Predicts = "velocity"
    has_gaussian: bool = True
    is_aligned: bool = True

    def __post_init__(self) -> None:
        from regauge.flow.nets import Perceptron
        from regauge.flow.priors import FullGaussian, MatchedGaussian

        if self.prior is None:
            object.__setattr__(self, "prior", FullGaussian() if self.is_aligned else MatchedGaussian())
        if self.predicts not in ("velocity", "end"):
            raise ValueError(f"predicts={self.predicts!r}, but a net predicts the 'velocity' or the 'end'; choose one")
        if isinstance(self.prior, FullGaussian) and not self.is_aligned:
            raise ValueError(
                "the prior FullGaussian is only for aligned networks; give is_aligned=True, or another prior"
            )
        if self.representation.components is not None and not (
            self.is_aligned
            and isinstance(self.net, Perceptron)
            and isinstance(self.prior, FullGaussian | MatchedGaussian)
            and not self.coupling.alignment
        ):
            raise ValueError(
                "a flow of principal components needs aligned networks (is_aligned=True), a Perceptron, a FullGaussian "
                "or MatchedGaussian prior and no alignment in its coupling, because components mix units"
            )


@dataclass(frozen=True, kw_only=True)
class FlowConfig(Design, NetTrainingConfig):
    """Settings of a flow and of its training.

    Attributes:
        times: The distribution of times in training.
        balance: Exponent from 0 to 1. In the loss, a tensor of n values has the weight n to this power: 0 gives all
            tensors the same weight, and 1 gives all values the same weight. Principal components are weighted by their
            standard deviations.
        is_standardized: Whether errors are divided by the errors that the flow would have without the net.
        labels: Column whose values are an input of the flow, so networks can be sampled for a chosen value. If None, no
            column is an input.
    """

    lr: float = 2e-3
    weight_decay: float = 1e-3
    average: float | None = 0.999
    times: "Times" = field(default_factory=later("regauge.flow.times:UniformTime"))
    balance: float = 0.5
    is_standardized: bool = True
    labels: str | None = None

    def __post_init__(self) -> None:
        Design.__post_init__(self)
        NetTrainingConfig.__post_init__(self)
        if not 0 <= self.balance <= 1:
            raise ValueError(f"balance={self.balance}, but must be from 0 to 1")

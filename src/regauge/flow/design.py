"""The design of a flow: all settings except those of its training."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from regauge.core.typed_json import require_fields
from regauge.flow.couplings import Coupling
from regauge.flow.manifold import Manifold
from regauge.flow.moments import Moments
from regauge.flow.nets import NETS, Clock, Metanetwork, Net, Perceptron
from regauge.flow.priors import PRIORS, FullGaussian, MatchedGaussian, Prior, PriorSettings
from regauge.flow.space import Representation
from regauge.flow.velocity import Predicts, Velocity
from regauge.weightspace.files import made_of, named
from regauge.weightspace.layers import LAYERS


@dataclass(frozen=True, kw_only=True)
class Design:
    """The parts of a flow.

    Attributes:
        representation: The representation of networks as points.
        prior: The distribution in which the flow begins.
        coupling: The coupling of starts and ends in training.
        net: The net that learns the velocity.
        predicts: The target of the net: "velocity", or "end" (x1-prediction), from which the velocity is
            `log_x(end) / (1 - t)`.
        has_gaussian: Whether the net adds to the velocity that normal distributions of all values would have, so that
            before training the flow gives the normal distribution that is matched to the networks.
        is_aligned: Whether networks are first aligned to their common middle, so that coordinates mean the same units
            in all of them: for nets that are not equivariant. One that is has nothing from it.
    """

    representation: Representation = field(default_factory=Representation)
    prior: PriorSettings = field(default_factory=MatchedGaussian)
    coupling: Coupling = field(default_factory=Coupling)
    net: Net = field(default_factory=Metanetwork)
    predicts: Predicts = "velocity"
    has_gaussian: bool = True
    is_aligned: bool = False

    def __post_init__(self) -> None:
        if self.predicts not in ("velocity", "end"):
            raise ValueError(f"predicts={self.predicts!r}: a net predicts the 'velocity' or the 'end'")
        if isinstance(self.prior, FullGaussian) and not self.is_aligned:
            raise ValueError("a prior with all covariances is for networks that are aligned; say is_aligned=True")
        if self.representation.components is not None and not (
            self.is_aligned
            and isinstance(self.net, Perceptron)
            and isinstance(self.prior, MatchedGaussian)
            and not self.coupling.alignment
        ):
            raise ValueError(
                "a flow of principal components is for networks that are aligned (is_aligned=True), with a Perceptron, "
                "a MatchedGaussian prior and no alignment in its coupling, since components know no units"
            )


def build_velocity(
    space: Manifold, prior: Prior, moments: Moments, design: Design, classes: int, generator: torch.Generator
) -> Velocity:
    """The velocity of a design, with random weights."""
    clock = Clock(classes, generator)
    net = design.net.build(space, generator)
    return Velocity(
        space,
        prior,
        moments,
        net,
        clock,
        predicts=design.predicts,
        has_gaussian=design.has_gaussian,
    )


def describe_design(design: Design) -> dict[str, Any]:
    """A design as JSON."""
    net = named(design.net, NETS)
    if isinstance(design.net, Metanetwork):
        net["layer"] = named(design.net.layer, LAYERS)
    return {
        "representation": asdict(design.representation),
        "prior": named(design.prior, PRIORS),
        "coupling": asdict(design.coupling),
        "net": net,
        "predicts": design.predicts,
        "has_gaussian": design.has_gaussian,
        "is_aligned": design.is_aligned,
    }


def design_of(made: Mapping[str, Any]) -> Design:
    """The design that was described.

    Raises:
        KeyError, TypeError, ValueError: It is none.
    """
    net = dict(made["net"])
    if "layer" in net:
        net["layer"] = made_of(net["layer"], LAYERS)
    kind = NETS[net.pop("name")]
    return Design(
        representation=_typed(Representation, made["representation"]),
        prior=made_of(made["prior"], PRIORS),
        coupling=_typed(Coupling, made["coupling"]),
        net=_typed(kind, net),
        predicts=made["predicts"],
        has_gaussian=made["has_gaussian"],
        is_aligned=made["is_aligned"],
    )


def _typed(kind: type[Any], values: Mapping[str, Any]) -> Any:
    """Settings of a kind, of the types of its fields."""
    require_fields({name: value for name, value in values.items() if name != "layer"}, kind, "the flow")
    return kind(**values)

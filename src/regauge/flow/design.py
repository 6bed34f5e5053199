"""Construction of untrained velocities from designs (the settings of flows), and designs as JSON."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from regauge.core.typed_json import made_of, named, require_fields
from regauge.flow.coupling import Coupling
from regauge.flow.flow_config import Design
from regauge.flow.manifold import Manifold
from regauge.flow.moments import Moments
from regauge.flow.nets import NETS, Metanetwork, TimeConditioning
from regauge.flow.priors import PRIORS, Prior
from regauge.flow.representation import Representation
from regauge.flow.velocity import Velocity
from regauge.weightspace.layers import LAYERS


def build_velocity(
    space: Manifold, prior: Prior, moments: Moments, design: Design, classes: int, generator: torch.Generator
) -> Velocity:
    """Return the velocity that a design describes, with random weights."""
    clock = TimeConditioning(classes, generator)
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
    """Return a design as JSON."""
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
    """Read a design from JSON.

    Raises:
        KeyError, TypeError, ValueError: The JSON does not describe a design.
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
    """Return an instance of a class, with values converted to the types of its fields."""
    require_fields({name: value for name, value in values.items() if name != "layer"}, kind, "the flow")
    return kind(**values)

"""A reader of the flow files that `Flow.save` writes."""

import json
import math
from pathlib import Path

import torch

from regauge.checkpoints.claims import Claims
from regauge.checkpoints.described import DAMAGE, damage, read_described
from regauge.core.params import Params, below
from regauge.core.symmetry import Symmetry
from regauge.flow.components import Components
from regauge.flow.design import build_velocity, design_of
from regauge.flow.flow import COMPONENTS, KIND, VERSION, Flow
from regauge.flow.moments import Covariance, Moments
from regauge.flow.priors import Prior
from regauge.flow.space import Space

NO_REFERENCE, TRIANGULAR = "1", "2"
"""Versions of files: the version without a reference network, and the version with triangular roots of covariances."""


def load_flow(path: str | Path) -> Flow:
    """Load a flow from a file.

    Files of version 1 contain no reference, so the mean of the training networks replaces the reference. Files of
    versions 1 and 2 contain a triangular root of the covariance instead of the symmetric root. Therefore flows of
    versions 1 and 2 have the original distribution, but no longer sample the same networks for a seed.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: The file is damaged, has another version, or does not contain a flow.
    """
    header, tensors = read_described(
        path, kind=KIND, version=VERSION, earlier=(NO_REFERENCE, TRIANGULAR), name="flow", writer="regauge flow fit"
    )
    try:
        made, about = json.loads(header["flow"]), dict(json.loads(header["about"]))
        design = design_of(made["design"])
        symmetry = Symmetry.from_json(json.dumps(made["symmetry"]))
        _require_held(symmetry, made["names"], tensors)
        if not set(made["positive"]) <= set(made["names"]):
            raise ValueError(f"the positive tensors {made['positive']} are not among its tensors")
        space = Space.build(
            symmetry, design.representation, made["names"], made["positive"], below("constants/", tensors)
        )
        manifold: Space | Components = space
        if design.representation.components is not None:
            parts = below("components/", tensors)
            roots = tuple(root for _, root in sorted(below("roots/", parts).items()))
            mean, unit, axes, sizes = (parts[name] for name in COMPONENTS)
            manifold = Components(space, mean, unit, axes, sizes, roots)
        moments = Moments(tensors["moments/mean"], tensors["moments/deviation"], tensors["moments/root"])
        prior = _read_prior(manifold, tensors)
        with Claims(tensors):
            velocity = build_velocity(
                manifold, prior, moments, design, len(made["classes"]), torch.Generator().manual_seed(0)
            )
        velocity.load_state_dict({"share": torch.ones(()), **below("velocity/", tensors)})
        reference = None
        if design.is_aligned:
            mean = manifold.mean if isinstance(manifold, Components) else moments.mean
            reference = mean if header["version"] == NO_REFERENCE else tensors["reference"]
    except DAMAGE as error:
        raise damage("flow", path, error, "fit it again") from error
    return Flow(velocity.eval(), manifold, prior, moments, design, tuple(made["classes"]), about, None, reference)


def _read_prior(manifold: Space | Components, tensors: Params) -> Prior:
    """Return the prior in a file of any version."""
    kept = below("prior/", tensors)
    if (factor := kept.pop("factor", None)) is not None:
        root = factor.double() / kept["deviation"][manifold.flat_start :].unsqueeze(1)
        variances, axes = torch.linalg.eigh(root @ root.T)
        return Prior(manifold, **kept, covariance=Covariance(axes, variances, torch.ones((), dtype=torch.float64)))
    covariance = below("covariance/", tensors)
    return Prior(manifold, **kept, covariance=Covariance(**covariance) if covariance else None)


def _require_held(symmetry: Symmetry, names: list[str], tensors: Params) -> None:
    """Raise a ValueError if networks have more parameters than the file has means, which would fill the memory."""
    mean = tensors["components/mean" if "components/mean" in tensors else "moments/mean"]
    values = sum(math.prod(symmetry.shapes[name]) for name in names)
    if values > mean.numel():
        raise ValueError(f"its networks have {values:,} values, but it holds the means of {mean.numel():,}")

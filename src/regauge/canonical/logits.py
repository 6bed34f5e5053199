"""The last layer of a classifier brought to a fixed norm: no symmetry, but the predicted class stays."""

from collections.abc import Mapping

import torch
from torch import Tensor

from regauge.core.params import Params
from regauge.core.symmetry import Symmetry


def normalize_logits(
    params: Mapping[str, Tensor], symmetry: Symmetry, *, weight: str, bias: str | None = None, norm: float = 1.0
) -> Params:
    """The last layer scaled as a whole such that its weight has a given Euclidean norm.

    This is no symmetry: all logits are multiplied by the same positive number, so that the predicted class and its
    ranking stay, but probabilities, the loss and their calibration change. `canonicalize` never does it.

    Args:
        params: A network, or a population with one leading model axis.
        symmetry: Of the architecture.
        weight: The last layer's weight.
        bias: Its bias, if it has one: left out, the predicted class may change.
        norm: Of the weight: one, as in section 6.2 of the thesis, or the root of the number of classes, as in
            section 4.4.

    Raises:
        KeyError: There is no such parameter.
        ValueError: The norm is not positive, or the weight is zero.

    References:
        Pittorino et al. (2022), section 2.2; Erdogan (2025), sections 4.4 and 6.2.
    """
    symmetry = symmetry.bind(params)
    for name in (weight, bias):
        if name is not None and name not in params:
            raise KeyError(f"there is no parameter {name!r}; the last ones are {list(params)[-4:]}")
    if not norm > 0:
        raise ValueError(f"norm is {norm}, but the norm of a last layer must be positive")
    touched = next(iter(symmetry.sites), weight)
    lead = params[touched].ndim - len(symmetry.shapes.get(touched, params[touched].shape))
    norms = torch.linalg.vector_norm(params[weight].double().flatten(lead), dim=-1)
    if bool((norms == 0).any()):
        raise ValueError(f"{weight!r} is zero, so that no factor gives it the norm {norm}")
    scaled = dict(params)
    for name in (weight, bias):
        if name is not None:
            factor = (norm / norms).reshape(norms.shape + (1,) * (params[name].ndim - lead))
            scaled[name] = (params[name].double() * factor).to(params[name].dtype)
    return scaled

"""The values that each unit of a group owns, gathered from a tensor and put back."""

import torch
from jaxtyping import Int, Num
from torch import Tensor

from regauge.core.act import Site
from regauge.core.symmetry import Symmetry


def unit_index(symmetry: Symmetry, name: str, site: Site) -> Int[Tensor, "units values"]:
    """Flat indices into a parameter of the values of each unit, in every copy of a site's group.

    Units are counted copy by copy, so that the first axis can be reshaped to `[*bases, size]`.
    """
    shape, axis, group = symmetry.shapes[name], site.placement.axis, site.group
    flat = torch.arange(torch.Size(shape).numel()).reshape(shape)
    flat = flat.index_select(axis, site.positions).movedim(axis, -1)
    owner = site.units
    copies = torch.zeros(1, dtype=torch.int64)
    for base, (other, index) in zip(group.within, site.bases, strict=True):
        if other is not None:
            place = other if other < axis else other - 1
            index = index.reshape([-1 if k == place else 1 for k in range(flat.ndim)])
        copies = copies * symmetry[base].size + index
    owner = (copies * group.size + owner).expand(flat.shape)
    count = symmetry.count_copies(group.name) * group.size
    return flat.flatten()[owner.flatten().argsort(stable=True)].reshape(count, -1)


def gather(
    tensor: Num[Tensor, "..."], index: Int[Tensor, "units values"], ndim: int
) -> Num[Tensor, "*lead units values"]:
    """Gather the values of each unit; `ndim` is the number of axes of the parameter without leading model axes."""
    return tensor.flatten(tensor.ndim - ndim)[..., index.to(tensor.device)]


def scatter(
    tensor: Num[Tensor, "*shape"],
    index: Int[Tensor, "units values"],
    values: Num[Tensor, "*lead units values"],
    ndim: int,
) -> Num[Tensor, "*shape"]:
    """Put values where `gather` takes them from."""
    flat = tensor.flatten(tensor.ndim - ndim).clone()
    flat[..., index.to(tensor.device)] = values
    return flat.reshape(tensor.shape)

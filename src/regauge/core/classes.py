"""Classes of units: what can be exchanged where a group has to keep a structure as it is."""

from functools import lru_cache

import torch
from jaxtyping import Float, Int, Num
from torch import Tensor

from regauge.core.groups import Group


def class_labels(group: Group) -> Int[Tensor, " size"]:
    """Return the classes of the units, numbered from zero by their first units."""
    return _labels(group.classes or (0,) * group.size)


@lru_cache(maxsize=256)
def _labels(classes: tuple[int, ...]) -> Int[Tensor, " size"]:
    numbers = {label: k for k, label in enumerate(dict.fromkeys(classes))}
    return torch.tensor([numbers[label] for label in classes], dtype=torch.int64)


def within_classes(group: Group, orders: Int[Tensor, "*lead size"]) -> Int[Tensor, "*lead size"]:
    """Return orders of all units as orders that exchange units within classes only; uniform ones stay uniform."""
    if not group.classes:
        return orders
    labels = class_labels(group)
    targets = labels.argsort(stable=True).expand_as(orders)
    sources = orders.gather(-1, labels[orders].argsort(dim=-1, stable=True))
    return torch.empty_like(orders).scatter_(-1, targets, sources)


def forbid_between_classes(
    group: Group, profits: Float[Tensor, "*lead target source"]
) -> Float[Tensor, "*lead target source"]:
    """Profits in which a pair of different classes loses more than all other pairs together can gain."""
    if not group.classes:
        return profits
    labels = class_labels(group).to(profits.device)
    profits = profits.double()
    low, high = profits.amin((-2, -1), keepdim=True), profits.amax((-2, -1), keepdim=True)
    spread = torch.where(high > low, high - low, 1.0)
    return torch.where(labels.unsqueeze(-1) == labels, profits, low - (group.size + 1) * spread)


def class_sums(group: Group, tensor: Num[Tensor, "..."], axis: int, units: Int[Tensor, " units"]) -> Num[Tensor, "..."]:
    """Return sums over the units of each class, divided by the root of their number; `units` own the indices of the
    axis."""
    labels, sizes = class_labels(group), torch.tensor(group.class_sizes)
    shape = list(tensor.shape)
    shape[axis] = len(sizes)
    sums = tensor.new_zeros(shape).index_add(axis, labels[units].to(tensor.device), tensor)
    roots = sizes.to(tensor).sqrt().reshape([-1 if k == axis else 1 for k in range(tensor.ndim)])
    return sums / roots


def class_means(group: Group, values: Num[Tensor, "*lead units values"]) -> Num[Tensor, "*lead units values"]:
    """Replace the values of every unit by their mean over its class."""
    axis, labels = values.ndim - 2, class_labels(group).to(values.device)
    sizes = torch.tensor(group.class_sizes).to(values).unsqueeze(-1)
    sums = values.new_zeros(*values.shape[:-2], len(sizes), values.shape[-1]).index_add(axis, labels, values)
    return (sums / sizes).index_select(axis, labels)

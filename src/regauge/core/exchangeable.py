"""Classes of exchangeable units: exchanging two units of a class changes no structure tensor, such as a mask.

After two units of a class are exchanged, every structure tensor has the same bits.
"""

from collections.abc import Hashable, Mapping, Sequence

import torch
from jaxtyping import UInt8
from torch import Tensor

from regauge.core.act import Site, take
from regauge.core.groups import Group


def classes_of(
    group: Group, sites: Mapping[str, Sequence[Site]], structure: Mapping[str, Tensor], ndims: Mapping[str, int]
) -> tuple[int, ...]:
    """Return the class of each unit.

    If two units of one class are exchanged, every structure tensor stays the same bit by bit. Being exchangeable is an
    equivalence relation on the units. Exchanges in several groups can be combined, because each exchange leaves the
    structure tensors unchanged.

    Args:
        group: A group that permutes units.
        sites: The sites where groups act on the structure tensors.
        structure: The structure tensors, with any number of leading model axes. If there are several networks, two
            units share a class only if they are exchangeable in every network.
        ndims: The number of axes of each structure tensor, without the model axes.
    """
    labels: list[Hashable] = [0] * group.size
    for name, local in sites.items():
        own = [site for site in local if site.group.name == group.name]
        if own:
            found = _labels(group, own, structure[name].detach().cpu(), structure[name].ndim - ndims[name])
            labels = list(zip(labels, found, strict=True))
    numbers = {label: k for k, label in enumerate(dict.fromkeys(labels))}
    return tuple(numbers[label] for label in labels)


def _labels(group: Group, sites: Sequence[Site], tensor: Tensor, lead: int) -> list[Hashable]:
    """Return a label for each unit of a group on a structure tensor.

    Units with equal labels can be exchanged without changing the tensor.
    """
    axes: dict[int, list[Tensor]] = {}
    for site in sites:
        axes.setdefault(site.placement.axis, []).extend(site.by_copies)
    indices = {axis: torch.stack(positions) for axis, positions in axes.items()}  # [positions, size]
    if len(indices) == 1:
        ((axis, positions),) = indices.items()
        rows = take(tensor, lead + axis, positions.T.flatten()).movedim(lead + axis, 0)
        return _bytes(rows.reshape(group.size, -1))
    if group.within or any(len(positions) > 1 for positions in indices.values()):
        return list(range(group.size))  # Several copies act along two axes: no units are exchanged.
    return _labels_along_axes({lead + axis: positions[0] for axis, positions in indices.items()}, tensor)


def _labels_along_axes(places: Mapping[int, Tensor], tensor: Tensor) -> list[Hashable]:
    """Return labels of units for a group that acts on several axes, where exchanges swap rows and columns at once."""
    size = len(next(iter(places.values())))
    labels: list[Hashable] = []
    first: list[int] = []
    invariants = _invariants(places, tensor)
    # Comparing with one unit of each class is enough: (i k) = (i j)(j k)(i j), so being exchangeable is an equivalence
    # relation.
    for unit in range(size):
        known = (k for k, one in enumerate(first) if invariants[one] == invariants[unit])
        label = next((k for k in known if _is_kept(places, tensor, first[k], unit)), len(first))
        if label == len(first):
            first.append(unit)
        labels.append(label)
    return labels


def _invariants(places: Mapping[int, Tensor], tensor: Tensor) -> list[Hashable]:
    """Return the diagonal entries of each unit: the entries whose indices on all axes belong to this unit. Exchanges of
    other units do not change the diagonal entries of a unit.

    Units with different diagonal entries cannot be exchanged. Therefore most pairs of units do not have to be compared
    by `_is_kept`.
    """
    diagonal = tensor
    for axis, positions in places.items():
        diagonal = take(diagonal, axis, positions)
    axes = list(places)
    diagonal = diagonal.permute(*axes, *(k for k in range(tensor.ndim) if k not in axes))
    units = torch.arange(len(next(iter(places.values()))))
    return _bytes(diagonal[(units,) * len(axes)].reshape(len(units), -1))


def _is_kept(places: Mapping[int, Tensor], tensor: Tensor, one: int, other: int) -> bool:
    """Return whether an exchange of two units along all axes leaves a tensor unchanged."""
    for axis, positions in places.items():
        row, there = tensor.select(axis, int(positions[one])), tensor.select(axis, int(positions[other]))
        for second, indices in places.items():
            if second != axis:
                order = torch.arange(tensor.shape[second])
                order[indices[[one, other]]] = indices[[other, one]]
                row = row.index_select(second - (second > axis), order)
        if _bytes(row.reshape(1, -1)) != _bytes(there.reshape(1, -1)):
            return False
    return True


def _bytes(rows: Tensor) -> list[Hashable]:
    """Return the bits of each row of a matrix."""
    if not rows.shape[1]:
        return [b""] * len(rows)
    return [row.tobytes() for row in bits(rows).reshape(len(rows), -1).numpy()]


def bits(tensor: Tensor) -> UInt8[Tensor, " bytes"]:
    """Return the bits of a tensor, byte by byte."""
    # A contiguous tensor with one column or one entry may have any stride, and torch then refuses to view it as bytes.
    return tensor.flatten().clone(memory_format=torch.contiguous_format).view(torch.uint8)

"""Compensation of removed units: a least-squares fit of the weights that read a group's remaining units."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from regauge.core.act import Site
from regauge.core.families import unit_values
from regauge.core.given import as_pair
from regauge.pruning.exact import bias_of
from regauge.pruning.network import Network

RIDGE = 1e-8
"""The ridge penalty, as a share of the mean squares. Without a penalty, linearly dependent units have no unique fit."""


@dataclass(frozen=True)
class ReadValue:
    """One activation on whose units a group acts, and the parameters that read it.

    Attributes:
        places: Names of the parameters, with the axes on which the group acts.
        sizes: The root mean square of each unit, followed by the root mean square of a constant. The size is one for
            units that are always zero.
        moments: Mean products of all pairs of normalized unit activations. The products with the constant are zero if
            some layer has no bias.
        weights: For each pair of units, the inner product of their outgoing weights, multiplied by the sizes of the two
            units.
    """

    places: tuple[tuple[str, Site], ...]
    sizes: Float[Tensor, "copies units_and_one"]
    moments: Float[Tensor, "copies units_and_one units_and_one"]
    weights: Float[Tensor, "copies units units"]


@dataclass(frozen=True)
class SecondMoments:
    """Second moments of a group's activations, and the layers that read these activations."""

    group: str
    readings: tuple[ReadValue, ...]
    shape: tuple[int, int]

    @classmethod
    def collect(cls, network: Network, group: str) -> "SecondMoments":
        """Evaluate the network on the batches of its task, and return a group's second moments."""
        assert network.task is not None
        by_value = values_read(network, group)
        shape = network.symmetry.count_copies(group), network.symmetry[group].size
        sums = {value: torch.zeros(shape[0], shape[1] + 1, shape[1] + 1, dtype=torch.float64) for value in by_value}
        count = dict.fromkeys(by_value, 0)
        for inputs, _ in map(as_pair, network.task.batches):
            found, values = network.read(inputs, list(by_value))
            lost = next((value for value in by_value if value not in found.symmetry.sites), None)
            if lost is not None:
                raise ValueError(
                    f"what {by_value[lost][0][0]!r} reads is unknown for a batch of another shape; give batches of one "
                    "shape, or choose another criterion"
                )
            for value, tensor in values.items():
                site = next(one for one in found.symmetry.sites[value] if one.group.name == group)
                samples = unit_values(found.symmetry, value, site, tensor).reshape(*shape, -1).double()
                joined = torch.cat([samples, torch.ones(shape[0], 1, samples.shape[-1], dtype=torch.float64)], 1)
                sums[value] += joined @ joined.mT
                count[value] += samples.shape[-1]
        readings = []
        for value, places in by_value.items():
            moments = sums[value] / max(count[value], 1)
            if any(bias_of(network, name, site) is None or site.bases for name, site in places):
                moments[:, -1] = moments[:, :, -1] = 0.0
            weights = torch.zeros(*shape, shape[1], dtype=torch.float64)
            for name, site in places:
                rows = network.unit_entries(name, site, network.params).reshape(*shape, -1)
                weights += rows @ rows.mT
            squares = moments.diagonal(dim1=1, dim2=2)
            there, factors = squares.clamp_min(0.0).sqrt(), torch.where(squares > 0, squares, 1.0).sqrt()
            moments = moments / (factors.unsqueeze(2) * factors.unsqueeze(1))
            weights = weights * there[:, :-1].unsqueeze(2) * there[:, :-1].unsqueeze(1)
            readings.append(ReadValue(tuple(places), factors, moments, weights))
        return cls(group, tuple(readings), shape)

    def error(self, reading: ReadValue, mixing: Float[Tensor, "copies units_and_one units_and_one"]) -> float:
        """Return the mean squared change of the outputs if layers read the activations multiplied by `mixing`."""
        rest = torch.eye(self.shape[1] + 1, dtype=torch.float64) - mixing
        noise = (rest @ reading.moments @ rest.mT)[:, :-1, :-1]
        return float((noise * reading.weights).sum())


def values_read(network: Network, group: str) -> dict[str, list[tuple[str, Site]]]:
    """Return the activations of a group that layers read, each with the axes of weights that read it. The result is
    empty if the activations are unknown.
    """
    placed = {p.parameter for p in network.found.symmetry[group].placements}
    by_value: dict[str, list[tuple[str, Site]]] = {}
    for name, site in network.sites(group, reading=True):
        value = network.found.intermediate.source(name, placed)
        if value is not None:
            by_value.setdefault(value, []).append((name, site))
    return by_value


def remove_compensated(
    network: Network, moments: SecondMoments, gone: Bool[Tensor, "copies units"], count: int, *, is_compensated: bool
) -> Bool[Tensor, "copies units"]:
    """Remove the units of each copy that change the outputs least, refit the weights that read the remaining units, and
    return the removed units.

    The objective is the mean squared change of the outputs of layers that read the group. If the fit does not improve
    the objective, for example because of rounding errors, the weights are not changed.
    """
    copies, size = moments.shape
    removed = gone.clone()
    states = [_State.of(reading) for reading in moments.readings]
    for copy in range(copies):
        for unit in gone[copy].nonzero().flatten().tolist():
            for state in states:
                state.remove(copy, unit)
        for _ in range(count - int(removed[copy].sum())):
            if is_compensated:
                costs = sum((state.costs(copy) for state in states), torch.zeros(size, dtype=torch.float64))
            else:
                costs = sum((state.plain(copy, removed[copy]) for state in states), torch.zeros(size).double())
            unit = int(costs.masked_fill(removed[copy], torch.inf).argmin())
            removed[copy, unit] = True
            for state in states:
                state.remove(copy, unit)
    for reading, state in zip(moments.readings, states, strict=True):
        plain = torch.diag_embed(torch.cat([(~removed).double(), torch.ones(copies, 1).double()], 1))
        if is_compensated and moments.error(reading, state.mixing) < moments.error(reading, plain):
            _mix(network, reading, state.mixing, removed)
    return removed


@dataclass
class _State:
    """The state of a removal: the inverse of the remaining units' second moments, and the linear approximation of each
    unit.
    """

    reading: ReadValue
    inverse: Tensor
    mixing: Tensor
    weights: Tensor

    @classmethod
    def of(cls, reading: ReadValue) -> "_State":
        """Return the state before any unit is removed."""
        length = reading.moments.shape[-1]
        mixing = torch.eye(length, dtype=torch.float64).expand_as(reading.moments).clone()
        return cls(reading, _inverse(reading.moments), mixing, reading.weights.clone())

    def costs(self, copy: int) -> Float[Tensor, " units"]:
        """Return the additional error caused by removing each unit and refitting the weights."""
        # 1 / (M^-1)_ii is the error of the best linear prediction of unit i from the other units. It is weighted by the
        # weights that read the unit (optimal brain surgeon, Hassibi and Stork 1993).
        return self.weights[copy].diagonal() / self.inverse[copy].diagonal()[:-1].clamp_min(1e-300)

    def plain(self, copy: int, removed: Bool[Tensor, " units"]) -> Float[Tensor, " units"]:
        """Return the additional error caused by removing each unit without refitting the weights."""
        joint = self.reading.moments[copy][:-1, :-1] * self.reading.weights[copy]
        return joint.diagonal() + 2 * joint[:, removed].sum(1)

    def remove(self, copy: int, unit: int) -> None:
        """Replace a unit by the other units: `x_unit = -sum_j inverse[unit, j] / inverse[unit, unit] x_j`."""
        row = self.inverse[copy, unit] / self.inverse[copy, unit, unit]
        # Schur's complement: the inverse of the moments without this unit, by one outer product.
        self.inverse[copy] -= torch.outer(self.inverse[copy, :, unit], row)
        self.mixing[copy] -= torch.outer(self.mixing[copy, :, unit].clone(), row)
        own = self.weights[copy]
        column = own[:, unit].clone()
        part = row[:-1]
        own -= torch.outer(column, part) + torch.outer(part, column) - column[unit] * torch.outer(part, part)
        # The remaining entries of the removed unit are rounding errors.
        self.inverse[copy, unit], self.inverse[copy, :, unit] = 0.0, 0.0
        self.mixing[copy, :, unit] = 0.0
        own[unit], own[:, unit] = 0.0, 0.0


def _inverse(moments: Float[Tensor, "copies n n"]) -> Float[Tensor, "copies n n"]:
    """Return the inverse of the normalized second moments plus a small multiple of the identity, without units that are
    always zero.
    """
    lifted = torch.where(moments.diagonal(dim1=1, dim2=2) > 0, RIDGE, 1.0)
    inverse: Tensor = torch.linalg.inv(moments + torch.diag_embed(lifted))
    return inverse


def _mix(network: Network, reading: ReadValue, mixing: Tensor, removed: Tensor) -> None:
    """Change the weights and biases of the layers that read the group, as if they read `mixing` times the normalized
    activations.
    """
    mixing = reading.sizes.unsqueeze(2) * mixing / reading.sizes.unsqueeze(1)
    for name, site in reading.places:
        tensor, entries = network.params[name], network.entries(name, site)
        flat = tensor.flatten().clone()
        rows = flat[entries].reshape(*removed.shape, -1)
        flat[entries.flatten()] = (mixing[:, :-1, :-1].mT @ rows).flatten()
        constant = mixing[:, :-1, -1]
        found = bias_of(network, name, site)
        if found is not None and bool(constant.any()):
            bias, axis = found
            part = torch.zeros_like(flat)
            part[entries.flatten()] = (constant.unsqueeze(-1) * rows).flatten()
            others = [k for k in range(tensor.ndim) if k != axis]
            network.put({bias: network.params[bias] + part.reshape(tensor.shape).sum(others)})
        network.put({name: flat.reshape(tensor.shape)})

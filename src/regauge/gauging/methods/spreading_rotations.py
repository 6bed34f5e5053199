"""The methods Hadamard and RandomRotation, which spread outliers over all directions of the groups that can rotate."""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from regauge.core.act import act
from regauge.core.axis_products import Kronecker
from regauge.core.element import Element, Value, random
from regauge.core.groups import Group
from regauge.core.rotations import without_reflection
from regauge.core.symmetry import Symmetry
from regauge.gauging.gauge_method import GaugeMethod, GaugeProblem, fixed_reasons
from regauge.gauging.hadamard import flat_factors, flat_rotation
from regauge.gauging.moves import Move
from regauge.gauging.result import Chosen
from regauge.gauging.rounding import FOUR_BITS, RoundToNearest, decibels, layer_rows, relative_error


class RoundedLayers:
    """The rounding error of all layers of a network, updated while its groups are transformed one after the other.

    The error is the mean over layers of `|W - Q(W)|^2 / |W|^2`, where each layer is weighted by its number of weights.
    """

    def __init__(self, params: Mapping[str, Tensor], symmetry: Symmetry, scheme: RoundToNearest) -> None:
        self.symmetry, self.scheme = symmetry, scheme
        self.rows = {name: rows for name, rows in layer_rows(symmetry).items() if name in params}
        self.params = {name: params[name] for name in (*self.rows, *symmetry.sites) if name in params}
        self._errors = {name: self._error(name, self.params[name]) for name in self.rows}
        self._whole = max(sum(self.params[name].numel() for name in self.rows), 1)

    @property
    def decibels(self) -> float:
        """The signal-to-noise ratio of rounding, in dB."""
        return decibels(sum(self._errors.values()) / self._whole)

    def offer(self, group: Group, element: Element, *, is_certain: bool = False) -> bool:
        """Transform one group by an element, if the error does not increase or if `is_certain`."""
        sites = {name: [s for s in local if s.group.name == group.name] for name, local in self.symmetry.sites.items()}
        sites = {name: local for name, local in sites.items() if local and name in self.params}
        ndims = {name: self.params[name].ndim for name in sites}
        moved = act((group,), sites, element, {name: self.params[name] for name in sites}, ndims)
        errors = {name: self._error(name, moved[name]) for name in sites if name in self.rows}
        if not is_certain and sum(errors.values()) > sum(self._errors[name] for name in errors):
            return False
        self.params |= moved
        self._errors |= errors
        return True

    def _error(self, name: str, tensor: Tensor) -> float:
        return relative_error(tensor, self.rows[name], self.scheme) * tensor.numel()


@dataclass(frozen=True)
class Rotation(GaugeMethod):
    """A rotation of every orthogonal and linear group. The rotation is kept if it does not increase the rounding error.

    The objective is the signal-to-noise ratio of the rounded weights of all layers, in dB.

    Attributes:
        scheme: The rounding scheme for weights.
        is_kept_always: Whether rotations are kept even if they increase the weights' rounding error. Keeping all
            rotations is useful if activations are also rounded, but the objective may decrease.
    """

    scheme: RoundToNearest = FOUR_BITS
    is_kept_always: bool = False

    @abstractmethod
    def rotate(self, symmetry: Symmetry, generator: torch.Generator | None) -> Element:
        """Return a rotation for each group and copy, without reading the weights.

        All other parts of the element are the identity.
        """

    def choose(self, problem: GaugeProblem) -> Chosen:
        """Return rotations of all groups, chosen one after the other."""
        found = problem.uncovered
        symmetry, before = found.symmetry, found.before
        initial = RoundedLayers(problem.params, problem.symmetry, self.scheme).decibels
        weights = RoundedLayers(problem.params if before is None else before(problem.params), symmetry, self.scheme)
        element, blank = self.rotate(symmetry, problem.generator), symmetry.identity()
        fixed, history = list(fixed_reasons(problem.symmetry, found)), [initial]
        for group in symmetry.groups:
            if group.matrix == "none":
                continue
            if weights.offer(group, element, is_certain=self.is_kept_always):
                history.append(max(weights.decibels, history[-1]))
            else:
                element = element.replace(group.name, blank[group.name])
                fixed.append((group.name, "this rotation would make the rounding of weights worse"))
        reached, moves = weights.decibels, (*([] if before is None else [before]), Move(symmetry, element))
        if reached < initial and not self.is_kept_always:
            notes = ("the network was not changed, because no tried rotation makes rounding better",)
            return Chosen((), initial, initial, (initial,), "dB", tuple(fixed), notes)
        return Chosen(moves, reached, initial, tuple(history), "dB", tuple(fixed))


@dataclass(frozen=True)
class Hadamard(Rotation):
    """A Hadamard matrix for every orthogonal and linear group. If a generator is given, signs are random.

    For some sizes, no Hadamard matrix is known. For sizes without a known Hadamard matrix, the rotation is the
    Kronecker product of a Hadamard matrix, as large as possible, and a Hartley transform matrix. If LayerNorm reads a
    residual stream, its rotation is chosen such that it preserves the vector of ones. Pairs of rotary dimensions are
    rotated by 45 degrees, because only rotations within pairs commute with the rotary embedding.

    References:
        Ashkboos et al. (2024), QuaRot, section 4; Chee et al. (2023), QuIP, section 4, on incoherence.
    """

    label = "Hadamard"

    def rotate(self, symmetry: Symmetry, generator: torch.Generator | None) -> Element:
        """Return Hadamard or Hartley rotations of all groups."""
        element = symmetry.identity()
        for group in symmetry.groups:
            value = element[group.name]
            if value.matrix is not None:
                element = element.replace(group.name, _flat(group, value.matrix.shape[:-2], generator))
        return element


@dataclass(frozen=True)
class RandomRotation(Rotation):
    """A uniformly random rotation of every orthogonal and linear group. The method needs a generator.

    References:
        Liu et al. (2024), SpinQuant, section 2.2.
    """

    label = "rotated at random"

    def rotate(self, symmetry: Symmetry, generator: torch.Generator | None) -> Element:
        """Return random rotations of all groups."""
        if generator is None:
            raise ValueError("RandomRotation draws rotations: give a generator, or use Hadamard, which needs none")
        orthogonal = tuple(
            replace(group, matrix="orthogonal") if group.matrix == "linear" else group for group in symmetry.groups
        )
        drawn = random(orthogonal, generator, ("linear",))
        blank = symmetry.identity()
        return Element({name: replace(blank[name], matrix=value.matrix) for name, value in drawn.items()})


def _flat(group: Group, lead: tuple[int, ...], generator: torch.Generator | None) -> Value:
    n = group.size
    if not (lead or group.is_proper or group.keeps_ones):
        product = Kronecker(flat_factors(n), _signs((n,), generator))
        return Value.of_product(product)
    if not group.keeps_ones:
        matrix = flat_rotation(n).expand(*lead, n, n) * _signs((*lead, n), generator).unsqueeze(-2)
        return Value(matrix=without_reflection(matrix) if group.is_proper else matrix)
    if n == 1:
        return Value(matrix=torch.ones(*lead, 1, 1, dtype=torch.float64))
    inner = torch.zeros(*lead, n, n, dtype=torch.float64)
    inner[..., 0, 0] = 1.0
    inner[..., 1:, 1:] = flat_rotation(n - 1) * _signs((*lead, n - 1), generator).unsqueeze(-2)
    basis = flat_rotation(n)  # The first column is the vector of ones, normalized.
    return Value(matrix=basis @ inner @ basis.mT)


def _signs(shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
    if generator is None:
        return torch.ones(shape, dtype=torch.float64)
    drawn = torch.randint(0, 2, shape, generator=generator, device=generator.device).cpu()
    return (1 - 2 * drawn).double()

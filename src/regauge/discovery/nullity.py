"""Completeness of the continuous part: what the outputs' Jacobian cannot see, against what discovery found."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from regauge.core.arguments import check_arguments
from regauge.core.chance import given_or_seed
from regauge.core.element import Element
from regauge.core.groups import Group
from regauge.core.outputs import Outputs
from regauge.core.params import Params
from regauge.core.probe import Probe, perturb
from regauge.core.rotations import zero_sum_basis
from regauge.core.symmetry import Symmetry
from regauge.discovery.discover import discover

MOST_PARAMETERS = 1500
"""Largest number of parameters for which the Jacobian is built."""
PER_INPUT = 24
"""Output values that are differentiated for one draw of the inputs."""
STEP = 1e-5
"""Distance along a one-parameter subgroup for its tangent, by central differences."""


@dataclass(frozen=True)
class Nullity:
    """Directions of the parameters that leave the outputs unchanged to first order, found and missing.

    Attributes:
        parameters: The number of values that were varied: parameters and floating-point buffers, tied ones once.
        inert: Values without any influence at this point, each a dimension of the null space: biases of attention keys,
            which a translation moves, or what is unused or belongs to dead units.
        null: Dimension of the null space of the Jacobian.
        found: Dimension of the part of it that the discovered group spans: scales, rotations, invertible matrices,
            translations, and rotations of streams whose gains are brought to one.
        explained: Causes of missing dimensions, each checked to lie in the null space: a sentence and
            the number of dimensions that it adds.
    """

    parameters: int
    inert: int
    null: int
    found: int
    explained: tuple[tuple[str, int], ...] = ()

    @property
    def missing(self) -> int:
        """Dimensions that no discovered group spans."""
        return self.null - self.found

    @property
    def unexplained(self) -> int:
        """Missing dimensions that nothing listed accounts for."""
        return self.missing - sum(count for _, count in self.explained)

    def __str__(self) -> str:
        text = (
            f"the outputs are blind to {self.null} of {self.parameters} directions; "
            f"the discovered groups span {self.found} of them"
        )
        if self.inert:
            text += f" ({self.inert} values have no influence at this point)"
        if not self.missing:
            return f"{text}: complete"
        parts = [f"{count} {reason}" for reason, count in self.explained]
        if self.unexplained:
            parts.append(f"{self.unexplained} unexplained")
        return f"{text}; {self.missing} are missing: {'; '.join(parts)}"


@check_arguments
def nullity(
    module: nn.Module,
    example_inputs: tuple[Any, ...],
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    symmetry: Symmetry | None = None,
    outputs: Outputs = None,
    generator: torch.Generator | None = None,
    tolerance: float = 1e-9,
) -> Nullity:
    """Compare the null space of the outputs' Jacobian with the Lie algebra of the discovered group.

    The Jacobian is taken in float64 at parameters moved away from initialization, over many random inputs of
    the shapes of the examples (integers are drawn between the smallest and the largest of the example), with
    respect to parameters and floating-point buffers alike: buffers such as running statistics move with a
    symmetry, so what they can trade with parameters counts. The symmetry is complete at this point if its
    tangent vectors span the null space; a point may have local freedom (dead units) that is no symmetry.

    Args:
        module: A small model: the cost grows with the cube of its number of parameters.
        example_inputs: Positional inputs.
        example_kwargs: Keyword inputs.
        symmetry: The symmetry to judge; discovered from the module if it is left out.
        outputs: The outputs that count.
        generator: Draws the point and the inputs; seed 0 if it is left out.
        tolerance: Singular values below this, relative to the largest, count as zero. What a model casts to float32
            is computed in float64 here.

    Raises:
        ValueError: The module has more than 1500 values, or none, or its outputs do not depend on them.
    """
    kwargs = dict(example_kwargs or {})
    if symmetry is None:
        symmetry = discover(module, example_inputs, kwargs, outputs=outputs)
    generator = given_or_seed(generator)
    probe = Probe(module, example_inputs, kwargs, outputs)
    for layer in probe.module.modules():
        if isinstance(layer, _BatchNorm) and layer.running_mean is not None:
            # The kernel has no derivatives with respect to the running statistics.
            layer.forward = partial(_batch_norm, layer)  # type: ignore[method-assign]
    params = perturb(probe.params, set(probe.buffers), generator)
    params |= {name: torch.full_like(params[name], value) for name, value in symmetry.unit_gains.items()}
    names = [name for name in _distinct(probe.params) if name not in symmetry.ones]
    total = sum(params[name].numel() for name in names)
    if not 0 < total <= MOST_PARAMETERS:
        raise ValueError(
            f"the module has {total} parameters and buffer values; nullity needs between 1 and {MOST_PARAMETERS}: "
            "give a smaller configuration of the same architecture"
        )
    with _Doubles():
        jacobian = _jacobian(probe, params, names, generator, int(1.5 * total) + 64)
    strength = jacobian.norm(dim=0)
    if not float(strength.max()) > 0:
        raise ValueError("the outputs do not depend on any parameter; there is nothing to compare")
    is_active = strength > tolerance * strength.max()
    # Columns of very different strength would blur the gap between zero and not zero.
    strength = torch.where(is_active, strength, torch.ones_like(strength))
    space = _Directions(jacobian * is_active / strength, tolerance)
    found = space.add(_tangents(symmetry, params, names) * strength)
    if symmetry.gains:
        unit = discover(module, example_inputs, kwargs, outputs=outputs, ones=symmetry.gains, verify=False)
        found += space.add(_rotations_behind_gains(symmetry, unit, params, names) * strength)
    explained = []
    for sentence, directions in _known_kinds(params, names, is_active):
        if added := space.add_null(directions * strength):
            explained.append((sentence, added))
    return Nullity(total, int((~is_active).sum()), len(space.kernel), found, tuple(explained))


class _Directions:
    """A growing subspace of the null space of a Jacobian."""

    def __init__(self, jacobian: Tensor, tolerance: float) -> None:
        singular, right = _svd(jacobian)
        # |J x| = |S V^T x|, since U has orthonormal columns: a square matrix stands for the tall Jacobian.
        self.triangle = singular.unsqueeze(-1) * right
        self.threshold = tolerance * float(singular.max())
        self.kernel = right[int((singular > self.threshold).sum()) :]
        self.basis = right[:0]

    def add(self, directions: Tensor) -> int:
        """Add vectors of the null space; by how much the dimension grew."""
        before = len(self.basis)
        inside = directions @ self.kernel.mT @ self.kernel
        singular, right = _svd(torch.cat([self.basis, _unit_rows(inside)]))
        self.basis = right[: int((singular > 1e-6 * singular.max()).sum()) if singular.numel() else 0]
        return len(self.basis) - before

    def add_null(self, directions: Tensor) -> int:
        """Add all combinations of vectors that lie in the null space."""
        directions = _unit_rows(directions)
        if not len(directions) or len(self.basis) == len(self.kernel):
            return 0
        singular, right = _svd(directions)
        span = right[singular > 1e-9 * singular.max()]
        singular, right = _svd(self.triangle @ span.mT)
        return self.add(right[singular <= 10 * self.threshold] @ span)


def _svd(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Singular values and a full set of right singular vectors as rows, zeros filled in."""
    rows, columns = matrix.shape
    if rows < columns:
        matrix = torch.cat([matrix, matrix.new_zeros(columns - rows, columns)])
    _, singular, right = torch.linalg.svd(matrix, full_matrices=False)
    return singular, right


def _unit_rows(matrix: Tensor) -> Tensor:
    """The rows that are not zero, with norm one."""
    norms = matrix.norm(dim=-1, keepdim=True)
    keep = norms.squeeze(-1) > 1e-12 * float(norms.max()) if len(norms) else norms.squeeze(-1) > 0
    unit: Tensor = matrix[keep] / norms[keep]
    return unit


def _distinct(params: Params) -> list[str]:
    """Floating-point names, tied ones once."""
    first: dict[tuple[int, tuple[int, ...]], str] = {}
    for name, tensor in params.items():
        if tensor.is_floating_point() and tensor.numel():
            first.setdefault((tensor.data_ptr(), tuple(tensor.shape)), name)
    return list(first.values())


def _jacobian(probe: Probe, params: Params, names: list[str], generator: torch.Generator, rows: int) -> Tensor:
    """Gradients of random output values at random inputs, `[rows, parameters]`."""
    leaves = {name: params[name].clone().requires_grad_(True) for name in names}
    tied = {t.data_ptr(): leaves[name] for name, t in params.items() if name in leaves}
    named = {f"module.{name}": tied.get(t.data_ptr(), t) for name, t in params.items()}
    found: list[Tensor] = []
    while len(found) < rows:
        inputs, kwargs = pytree.tree_map(lambda v: _drawn(v, generator), (probe.inputs, probe.kwargs))
        result = torch.func.functional_call(probe.module, named, inputs, kwargs, tie_weights=False)
        values = torch.cat([t.flatten() for t in result if t.is_floating_point()])
        chosen = torch.randperm(len(values), generator=generator, device=generator.device)[:PER_INPUT].tolist()
        for count, k in enumerate(chosen, start=1):
            if not values[k].requires_grad:
                return torch.zeros(1, sum(t.numel() for t in leaves.values()), dtype=torch.float64)
            gradients = torch.autograd.grad(
                values[k], list(leaves.values()), retain_graph=count < len(chosen), materialize_grads=True
            )
            found.append(torch.cat([g.flatten() for g in gradients]))
    return torch.stack(found)


class _Doubles(TorchFunctionMode):
    """Computes in float64 what a model casts to float32 itself."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.float:
            return args[0].double()
        args, kwargs = pytree.tree_map(lambda v: torch.float64 if v is torch.float32 else v, (args, kwargs or {}))
        return func(*args, **kwargs)


def _batch_norm(layer: _BatchNorm, x: Tensor) -> Tensor:
    """Batch normalization in evaluation mode, written out."""
    shape = (-1, *[1] * (x.ndim - 2))
    state: Any = layer
    x = (x - state.running_mean.reshape(shape)) * (state.running_var + layer.eps).rsqrt().reshape(shape)
    return x if layer.weight is None else x * layer.weight.reshape(shape) + layer.bias.reshape(shape)


def _drawn(value: Any, generator: torch.Generator) -> Any:
    """A random input like an example."""
    if not isinstance(value, Tensor) or value.dtype == torch.bool or value.numel() == 0:
        return value
    if value.is_floating_point():
        return torch.randn(value.shape, generator=generator, dtype=value.dtype)
    low, high = int(value.min()), int(value.max())
    return torch.randint(low, high + 1, value.shape, generator=generator, dtype=value.dtype)


def _tangents(symmetry: Symmetry, params: Params, names: list[str]) -> Tensor:
    """Derivatives of the action along all one-parameter subgroups, `[directions, parameters]`."""
    bound = symmetry.bind(params)
    rows = [torch.zeros(0, sum(params[name].numel() for name in names), dtype=torch.float64)]
    for group in bound.groups:
        ends = _subgroups(bound, group)
        if ends is not None:
            rows.append(_slope([bound.act(end, _repeated(params, end)) for end in ends], names))
    for family in bound.translations:
        steps = STEP * torch.eye(family.size, dtype=torch.float64).reshape(family.size, *family.shape)
        one = bound.identity((family.size,))
        ends = [one.translated({family.name: end}) for end in (steps, -steps)]
        rows.append(_slope([bound.act(end, _repeated(params, end)) for end in ends], names))
    return torch.cat(rows)


def _rotations_behind_gains(symmetry: Symmetry, unit: Symmetry, params: Params, names: list[str]) -> Tensor:
    """Derivatives of what rotates the representative, whose gains are one, `[directions, parameters]`."""
    representative, coordinates = symmetry.split(params)
    bound = unit.bind(representative)
    rows = [torch.zeros(0, sum(params[name].numel() for name in names), dtype=torch.float64)]
    for group in bound.groups:
        ends = _subgroups(bound, group) if group.matrix == "orthogonal" else None
        if ends is not None:
            moved = [bound.act(end, _repeated(representative, end)) for end in ends]
            rows.append(_slope([symmetry.join(one, _repeated(coordinates, ends[0])) for one in moved], names))
    return torch.cat(rows)


def _subgroups(bound: Symmetry, group: Group) -> list[Element] | None:
    """The ends of a short way along each one-parameter subgroup of a group, two batches; None if there is none."""
    value = bound.identity()[group.name]
    field = "matrix" if value.matrix is not None else "scale"
    start = getattr(value, field)
    if start is None:
        return None
    count = start.numel()
    steps = STEP * torch.eye(count, dtype=torch.float64).reshape(count, *start.shape)
    # The tangent space of O(n) at the identity: antisymmetric matrices; with the ones kept, those that map them
    # to zero, on both sides.
    if group.matrix == "orthogonal":
        steps = steps - steps.mT
    if group.keeps_ones:
        basis = zero_sum_basis(group.size)
        steps = (basis.mT @ basis) @ steps @ (basis.mT @ basis)
    one = bound.identity((count,))
    ends = (replace(one[group.name], **{field: end}) for end in (start + steps, start - steps))
    return [one.replace(group.name, end) for end in ends]


def _repeated(tensors: Mapping[str, Tensor], element: Element) -> Params:
    """A population of as many equal networks as a batch of elements has."""
    return {name: tensor.expand(*element.batch, *tensor.shape) for name, tensor in tensors.items()}


def _slope(ends: Sequence[Params], names: list[str]) -> Tensor:
    """Central differences between two populations, `[directions, parameters]`."""
    plus, minus = (torch.cat([end[name].flatten(1) for name in names], 1) for end in ends)
    return (plus - minus) / (2 * STEP)


def _known_kinds(params: Params, names: list[str], is_active: Tensor) -> list[tuple[str, Tensor]]:
    """Spaces in which freedom is known to hide; those behind the first contain one another."""
    sizes = [params[name].numel() for name in names]
    everything = torch.eye(sum(sizes), dtype=torch.float64)
    parts = dict(zip(names, torch.split(everything, sizes), strict=True))
    vectors = [name for name in names if params[name].ndim <= 1]
    shifts = [everything[~is_active], *(parts[name] for name in vectors)]
    means, readers = [], []
    for name in (name for name in names if params[name].ndim >= 2):
        shape = params[name].shape
        for axis, size in enumerate(shape):
            along = parts[name].reshape(*shape, -1).movedim(axis, -2)
            means.append(along.sum(-2).flatten(0, -2))
            for gain in (params[vector] for vector in vectors):
                if gain.shape == (size,) and float(gain.abs().min()) > 1e-6:
                    readers.append((along / gain.unsqueeze(-1)).sum(-2).flatten(0, -2))
    return [
        ("values of units that are dead at this point, or unused", shifts[0]),
        ("shifts and factors that biases, gains and running statistics pass to one another", torch.cat(shifts)),
        ("common shifts of all units, which a normalization removes", torch.cat(shifts + means)),
        (
            "multiples of the inverse gain in a layer behind a normalization, which sees a zero mean",
            torch.cat(shifts + readers),
        ),
    ]

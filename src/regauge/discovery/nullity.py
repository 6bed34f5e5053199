"""A test of completeness: comparison of the discovered groups with the null space of the outputs' Jacobian."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree as pytree

from regauge.core.arguments import check_arguments
from regauge.core.chart import chart_gains
from regauge.core.element import Element
from regauge.core.given import example_arguments, given_or_seed
from regauge.core.groups import Group
from regauge.core.outputs import Outputs
from regauge.core.params import Params
from regauge.core.probe import InDouble, Probe, perturb
from regauge.core.rotations import zero_sum_basis
from regauge.core.symmetry import Symmetry
from regauge.discovery.discover import discover

MOST_PARAMETERS = 1500
"""The largest number of parameters for which the Jacobian is computed."""
MOST_MISSES = 20
"""The largest number of random inputs that may be discarded because outputs are infinite or NaN."""
PER_INPUT = 24
"""The number of output entries that are differentiated for one random input."""
LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""The layers in which weights or inputs may span fewer dimensions than the layer has inputs."""
ROUNDING = 1e-13
"""If a parameter entry influences the outputs by less than this fraction of the largest influence, the influence may be
due to rounding."""
STEP = 1e-3
"""The step size along a one-parameter subgroup, whose tangent is computed by fourth-order differences."""
STRENGTHS = (0.3, 0.3, 3.0)
"""The distances of the evaluation points from initialization.

The result describes the first point. The second and third points show which directions are in the null space only at
the first point.
"""
LOCAL = "only at this point: units are always on, or always inside of a clamp"
RANK = "of a rank: the weights of a layer, or the values that it reads, span fewer dimensions than the layer has inputs"
EPS = "exact only at the eps of a norm, or up to it: with another eps outputs see them"
OTHER_EPS = 1e-2
"""The number that is added to four times the eps of norms, to find null directions that exist only for one eps."""
STEPS = (STEP, -STEP, 2 * STEP, -2 * STEP)
WEIGHTS = (8.0, -8.0, -1.0, 1.0)


@dataclass(frozen=True)
class Nullity:
    """The parameter directions that leave the outputs unchanged to first order, and how many of these directions the
    discovered groups span.

    Attributes:
        parameters: The number of entries (of parameters and buffers) that were varied. Structure tensors and integer
            buffers are not varied. Tied tensors count once.
        inert: The number of entries that do not influence the outputs at the evaluation point. Each inert entry is a
            dimension of the null space. For example, key biases of attention, unused entries, and entries of dead units
            are inert.
        null: The dimension of the null space of the Jacobian.
        found: The dimension of the part of the null space that the discovered symmetry spans. The spanned part includes
            scales, rotations, invertible matrices, translations, and rotations of residual streams whose gains are set
            to one.
        explained: The known causes of missing dimensions: a sentence for each cause, and the number of dimensions that
            the cause adds. All directions of a cause were found in the null space.
    """

    parameters: int
    inert: int
    null: int
    found: int
    explained: tuple[tuple[str, int], ...] = ()

    @property
    def missing(self) -> int:
        """The number of null space dimensions that no discovered group spans."""
        return self.null - self.found

    @property
    def unexplained(self) -> int:
        """The number of missing dimensions for which no cause is known."""
        return self.missing - sum(count for _, count in self.explained)

    def __str__(self) -> str:
        text = (
            f"the outputs do not change along {self.null} of {self.parameters} directions; the discovered groups span "
            f"{self.found} of them"
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
    example_inputs: Any,
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    symmetry: Symmetry | None = None,
    outputs: Outputs = None,
    generator: torch.Generator | None = None,
    tolerance: float = 1e-9,
) -> Nullity:
    """Compare the null space of the outputs' Jacobian with the Lie algebra of the discovered symmetry.

    The Jacobian is computed in float64, at parameters perturbed away from initialization. The inputs are many random
    tensors with the shapes of the example inputs. Integer inputs are sampled between the smallest and the largest entry
    of the example. If the model raises an error on random inputs, or if outputs or gradients are Inf or NaN, inputs
    about as large as the example are sampled. If the example is nonnegative, the sampled inputs are nonnegative too. If
    the model also fails on inputs as large as the example, integer inputs are copied from the example. The Jacobian has
    one column for each entry of the parameters and floating-point buffers. Buffers such as running statistics are
    included, because groups act on buffers, and buffers can compensate for parameters. The symmetry is complete at the
    evaluation point if its tangent vectors span the null space. A unit that is dead at the evaluation point may cause
    further null directions that belong to no symmetry.

    Args:
        module: A small model. The cost grows with the cube of its number of parameters.
        example_inputs: Example inputs, as for `discover`.
        example_kwargs: Keyword arguments of the module.
        symmetry: The symmetry to test. By default, the symmetry is discovered from the module.
        outputs: The outputs that are differentiated, as for `discover`.
        generator: The generator that samples the point and the inputs. Default: a generator with seed 0.
        tolerance: Singular values below this fraction of the largest one count as zero. The Jacobian is computed in
            float64, even if the model converts tensors to float32.

    Raises:
        ValueError: The module has no varied entries or more than 1500, its outputs do not depend on the varied entries,
            or its outputs or their gradients are infinite or NaN on random inputs.
    """
    inputs, kwargs = example_arguments(example_inputs, example_kwargs)
    if symmetry is None:
        symmetry = discover(module, inputs, kwargs, outputs=outputs)
    generator = given_or_seed(generator)
    probe = Probe(module, inputs, kwargs, outputs)
    for layer in probe.module.modules():
        if isinstance(layer, nn.Embedding):
            layer.padding_idx = None  # Otherwise the row of the padding has no gradient, although the model reads it.
        if isinstance(layer, _BatchNorm) and layer.running_mean is not None:
            # The kernel has no derivatives with respect to the running statistics.
            layer.forward = partial(_batch_norm, layer)  # type: ignore[method-assign]
    held = {*symmetry.ones, *symmetry.structure}
    names = [name for name in _distinct(probe.params) if name not in held]
    total = sum(probe.params[name].numel() for name in names)
    if not 0 < total <= MOST_PARAMETERS:
        raise ValueError(
            f"the module has {total} parameters and buffer values; nullity needs between 1 and {MOST_PARAMETERS}: "
            "give a smaller configuration of the same architecture"
        )
    unit = None
    if symmetry.gains and (ones := chart_gains(symmetry)):
        unit = discover(module, inputs, kwargs, outputs=outputs, ones=ones, verify=False)
    points = (
        partial(_at_point, probe, symmetry, unit, names, generator, tolerance, strength) for strength in STRENGTHS
    )
    first = best = next(points)()
    if not (least := first.report.unexplained):
        return first.report
    # Null directions of only one point come from units that stay in one linear piece there for all inputs.
    for other in (make() for make in points):
        count = other.report.unexplained + first.space.count_hidden(~other.is_active)
        if count < least:
            least, best = count, other
    seen = min(least, _count_seen_by_eps(best, probe, names, generator))
    ranks = min(least - seen, _add_ranks(best, probe, names, generator) if seen < least else 0)
    kinds = (EPS, seen), (RANK, ranks), (LOCAL, first.report.unexplained - least)
    return replace(first.report, explained=(*first.report.explained, *(kind for kind in kinds if kind[1])))


@dataclass(frozen=True)
class _Point:
    """The null space at one evaluation point.

    Attributes:
        report: The comparison of the null space with the symmetry, and known causes of further directions.
        space: The null space, and the part of it whose cause is known.
        params: The parameters.
        columns: The norms of the Jacobian's columns. Vectors of the null space are multiplied by the norms of the
            columns, entry by entry.
        is_active: For each parameter entry, whether it influences the outputs.
    """

    report: Nullity
    space: "_Directions"
    params: Params
    columns: Tensor
    is_active: Tensor


def _at_point(
    probe: Probe,
    symmetry: Symmetry,
    unit: Symmetry | None,
    names: list[str],
    generator: torch.Generator,
    tolerance: float,
    strength: float,
) -> _Point:
    """Compare the null space at one point with the symmetry, and with the symmetry for gains of one."""
    params = perturb(probe.params, set(probe.buffers), generator, strength)
    params |= {name: torch.full_like(params[name], value) for name, value in symmetry.unit_gains.items()}
    total = sum(params[name].numel() for name in names)
    with InDouble():
        jacobian = _jacobian(probe, params, names, generator, int(1.5 * total) + 64)
    columns = jacobian.norm(dim=0)
    if not float(columns.max()) > 0:
        raise ValueError(
            "the outputs do not depend on any parameter; there is nothing to compare; check that the model uses them"
        )
    is_active = columns > ROUNDING * columns.max()  # A bias that is added to large values has a small influence.
    # Columns of very different norms would blur the gap between zero and not zero.
    columns = torch.where(is_active, columns, torch.ones_like(columns))
    space = _Directions(jacobian * is_active / columns, tolerance)
    found = space.add(_tangents(symmetry, params, names) * columns)
    if unit is not None:
        found += space.add_null(_rotations_behind_gains(symmetry, unit, params, names) * columns)
    explained = []
    for sentence, directions in _known_kinds(probe.module.module, params, names, is_active):
        if added := space.add_null(directions * columns):
            explained.append((sentence, added))
    report = Nullity(total, int((~is_active).sum()), len(space.kernel), found, tuple(explained))
    return _Point(report, space, params, columns, is_active)


def _count_seen_by_eps(point: _Point, probe: Probe, names: list[str], generator: torch.Generator) -> int:
    """Count null directions without a known cause that change the outputs if normalizations get a different eps."""
    if not any(True for _ in _norms_eps(probe.module)):
        return 0
    with InDouble(), _other_eps(probe.module):
        jacobian = _jacobian(probe, point.params, names, generator, int(1.5 * len(point.columns)) + 64)
    return point.space.count_seen(jacobian / point.columns, point.space.rest())


def _add_ranks(point: _Point, probe: Probe, names: list[str], generator: torch.Generator) -> int:
    """Find null directions that change the weights or inputs of a layer, but not its outputs.

    Add the found directions to the directions with a known cause, and return the number of new dimensions.

    Each added direction changes either only the inputs of the layer, or only its parameters.
    """
    space, before = point.space, len(point.space.basis)
    held: list[tuple[Tensor, Tensor]] = []

    def rows(which: int) -> Tensor:
        def read(result: Any) -> list[Tensor]:
            found = [pair[which] for pair in held]
            held.clear()
            return found

        return _jacobian(probe, point.params, names, generator, len(space.kernel) + 64, read) / point.columns

    layers: dict[nn.Module, str] = {
        one: home for home, one in probe.module.module.named_modules() if isinstance(one, LAYERS)
    }
    called: dict[nn.Module, None] = {}
    handles = [one.register_forward_hook(lambda layer, _, __: called.setdefault(layer)) for one in layers]
    with InDouble():
        _jacobian(probe, point.params, names, generator, 1)
    for handle in handles:
        handle.remove()
    for layer in called:
        own = [name for name in names if name.rpartition(".")[0] == layers[layer]]
        handle = layer.register_forward_hook(lambda _, inputs, output: held.append((inputs[0], output)))
        with InDouble():
            inputs, outputs = rows(0), rows(1)
        handle.remove()
        is_own = torch.cat([torch.full((point.params[name].numel(),), name in own) for name in names])
        fixed = torch.eye(len(is_own), dtype=torch.float64) * outputs.norm(dim=1).max()
        upstream = space.null_of(torch.cat([outputs, fixed[is_own]]))
        singular, right = _svd(inputs @ upstream.mT)
        space.add(right[singular > 1e-9 * inputs.norm(dim=1).max()] @ upstream)
        space.add(space.null_of(torch.cat([outputs, fixed[~is_own]])))
    return len(space.basis) - before


class _Directions:
    """The null space of a Jacobian, and its subspace of directions whose cause is known. Directions can be added to
    this subspace.
    """

    def __init__(self, jacobian: Tensor, tolerance: float) -> None:
        singular, right = _svd(jacobian)
        # |J x| = |S V^T x|, since U has orthonormal columns: a square matrix replaces the tall Jacobian.
        self.triangle = singular.unsqueeze(-1) * right
        self.threshold = tolerance * float(singular.max())
        self.kernel = right[int((singular > self.threshold).sum()) :]
        self.basis = right[:0]

    def add(self, directions: Tensor) -> int:
        """Add vectors of the null space to the subspace, and return the increase of its dimension."""
        before = len(self.basis)
        inside = directions @ self.kernel.mT @ self.kernel
        singular, right = _svd(torch.cat([self.basis, _unit_rows(inside)]))
        self.basis = right[: int((singular > 1e-8 * singular.max()).sum()) if singular.numel() else 0]
        return len(self.basis) - before

    def add_null(self, directions: Tensor) -> int:
        """Add all combinations of some directions that lie in the null space, and return the increase of the subspace's
        dimension.
        """
        directions = _unit_rows(directions)
        if not len(directions) or len(self.basis) == len(self.kernel):
            return 0
        singular, right = _svd(directions)
        span = right[singular > 1e-9 * singular.max()]
        singular, right = _svd(self.triangle @ span.mT)
        return self.add(right[singular <= 10 * self.threshold] @ span)

    def rest(self) -> Tensor:
        """Return an orthonormal basis of the null vectors that are orthogonal to all directions with a known cause."""
        singular, right = _svd(self.kernel - self.kernel @ self.basis.mT @ self.basis)
        return right[: int((singular > 0.5).sum())]

    def count_seen(self, jacobian: Tensor, directions: Tensor) -> int:
        """Return the number of null directions that a second Jacobian does not map to zero, up to rounding.

        Null directions whose difference has a known cause are counted once. The second Jacobian may also be nonzero on
        directions with a known cause.
        """
        rounding = 100 * torch.linalg.svdvals(self.triangle @ directions.mT).max()
        rounding = torch.maximum(rounding, 1e-12 * torch.linalg.matrix_norm(jacobian, 2))
        left, singular, _ = torch.linalg.svd(jacobian @ self.basis.mT, full_matrices=False)
        left, seen = left[:, singular > rounding], jacobian @ directions.mT
        return int((torch.linalg.svdvals(seen - left @ (left.mT @ seen)) > rounding).sum())

    def count_hidden(self, is_dead: Tensor) -> int:
        """Count null directions without a known cause that become directions with a known cause if dead entries are
        ignored.

        An entry of a parameter is dead if it does not influence the outputs.
        """
        rest = self.rest()
        parts = self.basis, torch.cat([self.basis, rest])
        known, whole = (int(torch.linalg.matrix_rank(part[:, ~is_dead], rtol=1e-8)) for part in parts)
        return len(rest) - (whole - known)

    def null_of(self, jacobian: Tensor) -> Tensor:
        """Return an orthonormal basis of the null vectors that a second Jacobian also maps to zero."""
        singular, right = _svd(jacobian @ self.kernel.mT)
        return right[singular <= 1e-9 * singular.max()] @ self.kernel


@contextmanager
def _other_eps(module: nn.Module) -> Iterator[None]:
    """Return a context in which every norm has a larger eps: four times its eps plus `OTHER_EPS`."""
    kept = list(_norms_eps(module))
    for attributes, name, value in kept:
        attributes[name] = 4 * value + OTHER_EPS
    try:
        yield
    finally:
        for attributes, name, value in kept:
            attributes[name] = value


def _norms_eps(module: nn.Module) -> Iterator[tuple[dict[str, Any], str, float]]:
    """Yield, for every layer with an eps, the attributes of the layer, the name of the eps, and its value."""
    for layer in module.modules():
        for name, value in vars(layer).items():
            if "eps" in name and isinstance(value, float):
                yield vars(layer), name, value


def _svd(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return the singular values, padded with zeros, and all right singular vectors as rows."""
    rows, columns = matrix.shape
    if rows < columns:
        matrix = torch.cat([matrix, matrix.new_zeros(columns - rows, columns)])
    _, singular, right = torch.linalg.svd(matrix, full_matrices=False)
    return singular, right


def _unit_rows(matrix: Tensor) -> Tensor:
    """Return the nonzero rows of a matrix, scaled to norm one."""
    norms = matrix.norm(dim=-1, keepdim=True)
    keep = norms.squeeze(-1) > 1e-12 * float(norms.max()) if len(norms) else norms.squeeze(-1) > 0
    unit: Tensor = matrix[keep] / norms[keep]
    return unit


def _distinct(params: Params) -> list[str]:
    """Return the names of floating-point tensors, with one name for each tied tensor."""
    first: dict[tuple[int, tuple[int, ...]], str] = {}
    for name, tensor in params.items():
        if tensor.is_floating_point() and tensor.numel():
            first.setdefault((tensor.data_ptr(), tuple(tensor.shape)), name)
    return list(first.values())


def _outputs(result: Mapping[str, Sequence[Tensor]]) -> list[Tensor]:
    """Return the floating-point outputs of a model."""
    return [t for several in result.values() for t in several if t.is_floating_point()]


def _jacobian(
    probe: Probe,
    params: Params,
    names: list[str],
    generator: torch.Generator,
    rows: int,
    read: Callable[[Any], list[Tensor]] = _outputs,
) -> Tensor:
    """Return gradients of random output entries, or of other values, at random inputs: `[rows, parameters]`."""
    leaves = {name: params[name].clone().requires_grad_(True) for name in names}
    tied = {t.data_ptr(): leaves[name] for name, t in params.items() if name in leaves}
    named = {f"module.{name}": tied.get(t.data_ptr(), t) for name, t in params.items()}
    found: list[Tensor] = []
    misses = 0
    while len(found) < rows:
        sample = partial((_drawn, _drawn_near, _drawn_nearer)[min(misses, 2)], generator=generator)
        inputs, kwargs = pytree.tree_map(sample, (probe.inputs, probe.kwargs))
        try:
            result = torch.func.functional_call(probe.module, named, inputs, kwargs, tie_weights=False)
        except (RuntimeError, IndexError):  # Random integers may be invalid positions.
            result = None
        tensors = [] if result is None else read(result)
        values = torch.cat([t.flatten() for t in tensors]) if tensors else torch.full((1,), math.nan)
        made = [values]
        if bool(values.isfinite().all()):
            if not values.requires_grad:
                return torch.zeros(1, sum(t.numel() for t in leaves.values()), dtype=torch.float64)
            order = torch.randperm(len(values), generator=generator, device=generator.device)[:PER_INPUT].tolist()
            ways: Any = {"retain_graph": True, "materialize_grads": True}
            gradients = (torch.autograd.grad(values[k], list(leaves.values()), **ways) for k in order)
            made = [torch.cat([g.flatten() for g in one]) for one in gradients]
        if all(bool(row.isfinite().all()) for row in made):
            found += made
            continue
        misses += 1
        if misses > MOST_MISSES:
            raise ValueError(
                "the outputs or their gradients are not finite, or the model raises an error, on random inputs near "
                "the examples; give other example inputs, or set other parameters"
            )
    return torch.stack(found)


def _batch_norm(layer: _BatchNorm, x: Tensor) -> Tensor:
    """Compute batch normalization in evaluation mode with differentiable operations."""
    shape = (-1, *[1] * (x.ndim - 2))
    state: Any = layer
    x = (x - state.running_mean.reshape(shape)) * (state.running_var + layer.eps).rsqrt().reshape(shape)
    return x if layer.weight is None else x * layer.weight.reshape(shape) + layer.bias.reshape(shape)


def _drawn(value: Any, generator: torch.Generator) -> Any:
    """Return a random input with the shape and dtype of an example input."""
    if not isinstance(value, Tensor) or value.dtype == torch.bool or value.numel() == 0:
        return value
    if value.is_floating_point():
        # Some inputs are large. Otherwise more units would always be active.
        size = 4.0 ** int(torch.randint(0, 2, (), generator=generator, device=generator.device))
        return size * torch.randn(value.shape, generator=generator, dtype=value.dtype)
    low, high = int(value.min()), int(value.max())
    return torch.randint(low, high + 1, value.shape, generator=generator, dtype=value.dtype)


def _drawn_near(value: Any, generator: torch.Generator) -> Any:
    """Return a random input about as large as an example, and nonnegative if the example is nonnegative."""
    if not isinstance(value, Tensor) or not value.is_floating_point() or not value.numel():
        return _drawn(value, generator)
    if float(value.min()) >= 0:
        return value.max() * torch.rand(value.shape, generator=generator, dtype=value.dtype)
    return value.square().mean().sqrt() * torch.randn(value.shape, generator=generator, dtype=value.dtype)


def _drawn_nearer(value: Any, generator: torch.Generator) -> Any:
    """Return a random input as `_drawn_near` does, but copy whole numbers, which may be positions, from the example."""
    is_kept = isinstance(value, Tensor) and not value.is_floating_point()
    return value if is_kept else _drawn_near(value, generator)


def _tangents(symmetry: Symmetry, params: Params, names: list[str]) -> Tensor:
    """Return the derivatives of a network along all one-parameter subgroups, `[directions, parameters]`."""
    bound = symmetry.bind(params)
    rows = [torch.zeros(0, sum(params[name].numel() for name in names), dtype=torch.float64)]
    for group in bound.groups:
        ends = _subgroups(bound, group)
        if ends is not None:
            rows.append(_slope([bound.act(end, _repeated(params, end)) for end in ends], names))
    for family in bound.translations:
        along = torch.eye(family.size, dtype=torch.float64).reshape(family.size, *family.shape)
        one = bound.identity((family.size,))
        ends = [one.translated({family.name: step * along}) for step in STEPS]
        rows.append(_slope([bound.act(end, _repeated(params, end)) for end in ends], names))
    return torch.cat(rows)


def _rotations_behind_gains(symmetry: Symmetry, unit: Symmetry, params: Params, names: list[str]) -> Tensor:
    """Return derivatives along rotations of a rescaled network with gains of one: `[directions, parameters]`."""
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
    """Return elements along each one-parameter subgroup of a group, one batch for each step size in `STEPS`.

    The result is None if the group has no scales, rotations or matrices, and therefore no continuous elements.
    """
    value = bound.identity()[group.name]
    field = "matrix" if value.matrix is not None else "scale"
    start = getattr(value, field)
    if start is None:
        return None
    count = start.numel()
    along = torch.eye(count, dtype=torch.float64).reshape(count, *start.shape)
    # The tangent space of O(n) at the identity: antisymmetric matrices; with the ones kept, those that map them
    # to zero, on both sides.
    if group.matrix == "orthogonal":
        along = along - along.mT
    if group.keeps_ones:
        basis = zero_sum_basis(group.size)
        along = (basis.mT @ basis) @ along @ (basis.mT @ basis)
    one = bound.identity((count,))
    ends = (replace(one[group.name], **{field: start + step * along}) for step in STEPS)
    return [one.replace(group.name, end) for end in ends]


def _repeated(tensors: Mapping[str, Tensor], element: Element) -> Params:
    """Return a population of copies of one network, with one copy for each element of a batch."""
    return {name: tensor.expand(*element.batch, *tensor.shape) for name, tensor in tensors.items()}


def _slope(ends: Sequence[Params], names: list[str]) -> Tensor:
    """Return derivatives along directions, computed from differences of populations: `[directions, parameters]`."""
    parts = [torch.cat([end[name].reshape(len(end[name]), -1) for name in names], 1) for end in ends]
    total: Tensor = sum(weight * part for weight, part in zip(WEIGHTS, parts, strict=True)) / (12 * STEP)  # type: ignore[assignment]
    return total


def _known_kinds(module: nn.Module, params: Params, names: list[str], is_active: Tensor) -> list[tuple[str, Tensor]]:
    """Return known causes of null directions that belong to no symmetry, and the directions for each cause."""
    everything = torch.eye(len(is_active), dtype=torch.float64)
    parts = dict(zip(names, torch.split(everything, [params[name].numel() for name in names]), strict=True))
    stored, poles = [everything[:0]], [everything[:0]]
    for home, layer in module.named_modules():
        gain, bias, mean, variance = (
            f"{home}.{name}".removeprefix(".") for name in ("weight", "bias", "running_mean", "running_var")
        )
        if gain not in params or bias not in parts:
            continue
        if isinstance(layer, _BatchNorm) and {gain, mean, variance} <= parts.keys():
            deviation = (params[variance] + layer.eps).sqrt()
            stored.append(parts[mean] + parts[bias] * (params[gain] / deviation).unsqueeze(-1))
            stored.append(
                2 * deviation.square().unsqueeze(-1) * parts[variance] + params[gain].unsqueeze(-1) * parts[gain]
            )
        elif isinstance(layer, nn.LayerNorm) and params[gain].ndim == 1 and bool(params[gain].all()):
            inverse = 1 / params[gain]
            for name in parts:
                if params[name].shape[1:] != inverse.shape or f"{name.removesuffix('weight')}bias" in parts:
                    continue
                rows = parts[name].reshape(*params[name].shape, -1)
                poles.append(torch.einsum("ijp,j->ip", rows, inverse))
            poles.append(parts[bias])
    return [
        (
            "of values without influence: of units that are dead at this point, of what only chooses, or is unused",
            everything[~is_active],
        ),
        ("of statistics as stored: mean against beta, variance against gamma", torch.cat(stored)),
        ("with a pole: a beta against a layer that reads it and has no bias", torch.cat(poles)),
    ]

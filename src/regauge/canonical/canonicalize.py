"""Canonical networks (one for each orbit), distances between orbits, and a norm for a classifier's last layer."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from regauge.alignment import Method, WeightMatching, align, align_pairs
from regauge.alignment.representatives import restrict_method
from regauge.alignment.streamed.source import move_pieces
from regauge.canonical.carry_out import carry_out, leading_axes
from regauge.canonical.null_spaces import without_null_spaces
from regauge.canonical.step_plan import LinearStep, RotationStep, ScaleStep, plan
from regauge.checkpoints.alignments import Alignment
from regauge.checkpoints.checkpoint import Checkpoint
from regauge.checkpoints.job import Network, open_call, with_files
from regauge.checkpoints.memory_limit import MemoryLimit
from regauge.checkpoints.output import Output
from regauge.checkpoints.writing import Pieces
from regauge.core.arguments import check_arguments
from regauge.core.behind_gains import lift, zero_gains
from regauge.core.chart import onto_representative
from regauge.core.element import ALL_PARTS, PARTS, ROTATION, TRANSLATION, Element, require_parts, select_parts
from regauge.core.families import balanced_matrices, move_tensor
from regauge.core.given import as_params
from regauge.core.interpolation import distance
from regauge.core.params import Params, require_finite, require_same_shapes, round_to
from regauge.core.symmetry import Symmetry
from regauge.core.task import Task


@check_arguments
@with_files
def canonicalize(
    params: Network,
    symmetry: Symmetry,
    *,
    parts: Sequence[str] | None = None,
    reference: Network | None = None,
    method: Method | None = None,
    task: Task | None = None,
    generator: torch.Generator | None = None,
    out: Output | str | Path | None = None,
    memory: int | str | MemoryLimit | None = None,
) -> Params:
    """Return the canonical form of a network.

    The canonical form is the same for all networks on the orbit, and computes the same function as the network. For
    every element g, `canonicalize(act(g, p)) == canonicalize(p)` up to rounding.

    | freedom | how it is fixed |
    | --- | --- |
    | scales | the incoming weights of each unit have norm one; the bias is scaled too, but is not part of the norm |
    | signs | the sum of the incoming weights is positive; if zero, the sum of their cubes, then other tensors |
    | half periods | the bias of a sine unit with frequency w lies in (-pi / 2 w, pi / 2 w] |
    | rotations | the Gram matrix of all rotated entries is diagonal, with the largest entry first |
    | invertible matrices | the Gram matrices of both sides (queries, keys) are equal and diagonal, up to the rank |
    | order | ascending sums of the incoming weights, then of their squares and cubes, then entry by entry |
    | translations | each family is zero or centered, as in `symmetry.split` |
    | rotations behind gains | gains are one, and the stream is rotated; if a gain is zero, the stream is reordered |

    Layers are processed in the order of the signal. Each step fixes one kind of freedom, such as scales, by entries
    that no later step changes. If no entries determine a kind of freedom, it is not fixed.
    `canonical_manifold(symmetry).left` describes the freedom that is not fixed. In a normalization layer, gain and bias
    together, or the gain alone, get norm one, which fixes the scales. The scales of a residual stream are fixed by
    layers that write to the stream without reading hidden units. Batch normalization is treated as in evaluation mode.
    Running statistics are transformed along with the parameters. If running statistics are recomputed afterwards, the
    function changes.

    The canonical form has the following limits. If a unit has no incoming weights, its bias is scaled to one. If a unit
    has no incoming weights and its bias is zero, its outgoing weights are scaled. Equal units keep their order, because
    exchanging them gives the same network. Rotations are fixed only if the eigenvalues of their Gram matrix are
    distinct. If eigenvalues are equal, the canonical form still computes the same function, but depends on which
    network of the orbit is given. The canonical form also depends on the given network if two compared numbers are
    equal up to rounding.

    A product of two matrices may have more inner coordinates than its rank. For example, the product of `Linear(4, 6)`
    and `Linear(6, 2)` has six inner coordinates and at most rank two. If the rank is lower than the number of inner
    coordinates, some entries of the factors do not affect the function. For a product of lower rank, the canonical form
    contains the factorization by rank, which preserves the function. The factorized network is not on the orbit of the
    given network, but networks on the orbit come arbitrarily close to it. Networks with the same canonical form
    therefore compute the same function, but may lie on different orbits. Inner coordinates that are zero in both
    factors have zero gradients. `factorize` computes only the factorization by rank.

    Args:
        params: A network, a population with a leading model axis, or the path of a checkpoint. The given tensors are
            not modified.
        symmetry: The symmetry of the architecture.
        parts: The parts of the symmetry to fix: some of "permutation", "sign", "scale", "shift", "linear",
            "translation" and "rotation". Default: all parts. A network has the same canonical form before and after any
            transformation from the given parts.
        reference: A network of the same architecture. With a reference, alignment to the reference fixes signs, half
            periods, rotations and order, instead of sums and sorting. Before the alignment, the translations, gains,
            scales and invertible matrices of the reference are fixed as well.
        method: The method that aligns the network to the reference. Default: `WeightMatching(scales="keep")`. Scales
            that the method chooses are ignored.
        task: Model, data and loss, for methods that need a task.
        generator: The random number generator, for methods that use random numbers.
        out: The path or `Output` to which the canonical form of a checkpoint is written, together with its element.
        memory: The memory limit for a checkpoint: a number of bytes, or text such as "2GB". Default: half of the
            machine's memory. All parameters in float64 must fit within the limit.

    Returns:
        The network `act(canonical_element(params, symmetry, ...), params)` up to rounding, if every matrix product has
        full rank. Translations that are fixed at zero are exactly zero. Dtypes and devices stay the same. If `out` is
        given, the returned tensors are read from the output on access.

    Raises:
        FileExistsError: The output exists and may not be replaced.
        KeyError: A parameter on which the symmetry acts is missing.
        ValueError: Parameters do not fit the symmetry or are not finite. A part is unknown, or "rotation" is given
            without "translation". `parts` or the method cannot be combined with the reference. The memory limit is too
            low.

    References:
        Pittorino et al. (2022), section 2.2, for scales and order in ReLU networks; Erdogan (2025), section 4.4.
    """
    settings = {"parts": parts, "method": None if method is None else repr(method)}
    ways: Any = {"symmetry": symmetry, "generator": generator, "work": "canonicalizing"}
    named = {"network": params, "reference": reference}
    job = open_call("rg.canonicalize", settings, named, out=out, memory=memory, **ways)
    if job is not None:
        job.require_memory()
        params, *others = (checkpoint.params for checkpoint in job.checkpoints)
        reference = next(iter(others), None)
    params = as_params(params)
    reference = None if reference is None else as_params(reference, "the reference")
    symmetry = symmetry.bind(params)
    given: Any = {"reference": reference, "method": method, "task": task, "generator": generator}
    base, element = _find_canonical(params, symmetry, parts, **given)
    if job is not None and job.out is not None:
        # Elements act on one tensor at a time, so the whole canonical network is never in memory.
        pieces = _canonical_pieces(job.source, symmetry, element, base)
        whole = _on_given(symmetry, parts, element, params)
        return cast(Params, job.write(pieces, lambda path: Alignment(symmetry, whole).save(path, overwrite=True)))
    moved = symmetry.act(element, base)
    return {name: tensor.to(params[name]) for name, tensor in moved.items()}


def _canonical_pieces(
    checkpoint: Checkpoint, symmetry: Symmetry, element: Element, base: Mapping[str, Tensor]
) -> Pieces:
    """Yield the canonical form of a checkpoint, tensor by tensor.

    The argument `base` contains the tensors that have already changed.
    """
    plain = move_pieces(checkpoint, symmetry, element)
    rotated = symmetry.act(element, base) if element.rotation and base is not checkpoint.params else {}

    def pieces(name: str) -> Iterator[Tensor]:
        given = checkpoint.params[name]
        if name in rotated:
            return iter([rotated[name].to(given.dtype)])
        if base[name] is given:
            return plain(name)
        return iter([move_tensor(symmetry, element, name, base[name]).to(given.dtype)])

    return pieces


@check_arguments
def factorize(
    params: Mapping[str, Tensor], symmetry: Symmetry, *, parts: Sequence[str] | None = None
) -> Mapping[str, Tensor]:
    """Return a network with the same function in which the factors of matrix products have minimal rank.

    If a product does not have full rank, one of its factors has coordinates that the other factor never reads. In the
    returned network, each factor is zero in all directions that the other factor does not read. The returned network
    computes the same function as the given network. However, the two networks are not on the same orbit, so no element
    maps the given network to the returned network. `canonicalize` begins with `factorize`.

    Args:
        params: A network, or a population with a leading model axis.
        symmetry: The symmetry of the architecture.
        parts: The parts of the symmetry; see `canonicalize`. If "linear" is not among the parts, nothing changes.

    Returns:
        The given tensors if every product has full rank, otherwise new tensors in float64 on the CPU.
    """
    symmetry = symmetry.bind(params)
    is_asked = parts is None or "linear" in parts
    return without_null_spaces(params, symmetry) if is_asked and balanced_matrices(symmetry) else params


@check_arguments
def canonical_element(
    params: Mapping[str, Tensor],
    symmetry: Symmetry,
    *,
    parts: Sequence[str] | None = None,
    reference: Mapping[str, Tensor] | None = None,
    method: Method | None = None,
    task: Task | None = None,
    generator: torch.Generator | None = None,
) -> Element:
    """Return the element that `canonicalize` applies, or a batch of elements for a population."""
    symmetry = symmetry.bind(params)
    given: Any = {"reference": reference, "method": method, "task": task, "generator": generator}
    _, element = _find_canonical(params, symmetry, parts, **given)
    return _on_given(symmetry, parts, element, params)


def _find_canonical(
    given: Mapping[str, Tensor],
    symmetry: Symmetry,
    parts: Sequence[str] | None,
    *,
    reference: Mapping[str, Tensor] | None,
    method: Method | None,
    task: Task | None,
    generator: torch.Generator | None,
) -> tuple[Mapping[str, Tensor], Element]:
    """Return a representative with factorized products, and the element that makes it canonical."""
    chosen = ALL_PARTS if parts is None else tuple(parts)
    require_parts(chosen)
    if ROTATION in chosen and TRANSLATION not in chosen and symmetry.translations:
        raise ValueError("rotations can only be fixed together with translations; name the part 'translation', too")
    if reference is None and not (method is None and task is None and generator is None):
        raise ValueError("method, task and generator are for the alignment to a reference; give one, or leave them out")
    if reference is not None and parts is not None:
        raise ValueError("a reference fixes all parts at once; leave out either `parts` or `reference`")
    require_finite(given, "the network", symmetry.structure)
    params = _base(given, symmetry, chosen)
    element = _carry_out(symmetry, params, chosen)
    if reference is None:
        return params, element
    # Aligning the sorted network, not the given one, makes the outcome the same for the whole orbit even where
    # matching ends in a local optimum.
    require_finite(reference, "the reference", symmetry.structure)
    reference = _base(reference, symmetry, chosen)
    steps = plan(symmetry)
    steps = replace(steps, steps=tuple(s for s in steps.steps if isinstance(s, ScaleStep | LinearStep | RotationStep)))
    anchor = symmetry.act(carry_out(steps, symmetry, reference, chosen), reference)
    moved = symmetry.act(element, params)
    found = match_canonical(anchor, moved, symmetry, method=method, task=task, generator=generator)
    return params, symmetry.compose(found, element)


def _base(params: Mapping[str, Tensor], symmetry: Symmetry, parts: Sequence[str]) -> Mapping[str, Tensor]:
    """Return a network without translations and with products factorized by rank."""
    split = symmetry.split(params)[0] if _is_split(symmetry, parts) else params
    return factorize(split, symmetry, parts=parts)


def _is_split(symmetry: Symmetry, parts: Sequence[str]) -> bool:
    """Return whether the given parts include the parts that representatives fix: translations and rotations."""
    return bool((symmetry.translations and TRANSLATION in parts) or (symmetry.rotatable and ROTATION in parts))


def _carry_out(symmetry: Symmetry, params: Mapping[str, Tensor], parts: Sequence[str]) -> Element:
    """Return the element that makes a representative canonical, restricted to some parts of the symmetry.

    Residual streams in which a gain is zero are not rotated.
    """
    names = symmetry.rotatable if ROTATION in parts else ()
    is_free, found = _is_free(symmetry, params) & bool(names), []
    if bool(is_free.any()):
        behind = symmetry.on_representatives(rotate=True)
        turned = carry_out(plan(behind), behind, params, parts, streams=names)
        found.append(lift(symmetry, turned, names))
    if not bool(is_free.all()):
        found.append(carry_out(plan(symmetry), symmetry, params, parts))
    return found[0].where(is_free, found[1]) if len(found) > 1 else found[0]


def _is_free(symmetry: Symmetry, params: Mapping[str, Tensor]) -> Tensor:
    """Return, for each network, whether its residual streams can be rotated because no gain is zero: bool `[*lead]`."""
    zero = zero_gains(symmetry, params, symmetry.rotatable)
    return ~torch.stack([*zero.values()]).any(0) if zero else torch.tensor(False)


def _on_given(
    symmetry: Symmetry, parts: Sequence[str] | None, element: Element, params: Mapping[str, Tensor]
) -> Element:
    """Return the element for a network that corresponds to an element for its representative."""
    is_moved = _is_split(symmetry, ALL_PARTS if parts is None else parts)
    return onto_representative(symmetry, element, params) if is_moved else element


@check_arguments
def orbit_distance(
    params_a: Mapping[str, Tensor],
    params_b: Mapping[str, Tensor],
    symmetry: Symmetry,
    *,
    method: Method | None = None,
    task: Task | None = None,
    generator: torch.Generator | None = None,
) -> float:
    """Return the distance of two networks up to symmetry, an upper bound on the distance between their orbits.

    Both networks are canonicalized, and the second network is aligned to the first network. The returned distance is
    the Euclidean distance between their parameters, without buffers. Scales give incoming weights unit norm, and are
    not chosen to bring the networks closer. Up to rounding, the distance depends only on the two orbits. The distance
    is zero if both networks are on one orbit, or if they have the same factorization by rank (see `canonicalize`). The
    returned distance is an upper bound on the smallest distance, because matching ends in a local optimum.

    Args:
        params_a: The first network.
        params_b: The second network, with the same architecture.
        symmetry: The symmetry of the architecture.
        method: The method that aligns the second network. Default: `WeightMatching(scales="keep")`.
        task: Model, data and loss, for methods that need a task.
        generator: The random number generator, for methods that use random numbers.

    Raises:
        KeyError: A parameter on which the symmetry acts is missing.
        ValueError: The networks have different parameters, do not fit the symmetry, contain NaN or Inf, or are
            populations.
    """
    require_same_shapes(params_a, params_b)
    symmetry = symmetry.bind(params_a)
    first, second = canonicalize(params_a, symmetry), canonicalize(params_b, symmetry)
    element = match_canonical(first, second, symmetry, method=method, task=task, generator=generator)
    ignored = {*symmetry.buffers, *(name for names in symmetry.tied for name in names[1:])}
    return min(distance(first, b, ignored) for b in (second, symmetry.act(element, second)))


@check_arguments
def normalize_logits(
    params: Mapping[str, Tensor], symmetry: Symmetry, *, weight: str, bias: str | None = None, norm: float = 1.0
) -> Params:
    """Scale the last layer of a network such that its weight has the Euclidean norm `norm`.

    Scaling the last layer is not a symmetry, because it multiplies all logits by the same positive number. The ranking
    of the classes stays the same, but probabilities, calibration and loss change. Therefore `canonicalize` never scales
    the last layer.

    Args:
        params: A network, or a population with a leading model axis.
        symmetry: The symmetry of the architecture.
        weight: The name of the last layer's weight.
        bias: The name of the last layer's bias, if there is one. If the layer has a bias that `bias` does not name, the
            predicted class may change.
        norm: The norm of the weight: one, as in section 6.2 of the thesis, or the square root of the number of classes,
            as in section 4.4.

    Raises:
        KeyError: The network has no parameter with the given name.
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
    lead = leading_axes(symmetry, params)
    norms = torch.linalg.vector_norm(params[weight].double().flatten(lead), dim=-1)
    if bool((norms == 0).any()):
        raise ValueError(f"{weight!r} is zero, so no factor gives it the norm {norm}; name another weight")
    scaled = dict(params)
    for name in (weight, bias):
        if name is not None:
            factor = (norm / norms).reshape(norms.shape + (1,) * (params[name].ndim - lead))
            scaled[name] = round_to(params[name].double() * factor, params[name].dtype, name)
    return scaled


def match_canonical(
    anchor: Mapping[str, Tensor],
    moved: Mapping[str, Tensor],
    symmetry: Symmetry,
    *,
    method: Method | None,
    task: Task | None,
    generator: torch.Generator | None,
) -> Element:
    """Return the element, without scales, that aligns a canonical network, or each network of a population, to an
    anchor.
    """
    method = WeightMatching(scales="keep") if method is None else method
    run: Any = align_pairs if leading_axes(symmetry, moved) else align
    names = symmetry.rotatable if all(bool(_is_free(symmetry, one).all()) for one in (anchor, moved)) else ()
    behind = symmetry
    if names:  # Canonical networks have gains of one up to rounding.
        behind = replace(symmetry.on_representatives(rotate=True), ones=symmetry.ones)
        method = restrict_method(method, symmetry, names)
    found = run(anchor, moved, behind, method=method, task=task, generator=generator, rotate="never").element
    kept = select_parts(found, behind.groups, tuple(part for part in PARTS if part != "scale"))
    return lift(symmetry, kept, names) if names else kept

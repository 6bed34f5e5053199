"""Moved and merged checkpoints piece by piece, as a writer asks for them."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from regauge.alignment.streamed.memory import CHUNK
from regauge.core import act as _act
from regauge.core.element import Element
from regauge.core.interpolation import shares_of
from regauge.core.symmetry import Symmetry
from regauge.merging.rules import Average, Rule, TaskArithmetic
from regauge.storage.checkpoints.checkpoint import Checkpoint
from regauge.storage.checkpoints.shards import Pieces


def moved_pieces(checkpoint: Checkpoint, symmetry: Symmetry, element: Element) -> Pieces:
    """The values of `symmetry.act(element, params)`, with the dtypes of the checkpoint.

    Args:
        checkpoint: The network that moves.
        symmetry: With every size known.
        element: One value per group.
    """

    def pieces(name: str) -> Iterator[Tensor]:
        for rows in ranges(checkpoint, symmetry, name):
            yield _moved(symmetry, element, name, checkpoint.read(name, rows=rows))

    return pieces


def merged_pieces(
    networks: Sequence[Checkpoint],
    elements: Sequence[Element | None],
    symmetry: Symmetry,
    *,
    rule: Rule,
    weights: Sequence[float] | None = None,
    base: Checkpoint | None = None,
) -> Pieces:
    """The values of a merged network, with the dtypes of the base or else of the first network.

    Sums are taken in float32 or float64 and rounded once. Where there is a base, running statistics are the plain mean
    of those of the networks; integers are those of the first network or the base.

    Args:
        networks: All of one architecture.
        elements: What moves each of them; None for those that stay.
        symmetry: With every size known.
        rule: `Average`, or `TaskArithmetic`, which needs a base.
        weights: One for each network; see the rules.
        base: The network that task vectors count from.

    Raises:
        ValueError: The rule looks at more than one entry at a time, a base is missing or useless, or the weights do not
            fit.
    """
    if not isinstance(rule, Average | TaskArithmetic):
        raise ValueError(
            f"{rule} needs the networks in memory; choose the average or task arithmetic, which go entry by entry, "
            "or allow more --memory"
        )
    if (base is None) != isinstance(rule, Average):
        raise ValueError(f"{rule} {'needs a base' if base is None else 'takes no base'}")
    if isinstance(rule, Average):
        factors = shares_of(weights, len(networks))
    else:
        factors = tuple(rule.scale * w for w in rule.factors(weights, len(networks)))
    equal = shares_of(None, len(networks))
    reference = networks[0] if base is None else base

    def pieces(name: str) -> Iterator[Tensor]:
        dtype = reference.stored[name].dtype
        is_mean = base is None or name in symmetry.buffers
        own = equal if base is not None and is_mean else factors
        for rows in ranges(reference, symmetry, name):
            if not dtype.is_floating_point:
                yield reference.read(name, rows=rows)
                continue
            work = torch.promote_types(dtype, torch.float32)
            start = None if is_mean else reference.read(name, rows=rows, dtype=work)
            total: Tensor | None = None
            for network, element, factor in zip(networks, elements, own, strict=True):
                value = network.read(name, rows=rows, dtype=work)
                if element is not None:
                    value = _moved(symmetry, element, name, value)
                if start is not None:
                    value = value - start
                value = value * factor
                total = value if total is None else total.add_(value)
            assert total is not None
            yield (total if start is None else total.add_(start)).to(dtype)

    return pieces


def ranges(checkpoint: Checkpoint, symmetry: Symmetry, name: str) -> list[tuple[int, int] | None]:
    """Ranges of axis 0 in which a tensor may be moved; None for all of it."""
    shape = checkpoint.stored[name].shape
    sites = symmetry.sites.get(name, [])
    used = {s.placement.axis for s in sites} | {axis for s in sites for axis, _ in s.bases}
    if not shape or 0 in used or 0 in shape:
        return [None]
    rows = max(1, CHUNK // (4 * torch.Size(shape[1:]).numel()))
    return [(first, min(first + rows, shape[0])) for first in range(0, shape[0], rows)]


def _moved(symmetry: Symmetry, element: Element, name: str, tensor: Tensor) -> Tensor:
    if name not in symmetry.sites:
        return tensor
    sites = {name: symmetry.sites[name]}
    return _act.act(symmetry.groups, sites, element, {name: tensor}, {name: tensor.ndim})[name]

"""Soft matchings of units, computed from their vectors: logits, losses for changed copies, and plans."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from regauge.core.symmetry import Symmetry
from regauge.learn.unit_vectors import Placed
from regauge.relaxed.action import RelaxedAction
from regauge.relaxed.soft_elements import SoftElement, movable

FIXED = 30.0
"""The logit of the identity, for choices that cannot be made from vectors."""


@dataclass(frozen=True)
class Logits:
    """Logits for all pairs of units in one group and for every pair of networks, computed from the units' vectors.

    Attributes:
        pairs: Logits of pairs of units, computed from the vectors that no sign changes, `[pair, *blocks, *source
            blocks, n, n]`.
        signs: One term for each family of signs. The term is added to the logits if the sign of the pair is one, and
            subtracted if the sign is minus one. The term is None for a family of signs that does not change the
            vectors.
    """

    pairs: Tensor
    signs: Tensor | None

    def joint(self) -> Tensor:
        """The logits of pairs with any sign: the probability of a pair of units is summed over all possible signs."""
        if self.signs is None:
            return self.pairs
        z = self.signs.abs()  # |z| + softplus(-2 |z|) = log(e^z + e^-z), without overflow
        return self.pairs + (z + functional.softplus(-2 * z)).sum(1)


def logits_of(
    placed: Placed,
    a: Mapping[str, Tensor],
    b: Mapping[str, Tensor],
    sharpness: Tensor,
    name: str,
    blocks: tuple[int, ...],
) -> Logits | None:
    """Return the logits of one group from the vectors of two networks; None if the group has no vectors.

    Args:
        placed: The vectors as tensors on which the groups of the symmetry act.
        a: Vectors of the first networks, `[pair, (bases ...,) size, width]`.
        b: Vectors of the second networks.
        sharpness: The factor by which cosines are multiplied.
        name: The name of the group.
        blocks: The sizes of the axes over which the group is repeated, for targets and for sources; see
            `SoftElement.blocks_of`.
    """
    group = placed.symmetry[name]
    even: Tensor | float = 0.0
    odd: list[Tensor | float] = [0.0] * group.signs
    is_known = [False] * group.signs
    found = [(signs, tensor) for (units, signs), tensor in placed.names.items() if placed.groups[units] == name]
    if not found:
        return None
    for signs, tensor in found:
        products = sharpness * _products(a[tensor], b[tensor], blocks)
        families = [k for k, exponent in enumerate(signs[-1][: group.signs]) if exponent]
        if any(any(exponents) for exponents in signs[:-1]) or len(families) > 1:
            continue  # signs of several families at once
        if families:
            odd[families[0]], is_known[families[0]] = odd[families[0]] + products, True
        else:
            even = even + products
    assert isinstance(even, Tensor)
    if not any(is_known):
        return Logits(even, None)
    return Logits(even, torch.stack([torch.as_tensor(x).to(even).expand_as(even) for x in odd], 1))


def _products(x: Tensor, y: Tensor, blocks: tuple[int, ...]) -> Tensor:
    """Return inner products `[pair, *blocks, *source blocks, n, n]` of vectors `[pair, *blocks, n, width]`."""
    left, right = x.flatten(1, -3) if x.ndim > 3 else x.unsqueeze(1), y.flatten(1, -3) if y.ndim > 3 else y.unsqueeze(1)
    within = blocks[: len(blocks) // 2]
    if any(size > 1 for size in blocks[len(within) :]):
        made = torch.einsum("pbud,pcvd->pbcuv", left, right)
    else:
        made = torch.einsum("pbud,pbvd->pbuv", left, right)
    return made.reshape(len(x), *blocks, x.shape[-2], y.shape[-2])


def copy_loss(placed: Placed, a: Mapping[str, Tensor], b: Mapping[str, Tensor], sharpness: Tensor) -> Tensor:
    """Return the cross entropy, in nats, of matching units with their copies, averaged over rows, columns and groups.

    A copy has the same signs as the original network. If signs are also chosen, the cross entropy of the signs is
    therefore added.
    """
    losses = []
    for name in dict.fromkeys(placed.groups[units] for units, _ in placed.names):
        group = placed.symmetry[name]
        within = tuple(placed.symmetry[base].size for base in group.within)
        found = logits_of(placed, a, b, sharpness, name, (*within, *(1 for _ in within)))
        if found is None or group.size < 2:
            continue
        logits = found.joint().reshape(-1, group.size, group.size)
        right = torch.arange(group.size, device=logits.device).expand(len(logits), -1)
        losses.append((functional.cross_entropy(logits, right) + functional.cross_entropy(logits.mT, right)) / 2)
        if found.signs is not None:
            own = found.signs.diagonal(dim1=-2, dim2=-1)
            losses.append(functional.softplus(-2 * own).mean())
    return torch.stack(losses).mean() if losses else sharpness * 0.0


class SoftMoves:
    """The second network of each pair, transformed by plans: doubly stochastic matrices, computed from unit vectors.

    An element with exact permutations has already transformed the second networks and their vectors, so the plans
    describe deviations from the exact element. Plans do not change scales, shifts, matrices, or anything else that
    vectors do not determine.

    Args:
        placed: The vectors as tensors on which the groups of the symmetry act.
        symmetry: The symmetry of the networks, with every size known.
        names: Names of the tensors that are transformed.
        tolerance: The largest error of a row sum in a plan.
        max_iterations: The largest number of Sinkhorn iterations, even if the error still exceeds `tolerance`.
    """

    def __init__(
        self, placed: Placed, symmetry: Symmetry, names: Iterable[str], *, tolerance: float, max_iterations: int
    ) -> None:
        self._placed, self._symmetry = placed, symmetry
        self._tolerance, self._max_iterations = tolerance, max_iterations
        self._action = RelaxedAction(symmetry, names, movable(symmetry))

    def __call__(
        self, a: Mapping[str, Tensor], b: Mapping[str, Tensor], second: Mapping[str, Tensor], sharpness: Tensor
    ) -> dict[str, Tensor]:
        """Return the second networks, transformed by plans. The plans are computed from the vectors of the first and
        second networks, `[pair, (bases ...,) size, width]`.
        """
        if not self._action.keys:
            return dict(second)
        like = next(iter(second.values()))
        soft = SoftElement(
            self._symmetry,
            self._action.keys,
            len(like),
            confidence=0.5,
            temperature=1.0,
            like=like,
            tolerance=self._tolerance,
            max_iterations=self._max_iterations,
        )
        given = soft.parameters
        for name in movable(self._symmetry):
            blocks, signs, part = soft.blocks_of(name), f"signs of {name}", soft.parts(name)
            found = logits_of(self._placed, a, b, sharpness, name, blocks)
            if name in soft.signs:
                given[signs] = FIXED * given[signs] if found is None or found.signs is None else found.signs.to(like)
            if part is not None:
                n, start, count = part
                shape = (len(like), *blocks, n, n)
                own = found.pairs.to(like) if found else (FIXED * torch.eye(n).to(like)).expand(shape)
                plans = given[f"plans of {n}"]
                own = own.reshape(len(like), count, n, n)
                given[f"plans of {n}"] = torch.cat([plans[:, :start], own, plans[:, start + count :]], 1)
        soft.load(given)
        return self._action(soft.matrices(), second)


def relative_distances(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Tensor:
    """Return the squared distance of two tensors divided by the sum of their squared norms, averaged over tensors:
    `[pair]`.
    """
    shares = []
    for name, x in a.items():
        norms = x.square().flatten(1).sum(1) + b[name].square().flatten(1).sum(1)
        shares.append((x - b[name]).square().flatten(1).sum(1) / norms.clamp_min(torch.finfo(norms.dtype).tiny))
    return torch.stack(shares).mean(0) if shares else torch.zeros(0)

"""Soft elements: a doubly stochastic plan with soft signs for every group, as parameters for an optimizer.

If a group is repeated within other groups, it has one plan for every pair of blocks. The matrix of the group is the
product of the plans of pairs with the plan of the blocks. Positive scales, shifts and rotations stay at the identity.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from regauge.core.closest import closest
from regauge.core.element import Element
from regauge.core.families import has_choice
from regauge.core.groups import Group, class_labels
from regauge.core.symmetry import Symmetry
from regauge.relaxed.action import Key, Matrices, block_sizes, split_character
from regauge.relaxed.sinkhorn_layer import sinkhorn

ITERATIONS = 20
TOLERANCE = 1e-3
SIGN_START = 1.0
"""The initial logit of the signs of units paired by the identity: tanh(1) = 0.76. The signs of all other pairs start at
zero."""


APART = 20.0
"""The penalty on pairs of units from different classes, in units of the temperature. Hard elements never pair units
from different classes."""


class SoftElement:
    """Soft elements, one for each of many pairs of networks. Soft elements start near the identity.

    Plans of one size form one tensor. Therefore all plans of one size are normalized at once.

    Args:
        symmetry: The symmetry. All its sizes must be known.
        keys: The keys of the required matrices.
        pairs: The number of pairs of networks.
        confidence: The share of each row of a plan that the identity has at the start. The rest of each row is uniform.
        temperature: The temperature of the Sinkhorn operator. Logits are scaled with the temperature.
        like: A tensor with the dtype and device of the matrices.
        tolerance: The largest accepted error of a plan's row sums. A moderate accuracy is sufficient while logits still
            change.
        max_iterations: The largest number of Sinkhorn iterations in one step. Potentials continue from the last step.
    """

    def __init__(
        self,
        symmetry: Symmetry,
        keys: Sequence[Key],
        pairs: int,
        *,
        confidence: float,
        temperature: float,
        like: Tensor,
        tolerance: float = TOLERANCE,
        max_iterations: int = ITERATIONS,
    ) -> None:
        self._tolerance, self._max_iterations = tolerance, max_iterations
        self._symmetry, self._keys, self._pairs, self._temperature = symmetry, keys, pairs, temperature
        self._like = like
        self._blocks: dict[str, tuple[int, ...]] = {}
        self._slices: dict[str, tuple[int, int, int]] = {}
        self.signs: dict[str, Tensor] = {}
        counts: dict[int, int] = {}
        for name in movable(symmetry):
            group, within = symmetry[name], block_sizes(symmetry, name)[:-1]
            is_moved = any(symmetry[base].is_permuted for base in group.within)
            self._blocks[name] = (*within, *(within if is_moved else (1,) * len(within)))
            count, n = math.prod(self._blocks[name]), group.size
            if group.is_permuted and n > 1:
                self._slices[name] = (n, counts.get(n, 0), count)
                counts[n] = counts.get(n, 0) + count
            if group.signs:
                at = torch.eye(n) if group.is_permuted else torch.ones(n, 1)
                at = at.to(like).expand(pairs, group.signs, *self._blocks[name], *at.shape)
                self.signs[name] = SIGN_START * temperature * at
        self.logits: dict[int, Tensor] = {}
        for n, count in counts.items():
            # The softmax of a row gives e^h / (e^h + n - 1) to its diagonal entry: `confidence`.
            height = math.log(confidence / (1 - confidence) * (n - 1)) * temperature
            eye = height * torch.eye(n, dtype=like.dtype, device=like.device)
            self.logits[n] = eye.expand(pairs, count, n, n).clone()
        self._potentials: dict[int, Tensor] = {}
        self._apart = {n: self._between_classes(n, count) for n, count in counts.items()}

    def _between_classes(self, n: int, count: int) -> Tensor | None:
        """Return the penalty on logits of pairs from different classes; None if each group has one class."""
        lost = torch.zeros(count, n, n)
        for name, (size, start, own) in self._slices.items():
            if size == n:
                labels = class_labels(self._symmetry[name])
                lost[start : start + own] = APART * self._temperature * (labels.unsqueeze(1) != labels)
        return lost.to(self._like) if bool(lost.any()) else None

    @property
    def parameters(self) -> dict[str, Tensor]:
        """The tensors that an optimizer updates."""
        plans = {f"plans of {n}": logits for n, logits in self.logits.items()}
        return plans | {f"signs of {name}": signs for name, signs in self.signs.items()}

    def parts(self, name: str) -> tuple[int, int, int] | None:
        """Return the size of a group's plans, the index of its first plan, and their number; None if it has no plans.

        The index counts all plans of the group's size. A group has one plan for each combination of blocks and source
        blocks. `blocks_of(name)` returns the numbers of blocks and source blocks.
        """
        return self._slices.get(name)

    def blocks_of(self, name: str) -> tuple[int, ...]:
        """Return the sizes of the groups within which a group is repeated, first for blocks, then for source blocks.

        If the groups that contain the group do not permute their blocks, the sizes of source blocks are 1.
        """
        return self._blocks[name]

    def load(self, parameters: Mapping[str, Tensor]) -> None:
        """Replace `parameters` by other tensors."""
        self.logits = {n: parameters[f"plans of {n}"] for n in self.logits}
        self.signs = {name: parameters[f"signs of {name}"] for name in self.signs}

    def matrices(self) -> Matrices:
        """Return the matrices of all keys, `[pair, N, N]`. The matrices are differentiable."""
        plans = self._plans()
        return {key: self._joint(key, plans) for key in self._keys}

    def hard(self) -> Element:
        """Return the hard elements closest to the plans, `[pair]`. Blocks are chosen before the groups within them."""
        with torch.no_grad():
            plans = self._plans()
        blank = self._symmetry.identity((self._pairs,))
        element = blank
        for name in sorted(self._blocks, key=lambda name: len(self._symmetry[name].within)):
            group = self._symmetry[name]
            perm, sign = blank[name].perm, blank[name].sign
            if name in self._slices:
                plan = self._chosen(group, element, plans[name])
                perm = closest(Group(name, group.size, (), classes=group.classes), plan).value.perm
            if name in self.signs:
                soft = [self._chosen(group, element, one) for one in self.signs[name].detach().unbind(1)]
                if group.is_permuted:
                    assert perm is not None
                    soft = [one.cpu().gather(-1, perm.unsqueeze(-1)) for one in soft]
                sign = torch.stack([torch.where(one.squeeze(-1).cpu() < 0, -1, 1) for one in soft], -2).to(torch.int8)
            element = element.replace(name, replace(blank[name], perm=perm, sign=sign))
        return element

    def _plans(self) -> dict[str, Tensor]:
        """Return the plan of every group, `[pair, *blocks, *source blocks, n, n]`."""
        plans = {}
        for n, logits in self.logits.items():
            apart = self._apart[n]
            plans[n], self._potentials[n] = sinkhorn(
                self._with_signs(n, logits if apart is None else logits - apart),
                self._temperature,
                potentials=self._potentials.get(n),
                tolerance=self._tolerance,
                max_iterations=self._max_iterations,
            )
        return {
            name: plans[n][:, start : start + count].reshape(self._pairs, *self._blocks[name], n, n)
            for name, (n, start, count) in self._slices.items()
        }

    def _with_signs(self, n: int, logits: Tensor) -> Tensor:
        """Return logits of unit pairs, computed from plans and signs. The probability of a pair is the sum of the
        probabilities of the pair with either sign.

        The two signs of a pair have the logits v + z and v - z. Therefore the logit of the pair is v + log cosh z up to
        a constant, and the mean sign is tanh z.
        """
        names = [name for name, (size, *_) in self._slices.items() if size == n]
        if not any(name in self.signs for name in names):
            return logits
        parts = []
        for name in names:
            _, start, count = self._slices[name]
            part = logits[:, start : start + count]
            if name in self.signs:
                z = (self.signs[name] / self._temperature).abs()
                log_cosh = (z + functional.softplus(-2 * z)).sum(1) * self._temperature
                part = part + log_cosh.reshape(part.shape)
            parts.append(part)
        return torch.cat(parts, 1)

    def _joint(self, key: Key, plans: dict[str, Tensor]) -> Tensor:
        """Return the matrix of a group with given exponents: the product of the matrices of the group's bases and of
        the group itself.
        """
        symmetry, group = self._symmetry, self._symmetry[key[0]]
        names = (*group.within, group.name)
        letters = iter("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
        target, source = ({name: next(letters) for name in names} for _ in range(2))
        terms, operands = [], []
        for name, exponents in split_character(symmetry, key).items():
            within = symmetry[name].within
            own = "".join(target[base] for base in within) + "".join(source[base] for base in within)
            term = self._own(symmetry[name], exponents, plans)
            if term.ndim == 3:  # no choice within blocks: the identity
                own = ""
            terms.append("z" + own + target[name] + source[name])
            operands.append(term)
        out = "z" + "".join(target[name] for name in names) + "".join(source[name] for name in names)
        joint = operands[0] if terms == [out] else torch.einsum(",".join(terms) + "->" + out, *operands)
        n = math.prod(block_sizes(symmetry, group.name))
        return joint.reshape(self._pairs, n, n)

    def _own(self, group: Group, exponents: Sequence[int], plans: dict[str, Tensor]) -> Tensor:
        """Return the part of a matrix that belongs to the group itself: its plan times the soft signs with odd
        exponents.
        """
        result = plans.get(group.name)
        if result is None:
            result = torch.eye(group.size, dtype=self._like.dtype, device=self._like.device).unsqueeze(0)
        if group.name in self.signs:
            soft = (self.signs[group.name] / self._temperature).tanh()
            for family, exponent in enumerate(exponents[: group.signs]):
                if exponent:
                    result = result * soft[:, family]
        return result

    def _chosen(self, group: Group, element: Element, values: Tensor) -> Tensor:
        """Return the entries of `[pair, *blocks, *source blocks, ...]` at the chosen source blocks."""
        if not group.within:
            return values
        sizes = (self._pairs, *block_sizes(self._symmetry, group.name)[:-1])
        grids = torch.meshgrid(*(torch.arange(size) for size in sizes), indexing="ij")
        at = dict(zip(group.within, grids[1:], strict=True))
        sources = []
        for k, base in enumerate(group.within):
            perm = element[base].perm
            here = (grids[0], *(at[other] for other in self._symmetry[base].within), at[base])
            is_single = values.shape[1 + len(group.within) + k] == 1
            sources.append(torch.zeros_like(grids[0]) if is_single else at[base] if perm is None else perm[here])
        return values.cpu()[(*grids, *sources)]


def movable(symmetry: Symmetry) -> list[str]:
    """Return the groups that a soft element can change: groups with permutations or signs."""
    return [g.name for g in symmetry.groups if g.matrix == "none" and has_choice(g) and (g.is_permuted or g.signs)]

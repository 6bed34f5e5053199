"""Elimination of groups of matrices from a layout: values are replaced by products that no matrix changes."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from string import ascii_lowercase, ascii_uppercase

import torch
from jaxtyping import Num
from torch import Tensor

from regauge.core.groups import Group
from regauge.weightspace.layout.blocks import Block, Label

Bases = tuple[tuple[int, ...], ...]
"""For each axis (label) of a block, the axes of the units within which its units are repeated."""
Known = Mapping[str, tuple[Block, Bases]]
MOST_PRODUCTS = 16
"""The largest number of entries of the products, as a multiple of the number of entries of their factors, up to which a
group of matrices is eliminated."""


@dataclass(frozen=True)
class Product:
    """The product of two blocks, summed over an axis that they have in common.

    Attributes:
        left: The name of the first factor, a block or a part of a tensor.
        right: The name of the second factor, a block or a part of a tensor.
        equation: The `torch.einsum` equation; the model axis comes first.
        turned: For rotations of planes, an axis of the right factor, counted with the model axis; None for all other
            groups. Each pair of entries (x, y) along the axis is also used as (-y, x), because rotations preserve
            oriented areas.
    """

    left: str
    right: str
    equation: str
    turned: int | None = None

    def __call__(self, values: Mapping[str, Tensor]) -> Num[Tensor, "models *labels channels"]:
        left, right = values[self.left], values[self.right]
        made = [torch.einsum(self.equation, left, right)]
        if self.turned is not None:
            x, y = right.unbind(self.turned)
            made.append(torch.einsum(self.equation, left, torch.stack([-y, x], self.turned)))
        return torch.cat([product.flatten(-2) for product in made], -1)


@dataclass(frozen=True)
class Reduction:
    """A step that removes one axis of a block: values or squares are summed along the axis, or the axis is merged with
    the channels.

    Attributes:
        source: The name of the block, or of the part of a tensor, whose axis is removed.
        axis: The axis, counted with the model axis.
        how: The operation on the axis.
    """

    source: str
    axis: int
    how: str

    def __call__(self, values: Mapping[str, Tensor]) -> Num[Tensor, "models *labels channels"]:
        tensor = values[self.source]
        if self.how == "sum":
            return tensor.sum(self.axis)
        if self.how == "square":
            return tensor.square().sum(self.axis)
        return tensor.movedim(self.axis, -2).flatten(-2)


Step = Product | Reduction


def eliminate(
    group: Group, blocks: Known, *, most: int | None
) -> tuple[dict[str, tuple[Block, Bases]], dict[str, Step]] | None:
    """Return blocks without the axes on which a group of matrices acts, and the steps that compute these blocks from
    the given blocks.

    For a group of invertible matrices, some values are multiplied by a matrix and others by its inverse. The products
    of values that the matrix multiplies with values that its inverse multiplies determine the orbit. For rotations, the
    norms of blocks and the products of all pairs of blocks determine the orbit. The result is None if products do not
    determine the orbit, or if the products have more than `most` times as many entries as their inputs. If the result
    is None, the group needs a canonical form.
    """
    places = {
        name: [k for k, label in enumerate(block.labels) if label.group == group.name]
        for name, (block, _) in blocks.items()
    }
    members = [name for name, found in places.items() if found]
    if any(len(places[name]) > 1 for name in members):
        return None
    axis = {name: places[name][0] for name in members}
    made: list[tuple[Block, Bases, Step]] = []
    if group.matrix == "linear":
        # A x and A^-T y have the product x^T y, and such products are all invariants of invertible matrices (first
        # fundamental theorem of invariant theory; Weyl 1946).
        inverse = [name for name in members if blocks[name][0].labels[axis[name]].is_inverse]
        pairs = [(a, b) for a in members if a not in inverse for b in inverse]
    else:
        pairs = list(combinations(members, 2)) or [(name, name) for name in members]
        made = [_reduced(blocks[name], axis[name], name, "square") for name in members]
        if group.keeps_ones:
            made += [_reduced(blocks[name], axis[name], name, "sum") for name in members]
    if not pairs:
        return None
    # Rotations of the plane without reflections also keep the oriented area x_1 y_2 - x_2 y_1.
    turns = group.is_proper and group.size == 2
    made += [_multiplied(blocks[a], axis[a], blocks[b], axis[b], is_turned=turns) for a, b in pairs]
    before = sum(_count(blocks[name][0]) for name in members)
    if most is not None and sum(_count(block) for block, _, _ in made) > most * before:
        return None
    kept = {name: known for name, known in blocks.items() if name not in members}
    kept.update({block.name: (block, bases) for block, bases, _ in made})
    return kept, {block.name: step for block, _, step in made}


def fold(block: Block, bases: Bases, groups: set[str]) -> tuple[Block, Bases, list[tuple[str, Step]]]:
    """Return a block in which the axes of some groups are merged with the channels, and the steps that merge these
    axes.
    """
    steps: list[tuple[str, Step]] = []
    while True:
        found = next((k for k, label in enumerate(block.labels) if label.group in groups), None)
        if found is None:
            return block, bases, steps
        folded, bases, step = _reduced((block, bases), found, block.name, "fold")
        steps.append((folded.name, step))
        block = folded


def _reduced(known: tuple[Block, Bases], axis: int, name: str, how: str) -> tuple[Block, Bases, Step]:
    block, bases = known
    labels, rest = _without(block.labels, bases, axis)
    channels = block.channels * (block.sizes[axis] if how == "fold" else 1)
    sizes = tuple(size for k, size in enumerate(block.sizes) if k != axis)
    if how == "square":
        labels = tuple(_joined(label, label) for label in labels)
    made = Block(f"{how}({name})", block.parameters, labels, sizes, channels, ())
    return made, rest, Reduction(name, axis + 1, how)


def _multiplied(
    left: tuple[Block, Bases], left_axis: int, right: tuple[Block, Bases], right_axis: int, *, is_turned: bool
) -> tuple[Block, Bases, Step]:
    """Return the product of two blocks over an axis of a matrix group.

    The two multiplied blocks share the axes within which the group is repeated.
    """
    (a, a_bases), (b, b_bases) = left, right
    letters = iter(ascii_lowercase[1:] + ascii_uppercase)
    common = dict(zip(b_bases[right_axis], a_bases[left_axis], strict=True))
    a_letters = [next(letters) for _ in a.labels]
    b_letters = [a_letters[common[k]] if k in common else next(letters) for k in range(len(b.labels))]
    b_letters[right_axis] = a_letters[left_axis]
    y, z = next(letters), next(letters)
    kept_a = [k for k in range(len(a.labels)) if k != left_axis]
    kept_b = [k for k in range(len(b.labels)) if k != right_axis and k not in common]
    out = [*(a_letters[k] for k in kept_a), *(b_letters[k] for k in kept_b)]
    equation = f"a{''.join(a_letters)}{y},a{''.join(b_letters)}{z}->a{''.join(out)}{y}{z}"
    place_a = {k: place for place, k in enumerate(kept_a)}
    place_b = {k: len(kept_a) + place for place, k in enumerate(kept_b)}
    place_b.update({k: place_a[there] for k, there in common.items()})
    shared = {there: k for k, there in common.items()}
    labels = [_joined(a.labels[k], b.labels[shared[k]]) if k in shared else a.labels[k] for k in kept_a]
    labels += [b.labels[k] for k in kept_b]
    bases = [tuple(place_a[base] for base in a_bases[k]) for k in kept_a]
    bases += [tuple(place_b[base] for base in b_bases[k]) for k in kept_b]
    sizes = (*(a.sizes[k] for k in kept_a), *(b.sizes[k] for k in kept_b))
    channels = a.channels * b.channels * (2 if is_turned else 1)
    parameters = tuple(dict.fromkeys((*a.parameters, *b.parameters)))
    made = Block(f"{a.name} * {b.name}", parameters, tuple(labels), sizes, channels, ())
    return made, tuple(bases), Product(a.name, b.name, equation, right_axis + 1 if is_turned else None)


def _joined(left: Label, right: Label) -> Label:
    """Return the label of an axis that both factors of a product have: the exponents of the two factors are added."""

    def parity(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
        return tuple((x + y) % 2 for x, y in zip(one, other, strict=True))

    scale = tuple(x + y for x, y in zip(left.scale, right.scale, strict=True))
    # Values to which half periods are added are biases of sines, which no group of matrices moves.
    parities = parity(left.parity, right.parity)
    return Label(left.group, scale, parity(left.sign, right.sign), parities, left.shift, reads=left.reads + right.reads)


def _without(labels: tuple[Label, ...], bases: Bases, axis: int) -> tuple[tuple[Label, ...], Bases]:
    def place(k: int) -> int:
        return k - (k > axis)

    kept = [k for k in range(len(labels)) if k != axis]
    return tuple(labels[k] for k in kept), tuple(tuple(place(base) for base in bases[k] if base != axis) for k in kept)


def _count(block: Block) -> int:
    total = block.channels
    for size in block.sizes:
        total *= size
    return total

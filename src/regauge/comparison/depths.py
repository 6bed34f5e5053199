"""The selection of blocks to compare in networks of one architecture with different numbers of blocks."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from regauge.alignment import align
from regauge.alignment.methods.weight_matching import WeightMatching
from regauge.alignment.representatives import has_representatives
from regauge.comparison.common import numbered_parts, restrict
from regauge.comparison.pair import Pair, measure_shares
from regauge.core.interpolation import mean_share
from regauge.core.params import Params
from regauge.core.symmetry import Symmetry

LARGE = 1 << 26
"""The number of entries above which blocks are matched by their numbers, because aligning many pairs is slow.
"""
Blocks = dict[int, dict[str, Tensor]]


@dataclass(frozen=True)
class Depths:
    """The names of matched blocks in two networks of different depths.

    Attributes:
        notes: Messages about the matched blocks.
        single: The name prefixes that blocks without a counterpart received, each with the original prefix.
    """

    notes: tuple[str, ...] = ()
    single: Mapping[str, str] = field(default_factory=dict)

    def as_stored(self, note: str) -> str:
        """Return a message in which blocks that have no counterpart in the other network have their original names."""
        for new, old in self.single.items():
            note = note.replace(f"'{new}", f"'{old}")
        return note


def match_depths(
    a: Mapping[str, Tensor], b: Mapping[str, Tensor], symmetry: Symmetry
) -> tuple[Mapping[str, Tensor], Depths]:
    """Give each block of the second network the number of the most similar block of the first network.

    Blocks are the outermost numbered parts of tensor names, such as `layers.7`. If one network has more blocks, blocks
    may have been removed or duplicated at any position. Block numbers therefore do not show which blocks correspond.
    Each pair of blocks with the same shapes is aligned together with the tensors outside all blocks. The best matching
    maximizes the sum of explained shares among all matchings that keep the order of blocks (Needleman and Wunsch,
    1970).

    Args:
        a: The first network.
        b: The second network.
        symmetry: The symmetry of the first network.

    Returns:
        The second network with new names, and messages about the matched blocks.
    """
    first, second = _stacks(a), _stacks(b)
    names, notes, single = {name: name for name in b}, list[str](), dict[str, str]()
    for stack in first.keys() & second.keys():
        own, other = first[stack], second[stack]
        if len(own) == len(other) or any(list(one) != list(range(len(one))) for one in (own, other)):
            continue
        if sum(tensor.numel() for tensor in a.values()) >= LARGE:
            notes.append(f"{stack + '*'!r} are compared in their order: matching takes too long in so large networks")
            continue
        scores = {
            (i, j): _score(a, b, symmetry, (f"{stack}{i}.", own[i]), (f"{stack}{j}.", other[j]))
            for i in own
            for j in other
            if _shapes(own[i]) == _shapes(other[j]) and (i - j) * (len(own) - len(other)) >= 0
        }
        found = _match_in_order(scores, len(own), len(other))
        if all(i == j for j, i in found.items()):
            continue
        for j, block in other.items():
            number = found.get(j, len(own) + len(other) + j)
            names |= {f"{stack}{j}.{rest}": f"{stack}{number}.{rest}" for rest in block}
            single |= {} if j in found else {f"{stack}{number}.": f"{stack}{j}."}
        pairs = ", ".join(f"{j} with {i}" for j, i in sorted(found.items()))
        notes.append(f"layers {stack + '*'!r} of B are compared with the most similar layers of A: {pairs}")
    is_renamed = any(new != old for old, new in names.items())
    return {names[n]: t for n, t in b.items()} if is_renamed else b, Depths(tuple(notes), single)


def _stacks(params: Mapping[str, Tensor]) -> dict[str, Blocks]:
    """Return the tensors of each stack of blocks. The keys are the prefix of the stack, then the block number, then the
    rest of the tensor's name.
    """
    found: dict[str, Blocks] = {}
    for name, tensor in params.items():
        for part in numbered_parts(name)[:1]:
            number = part.rpartition(".")[2]
            found.setdefault(part.removesuffix(number), {}).setdefault(int(number), {})[name[len(part) + 1 :]] = tensor
    return {stack: dict(sorted(blocks.items())) for stack, blocks in found.items()}


def _shapes(block: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {rest: tuple(tensor.shape) for rest, tensor in block.items()}


def _score(
    a: Mapping[str, Tensor],
    b: Mapping[str, Tensor],
    symmetry: Symmetry,
    own: tuple[str, Mapping[str, Tensor]],
    other: tuple[str, Mapping[str, Tensor]],
) -> float:
    """Return the mean explained share (squared correlation) of the tensors of two blocks after alignment."""
    outside = [n for n, t in a.items() if not numbered_parts(n) and n in b and b[n].shape == t.shape]
    pair: list[Params] = [
        {n: params[n] for n in outside} | {own[0] + rest: tensor for rest, tensor in block.items()}
        for params, block in ((a, own[1]), (b, other[1]))
    ]
    part = restrict(symmetry, {name: tuple(tensor.shape) for name, tensor in pair[0].items()}).bind(pair[0])
    if has_representatives(part):
        pair = [part.split(one)[0] for one in pair]
    part = part.on_representatives(rotate=bool(part.rotatable))
    element = align(pair[0], pair[1], part, method=WeightMatching()).element
    shares = measure_shares(Pair(pair[0], pair[1], part), element)
    return mean_share([share for share in shares if share.name.startswith(own[0])]) or 0.0


def _match_in_order(scores: Mapping[tuple[int, int], float], rows: int, columns: int) -> dict[int, int]:
    """Return the matching of rows and columns with the largest total score, among matchings that keep the order of rows
    and columns. The result is the row of each column.
    """
    best: dict[tuple[int, int], tuple[float, dict[int, int]]] = {}
    nothing = (0.0, dict[int, int]())
    for i in range(rows):
        for j in range(columns):
            options = [best.get((i - 1, j), nothing), best.get((i, j - 1), nothing)]
            if (i, j) in scores:
                total, pairs = best.get((i - 1, j - 1), nothing)
                options.append((total + scores[i, j], pairs | {j: i}))
            best[i, j] = max(options, key=lambda one: one[0])
    return best[rows - 1, columns - 1][1]

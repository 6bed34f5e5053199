"""The algebra of axes: how operators divide axes into factors and tie the factors of different axes.

An axis is a row-major product of atoms. An atom is a leaf (units that no operator distinguishes so far), a product of
smaller atoms, or a direct sum of layouts. Direct sums come from concatenations, fused projections and the gates of an
LSTM. If two axes are tied, leaves are split, cut and merged until both axes have the same structure. If two axes cannot
get the same structure, both are frozen, which is always correct.
"""

import math
from collections.abc import Collection, Iterable, Sequence
from itertools import accumulate, pairwise

UNROLL_LIMIT = 256
"""The largest number of equal blocks into which two tied axes are cut if their own blocks have incompatible sizes. If
two tied axes need more blocks, both axes are frozen.
"""


class Atom:
    """A node of the union-find forest of atoms, the factors into which operators divide axes. Only the root of each
    tree is an atom. All other nodes refer to their root.
    """

    __slots__ = ("branches", "factors", "frozen", "origins", "parent", "size")

    def __init__(self, size: int, frozen: str | None = None) -> None:
        self.size = size
        self.parent: Atom | None = None
        self.factors: list[Atom] | None = None
        self.branches: list[Layout] | None = None
        self.frozen = frozen
        self.origins: frozenset[tuple[str, int]] = frozenset()

    def find(self) -> "Atom":
        root = self
        while root.parent is not None:
            root = root.parent
        while self.parent is not None:
            self.parent, self = root, self.parent
        return root

    @property
    def is_leaf(self) -> bool:
        return self.factors is None and self.branches is None


Layout = list[Atom]
Term = tuple[int, tuple[tuple[Atom, int], ...]]
"""A block of an axis that is a product of leaves: its first index, and its leaves with their strides."""


def leaf(size: int, frozen: str | None = None) -> Layout:
    return [Atom(size, frozen)]


def size_of(layout: Layout) -> int:
    return math.prod(atom.size for atom in layout)


def expand(layout: Iterable[Atom]) -> Layout:
    """Split every factor of an axis that is itself a product, until only indivisible factors and direct sums remain."""
    result: Layout = []
    for atom in layout:
        root = atom.find()
        if root.factors is not None:
            result.extend(expand(root.factors))
        else:
            result.append(root)
    return result


def without_units(layout: Iterable[Atom]) -> Layout:
    """Return the indivisible factors and the direct sums of an axis, except those of size one."""
    return [atom for atom in expand(layout) if atom.size > 1]


def leaves(layout: Iterable[Atom]) -> Iterable[Atom]:
    """Yield every indivisible factor of a layout, including the factors in direct sums, as often as it occurs."""
    for atom in expand(layout):
        if atom.branches is None:
            yield atom
        else:
            for branch in atom.branches:
                yield from leaves(branch)


def freeze(layout: Iterable[Atom], reason: str) -> None:
    """Forbid all permutations of an axis, and record the reason.

    If an axis is frozen several times, only the first reason is recorded.
    """
    for atom in leaves(layout):
        if atom.frozen is None:
            atom.frozen = reason


def is_frozen(layout: Iterable[Atom]) -> bool:
    return all(atom.frozen is not None for atom in leaves(layout) if atom.size > 1)


def direct_sum(layouts: Sequence[Layout]) -> Layout:
    """Return the layout of a concatenation, which is a direct sum of the given layouts."""
    if len(layouts) == 1:
        return layouts[0]
    atom = Atom(sum(size_of(layout) for layout in layouts))
    atom.branches = [branch for layout in layouts for branch in _branches(layout)]
    return [atom]


def cut(layout: Layout, points: Iterable[int]) -> list[Layout]:
    """Cut an axis at the given indices, and return the consecutive pieces."""
    total = size_of(layout)
    inner = sorted({point for point in points if 0 < point < total})
    if not inner:
        return [list(layout)]
    full = expand(layout)
    units, product = [atom for atom in full if atom.size == 1], [atom for atom in full if atom.size > 1]
    pieces = _cut_product(product, inner)
    return [units + piece for piece in pieces] if units else pieces


def split(layout: Layout, sizes: Sequence[int]) -> list[Layout] | None:
    """Factor an axis into consecutive axes of the given sizes. Return None if the structure of the axis forbids it."""
    rest = expand(layout)
    result: list[Layout] = []
    for k, size in enumerate(sizes):
        taken: Layout = []
        if k == len(sizes) - 1:
            taken, rest = rest, []
        need = size // size_of(taken) if taken else size
        while need > 1 and rest:
            atom = rest[0]
            if atom.size == 1 or need % atom.size == 0:
                taken.append(rest.pop(0))
                need //= atom.size
            elif atom.size % need == 0:
                parts = _factor(atom, need)
                if parts is None:
                    return None
                taken.extend(parts[0])
                rest[:1] = parts[1]
                need = 1
            else:
                return None
        if size_of(taken) != size:
            return None
        result.append(taken)
    return result


def unify(a: Layout, b: Layout, reason: str) -> bool:
    """Tie two axes, index by index, by giving both axes the same factors.

    If the axes cannot get the same factors, freeze both axes and return False.
    """
    if size_of(a) != size_of(b):
        raise ValueError(f"cannot tie an axis of size {size_of(a)} to one of size {size_of(b)} ({reason})")
    if _unify_pieces(a, b, reason):
        return True
    clash = f"{reason}: block structures that do not nest"
    freeze(a, clash)
    freeze(b, clash)
    return False


def terms(layout: Iterable[Atom]) -> list[Term]:
    """Return the blocks of an axis, each a product of indivisible factors, in the order of their first index.

    Call this function only after all layouts are final.
    """
    result: list[Term] = [(0, ())]
    trailing = 1
    for atom in reversed(expand(layout)):
        if atom.branches is None:
            result = [(start, ((atom, trailing), *factors)) for start, factors in result]
        else:
            combined: list[Term] = []
            offset = 0
            for branch in atom.branches:
                for branch_start, branch_factors in terms(branch):
                    scaled = tuple((a, stride * trailing) for a, stride in branch_factors)
                    combined.extend(
                        ((offset + branch_start) * trailing + start, (*scaled, *factors)) for start, factors in result
                    )
                offset += size_of(branch)
            result = combined
        trailing *= atom.size
    return sorted(result, key=lambda term: term[0])


def _branches(layout: Layout) -> list[Layout]:
    full = expand(layout)
    if len(full) == 1 and full[0].branches is not None:
        return full[0].branches
    return [layout]


def _cut_product(product: Layout, points: list[int]) -> list[Layout]:
    if len(product) == 1:
        return _cut_atom(product[0], points)
    head, rest = product[0], product[1:]
    row = size_of(rest)
    rows = {p // row for p in points} | {p // row + 1 for p in points if p % row}
    row_points = sorted(p for p in rows if 0 < p < head.size)
    columns = sorted({p % row for p in points} - {0})
    head_pieces = _cut_atom(head, row_points)
    rest_pieces = _cut_product(rest, columns) if columns else [rest]
    parts: list[Layout] = []
    position = 0
    for head_piece in head_pieces:
        length = size_of(head_piece)
        if length == 1 and any(position < p < position + row for p in points):
            parts += [[*head_piece, *rest_piece] for rest_piece in rest_pieces]
        else:
            parts.append([*head_piece, *expand(rest)])
        position += length * row
    return _join_up_to(points, parts)


def _cut_atom(atom: Atom, points: Sequence[int]) -> list[Layout]:
    if not points:
        return [[atom]]
    if atom.branches is None:
        atom.branches = [leaf(stop - start, atom.frozen) for start, stop in pairwise([0, *points, atom.size])]
        for piece in atom.branches:
            piece[0].origins = atom.origins
        return atom.branches
    atom.branches = _flat(atom.branches)
    parts: list[Layout] = []
    position = 0
    for branch in atom.branches:
        parts += cut(branch, [p - position for p in points])
        position += size_of(branch)
    return _join_up_to(points, parts)


def _flat(branches: Iterable[Layout]) -> list[Layout]:
    """Return the parts of nested concatenations (direct sums) as one flat list.

    Without flattening, repeated cuts would nest direct sums as deeply as the axis is long.
    """
    pending, flat = list(branches)[::-1], list[Layout]()
    while pending:
        branch = pending.pop()
        inner = _branches(branch)
        if inner[0] is branch:
            flat.append(branch)
        else:
            pending += inner[::-1]
    return flat


def _join_up_to(points: Collection[int], parts: Iterable[Layout]) -> list[Layout]:
    """Join all parts of an axis between two neighboring cut points into one part."""
    joined: list[list[Layout]] = [[]]
    position = 0
    for part in parts:
        joined[-1].append(part)
        position += size_of(part)
        if position in points:
            joined.append([])
    return [direct_sum(piece) for piece in joined]


def _factor(atom: Atom, leading: int) -> tuple[Layout, Layout] | None:
    """Split one factor of an axis into a leading and a trailing axis. Return None if its structure forbids it."""
    trailing = atom.size // leading
    if atom.branches is None:
        outer, inner = Atom(leading, atom.frozen), Atom(trailing, atom.frozen)
        atom.factors = [outer, inner]
        return [outer], [inner]
    heads, tails = [], []
    for branch in atom.branches:
        if size_of(branch) % trailing:
            return None
        parts = split(branch, [size_of(branch) // trailing, trailing])
        if parts is None:
            return None
        heads.append(parts[0] or [Atom(1)])
        tails.append(parts[1])
    for tail in tails[1:]:
        if not unify(tails[0], tail, "view"):
            return None
    return direct_sum(heads), tails[0]


def _unify(a: Layout, b: Layout, reason: str, can_unroll: bool) -> bool:
    a, b = list(a), list(b)
    while a and b:
        if a[0] is b[0]:
            a, b = a[1:], b[1:]
        elif a[-1] is b[-1]:
            a, b = a[:-1], b[:-1]
        elif a[0].size == b[0].size:
            if not _merge(a[0], b[0], reason):
                return False
            a, b = without_units(a[1:]), without_units(b[1:])
        elif _match(a, b, 0, reason) or _match(b, a, 0, reason) or _match(a, b, -1, reason) or _match(b, a, -1, reason):
            a, b = without_units(a), without_units(b)
        else:
            return can_unroll and _unroll(a, b, reason)
    return not a and not b


def _match(a: Layout, b: Layout, end: int, reason: str) -> bool:
    """Tie the first (or last) atom of `a` to several atoms of `b`, whose sizes must multiply to the size of this atom.

    Tied atoms are removed from both layouts. If no atoms of `b` have this product, split the atom of `a` into two
    factors, one of them as large as the first (or last) atom of `b`. Return False if the atom of `a` cannot be split
    either.
    """
    big = a[end]
    ordered = b if end == 0 else b[::-1]
    if big.size <= ordered[0].size:
        return False
    product, count = 1, 0
    while product < big.size and count < len(ordered):
        product *= ordered[count].size
        count += 1
    if product == big.size:
        chosen = b[:count] if end == 0 else b[-count:]
        if big.is_leaf:
            if big.frozen is not None:
                freeze(chosen, big.frozen)
            big.factors = list(chosen)
        elif not _unify_sum(big, chosen, reason):
            return False
        if end == 0:
            del a[0], b[:count]
        else:
            del a[-1], b[-count:]
        return True
    small = ordered[0]
    if big.is_leaf and big.size % small.size == 0:
        sizes = [small.size, big.size // small.size]
        parts = [Atom(n, big.frozen) for n in (sizes if end == 0 else sizes[::-1])]
        big.factors = parts
        return True
    return False


def _merge(a: Atom, b: Atom, reason: str) -> bool:
    if not (a.is_leaf or b.is_leaf):
        if not _unify_sum(b, [a], reason):
            return False
        b.parent = a
    elif a is not b:
        small, large = (b, a) if b.is_leaf else (a, b)
        if small.frozen is not None:
            freeze([large], small.frozen)
        large.origins |= small.origins
        small.parent = large
    return True


def _unify_sum(total: Atom, layout: Layout, reason: str) -> bool:
    """Tie a direct sum (a concatenation) to another layout of the same size. First, cut both layouts at the block
    boundaries of either layout.
    """
    assert total.branches is not None
    bounds = _bounds(total.branches)
    full = expand(layout)
    if len(full) == 1 and full[0].branches is not None:
        bounds |= _bounds(full[0].branches)
    elif len(full) > 1 and any(bound % size_of(full[1:]) for bound in bounds):
        return False  # Each row would have to be cut separately.
    mine, theirs = cut([total], bounds), cut(layout, bounds)
    return all(_unify_pieces(x, y, reason) for x, y in zip(mine, theirs, strict=True))


def _unify_pieces(x: Layout, y: Layout, reason: str) -> bool:
    if not _unify(without_units(x), without_units(y), reason, can_unroll=True):
        return False
    _merge_units(x, y)
    return True


def _merge_units(a: Layout, b: Layout) -> None:
    """Tie the factors of size one of two layouts, if both layouts have equally many. Factors of size one must be tied,
    because they can still be scaled.
    """
    units_a = [atom for atom in expand(a) if atom.size == 1]
    units_b = [atom for atom in expand(b) if atom.size == 1]
    if len(units_a) == len(units_b):
        for x, y in zip(units_a, units_b, strict=True):
            _merge(x.find(), y.find(), "")


def _bounds(branches: Sequence[Layout]) -> set[int]:
    """Return, for each part of a direct sum, the last index plus one."""
    return set(accumulate(map(size_of, branches)))


def _unroll(a: Layout, b: Layout, reason: str) -> bool:
    """Cut two axes into equal blocks, and tie the axes block by block.

    The size of the equal blocks is the greatest common divisor of all block sizes. Axes are cut into equal blocks only
    if the blocks of one axis do not fit into the blocks of the other axis.
    """
    total = size_of(a)
    step = total
    for side in (a, b):
        trailing = 1
        for atom in reversed(side):
            if atom.branches is not None:
                step = math.gcd(step, *(bound * trailing for bound in _bounds(atom.branches)))
            trailing *= atom.size
            step = math.gcd(step, trailing)
    if step == 0 or total // step > UNROLL_LIMIT or total == step:
        return False
    points = range(step, total, step)
    pieces_a, pieces_b = cut(a, points), cut(b, points)
    return all(
        _unify(without_units(x), without_units(y), reason, can_unroll=False)
        for x, y in zip(pieces_a, pieces_b, strict=True)
    )

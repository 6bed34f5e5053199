"""The layout of networks: for each symmetry, the assignment of weights to units and pairs of units."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from jaxtyping import Num
from torch import Tensor

from regauge.core.arguments import check_arguments
from regauge.core.groups import axes_of
from regauge.core.symmetry import Symmetry
from regauge.weightspace.layout.blocks import Block, Grid, Label, UnitSet, find_ends, unit_sets
from regauge.weightspace.layout.characters import Character, at_end, character_of_labels, is_odd
from regauge.weightspace.layout.cut import Piece, cut
from regauge.weightspace.layout.elimination import MOST_PRODUCTS, Bases, Step, eliminate, fold
from regauge.weightspace.layout.waves import Turn, Wave, find_period, is_shifted, split
from regauge.weightspace.layout.writer import Writer


@dataclass(frozen=True, eq=False)
class Layout:
    """The unit sets and value blocks on which a metanetwork operates, for one symmetry.

    Attributes:
        symmetry: The symmetry, with every size known.
        units: The unit sets, by name.
        blocks: All blocks of values, in the order of the tensors.
        contracted: The groups of matrices that are removed, because products of tensors over their axes are read
            instead of the tensors.
        fixed: Groups of matrices whose axes count as channels. Fixed groups must be canonicalized before networks are
            read.
        pieces: The parts into which tensors are cut (pieces), by name.
        steps: The products of tensors that are read instead of the tensors. Each factor of a product is a part of a
            tensor or an earlier product.
        is_signed: Whether signs act on the values that are read. If `is_signed` is false, signs are canonicalized
            first.
        is_scaled: Whether positive scales act on the values that are read.
        waves: The angles of each unit set whose units have one angle each, or None if half periods are canonicalized.
    """

    symmetry: Symmetry
    units: Mapping[str, UnitSet]
    blocks: tuple[Block, ...]
    contracted: tuple[str, ...]
    fixed: tuple[str, ...]
    pieces: Mapping[str, Piece]
    steps: Mapping[str, Step | Turn]
    is_signed: bool = False
    is_scaled: bool = False
    waves: Mapping[str, Wave] | None = None

    @cached_property
    def parameters(self) -> tuple[str, ...]:
        """The names of the tensors that a metanetwork reads."""
        return tuple(dict.fromkeys(piece.parameter for piece in self.pieces.values()))

    @cached_property
    def writer(self) -> Writer:
        """A writer that converts new values of parts of tensors (pieces) to whole tensors."""
        return Writer(self.pieces, self.symmetry, {*self.units}, {*self.contracted}, {*self.fixed})

    @cached_property
    def unit_blocks(self) -> tuple[Block, ...]:
        """The blocks that one unit set indexes, which contain values of single units."""
        return tuple(block for block in self.blocks if len(block.ends) == 1)

    @cached_property
    def pair_blocks(self) -> tuple[Block, ...]:
        """The blocks that two or more unit sets index, which contain values of pairs of units."""
        return tuple(block for block in self.blocks if len(block.ends) > 1)

    @cached_property
    def unwritten(self) -> frozenset[str]:
        """The names of the pair blocks from which no tensor is written: products and buffers."""
        written = {written.block.name for written in self.writer.written}
        return frozenset(block.name for block in self.pair_blocks if block.name not in written)

    @cached_property
    def network_blocks(self) -> tuple[Block, ...]:
        """The blocks that no unit set indexes, which contain values of whole networks."""
        return tuple(block for block in self.blocks if not block.ends)

    def character(self, block: Block) -> Character:
        """Return the character of a block's values: the exponents of all signs and scales that are not
        canonicalized.
        """
        return self.character_of(block.labels)

    def character_of(self, labels: Sequence[Label]) -> Character:
        """Return the exponents of all signs and scales that are not canonicalized, for values along some axes."""
        return character_of_labels(
            labels, has_signs=self.is_signed, has_shifts=self.waves is not None, has_scales=self.is_scaled
        )

    @cached_property
    def is_weighed(self) -> bool:
        """Whether units are weighted by shares of their outgoing weights."""
        return any(label.reads for block in self.blocks for label in block.labels)

    @cached_property
    def grids(self) -> dict[str, Grid]:
        """The axes of every unit set."""
        return {
            name: Grid(
                units.axes,
                tuple(tuple(units.axes.index(base) for base in self.units[axis].axes[:-1]) for axis in units.axes),
                units.sizes,
            )
            for name, units in self.units.items()
        }

    def grid(self, block: str) -> Grid:
        """Return the axes of a block."""
        return self._grids[block]

    def grid_of(self, block: Block) -> Grid:
        """Return the axes of a block. The block need not be part of the layout."""
        groups = tuple(label.group for label in block.labels)
        bases: list[tuple[int, ...]] = [()] * len(groups)
        for end in block.ends:
            place = dict(zip(self.units[end.units].axes, end.axes, strict=True))
            for axis in end.axes:
                bases[axis] = tuple(place[base] for base in self.units[groups[axis]].axes[:-1])
        return Grid(groups, tuple(bases), block.sizes)

    @cached_property
    def _grids(self) -> dict[str, Grid]:
        return {block.name: self.grid_of(block) for block in self.blocks}

    @cached_property
    def signs(self) -> dict[str, Character]:
        """For each block whose values signs or scales change, its character (the exponents of signs and scales)."""
        found = {block.name: self.character(block) for block in self.blocks}
        return {name: character for name, character in found.items() if is_odd(character)}

    @cached_property
    def unit_signs(self) -> dict[str, tuple[Character, ...]]:
        """For each unit set, the exponents of signs and scales ("characters") of all values of its units that are not
        invariant.
        """
        blocks = [*self.blocks, *(written.block for written in self.writer.written)]
        found = {name: set[Character]() for name in self.units}
        for block in blocks:
            for end in block.ends:
                found[end.units].add(at_end(self.character(block), end))
        return {name: tuple(sorted(filter(is_odd, characters))) for name, characters in found.items()}

    @cached_property
    def own_signs(self) -> dict[str, frozenset[Character]]:
        """The exponents of signs (characters) that occur among values of single units, such as biases, or among the
        units' angles.
        """
        found = {name: set[Character]() for name in self.units}
        for block in self.unit_blocks:
            if block.name in self.signs:
                found[block.ends[0].units].add(at_end(self.signs[block.name], block.ends[0]))
        for name, wave in (self.waves or {}).items():
            found[name].add(wave.addend)
        return {name: frozenset(characters) for name, characters in found.items()}

    def wave_signs(self, units: str) -> tuple[Character, Character]:
        """Return the exponents of signs with which the sines and the cosines of a set's angles are multiplied."""
        assert self.waves is not None
        wave = self.waves[units]
        first, second = (next(b for b in self.blocks if b.name == name) for name in (wave.sine, wave.cosine))
        return at_end(self.character(first), first.ends[0]), at_end(self.character(second), second.ends[0])

    def __str__(self) -> str:
        sets = [f"{s.name}: {' x '.join(map(str, s.sizes))} units" for s in self.units.values()]
        rows = [
            f"{b.name}: {' - '.join(e.units for e in b.ends) or 'network'}, {b.channels} values" for b in self.blocks
        ]
        return "\n".join([*sets, *rows])

    @cached_property
    def key(self) -> str:
        """A key that is equal for two layouts if they can use the same learned parameters, even if sizes differ."""
        blocks = [(b.name, b.channels, [(label.group, label.reads) for label in b.labels], b.ends) for b in self.blocks]
        sets = [(s.name, s.axes, None if s.is_permuted else s.sizes[-1]) for s in self.units.values()]
        pieces = [(name, p.channels, [label.group for label in p.labels]) for name, p in self.pieces.items()]
        return repr((blocks, sets, pieces, self.contracted, self.signs, self.unit_signs, self.waves))

    def difference(self, other: "Layout") -> str | None:
        """Return a difference between two layouts that requires different learned parameters, or None if no difference
        does.
        """
        ours, theirs = ({b.name: b.channels for b in layout.blocks} for layout in (self, other))
        for name in [*ours, *theirs]:
            if ours.get(name) != theirs.get(name):
                counts = (f"{known[name]} values" if name in known else "no values" for known in (ours, theirs))
                return f"{name!r} has {' and '.join(counts)} for each combination of units"
        for name in [*self.units, *other.units]:
            one, two = (layout.units.get(name) for layout in (self, other))
            if one is None or two is None or (one.axes, one.is_permuted) != (two.axes, two.is_permuted):
                return f"{name!r} has units of different sets"
            if not one.is_permuted and one.sizes[-1] != two.sizes[-1]:
                return (
                    f"{name!r} has {one.sizes[-1]} and {two.sizes[-1]} units, which are identified by their positions"
                )
        return None if self.key == other.key else "tensors belong to other sets of units"

    def read(self, params: Mapping[str, Tensor]) -> dict[str, Num[Tensor, "models *labels channels"]]:
        """Return the values of every block, for all networks of a population.

        Raises:
            KeyError: A tensor of the layout is missing.
            ValueError: A tensor does not have the shape that the symmetry expects after a model axis.
        """
        values: dict[str, Tensor] = {}
        for name, piece in self.pieces.items():
            tensor = params[piece.parameter]
            expected = self.symmetry.shapes[piece.parameter]
            if tuple(tensor.shape[1:]) != tuple(expected):
                raise ValueError(
                    f"{piece.parameter!r} has shape {tuple(tensor.shape)}, but a population of this architecture has "
                    f"one model axis and then {tuple(expected)}; stack the networks, or make a net for their symmetry"
                )
            values[name] = piece.read(tensor)
        for name, step in self.steps.items():
            values[name] = step(values)
        return {block.name: values[block.name] for block in self.blocks}


@lru_cache(maxsize=64)
def _compile(
    symmetry_text: str,
    contracted: frozenset[str] | None,
    is_signed: bool,
    is_scaled: bool,
    has_shifts: bool,
    readers: frozenset[tuple[str, int]],
) -> Layout:
    built = _build(Symmetry.from_json(symmetry_text), contracted, readers)
    layout = replace(built, is_signed=is_signed, is_scaled=is_scaled)
    return _with_waves(layout) if has_shifts else layout


@check_arguments
def compile_layout(
    symmetry: Symmetry,
    *,
    contracted: Collection[str] | None = None,
    is_signed: bool = False,
    is_scaled: bool = False,
    has_shifts: bool = False,
    readers: Collection[tuple[str, int]] = (),
) -> Layout:
    """Return the layout of networks with a given symmetry: the assignment of their weights to units and pairs of units.
    Each symmetry is compiled only once.

    The layout excludes tensors that cannot influence the outputs. A tied tensor occurs only under one name.

    Args:
        symmetry: The symmetry, with all sizes known.
        contracted: Names of the groups of matrices that are replaced by products over their axes. Default: the groups
            whose products are small enough.
        is_signed: Whether features change under signs, because signs are not canonicalized.
        has_shifts: Whether features also change under half-period shifts, because the shifts are not canonicalized. If
            `has_shifts` is true, values to which half periods are added are read through their sine and cosine. If half
            periods of several kinds are added to one value, the layout has no `waves`, and a canonical form is needed.
        readers: The axes (parameter, axis) along which layers sum over units. If `readers` is not empty, units have
            weights (shares) in all means.

    Raises:
        ValueError: A size is not known, the units of a group own different numbers of values, or `has_shifts` is set
            without `is_signed`.
    """
    if not symmetry.is_sized:
        raise ValueError(
            "the sizes of this hand-written symmetry are not known yet; call `symmetry.bind(params)` first and use "
            "what it returns"
        )
    if has_shifts and not is_signed:
        raise ValueError("half periods change signs; give is_signed=True, too")
    chosen = None if contracted is None else frozenset(contracted)
    return _compile(symmetry.to_json(), chosen, is_signed, is_scaled, has_shifts, frozenset(readers))


def _with_waves(layout: Layout) -> Layout:
    """Return a layout in which sine and cosine replace each angle. Sines and cosines can be used only if each angle has
    only one period.
    """
    if any(is_shifted(block) and find_period(block) is None for block in layout.blocks):
        return layout
    blocks: list[Block] = []
    steps: dict[str, Step | Turn] = dict(layout.steps)
    waves: dict[str, list[Wave]] = {}
    for block in layout.blocks:
        if not is_shifted(block):
            blocks.append(block)
            continue
        made = split(block)
        (sine, turn), (cosine, _) = made.values()
        blocks += [sine, cosine]
        steps.update({name: step for name, (_, step) in made.items()})
        if len(block.ends) == 1 and block.channels == 1:
            (end,) = block.ends
            addend = at_end(
                character_of_labels(block.labels, has_signs=True, has_shifts=True, has_scales=layout.is_scaled), end
            )
            if is_odd(addend):
                waves.setdefault(end.units, []).append(Wave(sine.name, cosine.name, turn.frequency, addend))
    alone = {name: found[0] for name, found in waves.items() if len(found) == 1}
    return replace(layout, blocks=tuple(blocks), steps=steps, waves=alone)


def _build(symmetry: Symmetry, chosen: frozenset[str] | None, readers: frozenset[tuple[str, int]]) -> Layout:
    left_out = {*symmetry.unused, *(name for names in symmetry.tied for name in names[1:])}
    pieces: dict[str, Piece] = {}
    for name in symmetry.shapes:
        is_counter = name in symmetry.buffers and not symmetry.shapes[name]
        if name in left_out or is_counter:
            continue
        read = frozenset(axis for parameter, axis in readers if parameter == name)
        cuts = cut(name, axes_of(symmetry.shapes[name]), symmetry.sites.get(name, ()), read)
        found = [piece for piece in cuts if piece.channels]
        for k, piece in enumerate(found):
            pieces[name if len(found) == 1 else f"{name}[{k}]"] = piece
    units = unit_sets(symmetry.groups)
    blocks: dict[str, tuple[Block, Bases]] = {}
    for name, piece in pieces.items():
        blocks[name] = (
            Block(name, (piece.parameter,), piece.labels, piece.sizes, piece.channels, ()),
            piece.bases,
        )
    matrices = [group for group in symmetry.groups if group.matrix != "none"]
    steps: dict[str, Step] = {}
    contracted, fixed = [], []
    for group in matrices:
        is_wanted = chosen is None or group.name in chosen
        made = eliminate(group, blocks, most=MOST_PRODUCTS if chosen is None else None) if is_wanted else None
        if made is None:
            fixed.append(group.name)
        else:
            contracted.append(group.name)
            blocks, more = made
            steps.update(more)
    finished: list[Block] = []
    for block, bases in blocks.values():
        block, bases, more_steps = fold(block, bases, {*fixed})
        steps.update(more_steps)
        ends = find_ends(tuple(label.group for label in block.labels), bases)
        finished.append(replace(block, ends=ends))
    return Layout(symmetry, units, tuple(finished), tuple(contracted), tuple(fixed), pieces, steps)

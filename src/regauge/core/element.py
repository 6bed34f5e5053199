"""Elements of a symmetry, which have one value per group, and their products.

All values of an element are indexed by target units. For bases b and unit i, `act(g, x)` is

    x'[b', i'] = factor[b', i'] * x[perm_base[b'], perm[b', i']]

Therefore a product of two elements takes two steps. The permutations of the left element first act on the values of the
right element. Next, the values of the left and the right element are combined entry by entry.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, cast

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Num, Shaped
from torch import Tensor

from regauge.core.axis_products import Kronecker
from regauge.core.counted import count
from regauge.core.given import describe
from regauge.core.groups import Group, within_classes
from regauge.core.rotations import keeping_ones, without_reflection

FIELD_OF_PART = {"permutation": "perm", "sign": "sign", "scale": "scale", "shift": "shift", "linear": "matrix"}
"""The name of the field of `Value` that stores each part of an element."""

PARTS = tuple(FIELD_OF_PART)
"""The parts of an element that are fields of `Value` and act on axes."""
TRANSLATION, ROTATION = "translation", "rotation"
"""The names of two parts of an element: one adds vectors to coordinates, and one rotates representatives (networks with
gains of one)."""
ALL_PARTS = (*PARTS, TRANSLATION, ROTATION)
"""All parts that an element of the whole symmetry can have."""


@dataclass(frozen=True)
class Value:
    """The value of an element for one group.

    In the tensors of a value, batch axes come first, followed by one axis for each group within which this group is
    repeated.

    Attributes:
        perm: For each unit, the source unit from which it takes its entries, int64.
        scale: A positive factor for each unit and each family of scales, float64.
        sign: Plus or minus one for each unit and each family of signs, int8.
        shift: The number of half periods for each unit and each family of shifts, int64.
        matrix: The rotation or the invertible matrix, for orthogonal and linear groups, float64.
        product: The matrix of the value as a product of factors, if `of_product` made the value. Multiplying by
            Kronecker factors takes fewer operations than multiplying by their product. `map`, `zip` and `replace` drop
            the field `product`.
    """

    perm: Int[Tensor, "*lead size"] | None = None
    scale: Float[Tensor, "*lead scales size"] | None = None
    sign: Num[Tensor, "*lead signs size"] | None = None
    shift: Num[Tensor, "*lead shifts size"] | None = None
    matrix: Float[Tensor, "*lead size size"] | None = None
    product = cast(Kronecker | None, None)  # No annotation, so not a dataclass field: never copied.

    @classmethod
    def of_product(cls, product: Kronecker) -> "Value":
        """Return a value whose matrix is the given Kronecker product of factors."""
        value = cls(matrix=product.matrix)
        object.__setattr__(value, "product", product)
        return value

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """Return the tensors of the value that are not None, by field name."""
        return ((name, tensor) for name in FIELDS if (tensor := getattr(self, name)) is not None)

    def map(self, function: Callable[[Tensor], Tensor]) -> "Value":
        """Apply a function to every tensor of the value."""
        return Value(**{name: function(tensor) for name, tensor in self.items()})

    def zip(self, other: "Value", function: Callable[[Tensor, Tensor], Tensor]) -> "Value":
        """Apply a function to every pair of tensors that two values have in the same field.

        A field that one of the two values lacks is also missing in the result.
        """
        theirs = dict(other.items())
        return Value(**{name: function(tensor, theirs[name]) for name, tensor in self.items() if name in theirs})

    def where(self, mask: Tensor, other: "Value") -> "Value":
        """Return entries of this value where a mask is true, and entries of `other` everywhere else.

        The axes of the mask are the leading axes of the values.
        """
        return self.zip(other, lambda yes, no: _select(mask, yes, no))

    def fill(self, blank: "Value") -> "Value":
        """Return this value, in which the fields of `blank` replace fields that are None."""
        return replace(blank, **dict(self.items()))


FIELDS = tuple(field.name for field in fields(Value))
"""The names of the fields of a value."""


class Element(Mapping[str, Value]):
    """One element of a symmetry, or a batch of elements. Elements are immutable.

    Attributes:
        batch: The batch shape.
        translation: For each family of translations, the vector that the element adds to the family's coordinate:
            `[*batch, *shape]`, float64. If a translation family has no entry, the element adds nothing to its
            coordinate.
        rotation: For each group with `behind_gains`, the matrix that rotates representatives (networks with gains of
            one): `[*batch, size, size]`, float64. An element first applies the values of its groups, and then rotates
            the representative. A group without an entry in `rotation` does not rotate representatives.
    """

    def __init__(
        self,
        values: Mapping[str, Value],
        batch: tuple[int, ...] = (),
        translation: Mapping[str, Tensor] | None = None,
        rotation: Mapping[str, Tensor] | None = None,
    ) -> None:
        self._values = dict(values)
        self.batch = tuple(batch)
        self.translation: dict[str, Tensor] = dict(translation or {})
        self.rotation: dict[str, Tensor] = dict(rotation or {})

    def __getitem__(self, name: str) -> Value:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        several = {TRANSLATION: self.translation, ROTATION: self.rotation}
        added = "".join(f", {count(parts, word)}" for word, parts in several.items() if parts)
        return f"Element({count(self, 'group')}{added}, batch={self.batch})"

    def order(self, group: str) -> Int[Tensor, "*lead size"]:
        """Return the permutation of a group: unit i of the transformed network is unit `order[i]` of the original.

        Raises:
            KeyError: The element has no such group.
            ValueError: The group does not permute its units.
        """
        if group not in self:
            raise KeyError(f"there is no group {group!r}; the groups are {list(self)[:20]}; name one of them")
        perm = self[group].perm
        if perm is None:
            raise ValueError(f"group {group!r} does not reorder its units; `element[{group!r}].matrix` is its matrix")
        return perm

    def order_matrix(self, group: str) -> Float[Tensor, "*lead size size"]:
        """Return the permutation of a group as a float64 matrix P for which `P @ x` is `x[order]`.

        This method raises the same errors as `order`.
        """
        return torch.nn.functional.one_hot(self.order(group), self.order(group).shape[-1]).double()

    def replace(self, name: str, value: Value) -> "Element":
        """Return a copy of the element with another value for one group."""
        return Element({**self._values, name: value}, self.batch, self.translation, self.rotation)

    def translated(self, translation: Mapping[str, Tensor]) -> "Element":
        """Return a copy of the element whose translations are replaced by the given ones."""
        return Element(self._values, self.batch, translation, self.rotation)

    def rotated(self, rotation: Mapping[str, Tensor]) -> "Element":
        """Return a copy of the element whose rotations of representatives are replaced by the given ones."""
        return Element(self._values, self.batch, self.translation, rotation)

    def item(self, *index: int) -> "Element":
        """Return the single element at one index of a batch of elements."""
        if len(index) != len(self.batch):
            raise ValueError(f"element has batch shape {self.batch}; give one index per axis, not {index}")
        return self.map(lambda tensor: tensor[index], ())

    def first(self, index: int) -> "Element":
        """Return the elements at one index of the first batch axis."""
        return self.map(lambda tensor: tensor[index], self.batch[1:])

    def rows(self, rows: Tensor | slice) -> "Element":
        """Select elements along the first batch axis, by indices, a mask or a slice."""
        count = len(torch.arange(self.batch[0])[rows])
        return self.map(lambda tensor: tensor[rows], (count, *self.batch[1:]))

    def expand(self, *batch: int) -> "Element":
        """Repeat the element along new leading axes without copying memory."""
        return self.map(lambda tensor: tensor.expand(*batch, *tensor.shape), (*batch, *self.batch))

    def map(self, function: Callable[[Tensor], Tensor], batch: tuple[int, ...] | None = None) -> "Element":
        """Apply a function to every tensor of the element.

        `batch` is the batch shape of the element after the function is applied. Default: the batch shape of this
        element.
        """
        values = {name: value.map(function) for name, value in self.items()}
        translation = {name: function(vector) for name, vector in self.translation.items()}
        rotation = {name: function(matrix) for name, matrix in self.rotation.items()}
        return Element(values, self.batch if batch is None else batch, translation, rotation)

    def zip(self, other: "Element", function: Callable[[Tensor, Tensor], Tensor]) -> "Element":
        """Apply a function to every pair of tensors of two elements that have the same groups and batch shape."""
        values = {name: value.zip(other[name], function) for name, value in self.items()}
        mine, theirs = _in_full([self, other])
        added = [{name: function(mine[part][name], theirs[part][name]) for name in mine[part]} for part in mine]
        return Element(values, self.batch, *added)

    def where(self, mask: Tensor, other: "Element") -> "Element":
        """Return elements of this batch where a mask is true, and elements of `other` everywhere else.

        The axes of the mask are the leading axes of the batches.
        """
        return self.zip(other, lambda yes, no: _select(mask, yes, no))

    def fill(self, blank: "Element") -> "Element":
        """Return this element, with missing groups and fields taken from `blank`, which has the same batch shape."""
        values = {name: self[name].fill(value) if name in self else value for name, value in blank.items()}
        translation, rotation = {**blank.translation, **self.translation}, {**blank.rotation, **self.rotation}
        return Element(values, blank.batch, translation, rotation)


def stack(elements: Sequence[Element]) -> Element:
    """Stack single elements of the same symmetry into a batch."""
    return _join(elements, torch.stack, (len(elements), *elements[0].batch))


def concatenate(elements: Sequence[Element]) -> Element:
    """Concatenate batches of elements of the same symmetry along the first axis."""
    return _join(elements, torch.cat, (sum(e.batch[0] for e in elements), *elements[0].batch[1:]))


def identity(groups: tuple[Group, ...], batch: tuple[int, ...] = ()) -> Element:
    """Return the identity element, which changes no parameter."""
    sizes = {group.name: group.size for group in groups}
    values = {}
    for group in groups:
        n, lead = group.size, (*batch, *(sizes[base] for base in group.within))
        values[group.name] = Value(
            perm=torch.arange(n).expand(*lead, n) if group.is_permuted else None,
            scale=torch.ones(*lead, group.scales, n, dtype=torch.float64) if group.scales else None,
            sign=torch.ones(*lead, group.signs, n, dtype=torch.int8) if group.signs else None,
            shift=torch.zeros(*lead, group.shifts, n, dtype=torch.int64) if group.shifts else None,
            matrix=torch.eye(n, dtype=torch.float64).expand(*lead, n, n) if group.matrix != "none" else None,
        )
    return Element(values, batch)


def random(
    groups: tuple[Group, ...],
    generator: torch.Generator,
    parts: tuple[str, ...] = PARTS,
    batch: tuple[int, ...] = (),
) -> Element:
    """Return a random element: uniformly random permutations and signs, scales from [1/2, 2], shifts from {-1, 0, 1}.

    Orthogonal matrices and rotations are uniformly random (Haar measure). Invertible matrices have singular values in
    [1/2, 2].
    """
    require_parts(parts)
    source: dict[str, Any] = {"generator": generator, "device": generator.device}

    def draw(part: str, like: Tensor, group: Group) -> Tensor:
        if part == "permutation":
            orders = torch.rand(like.shape, **source).argsort(-1).cpu()
            return within_classes(group, orders) if group.classes else orders
        if part == "sign":
            return (1 - 2 * torch.randint(0, 2, like.shape, **source)).to(torch.int8).cpu()
        if part == "scale":
            return torch.exp2(2 * torch.rand(like.shape, dtype=torch.float64, **source) - 1).cpu()
        if part == "shift":
            return torch.randint(-1, 2, like.shape, **source).cpu()
        return _random_matrix(like.shape, group, generator)

    blank, values = identity(groups, batch), {}
    for group in groups:
        known = dict(blank[group.name].items())
        chosen = {field: part for part, field in FIELD_OF_PART.items() if part in parts and field in known}
        drawn = {field: draw(part, known[field], group) for field, part in chosen.items()}
        values[group.name] = replace(blank[group.name], **drawn)
    return Element(values, batch)


def require_elements(*elements: object) -> None:
    """Raise a TypeError unless all values are elements."""
    for one in elements:
        if not isinstance(one, Element):
            way = "; write .element behind it" if isinstance(getattr(one, "element", None), Element) else ""
            raise TypeError(
                f"the element is {describe(one)}, but a regauge.Element is expected, as symmetry.random(generator){way}"
            )


def require_parts(parts: tuple[str, ...]) -> None:
    """Raise a ValueError unless all given names are parts of an element."""
    unknown = [part for part in parts if part not in ALL_PARTS]
    if unknown:
        raise ValueError(f"parts {unknown} are unknown; choose among {[*ALL_PARTS]}")


def compose(groups: tuple[Group, ...], left: Element, right: Element) -> Element:
    """Return the product of two elements, which applies `right` first and then `left`."""
    batch = np.broadcast_shapes(left.batch, right.batch)
    left, right = _broadcast(left, batch), _broadcast(right, batch)
    values = {}
    for group in groups:
        h, g = _value(left, group), _value(right, group)
        pull = _Pull(groups, left, group)
        values[group.name] = Value(
            perm=None if g.perm is None else pull.units(g.perm),
            scale=None if h.scale is None or g.scale is None else h.scale * pull.families(g.scale),
            sign=None if h.sign is None or g.sign is None else h.sign * pull.families(g.sign),
            # h maps x to s x + k. Applied after g, the signs of h also multiply the shifts of g.
            shift=None
            if h.shift is None or g.shift is None
            else h.shift + _shift_sign(group, h) * pull.families(g.shift),
            matrix=None if h.matrix is None or g.matrix is None else h.matrix @ pull.blocks(g.matrix),
        )
    return Element(values, batch)


def inverse(groups: tuple[Group, ...], element: Element) -> Element:
    """Return the inverse of an element."""
    undone = identity(groups, element.batch)
    for group in sorted(groups, key=lambda group: len(group.within)):
        value = _value(element, group)
        if value.perm is not None:
            # The inverse of the outer permutation determines the block of each nested inverse. Therefore outer groups
            # (fewer bases) are inverted first.
            perm = _Pull(groups, undone, group).blocks(value.perm).argsort(-1)
            undone = undone.replace(group.name, Value(perm=perm))
    values = {}
    for group in groups:
        value, pull = element[group.name], _Pull(groups, undone, group)
        scale = None if value.scale is None else 1 / pull.families(value.scale)
        sign = None if value.sign is None else pull.families(value.sign)
        shift = None
        if value.shift is not None:
            shift = -_shift_sign(group, Value(sign=sign, shift=value.shift)) * pull.families(value.shift)
        matrix = None
        if value.matrix is not None:
            there = pull.blocks(value.matrix)
            matrix = there.mT if group.matrix == "orthogonal" else torch.linalg.inv(there)
        values[group.name] = Value(undone[group.name].perm, scale, sign, shift, matrix)
    return Element(values, element.batch)


def select_parts(element: Element, groups: tuple[Group, ...], parts: tuple[str, ...]) -> Element:
    """Return the element in which every part outside `parts` is set to the identity."""
    blank = identity(groups, element.batch)
    kept = {FIELD_OF_PART[part] for part in parts if part in PARTS}
    values = {
        name: replace(blank[name], **{field: tensor for field, tensor in value.items() if field in kept})
        for name, value in element.items()
    }
    added = (found if part in parts else {} for part, found in _parts_by_name(element).items())
    return Element(values, element.batch, *added)


def _parts_by_name(element: Element) -> dict[str, dict[str, Tensor]]:
    """Return the translations of an element by family, and its rotations by group.

    Families and groups without an entry are omitted."""
    return {TRANSLATION: element.translation, ROTATION: element.rotation}


def _select(
    mask: Bool[Tensor, "*lead"], yes: Shaped[Tensor, "*shape"], no: Shaped[Tensor, "*shape"]
) -> Shaped[Tensor, "*shape"]:
    """Apply `torch.where` with a mask over the leading axes."""
    return torch.where(mask.reshape(*mask.shape, *([1] * (yes.ndim - mask.ndim))).to(yes.device), yes, no)


def _join(elements: Sequence[Element], join: Callable[[list[Tensor]], Tensor], batch: tuple[int, ...]) -> Element:
    values = {}
    for name, first in elements[0].items():
        each = [dict(element[name].items()) for element in elements]
        values[name] = Value(**{field: join([tensors[field] for tensors in each]) for field, _ in first.items()})
    whole = _in_full(elements)
    added = [{name: join([one[part][name] for one in whole]) for name in whole[0][part]} for part in whole[0]]
    return Element(values, batch, *added)


def _in_full(elements: Sequence[Element]) -> list[dict[str, dict[str, Tensor]]]:
    """Return the translations and rotations of several elements, by part and name.

    If an element lacks a name that another element has, zeros or the identity are filled in.
    """
    whole: list[dict[str, dict[str, Tensor]]] = [{} for _ in elements]
    for part in (TRANSLATION, ROTATION):
        each = [_parts_by_name(element)[part] for element in elements]
        known = {
            name: tensor[(0,) * len(e.batch)]
            for e, own in zip(elements, each, strict=True)
            for name, tensor in own.items()
        }
        for element, own, result in zip(elements, each, whole, strict=True):
            result[part] = {
                name: own[name] if name in own else _neutral(part, one).expand((*element.batch, *one.shape))
                for name, one in known.items()
            }
    return whole


def _neutral(part: str, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if part == TRANSLATION else torch.eye(len(like)).to(like)


class _Pull:
    """The action of one element's permutation of a group on the value that another element has for this group. The
    product of two elements applies the permutation of the left element to the values of the right element.
    """

    def __init__(self, groups: tuple[Group, ...], element: Element, group: Group) -> None:
        by_name = {g.name: g for g in groups}
        self.lead = len(element.batch)
        self.own = element[group.name].perm
        self.shape = (*element.batch, *(by_name[base].size for base in group.within))
        self.is_trivial = all(element[base].perm is None for base in group.within)
        self.sources = [_axis_index(k, size, len(self.shape)) for k, size in enumerate(self.shape)]
        for k, base in enumerate(group.within):
            perm = element[base].perm
            if perm is not None:
                axes = [*range(self.lead), *(self.lead + group.within.index(b) for b in by_name[base].within)]
                shape = [1] * len(self.shape)
                for axis, size in zip([*axes, self.lead + k], perm.shape, strict=True):
                    shape[axis] = size
                self.sources[self.lead + k] = perm.reshape(shape)

    def blocks(self, values: Shaped[Tensor, "*shape"]) -> Shaped[Tensor, "*shape"]:
        """Gather values `[*batch, *bases, ...]` along the axes of the bases (the groups around a nested group)."""
        return values if self.is_trivial else values[tuple(self.sources)]

    def units(self, values: Shaped[Tensor, "*lead size"]) -> Shaped[Tensor, "*lead size"]:
        """Gather values `[*lead, size]` along the axes of the units and of the groups that contain this group."""
        if self.own is None:
            return self.blocks(values)
        return values[(*(source.unsqueeze(-1) for source in self.sources), self.own)]

    def families(self, values: Shaped[Tensor, "*lead families size"]) -> Shaped[Tensor, "*lead families size"]:
        """Gather values `[*lead, families, size]` along the axes of the bases and of the units."""
        if self.own is None:
            return self.blocks(values)
        grid = [source.unsqueeze(-1).unsqueeze(-1) for source in self.sources]
        families = torch.arange(values.shape[-2]).unsqueeze(-1)
        return values[(*grid, families, self.own.unsqueeze(-2))]


def _axis_index(axis: int, size: int, ndim: int) -> Tensor:
    return torch.arange(size).reshape([size if k == axis else 1 for k in range(ndim)])


def _value(element: Element, group: Group) -> Value:
    if group.name not in element:
        raise KeyError(
            f"the element has no value for group {group.name!r}; it belongs to another symmetry "
            f"(its groups are {list(element)[:5]}, ...)"
        )
    return element[group.name]


def _broadcast(element: Element, batch: tuple[int, ...]) -> Element:
    if element.batch == batch:
        return element
    lead = len(element.batch)
    ones = [1] * (len(batch) - lead)
    return element.map(lambda t: t.reshape(*ones, *t.shape).expand(*batch, *t.shape[lead:]), batch)


def _shift_sign(group: Group, value: Value) -> Tensor:
    """Return, for each family of shifts, the sign by which an element multiplies the entries that it shifts."""
    assert value.shift is not None
    rows = []
    for family in range(group.shifts):
        exponents = next(p.sign for p in group.placements if p.shift[family] != 0)
        row = torch.ones_like(value.shift[..., family, :])
        for k, exponent in enumerate(exponents):
            if exponent and value.sign is not None:
                row = row * value.sign[..., k, :]
        rows.append(row)
    return torch.stack(rows, dim=-2)


def _random_matrix(shape: torch.Size, group: Group, generator: torch.Generator) -> Float[Tensor, "*lead size size"]:
    def haar(shape: torch.Size) -> Tensor:
        noise = torch.randn(shape, generator=generator, device=generator.device, dtype=torch.float64).cpu()
        q, r = torch.linalg.qr(noise)
        # Q alone is not uniform, because LAPACK chooses the signs of its columns. If the diagonal of R is positive, the
        # factorization is unique, and Q has Haar measure (Mezzadri 2007).
        signs: Tensor = torch.where(r.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0)
        rotation: Tensor = q * signs.unsqueeze(-2)
        return rotation

    if group.keeps_ones:
        smaller = torch.Size((*shape[:-2], group.size - 1, group.size - 1))
        return keeping_ones(haar(smaller))
    if group.is_proper:
        return without_reflection(haar(shape))
    if group.matrix == "orthogonal":
        return haar(shape)
    noise = torch.rand(shape[:-1], generator=generator, device=generator.device, dtype=torch.float64).cpu()
    return haar(shape) @ (torch.exp2(2 * noise - 1).unsqueeze(-1) * haar(shape))


Make = Callable[[tuple[Group, ...]], Element]


class DeferredElement(Element):
    """An element that is computed later, as soon as the groups are known together with their sizes and classes of
    units.

    The parameters of a network determine the sizes and the classes of units.
    """

    def __init__(
        self,
        make: Make,
        batch: tuple[int, ...],
        translation: Mapping[str, Tensor] | None = None,
        rotation: Mapping[str, Tensor] | None = None,
    ) -> None:
        super().__init__({}, batch, translation, rotation)
        self.make = make

    def translated(self, translation: Mapping[str, Tensor]) -> "Element":
        return DeferredElement(self.make, self.batch, translation, self.rotation)

    def rotated(self, rotation: Mapping[str, Tensor]) -> "Element":
        return DeferredElement(self.make, self.batch, self.translation, rotation)

    def __getitem__(self, name: str) -> Value:
        raise self._unknown()

    def __iter__(self) -> Iterator[str]:
        raise self._unknown()

    def __len__(self) -> int:
        raise self._unknown()

    def __repr__(self) -> str:
        return f"DeferredElement(batch={self.batch})"

    @staticmethod
    def _unknown() -> ValueError:
        return ValueError(
            "the sizes or the structure tensors of this element's symmetry are not known yet; call `symmetry.act` with "
            "parameters, or take elements from `symmetry.bind(params)`"
        )


def materialize(element: Element, groups: tuple[Group, ...]) -> Element:
    """Return the element that a deferred element computes from the given groups.

    Any other element is returned unchanged."""
    if not isinstance(element, DeferredElement):
        return element
    return element.make(groups).translated(element.translation).rotated(element.rotation)

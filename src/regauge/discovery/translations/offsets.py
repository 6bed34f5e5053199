"""Offsets: the amounts by which a value of a traced model changes if a vector is added to a parameter."""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from regauge.core.translations import Entries, ImageStep

LARGEST_CONTENT = 1 << 14
"""The largest number of entries of an offset for which a key for comparisons is computed. Repeated entries along an
axis count once."""


class SeenError(Exception):
    """Error if a change of a value (an offset) may change the outputs of the model.

    No parameter is known to compensate for the change of the value.
    """


class Index(NamedTuple):
    """An index of a factor. The index either belongs to an axis of a value, or the product is summed over it.

    Attributes:
        name: An axis of the value as a negative number counted from the end, a summed index as a positive number, or
            zero for a fixed position.
        size: The number of positions that the index takes.
        start: The first position that the index takes.
    """

    name: int
    size: int
    start: int = 0


class Multiplicand(NamedTuple):
    """A factor of a product.

    Attributes:
        kind: "parameter" means entries of a parameter, "value" a value of the model, and "inverse" one divided by a
            value. "row" is one if the last index equals the row number in a value, and otherwise zero. "before" is one
            if the second index is at most the first, and otherwise zero.
        what: The entries of a parameter, or the value of the model.
        indices: One index for each axis of the factor.
    """

    kind: Literal["parameter", "value", "inverse", "row", "before"]
    what: Any
    indices: tuple[Index, ...]


class Monomial(NamedTuple):
    """A product of a number and several factors, summed over the indices with positive names."""

    number: float
    factors: tuple[Multiplicand, ...]

    @property
    def axes(self) -> frozenset[int]:
        """The axes of the value along which the product varies, counted from the end."""
        return frozenset(index.name for one in self.factors for index in one.indices if index.name < 0)

    def renamed(self, names: Mapping[int, Index]) -> "Monomial":
        """Return the product with renamed indices. The size and the first position of each index stay the same."""

        def rename(index: Index) -> Index:
            return index._replace(name=names[index.name].name) if index.name in names else index

        factors = (one._replace(indices=tuple(map(rename, one.indices))) for one in self.factors)
        return self._replace(factors=tuple(factors))

    @property
    def key(self) -> "Monomial":
        """A form of the product for comparisons, in which summed indices are numbered in the order of their first
        occurrence.
        """
        names = dict.fromkeys(index.name for one in self.factors for index in one.indices if index.name > 0)
        return self.renamed({name: Index(k, 0) for k, name in enumerate(names, start=1)})

    def repeated(self, summed: Iterable[Index]) -> "Monomial":
        """Return the sum of the product over some indices. For each index that no factor has, the product is multiplied
        by the size of the index.
        """
        used = {index.name for one in self.factors for index in one.indices}
        number = self.number
        for index in summed:
            number *= 1 if index.name in used else index.size
        return self._replace(number=number)


ONE = Monomial(1.0, ())
"""The product without factors."""


@dataclass(frozen=True, eq=False)
class Addend:
    """A vector that is added to entries of a value, possibly times a product that depends on the inputs.

    Attributes:
        steps: The linear operations that compute the added vector from the vector of the translation family.
        size: The length of the added vector.
        places: For each entry of the value: one plus the index of the vector entry that is added to it, or zero if
            nothing is added.
        product: The product of model values by which the added vector is multiplied.
    """

    steps: tuple[ImageStep, ...]
    size: int
    places: Tensor
    product: Monomial = ONE

    @property
    def varied(self) -> Tensor:
        """Labels for the entries of a value: entries with equal labels change by the same amount."""
        if self.product is ONE:
            return self.places
        varying = {axis % self.places.ndim for axis in self.product.axes}
        return varied(self.places, each_position(self.places.shape, set(range(self.places.ndim)) - varying))


@dataclass(frozen=True, eq=False)
class Offset:
    """The sum of the vectors that are added to a value.

    Attributes:
        terms: The added vectors, if each is known as a function of the weights.
        labels: If the added amounts depend on the inputs, an array of labels that replaces the terms. Entries with
            equal labels change by equal amounts, and entries with label zero do not change.
        is_masked: Whether a mask has excluded some entries from a softmax. Excluded entries do not change, although the
            offset contains amounts for these entries. Therefore only a softmax may read the value.
        source: An object that is shared by all offsets whose labels can be compared. In all offsets with the same
            source, entries with equal labels change by equal amounts.
    """

    terms: tuple[Addend, ...] = ()
    labels: Tensor | None = None
    is_masked: bool = False
    source: object = field(default_factory=object)

    @property
    def arrays(self) -> list[Tensor]:
        """The arrays `places` of all added vectors, or the array of labels."""
        return [term.places for term in self.terms] if self.labels is None else [self.labels]

    @property
    def has_products(self) -> bool:
        """Whether a vector is multiplied by a product that depends on the inputs."""
        return any(term.product is not ONE for term in self.terms)

    @property
    def is_nothing(self) -> bool:
        """Whether the offset changes no entry."""
        return not any(_has_any(array) for array in self.arrays)

    def is_equal(self, other: "Offset") -> bool:
        """Return whether two changes of values (offsets) are known to be equal."""
        if self.labels is not None and other.labels is not None:
            return self.source is other.source and torch.equal(self.labels, other.labels)
        alike = [
            (a.steps, a.product.key) == (b.steps, b.product.key) and torch.equal(a.places, b.places)
            for a, b in zip(self.terms, other.terms, strict=False)
        ]
        return self.labels is other.labels and len(self.terms) == len(other.terms) and all(alike)

    def is_uniform(self, *dims: int) -> bool:
        """Return whether the offset is constant along each of the given axes."""
        varying = {axis % term.places.ndim for term in self.terms for axis in term.product.axes}
        if varying & {dim % self.arrays[0].ndim for dim in dims}:
            return False
        return all(is_constant(array, dim) for array in self.arrays for dim in dims)

    def move(self, function: Callable[[Tensor], Any]) -> Any:
        """Return the offset after an operator that only rearranges entries. If the operator has several results, return
        a separate offset for each result.
        """
        if self.has_products:
            return Offset(labels=self.as_labels(), is_masked=self.is_masked).move(function)
        moved = [function(array) for array in self.arrays]
        if all(isinstance(array, Tensor) for array in moved):
            return self._with(moved)
        parts = [pytree.tree_flatten(several) for several in moved]
        results = [self._with(arrays) for arrays in zip(*(leaves for leaves, _ in parts), strict=True)]
        return pytree.tree_unflatten(results, parts[0][1])

    def _with(self, arrays: Sequence[Tensor]) -> "Offset":
        """Return a copy of the offset with other arrays `places`, or with other labels."""
        if self.labels is not None:
            return replace(self, labels=arrays[0])
        terms = tuple(Addend(term.steps, term.size, places) for term, places in zip(self.terms, arrays, strict=True))
        return Offset(terms, is_masked=self.is_masked)

    def expand(self, shape: Sequence[int]) -> "Offset":
        """Return the offset (change) of a value after the value is broadcast to a shape."""
        terms = tuple(replace(term, places=term.places.expand(tuple(shape))) for term in self.terms)
        return replace(self, terms=terms, labels=None if self.labels is None else self.labels.expand(tuple(shape)))

    def then(self, *steps: ImageStep) -> "Offset":
        """Return the offset after further linear operations on its vectors, which do not change the lengths of the
        vectors.
        """
        terms = tuple(replace(term, steps=(*term.steps, *steps)) for term in self.terms)
        return replace(self, terms=terms, source=object())

    def content(self) -> Hashable | None:
        """Return a key for comparing offsets. Equal offsets have equal keys. Return None if the arrays of the offset
        are too large.
        """
        arrays = [once([array])[0] for array in self.arrays]
        if sum(array.numel() for array in arrays) > LARGEST_CONTENT:
            return None
        shapes = tuple((full.shape, few.shape) for full, few in zip(self.arrays, arrays, strict=True))
        digests = tuple(blake2b(few.numpy().tobytes(), digest_size=16).digest() for few in arrays)
        return (
            tuple((term.steps, term.size, term.product.key) for term in self.terms),
            shapes,
            digests,
            self.labels is None,
            self.is_masked,
        )

    def known(self) -> tuple[Addend, ...]:
        """Return the vectors that are added to the value (terms). Raise `SeenError` if the added amounts depend on the
        inputs or on a mask.
        """
        if self.labels is not None or self.is_masked or self.has_products:
            raise SeenError
        return self.terms

    def as_labels(self) -> Tensor:
        """Return labels that replace the terms.

        Two entries of the value get the same label if every term adds the same entry of its vector to the two entries.
        """
        if self.labels is not None:
            return self.labels
        total = self.terms[0].varied
        for term in self.terms[1:]:
            total = paired(total, term.varied)
        return total


def is_constant(array: Tensor, dim: int) -> bool:
    """Return whether an array is constant along an axis."""
    if not -array.ndim <= dim < array.ndim:
        raise SeenError
    if not array.stride(dim) or array.shape[dim] < 2:
        return True
    (array,) = once([array])
    first = array.narrow(dim, 0, 1)
    return torch.equal(first, array.narrow(dim, 1, 1)) and torch.equal(array, first.expand_as(array))


def _has_any(array: Tensor) -> bool:
    """Return whether an array has a nonzero entry. The first entry, which is usually nonzero, is tested first."""
    return bool(array.numel()) and (bool(array[(0,) * array.ndim]) or bool(once([array])[0].any()))


def once(arrays: Sequence[Tensor]) -> list[Tensor]:
    """Shorten arrays to length one along each axis that is repeated (has stride zero) in all of these arrays."""
    shape, strides = arrays[0].shape, zip(*(array.stride() for array in arrays), strict=True)
    repeated = [dim for dim, several in enumerate(strides) if shape[dim] > 1 and not any(several)]
    few = []
    for array in arrays:
        for dim in repeated:
            array = array.narrow(dim, 0, 1)
        few.append(array)
    return few


def paired(first: Tensor, second: Tensor) -> Tensor:
    """Combine two arrays of labels: entries get the same label only if their labels are equal in both arrays.

    An entry whose label is zero in both arrays keeps the label zero.
    """
    few, more = once([first, second])
    return (few * (int(more.max()) + 1) + more).expand(first.shape)


def varied(labels: Tensor, positions: Tensor) -> Tensor:
    """Return labels such that entries get the same label only if their old labels and their `positions` are equal.
    Labels of zero stay zero.
    """
    few, more = once([labels, paired(labels, positions)])
    return torch.where(few == 0, 0, more).expand(labels.shape)


def along(values: Tensor, dim: int, shape: Sequence[int]) -> Tensor:
    """Return a one-dimensional array, placed along one axis of a shape and broadcast along the remaining axes."""
    return values.reshape([n if k == dim else 1 for k, n in enumerate(shape)]).expand(tuple(shape))


def each_position(shape: Sequence[int], constant: Iterable[int]) -> Tensor:
    """Return an array with a different label at each position. Positions that differ only along the `constant` axes get
    the same label.
    """
    sizes = [1 if k in constant else n for k, n in enumerate(shape)]
    return torch.arange(1, torch.Size(sizes).numel() + 1).reshape(sizes).expand(tuple(shape))


def channels(term: Addend, *dims: int) -> Tensor:
    """Return one plus the index of the vector entry that is added at each position along some axes, as a flat array.

    Raise `SeenError` if the vector entries also vary along another axis.
    """
    places, own = term.places, {dim % term.places.ndim for dim in dims}
    for k in range(places.ndim):
        if k not in own:
            if not is_constant(places, k):
                raise SeenError
            places = places.narrow(k, 0, 1)
    return places.flatten()


def picked(term: Addend, places: Tensor) -> tuple[tuple[ImageStep, ...], int]:
    """Return the linear operations that compute the vector which is added at given entries, and the length of this
    vector.

    Raise `SeenError` if nothing is added to one of the given entries, or if the added vector entries form no regular
    pattern.
    """
    if bool((places == 0).any()):
        raise SeenError
    pattern = pattern_of(places - 1)
    if pattern is None:
        raise SeenError
    is_all = pattern == Entries("", (term.size,), (1,))
    return (*term.steps, *(() if is_all else (ImageStep("take", pattern),))), places.numel()


def pattern_of(numbers: Tensor) -> Entries | None:
    """Describe a sequence of indices by a start, sizes and strides, with at most three axes.

    Return None if no start, sizes and strides of three axes describe the sequence.
    """
    values = numbers.flatten()
    sizes: list[int] = []
    strides: list[int] = []
    start, count = int(values[0]), values.numel()
    while values.numel() > 1:
        step = int(values[1] - values[0])
        expected = values[0] + step * torch.arange(values.numel())
        wrong = (values != expected).nonzero()
        run = int(wrong[0]) if len(wrong) else values.numel()
        if values.numel() % run or step < 0 or run < 2:
            return None
        blocks = values.reshape(-1, run)
        if not bool((blocks - blocks[:, :1] == blocks[0] - blocks[0, 0]).all()):
            return None
        sizes.insert(0, run)
        strides.insert(0, step)
        values = blocks[:, 0]
    if len(sizes) > 3:
        return None
    return Entries("", tuple(sizes) or (count,), tuple(strides) or (1,), start)


def added(shape: tuple[int, ...], offsets: list[Any], factors: list[float]) -> Any:
    """Return the sum of changes (offsets) of values of one shape, each multiplied by a factor. Return None if the
    changes cancel.
    """
    whole = [None if one is None else one.expand(shape) for one in offsets]
    there = [(one, factor) for one, factor in zip(whole, factors, strict=True) if one is not None]
    is_masked = any(one.is_masked for one, _ in there)
    if len(there) == 2 and factors[0] == -factors[1] and there[0][0].is_equal(there[1][0]):
        return None
    if all(one.labels is None for one, _ in there):
        scaled = [one if factor == 1 else one.then(ImageStep("scale", factor=factor)) for one, factor in there]
        return Offset(tuple(term for one in scaled for term in one.terms), is_masked=is_masked)
    if len(there) == 1:
        return there[0][0] if there[0][1] == 1 else there[0][0].then()
    first, second = (one.as_labels() for one, _ in there)
    return Offset(labels=paired(first, second), is_masked=is_masked)

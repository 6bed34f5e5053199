"""Translations: vectors that may be added to parameters without a change of the function, and where they are added.

A family of them adds a vector t to some entries of one parameter, its home, and images of t to other parameters, which
make up for it: minus the next layer's weights times t to its bias, for example. The steps from t to an image are data,
so that a symmetry can be stored and act on networks that no module is at hand for.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from regauge.core.params import Params

Kind = Literal["take", "through", "times", "over", "over root", "total", "scale"]


@dataclass(frozen=True)
class Entries:
    """Entries of a parameter as an array: entry `(i, j, ...)` is number `start + i * stride_0 + j * stride_1 + ...`.

    Attributes:
        parameter: The parameter, whose values are numbered in the order of its axes; empty for a vector of a step.
        sizes: The shape of the array.
        strides: One for each of its axes; zero repeats entries.
        start: The number of the first entry.
    """

    parameter: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    start: int = 0

    @classmethod
    def whole(cls, parameter: str, shape: Sequence[int]) -> "Entries":
        """Return all entries of a parameter, in its own shape."""
        return cls(parameter, tuple(shape), _contiguous(shape))

    @property
    def last(self) -> int:
        """The largest number of an entry."""
        return self.start + sum((n - 1) * stride for n, stride in zip(self.sizes, self.strides, strict=True))

    def family_name(self, constant: Sequence[int], shape: Sequence[int]) -> str:
        """Return the name of a family that adds to these entries of a parameter of a shape."""
        piece = "" if self.sizes == tuple(shape) else f"[{self.start}:{self.last + 1}]"
        return self.parameter + piece + (f".mean({constant[0]})" if constant else "")

    @property
    def is_apart(self) -> bool:
        """Whether no two entries of the array have one number."""
        reach = 0
        for stride, size in sorted(zip(self.strides, self.sizes, strict=True)):
            if size > 1:
                if stride <= reach:
                    return False
                reach += (size - 1) * stride
        return True

    def of(self, tensor: Tensor, lead: int = 0) -> Tensor:
        """Return the entries of a tensor `[*lead, ...]`, as a view wherever it is contiguous: `[*lead, *sizes]`."""
        if self.sizes == tuple(tensor.shape[lead:]) and not self.start and self.strides == _contiguous(self.sizes):
            return tensor
        tensor = tensor.contiguous()
        outer = tensor.shape[:lead]
        return tensor.as_strided(
            (*outer, *self.sizes), (*tensor.stride()[:lead], *self.strides), tensor.storage_offset() + self.start
        )


@dataclass(frozen=True)
class ImageStep:
    """A linear map from a vector to another one, with coefficients that are parameters.

    Attributes:
        kind: "take" picks entries of the vector; "through" multiplies by weights `[copies, outputs, inputs, ...]`,
            summed over all further axes, with a vector `[copies * inputs]` in and one `[copies * outputs]` out; "times"
            and "over" multiply and divide by entries of a parameter, one by one, "over root" divides by the roots of
            these entries plus a number; "total" multiplies by the sum of these entries; "scale" multiplies by a number.
        entries: What is picked, or the parameter's entries.
        factor: The number of "scale", and the one that is added to entries of "over root".
        by: Entries of a gain that those of "total" are divided by; the sum counts as zero where one of the gain is.
    """

    kind: Kind
    entries: Entries = Entries("", (), ())
    factor: float = 1.0
    by: Entries | None = None

    def size_of(self, size: int) -> int:
        """Return the length of the image of a vector of a length.

        Raises:
            ValueError: No vector of that length can be mapped.
        """
        sizes, last = self.entries.sizes, self.entries.last
        if self.kind == "take" and last < size:
            return math.prod(sizes)
        if self.kind == "through" and len(sizes) > 2 and sizes[0] * sizes[2] == size:
            return sizes[0] * sizes[1]
        is_alike = self.kind in ("times", "over", "over root") and math.prod(sizes) == size
        if is_alike or self.kind in ("total", "scale"):
            return size
        raise ValueError(f"a step {self.kind!r} with entries {self.entries} takes no vector of {size} values")

    def apply(self, vector: Tensor, params: Mapping[str, Tensor], lead: int) -> Tensor:
        """Return the image of a vector `[*lead, n]`."""
        if self.kind == "scale":
            return vector * self.factor
        if self.kind == "take":
            return _flat(self.entries.of(vector, lead), lead)
        values = self.entries.of(params[self.entries.parameter], lead).to(vector)
        if self.kind == "through":
            weights = values.flatten(lead + 3).sum(-1) if len(self.entries.sizes) > 3 else values
            copies, _, inputs = self.entries.sizes[:3]
            parts = vector.reshape(*vector.shape[:lead], copies, inputs, 1)
            return _flat(weights @ parts, lead)
        values = _flat(values, lead)
        if self.kind == "total":
            inverse = 1.0 if self.by is None else _inverse(self.by.of(params[self.by.parameter], lead).to(vector))
            return vector * (values * inverse).sum(-1, keepdim=True)
        if self.kind == "over root":
            return vector / (values + self.factor).sqrt()
        return vector * values if self.kind == "times" else vector / values


@dataclass(frozen=True)
class Image:
    """A vector that is added to a parameter to make up for that of a family.

    Attributes:
        entries: Where it is added.
        constant: The axes of the entries along which the same is added.
        steps: From the family's vector to what is added, flat along the other axes.
    """

    entries: Entries
    constant: tuple[int, ...] = ()
    steps: tuple[ImageStep, ...] = ()


@dataclass(frozen=True)
class TranslationFamily:
    """A family of vectors that may be added without a change of the function.

    Attributes:
        name: Unique within a symmetry.
        entries: The entries of its home that the vector is added to.
        constant: The axes of these entries along which the same is added: the coordinate of a network is the mean over
            them, or the entries themselves if there are none. A representative has coordinate zero.
        gain: Entries of a gain that what is added is divided by along the one constant axis, because what reads from
            that axis reads values multiplied by it. The coordinate is the mean of the entries times the gain; nothing
            is added where one of these is zero.
        centered: Axes of the vector along which it sums to zero, because an earlier family adds the rest: the last
            entry along each is not stored.
        images: What is added elsewhere.
        is_stored_only: Whether the function is kept only with running statistics as stored, and not when they are
            computed anew: such a family tells networks apart, and is never applied to one that runs on.
        eps: Given where the family multiplies: the home is a variance, the coordinate is the logarithm of the home plus
            eps, and what is added to the coordinate are logarithms, by which this sum and what images name are
            multiplied.
    """

    name: str
    entries: Entries
    constant: tuple[int, ...] = ()
    gain: Entries | None = None
    centered: tuple[int, ...] = ()
    images: tuple[Image, ...] = ()
    is_stored_only: bool = False
    eps: float | None = None

    @property
    def vector_shape(self) -> tuple[int, ...]:
        """The shape of what is added, before it is repeated along constant axes."""
        return tuple(n for k, n in enumerate(self.entries.sizes) if k not in self.constant)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the coordinate of one network."""
        return tuple(n - (k in self.centered) for k, n in enumerate(self.vector_shape))

    @property
    def size(self) -> int:
        """The number of independent directions."""
        return math.prod(self.shape)

    @property
    def condition(self) -> str:
        """The condition that a representative meets."""
        entries = self.name.split(".mean(")[0]
        if self.eps is not None:
            return f"{entries} plus eps is one"
        if not self.constant:
            return f"{entries} is zero"
        (axis,) = self.constant
        read = "" if self.gain is None else f" times {self.gain.parameter}"
        return f"{entries}{read} has mean zero along axis {axis}"

    @property
    def placements(self) -> tuple[Entries, ...]:
        """The entries that it adds to, its home first."""
        return self.entries, *(image.entries for image in self.images)

    @property
    def parameters(self) -> tuple[str, ...]:
        """The parameters that it changes, its home first."""
        return tuple(dict.fromkeys(entries.parameter for entries in self.placements))

    @property
    def coefficients(self) -> tuple[str, ...]:
        """The parameters that images are computed from."""
        steps = [step for image in self.images for step in image.steps]
        read = [self.gain, *(step.entries for step in steps), *(step.by for step in steps)]
        return tuple(dict.fromkeys(one.parameter for one in read if one and one.parameter))

    def read(self, params: Mapping[str, Tensor], lead: int = 0) -> Tensor:
        """Return the coordinate of networks."""
        gains = self._gains(params, lead)
        home = params[self.entries.parameter]
        values = self.vector(home if self.eps is None else (home + self.eps).log(), lead, gains)
        if gains is not None:
            is_whole = (gains != 0).all(-1)
            values = values * is_whole.reshape((*is_whole.shape, *[1] * (values.ndim - lead)))
        return self.shorten(values, lead)

    def vector(self, home: Tensor, lead: int = 0, gains: Tensor | None = None) -> Tensor:
        """Return the vector that the values of a home hold, if gains are these: `[*lead, *vector_shape]`."""
        values = self.entries.of(home, lead)
        if gains is not None:
            values = values * self._spread(gains, lead)
        return values.mean([lead + k for k in self.constant]) if self.constant else values

    def _gains(self, params: Mapping[str, Tensor], lead: int) -> Tensor | None:
        """Return the entries of the gain, `[*lead, n]`."""
        if self.gain is None:
            return None
        return self.gain.of(params[self.gain.parameter], lead).to(params[self.entries.parameter])

    def _spread(self, values: Tensor, lead: int) -> Tensor:
        """Return values along the constant axis, `[*lead, 1, ..., n, ..., 1]`."""
        (axis,) = self.constant
        return values.reshape((*values.shape[:lead], *(-1 if k == axis else 1 for k in range(len(self.entries.sizes)))))

    def shorten(self, vector: Tensor, lead: int = 0) -> Tensor:
        """Return a vector without the entries that the others tell."""
        for axis in self.centered:
            vector = vector.narrow(lead + axis, 0, vector.shape[lead + axis] - 1)
        return vector.clone()

    def lengthen(self, coordinate: Tensor, lead: int = 0) -> Tensor:
        """Return the vector of a coordinate, whole."""
        for axis in self.centered:
            coordinate = torch.cat([coordinate, -coordinate.sum(lead + axis, keepdim=True)], lead + axis)
        return coordinate

    def add(self, params: Params, coordinate: Tensor, lead: int = 0, sign: float = 1.0) -> Params:
        """Return networks with more of a coordinate, and what makes up for it; tensors that change are new."""
        result = dict(params)
        for one in self.additions(params, coordinate, lead, sign):
            result[one.entries.parameter] = one.to(result[one.entries.parameter], lead)
        return result

    def additions(
        self, params: Mapping[str, Tensor], coordinate: Tensor, lead: int = 0, sign: float = 1.0
    ) -> list["Addition"]:
        """Return the vectors that are added to networks with more of a coordinate: to the home, and what makes up for
        it."""
        vector = self.lengthen(coordinate, lead) * sign
        gains = self._gains(params, lead)
        inverse = None if gains is None else self._spread(_inverse(gains), lead)
        added = [Addition(self.entries, self.constant, _flat(vector, lead), inverse, self.eps)]
        for image in self.images:
            moved = _flat(vector, lead)
            for step in image.steps:
                moved = step.apply(moved, params, lead)
            added.append(Addition(image.entries, image.constant, moved, eps=None if self.eps is None else 0.0))
        return added

    def embed(self, coordinate: Tensor, shape: Sequence[int], lead: int = 0) -> Tensor:
        """Return a tensor of the home's shape that holds nothing but this coordinate."""
        flat = _flat(self.lengthen(coordinate, lead), lead)
        return Addition(self.entries, self.constant, flat).to(flat.new_zeros(*flat.shape[:lead], *shape), lead)

    def renamed(self, names: dict[str, str]) -> "TranslationFamily":
        """Return the family with parameters of other names."""

        def rename(entries: Entries) -> Entries:
            return replace(entries, parameter=names.get(entries.parameter, entries.parameter))

        def step(one: ImageStep) -> ImageStep:
            return replace(one, entries=rename(one.entries), by=one.by and rename(one.by))

        images = tuple(
            replace(image, entries=rename(image.entries), steps=tuple(map(step, image.steps))) for image in self.images
        )
        return replace(self, entries=rename(self.entries), gain=self.gain and rename(self.gain), images=images)


@dataclass(frozen=True)
class Addition:
    """A vector that is added to some entries of a parameter.

    Attributes:
        entries: The entries.
        constant: Their axes along which the same is added, but for a factor.
        flat: The vectors of networks `[*lead, n]`, flat along the other axes.
        factor: What they are multiplied by, shaped as the entries or of length one along axes.
        eps: Given where the vectors are logarithms, by which the entries plus eps are multiplied instead.
    """

    entries: Entries
    constant: tuple[int, ...]
    flat: Tensor
    factor: Tensor | None = None
    eps: float | None = None

    def to(self, tensor: Tensor, lead: int = 0) -> Tensor:
        """Return a tensor with this added to it."""
        sizes = [1 if k in self.constant else n for k, n in enumerate(self.entries.sizes)]
        result = tensor.clone(memory_format=torch.contiguous_format)
        added = self.flat.reshape(*self.flat.shape[:lead], *sizes).to(result)
        own = self.entries.of(result, lead)
        if self.eps is None:
            own.add_(added if self.factor is None else added * self.factor)
        else:  # (v + eps) e^t - eps, which leaves alone what has the logarithm zero
            own.add_((own + self.eps) * added.expm1())
        return result

    def rows(self, rows: tuple[int, int], length: int) -> "Addition | None":
        """Return the part that is added to some rows of the parameter's first axis, each of `length` values.

        None where no axis of the entries goes along rows.
        """
        one, (begin, end) = self.entries, rows
        axis = max((k for k, n in enumerate(one.strides) if n == length), key=one.sizes.__getitem__, default=None)
        inner = one.start % length + sum(
            (n - 1) * stride for k, (n, stride) in enumerate(zip(one.sizes, one.strides, strict=True)) if k != axis
        )
        if axis is None or inner >= length:
            return None
        first = one.start // length
        low, high = (min(max(row - first, 0), one.sizes[axis]) for row in (begin, end))
        sizes = tuple(high - low if k == axis else n for k, n in enumerate(one.sizes))
        entries = replace(one, sizes=sizes, start=one.start % length + max(first - begin, 0) * length)
        flat = self.flat.reshape([1 if k in self.constant else n for k, n in enumerate(one.sizes)])
        flat = (flat if axis in self.constant else flat.narrow(axis, low, high - low)).flatten()
        factor = self.factor
        if factor is not None and factor.shape[axis] > 1:
            factor = factor.narrow(axis, low, high - low)
        return replace(self, entries=entries, flat=flat, factor=factor)


def _inverse(gains: Tensor) -> Tensor:
    """Inverse gains, or zeros for networks in which one is zero."""
    is_whole = (gains != 0).all(-1, keepdim=True)
    return torch.where(is_whole, 1 / torch.where(gains == 0, 1.0, gains), 0.0)


def _flat(tensor: Tensor, lead: int) -> Tensor:
    """Return a tensor with one axis behind the leading ones, also where it has none."""
    return tensor.reshape(*tensor.shape[:lead], -1)


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[k + 1 :]) for k in range(len(shape)))

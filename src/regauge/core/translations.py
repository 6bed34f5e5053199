"""Translations: vectors that can be added to parameters without changing the function.

A translation family adds a vector t to some entries of one parameter, the home of the family. To preserve the function,
the family also adds vectors that are computed from t, the images of t, to other parameters. For example, if t is added
to a bias, minus the next layer's weights times t is added to the next layer's bias. The steps that compute an image
from t are stored as data, not as code. Therefore a symmetry with translations can be saved, and can act on networks
without their module.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import mul
from typing import Literal

import torch
from torch import Tensor

from regauge.core.params import Params

Kind = Literal["take", "through", "times", "over", "over root", "total", "scale"]


@dataclass(frozen=True)
class Entries:
    """Entries of a parameter, read as an array: its entry (i, j) is at index `start + i * stride_0 + j * stride_1`.

    Attributes:
        parameter: The name of the parameter. Indices count the entries of the parameter in row-major order. The name is
            empty if the entries belong to a vector, the input of an `ImageStep`.
        sizes: The shape of the array.
        strides: The number of index steps along each axis of the array. A stride of zero repeats entries along its
            axis.
        start: The index of the first entry.
    """

    parameter: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    start: int = 0

    @classmethod
    def whole(cls, parameter: str, shape: Sequence[int]) -> "Entries":
        """Return the array of all entries of a parameter, in the shape of the parameter."""
        return cls(parameter, tuple(shape), _contiguous(shape))

    @property
    def last(self) -> int:
        """The largest index of a parameter entry in the array."""
        return self.start + sum((n - 1) * stride for n, stride in zip(self.sizes, self.strides, strict=True))

    def family_name(self, constant: Sequence[int], shape: Sequence[int]) -> str:
        """Return a name for a translation family that adds to given entries. `shape` is the shape of the parameter."""
        piece = "" if self.sizes == tuple(shape) else f"[{self.start}:{self.last + 1}]"
        return self.parameter + piece + (f".mean({constant[0]})" if constant else "")

    @property
    def once(self) -> "Entries":
        """The array without those axes along which it repeats the same entries."""
        own = [(n, stride) for n, stride in zip(self.sizes, self.strides, strict=True) if stride]
        return replace(self, sizes=tuple(n for n, _ in own), strides=tuple(stride for _, stride in own))

    @property
    def is_apart(self) -> bool:
        """Whether no two entries of the array refer to the same entry of the parameter."""
        reach = 0
        for stride, size in sorted(zip(self.strides, self.sizes, strict=True)):
            if size > 1:
                if stride <= reach:
                    return False
                reach += (size - 1) * stride
        return True

    def of(self, tensor: Tensor, lead: int = 0) -> Tensor:
        """Return the entries of a tensor `[*lead, ...]` as `[*lead, *sizes]`; a view if the tensor is contiguous."""
        if self.sizes == tuple(tensor.shape[lead:]) and not self.start and self.strides == _contiguous(self.sizes):
            return tensor
        tensor = tensor.contiguous()
        outer = tensor.shape[:lead]
        return tensor.as_strided(
            (*outer, *self.sizes), (*tensor.stride()[:lead], *self.strides), tensor.storage_offset() + self.start
        )


@dataclass(frozen=True)
class ImageStep:
    """A linear map of a vector, whose coefficients are entries of parameters.

    Attributes:
        kind: The operation. "take" selects entries of the vector. "through" multiplies by weights `[copies, outputs,
            inputs, ...]`, which are summed over all further axes. The operation "through" maps a vector `[copies *
            inputs]` to a vector `[copies * outputs]`. "times" and "over" multiply and divide by entries of a parameter,
            entry by entry. If the parameter has further axes at the end, "times" first sums its entries over these
            axes. "over root" divides by the square roots of entries of a parameter plus a constant. "total" multiplies
            by the sum of entries of a parameter. "scale" multiplies by a constant.
        entries: The selected entries of the vector, or the entries of the parameter.
        factor: The constant by which "scale" multiplies, or which "over root" adds to entries.
        by: Entries of a gain by which "total" divides its entries before it computes the sum. If a gain in `by` is
            zero, "total" sets the sum to zero.
    """

    kind: Kind
    entries: Entries = Entries("", (), ())
    factor: float = 1.0
    by: Entries | None = None

    def size_of(self, size: int) -> int:
        """Return the length of the result of this linear map for a vector with the given length.

        Raises:
            ValueError: The map does not accept a vector of the given length.
        """
        sizes, last = self.entries.sizes, self.entries.last
        if self.kind == "take" and last < size:
            return math.prod(sizes)
        if self.kind == "through" and len(sizes) > 2 and sizes[0] * sizes[2] == size:
            return sizes[0] * sizes[1]
        is_alike = self.kind in ("times", "over", "over root") and math.prod(sizes) == size
        is_alike |= self.kind == "times" and size in accumulate(sizes, mul)
        if is_alike or self.kind in ("total", "scale"):
            return size
        raise ValueError(f"a step {self.kind!r} with entries {self.entries} takes no vector of {size} values")

    def apply(self, vector: Tensor, params: Mapping[str, Tensor], lead: int) -> Tensor:
        """Return the image of a vector `[*lead, n]` under this linear map."""
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
        if self.kind == "times":
            return vector * values.reshape(*values.shape[:-1], vector.shape[-1], -1).sum(-1)
        return vector / values


@dataclass(frozen=True)
class Image:
    """A vector that is added to a parameter to compensate for the vector that a family adds to its home.

    Attributes:
        entries: The entries of the parameter to which the vector is added.
        constant: The axes of `entries` along which the added vector is constant.
        steps: The linear maps that compute the added vector from the vector of the family, one after the other. The
            result is flattened over the axes along which the added vector is not constant.
    """

    entries: Entries
    constant: tuple[int, ...] = ()
    steps: tuple[ImageStep, ...] = ()


@dataclass(frozen=True)
class TranslationFamily:
    """A family of vectors that can be added to parameters without changing the function.

    Attributes:
        name: The name of the family. The name is unique within a symmetry.
        entries: The entries of the home parameter to which the vector is added.
        constant: The axes of `entries` along which the added vector is constant. The coordinate of a network is the
            mean of its entries over the constant axes. Without constant axes, the coordinate is the entries themselves.
            In a representative (see `regauge.core.chart`), the coordinate is zero.
        gain: Entries of a gain, or None. A family with a gain has a single constant axis. Along the constant axis, the
            added vector is divided by the gain, because the model multiplies the home parameter by the gain. If a
            family has a gain, the coordinate is the mean of the products of entries and gain. If an entry of the gain
            is zero, nothing is added.
        centered: The axes along which the added vector sums to zero, because an earlier family already adds constants.
            The last entry along each centered axis is not stored, because the other entries determine it.
        images: The vectors that are added to other parameters.
        is_stored_only: Whether the function changes if running statistics are recomputed after the vector was added. A
            family with `is_stored_only` is used to compare networks, but is never applied to a network that is used
            afterwards.
        eps: None for a family that adds vectors; a constant for a family that multiplies by factors. If eps is given,
            the home parameter is a running variance, and the coordinate is the logarithm of the variance plus eps.
            Vectors that are added to the logarithm are logarithms of factors. The factors multiply the home plus eps,
            and the entries of the images.
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
        """The shape of the added vector before it is repeated along the constant axes."""
        return tuple(n for k, n in enumerate(self.entries.sizes) if k not in self.constant)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the coordinate of one network."""
        return tuple(n - (k in self.centered) for k, n in enumerate(self.vector_shape))

    @property
    def size(self) -> int:
        """The dimension of the family, which is the number of independent vectors that it can add."""
        return math.prod(self.shape)

    @property
    def condition(self) -> str:
        """The condition, as text, by which the family chooses one network (the representative). The condition concerns
        the home parameter, to which the family adds its vector.
        """
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
        """The entries to which the family adds, beginning with those of its home parameter."""
        return self.entries, *(image.entries for image in self.images)

    @property
    def parameters(self) -> tuple[str, ...]:
        """The parameters that the family changes, beginning with its home parameter."""
        return tuple(dict.fromkeys(entries.parameter for entries in self.placements))

    @property
    def read_entries(self) -> tuple[Entries, ...]:
        """The entries of parameters from which the images of an added vector are computed."""
        steps = [step for image in self.images for step in image.steps]
        read = [self.gain, *(step.entries for step in steps), *(step.by for step in steps)]
        return tuple(one for one in read if one and one.parameter)

    @property
    def coefficients(self) -> tuple[str, ...]:
        """The parameters from which the images of an added vector are computed."""
        return tuple(dict.fromkeys(one.parameter for one in self.read_entries))

    def read(self, params: Mapping[str, Tensor], lead: int = 0) -> Tensor:
        """Return the coordinates of networks with respect to this translation family."""
        gains = self._gains(params, lead)
        home = params[self.entries.parameter]
        values = self.vector(home if self.eps is None else (home + self.eps).log(), lead, gains)
        if gains is not None:
            is_whole = (gains != 0).all(-1)
            values = values * is_whole.reshape((*is_whole.shape, *[1] * (values.ndim - lead)))
        return self.shorten(values, lead)

    def vector(self, home: Tensor, lead: int = 0, gains: Tensor | None = None) -> Tensor:
        """Return the parameter `home` (times the gain, if any), averaged along its constant axes: `[*lead,
        *vector_shape]`.
        """
        values = self.entries.of(home, lead)
        if gains is not None:
            values = values * self._spread(gains, lead)
        return values.mean([lead + k for k in self.constant]) if self.constant else values

    def _gains(self, params: Mapping[str, Tensor], lead: int) -> Tensor | None:
        """Return the entries of the family's gain, `[*lead, n]`."""
        if self.gain is None:
            return None
        return self.gain.of(params[self.gain.parameter], lead).to(params[self.entries.parameter])

    def _spread(self, values: Tensor, lead: int) -> Tensor:
        """Return values with one entry for each index of the constant axis, reshaped to broadcast over all other axes:
        `[*lead, 1, ..., n, ..., 1]`.
        """
        (axis,) = self.constant
        return values.reshape((*values.shape[:lead], *(-1 if k == axis else 1 for k in range(len(self.entries.sizes)))))

    def shorten(self, vector: Tensor, lead: int = 0) -> Tensor:
        """Return the stored part of a vector whose entries sum to zero along some axes: the last entry along each of
        these axes is left out.
        """
        for axis in self.centered:
            vector = vector.narrow(lead + axis, 0, vector.shape[lead + axis] - 1)
        return vector.clone()

    def lengthen(self, coordinate: Tensor, lead: int = 0) -> Tensor:
        """Return the full vector, given its stored part (coordinate). The missing entries are computed from the
        condition that the sum along each centered axis is zero.
        """
        for axis in self.centered:
            coordinate = torch.cat([coordinate, -coordinate.sum(lead + axis, keepdim=True)], lead + axis)
        return coordinate

    def add(self, params: Params, coordinate: Tensor, lead: int = 0, sign: float = 1.0) -> Params:
        """Return networks after a vector was added to the home parameter, and the vectors that compensate for it to
        other parameters.

        Changed tensors are returned as new tensors.
        """
        result = dict(params)
        for one in self.additions(params, coordinate, lead, sign):
            result[one.entries.parameter] = one.to(result[one.entries.parameter], lead)
        return result

    def additions(
        self, params: Mapping[str, Tensor], coordinate: Tensor, lead: int = 0, sign: float = 1.0
    ) -> list["Addition"]:
        """Return the vectors to add if a given vector is added to the coordinate of networks. The home parameter gets
        one vector, and so does each parameter that compensates.
        """
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
        """Return a tensor in the shape of the home parameter, which contains a given coordinate at the family's
        entries, and zeros elsewhere.
        """
        flat = _flat(self.lengthen(coordinate, lead), lead)
        return Addition(self.entries, self.constant, flat).to(flat.new_zeros(*flat.shape[:lead], *shape), lead)

    def renamed(self, names: dict[str, str]) -> "TranslationFamily":
        """Return the family with new names for its parameters."""

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
        entries: The entries to which the vector is added.
        constant: The axes of `entries` along which the added vector is constant, apart from `factor`.
        flat: The added vectors, one for each network, `[*lead, n]`, flattened over the axes that are not constant.
        factor: A factor that multiplies the vectors, in the shape of the entries or broadcastable to it.
        eps: A constant if the vectors are logarithms of factors, otherwise None. If eps is given, the factors multiply
            the entries plus eps.
    """

    entries: Entries
    constant: tuple[int, ...]
    flat: Tensor
    factor: Tensor | None = None
    eps: float | None = None

    def to(self, tensor: Tensor, lead: int = 0) -> Tensor:
        """Return the tensor after this vector has been added."""
        sizes = [1 if k in self.constant else n for k, n in enumerate(self.entries.sizes)]
        result = tensor.clone(memory_format=torch.contiguous_format)
        added = self.flat.reshape(*self.flat.shape[:lead], *sizes).to(result)
        own = self.entries.of(result, lead)
        if self.eps is None:
            own.add_(added if self.factor is None else added * self.factor)
        else:  # (v + eps) e^t - eps, without rounding if t is zero
            own.add_((own + self.eps) * added.expm1())
        return result

    def rows(self, rows: tuple[int, int], length: int) -> "Addition | None":
        """Return the part of the vector that is added to some rows of the parameter's first axis.

        Each row of the parameter has `length` entries.

        Return None if no axis of `entries` runs along rows.
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
    """Return one divided by each gain, or zeros for networks in which a gain is zero."""
    is_whole = (gains != 0).all(-1, keepdim=True)
    return torch.where(is_whole, 1 / torch.where(gains == 0, 1.0, gains), 0.0)


def _flat(tensor: Tensor, lead: int) -> Tensor:
    """Return a tensor with its axes after the leading axes flattened to one axis."""
    return tensor.reshape(*tensor.shape[:lead], -1)


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[k + 1 :]) for k in range(len(shape)))

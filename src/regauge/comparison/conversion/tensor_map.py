"""Formulas that compute the tensors of one implementation of a model from the tensors of another."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import permutations
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regauge.checkpoints.output import Output
from regauge.comparison.comparison_report import require_page, write_tensor_map
from regauge.comparison.conversion.fibers import Floats, Ints, fibers_of
from regauge.comparison.conversion.orders import periods, segments, write_places
from regauge.core.counted import count, shorten
from regauge.core.params import Params

NO_ORDER = "order"
"""The name that formulas use for a permutation that cannot be written as a reshape."""
SHOWN = 4
"""The number of tensors of a concatenation that a table shows."""
TELLING = 0.5
"""If at least this fraction of B's entries is found in A, A and B count as implementations of one model."""
ALIKE = 1e-2
"""The largest relative difference between factors of vectors that count as equal."""
ROUNDED = 1e-12
"""The largest relative difference between entries that are called equal."""


@dataclass(frozen=True)
class SourceTensor:
    """A tensor of A whose fibers (vectors along one axis) a formula uses, or a constant.

    Attributes:
        name: The name of the tensor; None for a constant.
        axis: The axis of the vectors that the formula uses, not counting axes of length one. None if the formula uses
            single entries.
        shape: The shape of the tensor.
        value: The value of the constant.
    """

    name: str | None
    axis: int | None = None
    shape: tuple[int, ...] = ()
    value: float = 0.0

    @property
    def squeezed(self) -> tuple[int, ...]:
        """The shape without axes of length one."""
        return tuple(one for one in self.shape if one != 1)

    def rows(self, tensor: Tensor) -> Tensor:
        """Return the fibers of the tensor (its vectors along one axis) as rows."""
        return tensor.reshape(-1, 1) if self.axis is None else fibers_of(tensor.reshape(self.squeezed), self.axis)

    def write(self) -> str:
        """Return a torch expression for the vectors that the formula uses."""
        text = _item(self.name) + (".squeeze()" if self.squeezed != self.shape else "")
        if self.axis is None:
            return text if len(self.squeezed) == 1 else f"{text}.flatten()"
        if len(self.squeezed) == 1:
            return f"{text}[None]"
        if self.axis == len(self.squeezed) - 1:
            return text if len(self.squeezed) == 2 else f"{text}.flatten(0, -2)"
        return f"{text}.T" if len(self.squeezed) == 2 else f"{text}.movedim({self.axis}, -1).flatten(0, -2)"


@dataclass(frozen=True)
class MadeTensor:
    """A tensor of B that is computed from tensors of A.

    Attributes:
        name: The name of the tensor of B.
        shape: The shape of the tensor.
        sources: The tensors of A that the formula uses; empty if no entry of the tensor was found.
        axis: The axis of the vectors of B that are matched, not counting axes of length one. None if entries are
            matched one by one.
        owner: For each vector of B along the axis (fiber), the index of its source in `sources`, or -1 if no source was
            found.
        index: For each fiber of B, its index within the source.
        inner: The order of entries within all fibers; None if the entries are in the order of the source.
        factor: The factor of the fibers: one number, or one for each fiber.
        offset: The number that the formula adds after the multiplication.
        difference: The difference between the tensor and the result of the formula, relative to the norm of the tensor;
            0 if all entries are equal.
        reason: The reason why some or all entries were not found.
    """

    name: str
    shape: tuple[int, ...]
    sources: tuple[SourceTensor, ...] = ()
    axis: int | None = None
    owner: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    index: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    inner: Ints | None = None
    factor: float | Floats = 1.0
    offset: float = 0.0
    difference: float = 0.0
    reason: str = ""

    @property
    def squeezed(self) -> tuple[int, ...]:
        """The shape without axes of length one."""
        return tuple(one for one in self.shape if one != 1)

    @property
    def found(self) -> int:
        """The number of entries that come from A or are a constant."""
        return round(prod(self.shape) * float((self.owner >= 0).mean())) if self.sources else 0

    @property
    def is_complete(self) -> bool:
        """Whether all entries were found."""
        return bool(self.sources) and bool((self.owner >= 0).all())

    def make(self, params: Mapping[str, Tensor], dtype: torch.dtype = torch.float64) -> Tensor:
        """Compute the fibers of the tensor (its vectors along one axis), as rows, from the tensors of A. Rows that were
        not found are zero.
        """
        length = 1 if self.axis is None else self.squeezed[self.axis]
        rows = torch.zeros(len(self.owner), length, dtype=dtype)
        for place, source in enumerate(self.sources):
            at = torch.from_numpy(self.owner == place)
            if source.name is None:
                rows[at] = source.value
            else:
                taken = source.rows(params[source.name])[torch.from_numpy(self.index)[at]]
                rows[at] = (taken if self.inner is None else taken[:, torch.from_numpy(self.inner)]).to(dtype)
        if isinstance(self.factor, float):
            return rows if self.factor == 1 and self.offset == 0 else rows * self.factor + self.offset
        return rows * torch.from_numpy(self.factor).to(dtype)[:, None]

    def shaped(self, rows: Tensor) -> Tensor:
        """Return fibers (vectors along one axis), given as rows, arranged in the shape of the tensor."""
        if self.axis is None:
            return rows.reshape(self.shape)
        others = [one for axis, one in enumerate(self.squeezed) if axis != self.axis]
        return rows.reshape(*others, rows.shape[1]).movedim(-1, self.axis).reshape(self.shape)

    @property
    def has_factors(self) -> bool:
        """Whether all fibers (vectors along one axis) of a source have the same factor."""
        return all(self._factor(place) is not None for place in range(len(self.sources)))

    def _factor(self, place: int) -> float | None:
        """Return the common factor of the vectors from one source, or None if the factors differ."""
        if isinstance(self.factor, float):
            return self.factor
        own = self.factor[self.owner == place]
        middle = float(np.median(own))
        return middle if bool((np.abs(own - middle) <= ALIKE * abs(middle)).all()) else None

    @property
    def formula(self) -> str:
        """The torch expression of the tensor, given the state dict `a`. The name `order` denotes an index tensor.

        The expression is empty if no entry of the tensor was found.
        """
        return self.write(None)

    def write(self, shown: int | None) -> str:
        """Return the formula, where concatenations of many tensors are shortened to the first `shown` tensors."""
        if not self.sources:
            return ""
        text = self._copied() or self._gathered(shown)
        if not self.has_factors:
            return f"{text}, each fiber multiplied by its own factor"
        if isinstance(self.factor, float) and self.factor != 1:
            text += f" * {self.factor:.9g}"
        return text if self.offset == 0 else f"{text} {'-' if self.offset < 0 else '+'} {abs(self.offset):.9g}"

    def _copied(self) -> str | None:
        """Return the formula for a tensor that equals a tensor of A apart from the order of axes. Return None for other
        tensors.
        """
        source = self.sources[0]
        if len(self.sources) > 1 or self.inner is not None or (self.owner < 0).any():
            return None
        if source.name is None:
            return f"torch.full({self.shape}, {source.value:.9g})"
        text = _item(source.name)
        size = prod(source.shape)
        if size != prod(self.shape):
            return None
        if source.axis is None or self.axis is None:
            is_same = np.array_equal(self.index, np.arange(size))
            return (text if self.shape == source.shape else f"{text}.reshape{_tuple(self.shape)}") if is_same else None
        there, axes = source.squeezed, range(len(source.squeezed))
        places = np.arange(len(self.index)).reshape([one for axis, one in enumerate(there) if axis != source.axis])
        kept = [axis for axis in axes if axis != source.axis]
        for order in permutations(axes):
            if tuple(there[one] for one in order) != self.squeezed or order[self.axis] != source.axis:
                continue
            if np.array_equal(
                places.transpose([kept.index(one) for one in order if one != source.axis]).reshape(-1), self.index
            ):
                if order == tuple(axes):
                    return text if self.shape == source.shape else f"{text}.reshape{_tuple(self.shape)}"
                text += "" if there == source.shape else ".squeeze()"
                text += ".T" if len(order) == 2 else f".permute{_tuple(order)}"
                return text if self.squeezed == self.shape else f"{text}.reshape{_tuple(self.shape)}"
        return None

    def _stacked(self, used: Sequence[int], shown: int | None) -> str | None:
        """Return the formula for tensors of equal shape that are stacked along the first axis, or None for other
        tensors.
        """
        sources = [self.sources[place] for place in used]
        shape = self.shape[1:]
        if self.inner is not None or any(one.name is None or one.shape != shape for one in sources):
            return None
        names = [_item(one.name) for one in sources]
        size, axis = len(self.owner) // len(used), None if self.axis is None else self.axis - 1
        if axis is not None and axis < 0:
            return None
        parts = [replace(self, shape=shape, sources=(one,), axis=axis) for one in sources]
        for place, part in enumerate(parts):
            at = slice(place * size, (place + 1) * size)
            whole = replace(part, owner=np.zeros(size, dtype=np.int64), index=self.index[at])
            if (self.owner[at] != used[place]).any() or whole._copied() != names[place]:
                return None
        return f"torch.stack([{_list(names, shown)}])"

    def _parts(self, owner: Ints, index: Ints, tail: Sequence[int], shown: int | None) -> list[str]:
        """Return the formulas for the parts of a concatenation: one part for each source tensor, or equal segments."""
        groups, parts = periods(owner), []
        for place in dict.fromkeys(owner.tolist()):
            source, own = self.sources[place], index[owner == place]
            if source.name is None:
                text = f"torch.full({(len(own), *tail)}, {source.value:.9g})"
            else:
                rows, size = source.write(), prod(source.squeezed) // prod(tail)
                text = write_places(rows, own, size, tail) or f"{rows}[{NO_ORDER}]"
            if not isinstance(self.factor, float) and (factor := self._factor(place)) not in (None, 1.0):
                text = f"({text} * {factor:.9g})"
            parts.append(text if groups in {1, None} else f"{text}.reshape{_tuple((groups, -1, *tail))}")
        if groups == 1 or len(parts) == 1:
            return parts
        if groups is None:
            return [f"torch.cat([{_list(parts, shown)}])[{NO_ORDER}]"]
        return [f"torch.cat([{_list(parts, shown)}], 1).flatten(0, 1)"]

    def _gathered(self, shown: int | None) -> str:
        """Return the formula for vectors that are sliced, permuted and concatenated."""
        tail = [] if self.axis is None else [self.squeezed[self.axis]]
        used = list(dict.fromkeys(one for one in self.owner.tolist() if one >= 0))
        if len(used) > 1 and (stacked := self._stacked(used, shown)):
            return stacked
        is_found = self.owner >= 0
        owner, index = self.owner[is_found], self.index[is_found]
        parts = [part for at in segments(owner) for part in self._parts(owner[at], index[at], tail, shown)]
        text = parts[0] if len(parts) == 1 else f"torch.cat([{_list(parts, shown)}])"
        if self.inner is not None:
            rows = _transposed(text)
            text = write_places(rows, self.inner, len(self.inner), [len(self.owner)]) or f"{rows}[{NO_ORDER}]"
            text = _transposed(text)
        if self.axis is None:
            return text if len(self.shape) == 1 else f"{text}.reshape{_tuple(self.shape)}"
        if len(self.squeezed) == 2:
            text = text if self.axis == 1 else _transposed(text)
        elif len(self.squeezed) > 2:
            others = [one for axis, one in enumerate(self.squeezed) if axis != self.axis]
            text += f".reshape{_tuple((*others, *tail))}"
            text += "" if self.axis == len(others) else f".movedim(-1, {self.axis})"
        return text if self.squeezed == self.shape and len(self.shape) > 1 else f"{text}.reshape{_tuple(self.shape)}"


def _list(parts: Sequence[str], shown: int | None) -> str:
    if shown is not None and len(parts) > shown:
        parts = [*parts[: shown - 1], "...", parts[-1]]
    return ", ".join(parts)


def _item(name: str | None) -> str:
    return f"a[{json.dumps(name, ensure_ascii=False)}]"


def _tuple(numbers: Sequence[int]) -> str:
    return f"({', '.join(map(str, numbers))})"


def _transposed(text: str) -> str:
    return text.removesuffix(".T") if text.endswith(".T") else f"{text}.T"


@dataclass(frozen=True)
class TensorMap:
    """Formulas that compute the tensors of network B from those of network A.

    `find_tensor_map` returns a `TensorMap`.

    Attributes:
        origins: For each tensor of B, by name, the tensors of A and the operations that compute it.
        unused: The tensors of A that are not in B. Copies of tensors that are in B are not listed.
        parted: The tensors of A of which B contains only a part.
        labels: The names of both networks.
    """

    origins: Mapping[str, MadeTensor]
    unused: tuple[str, ...]
    parted: tuple[str, ...] = ()
    labels: tuple[str, str] = ("A", "B")

    @property
    def missing(self) -> tuple[str, ...]:
        """The tensors of B with entries that no tensor of A contains."""
        return tuple(name for name, one in self.origins.items() if not one.is_complete)

    @cached_property
    def uneven(self) -> Mapping[str, str]:
        """The tensors of B whose formula differs from that of most layers, each with the usual formula as an
        example.
        """
        return _uneven(self.origins)

    @property
    def notes(self) -> tuple[str, ...]:
        """Messages about unusual findings in the formulas."""
        notes = [f"{one!r} is made differently than {usual!r} of another layer" for one, usual in self.uneven.items()]
        orders = [name for name, one in self.origins.items() if one.sources and NO_ORDER in one.formula]
        if orders:
            notes.append(
                f"no reshape or transposition gives the order of {count(orders, 'tensor')} of B: {shorten(orders)}; "
                "units may have been permuted"
            )
        return tuple(notes)

    @property
    def is_layout(self) -> bool:
        """Whether B contains exactly the entries of A, rearranged in the same way in all layers."""
        is_plain = all(NO_ORDER not in one.formula and one.has_factors for one in self.origins.values())
        return is_plain and not (self.missing or self.unused or self.parted or self.uneven)

    @property
    def is_telling(self) -> bool:
        """Whether more than the share `TELLING` of B's entries was found in A. If most entries are found, missing
        entries are probably errors of a conversion.
        """
        return self.share > TELLING

    @property
    def verdict(self) -> str:
        """The result of the search in a few words."""
        return (
            "same network in another layout" if self.is_layout else "made of A in part" if self.missing else "made of A"
        )

    @property
    def share(self) -> float:
        """The fraction of B's entries that come from A. Entries of constant tensors count as found."""
        total = sum(prod(one.shape) for one in self.origins.values())
        return sum(one.found for one in self.origins.values()) / max(total, 1)

    @property
    def difference(self) -> float:
        """The largest difference between a tensor of B and its formula, relative to the tensor's norm.

        The difference is 0 if all entries are equal.
        """
        return max((one.difference for one in self.origins.values() if one.sources), default=0.0)

    @property
    def facts(self) -> dict[str, Any]:
        """The formulas as plain values for JSON and HTML pages, with a torch expression for each tensor of B."""
        return {
            "verdict": self.verdict,
            "reason": str(self),
            "formulas": {name: one.formula for name, one in self.origins.items()},
            "missing": list(self.missing),
            "unused": list(self.unused),
            "parted": list(self.parted),
            "uneven": list(self.uneven),
            "difference": self.difference,
            "share": self.share,
        }

    @property
    def rows(self) -> list[dict[str, Any]]:
        """A table of all tensors.

        Layers with the same formula share one row, in which `*` replaces the layer number.
        """
        rows: dict[tuple[str, str], dict[str, Any]] = {}
        for name, one in self.origins.items():
            text = one.write(SHOWN) if one.is_complete else "; ".join(filter(None, (one.write(SHOWN), one.reason)))
            key = _pattern(name, text)
            row = rows.setdefault(key, {"b": name, "made of": text, "tensors": 0, "difference": 0.0})
            row["tensors"] += 1
            row["difference"] = max(row["difference"], one.difference)
            if row["tensors"] > 1:
                row["b"], row["made of"] = key
        return list(rows.values())

    def __str__(self) -> str:
        """Return a message that states whether both networks are the same network."""
        missing, total = self.missing, len(self.origins)
        size = f"differences are {self.difference:.2g} of a tensor at most"
        equal = "values are equal" if self.difference <= ROUNDED else size
        unused = f"; B contains nothing of {shorten(self.unused)}" if self.unused else ""
        unused += f"; B contains only a part of {shorten(self.parted)}" if self.parted else ""
        if missing:
            done = f"{total - len(missing)} of {total} tensors of B"
            return (
                f"{done} are made of A's tensors; {shorten(missing)} {'is' if len(missing) == 1 else 'are'} not{unused}"
            )
        uneven = f", but {shorten([*self.uneven])} differently than in the other layers" if self.uneven else ""
        return f"all {total} tensors of B are made of A's tensors{uneven}; {equal}{unused}"

    def write_page(self, out: Output | str | Path | None) -> None:
        """Write a self-contained `.html` page. If `out` is None, no page is written.

        Raises:
            FileExistsError: The page exists and may not be replaced.
            ValueError: The name of the page does not end in `.html`.
        """
        page = require_page(out)
        if page is not None:
            names = dict(zip("ab", self.labels, strict=True))
            write_tensor_map(page, self.facts | names | {"rows": self.rows, "notes": self.notes})

    def apply(self, params: Mapping[str, Tensor]) -> Params:
        """Convert another network of implementation A to implementation B.

        Args:
            params: The tensors of the network, with the names of A.

        Returns:
            The converted tensors with the names of B, in new memory and with the dtypes of their sources.

        Raises:
            KeyError: A required tensor is missing.
            ValueError: The formula of a tensor of B is missing, or a tensor of A has another shape.
        """
        if self.missing:
            raise ValueError(
                f"{shorten(self.missing)} cannot be made of A's tensors, so other networks cannot be converted; "
                "compare two networks with equal weights"
            )
        made = {}
        for name, one in self.origins.items():
            for source in one.sources:
                if source.name is not None and tuple(params[source.name].shape) != source.shape:
                    raise ValueError(
                        f"{source.name!r} has shape {tuple(params[source.name].shape)}, but this conversion needs the "
                        f"shape {source.shape}"
                    )
            used = [params[source.name] for source in one.sources if source.name is not None]
            dtype = used[0].dtype if used else torch.get_default_dtype()
            is_copied = isinstance(one.factor, float) and (one.factor, one.offset) == (1.0, 0.0)
            work = dtype if is_copied else torch.float64
            made[name] = one.shaped(one.make(params, work)).to(dtype)
        return made


def _pattern(name: str, text: str) -> tuple[str, str]:
    """Return a name and a formula in which `*` replaces the numbers that occur both in the name and in the formula."""
    numbers = re.findall(r"\d+", name)
    inside = [re.findall(r"\d+", one) for one in re.findall(r'a\["([^"]*)"\]', text)]
    if not numbers or any(one[:1] != numbers[:1] for one in inside if one):
        return name, text
    first = numbers[0]
    star = re.compile(rf"(?<!\d){first}(?!\d)")
    names = re.sub(r'a\["([^"]*)"\]', lambda one: f'a["{star.sub("*", one.group(1), count=1)}"]', text)
    return star.sub("*", name, count=1), names


def _uneven(origins: Mapping[str, MadeTensor]) -> dict[str, str]:
    """Return the tensors whose formula differs from that of most layers, each with an example of the usual formula."""
    kinds: dict[str, dict[str, list[str]]] = {}
    for name, one in origins.items():
        key, text = _pattern(name, one.write(None))
        if "*" in key and one.is_complete:
            kinds.setdefault(key, {}).setdefault(text if "*" in text else re.sub(r"\d+", "#", text), []).append(name)
    found: dict[str, str] = {}
    for ways in kinds.values():
        usual = max(ways.values(), key=len)
        found |= {name: usual[0] for names in ways.values() if len(names) < len(usual) for name in names}
    return found

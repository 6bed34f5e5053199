"""Partners: the networks with which each network is aligned while a matcher is trained and validated."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from regauge.learn.populations import Indices, Parts, codes_of, spread
from regauge.storage.collection import Collection


@dataclass(frozen=True, eq=False)
class Partners:
    """Partners of networks: networks of the same layout, or only those with the same value in a column.

    Attributes:
        collection: The networks.
        codes: An integer for the value of each network in the column, `[networks]`; None if any two networks are
            partners.
        train: The networks for training.
    """

    collection: Collection
    codes: NDArray[np.int64] | None
    train: Indices

    @classmethod
    def of(cls, collection: Collection, column: str | None, parts: Parts) -> "Partners":
        """Return partners by a column of the stores; without a column, any two networks are partners.

        Raises:
            KeyError: There is no such column.
            ValueError: No two networks for training, or for validation or tests, have the same value.
        """
        codes = None if column is None else codes_of(collection.column(column))
        made = cls(collection, codes, parts["train"])
        for name, part in parts.items():
            if codes is not None and not len(made.with_partner(part)):
                raise ValueError(
                    f"no two networks for {name} have the same value of {column!r}; take more networks, or "
                    "another column"
                )
        return made

    def with_partner(self, indices: Indices) -> Indices:
        """Select the networks that have a partner among the given ones."""
        if self.codes is None:
            return indices
        codes, counts = np.unique(self._keys(indices), return_counts=True)
        return indices[np.isin(self._keys(indices), codes[counts > 1])]

    def draw(self, indices: Indices, chance: torch.Generator) -> Indices:
        """Return a random training partner of each network, with the same value in the column."""
        known = self._by_code
        drawn = []
        for index, code in zip(indices.tolist(), self._keys(indices).tolist(), strict=True):
            others = [other for other in known[code] if other != index]
            drawn.append(others[int(torch.randint(len(others), (), generator=chance))])
        return np.array(drawn, np.int64)

    def pairs(self, parts: Parts, part: str, most: int) -> dict[int, tuple[Indices, Indices]]:
        """Return pairs of a part, limited for each layout; a single network is paired with a training network."""
        own = self.with_partner(parts[part])
        result = {}
        for layout in np.unique(self.collection.layout_of(own)).tolist():
            here = own[self.collection.layout_of(own) == layout]
            if self.codes is not None:
                here = here[np.argsort(self._keys(here), kind="stable")]
                same = np.flatnonzero(self._keys(here)[1:] == self._keys(here)[:-1])
                left, right = here[same], here[same + 1]
            elif len(here) > 1:
                left, right = here, np.roll(here, -1)
            else:
                others = self.train[self.collection.layout_of(self.train) == layout]
                left, right = here, others[:1]
            chosen = spread(np.arange(len(left)), most)
            result[layout] = left[chosen], right[chosen]
        return result

    def _keys(self, indices: Indices) -> NDArray[np.int64]:
        """Return the code of each network; networks of different layouts have different codes."""
        assert self.codes is not None
        return self.codes[indices] * (max(self.collection.layouts) + 1) + self.collection.layout_of(indices)

    @cached_property
    def _by_code(self) -> dict[int, list[int]]:
        known: dict[int, list[int]] = {}
        for index, code in zip(self.train.tolist(), self._keys(self.train).tolist(), strict=True):
            known.setdefault(code, []).append(index)
        return known

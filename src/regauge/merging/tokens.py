"""Networks with different vocabularies under one: rows of embeddings and heads are brought to the rows of the result.

A token that a network lacks has the row of the base, where the base has it, else the mean over the networks that have
it. Such rows are taken when all networks are aligned, because before they are in other coordinates.

References:
    Goddard et al. (2024), mergekit: the documentation of `tokenizer` says which network gives missing tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from regauge.merging.recipe import TokenSource
from regauge.storage.checkpoints.checkpoint import Checkpoint


@dataclass(frozen=True)
class TokenPlan:
    """What the rows of the result are made of, for networks that are under its vocabulary.

    Attributes:
        axes: The axis of tokens of each tensor that has one.
        own: For each network, where the rows of the result are in its own tensors; -1 for those that it lacks.
        taken: Rows that a network takes from others, `[network, row]`.
        shares: What share each network has in a row that is taken, `[network, row]`.
        given: Rows that are another row of one network, by their number: that network and its own row.
        blank: Rows without a token, which are the mean of the others.
    """

    axes: Mapping[str, int]
    own: tuple[Tensor, ...]
    taken: Tensor
    shares: Tensor
    given: Mapping[int, tuple[int, int]]
    blank: Tensor

    @property
    def size(self) -> int:
        """The number of rows."""
        return len(self.blank)

    @classmethod
    def of(
        cls,
        vocabulary: Mapping[str, int],
        networks: Sequence[Mapping[str, int]],
        axes: Mapping[str, int],
        *,
        base: int | None = None,
        tokens: Mapping[str, tuple[int | None, TokenSource]] | None = None,
        multiple: int = 1,
    ) -> "TokenPlan":
        """Plan the rows of a vocabulary.

        Args:
            vocabulary: The row of every token of the result.
            networks: The row of every token of each network that has a row for it.
            axes: The axis of tokens of each tensor that has one.
            base: The number of the base, where there is one.
            tokens: Tokens whose rows are said: the number of the network that gives them (None for zeros), and how.
            multiple: The number of rows is rounded up to a multiple of it.

        Raises:
            ValueError: A network does not have a token that it is to give.
        """
        size = -(-(max(vocabulary.values(), default=-1) + 1) // multiple) * multiple
        own = [torch.full((size,), -1) for _ in networks]
        blank = torch.ones(size, dtype=torch.bool)
        shares = torch.zeros(len(networks), size, dtype=torch.float64)
        is_forced = torch.zeros(size, dtype=torch.bool)
        given: dict[int, tuple[int, int]] = {}
        for token, row in vocabulary.items():
            blank[row] = False
            for k, known in enumerate(networks):
                own[k][row] = known.get(token, -1)
            having = [k for k, known in enumerate(networks) if token in known]
            if tokens is not None and token in tokens:
                giver, source = tokens[token]
                is_forced[row] = source.is_forced
                if giver is None:
                    continue
                there = source.number if source.number is not None else networks[giver].get(source.token or token)
                if there is None:
                    raise ValueError(f"the token {source.token or token!r} is not in {source.model}; name one that is")
                given[row] = (giver, there)
            elif base is not None and base in having:
                shares[base, row] = 1
            elif having:
                shares[having, row] = 1 / len(having)
        lacks = torch.stack([(rows < 0) | is_forced for rows in own]) & ~blank
        return cls(axes, tuple(own), lacks, shares, given, blank)


class Retokenized(Checkpoint):
    """A checkpoint under another vocabulary; rows of tokens that it lacks are zero."""

    def __init__(self, source: Checkpoint, axes: Mapping[str, int], rows: Tensor) -> None:
        stored = dict(source.stored)
        for name, axis in axes.items():
            if name in stored:
                one = stored[name]
                shape = (*one.shape[:axis], len(rows), *one.shape[axis + 1 :])
                nbytes = one.nbytes // one.shape[axis] * len(rows)
                stored[name] = one._replace(shape=shape, nbytes=nbytes)
        super().__init__(source.label, source.path, stored, source.metadata)
        self.source, self._axes, self._rows = source, axes, rows
        self.read_so_far, self.form = source.read_so_far, source.form

    def read(self, name: str, *, rows: tuple[int, int] | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """A copy of one tensor, or of a range of its first axis, with the rows of the other vocabulary."""
        axis, dtype = self._axes.get(name), dtype or self.form.work_dtype(self.stored[name].dtype)
        if axis is None:
            return self.source.read(name, rows=rows, dtype=dtype)
        if axis > 0:
            return _select(self.source.read(name, rows=rows, dtype=dtype), axis, self._rows)
        wanted = self._rows if rows is None else self._rows[rows[0] : rows[1]]
        known = wanted[wanted >= 0]
        first, last = (int(known.min()), int(known.max()) + 1) if len(known) else (0, 1)
        values = self.source.read(name, rows=(first, last), dtype=dtype)
        return _select(values, 0, torch.where(wanted >= 0, wanted - first, -1))

    def close(self) -> None:
        """Close the files."""
        super().close()
        if hasattr(self, "source"):
            self.source.close()


def _select(values: Tensor, axis: int, rows: Tensor) -> Tensor:
    """The rows along an axis, zero for -1."""
    result = values.index_select(axis, rows.clamp(min=0))
    return result.index_fill_(axis, (rows < 0).nonzero().flatten(), 0)

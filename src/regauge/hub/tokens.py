"""Conversion of networks to one vocabulary: the rows of embeddings and heads get the order of the result.

If a network lacks a token, it gets the base's row of the token. If the base also lacks the token, the network gets the
mean row of the networks that have it. These rows are copied after all networks are aligned, because before the
alignment they have other coordinates.

References:
    Goddard et al. (2024), mergekit: the documentation of `tokenizer` says which network gives missing tokens.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from regauge.checkpoints.checkpoint import READ_BYTES, Checkpoint
from regauge.checkpoints.names.converted import Converted


@dataclass(frozen=True)
class TokenSource:
    """The source of a token's embedding: a token of a model, or zeros.

    Attributes:
        model: The folder of a model; None for a zero embedding.
        token: The token of that model, if the token has another name in that model.
        number: The id of the token in that model, instead of the token's name.
        is_forced: Whether models that have the token also get this embedding.
    """

    model: Path | None
    token: str | None = None
    number: int | None = None
    is_forced: bool = False


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of the result.

    Attributes:
        source: The union of all tokens, the tokens of the base (or the first model), or the tokens of a model's folder.
            With "shared", they are the tokens that all networks have, by which networks are compared.
        tokens: Tokens with specified embeddings. New tokens are added.
        multiple: A number; the number of embeddings is rounded up to a multiple of it.
    """

    source: Literal["union", "base", "shared"] | Path
    tokens: Mapping[str, TokenSource] = field(default_factory=dict)
    multiple: int = 1


@dataclass(frozen=True)
class TokenPlan:
    """The sources of the rows of token tensors, for networks brought under one vocabulary.

    Attributes:
        axes: The axis of tokens of each tensor that has such an axis.
        own: For each network, the index in its tensors of each row of the result; -1 for rows that the network lacks.
        taken: Rows that a network takes from other networks, `[network, row]`.
        shares: The share of each network in a row that is taken, `[network, row]`.
        given: By the index of each row that copies a row of one network: this network and its row.
        blank: Rows without a token, which are the mean of the other rows.
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

    @property
    def is_complete(self) -> bool:
        """Whether all networks have all tokens of the result. Then no rows are taken from other networks."""
        return not bool(self.taken.any() or self.blank.any())

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
        kept: int | None = None,
    ) -> "TokenPlan":
        """Plan the rows of a vocabulary.

        Args:
            vocabulary: The row of every token of the result.
            networks: The row of every token of each network that has a row for it.
            axes: The axis of tokens of each tensor that has such an axis.
            base: The index of the base, if there is one.
            tokens: Tokens with specified rows: the index of the network that gives the row (None for zeros), and the
                source.
            multiple: A number; the number of rows is rounded up to a multiple of it.
            kept: The number of rows of all networks, if all of them have the same tokens. Rows without a token are then
                kept in their order.

        Raises:
            ValueError: A network lacks a token whose row it must give.
        """
        size = -(-(max(vocabulary.values(), default=-1) + 1) // multiple) * multiple if kept is None else kept
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
        if kept is not None:
            for rows, known in zip(own, networks, strict=True):
                rows[blank] = torch.tensor(sorted(set(range(kept)) - set(known.values())), dtype=torch.int64)
            blank = torch.zeros_like(blank)
        lacks = torch.stack([(rows < 0) | is_forced for rows in own]) & ~blank
        return cls(axes, tuple(own), lacks, shares, given, blank)


class Retokenized(Checkpoint):
    """A checkpoint under another vocabulary, in which the rows of missing tokens are zero.

    Attributes:
        source: The checkpoint under its original vocabulary.
    """

    def __init__(self, source: Checkpoint, axes: Mapping[str, int], rows: Tensor, files: Sequence[Path] = ()) -> None:
        stored = dict(source.stored)
        for name, axis in axes.items():
            if name in stored:
                one = stored[name]
                shape = (*one.shape[:axis], len(rows), *one.shape[axis + 1 :])
                nbytes = one.nbytes // one.shape[axis] * len(rows)
                stored[name] = one._replace(shape=shape, nbytes=nbytes)
        super().__init__(source.label, source.path, stored, source.metadata)
        self.source, self._axes, self._rows, self._vocabulary = source, axes, rows, tuple(files)
        self._take_over(source)

    @property
    def files(self) -> tuple[Path, ...]:
        """All files from which the checkpoint is read, including those of the vocabularies."""
        return (*self.source.files, *self._vocabulary)

    @property
    def is_safetensors(self) -> bool:
        """Whether tensors can be read from the disk one by one."""
        return self.source.is_safetensors

    @property
    def is_lazy(self) -> bool:
        """Whether tensors are read from the disk one by one."""
        return self._params is None and self.source.is_lazy

    def dtype_of(self, name: str) -> torch.dtype:
        """Return the dtype in which a tensor is read."""
        return super().dtype_of(name) if self._params is not None else self.source.dtype_of(name)

    def read(self, name: str, *, rows: tuple[int, int] | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """Return a copy of one tensor, or of a range of its first axis, with the rows of the other vocabulary."""
        if self._params is not None:
            return super().read(name, rows=rows, dtype=dtype)
        axis, dtype = self._axes.get(name), dtype or self.dtype_of(name)
        if axis is None:
            return self.source.read(name, rows=rows, dtype=dtype)
        if axis > 0:
            return _select(self.source.read(name, rows=rows, dtype=dtype), axis, self._rows)
        wanted = self._rows if rows is None else self._rows[rows[0] : rows[1]]
        stored = self.stored[name]
        result = torch.zeros((len(wanted), *stored.shape[1:]), dtype=dtype)
        most = max(1, READ_BYTES * len(self._rows) // max(1, stored.nbytes))
        for first, end, there in _runs(wanted, most):
            result[there] = self.source.read(name, rows=(first, end), dtype=dtype)
        return result

    def close(self) -> None:
        """Close the files."""
        super().close()
        if hasattr(self, "source"):
            self.source.close()


def as_tokenized(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint under its original vocabulary and its current names."""
    if isinstance(checkpoint, Retokenized):
        return checkpoint.source
    if isinstance(checkpoint, Converted):
        return Converted(as_tokenized(checkpoint.source), checkpoint.conversion)
    return checkpoint


def _runs(rows: Tensor, most: int) -> Iterator[tuple[int, int, Tensor]]:
    """Return ranges of rows of a file with their target rows, in the order of the file, without rows of -1."""
    places = (rows >= 0).nonzero().flatten()
    there, order = rows[places].sort(stable=True)
    starts = [0, *((there.diff() != 1).nonzero().flatten() + 1).tolist(), len(there)]
    for start, end in pairwise(starts):
        for first in range(start, end, most):
            part = slice(first, min(first + most, end))
            yield int(there[part.start]), int(there[part.stop - 1]) + 1, places[order[part]]


def _select(values: Tensor, axis: int, rows: Tensor) -> Tensor:
    """Return the rows along an axis, zero for -1."""
    result = values.index_select(axis, rows.clamp(min=0))
    return result.index_fill_(axis, (rows < 0).nonzero().flatten(), 0)

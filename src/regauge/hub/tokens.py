"""Conversion of networks to one vocabulary: rows of embeddings and heads get the order of the result.

If a network lacks a token, the row is copied from the base. If the base also lacks the token, the row is the mean over
the networks that have the token. Rows are copied after all networks are aligned, because unaligned networks have
different coordinates.

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

from regauge.checkpoints.checkpoint import READ_BYTES, Checkpoint, CheckpointView
from regauge.checkpoints.names.converted import Converted


@dataclass(frozen=True)
class TokenSource:
    """The source of a token's embedding: a token of a model, or a zero vector.

    Attributes:
        model: The folder of a model; None for a zero embedding.
        token: The name of the token in the model `model`, if this name differs from the name in the result.
        number: The id of the token in the model `model`, as an alternative to the name.
        is_forced: Whether the embedding also replaces the embeddings of models that have the token.
    """

    model: Path | None
    token: str | None = None
    number: int | None = None
    is_forced: bool = False


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of the result.

    Attributes:
        source: The set of tokens: the union of all tokens, the tokens of the base (or of the first model), or the
            tokens of a model's folder. The value "shared" selects the tokens that all networks have, which makes the
            networks comparable.
        tokens: Tokens with specified embeddings. A token that is not in the set is added.
        multiple: The number of embeddings is rounded up to a multiple of this number.
    """

    source: Literal["union", "base", "shared"] | Path
    tokens: Mapping[str, TokenSource] = field(default_factory=dict)
    multiple: int = 1


@dataclass(frozen=True)
class TokenPlan:
    """A plan for converting networks to one vocabulary: the source of each row of the embeddings and heads.

    Attributes:
        axes: The token axis of each tensor that has a token axis.
        own: For each network and each row of the result, the row index in the network's tensors; -1 for missing rows.
        taken: The rows that a network copies from other networks, `[network, row]`.
        shares: The weight of each network in a copied row, `[network, row]`.
        given: For each row that is copied from a single network, the index of the network and the row in the network's
            tensors.
        blank: Rows without a token, which are set to the mean of the rows with a token.
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
        """Whether all networks have all tokens of the result. Between complete networks, no rows are copied."""
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
        """Plan the rows of a vocabulary for all networks.

        Args:
            vocabulary: The tokens of the result, each with its row.
            networks: For each network, a map from its tokens to their rows.
            axes: The token axis of each tensor that has a token axis.
            base: The index of the base; None without a base.
            tokens: Tokens with specified rows. Each token has the index of the network that provides the row (None for
                zeros), and the source.
            multiple: The number of rows is rounded up to a multiple of this number.
            kept: The number of rows of all networks, if all networks have the same tokens. Rows without a token then
                keep their order.

        Raises:
            ValueError: A network lacks a token whose row it must provide.
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


class Retokenized(CheckpointView):
    """A checkpoint converted to another vocabulary. The rows of missing tokens are zero.

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
        super().__init__(source, stored)
        self._axes, self._rows, self._vocabulary = axes, rows, tuple(files)

    @property
    def files(self) -> tuple[Path, ...]:
        """All files from which the checkpoint is read, including the files of the old and the new vocabulary."""
        return (*self.source.files, *self._vocabulary)

    def read(self, name: str, *, rows: tuple[int, int] | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """Return a copy of one tensor, or of a range of its first axis, with the rows of the new vocabulary."""
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


def as_tokenized(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint with its original vocabulary and its current tensor names."""
    if isinstance(checkpoint, Retokenized):
        return checkpoint.source
    if isinstance(checkpoint, Converted):
        return Converted(as_tokenized(checkpoint.source), checkpoint.conversion)
    return checkpoint


def _runs(rows: Tensor, most: int) -> Iterator[tuple[int, int, Tensor]]:
    """Yield ranges of rows in a file, in file order, each with the rows to which the range is copied. Missing rows (-1)
    are skipped.
    """
    places = (rows >= 0).nonzero().flatten()
    there, order = rows[places].sort(stable=True)
    starts = [0, *((there.diff() != 1).nonzero().flatten() + 1).tolist(), len(there)]
    for start, end in pairwise(starts):
        for first in range(start, end, most):
            part = slice(first, min(first + most, end))
            yield int(there[part.start]), int(there[part.stop - 1]) + 1, places[order[part]]


def _select(values: Tensor, axis: int, rows: Tensor) -> Tensor:
    """Return the selected rows along an axis. A row is zero if its index is -1."""
    result = values.index_select(axis, rows.clamp(min=0))
    return result.index_fill_(axis, (rows < 0).nonzero().flatten(), 0)

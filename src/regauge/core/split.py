"""Splitting of batches into examples for making a choice, and examples for evaluating the choice."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from regauge.core.counted import count
from regauge.core.given import as_pair

Batches = list[tuple[Any, Any]]


def split_batches(batches: Iterable[Any], share: float, generator: torch.Generator) -> tuple[Batches, Batches]:
    """Split the examples of batches at random into two parts.

    Each part keeps the order of the examples and has at most as many batches as the original.

    Examples lie along the first axis of every tensor of a batch. If the first axes of a batch's tensors differ in
    length, or if a batch contains text, whole batches are assigned at random.

    Args:
        batches: Pairs (inputs, targets).
        share: The fraction of the examples that go to the first part, between 0 and 1. Each part gets at least one
            example.
        generator: The generator that assigns the examples to the parts.

    Raises:
        ValueError: The share is not between 0 and 1, or there are too few examples to split.
    """
    if not 0 < share < 1:
        raise ValueError(f"share is {share}, but must be between 0 and 1")
    given = [as_pair(batch) for batch in batches]
    sizes = example_counts(given)
    total = sum(sizes)
    if total < 2:
        what = "that stays whole" if None in map(_count_examples, given) else "of one example"
        raise ValueError(
            f"the data have {count(given, 'batch', 'batches')} {what}, which cannot be split into examples for "
            "choosing and examples for measuring; give other data for measuring"
        )
    order = torch.randperm(total, generator=generator, device=generator.device).cpu()
    is_first = torch.zeros(total, dtype=torch.bool)
    is_first[order[: min(max(round(share * total), 1), total - 1)]] = True
    parts: tuple[Batches, Batches] = ([], [])
    for batch, mask in zip(given, torch.split(is_first, sizes), strict=True):
        for part, rows in zip(parts, (mask, ~mask), strict=True):
            if bool(rows.all()):
                part.append(batch)
            elif bool(rows.any()):
                part.append(_select(batch, rows.nonzero().flatten()))
    return parts


def example_counts(batches: Iterable[Any]) -> list[int]:
    """Return the number of parts into which each batch can be split: the number of its examples, or 1 if it stays
    whole.
    """
    found = [_count_examples(as_pair(batch)) for batch in batches]
    return [1 if None in found or size is None else size for size in found]


def _count_examples(batch: Any) -> int | None:
    """Return the number of examples of a batch, or None if the number is unknown."""
    leaves = pytree.tree_leaves(batch)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    others = [leaf for leaf in leaves if not isinstance(leaf, Tensor | int | float | None)]
    lengths = {len(tensor) if tensor.ndim else None for tensor in tensors}
    return lengths.pop() if len(lengths) == 1 and not others else None


def _select(batch: tuple[Any, Any], rows: Tensor) -> tuple[Any, Any]:
    inputs, targets = pytree.tree_map_only(Tensor, lambda t: t[rows.to(t.device)], batch)
    return inputs, targets

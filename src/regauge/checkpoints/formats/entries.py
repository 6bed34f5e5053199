"""The networks in a training checkpoint: state dictionaries under names, among optimizers and the like."""

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

USUAL = ("state_dict", "model", "model_state_dict")
"""Names under which training scripts put the network."""
AVERAGED = re.compile(r"ema|averag|swa|shadow", re.IGNORECASE)
"""In the names of averages over the course of a training."""
SKIPPED = re.compile(r"optim|sched|scaler|rng|loops", re.IGNORECASE)
"""In the names of what trainings need to go on, and networks do not."""
DEEPEST = 3
"""Entries within so many others at most are looked at."""
BETWEEN = "/"
"""Between the names of entries within one another."""


def find_networks(content: Mapping[Any, Any]) -> dict[str, Mapping[Any, Any]]:
    """The entries of a training checkpoint that hold networks, by their names; none in a plain state dictionary."""
    is_plain = any(isinstance(value, Tensor) and value.ndim for value in content.values())
    if is_plain and not any(isinstance(content.get(name), Mapping) for name in USUAL):
        return {}
    return _find(content, "", DEEPEST)


def _find(content: Mapping[Any, Any], inside: str, depth: int) -> dict[str, Mapping[Any, Any]]:
    found: dict[str, Mapping[Any, Any]] = {}
    for key, value in content.items():
        if not isinstance(key, str) or not isinstance(value, Mapping) or SKIPPED.search(key):
            continue
        is_named = (not inside and key in USUAL) or AVERAGED.search(key) is not None
        if _is_network(value) and (is_named or any("." in str(name) for name in value)):
            found[inside + key] = value
        elif depth > 1 and (is_named or inside or key == "callbacks"):
            found |= _find(value, inside + key + BETWEEN, depth - 1)
    return found


def _is_network(value: Mapping[Any, Any]) -> bool:
    """Whether it holds tensors under names, and nothing else."""
    return bool(value) and all(isinstance(k, str) and isinstance(one, Tensor) for k, one in value.items())


def choose_network(content: Mapping[Any, Any], entry: str | None, label: str) -> tuple[Any, str | None]:
    """The network of an entry, or else the usual one, and a sentence where there are others.

    Raises:
        ValueError: There is no entry of that name, or which one is meant is not known.
    """
    found = find_networks(content)
    listed = ", ".join(map(repr, found))
    if entry is not None:
        if entry not in found:
            there = f"the networks in it are {listed}" if found else "it holds one network alone, without a name"
            raise ValueError(f"{label!r} has no network called {entry!r}; {there}")
        return found[entry], None
    usual = next((name for name in USUAL if isinstance(content.get(name), Mapping)), None)
    plain = [name for name in found if not AVERAGED.search(name)]
    chosen = usual or (plain[0] if len(plain) == 1 else next(iter(found)) if len(found) == 1 else None)
    if chosen is None:
        if found:
            raise ValueError(
                f"{label!r} holds several networks ({listed}), and which is meant is not known; write FILE:NAME, such "
                f"as {label}:{next(iter(found))}, or in Python entry={next(iter(found))!r}"
            )
        return content, None
    others = [name for name in found if name != chosen]
    note = None
    if others:
        note = (
            f"{label!r} holds several networks: {chosen!r} is read, and {', '.join(map(repr, others))} not; to choose, "
            f"write {label}:{others[0]}, or in Python entry={others[0]!r}"
        )
    return found.get(chosen) or content[chosen], note

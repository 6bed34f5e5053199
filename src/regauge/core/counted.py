"""Numbers with their nouns, and lists of names, for sentences."""

from collections.abc import Sequence, Sized


def count(items: Sized, word: str, plural: str | None = None) -> str:
    """The number of items with its noun, singular or plural.

    >>> count("ab", "group"), count("a", "batch", "batches")
    ('2 groups', '1 batch')
    """
    return f"1 {word}" if len(items) == 1 else f"{len(items)} {plural or word + 's'}"


def shorten(names: Sequence[str], limit: int = 4) -> str:
    """Some names for a sentence."""
    listed = ", ".join(repr(name) for name in names[:limit])
    return listed if len(names) <= limit else f"{listed} and {len(names) - limit} more"

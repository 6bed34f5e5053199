"""Numbers with their nouns, for sentences."""

from collections.abc import Sized


def count(items: Sized, word: str, plural: str | None = None) -> str:
    """The number of items with its noun, singular or plural.

    >>> count("ab", "group"), count("a", "batch", "batches")
    ('2 groups', '1 batch')
    """
    return f"1 {word}" if len(items) == 1 else f"{len(items)} {plural or word + 's'}"

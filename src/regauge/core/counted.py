"""How many there are, in words."""

from collections.abc import Sized


def count(items: Sized, word: str, plural: str | None = None) -> str:
    """How many items there are, as in a sentence.

    >>> count("ab", "group"), count("a", "batch", "batches")
    ('2 groups', '1 batch')
    """
    return f"1 {word}" if len(items) == 1 else f"{len(items)} {plural or word + 's'}"

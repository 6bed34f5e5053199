"""A corpus of characters that ships with Python: the topics of its built-in help."""

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

VALIDATION_SHARE = 0.1
"""The last tenth of the text is kept for validation."""


@dataclass(frozen=True)
class TextData:
    """A text as numbers of symbols.

    Attributes:
        name: What people call it, with the beginning of its SHA-256: two runs with the same name read the same text.
        symbols: The characters that occur, sorted; a character's number is its place.
        train: Numbers of the symbols of the first part of the text, int64 `[characters]`.
        validation: Those of the rest.
    """

    name: str
    symbols: str
    train: Tensor
    validation: Tensor

    def decode(self, numbers: Tensor) -> str:
        """The text of some numbers."""
        return "".join(self.symbols[k] for k in numbers.tolist())


def help_topics() -> TextData:
    """The topics of Python's built-in help (`help("LOOPING")`), in the order of their names.

    That is about 460,000 characters of the language reference. The exact text depends on the version of Python; the
    same version gives the same text.
    """
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[key] for key in sorted(topics))
    symbols = "".join(sorted(set(text)))
    place = {symbol: k for k, symbol in enumerate(symbols)}
    numbers = torch.tensor([place[symbol] for symbol in text])
    cut = round(len(numbers) * (1 - VALIDATION_SHARE))
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    return TextData(f"Python's help topics ({digest})", symbols, numbers[:cut], numbers[cut:])


def windows(numbers: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Pieces of a text that follow one another, and for each place of a piece the symbol that comes next.

    Returns:
        Inputs and targets, both `[pieces, length]`; what does not fill a piece is left out.

    Raises:
        ValueError: The text is not even one piece long.
    """
    pieces = (len(numbers) - 1) // length
    if pieces < 1:
        raise ValueError(f"the text has {len(numbers)} symbols, too few for one piece of {length} and the next symbol")
    used = pieces * length
    return numbers[:used].reshape(pieces, length), numbers[1 : used + 1].reshape(pieces, length)

"""Data sets that come with installed packages (a table of scikit-learn, Python's built-in help), and one more text."""

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from regauge.data.data_files import DataFile, read

BREAST_CANCER_TEST = 114
"""Cases of the breast cancer set that are kept for testing: 20%."""
VALIDATION_SHARE = 0.1
"""The last tenth of the text is kept for validation."""
SHAKESPEARE = DataFile(
    "Tiny Shakespeare",
    "tinyshakespeare",
    "input.txt",
    "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
    ("https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",),
)


@dataclass(frozen=True)
class TableData:
    """Cases with features and classes.

    Attributes:
        name: The usual name.
        train_inputs: float32, every feature with mean zero and standard deviation one, `[n, features]`.
        train_labels: int64, `[n]`.
        test_inputs: As the training inputs, shifted and scaled with their means and deviations.
        test_labels: As the training labels.
        classes: Number of classes.
    """

    name: str
    train_inputs: Tensor
    train_labels: Tensor
    test_inputs: Tensor
    test_labels: Tensor
    classes: int


def breast_cancer() -> TableData:
    """569 tumors with 30 features each, malignant (0) or benign (1), from the UCI repository by way of scikit-learn.

    The same 114 tumors are always the test set. Paper 000 validates and tests on them. Features are standardized by the
    455 training cases, while the paper uses all cases.

    References:
        Street, Wolberg and Mangasarian (1993), Nuclear feature extraction for breast tumor diagnosis.
        Erdogan (2025), Geometric flow models over neural network weights, section 7.2, for the split.
    """
    from sklearn.datasets import load_breast_cancer
    from sklearn.model_selection import train_test_split

    bunch = load_breast_cancer()
    inputs, labels = torch.from_numpy(bunch.data), torch.from_numpy(bunch.target).long()
    train, test = train_test_split(torch.arange(len(labels)), test_size=BREAST_CANCER_TEST, random_state=42)
    normal = ((inputs - inputs[train].mean(0)) / inputs[train].std(0)).float()
    return TableData("UCI breast cancer", normal[train], labels[train], normal[test], labels[test], 2)


@dataclass(frozen=True)
class TextData:
    """A text as indices of symbols.

    Attributes:
        name: The usual name, with the beginning of its SHA-256: two runs with the same name read the same text.
        symbols: The characters that occur, sorted; a character's index is its position in this order.
        train: Indices of the symbols in the first part of the text, int64 `[characters]`.
        validation: Indices of the symbols in the rest of the text.
    """

    name: str
    symbols: str
    train: Tensor
    validation: Tensor

    def decode(self, numbers: Tensor) -> str:
        """Return the text of some indices."""
        return "".join(self.symbols[k] for k in numbers.tolist())


def help_topics() -> TextData:
    """Return the topics of Python's built-in help (`help("LOOPING")`), in the order of their names.

    That is about 460,000 characters of the language reference. The exact text depends on the version of Python; the
    same version gives the same text.
    """
    from pydoc_data.topics import topics

    return _text_data("Python's help topics", "\n\n".join(topics[key] for key in sorted(topics)))


def tiny_shakespeare() -> TextData:
    """1,115,394 characters of Shakespeare's plays, from `REGAUGE_DATA` or downloaded once.

    References:
        Karpathy (2015), The unreasonable effectiveness of recurrent neural networks.
    """
    return _text_data(SHAKESPEARE.data, read(SHAKESPEARE).decode())


def _text_data(name: str, text: str) -> TextData:
    symbols = "".join(sorted(set(text)))
    place = {symbol: k for k, symbol in enumerate(symbols)}
    numbers = torch.tensor([place[symbol] for symbol in text])
    cut = round(len(numbers) * (1 - VALIDATION_SHARE))
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    return TextData(f"{name} ({digest})", symbols, numbers[:cut], numbers[cut:])


def windows(numbers: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Return consecutive pieces of a text and, for each position, the symbol that comes next.

    Returns:
        Inputs and targets, both `[pieces, length]`; characters at the end that do not fill a piece are dropped.

    Raises:
        ValueError: The text is shorter than one piece.
    """
    pieces = (len(numbers) - 1) // length
    if pieces < 1:
        raise ValueError(
            f"the text has {len(numbers)} symbols, too few for one piece of {length} and the next symbol; give a "
            "longer text"
        )
    used = pieces * length
    return numbers[:used].reshape(pieces, length), numbers[1 : used + 1].reshape(pieces, length)

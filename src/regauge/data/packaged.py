"""Data sets from installed packages (a scikit-learn table, Python's built-in help), and a downloaded text."""

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from regauge.data.data_files import DataFile, read

BREAST_CANCER_TEST = 114
"""The number of breast cancer cases that are reserved for testing: 20%."""
VALIDATION_SHARE = 0.1
"""The share of a text that is reserved for validation. The reserved part is at the end of the text."""
SHAKESPEARE = DataFile(
    "Tiny Shakespeare",
    "tinyshakespeare",
    "input.txt",
    "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
    ("https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",),
)


@dataclass(frozen=True)
class TableData:
    """Cases with features and class labels.

    Attributes:
        name: The usual name of the data set.
        train_inputs: float32, every feature with mean zero and standard deviation one, `[n, features]`.
        train_labels: int64, `[n]`.
        test_inputs: Test inputs, standardized with the means and deviations of the training inputs.
        test_labels: Test labels in the format of the training labels.
        classes: The number of classes.
    """

    name: str
    train_inputs: Tensor
    train_labels: Tensor
    test_inputs: Tensor
    test_labels: Tensor
    classes: int


def breast_cancer() -> TableData:
    """Return 569 tumors with 30 features each, malignant (0) or benign (1), from UCI and scikit-learn.

    The test set always contains the same 114 tumors, on which paper 000 validates and tests. Features are standardized
    by the 455 training cases. The paper standardizes by all cases.

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
    """A text as a sequence of symbol indices.

    Attributes:
        name: The usual name of the text, with the beginning of the text's SHA-256. If two names are equal, the texts
            are equal.
        symbols: The characters that occur, sorted. A character's index is its position in this string.
        train: Symbol indices of the first part of the text, int64 `[characters]`.
        validation: Symbol indices of the remaining text.
    """

    name: str
    symbols: str
    train: Tensor
    validation: Tensor

    def decode(self, numbers: Tensor) -> str:
        """Return the text that some indices encode."""
        return "".join(self.symbols[k] for k in numbers.tolist())


def help_topics() -> TextData:
    """Return the topics of Python's built-in help (`help("LOOPING")`), sorted by name.

    The topics have about 460,000 characters of the language reference. The exact text depends on the Python version.
    """
    from pydoc_data.topics import topics

    return _text_data("Python's help topics", "\n\n".join(topics[key] for key in sorted(topics)))


def tiny_shakespeare() -> TextData:
    """Return 1,115,394 characters of Shakespeare's plays, from `REGAUGE_DATA` or downloaded once.

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
    """Return consecutive sequences of a text, and the next symbol for each position.

    Returns:
        Inputs and targets, both `[pieces, length]`. Characters at the end that do not fill a sequence are dropped.

    Raises:
        ValueError: The text is shorter than one sequence.
    """
    pieces = (len(numbers) - 1) // length
    if pieces < 1:
        raise ValueError(
            f"the text has {len(numbers)} symbols, too few for one piece of {length} and the next symbol; give a "
            "longer text"
        )
    used = pieces * length
    return numbers[:used].reshape(pieces, length), numbers[1 : used + 1].reshape(pieces, length)

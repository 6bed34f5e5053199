"""Safetensors files whose header states a version and the kind of content, such as a trained network."""

from collections.abc import Collection, Mapping
from pathlib import Path

from regauge.checkpoints.checkpoint import Checkpoint
from regauge.core.params import Params

READERS: Mapping[str, tuple[str, str]] = {
    "regauge.alignment": ("an alignment", "regauge.load_alignment"),
    "regauge.inr": ("a network that is a signal", "regauge.inr.load_inr"),
    "regauge flow": ("a flow", "regauge.flow.load_flow"),
    "regauge autoencoder": ("an autoencoder", "regauge.learn.load_autoencoder"),
    "regauge net over networks": (
        "a net over networks",
        "regauge.weightspace.load_net, or load_matching or load_predictor of regauge.learn,",
    ),
    "regauge training": ("the state of a training", "the command that was interrupted"),
}
"""For each kind of file that a header can name: the kind in words, and the command or function that reads such
files."""
DAMAGE = (
    *(LookupError, TypeError, ValueError, RuntimeError, AttributeError),
    *(ArithmeticError, AssertionError, StopIteration),
)
"""Errors that are raised when an object is built from a header with invalid entries."""


def damage(what: str, path: str | Path, error: Exception, remedy: str = "train it again") -> ValueError:
    """Return an error about a damaged file, with only the first line of the reason; torch adds further lines."""
    text = str(error).strip().split("\n")[0]
    reason = text if isinstance(error, ValueError) and text else f"{type(error).__name__}: {text}"
    return ValueError(f"the {what} {str(path)!r} is damaged ({reason}); {remedy}")


def describe_kind(header: Mapping[str, str]) -> str:
    """Return a clause that describes the kind of a file by its header and names the command that reads it."""
    what, reader = READERS.get(header.get("kind", ""), ("the checkpoint of a network", ""))
    return f"{what}, which {reader} reads" if reader else f"{what}, whose path regauge.align and regauge.merge take"


def read_described(
    path: str | Path, *, kind: str, version: str, name: str, writer: str, earlier: Collection[str] = ()
) -> tuple[dict[str, str], Params]:
    """Return the strings of a file's header and its tensors.

    Args:
        path: The file.
        kind: The kind that the header must name.
        version: The version that the header must have.
        name: The name of files of this kind in errors.
        writer: The command that writes files of this kind.
        earlier: Earlier versions that can also be read.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is damaged, or has another kind or version.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"there is no {name} {str(path)!r}; `{writer}` writes one")
    with Checkpoint.open(path) as checkpoint:
        header = dict(checkpoint.header)
        tensors = {key: tensor.clone() for key, tensor in checkpoint.params.items()}
    if header.get("kind") != kind:
        raise ValueError(f"{str(path)!r} is no {name} but {describe_kind(header)}; `{writer}` writes one")
    if header.get("version") not in {version, *earlier}:
        raise ValueError(
            f"the {name} {str(path)!r} has version {header.get('version')}, but this regauge reads version {version}; "
            f"upgrade regauge, or make it again with `{writer}`"
        )
    return header, tensors

"""Safetensors files whose header says what they hold, such as a trained net, and in which version."""

from pathlib import Path

from regauge.core.params import Params
from regauge.storage.checkpoints.checkpoint import Checkpoint


def read_described(
    path: str | Path, *, kind: str, version: str, name: str, writer: str, earlier: str | None = None
) -> tuple[dict[str, str], Params]:
    """The strings of a file's header and its tensors.

    Args:
        path: The file.
        kind: What the header has to say that it is.
        version: The version that the header has to have.
        name: What such a file is called in errors.
        writer: The command that writes such files.
        earlier: A version that is read, too.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is damaged, of another kind, or of another version.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"there is no {name} {str(path)!r}; `{writer}` writes one")
    with Checkpoint.open(path) as checkpoint:
        header = dict(checkpoint.header)
        tensors = {key: tensor.clone() for key, tensor in checkpoint.params.items()}
    if header.get("kind") != kind:
        raise ValueError(f"{str(path)!r} is no {name}; `{writer}` writes one")
    if header.get("version") not in {version, earlier} - {None}:
        raise ValueError(
            f"the {name} {str(path)!r} has version {header.get('version')}, but this regauge reads version {version}; "
            f"upgrade regauge, or make it again with `{writer}`"
        )
    return header, tensors

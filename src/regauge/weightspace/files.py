"""Trained nets as files: safetensors, with everything that makes the net in the header."""

import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch

from regauge.core.symmetry import Symmetry
from regauge.core.typed_json import require_fields
from regauge.storage.checkpoints.checkpoint import Checkpoint
from regauge.storage.checkpoints.writing import save
from regauge.weightspace.encoder import VALUES
from regauge.weightspace.heads import HEADS
from regauge.weightspace.layers import LAYERS
from regauge.weightspace.metanet import Metanet

KIND = "regauge net over networks"
VERSION = "1"


def save_net(
    net: Metanet, path: str | Path, *, about: Mapping[str, Any] | None = None, overwrite: bool = False
) -> Path:
    """Write a net to a `.safetensors` file, whole or not at all.

    Args:
        net: The net. Architectures that it was adapted to are not written: adapt it again.
        path: Ends in `.safetensors`, in a folder that exists.
        about: What else is known, as JSON: what it was trained for.
        overwrite: Whether a file of that name may be replaced.

    Raises:
        FileExistsError: The file exists, and `overwrite` is false.
        FileNotFoundError: Its folder does not exist.
        OSError: The disk is full.
        ValueError: The name does not end in `.safetensors`.
    """
    settings = net.settings
    made = {
        "layer": _named(settings.layer, LAYERS),
        "head": _named(settings.head, HEADS),
        "values": _named(settings.values, VALUES),
        "width": settings.width,
        "depth": settings.depth,
        "parts": list(settings.parts),
        "symmetries": [json.loads(symmetry.to_json()) for symmetry in net.symmetries],
    }
    header = {"kind": KIND, "version": VERSION, "net": json.dumps(made), "about": json.dumps(dict(about or {}))}
    return save(net.state_dict(), path, overwrite=overwrite, metadata=header)


def load_net(path: str | Path) -> tuple[Metanet, dict[str, Any]]:
    """The net in a file, in evaluation mode, and what else is known about it.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is damaged, no net, or of another version.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"there is no net {str(path)!r}; `regauge learn` writes one")
    with Checkpoint.open(path) as checkpoint:
        header, tensors = checkpoint.header, dict(checkpoint.params)
    if header.get("kind") != KIND:
        raise ValueError(f"{str(path)!r} is a safetensors file but no net over networks; `regauge learn` writes one")
    if header.get("version") != VERSION:
        raise ValueError(
            f"the net {str(path)!r} has version {header.get('version')}, but this regauge reads version {VERSION}; "
            "upgrade regauge, or train the net again"
        )
    try:
        made, about = json.loads(header["net"]), json.loads(header["about"])
        net = Metanet(
            tuple(Symmetry.from_json(json.dumps(symmetry)) for symmetry in made["symmetries"]),
            layer=_made(made["layer"], LAYERS),
            head=_made(made["head"], HEADS),
            values=_made(made["values"], VALUES),
            width=made["width"],
            depth=made["depth"],
            parts=made["parts"],
        )
        dtype = next((tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()), torch.float32)
        net.to(dtype).load_state_dict(tensors)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"the net {str(path)!r} is damaged ({error}); train it again") from error
    return net.eval(), about


def _named(settings: Any, table: Mapping[str, type[Any]]) -> dict[str, Any]:
    name = next(name for name, kind in table.items() if kind is type(settings))
    return {"name": name, **asdict(settings)}


def _made(values: Mapping[str, Any], table: Mapping[str, type[Any]]) -> Any:
    kind = table[values["name"]]
    known = {field.name for field in fields(kind)}
    given = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items() if name in known}
    require_fields(given, kind, "the net")
    return kind(**given)

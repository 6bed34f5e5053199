"""Trained nets as files: safetensors, with everything that makes the net in the header."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regauge.checkpoints.claims import Claims
from regauge.checkpoints.described import DAMAGE, damage, read_described
from regauge.checkpoints.writing import save
from regauge.core.symmetry import Symmetry
from regauge.core.typed_json import require_fields
from regauge.weightspace.encoder import VALUES
from regauge.weightspace.heads import HEADS
from regauge.weightspace.layers import LAYERS
from regauge.weightspace.metanet import Metanet
from regauge.weightspace.probes.probed import MismatchError
from regauge.weightspace.probes.probes import ProbeEncoder, Probes

KIND = "regauge net over networks"
VERSION = "1"


def save_net(
    net: Metanet, path: str | Path, *, about: Mapping[str, Any] | None = None, overwrite: bool = False
) -> Path:
    """Write a net to a `.safetensors` file, whole or not at all.

    Args:
        net: The net. Architectures that it was adapted to are not written: adapt it again.
        path: Ends in `.safetensors`, in a folder that exists.
        about: Further facts, as JSON: what it was trained for.
        overwrite: Whether a file of that name may be replaced.

    Raises:
        FileExistsError: The file exists, and `overwrite` is false.
        FileNotFoundError: Its folder does not exist.
        OSError: The disk is full.
        ValueError: The name does not end in `.safetensors`, or a function chooses the outputs of probes.
    """
    made = describe_net(net)
    header = {"kind": KIND, "version": VERSION, "net": json.dumps(made), "about": json.dumps(dict(about or {}))}
    return save(net.state_dict(), path, overwrite=overwrite, metadata=header)


def describe_net(net: Metanet) -> dict[str, Any]:
    """Everything that makes a net but its tensors, as JSON.

    Raises:
        ValueError: A function chooses the outputs of probes.
    """
    settings = net.settings
    return {
        "layer": named(settings.layer, LAYERS),
        "head": named(settings.head, HEADS),
        "values": named(settings.values, VALUES),
        "width": settings.width,
        "depth": settings.depth,
        "parts": list(settings.parts),
        "reads_moments": settings.reads_moments,
        "readers": [list(axis) for axis in settings.readers],
        "conditions": settings.conditions,
        "symmetries": [json.loads(symmetry.to_json()) for symmetry in net.symmetries],
        "probes": [_written(encoder) for encoder in net.probes if isinstance(encoder, ProbeEncoder)],
    }


def load_net(
    path: str | Path,
    *,
    module: nn.Module | Sequence[nn.Module] | None = None,
    make_module: Callable[[], nn.Module] | None = None,
) -> tuple[Metanet, dict[str, Any]]:
    """The net in a file, in evaluation mode, and what else is known about it.

    Args:
        path: The file.
        module: The architecture that a net with probes runs, whose own parameters are not used; those of all, in the
            order of its symmetries, for a net of several.
        make_module: Makes the module if the net has probes, in place of `module`.

    Raises:
        FileNotFoundError: There is no such file.
        KeyError: The module is of another architecture.
        ValueError: The file is damaged, no net, or of another version; or the module is missing, given for a net
            without probes, or of another architecture.
    """
    header, tensors = read_described(path, kind=KIND, version=VERSION, name="net over networks", writer="regauge learn")
    try:
        made, about = json.loads(header["net"]), dict(json.loads(header["about"]))
        symmetries = tuple(Symmetry.from_json(json.dumps(symmetry)) for symmetry in made["symmetries"])
        written = made.get("probes", [])
        if not isinstance(written, list):
            raise ValueError("its probes are no list")
    except DAMAGE as error:
        raise damage("net", path, error) from error
    if make_module is not None and written:
        module = make_module()
    modules = () if module is None else (module,) if isinstance(module, nn.Module) else tuple(module)
    if len(modules) != len(written):
        raise ValueError(
            f"the net {str(path)!r} runs networks of {len(written)} architectures on probes, but {len(modules)} "
            "modules were given; give `module`, the architecture of each, and none for a net without probes"
        )
    for one, symmetry in zip(modules, symmetries, strict=False):
        symmetry.bind(one.state_dict())
    try:
        net = make_net(made, tensors, modules)
    except MismatchError:
        raise
    except DAMAGE as error:
        raise damage("net", path, error) from error
    return net.eval(), about


def make_net(made: Mapping[str, Any], tensors: Mapping[str, Tensor], modules: Sequence[nn.Module] = ()) -> Metanet:
    """The net that `describe_net` described, with these tensors.

    Raises:
        KeyError, TypeError, ValueError, RuntimeError: The description or the tensors are those of no net.
    """
    symmetries = tuple(Symmetry.from_json(json.dumps(symmetry)) for symmetry in made["symmetries"])
    written = made.get("probes", [])
    with Claims(tensors):
        net = Metanet(
            symmetries,
            layer=made_of(made["layer"], LAYERS),
            head=made_of(made["head"], HEADS),
            values=made_of(made["values"], VALUES),
            width=made["width"],
            depth=made["depth"],
            parts=made["parts"],
            reads_moments=made.get("reads_moments", False),
            readers=[(name, axis) for name, axis in made.get("readers", [])],
            probes=[_probes(*pair, tensors, k) for k, pair in enumerate(zip(modules, written, strict=True))] or None,
            conditions=made.get("conditions", 0),
        )
    dtype = next((tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()), torch.float32)
    net.to(dtype).load_state_dict(tensors)
    return net


def _written(encoder: ProbeEncoder) -> dict[str, Any]:
    """The settings of probes but for their module; the tensors are among those of the net."""
    probes = encoder.probes
    if callable(probes.outputs):
        raise ValueError(
            "a function chooses the outputs of the probes' module, which no file holds; name the outputs, or wrap the "
            "module in one that returns them alone"
        )
    return {
        "arguments": [[name, encoder.plain.get(name)] for name in probes.arguments],
        "constant": [name for name in probes.arguments if name not in probes.per_example],
        "inputs": probes.inputs if isinstance(probes.inputs, int) else list(probes.inputs),
        "hidden": probes.hidden,
        "dropout": probes.dropout,
        "outputs": probes.outputs,
    }


def _probes(module: nn.Module, written: Mapping[str, Any], tensors: Mapping[str, Tensor], number: int) -> Probes:
    """Probes that begin as those of a file."""
    given = {}
    for name, value in written["arguments"]:
        keys = (f"probes.{number}.learned.{name}", f"probes.{number}.given_{name}")
        given[name] = next((tensors[key] for key in keys if key in tensors), value)
    return Probes(
        module,
        tuple(x for name, x in given.items() if name.isdigit()),
        {name: x for name, x in given.items() if not name.isdigit()},
        written["inputs"] if isinstance(written["inputs"], int) else tuple(written["inputs"]),
        written["outputs"],
        tuple(written["constant"]),
        written["hidden"],
        written["dropout"],
    )


def named(settings: Any, table: Mapping[str, type[Any]]) -> dict[str, Any]:
    """Settings as JSON, with their name in a table."""
    name = next(name for name, kind in table.items() if kind is type(settings))
    return {"name": name, **asdict(settings)}


def made_of(values: Mapping[str, Any], table: Mapping[str, type[Any]]) -> Any:
    """The settings that `named` wrote."""
    kind = table[values["name"]]
    known = {field.name for field in fields(kind)}
    given = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items() if name in known}
    require_fields(given, kind, "the net")
    return kind(**given)

"""Loading of trained nets from files that `Metanet.save` wrote."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regauge.checkpoints.claims import Claims
from regauge.checkpoints.described import DAMAGE, damage, read_described
from regauge.core.symmetry import Symmetry
from regauge.core.typed_json import made_of
from regauge.weightspace.encoder import VALUES
from regauge.weightspace.heads import HEADS
from regauge.weightspace.layers import LAYERS
from regauge.weightspace.metanet import KIND, VERSION, Metanet
from regauge.weightspace.probes.probed import MismatchError
from regauge.weightspace.probes.probes import Probes


def load_net(
    path: str | Path,
    *,
    module: nn.Module | Sequence[nn.Module] | None = None,
    make_module: Callable[[], nn.Module] | None = None,
) -> tuple[Metanet, dict[str, Any]]:
    """Return the net in a file, in evaluation mode, and the additional information that was saved with it.

    Args:
        path: The file.
        module: The module of networks, for a net with probes. The module's own parameters are not used. For a net of
            several architectures, pass a list of modules in the order of the symmetries.
        make_module: A function that creates the module if the net has probes. The function replaces `module`.

    Raises:
        FileNotFoundError: The file does not exist.
        KeyError: The module has another architecture.
        ValueError: The file is damaged, contains no net, or has another version. The module is missing, is given for a
            net without probes, or has another architecture.
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
    """Return a net, given the settings from `Metanet.describe` and the net's tensors.

    Raises:
        KeyError, TypeError, ValueError, RuntimeError: The settings or the tensors do not describe a net.
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
            is_linear=made.get("is_linear", False),
        )
    dtype = next((tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()), torch.float32)
    net.to(dtype).load_state_dict(tensors)
    return net


def _probes(module: nn.Module, written: Mapping[str, Any], tensors: Mapping[str, Tensor], number: int) -> Probes:
    """Return probes with the learned inputs from a file."""
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

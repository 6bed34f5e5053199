"""Implicit neural representations: layers, meaning of the outputs, and files that describe their networks."""

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from regauge.checkpoints.checkpoint import Checkpoint
from regauge.checkpoints.described import describe_kind
from regauge.checkpoints.formats.state_dicts import match
from regauge.checkpoints.writing import save
from regauge.core.params import Params
from regauge.core.symmetry_text import read_versioned
from regauge.core.typed_json import require_fields
from regauge.nets.classification import initialize
from regauge.nets.mlp import mlp
from regauge.nets.siren import Bias, Siren
from regauge.storage.architecture import Architecture

FORMAT = "regauge.inr"
VERSION = 1
OMEGA = 30.0
"""The default frequency of sines."""
DISTANCE_LIMIT = 0.1
"""The default distance beyond which a field is constant. Shapes lie in the unit ball."""

Kind = Literal["siren", "relu"]
Signal = Literal["image", "unsigned", "signed", "occupancy"]
"""The meaning of the outputs: pixel values, or the logit of a label. The label stands for the distance to a surface,
the signed distance (negative inside), or whether the point lies inside."""


@dataclass(frozen=True)
class Inr:
    """An implicit neural representation: an MLP from the coordinates of a point to the signal at the point.

    Coordinates lie in [-1, 1]: (x, y, z) for a shape, (row, column) for an image. The outputs for an image are its
    channels. The only output for a shape is a logit; see `DistanceLabels`. The default network is the network of De
    Luigi et al. (2023).

        >>> Inr().widths
        (3, 512, 512, 512, 512, 1)
        >>> Inr.from_json(Inr(width=128).to_json()) == Inr(width=128)
        True

    Attributes:
        kind: Sine layers `sin(omega (W x + b))`, or ReLU layers.
        in_features: The number of coordinates of a point.
        out_features: The number of outputs at a point.
        width: The number of units in each hidden layer.
        depth: The number of hidden layers.
        signal: The meaning of the outputs.
        omega: The frequency of every sine. 30 by default; None for ReLU.
        limit: The distance at which labels are clipped. 0.1 by default for distance fields; None for other signals.
        pixels: The height and width of an image; None for other signals.

    Raises:
        ValueError: Some fields cannot be combined, or a value is invalid.

    References:
        Sitzmann et al. (2020), section 3; De Luigi et al. (2023), section 3.
    """

    kind: Kind = "siren"
    in_features: int = 3
    out_features: int = 1
    width: int = 512
    depth: int = 4
    signal: Signal = "unsigned"
    omega: float | None = None
    limit: float | None = None
    pixels: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind) or self.signal not in get_args(Signal):
            raise ValueError(
                f"an INR is {' or '.join(get_args(Kind))} and represents {', '.join(get_args(Signal))}, not "
                f"{self.kind!r} and {self.signal!r}"
            )
        if min(self.in_features, self.out_features, self.width, self.depth) < 1:
            raise ValueError(
                f"an INR from {self.in_features} to {self.out_features} numbers with {self.depth} hidden layers of "
                f"{self.width} units has an empty layer or no hidden one; give one hidden layer at least"
            )
        if self.kind == "siren" and self.omega is None:
            object.__setattr__(self, "omega", OMEGA)
        if self.is_distance and self.limit is None:
            object.__setattr__(self, "limit", DISTANCE_LIMIT)
        if self.pixels is not None:
            object.__setattr__(self, "pixels", tuple(self.pixels))
        _require(self.kind == "siren", "omega", self.omega, f"a {self.kind} network")
        _require(self.is_distance, "limit", self.limit, f"a signal {self.signal!r}")
        if (self.pixels is not None) != (self.signal == "image"):
            raise ValueError(
                f"pixels={self.pixels} for the signal {self.signal!r}; exactly an image has (height, width); give them "
                "for images alone"
            )
        if self.pixels is not None and (len(self.pixels) != 2 or min(self.pixels) < 1 or self.in_features != 2):
            raise ValueError(
                f"an image has a height, a width and two coordinates, not pixels={self.pixels} and {self.in_features}"
            )
        if self.signal != "image" and self.out_features != 1:
            raise ValueError(f"a signal {self.signal!r} has one output, not {self.out_features}")

    @property
    def widths(self) -> tuple[int, ...]:
        """The widths of the inputs, the hidden layers and the outputs."""
        return (self.in_features, *[self.width] * self.depth, self.out_features)

    @property
    def is_distance(self) -> bool:
        """Whether the signal is a distance, signed or unsigned."""
        return self.signal in ("unsigned", "signed")

    def module(self, params: Mapping[str, Tensor] | None = None) -> nn.Module:
        """Return the module, with the given parameters and their dtype, or initialized by torch's global generator."""
        network: nn.Module = Siren(**self._siren("torch")) if self.kind == "siren" else mlp(*self.widths)
        if params is not None:
            network = network.to(next(iter(params.values())).dtype)
            network.load_state_dict(dict(params))
        return network

    def start(self, generator: torch.Generator, *, bias: Bias = "torch", dtype: torch.dtype = torch.float32) -> Params:
        """Return initial parameters. The weights do not depend on the kind of biases.

        Weights of a SIREN are uniformly random, with bound 1/n in the first layer (n: its inputs) and sqrt(6/n)/omega
        in all other layers. Weights of a ReLU network have the bound 1/sqrt(n), as in torch. Biases with bound
        1/sqrt(n) are spread over many periods of the first layer's sines (`omega/sqrt(3)` = 17.3 rad for points in
        space). Therefore networks with different initializations have different phases. With `bias="siren"`, biases are
        too small to spread over many periods.

        Args:
            generator: The random generator.
            bias: The distribution of biases: uniformly random with bound 1/sqrt(n), uniformly random with the bound of
                the weights, or zero.
            dtype: The dtype of the parameters. All parameters are sampled in float32.

        Raises:
            ValueError: The bias bound of a SIREN is requested for a ReLU network.

        References:
            Sitzmann et al. (2020), section 3.2 and theorem 1.8.
        """
        if self.kind == "siren":
            params: Params = Siren(**self._siren(bias), generator=generator).state_dict()
        elif bias == "siren":
            raise ValueError('a ReLU network has no frequency to draw biases by; choose "torch" or "zero"')
        else:
            params = initialize(mlp(*self.widths), generator)
            if bias == "zero":
                params |= {name: torch.zeros_like(t) for name, t in params.items() if name.endswith("bias")}
        return {name: tensor.detach().to(dtype) for name, tensor in params.items()}

    def architecture(self, *, bias: Bias = "torch") -> Architecture:
        """Return the architecture for populations and stores; its factory initializes networks like `start`.

        Raises:
            ValueError: The bias initialization "siren" or "zero" is requested for a ReLU network.
        """
        name = f"{self.kind} {'-'.join(map(str, self.widths))}"
        if self.kind == "relu":
            if bias != "torch":
                raise ValueError(f"a population of ReLU networks has biases as torch draws them, not {bias!r}")
            return Architecture(name, "regauge.nets.mlp:mlp", {"widths": list(self.widths)})
        return Architecture(name, "regauge.nets.siren:Siren", self._siren(bias))

    def _siren(self, bias: Bias) -> dict[str, Any]:
        """Return the arguments of a SIREN."""
        sizes = {"in_features": self.in_features, "width": self.width, "out_features": self.out_features}
        return {**sizes, "depth": self.depth, "omega": self.omega, "bias": bias}

    def save(self, params: Mapping[str, Tensor], path: str | Path, *, overwrite: bool = False) -> Path:
        """Write the parameters of a network and the description of the INR to a file. `load_inr` reads exactly the same
        parameters and description.

        Raises:
            FileExistsError: The file exists and `overwrite` is false.
            FileNotFoundError: The folder of `path` does not exist.
            ValueError: The parameters do not fit this architecture, or the name does not end in `.safetensors`.
        """
        named, header = match(params, blank(self), "this network"), {"kind": FORMAT, "inr": self.to_json()}
        return save(named, path, overwrite=overwrite, metadata=header)

    def to_json(self) -> str:
        """Return the description as JSON text."""
        return json.dumps({"format": FORMAT, "version": VERSION, **asdict(self)})

    @classmethod
    def from_json(cls, text: str) -> "Inr":
        """Read a description from the text that `to_json` wrote.

        Raises:
            ValueError: The text does not describe an INR, or has another version.
        """
        document: dict[str, Any] = read_versioned(text, FORMAT, VERSION)
        settings = {name: value for name, value in document.items() if name not in ("format", "version")}
        try:
            require_fields({**settings, "pixels": _pair(settings.get("pixels"))}, cls, "an INR")
            return cls(**settings)
        except TypeError as error:
            raise ValueError(
                f"this description of an INR is malformed: {error}; write it again with `Inr.save`"
            ) from error


def save_inr(params: Mapping[str, Tensor], inr: Inr, path: str | Path, *, overwrite: bool = False) -> Path:
    """Write a network by `Inr.save`, which has replaced this function."""
    return inr.save(params, path, overwrite=overwrite)


def load_inr(path: str | Path | Checkpoint) -> tuple[Params, Inr]:
    """Read a file that `Inr.save` wrote.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: The file is damaged, does not describe an INR, or contains a network that does not fit its
            description.
    """
    with Checkpoint.open(path) as checkpoint:
        inr = read_inr(checkpoint)
        most = sum(math.prod(tensor.shape) for tensor in checkpoint.stored.values())
        if inr.depth >= len(checkpoint) or max(inr.in_features, inr.width, inr.out_features) > most:
            raise ValueError(
                f"{checkpoint.label!r} says that its INR has {inr.depth:,} hidden layers of {inr.width:,} units, but "
                f"holds {len(checkpoint)} tensors of {most:,} values; write it again with `Inr.save`"
            )
        return match(checkpoint.params, blank(inr), repr(checkpoint.label)), inr


def read_inr(path: str | Path | Checkpoint) -> Inr:
    """Read the description of the INR in a file. Only the file's header is read.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: The file is damaged, or does not describe an INR.
    """
    checkpoint = Checkpoint.open(path)
    header = checkpoint.header
    if header.get("kind") != FORMAT or "inr" not in header:
        raise ValueError(
            f"{checkpoint.label!r} does not record which INR it holds: it is {describe_kind(header)}; `regauge inr "
            "fit` and `Inr.save` write files that do, and `Inr.save` turns the parameters of another program into one"
        )
    try:
        return Inr.from_json(header["inr"])
    except ValueError as error:
        raise ValueError(f"{checkpoint.label!r} does not record which INR it holds: {error}") from error


def blank(inr: Inr) -> dict[str, Tensor]:
    """Return the parameters on the meta device."""
    with torch.device("meta"):
        return dict(inr.module().state_dict())


def _pair(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _require(is_used: bool, name: str, value: float | None, owner: str) -> None:
    if is_used != (value is not None):
        raise ValueError(f"{owner} has no {name}, but {name}={value}")
    if value is not None and not 0 < value <= sys.float_info.max:
        raise ValueError(f"{name} must be positive and finite, not {value}")

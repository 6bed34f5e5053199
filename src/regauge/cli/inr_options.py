"""Options of the commands on networks that are signals. Nothing here imports torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg, subcommand

from regauge.cli.config_options import with_settings
from regauge.cli.options import Output, Overwrite, Seed
from regauge.inr.fit_config import RATE, FitConfig, Represented

SIGNAL_HELP = (
    "A shape (spot, teapot, fandisk, ...) or a voxel grid (chair:0, monitor:0) from the folder that REGAUGE_DATA "
    "names. Or a file: an image, a mesh (.ply, .obj, .stl, .npz) or points (.ply, .xyz, .npz), which are moved into "
    "the unit ball. Of a mesh, SIGNAL:points means distances to 2,048 points of it, SIGNAL:mesh to itself; the former "
    "if neither is given and distances have no sign."
)
Checkpoint = Annotated[Positional[Path], arg(help="A checkpoint that `regauge inr fit` wrote.")]


@dataclass(frozen=True)
@with_settings(FitConfig, "steps batch")
class InrFit:
    """Fit a network to an image or a shape; the checkpoint says itself what network it holds and what it represents."""

    target: Annotated[Positional[str], arg(metavar="SIGNAL", help=SIGNAL_HELP)]
    output: Output
    """The checkpoint, a .safetensors file."""
    signal: Represented | None = None
    """Signal of a shape: the distance to it, that with a sign (negative inside), or its inside; unsigned where left
    out, and occupancy for a voxel grid."""
    kind: Literal["siren", "relu"] = "siren"
    """Sine layers or ReLU layers."""
    width: int | None = None
    """Units of each hidden layer; 512 for shapes and 256 for images where left out."""
    depth: int | None = None
    """Hidden layers; 4 for shapes and 3 for images where left out."""
    start: Annotated[str, arg(metavar="random|shared|CHECKPOINT")] = "random"
    """Begin at random, at the initialization that all networks of inr2vec share, or where another fit ended."""
    bias: Literal["torch", "siren", "zero"] = "torch"
    """Initial biases: spread over many periods of the sines, as small as the weights, or zero."""
    lr: float = RATE
    """Learning rate."""
    seed: Seed = 0
    overwrite: Overwrite = False


@dataclass(frozen=True)
class InrRender:
    """Draw what a network represents: an image, the points of an unsigned distance, or the mesh of the others."""

    checkpoint: Checkpoint
    output: Output
    """The output: .png for a picture of any; .ply, .xyz or .npz for points; .ply, .obj or .stl for a mesh."""
    points: int = 2048
    """Number of points, of an unsigned distance."""
    up: Literal["x", "y", "z"] = "y"
    """The upward axis of a shape in a picture."""
    resolution: int | None = None
    """Points along each edge of the grid that a mesh is made from, 128 where left out; or the height of an image, whose
    own height is taken where left out."""
    seed: int = 0
    """Source of the random points."""
    overwrite: Overwrite = False


@dataclass(frozen=True)
class InrOrbit:
    """Move a network by random elements of its symmetry: a store of copies that compute the same."""

    checkpoint: Checkpoint
    output: Output
    """Folder of the store."""
    count: int = 100
    """Number of copies."""
    parts: tuple[Literal["permutation", "sign", "scale", "shift"], ...] = ()
    """Draw only from these parts of the symmetry; from all where left out."""
    noise: float = 0.0
    """Standard deviation of the noise that each copy gets, as a share of that of each tensor."""
    reach: int = 1
    """Largest shift of a sine's bias, in half periods."""
    seed: Seed = 0


InrCommand = (
    Annotated[InrFit, subcommand("fit", prefix_name=False)]
    | Annotated[InrRender, subcommand("render", prefix_name=False)]
    | Annotated[InrOrbit, subcommand("orbit", prefix_name=False)]
)


@dataclass(frozen=True)
class Inr:
    """Networks that are signals: fit them to images and shapes, draw them, and copy them along their orbits."""

    command: InrCommand

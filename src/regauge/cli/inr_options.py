"""Options of the commands on networks that represent signals. Nothing here imports torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg, subcommand

from regauge.cli.config_options import with_settings
from regauge.cli.options import Output, Overwrite, Seed
from regauge.inr.fit_config import RATE, FitConfig, Represented

SIGNAL_HELP = (
    "A shape (spot, teapot, fandisk, ...) or a voxel grid (chair:0, monitor:0) from the folder that REGAUGE_DATA "
    "names. Or a file: an image, a mesh (.ply, .obj, .stl, .npz) or points (.ply, .xyz, .npz), which are scaled into "
    "the unit ball. For a mesh, SIGNAL:points means distances to 2,048 points on the mesh (the default for unsigned "
    "distances), and SIGNAL:mesh means distances to the mesh itself."
)
Checkpoint = Annotated[Positional[Path], arg(help="A checkpoint that `regauge inr fit` wrote.")]


@dataclass(frozen=True)
@with_settings(FitConfig, "steps batch")
class InrFit:
    """Fit a network to an image or a shape; the checkpoint records the architecture and the represented signal."""

    target: Annotated[Positional[str], arg(metavar="SIGNAL", help=SIGNAL_HELP)]
    output: Output
    """The checkpoint, a .safetensors file."""
    signal: Represented | None = None
    """Output of the network: the distance to the shape, the signed distance (negative inside), or whether a point is
    inside. By default the distance, and for voxel grids whether a point is inside."""
    kind: Literal["siren", "relu"] = "siren"
    """Activation of the hidden layers: sine (siren) or ReLU."""
    width: int | None = None
    """Units of each hidden layer; by default 512 for shapes and 256 for images."""
    depth: int | None = None
    """Number of hidden layers; by default 4 for shapes and 3 for images."""
    start: Annotated[str, arg(metavar="random|shared|CHECKPOINT")] = "random"
    """Initial weights: random, shared (the weights that all networks of inr2vec share), or the path of a checkpoint."""
    bias: Literal["torch", "siren", "zero"] = "torch"
    """Initial biases: spread over many periods of the sines (torch), as small as the weights (siren), or zero."""
    lr: float = RATE
    """Learning rate."""
    seed: Seed = 0
    overwrite: Overwrite = False


@dataclass(frozen=True)
class InrRender:
    """Draw what a network represents: an image, points on a surface, or a mesh."""

    checkpoint: Checkpoint
    output: Output
    """The output: .png for a picture; .ply, .xyz or .npz for points; .ply, .obj or .stl for a mesh."""
    points: int = 2048
    """Number of points on the surface, if the network represents an unsigned distance."""
    up: Literal["x", "y", "z"] = "y"
    """The axis of the shape that points upward in a picture."""
    resolution: int | None = None
    """For a mesh: number of grid points along each edge, by default 128. For an image: its height in pixels, by default
    the height of the original image."""
    seed: int = 0
    """Seed of the random points."""
    overwrite: Overwrite = False


@dataclass(frozen=True)
class InrOrbit:
    """Apply random elements of the symmetry to a network, and write a store of copies with the same function."""

    checkpoint: Checkpoint
    output: Output
    """Folder of the store."""
    count: int = 100
    """Number of copies."""
    parts: tuple[Literal["permutation", "sign", "scale", "shift"], ...] = ()
    """Parts of the symmetry from which elements are sampled; by default all."""
    noise: float = 0.0
    """Standard deviation of noise that is added to each copy, relative to the standard deviation of each tensor."""
    reach: int = 1
    """Largest shift of the bias of a sine unit, in half periods."""
    seed: Seed = 0


InrCommand = (
    Annotated[InrFit, subcommand("fit", prefix_name=False)]
    | Annotated[InrRender, subcommand("render", prefix_name=False)]
    | Annotated[InrOrbit, subcommand("orbit", prefix_name=False)]
)


@dataclass(frozen=True)
class Inr:
    """Networks that represent images and shapes: fit them, draw what they represent, and make symmetric copies."""

    command: InrCommand

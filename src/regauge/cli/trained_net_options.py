"""Options of the commands that use trained nets over networks. Nothing here imports torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from regauge.cli.options import CHECKPOINT_HELP, Json, MaybeOutput, Model, Output, Overwrite
from regauge.cli.store_options import KeptCheckpoints

AUTOENCODER_HELP = "An autoencoder that `regauge learn autoencoder` wrote."
NetworkPaths = Annotated[
    Positional[tuple[Path, ...]],
    arg(metavar="STORE|CHECKPOINT [...]", help=f"Folders of stores, or checkpoints: {CHECKPOINT_HELP}"),
]


@dataclass(frozen=True)
class LearnPredict:
    """Predict a value for each network with a trained predictor."""

    predictor: Annotated[Positional[Path], arg(help="A predictor that `regauge learn predictor` wrote.")]
    networks: NetworkPaths
    model: Model = None
    """The architecture of checkpoints, which a net with probes needs. Stores contain their architecture."""
    output: MaybeOutput = None
    """Write the predictions to this file, .csv, instead of printing them."""
    overwrite: Overwrite = False
    checkpoints: KeptCheckpoints = "last"
    json: Json = False


@dataclass(frozen=True)
class LearnEncode:
    """Write the latent vectors of networks. All networks of an orbit have the same latent vector."""

    autoencoder: Annotated[Positional[Path], arg(help=AUTOENCODER_HELP)]
    networks: NetworkPaths
    output: Output
    """The table (.csv) with one row for each network, and columns z0, z1, ..."""
    overwrite: Overwrite = False
    checkpoints: KeptCheckpoints = "last"
    json: Json = False


@dataclass(frozen=True)
class LearnDecode:
    """Write the decoded networks: one network for each orbit, with nearly the same function as the encoded network."""

    autoencoder: Annotated[Positional[Path], arg(help=AUTOENCODER_HELP)]
    networks: Annotated[Positional[Path], arg(metavar="STORE|CHECKPOINT|LATENTS")]
    """Folder of a store, a checkpoint, or a .csv table of latent vectors that `regauge learn encode` wrote."""
    output: Output
    """A new folder if NETWORKS is a store; a checkpoint if NETWORKS is a checkpoint."""
    overwrite: bool = False
    """Replace the output if it is an existing checkpoint."""
    checkpoints: KeptCheckpoints = "last"
    json: Json = False


@dataclass(frozen=True)
class LearnNearest:
    """Find networks of a store with nearly the same function, by the distance of their latent vectors."""

    autoencoder: Annotated[Positional[Path], arg(help=AUTOENCODER_HELP)]
    networks: NetworkPaths
    among: Path
    """Folder of the store that is searched."""
    count: int = 5
    """Number of neighbors that are printed for each network."""
    output: MaybeOutput = None
    """Write the table to this file, .csv, instead of printing it."""
    overwrite: Overwrite = False
    checkpoints: KeptCheckpoints = "last"
    json: Json = False

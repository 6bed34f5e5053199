"""Options of the commands on populations. Nothing here imports torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg, subcommand

from regauge.cli.options import BATCHES_HELP, Json, Loss, Output, Picture, Seed

ON_HELP = (
    "Where the networks are trained: here, in this process; processes or processes:4 of this machine; dask or dask:4, "
    "a local cluster; or tcp://HOST:PORT of a running Dask scheduler. Each worker has one thread."
)
COMPARE_DATA_HELP = (
    f"{BATCHES_HELP}or a set that populations are trained on, such as breast-cancer or mnist: the examples that are "
    "kept from training."
)
Storage = Annotated[
    Literal["float16", "bfloat16"] | None,
    arg(help="Keep the weights rounded to this, in half the bytes; as they are where left out."),
]
StoreFolder = Annotated[Positional[Path], arg(help="Folder of the store.")]
NewStore = Annotated[
    Path, arg(aliases=["-o"], help="Folder of the store that is written; one that is there is continued.")
]
KeptCheckpoints = Annotated[
    Literal["last", "all"],
    arg(
        help="Which checkpoints of each run are read: the last one of those that --where leaves and that was not "
        "discarded, or all of them."
    ),
]
Where = Annotated[
    tuple[str, ...], arg(metavar="COLUMN=VALUE", help="Only networks with these values, for example step=86.")
]


@dataclass(frozen=True)
class ZooTrain:
    """Train a population and store it; the same command continues an interrupted one.

    Under torchrun (RANK, WORLD_SIZE) or in a job array of Slurm, each process takes its share of the shards.
    """

    config: Annotated[
        Positional[str],
        arg(
            metavar="CONFIG",
            help="A preset, such as uci-mlps, mnist-tiny-mlps, mnist-mlps, cifar10-mlps, cifar10-cnns, "
            "small-cnns-relu, sine-inrs, mnist-inrs or fashion-inrs; or package.module:factory or file.py:factory that "
            "returns a Config.",
        ),
    ]
    output: NewStore
    networks: int | None = None
    """Number of networks, as the config says where left out; a store of fewer is extended. Of each network all
    checkpoints that the config names are stored (82 by the preset uci-mlps); later commands read the last ones."""
    seed: int | None = None
    """Seed of all random numbers; as the config says where left out."""
    on: Annotated[str, arg(help=ON_HELP)] = "here"
    shard: int | None = None
    """Networks of a shard, which one worker trains; by itself at most 512, and what is trained in some minutes."""
    device: str = "cpu"
    """Device on which they are trained: cpu, cuda or another device of torch."""
    storage: Storage = None


@dataclass(frozen=True)
class ZooInfo:
    """Print what a store holds: networks, columns, symmetry, bytes."""

    store: StoreFolder
    json: Json = False


@dataclass(frozen=True)
class ZooImport:
    """Bring networks from elsewhere into a store; a network with NaN or Inf is kept and marked."""

    source: Positional[Path]
    """Folder, zip file or HDF5 file."""
    output: NewStore
    format: Annotated[str, arg(metavar="FORMAT")] = "folder"
    """Layout of the source: folder, dwsnets, deep-align, small-cnn-zoo, model-zoo-dataset or hdf5, or one that another
    package adds."""
    template: str | None = None
    """Names below a folder, {id}.pt unless given, for example {id}/step{step}.pt: what stands in braces becomes a
    column, * is anything in a name and ** anything at all."""
    beside: tuple[str, ...] = ()
    """Entries of a folder's checkpoints that are no parameters, for example label; they become columns."""
    model: Annotated[str | None, arg(metavar="MODEL")] = None
    """package.module:factory of the networks in a folder or HDF5 file; their symmetry is then found."""
    settings: str = "{}"
    """Arguments of the factory as JSON, for example '{"widths": [784, 10, 10]}'."""
    input_shape: tuple[str, ...] = ()
    """Shapes of the model's inputs, for example 2x784."""
    activation: str | None = None
    """Activation of the networks to take from the small CNN zoo, where there are several."""
    dataset: str | None = None
    """Name of the data set in an HDF5 file, "dataset" unless given."""
    storage: Storage = None


@dataclass(frozen=True)
class ZooExport:
    """Write networks of a store as files that other programs read."""

    store: StoreFolder
    output: Output
    """A new folder."""
    format: Literal["safetensors", "npy", "small-cnn-zoo", "dwsnets"] = "safetensors"
    """One file for each network; one array for all with a layout; or the layout of a public zoo."""
    where: Where = ()
    checkpoints: KeptCheckpoints = "last"


@dataclass(frozen=True)
class ZooVerify:
    """Read every byte of a store and compare the checksums; exit code 1 if a shard is damaged."""

    store: StoreFolder


@dataclass(frozen=True)
class ZooNearest:
    """Find the networks of a store that are nearest to a network, in whatever gauge, by their fingerprints.

    All checkpoints of all runs are looked at. The fingerprints of a store are computed once. docs/comparison.md defines
    them.
    """

    store: StoreFolder
    network: Positional[Path]
    """A checkpoint with the tensors of the store's networks."""
    count: int = 10
    """Number of networks that are printed."""
    json: Json = False


@dataclass(frozen=True)
class ZooAlign:
    """Align all networks of a store to one, into another store; the same command continues an interrupted one.

    All checkpoints of all runs are aligned. The network that they are aligned to is written into the folder of the new
    store.
    """

    store: StoreFolder
    output: NewStore
    to: Annotated[str, arg(metavar="ID|medoid|universe")] = "medoid"
    """The trajectory with this id, at its end; the medoid: the network nearest to all others; or the universe: the mean
    of networks that were aligned with one another."""
    sample: int = 64
    """Number of networks among which the medoid is found, or of which the universe is made."""
    on: Annotated[str, arg(help="Where the shards are aligned, as for `regauge zoo train`.")] = "here"
    seed: Seed = 0


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """Some networks of a store, and where a picture of them goes; shared by the commands that compare networks."""

    store: StoreFolder
    output: Picture
    """The picture, .svg, .png or .pdf; the table goes to the same name with .csv."""
    networks: int = 100
    """Number of networks, drawn at random from those that --where and --checkpoints leave."""
    where: Where = ()
    checkpoints: KeptCheckpoints = "last"
    overwrite: bool = False
    """Replace the output and its table if they exist."""
    seed: Seed = 0


@dataclass(frozen=True, kw_only=True)
class ZooCompare(Sampled):
    """Measure the barriers between all pairs of networks, before and after alignment: a heat map and a table."""

    data: Annotated[str, arg(metavar="DATA", help=COMPARE_DATA_HELP)]
    align: Literal["pairs", "medoid", "universe", "no"] = "pairs"
    """The alignment: each pair aligned with one another, or all networks aligned to their medoid or to the mean of
    their universe; or nothing, for a store that is aligned already."""
    points: int = 3
    """Networks on each line, both ends included; three are the midpoint alone."""
    loss: Loss = "cross-entropy"
    """The loss whose barrier is measured."""
    batch: int = 512
    """Examples per batch, for data from a file or a set."""
    on: Annotated[str, arg(help="Where pairs are compared, as for `regauge zoo train`.")] = "here"


@dataclass(frozen=True, kw_only=True)
class ZooMap(Sampled):
    """Draw networks as points in the plane, near one another where their orbits are near; and divide them."""

    by: Literal["orbits", "universe", "weights", "latent"] = "orbits"
    """Distances of orbits, every pair aligned by itself; of networks aligned to the mean of their universe, for many
    networks; of the weights as they are; or of the latent vectors of --autoencoder."""
    autoencoder: Path | None = None
    """File that `regauge learn autoencoder` wrote, for --by latent."""
    clusters: int = 1
    """Number of clusters into which the networks are divided, by the mean distance between clusters."""
    color: Annotated[str | None, arg(metavar="COLUMN")] = None
    """Color the networks by this column, for example validation_loss, instead of by their clusters."""
    on: Annotated[str, arg(help="Where the pairs of --by orbits are aligned, as for `regauge zoo train`.")] = "here"


ZooCommand = (
    Annotated[ZooTrain, subcommand("train", prefix_name=False)]
    | Annotated[ZooInfo, subcommand("info", prefix_name=False)]
    | Annotated[ZooImport, subcommand("import", prefix_name=False)]
    | Annotated[ZooExport, subcommand("export", prefix_name=False)]
    | Annotated[ZooVerify, subcommand("verify", prefix_name=False)]
    | Annotated[ZooNearest, subcommand("nearest", prefix_name=False)]
    | Annotated[ZooAlign, subcommand("align", prefix_name=False)]
    | Annotated[ZooCompare, subcommand("compare", prefix_name=False)]
    | Annotated[ZooMap, subcommand("map", prefix_name=False)]
)


@dataclass(frozen=True)
class Zoo:
    """Populations of networks: train, store, import and export them; align, compare and map them."""

    command: ZooCommand

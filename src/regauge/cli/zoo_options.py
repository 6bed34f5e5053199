"""What the commands on populations can be told. Nothing here imports torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg, subcommand

ON_HELP = (
    "Where the networks are trained: here, in this process; processes or processes:4 of this machine; dask or dask:4, "
    "a local cluster; or tcp://HOST:PORT of a running Dask scheduler. Each worker has one thread."
)
COMPARE_DATA_HELP = (
    "package.module:factory or file.py:factory that returns batches (inputs, targets), or an .npz or .safetensors file "
    "with the arrays inputs and targets; or a set that populations are trained on, such as breast-cancer or mnist: the "
    "examples that are kept from training."
)
Storage = Literal["float16", "bfloat16"] | None
Output = Annotated[Path, arg(aliases=["-o"])]


@dataclass(frozen=True)
class ZooTrain:
    """Train a population and store it; the same command goes on where an interrupted one stopped.

    Under torchrun (RANK, WORLD_SIZE) or in a job array of Slurm, each process takes its share of the shards.
    """

    config: Annotated[
        Positional[str],
        arg(
            metavar="CONFIG",
            help="A preset, such as uci-mlps, mnist-tiny-mlps, mnist-mlps, cifar10-mlps, cifar10-cnns, "
            "small-cnns-relu, sine-inrs or mnist-inrs; or package.module:factory or file.py:factory that returns a "
            "Config.",
        ),
    ]
    output: Output
    """Folder of the store."""
    networks: int | None = None
    """How many; as the config says where left out."""
    seed: int | None = None
    """Where all chance comes from; as the config says where left out."""
    on: Annotated[str, arg(help=ON_HELP)] = "here"
    shard: int | None = None
    """Networks of a shard, which one worker trains; by itself at most 512, and what is trained in some minutes."""
    device: str = "cpu"
    """Where they are trained: cpu, cuda or another device of torch."""
    storage: Storage = None
    """Keep the weights rounded to this, in half the bytes; as they are where left out."""


@dataclass(frozen=True)
class ZooInfo:
    """Print what a store holds: networks, columns, symmetry, bytes."""

    store: Positional[Path]
    """Folder of the store."""


@dataclass(frozen=True)
class ZooImport:
    """Bring networks from elsewhere into a store; a network with NaN or Inf is kept and marked."""

    source: Positional[Path]
    """Folder, zip file or HDF5 file."""
    output: Output
    """Folder of the store."""
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
    """Of the networks to take from the small CNN zoo, where there are several."""
    dataset: str | None = None
    """Name of the data set in an HDF5 file, "dataset" unless given."""
    storage: Storage = None
    """Keep the weights rounded to this, in half the bytes; as they are where left out."""


@dataclass(frozen=True)
class ZooExport:
    """Write networks of a store as files that other programs read."""

    store: Positional[Path]
    """Folder of the store."""
    output: Output
    """A new folder."""
    format: Literal["safetensors", "npy", "small-cnn-zoo", "dwsnets"] = "safetensors"
    """One file for each network; one array for all with a layout; or the layout of a public zoo."""
    where: Annotated[tuple[str, ...], arg(metavar="COLUMN=VALUE")] = ()
    """Only networks with these values, for example step=86."""
    final: bool = False
    """Only the last checkpoint of each trajectory that was not discarded."""


@dataclass(frozen=True)
class ZooVerify:
    """Read every byte of a store and compare the checksums; exit code 1 if a shard is damaged."""

    store: Positional[Path]
    """Folder of the store."""


@dataclass(frozen=True)
class ZooAlign:
    """Align all networks of a store to one, into another store; the same command goes on where it was interrupted.

    The network that they are aligned to is written into the folder of the new store.
    """

    store: Positional[Path]
    """Folder of the store."""
    output: Output
    """Folder of the new store."""
    to: Annotated[str, arg(metavar="ID|medoid|universe")] = "medoid"
    """The trajectory with this id, at its end; the medoid: the network nearest to all others; or the universe: the mean
    of networks that were aligned with one another."""
    sample: int = 64
    """Among so many networks the medoid is looked for, or the universe is made of them."""
    on: Annotated[str, arg(help="Where the shards are aligned, as for `regauge zoo train`.")] = "here"
    seed: int = 0
    """Where all chance comes from."""


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """Some networks of a store, and where a picture of them goes; shared by the commands that compare networks."""

    store: Positional[Path]
    """Folder of the store."""
    output: Output
    """The picture, .svg, .png or .pdf; the table goes to the same name with .csv."""
    networks: int = 100
    """How many, drawn at random: from the last checkpoints of all trajectories, or from those that --where names."""
    where: Annotated[tuple[str, ...], arg(metavar="COLUMN=VALUE")] = ()
    """Only networks with these values, for example step=86."""
    overwrite: bool = False
    """Replace the output and the table beside it if they exist."""
    seed: int = 0
    """Where all chance comes from."""


@dataclass(frozen=True, kw_only=True)
class ZooCompare(Sampled):
    """Measure the barriers between all pairs of networks, before and after alignment: a heat map and a table."""

    data: Annotated[str, arg(metavar="DATA", help=COMPARE_DATA_HELP)]
    align: Literal["pairs", "medoid", "universe", "no"] = "pairs"
    """What comes after: each pair aligned with one another, or all networks aligned to their medoid or to the mean of
    their universe; or nothing, for a store that is aligned already."""
    points: int = 3
    """Networks on each line, both ends included; three are the midpoint alone."""
    loss: Literal["cross-entropy", "mse"] = "cross-entropy"
    """What the barrier is one of."""
    batch: int = 512
    """Examples per batch, for data from a file or a set."""
    on: Annotated[str, arg(help="Where pairs are compared, as for `regauge zoo train`.")] = "here"


@dataclass(frozen=True, kw_only=True)
class ZooMap(Sampled):
    """Draw networks as points in the plane, near one another where their orbits are near; and divide them."""

    by: Literal["orbits", "universe", "weights"] = "orbits"
    """Distances of orbits, every pair aligned by itself; of networks aligned to the mean of their universe, for many
    networks; or of the weights as they are."""
    clusters: int = 1
    """Into so many the networks are divided, by the mean distance between clusters."""
    color: Annotated[str | None, arg(metavar="COLUMN")] = None
    """Color the networks by this column, for example validation_loss, instead of by their clusters."""
    on: Annotated[str, arg(help="Where the pairs of --by orbits are aligned, as for `regauge zoo train`.")] = "here"


ZooCommand = (
    Annotated[ZooTrain, subcommand("train", prefix_name=False)]
    | Annotated[ZooInfo, subcommand("info", prefix_name=False)]
    | Annotated[ZooImport, subcommand("import", prefix_name=False)]
    | Annotated[ZooExport, subcommand("export", prefix_name=False)]
    | Annotated[ZooVerify, subcommand("verify", prefix_name=False)]
    | Annotated[ZooAlign, subcommand("align", prefix_name=False)]
    | Annotated[ZooCompare, subcommand("compare", prefix_name=False)]
    | Annotated[ZooMap, subcommand("map", prefix_name=False)]
)


@dataclass(frozen=True)
class Zoo:
    """Populations of networks: train, store, import and export them; align, compare and map them."""

    command: ZooCommand

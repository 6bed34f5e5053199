"""Options of the commands on populations. Nothing here imports torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg, subcommand

from regauge.cli.options import Json, Output
from regauge.cli.store_options import KeptCheckpoints, NewStore, StoreFolder, Where
from regauge.cli.zoo_population_options import ZooAlign, ZooCompare, ZooMap, ZooNearest

ON_HELP = (
    "Where the networks are trained: here, in this process; processes or processes:4 of this machine; dask or dask:4, "
    "a local cluster; or tcp://HOST:PORT of a running Dask scheduler. Each worker has one thread."
)
Storage = Annotated[
    Literal["float16", "bfloat16"] | None,
    arg(help="Keep the weights rounded to this, in half the bytes; as they are where left out."),
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
    """Networks of a shard, which one worker trains; by default the work of some minutes, at most 512."""
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
    """Layout of the source: folder, dwsnets, nfn, deep-align, small-cnn-zoo, small-transformer-zoo, model-zoo-dataset,
    vit-model-zoo or hdf5, or one that another package adds."""
    template: str | None = None
    """Names below a folder, {id}.pt by default, for example {id}/step{step}.pt: what stands in braces becomes a
    column, * is anything in a name and ** anything at all. For trials of Ray Tune: the checkpoints to take."""
    beside: tuple[str, ...] = ()
    """Entries of a folder's checkpoints that are no parameters, for example label; they become columns."""
    model: Annotated[str | None, arg(metavar="MODEL")] = None
    """package.module:factory of the networks in a folder or HDF5 file; their symmetry is then found."""
    settings: str = "{}"
    """Arguments of the factory as JSON, for example '{"widths": [784, 10, 10]}'."""
    input_shape: tuple[str, ...] = ()
    """Shapes of the model's inputs, for example 2x784."""
    activation: str | None = None
    """Activation of the networks to take from the small CNN zoo, which has several."""
    dataset: str | None = None
    """Name of the data set in an HDF5 file, "dataset" by default."""
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

"""Options of several commands, and options of small commands. Nothing here imports torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from regauge.checkpoints.formats.file_formats import FORMATS

MODEL_HELP = (
    "The model: package.module:factory, file.py:factory, a folder with config.json in Hugging Face style, or a "
    "checkpoint of `regauge inr fit`. A factory takes no arguments and returns a module, (module, example_inputs), or "
    "(module, example_inputs, example_kwargs). If a checkpoint is such a folder or file, you can leave MODEL out."
)
CHECKPOINT_HELP = (
    f"A {', '.join(FORMATS['safetensors'].suffixes)} file, the .index.json of a sharded checkpoint, a "
    f"{'/'.join(FORMATS['torch'].suffixes)} file with a state dict, a folder with such a file, or one of "
    "torch.distributed. FILE:NAME is one of several networks in a file, such as b.pt:state_dict_ema. BASE+ADAPTER is a "
    "network with a LoRA adapter in PEFT's format. You can also give the folder of an adapter alone."
)
BATCHES_HELP = (
    "package.module:factory or file.py:factory that returns batches (inputs, targets), or an .npz or .safetensors file "
    "with the arrays inputs and targets. "
)
TEST_HELP = (
    "Data on which losses are measured, in the form of --data; they influence no choice. By default, if --data are "
    "used for a choice, such as a matching or statistics, a random half of them is kept for the losses."
)
DATA_HELP = BATCHES_HELP + "For networks that represent a signal: also a SIGNAL, as in `regauge inr fit`."


@dataclass(frozen=True)
class Existing:
    """A mark for options that name an existing file or folder, with the error sentence for a missing file or folder."""

    sentence: str


@dataclass(frozen=True)
class Endings:
    """A mark for outputs whose suffix determines the format, with the possible suffixes."""

    suffixes: tuple[str, ...]


PICTURES = Endings((".svg", ".png", ".pdf"))
CHECKPOINT = Existing("there is no checkpoint {path}; check the path")

Model = Annotated[str | None, arg(metavar="MODEL", help=MODEL_HELP)]
SymmetryFile = Annotated[
    Path | None,
    Existing("there is no symmetry {path}; `regauge discover MODEL -o {name}` writes one"),
    arg(help="Use this symmetry (JSON that `regauge discover -o` wrote) instead of discovering that of MODEL."),
]
Checkpoint = Annotated[Positional[Path], CHECKPOINT, arg(help=CHECKPOINT_HELP)]
Checkpoints = Annotated[tuple[Path, ...], CHECKPOINT, arg(metavar="A B [C ...]", help=CHECKPOINT_HELP)]
Output = Annotated[Path, arg(aliases=["-o"])]
MaybeOutput = Annotated[Path | None, arg(aliases=["-o"])]
Picture = Annotated[Path, PICTURES, arg(aliases=["-o"])]
MaybePicture = Annotated[Path | None, PICTURES, arg(aliases=["-o"])]
Overwrite = Annotated[bool, arg(help="Replace the output if it exists.")]
OverwriteAll = Annotated[
    bool,
    arg(
        help="Replace the output and the files written next to it if they exist. In a folder, only files of the "
        "checkpoint are replaced."
    ),
]
Seed = Annotated[int, arg(help="Seed of all random numbers.")]
Batch = Annotated[int, arg(help="Number of examples in a batch, for data from a file.")]
Test = Annotated[str | None, arg(metavar="DATA", help=TEST_HELP)]
Loss = Annotated[Literal["cross-entropy", "mse"], arg(help="The loss that is measured on the data.")]
Json = Annotated[bool, arg(help='Print the report as JSON, unrounded (page "interoperation" of the documentation).')]


class UsageError(ValueError):
    """An error that names conflicting options, whereas errors of the library name arguments."""


@dataclass(frozen=True)
class Held:
    """Settings that declare further tensors as structure, in addition to the structure that tracing finds."""

    keep: tuple[str, ...] = ()
    """Names or patterns of parameters that must stay as they are, such as fixed filters or tables of sines."""
    move: tuple[str, ...] = ()
    """Names or patterns of fixed buffers that are transformed together with the weights; "*" for all."""


@dataclass(frozen=True)
class ExampleInputs(Held):
    """Settings of tracing, including example inputs for models that provide none."""

    input_shape: tuple[str, ...] = ()
    """Shapes of the model's positional inputs, for example 2x3x32x32. The inputs are filled with random numbers."""
    input_dtype: tuple[str, ...] = ()
    """Dtypes of the positional inputs, for example int64; by default float32."""
    outputs: tuple[str, ...] = ()
    """Names of the model's outputs that must not change, for example logits; by default all output tensors."""
    retrace: bool = False
    """Trace the model of a folder again, even if an earlier run with the same config.json stored its symmetry."""


@dataclass(frozen=True)
class Written:
    """The form of the output, by default the form of the checkpoint from which other files are copied."""

    dtype: Annotated[Literal["float32", "bfloat16", "float16", "float64"] | None, arg(metavar="DTYPE")] = None
    """Dtype of the written floating-point tensors: float32, bfloat16, float16 or float64. config.json names it too."""
    shard_size: Annotated[str, arg(metavar="SIZE")] = ""
    """Largest size of one file in an output folder, for example 5GB."""


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Settings for the commands that transform or compare networks: the model of the checkpoints, and its symmetry."""

    model: Model = None
    symmetry: SymmetryFile = None
    inputs: Annotated[ExampleInputs, arg(name="")] = ExampleInputs()
    json: Json = False

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the model's outputs that must not change, and that are compared with the targets."""
        return self.inputs.outputs


@dataclass(frozen=True, kw_only=True)
class JudgedOptions(ModelOptions):
    """Settings of commands that choose between results by their loss on data, and the random seed."""

    test: Test = None
    loss: Loss = "cross-entropy"
    seed: Seed = 0


@dataclass(frozen=True)
class Demo:
    """Train small networks on handwritten digits, align and merge them, and write an HTML report."""

    out: Path = Path("out/demo")
    """Folder for the report, the checkpoints and the numbers. Files of an earlier demo are replaced."""
    seed: Seed = 0
    data: Literal["auto", "digits", "mnist"] = "auto"
    """digits are part of scikit-learn; mnist is read from the folder in the environment variable REGAUGE_DATA."""
    quick: bool = False
    """Train narrow networks for a few steps, only to see that everything works."""


@dataclass(frozen=True)
class Discover:
    """Find the symmetry of a model, print it as a table, and verify it numerically."""

    model: Annotated[Positional[str], arg(metavar="MODEL", help=MODEL_HELP)]
    output: MaybeOutput = None
    """Write the symmetry as JSON to this file."""
    page: Path | None = None
    """Write a page with a picture of the symmetry to this .html file."""
    overwrite: Overwrite = False
    meta: bool = False
    """Build the model without weights, for models larger than memory. The symmetry is then not verified."""
    skip_verification: bool = False
    """Skip the check, which applies random symmetry transformations and compares the outputs in float64."""
    inputs: Annotated[ExampleInputs, arg(name="")] = ExampleInputs()
    json: Json = False

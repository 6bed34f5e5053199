"""Options that several commands share, and those of small ones; nothing here imports torch: `--help` is quick."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from regauge.checkpoints.formats.file_formats import FORMATS

MODEL_HELP = (
    "package.module:factory, file.py:factory, a folder with config.json in Hugging Face style, or a checkpoint that "
    "`regauge inr fit` wrote. A factory takes no arguments and returns a module, or (module, example_inputs), or "
    "(module, example_inputs, example_kwargs). Checkpoints of the last two kinds need no MODEL."
)
CHECKPOINT_HELP = (
    f"{', '.join(FORMATS['safetensors'].suffixes)}, .index.json of a sharded checkpoint, "
    f"{'/'.join(FORMATS['torch'].suffixes)} with a state dict, or a folder with one of them or of torch.distributed. "
    "FILE:NAME is one of several networks in a file, such as b.pt:state_dict_ema. BASE+ADAPTER is a network with a "
    "LoRA adapter in a folder of PEFT's format; a folder of an adapter can also be given alone."
)
BATCHES_HELP = (
    "package.module:factory or file.py:factory that returns batches (inputs, targets), or an .npz or .safetensors file "
    "with the arrays inputs and targets. "
)
TEST_HELP = (
    "DATA that judge what --data chose, such as matching and statistics. Where left out and something is chosen by "
    "--data, half of its examples, drawn at random, judge and choose nothing."
)
DATA_HELP = BATCHES_HELP + "For networks that are signals also a SIGNAL, as `regauge inr fit` reads it."


@dataclass(frozen=True)
class Existing:
    """Marks options that name what must be there already, with the sentence that says that it is not."""

    sentence: str


@dataclass(frozen=True)
class Endings:
    """Marks outputs whose name says in which format they are written, with the endings that there are."""

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
        help="Replace the output and the files written next to it if they exist; in a folder only the checkpoint is "
        "replaced, and other files stay."
    ),
]
Seed = Annotated[int, arg(help="Seed of all random numbers.")]
Batch = Annotated[int, arg(help="Examples per batch, for data from a file.")]
Test = Annotated[str | None, arg(metavar="DATA", help=TEST_HELP)]
Loss = Annotated[Literal["cross-entropy", "mse"], arg(help="The loss on the data.")]
Json = Annotated[bool, arg(help='Print the report as JSON, unrounded (page "interoperation" of the documentation).')]


class UsageError(ValueError):
    """Options that do not go together, in a sentence that names them; the library names arguments instead."""


@dataclass(frozen=True)
class Held:
    """Tensors that are structure, in addition to those that the traced model shows."""

    keep: tuple[str, ...] = ()
    """Frozen parameters that are structure, as masks are, by names or patterns: tables of sines, fixed filters."""
    move: tuple[str, ...] = ()
    """Buffers that are moved like weights although no normalization fills them, by names or patterns; "*" for all."""


@dataclass(frozen=True)
class ExampleInputs(Held):
    """Settings of tracing; example inputs are for models that do not bring their own."""

    input_shape: tuple[str, ...] = ()
    """Shapes of the positional inputs, for example 2x3x32x32; normal noise, or small integers."""
    input_dtype: tuple[str, ...] = ()
    """Their dtypes, for example float32 or int64; float32 where left out."""
    outputs: tuple[str, ...] = ()
    """Names of the model's outputs that must not change, for example logits; all tensors where left out."""
    retrace: bool = False
    """Trace a folder's model anew, also where its symmetry is known from an earlier run with the same config.json."""


@dataclass(frozen=True)
class Written:
    """The form of the output; where left out, as in the checkpoint whose files it takes over."""

    dtype: Annotated[Literal["float32", "bfloat16", "float16", "float64"] | None, arg(metavar="DTYPE")] = None
    """Dtype to which floating-point tensors are rounded, once: float32, bfloat16, float16 or float64; also in
    config.json."""
    shard_size: Annotated[str, arg(metavar="SIZE")] = ""
    """Bytes in one file of an output folder at most, for example 5GB."""


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The model of checkpoints and its symmetry, for the commands that move or compare networks."""

    model: Model = None
    symmetry: SymmetryFile = None
    inputs: Annotated[ExampleInputs, arg(name="")] = ExampleInputs()
    json: Json = False

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the model's outputs that must not change, and that the data are compared with."""
        return self.inputs.outputs


@dataclass(frozen=True, kw_only=True)
class JudgedOptions(ModelOptions):
    """Settings of choices that data judge, and of chance."""

    test: Test = None
    loss: Loss = "cross-entropy"
    seed: Seed = 0


@dataclass(frozen=True)
class Demo:
    """Train small networks on handwritten digits, align and merge them, and write an HTML report."""

    out: Path = Path("out/demo")
    """Folder for the report, the checkpoints and the numbers; files of an earlier demo are replaced."""
    seed: Seed = 0
    data: Literal["auto", "digits", "mnist"] = "auto"
    """Digits ship with scikit-learn; MNIST is taken from the folder that REGAUGE_DATA names, if it is there."""
    quick: bool = False
    """Train narrow networks for a few steps: to see that everything works, not for the numbers."""


@dataclass(frozen=True)
class Discover:
    """Find the symmetry of a model, print it as a table, and verify it numerically."""

    model: Annotated[Positional[str], arg(metavar="MODEL", help=MODEL_HELP)]
    output: MaybeOutput = None
    """Write the symmetry as JSON to this file."""
    page: Path | None = None
    """Write a page with the picture of the symmetry to this file, .html."""
    overwrite: Overwrite = False
    meta: bool = False
    """Build the model on the meta device, without values: for models larger than memory. It is not verified then."""
    skip_verification: bool = False
    """Do not apply random elements and compare the outputs (in float64)."""
    inputs: Annotated[ExampleInputs, arg(name="")] = ExampleInputs()
    json: Json = False

"""Options of the commands. Nothing here imports torch, so that `--help` answers at once."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import Positional, arg
from tyro.extras import literal_type_from_choices

from regauge.alignment.table import METHODS
from regauge.checkpoints.formats.file_formats import FORMATS
from regauge.merging.table import RULES

MODEL_HELP = (
    "package.module:factory, file.py:factory, a folder with config.json in Hugging Face style, or a checkpoint that "
    "`regauge inr fit` wrote. A factory takes no arguments and returns a module, or (module, example_inputs), or "
    "(module, example_inputs, example_kwargs). Checkpoints of the last two kinds need no MODEL."
)
CHECKPOINT_HELP = (
    f"{', '.join(FORMATS['safetensors'].suffixes)}, .index.json of a sharded checkpoint, "
    f"{'/'.join(FORMATS['torch'].suffixes)} with a state dict, or a folder with one of them; FILE:NAME for one of "
    "several networks in a file, such as b.pt:state_dict_ema; BASE+ADAPTER for a network with a LoRA adapter in a "
    "folder of PEFT's format, or such folders alone."
)
BATCHES_HELP = (
    "package.module:factory or file.py:factory that returns batches (inputs, targets), or an .npz or .safetensors file "
    "with the arrays inputs and targets; "
)
RULE_HELP = (
    "How the aligned checkpoints are combined; docs/merging.md has the formulas. "
    + "; ".join(f"{name}: {row.help}" for name, row in RULES.items())
    + ". Those for task vectors need --base; slerp, karcher and multislerp may have one."
)
STATISTICS_HELP = (
    "the statistics of batch normalization are recomputed from them for every network, A and B too. DATA where left "
    "out."
)
TEST_HELP = (
    "DATA that judge what --data chose, such as matching and statistics. Where left out and something is chosen by "
    "--data, half of its examples, drawn at random, judge and choose nothing."
)
DATA_HELP = BATCHES_HELP + "for networks that are signals also a SIGNAL, as `regauge inr fit` reads it."

if TYPE_CHECKING:
    MethodName = str
    RuleName = str
else:
    MethodName = literal_type_from_choices(
        ["auto", *(name for name, row in METHODS.items() if row.takes != "joint"), "learned"]
    )
    RuleName = literal_type_from_choices(list(RULES))


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
Tokenizer = Annotated[str | None, arg(metavar="union|base|FOLDER")]
Settings = Annotated[tuple[str, ...], arg(metavar="SETTING ...")]
Seed = Annotated[int, arg(help="Seed of all random numbers.")]
Batch = Annotated[int, arg(help="Examples per batch, for data from a file.")]
Test = Annotated[str | None, arg(metavar="DATA", help=TEST_HELP)]
Loss = Literal["cross-entropy", "mse"]
Json = Annotated[bool, arg(help="Print the report as one JSON object, unrounded; docs/interoperation.md describes it.")]


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
    overwrite: Overwrite = False
    meta: bool = False
    """Build the model on the meta device, without values: for models larger than memory. It is not verified then."""
    skip_verification: bool = False
    """Do not apply random elements and compare the outputs (in float64)."""
    inputs: Annotated[ExampleInputs, arg(name="")] = ExampleInputs()
    json: Json = False


@dataclass(frozen=True, kw_only=True)
class Matching:
    """Settings of matching, and of streaming where networks do not fit in memory; for the commands that align."""

    model: Model = None
    symmetry: SymmetryFile = None
    method: MethodName = "auto"
    """How to match; docs/alignment.md tells them apart. Unless given: data where there are any, else weights; `merge`
    matches the weights of each network to the mean of the others, or to the base."""
    matcher: Annotated[Path | None, Existing("there is no matcher {path}; check the path"), arg(metavar="FILE")] = None
    """File that `regauge learn matching` wrote, for the method learned."""
    refine: bool = False
    """Continue from what the method finds by Sinkhorn re-basin on the loss halfway between two networks; needs data."""
    restarts: int = 0
    """Further matchings of weights from random starting points; the best is kept, by the loss where there is data."""
    statistic: Literal["correlation", "covariance", "product"] = "correlation"
    """What activations are compared by; product, which is not centered, is what Git Re-Basin published."""
    scales: Literal["balance", "recompute", "keep"] = "balance"
    """Match weights where the positive scales and invertible matrices of the networks are balanced, so that all take
    over those of A, and copies of A with moved running statistics these, too; the same without such copies; or keep
    all, so that values are moved and never multiplied (but by signs and rotations)."""
    data: Annotated[str | None, arg(metavar="DATA", help=DATA_HELP)] = None
    test: Test = None
    loss: Loss = "cross-entropy"
    """The loss on the data."""
    batch: Batch = 512
    overwrite: OverwriteAll = False
    seed: Seed = 0
    inputs: Annotated[ExampleInputs, arg(name="")] = ExampleInputs()
    written: Annotated[Written, arg(name="")] = Written()
    json: Json = False
    memory: Annotated[str, arg(metavar="SIZE")] = ""
    """How much to hold at once, for example 3GB; half of the machine's memory where left out. Networks that need more
    are read in sweeps over their files: matching looks at weights then, and networks are combined tensor by tensor."""
    dry_run: bool = False
    """Print what would be read, held and written, and stop."""
    resume: bool = False
    """Continue what an interrupted run left in OUT.partial; what is done in memory is done anew."""

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the model's outputs that must not change, and that the data are compared with."""
        return self.inputs.outputs


@dataclass(frozen=True)
class Align(Matching):
    """Move checkpoint B along its orbit, next to checkpoint A; the result computes the same function as B.

    The alignment is stored next to the output, as OUT.alignment.safetensors, for `regauge apply`. For folders in
    Hugging Face style, MODEL is A where left out, and a folder as output has the shards and the other files of B.
    """

    a: Checkpoint
    b: Checkpoint
    output: Output
    """Where the aligned B goes, a .safetensors file or a folder."""
    tokenizer: Tokenizer = None
    """The tokens of the aligned B and of A while they are compared: those of both, of A (base), or of one of the
    folders. Where B has the tokens of A with other numbers, it gets those of A by itself."""


@dataclass(frozen=True)
class Merge(Matching):
    """Align checkpoints with one another and merge them into one; a model card with the numbers is written next to it.

    The result is in the coordinates of the first checkpoint, or of the base. Statistics of batch normalization are
    averaged, and recomputed where there is data.
    """

    checkpoints: Positional[Checkpoints]
    output: Output
    """Where the merged checkpoint goes, a .safetensors file (the card goes to the same name with .md) or a folder."""
    rule: Annotated[RuleName, arg(help=RULE_HELP)] = "average"
    weights: Settings = ()
    """One for each checkpoint; equal where left out. This and the settings below are numbers, gradients over the depth
    (0,0.5,1), or differ by pieces of names, what holds for all others last (mlp=0.5/attn=0,1/0.3)."""
    base: Annotated[Path | None, CHECKPOINT, arg(metavar="CHECKPOINT")] = None
    """What the checkpoints were trained from; needed for task vectors."""
    scale: Annotated[str, arg(metavar="SETTING")] = ""
    """Factor of the sum of the task vectors, 1 unless given; of the checkpoint for passthrough."""
    density: Settings = ()
    """Share of the entries of each task vector that is kept: 0.2 by ties, all by dare-ties and sce, 0.5 by della, 0.1
    by breadcrumbs, unless given. One for all checkpoints, or one for each; so are the following."""
    drop: Settings = ()
    """Probability of an entry to be dropped by dare; 0.5 unless given."""
    epsilon: Settings = ()
    """How far della's probabilities to keep an entry differ from the density; 0.15 unless given."""
    gamma: Settings = ()
    """Share of the largest entries that breadcrumbs drops as outliers; 0.01 unless given."""
    reach: Annotated[str, arg(metavar="SETTING")] = ""
    """How far nearswap moves an entry at most; 0.0001 unless given."""
    normalize: Literal["auto", "yes", "no"] = "auto"
    """Whether task vectors are averaged with the weights or summed: averaged where signs are elected, unless given."""
    tokenizer: Tokenizer = None
    """The tokens of the result, where those of the folders differ: of all, of the first one, or of this one. Rows that
    a network lacks are taken from others; docs/recipes.md says which."""
    recipe: Annotated[Path | None, Existing("there is no recipe {path}; check the path"), arg(metavar="FILE")] = None
    """A mergekit YAML file that says what is merged and how, instead of CHECKPOINTS and the options above; models that
    differ by more than fine-tuning are aligned first. docs/recipes.md says what is understood."""


@dataclass(frozen=True)
class Canonicalize:
    """Bring a checkpoint to its canonical form: the same for all networks on its orbit, and of the same function.

    The element that does it is stored next to the output, as OUT.alignment.safetensors, for `regauge apply`.
    """

    checkpoint: Checkpoint
    output: Output
    """Where the canonical checkpoint goes, a .safetensors file or a folder."""
    model: Model = None
    symmetry: SymmetryFile = None
    reference: Annotated[Path | None, CHECKPOINT, arg(metavar="CHECKPOINT")] = None
    """Fix signs and order by alignment to this checkpoint of the same architecture, instead of sums and sorting."""
    overwrite: bool = False
    """Replace the output and its element if they exist."""
    memory: Annotated[str, arg(metavar="SIZE")] = ""
    """How much may be held at once, for example 3GB; half of the machine's memory where left out. The values of the
    checkpoint, in float64, must fit."""
    inputs: Annotated[ExampleInputs, arg(name="")] = ExampleInputs()
    written: Annotated[Written, arg(name="")] = Written()
    json: Json = False


@dataclass(frozen=True)
class Apply:
    """Apply a stored alignment to another checkpoint of the same architecture, or undo it.

    The checkpoint is read, moved and written tensor by tensor, so that it may be larger than memory.
    """

    alignment: Positional[Path]
    """File that `regauge align` stored next to its output: OUT.alignment.safetensors, or OUT.safetensors for short."""
    checkpoint: Checkpoint
    output: Output
    """Where the moved checkpoint goes, a .safetensors file or a folder."""
    inverse: bool = False
    """Undo the alignment instead."""
    overwrite: Overwrite = False
    written: Annotated[Written, arg(name="")] = Written()
    json: Json = False


@dataclass(frozen=True)
class Info:
    """Say what a checkpoint is: tensors, dtypes, sizes, the strings in its header, and where it comes from."""

    checkpoint: Checkpoint
    tensors: bool = False
    """List every tensor with its shape and dtype."""
    json: Json = False


@dataclass(frozen=True, kw_only=True)
class Judging:
    """Settings of running and judging networks, for the commands that evaluate points between them."""

    model: Model = None
    data: Annotated[str, arg(metavar="DATA", help=DATA_HELP)]
    test: Test = None
    loss: Loss = "cross-entropy"
    """The loss that is measured; accuracy too for the cross entropy."""
    batch: Batch = 512
    outputs: tuple[str, ...] = ()
    """Name of the model's output that is compared with the targets, for example logits; the first where left out."""
    overwrite: OverwriteAll = False
    json: Json = False


@dataclass(frozen=True, kw_only=True)
class Between(Judging):
    """Settings of judging networks that lie between others."""

    statistics: Annotated[str | None, arg(metavar="DATA", help=BATCHES_HELP + STATISTICS_HELP)] = None


@dataclass(frozen=True)
class Line(Between):
    """Evaluate a model along a path between two checkpoints: barrier, table and plot."""

    a: Checkpoint
    b: Checkpoint
    path: Literal["straight", "geodesic", "bezier", "chain"] = "straight"
    """The straight line; great circles on the unit spheres of scale-free weights; or a Bezier curve or a polygonal
    chain that is trained first. Align B to A before: no path removes what a symmetry explains."""
    points: int = 25
    """How many networks are evaluated, the ends included."""
    bends: int = 1
    """Control points of a bezier curve or chain."""
    train: Annotated[str | None, arg(metavar="DATA", help="What a bezier curve or chain is trained on.")] = None
    """DATA where left out."""
    steps: int = 300
    """Steps of that training."""
    lr: float = 1e-2
    """Its learning rate at the start."""
    seed: int = 0
    """Seed of its random numbers."""
    output: MaybePicture = None
    """Write the plot to this file, .svg, .png or .pdf, and the table to the same name with .csv."""
    held: Annotated[Held, arg(name="")] = Held()

    @property
    def trains_on_data(self) -> bool:
        """Whether a path is trained on DATA."""
        return self.train is None and self.path in ("bezier", "chain")


@dataclass(frozen=True)
class Plane(Between):
    """Evaluate a model over the plane through three checkpoints: a contour plot with the three marked, and a table.

    Distances in the plot are distances of the parameters. Its cost is told beforehand.
    """

    a: Checkpoint
    b: Checkpoint
    c: Checkpoint
    output: Picture
    """Where the plot goes, .svg, .png or .pdf; the table goes to the same name with .csv."""
    metric: Literal["loss", "accuracy"] = "loss"
    """What is drawn; the table has both."""
    resolution: int = 21
    """Points along the longer side of the grid."""
    margin: float = 0.2
    """How far the plot goes beyond the three networks, as a share of its longer side without."""


@dataclass(frozen=True)
class Repair(Judging):
    """Renormalize the activations of a merged checkpoint, whose variance averaging makes collapse.

    Every unit gets the mean and the standard deviation over DATA that it has in the endpoints (REPAIR), and running
    statistics of batch normalization are recomputed. Without endpoints only these are.
    """

    merged: Checkpoint
    output: Output
    """Where the repaired checkpoint goes, a .safetensors file or a folder."""
    endpoints: Checkpoints = ()
    """The checkpoints that were merged, aligned with one another; unaligned ones with --align."""
    align: bool = False
    """Match the weights of the endpoints to the merged checkpoint first, as they were when it was made of them."""
    weights: tuple[float, ...] = ()
    """Share of each endpoint; equal where left out."""
    always: bool = False
    """Write the repaired checkpoint even where its loss on the data that choose is higher than before."""
    held: Annotated[Held, arg(name="")] = Held()
    written: Annotated[Written, arg(name="")] = Written()


Options = Demo | Discover | Align | Merge | Canonicalize | Apply | Info | Line | Plane | Repair

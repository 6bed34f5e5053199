"""Options of `regauge align`, `regauge merge` and `regauge transport`."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import Positional, arg
from tyro.extras import literal_type_from_choices

from regauge.alignment import METHODS
from regauge.cli.options import (
    CHECKPOINT,
    DATA_HELP,
    Batch,
    Checkpoint,
    Checkpoints,
    Existing,
    JudgedOptions,
    Output,
    OverwriteAll,
    Written,
)
from regauge.merging import RULES

RULE_HELP = (
    'Rule that combines the aligned checkpoints (formulas: page "merging" of the documentation). '
    + ". ".join(f"{name}: {row.help}" for name, row in RULES.items())
    + ". Rules for task vectors need --base; for slerp, karcher and multislerp, --base is optional."
)

if TYPE_CHECKING:
    MethodName = str
    RuleName = str
else:
    MethodName = literal_type_from_choices(
        ["auto", *(name for name, row in METHODS.items() if row.takes != "joint"), "learned"]
    )
    RuleName = literal_type_from_choices(list(RULES))

Tokenizer = Annotated[str | None, arg(metavar="union|base|FOLDER")]
Settings = Annotated[tuple[str, ...], arg(metavar="SETTING ...")]


@dataclass(frozen=True, kw_only=True)
class Matching(JudgedOptions):
    """Settings of the commands that align: the method, and streaming for networks that do not fit in memory."""

    method: MethodName = "auto"
    """Method of matching (page "alignment" of the documentation). The default, auto, means data if you give --data, and
    weights otherwise. `merge` matches each network to the mean of the other networks, or to the base."""
    matcher: Annotated[Path | None, Existing("there is no matcher {path}; check the path"), arg(metavar="FILE")] = None
    """Matcher for --method learned: a file that `regauge learn matching` wrote."""
    refine: bool = False
    """After --method, lower the loss halfway between both networks by gradient descent (Sinkhorn); needs --data."""
    restarts: int = 0
    """Number of further matchings from random starting points. The best result is kept, with --data by the loss."""
    statistic: Literal["correlation", "covariance", "product"] = "correlation"
    """Statistic that compares activations. product is not centered; Git Re-Basin uses it."""
    scales: Literal["balance", "recompute", "keep"] = "balance"
    """Treatment of positive scales and invertible matrices. balance: scales are balanced for matching, and the result
    gets the scales of A. If B is a copy of A, the result also gets A's running statistics. recompute: like balance, but
    without running statistics. keep: B keeps its scales; only signs and rotations multiply its values."""
    rotate: Literal["auto", "always", "never"] = "auto"
    """Rotate the residual streams of transformers (always), or only reorder them (never). auto rotates if the networks
    still differ much after reordering, as networks from different seeds do."""
    untie: bool = False
    """Store head and embedding of a folder as separate tensors, which allows rotations; config.json is updated."""
    data: Annotated[str | None, arg(metavar="DATA", help=DATA_HELP)] = None
    batch: Batch = 512
    overwrite: OverwriteAll = False
    written: Annotated[Written, arg(name="")] = field(default_factory=Written)
    memory: Annotated[str, arg(metavar="SIZE")] = ""
    """Limit on memory, for example 3GB; by default half of the machine's memory. Larger networks are read in several
    passes over their files. Matching then uses only weights, and networks are combined tensor by tensor."""
    dry_run: bool = False
    """Only print how much would be read, kept in memory and written."""
    shared: bool = False
    """Share the work among all processes that torchrun or srun started with this command. OUT must be a folder."""
    resume: bool = False
    """Continue an interrupted run from OUT.partial. A run that fits in memory starts again."""


@dataclass(frozen=True)
class Align(Matching):
    """Transform checkpoint B so that its weights are close to those of A; the result computes the same function as B.

    The alignment is stored next to the output, as OUT.alignment.safetensors, for `regauge apply`. For folders in
    Hugging Face style, MODEL is A by default, and an output folder has the shards and the other files of B.
    """

    a: Checkpoint
    b: Checkpoint
    output: Output
    """The aligned B: a .safetensors file or a folder."""
    tokenizer: Tokenizer = None
    """The vocabulary of the aligned B: the tokens of both networks (union), of A (base), or of FOLDER. By default, if A
    and B have the same tokens with different ids, the result has the ids of A."""


@dataclass(frozen=True)
class Transport(Matching):
    """Apply the change that fine-tuning made from BASE_A to TUNED_A to another base: a later release, or another seed.

    The page "transport" of the documentation lists the modes. If TUNED_A is a LoRA adapter, so is the result.
    """

    base_a: Checkpoint
    tuned_a: Checkpoint
    base_b: Checkpoint
    output: Output
    """The fine-tuned B: a .safetensors file, or a folder with the files of BASE_B."""
    scale: float | None = None
    """Factor of the change. By default, the best factor on --data, or 1 without data."""
    steps: int = 0
    """Train the result on --data afterwards, for at most this number of steps."""


@dataclass(frozen=True)
class Merge(Matching):
    """Align checkpoints with one another and merge them into one; a model card with all numbers is written next to it.

    The result has the order of units of the first checkpoint, or of the base. Statistics of batch normalization are
    averaged, and recomputed if you give --data.
    """

    checkpoints: Positional[Checkpoints]
    output: Output
    """The merged checkpoint: a .safetensors file (the card gets the same name with .md) or a folder."""
    rule: Annotated[RuleName, arg(help=RULE_HELP)] = "average"
    weights: Settings = ()
    """One weight for each checkpoint; by default equal. Weights and settings are numbers, values to interpolate from
    first to last layer (0,0.5,1), or values by parts of names, with the last for all others (mlp=0.5/0.3)."""
    base: Annotated[Path | None, CHECKPOINT, arg(metavar="CHECKPOINT")] = None
    """The checkpoint from which the training of all others started; rules for task vectors need it."""
    scale: Annotated[str, arg(metavar="SETTING")] = ""
    """Factor of the sum of the task vectors, or of the checkpoint for the rule passthrough; 1 by default."""
    density: Settings = ()
    """Share of the entries of each task vector that is kept. Defaults: 0.2 for ties, 1 for dare-ties and sce, 0.5 for
    della, 0.1 for breadcrumbs. For this and the next settings, give one value, or one for each checkpoint."""
    drop: Settings = ()
    """Probability with which dare drops an entry; 0.5 by default."""
    epsilon: Settings = ()
    """Largest difference between the density and della's probabilities of keeping an entry; 0.15 by default."""
    gamma: Settings = ()
    """Share of the largest entries that breadcrumbs drops as outliers; 0.01 by default."""
    reach: Annotated[str, arg(metavar="SETTING")] = ""
    """Largest change of an entry by nearswap; 0.0001 by default."""
    normalize: Literal["auto", "yes", "no"] = "auto"
    """Average the weighted task vectors (yes) or sum them (no). auto averages for rules that elect signs."""
    tokenizer: Tokenizer = None
    """The vocabulary of the result if the folders have different tokens: all tokens (union), those of the base or first
    folder (base), or of FOLDER. Missing rows come from other networks (page "recipes" of the documentation)."""
    recipe: Annotated[Path | None, Existing("there is no recipe {path}; check the path"), arg(metavar="FILE")] = None
    """A YAML file of mergekit, in place of CHECKPOINTS and of options such as --rule. Models that are not fine-tunes of
    one base are aligned first. The page "recipes" of the documentation lists the keys."""

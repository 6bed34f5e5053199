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
    + ". Those for task vectors need --base; slerp, karcher and multislerp may have one."
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
    """Settings of matching, and of streaming where networks do not fit in memory; for the commands that align."""

    method: MethodName = "auto"
    """Method of matching (page "alignment" of the documentation). By default: data with --data, else weights. `merge`
    matches the weights of each network to the mean of the others, or to the base."""
    matcher: Annotated[Path | None, Existing("there is no matcher {path}; check the path"), arg(metavar="FILE")] = None
    """File that `regauge learn matching` wrote, for the method learned."""
    refine: bool = False
    """Continue from what the method finds by Sinkhorn re-basin on the loss halfway between two networks; needs data."""
    restarts: int = 0
    """Further matchings of weights from random starting points; the best is kept, with --data by the loss."""
    statistic: Literal["correlation", "covariance", "product"] = "correlation"
    """Statistic by which activations are compared; product, which is not centered, is what Git Re-Basin published."""
    scales: Literal["balance", "recompute", "keep"] = "balance"
    """Positive scales and invertible matrices. balance: weights are matched at balanced scales, and the result has
    those of A; copies of A with moved running statistics take these over, too. recompute: the same without that
    exception. keep: values are moved and never multiplied, except by signs and rotations."""
    rotate: Literal["auto", "always", "never"] = "auto"
    """Rotate residual streams behind the gains of norms, or reorder them: auto rotates where orders do not explain
    nearly all, as for networks from different seeds."""
    untie: bool = False
    """Give the tied head of a folder its own tensor: streams may then rotate, and config.json says so."""
    data: Annotated[str | None, arg(metavar="DATA", help=DATA_HELP)] = None
    batch: Batch = 512
    overwrite: OverwriteAll = False
    written: Annotated[Written, arg(name="")] = field(default_factory=Written)
    memory: Annotated[str, arg(metavar="SIZE")] = ""
    """Limit on memory, for example 3GB; half of the machine's memory where left out. Networks that need more are read
    in sweeps over their files. Matching then uses weights only, and networks are combined tensor by tensor."""
    dry_run: bool = False
    """Print what would be read, held and written, and stop."""
    shared: bool = False
    """Share the work with the other processes that torchrun or srun started with this command; OUT is a folder."""
    resume: bool = False
    """Continue an interrupted run from OUT.partial; a run in memory begins anew."""


@dataclass(frozen=True)
class Align(Matching):
    """Move checkpoint B along its orbit, next to checkpoint A; the result computes the same function as B.

    The alignment is stored next to the output, as OUT.alignment.safetensors, for `regauge apply`. For folders in
    Hugging Face style, MODEL is A where left out, and a folder as output has the shards and the other files of B.
    """

    a: Checkpoint
    b: Checkpoint
    output: Output
    """The aligned B: a .safetensors file or a folder."""
    tokenizer: Tokenizer = None
    """The tokens of the aligned B and of A while they are compared: those of both, of A (base), or of one of the
    folders. If B has the tokens of A with other numbers, it gets the numbers of A by default."""


@dataclass(frozen=True)
class Transport(Matching):
    """Carry the change of a fine-tune, from BASE_A to TUNED_A, to another base: a later release, or another seed.

    By weights, also streamed, or with --data (page "transport" of the documentation). A LoRA adapter gives an adapter.
    """

    base_a: Checkpoint
    tuned_a: Checkpoint
    base_b: Checkpoint
    output: Output
    """The fine-tuned B: a .safetensors file, or a folder with the files of BASE_B."""
    scale: float | None = None
    """Factor of the change; by default, one, or what --data choose."""
    steps: int = 0
    """Steps of training from there on --data at most."""


@dataclass(frozen=True)
class Merge(Matching):
    """Align checkpoints with one another and merge them into one; a model card with the numbers is written next to it.

    The result is in the coordinates of the first checkpoint, or of the base. Statistics of batch normalization are
    averaged, and with --data recomputed.
    """

    checkpoints: Positional[Checkpoints]
    output: Output
    """The merged checkpoint: a .safetensors file (the card gets the same name with .md) or a folder."""
    rule: Annotated[RuleName, arg(help=RULE_HELP)] = "average"
    weights: Settings = ()
    """One for each checkpoint; equal where left out. This and the settings below are numbers or gradients over the
    depth (0,0.5,1). They may differ by pieces of names, with the value for all others last (mlp=0.5/attn=0,1/0.3)."""
    base: Annotated[Path | None, CHECKPOINT, arg(metavar="CHECKPOINT")] = None
    """The checkpoint that the others were trained from; needed for task vectors."""
    scale: Annotated[str, arg(metavar="SETTING")] = ""
    """Factor of the sum of the task vectors, 1 by default; of the checkpoint for passthrough."""
    density: Settings = ()
    """Share of the entries of each task vector that is kept: 0.2 by ties, all by dare-ties and sce, 0.5 by della, 0.1
    by breadcrumbs, by default. One for all checkpoints, or one for each; so are the following."""
    drop: Settings = ()
    """Probability of an entry to be dropped by dare; 0.5 by default."""
    epsilon: Settings = ()
    """Range of della's probabilities to keep an entry around the density; 0.15 by default."""
    gamma: Settings = ()
    """Share of the largest entries that breadcrumbs drops as outliers; 0.01 by default."""
    reach: Annotated[str, arg(metavar="SETTING")] = ""
    """Largest move of an entry by nearswap; 0.0001 by default."""
    normalize: Literal["auto", "yes", "no"] = "auto"
    """Whether task vectors are averaged with the weights or summed: averaged where signs are elected, by default."""
    tokenizer: Tokenizer = None
    """The tokens of the result, where those of the folders differ: of all, of the first one, or of this one. Rows that
    a network lacks are taken from others (page "recipes" of the documentation)."""
    recipe: Annotated[Path | None, Existing("there is no recipe {path}; check the path"), arg(metavar="FILE")] = None
    """A mergekit YAML file with the models and the way of merging, instead of CHECKPOINTS and the options above. Models
    that differ by more than fine-tuning are aligned first. Keys: page "recipes" of the documentation."""

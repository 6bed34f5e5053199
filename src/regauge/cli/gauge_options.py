"""Options of `regauge gauge` and `regauge audit`. Nothing here imports torch, so that `--help` answers at once."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import arg

from regauge.cli.options import BATCHES_HELP, Batch, Checkpoint, JudgedOptions, ModelOptions, Output, Seed, Written


@dataclass(frozen=True)
class Gauge(JudgedOptions):
    """Move a checkpoint to where it rounds better: other weights, the same function, ready for any quantizer.

    The output loads as the checkpoint did. What was moved, how far outputs differ, and the rounding errors of
    all layers are written next to it: OUT.gauge.json and the page OUT.gauge.html, in a folder regauge.gauge.json
    and .html.
    """

    checkpoint: Checkpoint
    output: Output
    """The moved checkpoint: a .safetensors file or a folder."""
    method: Literal["best", "equalize", "smooth", "hadamard", "random", "learned"] = "best"
    """best: equalize, hadamard and learned are tried, and the one that loses least by rounding is kept. equalize:
    scales until ranges agree. smooth: scales between activations and weights, as AWQ searches them, which needs data.
    hadamard and random: rotations of the residual stream and of attention's values, queries and keys. learned: the same
    by descent on the rounding error, with --by function of scales, too (page "quantization" of the documentation)."""
    always: bool = False
    """Keep the moved network even where rounding loses more there than in the one that the checkpoint has."""
    data: Annotated[str | None, arg(metavar="DATA", help=BATCHES_HELP + "The loss after rounding then decides.")] = None
    batch: Batch = 16
    bits: int = 4
    """Bits of the rounding that a gauge is chosen for."""
    group: int = 0
    """Values that share a scale there; a whole row where left out."""
    steps: int = 100
    """Steps of the method learned; by function some 400 are of use."""
    by: Literal["weights", "function"] = "weights"
    """Objective of the method learned: the rounding error of the weights, or, with --data, the divergence of the
    rounded model's outputs from those of the model. The best is chosen on the last quarter of the batches."""
    mappings: Literal["llm-compressor", "autoawq"] | None = None
    """Move nothing: write the scale pairs that hold for the model to OUT, .json or .yaml, as this tool takes them."""
    untie: bool = False
    """Give a tied head of a folder its own tensor: the gain before it is then no obstacle to rotations. The output is
    larger by that tensor, and config.json says so."""
    overwrite: bool = False
    """Replace the output and the files next to it if they exist."""
    memory: Annotated[str, arg(metavar="SIZE")] = ""
    """Limit on memory, for example 4GB; half of the machine's memory where left out. For a checkpoint that needs more,
    only rotations are tried, tensor by tensor, and the model is not run."""
    written: Annotated[Written, arg(name="")] = field(default_factory=Written)


@dataclass(frozen=True)
class Audit(ModelOptions):
    """Try a table of scale pairs of a quantization tool on a model: which rows change the function, and what they miss.

    Each pair is scaled alone by random factors, and the model is run before and after, in float64.
    """

    checkpoint: Checkpoint
    mappings: Annotated[Path, arg(metavar="FILE")]
    """JSON or YAML: rows of smooth_layer and balance_layers (AWQ), or [balance layers, smooth layer] (SmoothQuant), or
    a recipe with these under mappings. Names are the ends of names of modules, or re: and a regular expression."""
    seed: Seed = 0

"""Options of `regauge gauge` and `regauge audit`. Nothing here imports torch, so that `--help` answers at once."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import arg

from regauge.cli.options import BATCHES_HELP, Batch, Checkpoint, JudgedOptions, ModelOptions, Output, Seed, Written


@dataclass(frozen=True)
class Gauge(JudgedOptions):
    """Prepare a checkpoint for quantization: change its weights but not its function, to make rounding errors smaller.

    The output loads like the input. A report lists the transformed groups, the change of the outputs, and the rounding
    errors of all layers: OUT.gauge.json and the page OUT.gauge.html, or regauge.gauge.json and .html in a folder.
    """

    checkpoint: Checkpoint
    output: Output
    """The transformed checkpoint: a .safetensors file or a folder."""
    method: Literal["best", "equalize", "smooth", "hadamard", "random", "learned"] = "best"
    """best: the best of equalize, hadamard and learned after rounding. equalize: scales that make the ranges of weights
    equal. smooth: scales between activations and weights, as in AWQ; needs --data. hadamard, random: rotations of the
    residual stream, values, queries and keys. learned: rotations of the same groups, learned by gradient descent, with
    --by function also scales (page "quantization" of the documentation)."""
    always: bool = False
    """Write the transformed network even if rounding damages it more than the original network."""
    data: Annotated[str | None, arg(metavar="DATA", help=BATCHES_HELP + "The loss selects the weights.")] = None
    batch: Batch = 16
    bits: int = 4
    """Number of bits of the rounding for which the weights are chosen."""
    group: int = 0
    """Number of consecutive weights that share a rounding scale; by default (0) a whole row."""
    steps: int = 100
    """Gradient steps of the method learned. With --by function, about 400 are useful."""
    by: Literal["weights", "function"] = "weights"
    """Objective of --method learned. weights: the rounding error of the weights. function: the divergence of the
    rounded model's outputs from the original outputs; needs --data, whose last quarter selects the best step."""
    mappings: Literal["llm-compressor", "autoawq"] | None = None
    """Change no weights. Write a table for this tool to OUT (.json or .yaml): the pairs of layers that it may scale."""
    untie: bool = False
    """Store the tied head of a folder as its own tensor, which allows rotations of the residual stream. The new tensor
    makes the output larger, and config.json is updated."""
    overwrite: bool = False
    """Replace the output and the files next to it if they exist."""
    memory: Annotated[str, arg(metavar="SIZE")] = ""
    """Limit on memory, for example 4GB; by default half of the machine's memory. If a checkpoint needs more, only
    rotations are tried, tensor by tensor, and the model is not run."""
    written: Annotated[Written, arg(name="")] = field(default_factory=Written)


@dataclass(frozen=True)
class Audit(ModelOptions):
    """Test the scaling table of a quantization tool: which rows change a model's function, and which layers they miss.

    The command scales each pair of layers by random factors and compares the model's outputs in float64.
    """

    checkpoint: Checkpoint
    mappings: Annotated[Path, arg(metavar="FILE")]
    """The table, JSON or YAML: rows with smooth_layer and balance_layers (AWQ), rows [balance layers, smooth layer]
    (SmoothQuant), or a recipe with such rows under mappings. Names are ends of module names, or re:EXPRESSION."""
    seed: Seed = 0

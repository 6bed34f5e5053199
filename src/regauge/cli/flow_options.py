"""Options of the commands on flows over weights. Nothing here imports torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg, subcommand

from regauge.cli.config_options import with_settings
from regauge.cli.learn_options import TRAINING, LearnRun
from regauge.cli.options import BATCHES_HELP, Json, Loss, Output, Seed
from regauge.cli.store_options import NewStore
from regauge.flow import FlowConfig, Representation

FLOW_HELP = "A flow that `regauge flow fit` wrote."
NET_HELP = (
    "The net that learns the velocity. perceptron (the default) and tokens are for aligned networks. message_passing, "
    "relational_attention, propagation and others of regauge.weightspace.LAYERS are equivariant to permutations of "
    "units. With --unaligned they also draw networks of other widths."
)
JUDGE_DATA_HELP = (
    f"Data to run networks on: {BATCHES_HELP}Or a set that populations are trained on, such as breast-cancer or "
    "mnist: the examples that are kept from training."
)


@dataclass(frozen=True, kw_only=True)
@with_settings(Representation, "scales head head_form components", head="PARAMETER", components="N")
@with_settings(FlowConfig, f"predicts gaussian=has_gaussian balance labels average {TRAINING}", labels="COLUMN")
class FlowFit(LearnRun):
    """Fit a flow, a generative model of networks, to the trained networks of a store.

    Networks are split by run. Those of the test runs are never read: `regauge flow judge` compares with them. An
    interrupted training continues with --resume.
    """

    stores: Annotated[
        Positional[tuple[Path, ...]], arg(metavar="STORE [...]", help="Folders of stores, all of one architecture.")
    ]
    output: Output
    """File of the flow, which ends in .safetensors."""
    unaligned: bool = False
    """Do not align networks to their common middle first: for equivariant nets, which then draw other widths, too."""
    aligned: bool = False
    """Align networks, as is done by default: earlier versions did not."""
    net: Annotated[str | None, arg(metavar="NET", help=NET_HELP)] = None
    layer_settings: Annotated[str, arg(metavar="JSON")] = "{}"
    """Settings of the layers as JSON."""
    width: int | None = None
    """Length of the vectors of units, or width of a perceptron; the default of the net by default."""
    depth: int | None = None
    """Number of layers; the default of the net by default."""
    data: Annotated[str | None, arg(metavar="DATA")] = None
    """Data on which the drawn networks of the epoch that is kept have the least loss; not those for testing."""
    loss: Loss = "cross-entropy"
    prior: Literal["full", "matched", "uniform", "plain", "initialization"] | None = None
    """Distribution at time 0. full: normal values with the covariances of aligned networks, the default for these.
    matched: with means and deviations alone. uniform: the same, but uniform on spheres. plain: with a deviation of 0.1.
    initialization: normal values matched to the initialization of the population."""
    coupling: Annotated[tuple[Literal["assignment", "alignment"], ...], arg(metavar="PART ...")] = ()
    """assignment: pair the starts and ends of a batch such that the sum of squared distances is least; alignment: align
    each end to its start."""
    thesis: Literal["no", "euclidean", "geometric"] = "no"
    """Fit with the settings of paper 000 (page "flows" of the documentation). geometric has a last layer of norm one
    and needs --head. Only --net, --layer-settings, --width, --depth and options of the training's length go with it."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Settings of drawing networks, for the commands that draw."""

    flow: Annotated[Positional[Path], arg(help=FLOW_HELP)]
    output: NewStore
    networks: int = 100
    """Number of networks that are drawn."""
    steps: int = 50
    """Steps of the solver."""
    label: str | None = None
    """One of the values of the column that `regauge flow fit --labels` named."""
    seed: Seed = 0
    json: Json = False


@dataclass(frozen=True, kw_only=True)
class FlowSample(Sampling):
    """Draw networks from a flow into a new store; the same command continues an interrupted one."""

    solver: Literal["heun", "euler", "runge_kutta", "thesis"] = "heun"
    """Heun's method evaluates the velocity twice in a step, Euler's once, Runge and Kutta's four times; thesis: the
    sampler of paper 000, for flows with --predicts end."""
    noise: float = 0.0
    """Amount of noise in each step, which leaves the distribution as it is; for the solver thesis, the deviation of the
    noise that it adds in late steps."""
    like: Annotated[Path | None, arg(metavar="STORE")] = None
    """Draw networks of the widths of this store's."""
    data: Annotated[str | None, arg(metavar="DATA")] = None
    """Data that choose: networks with the least loss are kept, and move where it falls; not those for testing."""
    keep: float = 0.1
    """The share of drawn networks that --data keeps."""
    loss: Loss = "cross-entropy"


@dataclass(frozen=True, kw_only=True)
class FlowGuide(Sampling):
    """Draw networks from a flow, guided by the gradient of a loss on DATA, into a new store.

    Prints their loss and accuracy next to those of three controls: networks drawn without guidance, the same after
    equally many gradient steps, and random networks after equally many.
    """

    data: Annotated[str, arg(metavar="DATA", help=JUDGE_DATA_HELP)]
    test: Annotated[str | None, arg(metavar="DATA")] = None
    """Data that losses and accuracies are measured on; --data where left out."""
    strength: float = 10.0
    """Sum of the learning rates of all steps: the guided step is the gradient times --strength / --steps."""
    start: float = 0.0
    """Time, from 0 to 1, before which there is no guidance."""
    dropout: float = 0.0
    """Share of the inputs' values that are set to zero, others in each step: DATA is then fitted less closely."""
    loss: Loss = "cross-entropy"
    batch: int = 512
    """Examples of DATA in a step; each step takes the next batch."""


@dataclass(frozen=True, kw_only=True)
class FlowJudge:
    """Compare drawn networks with held-out ones, and with networks that are made without a flow.

    Prints losses, accuracies and distances to training networks, and writes a page with these, a map of the drawn
    networks among the trained ones, and the calibration of their average.
    """

    flow: Annotated[Positional[Path], arg(help=FLOW_HELP)]
    samples: Annotated[Positional[Path], arg(metavar="SAMPLES")]
    """Folder of the store of drawn networks."""
    stores: Annotated[
        Positional[tuple[Path, ...]],
        arg(metavar="STORE [...]", help="Folders of the stores that the flow was fitted to."),
    ]
    output: Output
    """The page, .html; its numbers go to the same name with .json."""
    data: Annotated[str, arg(metavar="DATA", help=JUDGE_DATA_HELP)]
    loss: Loss = "cross-entropy"
    most: int = 1000
    """Largest number of drawn networks, and of held-out ones, that are compared."""
    seed: Seed = 0
    overwrite: bool = False
    """Replace the page and its numbers if they exist."""
    json: Json = False


FlowCommand = (
    Annotated[FlowFit, subcommand("fit", prefix_name=False)]
    | Annotated[FlowSample, subcommand("sample", prefix_name=False)]
    | Annotated[FlowGuide, subcommand("guide", prefix_name=False)]
    | Annotated[FlowJudge, subcommand("judge", prefix_name=False)]
)


@dataclass(frozen=True)
class Flow:
    """Flows, generative models of networks: fit one to trained networks, draw new networks, judge and guide them."""

    command: FlowCommand

"""Options of the commands on flows over weights. Nothing here imports torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg, subcommand

from regauge.cli.learn_options import LearnRun, LearnTraining
from regauge.cli.options import BATCHES_HELP, Json, Loss, Output, Seed
from regauge.cli.zoo_options import NewStore

FLOW_TRAINING = LearnTraining(weight_decay=1e-3)
FLOW_HELP = "What `regauge flow fit` wrote."
NET_HELP = (
    "What learns the velocity: message_passing, relational_attention, propagation or another of "
    "regauge.weightspace.LAYERS, for which the order of units means nothing; or tokens or perceptron, with "
    "--aligned."
)
JUDGE_DATA_HELP = (
    f"What networks are run on: {BATCHES_HELP}or a set that populations are trained on, such as breast-cancer or "
    "mnist: the examples that are kept from training."
)


@dataclass(frozen=True, kw_only=True)
class FlowFit(LearnRun):
    """Fit a flow to the networks of a store: a model from which new networks are drawn that nobody trained.

    Networks are split by run; those of the test runs are never read, so that `regauge flow judge` can compare with
    them. An interrupted training continues with --resume.
    """

    stores: Annotated[
        Positional[tuple[Path, ...]], arg(metavar="STORE [...]", help="Folders of stores of one architecture.")
    ]
    output: Output
    """Where the flow goes, a .safetensors file."""
    net: Annotated[str, arg(metavar="NET", help=NET_HELP)] = "message_passing"
    layer_settings: Annotated[str, arg(metavar="JSON")] = "{}"
    """Settings of the layers as JSON."""
    width: int = 32
    """Length of the vectors of units, or width of a perceptron."""
    depth: int = 4
    """Number of layers."""
    aligned: bool = False
    """Align networks to their middle first, for nets that read units in their order."""
    scales: Literal["sphere", "flat", "keep"] = "sphere"
    """Bring incoming weights to unit spheres where scales allow it, which changes no function, and let the flow follow
    the spheres (sphere) or not (flat); or keep them."""
    head: Annotated[str | None, arg(metavar="PARAMETER")] = None
    """Weight of the last layer, for --head-form."""
    head_form: Literal["keep", "direction", "unit"] = "keep"
    """Keep the last layer; separate its direction and the logarithm of its norm; or forget the norm, which changes the
    loss of networks but not their classes."""
    prior: Literal["matched", "uniform", "plain", "full", "initialization"] = "matched"
    """Where the flow begins: at normal values with the networks' means and deviations; the same, but uniform on
    spheres; at normal values with a deviation of 0.1; with all covariances of --aligned networks; or at random networks
    as the population began with."""
    coupling: Annotated[tuple[Literal["assignment", "alignment"], ...], arg(metavar="PART ...")] = ()
    """Pair the starts and ends of a batch by the least sum of squared distances; and align each end to its start."""
    predicts: Literal["velocity", "end"] = "velocity"
    """What the net learns: velocities, or where ways end."""
    gaussian: Literal["yes", "no"] = "yes"
    """Whether the net adds to what normal distributions have in closed form."""
    balance: float = 0.5
    """How much a tensor counts in the loss: the number of its values to this power."""
    labels: Annotated[str | None, arg(metavar="COLUMN")] = None
    """Networks are then drawn for one value of this column each."""
    average: float = 0.999
    """Decay of the moving average of the weights; 0 keeps the last weights."""
    thesis: Literal["no", "euclidean", "geometric"] = "no"
    """Fit as the thesis of the method did: predicted ends, early times, plain loss and prior; and for geometric with a
    last layer of norm one (--head). See docs/flows.md."""
    training: Annotated[LearnTraining, arg(name="")] = FLOW_TRAINING


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How networks are drawn; shared by the commands that do it."""

    flow: Annotated[Positional[Path], arg(help=FLOW_HELP)]
    output: NewStore
    networks: int = 100
    """How many networks are drawn."""
    steps: int = 50
    """Steps of the solver."""
    label: str | None = None
    """What they are drawn for: one of the values of the column of --labels."""
    seed: Seed = 0
    json: Json = False


@dataclass(frozen=True, kw_only=True)
class FlowSample(Sampling):
    """Draw networks that nobody trained, into a new store; the same command continues an interrupted one."""

    solver: Literal["heun", "euler", "runge_kutta", "thesis"] = "heun"
    """Heun's method takes two looks at the velocity in a step, Euler's one, Runge and Kutta's four; the thesis' sampler
    moves from the start towards predicted ends, for flows with --predicts end."""
    noise: float = 0.0
    """Follow the flow with noise that leaves the distribution as it is; for the thesis' sampler the deviation of what
    it adds late."""
    like: Annotated[Path | None, arg(metavar="STORE")] = None
    """Draw networks with the numbers of units of this store."""


@dataclass(frozen=True, kw_only=True)
class FlowGuide(Sampling):
    """Draw networks while the loss on DATA pulls them, into a new store.

    They are told beside networks drawn without it, and beside those that as many gradient steps make of these and of
    random ones.
    """

    data: Annotated[str, arg(metavar="DATA", help=JUDGE_DATA_HELP)]
    test: Annotated[str | None, arg(metavar="DATA")] = None
    """What losses and accuracies are measured on; DATA where left out."""
    strength: float = 10.0
    """Sum of the learning rates of all steps."""
    start: float = 0.0
    """Time, from 0 to 1, before which nothing pulls."""
    loss: Loss = "cross-entropy"
    """The loss on the data."""
    batch: int = 512
    """Examples of DATA of which the loss is taken in each step, another batch in each."""


@dataclass(frozen=True, kw_only=True)
class FlowJudge:
    """Tell how good and how new drawn networks are, beside held-out networks and what needs no flow.

    Writes a page with the losses, a map of the drawn networks among the trained ones, and the calibration of their
    average.
    """

    flow: Annotated[Positional[Path], arg(help=FLOW_HELP)]
    samples: Annotated[Positional[Path], arg(metavar="SAMPLES")]
    """Folder of the store of drawn networks."""
    stores: Annotated[
        Positional[tuple[Path, ...]],
        arg(metavar="STORE [...]", help="Folders of the stores that the flow was fitted to."),
    ]
    output: Output
    """Where the page goes, .html; its numbers go to the same name with .json."""
    data: Annotated[str, arg(metavar="DATA", help=JUDGE_DATA_HELP)]
    loss: Loss = "cross-entropy"
    """The loss that is measured."""
    most: int = 1000
    """Most drawn networks, and most held-out ones, that are looked at."""
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
    """Networks that nobody trained: fit a generative flow to a population, draw from it, judge and guide it."""

    command: FlowCommand

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
    "units. With --unaligned they also sample networks of other widths."
)
JUDGE_DATA_HELP = (
    f"Data on which networks are run: {BATCHES_HELP}Or the name of a data set, such as breast-cancer or mnist, whose "
    "examples outside the training set are used."
)


@dataclass(frozen=True, kw_only=True)
@with_settings(Representation, "scales head head_form components", head="PARAMETER", components="N")
@with_settings(FlowConfig, f"predicts gaussian=has_gaussian balance labels average {TRAINING}", labels="COLUMN")
class FlowFit(LearnRun):
    """Fit a flow, a generative model of networks, to the trained networks of a store.

    Networks are split by run. Networks of test runs are never read; `regauge flow judge` compares with them. An
    interrupted training continues with --resume.
    """

    stores: Annotated[
        Positional[tuple[Path, ...]], arg(metavar="STORE [...]", help="Folders of stores, all of one architecture.")
    ]
    output: Output
    """File of the flow, which ends in .safetensors."""
    unaligned: bool = False
    """Do not align networks to their common mean first. Equivariant nets can then also sample other widths."""
    aligned: bool = False
    """Align networks to their common mean first, which is the default. Earlier versions did not align by default."""
    net: Annotated[str | None, arg(metavar="NET", help=NET_HELP)] = None
    layer_settings: Annotated[str, arg(metavar="JSON")] = "{}"
    """Settings of the layers as JSON."""
    width: int | None = None
    """Length of the feature vector of each unit, or width of a perceptron. The default depends on --net."""
    depth: int | None = None
    """Number of layers. The default depends on --net."""
    data: Annotated[str | None, arg(metavar="DATA")] = None
    """Data that select the best epoch: its sampled networks have the lowest loss on DATA. Do not give test data."""
    loss: Loss = "cross-entropy"
    prior: Literal["full", "matched", "uniform", "plain", "initialization"] | None = None
    """Distribution at time 0. full (default for aligned networks): normal with their covariances. matched: normal with
    their means and deviations. uniform: like matched, but uniform on spheres. plain: normal with deviation 0.1.
    initialization: normal, matched to the initialization of the population."""
    coupling: Annotated[tuple[Literal["assignment", "alignment"], ...], arg(metavar="PART ...")] = ()
    """Pairs of prior samples and networks in a batch. assignment: minimize the sum of squared distances. alignment:
    align each network to its prior sample. By default pairs are independent."""
    thesis: Literal["no", "euclidean", "geometric"] = "no"
    """Fit with the settings of paper 000 (page "flows" of the documentation). geometric normalizes the last layer and
    needs --head. You can still choose --net, --layer-settings, --width, --depth and the length of the training."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Settings for the commands that sample networks."""

    flow: Annotated[Positional[Path], arg(help=FLOW_HELP)]
    output: NewStore
    networks: int = 100
    """Number of networks that are sampled."""
    steps: int = 50
    """Number of steps of the solver."""
    label: str | None = None
    """Sample networks with this value in the column that `regauge flow fit --labels` named."""
    seed: Seed = 0
    json: Json = False


@dataclass(frozen=True, kw_only=True)
class FlowSample(Sampling):
    """Sample networks from a flow into a new store; the same command continues after an interruption."""

    solver: Literal["heun", "euler", "runge_kutta", "thesis"] = "heun"
    """heun evaluates the velocity twice in a step, euler once, runge_kutta four times. thesis: the sampler of paper
    000, for flows with --predicts end."""
    noise: float = 0.0
    """Amount of noise in each step; this noise preserves the distribution. With --solver thesis, the standard deviation
    of noise in late steps."""
    like: Annotated[Path | None, arg(metavar="STORE")] = None
    """Sample networks with the widths of the networks in this store."""
    data: Annotated[str | None, arg(metavar="DATA")] = None
    """Keep the sampled networks with the lowest loss on DATA, and lower it further. Do not give test data."""
    keep: float = 0.1
    """Share of the sampled networks that is kept if you give --data."""
    loss: Loss = "cross-entropy"


@dataclass(frozen=True, kw_only=True)
class FlowGuide(Sampling):
    """Sample networks from a flow into a new store, guided by the gradient of a loss on DATA.

    The command prints the loss and accuracy of guided networks, of networks sampled without guidance, and of unguided
    and random networks after the same number of gradient steps.
    """

    data: Annotated[str, arg(metavar="DATA", help=JUDGE_DATA_HELP)]
    test: Annotated[str | None, arg(metavar="DATA")] = None
    """Data on which losses and accuracies are measured; by default the data of --data."""
    strength: float = 10.0
    """Sum of the learning rates of all steps: each step adds minus the gradient times --strength / --steps."""
    start: float = 0.0
    """Time, from 0 to 1, before which there is no guidance."""
    dropout: float = 0.0
    """Share of input values that are set to zero at random in each step, which reduces overfitting to DATA."""
    loss: Loss = "cross-entropy"
    batch: int = 512
    """Number of examples of DATA in a step. Each step uses the next batch."""


@dataclass(frozen=True, kw_only=True)
class FlowJudge:
    """Compare sampled networks with held-out networks, and with networks that were made without a flow.

    The command prints losses, accuracies and distances to training networks. It also writes a page with all numbers, a
    map of the sampled and trained networks, and the calibration of the sampled networks' average prediction.
    """

    flow: Annotated[Positional[Path], arg(help=FLOW_HELP)]
    samples: Annotated[Positional[Path], arg(metavar="SAMPLES")]
    """Folder of the store with the sampled networks."""
    stores: Annotated[
        Positional[tuple[Path, ...]],
        arg(metavar="STORE [...]", help="Folders of the stores that the flow was fitted to."),
    ]
    output: Output
    """The page (.html). The numbers of the page are written to a .json file of the same name."""
    data: Annotated[str, arg(metavar="DATA", help=JUDGE_DATA_HELP)]
    loss: Loss = "cross-entropy"
    most: int = 1000
    """Largest number of sampled networks, and of held-out networks, that are compared."""
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
    """Flows, generative models of networks: fit a flow to trained networks, and sample, guide and evaluate networks."""

    command: FlowCommand

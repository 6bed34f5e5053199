"""`regauge flow`: generative flows over the networks of a store."""

import sys
from collections.abc import Callable
from typing import Any

from regauge import flow
from regauge.cli.config_options import settings_of
from regauge.cli.flow_judge import judge
from regauge.cli.flow_options import Flow, FlowFit, FlowGuide, FlowJudge, FlowSample
from regauge.cli.flow_samples import guide, sample
from regauge.cli.learn_settings import layer_of, networks_of, run_of
from regauge.cli.options import UsageError
from regauge.cli.output import show_progress, show_status, tell_written
from regauge.cli.training_output import tell_training, training_output
from regauge.core.params import Params
from regauge.flow.nets import Net
from regauge.storage import Store
from regauge.storage.collection import Collection
from regauge.training.initialization import Initialization, draw_start, initialize
from regauge.weightspace import LAYERS

STARTS = 256
"""Initial networks that the prior is matched to."""


def run(options: Flow) -> None:
    """Run the command."""
    if "" not in sys.path:
        sys.path.insert(0, "")  # packages in the folder where the command is typed
    commands: dict[type, Callable[[Any], None]] = {FlowFit: fit, FlowSample: sample, FlowGuide: guide, FlowJudge: judge}
    commands[type(options.command)](options.command)


def fit(options: FlowFit) -> None:
    """Fit a flow, and write it."""
    config = config_of(options)
    with training_output(options.output, resume=options.resume, overwrite=options.overwrite) as place:
        with show_status("reading the columns"):
            collection, chosen = networks_of(options)
            starts = starts_of(collection, options.seed) if options.prior == "initialization" else None
        with show_progress() as progress:
            made = flow.fit(
                collection,
                config=config,
                **run_of(options, chosen, place),
                starts=starts,
                progress=progress,
            )
        chosen_by = {
            "where": options.where,
            "checkpoints": options.checkpoints,
            "split_by": options.split_by,
        }
        flow.save_flow(made.told(selection=chosen_by), place.path, overwrite=place.overwrite)
    tell_training(made.about, made.trained)
    tell_written(options.output)


def config_of(options: FlowFit) -> flow.FlowConfig:
    """The settings that were typed."""
    net, settings = net_of(options), settings_of(options, flow.FlowConfig)
    how = settings_of(options, flow.Representation)
    if options.thesis != "no":
        head = how["head"]
        bias = None if head is None else f"{head.rpartition('.')[0]}.bias"
        kept = {name: settings[name] for name in ("epochs", "patience", "seconds", "device")}
        return flow.thesis_config(options.thesis, head=head, head_bias=bias, net=net, **kept)
    return flow.FlowConfig(
        representation=flow.Representation(**how),
        prior=flow.PRIORS["matched" if options.prior == "initialization" else options.prior](),
        coupling=flow.Coupling(**dict.fromkeys(options.coupling, True)),
        net=net,
        **settings,
    )


def net_of(options: FlowFit) -> Net:
    """The net that learns the velocity."""
    if options.net in LAYERS:
        return flow.Metanetwork(layer_of(options.net, options.layer_settings), options.width, options.depth)
    plain = {"perceptron": flow.Perceptron, "tokens": flow.Tokens}
    if options.net not in plain:
        raise UsageError(f"there is no net {options.net!r}; there are {', '.join([*LAYERS, *plain])}")
    if not settings_of(options, flow.FlowConfig)["is_aligned"]:
        raise UsageError(f"the net {options.net} reads units in their order; add --aligned")
    made: Net = plain[options.net](options.width, options.depth)
    return made


def starts_of(collection: Collection, seed: int) -> Params:
    """Networks as the first store's training began with."""
    store = collection.members[0]
    assert isinstance(store, Store)
    made = store.about.get("training", {}).get("initialization")
    if made is None:
        raise UsageError(
            f"the store {str(store.folder)!r} does not record how its networks began; choose another --prior"
        )
    if not isinstance(made["scale"], int | float):
        raise UsageError("the networks began with weights of many scales; choose another --prior")
    if made.get("is_common"):
        raise UsageError("all networks began with the same weights, which are no prior; choose another --prior")
    start = Initialization(tuple(made["kinds"]), float(made["scale"]))
    dtype = store.architecture.layout[0].dtype
    return initialize(store.architecture, [draw_start(start, seed, k) for k in range(STARTS)], dtype)

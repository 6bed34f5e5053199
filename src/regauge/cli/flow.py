"""`regauge flow`: generative flows over the networks of a store."""

import sys
from collections.abc import Callable
from typing import Any

import torch

from regauge import flow
from regauge import weightspace as ws
from regauge.cli.config_options import settings_of
from regauge.cli.flow_options import Flow, FlowFit, FlowGuide, FlowJudge, FlowSample, Sampling
from regauge.cli.learn_settings import layer_of, networks_of, run_of
from regauge.cli.options import UsageError
from regauge.cli.output import show_progress, show_status, tell, tell_table, tell_written
from regauge.cli.result_files import require_results
from regauge.cli.training_output import tell_training, training_output
from regauge.cli.zoo_populations import task_on
from regauge.flow.stored_samples import compare_guidance, draw_initial
from regauge.report import write_page
from regauge.storage import Collection, Store

JUDGED = 512
"""Examples of DATA at a time where losses are measured."""
COLUMNS = {
    "name": "",
    "loss": "loss",
    "accuracy": "accuracy",
    "average_loss": "loss of average",
    "distance": "nearest",
    "copied": "copied",
    "repeated": "repeated",
    "spread": "spread",
    "two_sample": "two-sample",
}
"""Columns of the table of a judgement that is printed; the page has all."""


def run(options: Flow) -> None:
    """Run the command."""
    if "" not in sys.path:
        sys.path.insert(0, "")  # packages in the folder where the command is typed
    commands: dict[type, Callable[[Any], None]] = {FlowFit: fit, FlowSample: sample, FlowGuide: guide, FlowJudge: judge}
    commands[type(options.command)](options.command)


def fit(options: FlowFit) -> None:
    """Fit a flow, and write it."""
    config = config_of(options)
    with training_output(options) as place:
        with show_status("reading the columns"):
            collection, chosen = networks_of(options)
            store = collection.stores[0]
            starts = draw_initial(store, seed=options.seed) if options.prior == "initialization" else None
        with show_progress() as progress:
            made = flow.fit(
                collection, config=config, **run_of(options, chosen, place), starts=starts, progress=progress
            )
        chosen_by = {name: getattr(options, name) for name in ("where", "checkpoints", "split_by")}
        made.told(selection=chosen_by).save(place.path, overwrite=place.overwrite)
    tell_training(made)
    tell_written(options.output)


def config_of(options: FlowFit) -> flow.FlowConfig:
    """The settings that were typed."""
    settings, how = settings_of(options, flow.FlowConfig), settings_of(options, flow.Representation)
    net = net_of(options, is_aligned=settings["is_aligned"])
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


def net_of(options: FlowFit, *, is_aligned: bool) -> Any:
    """The net that learns the velocity."""
    if options.net in ws.LAYERS:
        return flow.Metanetwork(layer_of(options.net, options.layer_settings), options.width, options.depth)
    plain = {"perceptron": flow.Perceptron, "tokens": flow.Tokens}
    if options.net not in plain:
        raise UsageError(f"there is no net {options.net!r}; there are {', '.join([*ws.LAYERS, *plain])}")
    if not is_aligned:
        raise UsageError(f"the net {options.net} reads units in their order; add --aligned")
    return plain[options.net](options.width, options.depth)


def sample(options: FlowSample) -> None:
    """Draw networks into a store."""
    like = None if options.like is None else Store.open(options.like)
    how: dict[str, Any] = {"solver": options.solver, "noise": options.noise}
    with show_progress() as progress:
        target = flow.sample_store(
            options.flow, options.output, **drawn_of(options), **how, like=like, about=how, progress=progress
        )
    tell_store(target)


def guide(options: FlowGuide) -> None:
    """Draw networks with guidance into a store, and tell what it did."""
    drawn, made = drawn_of(options), flow.load_flow(options.flow)
    if made.architecture is None:
        raise UsageError(
            "the flow was fitted to networks of no store; their architecture has no name, sample in Python"
        )
    with show_status("reading the data"):
        task = task_on(made.architecture, options.data, options.loss, options.batch)
        test = task if options.test is None else task_on(made.architecture, options.test, options.loss, JUDGED)

    def guidance() -> flow.Guidance:
        return flow.Guidance(flow.BatchLoss(task, options.dropout), options.strength, options.start)

    about = {name: getattr(options, name) for name in ("data", "strength", "start", "dropout", "loss", "batch")}
    with show_progress() as progress:
        target = flow.sample_store(
            options.flow, options.output, **drawn, solver="euler", guide=guidance, about=about, progress=progress
        )
    tell_store(target)
    with show_status("drawing and training networks to compare with"):
        drawn.pop("networks")
        rows = compare_guidance(made, target.read(slice(None)), guidance, test, **drawn)
    tell_table("scores", rows)


def drawn_of(options: Sampling) -> dict[str, Any]:
    """The settings with which networks are drawn, with the label as the column has it."""
    if options.networks < 1:
        raise UsageError(f"--networks is {options.networks}; draw one at least")
    known = {} if options.label is None else {str(value): value for value in flow.load_flow(options.flow).classes}
    if options.label is not None and options.label not in known:
        raise UsageError(f"--label {options.label!r} is none of {', '.join(known) or 'no labels'}")
    label = None if options.label is None else known[options.label]
    return {"networks": options.networks, "steps": options.steps, "seed": options.seed, "label": label}


def tell_store(target: Store) -> None:
    """Tell what was written."""
    count = int((~torch.as_tensor(target.rows["is_finite"].astype(bool))).sum())
    folder = str(target.folder)
    tell(f"written: {folder}: {len(target)} networks", written=[folder], networks=len(target))
    if count:
        tell(f"{count} of them have NaN or Inf; take more steps, or train the flow longer")


def judge(options: FlowJudge) -> None:
    """Judge drawn networks."""
    if not options.stores:
        raise UsageError("no store of trained networks is named; give those that the flow was fitted to")
    require_results(options.output, overwrite=options.overwrite)
    with show_status("reading"):
        made, samples = flow.load_flow(options.flow), Store.open(options.samples)
        task = task_on(samples.architecture, options.data, options.loss, JUDGED)
    with show_status("judging"):
        found = flow.judge_store(
            made,
            samples,
            Collection.open(options.stores),
            task,
            most=options.most,
            generator=torch.Generator().manual_seed(options.seed),
        )
    results = {
        **found.results(),
        "flow": str(options.flow),
        "samples": str(options.samples),
        "store": ", ".join(map(str, options.stores)),
        **{name: made.about[name] for name in ("networks", "settings", "history", "best", "ended")},
        "seed": options.seed,
    }
    numbers = write_page(results, options.output)
    tell(
        " ".join(found.verdict),
        **{name: results[name] for name in ("verdict", "is_working", "is_copier", "is_collapsed")},
    )
    tell_table("scores", [{label: score[name] for name, label in COLUMNS.items()} for score in results["scores"]])
    tell_written(options.output, numbers)

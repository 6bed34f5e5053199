"""`regauge flow`: generative flows over the networks of a store."""

import warnings
from typing import Any

import torch

from regauge import flow
from regauge import weightspace as ws
from regauge.cli.config_options import settings_of
from regauge.cli.flow_options import FlowFit, FlowGuide, FlowJudge, FlowSample, Sampling
from regauge.cli.learn_settings import layer_of, networks_of, run_of
from regauge.cli.options import UsageError
from regauge.cli.output import show_progress, show_status, tell, tell_table, tell_written, warn
from regauge.cli.result_files import require_results
from regauge.cli.training_output import tell_training, training_output
from regauge.cli.zoo_populations import task_on
from regauge.flow.stored_samples import compare_guidance, draw_initial, require_architecture
from regauge.report import write_page
from regauge.storage import Collection, Store

JUDGED = 512
"""The number of examples of DATA that are evaluated at a time."""
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
"""The columns of a judgement's table that the command prints. The page has all columns."""


def fit(options: FlowFit) -> None:
    """Fit a flow, and write the flow."""
    config = config_of(options)
    with training_output(options) as place:
        with show_status("reading the columns"):
            collection, chosen = networks_of(options)
            store = collection.stores[0]
            starts = draw_initial(store, seed=options.seed) if options.prior == "initialization" else None
        with show_progress() as progress, warnings.catch_warnings():
            warnings.showwarning = lambda message, *_, **__: warn(str(message))
            task = None if options.data is None else task_on(store.architecture, options.data, options.loss, JUDGED)
            run = run_of(options, chosen, place)
            made = flow.fit(collection, config=config, task=task, starts=starts, progress=progress, **run)
        chosen_by = {name: getattr(options, name) for name in ("where", "checkpoints", "split_by")}
        made.told(selection=chosen_by).save(place.path, overwrite=place.overwrite)
    tell_training(made)
    tell_written(options.output)


def config_of(options: FlowFit) -> flow.FlowConfig:
    """Return the settings that the user typed."""
    settings, how = settings_of(options, flow.FlowConfig), settings_of(options, flow.Representation)
    is_aligned = options.aligned or not options.unaligned
    if options.thesis != "no":
        head = how["head"]
        bias = None if head is None else f"{head.rpartition('.')[0]}.bias"
        kept = {name: settings[name] for name in ("epochs", "patience", "seconds", "device")}
        net = net_of(options, options.net or "relational_attention", is_aligned=False, width=64, depth=5)
        return flow.thesis_config(options.thesis, head=head, head_bias=bias, net=net, **kept)
    priors = {**flow.PRIORS, "initialization": flow.MatchedGaussian}
    return flow.FlowConfig(
        representation=flow.Representation(**how),
        prior=None if options.prior is None else priors[options.prior](),
        coupling=flow.Coupling(**dict.fromkeys(options.coupling, True)),
        net=net_of(options, options.net or "perceptron", is_aligned=is_aligned),
        is_aligned=is_aligned,
        **settings,
    )


def net_of(options: FlowFit, name: str, *, is_aligned: bool, **sizes: int) -> Any:
    """Return the net that learns the velocity. Sizes that the user typed replace the sizes in `sizes`."""
    sizes |= {key: value for key in ("width", "depth") if (value := getattr(options, key)) is not None}
    if name in ws.LAYERS:
        return flow.Metanetwork(layer_of(name, options.layer_settings), **sizes)
    plain = {"perceptron": flow.Perceptron, "tokens": flow.Tokens}
    if name not in plain:
        raise UsageError(f"there is no net {name!r}; choose from {', '.join([*ws.LAYERS, *plain])}")
    if not is_aligned:
        raise UsageError(f"the net {name} needs aligned networks; drop --unaligned, or choose --net message_passing")
    return plain[name](**sizes)


def sample(options: FlowSample) -> None:
    """Sample networks, and write them to a store."""
    like = None if options.like is None else Store.open(options.like)
    how: dict[str, Any] = {"solver": options.solver, "noise": options.noise}
    chosen = dict(how)
    if options.data is not None:
        architecture = require_architecture(flow.load_flow(options.flow))
        chosen |= {"task": task_on(architecture, options.data, options.loss, JUDGED), "keep": options.keep}
        how |= {"data": options.data, "loss": options.loss, "keep": options.keep}
    with show_progress() as progress:
        target = flow.sample_store(
            options.flow, options.output, **drawn_of(options), **chosen, like=like, about=how, progress=progress
        )
    tell_store(target)


def guide(options: FlowGuide) -> None:
    """Sample networks with guidance, write them to a store, and report the effect of guidance."""
    drawn, made = drawn_of(options), flow.load_flow(options.flow)
    with show_status("reading the data"):
        architecture = require_architecture(made)
        task = task_on(architecture, options.data, options.loss, options.batch)
        test = task if options.test is None else task_on(architecture, options.test, options.loss, JUDGED)

    def guidance() -> flow.Guidance:
        return flow.Guidance(flow.BatchLoss(task, options.dropout), options.strength, options.start)

    about = {name: getattr(options, name) for name in ("data", "strength", "start", "dropout", "loss", "batch")}
    with show_progress() as progress:
        target = flow.sample_store(
            options.flow, options.output, **drawn, solver="euler", guide=guidance, about=about, progress=progress
        )
    tell_store(target)
    with show_status("sampling and training networks for comparison"):
        drawn.pop("networks")
        rows = compare_guidance(made, target.read(slice(None)), guidance, test, **drawn)
    tell_table("scores", rows)


def drawn_of(options: Sampling) -> dict[str, Any]:
    """Return the settings for sampling networks, with the label in the dtype of its column."""
    if options.networks < 1:
        raise UsageError(f"--networks is {options.networks}; it must be at least 1")
    known = {} if options.label is None else {str(value): value for value in flow.load_flow(options.flow).classes}
    if options.label is not None and options.label not in known:
        raise UsageError(f"--label {options.label!r} is none of {', '.join(known) or 'no labels'}")
    chosen = {name: getattr(options, name) for name in ("networks", "steps", "seed")}
    return chosen | {"label": known.get(options.label or "")}


def tell_store(target: Store) -> None:
    """Report what was written."""
    tell(f"written: {target.folder}: {len(target)} networks", written=[str(target.folder)], networks=len(target))
    if count := int((~torch.as_tensor(target.rows["is_finite"].astype(bool))).sum()):
        tell(f"{count} of them have NaN or Inf; increase --steps, or train the flow longer")


def judge(options: FlowJudge) -> None:
    """Judge sampled networks."""
    if not options.stores:
        raise UsageError("no store of trained networks is named; give the stores that the flow was fitted to")
    require_results(options.output, overwrite=options.overwrite)
    with show_status("reading"):
        made, samples = flow.load_flow(options.flow), Store.open(options.samples)
        task = task_on(samples.architecture, options.data, options.loss, JUDGED)
    with show_status("judging"):
        chance, collection = torch.Generator().manual_seed(options.seed), Collection.open(options.stores)
        found = flow.judge_store(made, samples, collection, task, most=options.most, generator=chance)
    results = {
        **found.results(),
        "flow": str(options.flow),
        "samples": str(options.samples),
        "store": ", ".join(map(str, options.stores)),
        **{name: made.about[name] for name in ("networks", "settings", "history", "best", "ended")},
        "seed": options.seed,
    }
    told = {name: results[name] for name in ("verdict", "is_working", "is_copier", "is_collapsed")}
    tell(" ".join(found.verdict), **told)
    tell_table("scores", [{label: score[name] for name, label in COLUMNS.items()} for score in results["scores"]])
    tell_written(options.output, write_page(results, options.output))


COMMANDS = {FlowFit: fit, FlowSample: sample, FlowGuide: guide, FlowJudge: judge}

"""`regauge flow sample` and `guide`: networks drawn from a flow, into a store."""

import hashlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from regauge import flow
from regauge.cli.flow_options import FlowGuide, FlowSample, Sampling
from regauge.cli.options import UsageError
from regauge.cli.output import show_progress, show_status, tell, tell_table
from regauge.cli.zoo_populations import task_on
from regauge.core.params import Params
from regauge.core.rounding import round_to
from regauge.core.symmetry import Symmetry
from regauge.core.task import Task
from regauge.flow.guiding import descend
from regauge.storage import Store
from regauge.storage.architecture import Architecture
from regauge.training.initialization import Initialization, draw_start, initialize
from regauge.training.settings import derive_seed

AT_ONCE = 256
"""Networks of a shard."""
TESTED = 512
"""Examples of a batch of DATA that losses are measured on."""


def sample(options: FlowSample) -> None:
    """Draw networks into a store."""
    made, architecture = read_flow(options)
    if options.like is not None:
        other = Store.open(options.like)
        made, architecture = made.resize(other.require_symmetry()), other.architecture
    label = label_of(options, made)
    settings = {"solver": options.solver, "noise": options.noise}

    def draw(count: int, generator: torch.Generator) -> Params:
        return made.sample(
            count,
            generator=generator,
            steps=options.steps,
            solver=options.solver,
            noise=options.noise,
            label=label,
        )

    tell_store(fill(options, architecture, made.networks.symmetry, settings, draw, label))


def guide(options: FlowGuide) -> None:
    """Draw networks with guidance into a store, and tell what it did."""
    made, architecture = read_flow(options)
    label = label_of(options, made)
    with show_status("reading the data"):
        task = task_on(architecture, options.data, options.loss, options.batch)
        tested = task if options.test is None else task_on(architecture, options.test, options.loss, TESTED)
    settings = {name: getattr(options, name) for name in ("data", "strength", "start", "dropout", "loss", "batch")}

    def draw(count: int, generator: torch.Generator) -> Params:
        guidance = flow.Guidance(flow.BatchLoss(task, options.dropout), options.strength, options.start)
        return made.sample(
            count, generator=generator, steps=options.steps, solver="euler", guidance=guidance, label=label
        )

    target = fill(options, architecture, made.networks.symmetry, settings, draw, label)
    tell_store(target)
    with show_status("drawing and training networks to compare with"):
        generator = torch.Generator().manual_seed(derive_seed(options.seed, "plain"))
        plain = made.sample(options.networks, generator=generator, steps=options.steps, solver="euler", label=label)
        starts = [draw_start(Initialization(), options.seed, k) for k in range(options.networks)]
        random = initialize(architecture, starts, next(iter(plain.values())).dtype)
        steps = max(1, round(options.steps * (1 - options.start)))
        trained = partial(descend, flow.BatchLoss(task, options.dropout), steps=steps, rate=options.strength / steps)
        kinds = {
            "guided": target.read(slice(None)),
            "without guidance": plain,
            f"without guidance, then {steps} gradient steps": trained(plain),
            f"random, then {steps} gradient steps": trained(random),
        }
        rows = [{"": name, **_scores(tested, params)} for name, params in kinds.items()]
    tell_table("scores", rows)


def read_flow(options: Sampling) -> tuple[flow.Flow, Architecture]:
    """The flow, and the architecture of its networks."""
    if options.networks < 1:
        raise UsageError(f"--networks is {options.networks}; draw one at least")
    made = flow.load_flow(options.flow)
    if made.architecture is None:
        raise UsageError(
            "the flow was fitted to networks of no store, so that their architecture has no name; sample in Python"
        )
    return made, made.architecture


def label_of(options: Sampling, made: flow.Flow) -> Any:
    """The class that networks are drawn for, as the column has it."""
    if options.label is None:
        return None
    known = {str(value): value for value in made.classes}
    if options.label not in known:
        raise UsageError(f"--label {options.label!r} is none of {', '.join(known) or 'no labels'}")
    return known[options.label]


def fill(
    options: Sampling,
    architecture: Architecture,
    symmetry: Symmetry,
    settings: dict[str, Any],
    draw: Callable[[int, torch.Generator], Params],
    label: Any,
) -> Store:
    """Draw networks into a store, shard by shard, each from a seed of its own; or what such a store lacks."""
    about = {
        "kind": "sampled",
        "flow": hashlib.sha256(options.flow.read_bytes()).hexdigest(),
        "networks": options.networks,
        "steps": options.steps,
        "label": options.label,
        "seed": options.seed,
        **settings,
    }

    def open_target() -> Store:
        return Store.create(options.output, architecture, symmetry, about=about)

    dtypes = {spec.name: spec.dtype for spec in architecture.layout}
    target = open_target() if options.output.exists() else None
    with show_progress() as progress:
        advance = progress("sampling", options.networks)
        for name, start, count in shards_of(options.networks):
            if target is None or not target.has(name):
                made = draw(count, torch.Generator().manual_seed(derive_seed(options.seed, "sample", start)))
                known = {"step": 0} if label is None else {"step": 0, "label": label}
                rows = [{"id": start + k, **known} for k in range(count)]
                if target is None:
                    target = open_target()
                target.append({n: round_to(tensor, dtypes[n], n) for n, tensor in made.items()}, rows, name=name)
            advance(count)
    return open_target()


def shards_of(networks: int) -> Iterator[tuple[str, int, int]]:
    """The name, the first network and the number of networks of each shard."""
    for start in range(0, networks, AT_ONCE):
        yield f"{start:08d}", start, min(AT_ONCE, networks - start)


def tell_store(target: Store) -> None:
    """Tell what was written."""
    count = int((~torch.as_tensor(target.rows["is_finite"].astype(bool))).sum())
    folder = str(target.folder)
    tell(f"written: {folder}: {len(target)} networks", written=[folder], networks=len(target))
    if count:
        tell(f"{count} of them have NaN or Inf; take more steps, or train the flow longer")


def _scores(task: Task, params: Params) -> dict[str, float]:
    """Mean loss and accuracy."""
    return {name: float(values.mean()) for name, values in task.evaluate_each(params).items()}

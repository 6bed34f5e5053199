"""Sampling of networks from a flow into a store, and evaluation of guidance."""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from regauge.core.arguments import check_arguments
from regauge.core.params import Params, round_to
from regauge.core.progress import Progress, no_progress
from regauge.core.task import Task
from regauge.flow.flow import Flow
from regauge.flow.flow_files import load_flow
from regauge.flow.guiding import BatchLoss, descend
from regauge.flow.sampling import Guidance, Solver
from regauge.storage.architecture import Architecture
from regauge.storage.store import Store
from regauge.training.initialization import Initialization, draw_start, initialize
from regauge.training.settings import derive_seed

NETWORKS_OF_SHARD = 256
"""The number of networks in a shard. Each shard is sampled with its own seed."""
STARTS = 256
"""The number of initial networks to which a prior is matched."""


@check_arguments
def sample_store(
    path: str | Path,
    output: str | Path,
    *,
    networks: int = 100,
    steps: int = 50,
    solver: Solver | Literal["thesis"] = "heun",
    noise: float = 0.0,
    guide: Callable[[], Guidance] | None = None,
    like: Store | None = None,
    label: Any = None,
    task: Task | None = None,
    keep: float = 0.1,
    seed: int = 0,
    about: Mapping[str, Any] | None = None,
    progress: Progress = no_progress,
) -> Store:
    """Sample networks, and write them to a store. After an interruption, only missing networks are sampled.

    Args:
        path: The file of the flow, which was fitted to networks of a store.
        output: The path of the store's folder.
        networks: The number of networks.
        steps: The number of solver steps.
        solver: See `Flow.sample`, also for `noise`, `label`, `task` and `keep`. The share `keep` applies to each block
            of 256 networks, not to all networks together.
        noise: The amount of noise in each step.
        guide: A function that makes the guidance of each shard.
        like: A store of networks with other widths. The sampled networks then have the widths of these networks.
        label: The class label on which the networks are conditioned.
        seed: The seed of all random numbers.
        about: Additional facts that are written to the store. An interrupted run is continued only if its store
            contains the same facts.

    Raises:
        FileExistsError: The store contains other networks.
        ValueError: The flow has no architecture, or cannot sample networks with the widths of `like`.
    """
    flow = load_flow(path)
    architecture = require_architecture(flow)
    if like is not None:
        flow, architecture = flow.resize(like.require_symmetry()), like.architecture
    kept = {
        "kind": "sampled",
        "flow": hashlib.sha256(Path(path).read_bytes()).hexdigest(),
        "networks": networks,
        "steps": steps,
        "label": None if label is None else str(label),
        "seed": seed,
        **(about or {}),
    }

    def open_target() -> Store:
        return Store.create(output, architecture, flow.networks.symmetry, about=kept)

    dtypes = {spec.name: spec.dtype for spec in architecture.layout}
    target = open_target() if Path(output).exists() else None
    advance = progress("sampling", networks)
    for name, start, count in _shards_of(networks):
        if target is None or not target.has(name):
            made = flow.sample(
                count,
                generator=torch.Generator().manual_seed(derive_seed(seed, "sample", start)),
                steps=steps,
                solver=solver,
                noise=noise,
                guidance=None if guide is None else guide(),
                label=label,
                task=task,
                keep=keep,
            )
            known = {"step": 0} if label is None else {"step": 0, "label": label}
            rows = [{"id": start + k, **known} for k in range(count)]
            # The output is opened only when there are samples, so settings with errors leave no folder.
            target = target or open_target()
            target.append({n: round_to(tensor, dtypes[n], n) for n, tensor in made.items()}, rows, name=name)
        advance(count)
    return open_target()


@check_arguments
def compare_guidance(
    flow: Flow,
    guided: Mapping[str, Tensor],
    guide: Callable[[], Guidance],
    task: Task,
    *,
    steps: int = 50,
    label: Any = None,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Return mean scores on a task, for guided networks, for networks sampled without guidance, and for networks made
    without a flow.

    The networks without guidance are sampled from the same flow. For comparison, gradient descent on the guidance loss,
    with the same number of steps, is applied to sampled networks and to random networks.

    Args:
        flow: The flow.
        guided: Networks that were sampled with guidance.
        guide: A function that makes the guidance, whose loss is a `BatchLoss`.
        task: The task that evaluates the networks.
        steps: The number of solver steps. Pass the values of `steps`, `label` and `seed` with which `guided` was
            sampled.
        label: The class label on which the networks are conditioned.
        seed: The seed of all random numbers.

    Returns:
        Rows that contain the kind of networks, under the key "", and the mean of each score.
    """
    count = len(next(iter(guided.values())))
    generator = torch.Generator().manual_seed(derive_seed(seed, "plain"))
    plain = flow.sample(count, generator=generator, steps=steps, solver="euler", label=label)
    dtype = next(iter(plain.values())).dtype
    random = _draw(require_architecture(flow), Initialization(), seed, count, dtype)

    def train(params: Params) -> Params:
        guidance = guide()
        assert isinstance(guidance.loss, BatchLoss)
        done = max(1, round(steps * (1 - guidance.start)))
        return descend(guidance.loss, params, steps=done, rate=guidance.strength / done)

    done = max(1, round(steps * (1 - guide().start)))
    kinds = {
        "guided": guided,
        "without guidance": plain,
        f"without guidance, then {done} gradient steps": train(plain),
        f"random, then {done} gradient steps": train(random),
    }
    return [
        {"": name, **{key: float(values.mean()) for key, values in task.evaluate_each(params).items()}}
        for name, params in kinds.items()
    ]


def draw_initial(store: Store, *, seed: int = 0, count: int = STARTS) -> Params:
    """Sample initial networks of a store's population, for the argument `starts` of `fit`.

    Raises:
        ValueError: The store does not describe the initialization, or the networks were not initialized independently.
    """
    made = store.about.get("training", {}).get("initialization")
    if made is None:
        raise ValueError(
            f"the store {str(store.folder)!r} does not record the initialization of its networks; choose another prior"
        )
    if not isinstance(made["scale"], int | float):
        raise ValueError("the networks were initialized at different scales; choose another prior")
    if made.get("is_common"):
        raise ValueError("all networks have the same initial weights, which are no distribution; choose another prior")
    start = Initialization(tuple(made["kinds"]), float(made["scale"]))
    return _draw(store.architecture, start, seed, count, store.architecture.layout[0].dtype)


def require_architecture(flow: Flow) -> Architecture:
    """Return the architecture of the networks that a flow samples.

    Raises:
        ValueError: The flow was not fitted to networks of a store.
    """
    if flow.architecture is None:
        raise ValueError("the flow was not fitted to a store, so it does not know the architecture; call `Flow.sample`")
    return flow.architecture


def _draw(
    architecture: Architecture, initialization: Initialization, seed: int, count: int, dtype: torch.dtype
) -> Params:
    return initialize(architecture, [draw_start(initialization, seed, k) for k in range(count)], dtype)


def _shards_of(networks: int) -> Iterator[tuple[str, int, int]]:
    """Yield the name, the index of the first network and the number of networks of each shard."""
    for start in range(0, networks, NETWORKS_OF_SHARD):
        yield f"{start:08d}", start, min(NETWORKS_OF_SHARD, networks - start)

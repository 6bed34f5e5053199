"""Judgement of networks in a store that were sampled from a flow."""

import numpy as np
import torch

from regauge.core.arguments import check_arguments
from regauge.core.task import Judge
from regauge.flow.fitting import divide
from regauge.flow.flow import Flow
from regauge.flow.judgement import Judgement
from regauge.flow.judging import judge
from regauge.learn.populations import spread
from regauge.storage.collection import Collection
from regauge.storage.store import Store

MOST_JUDGED = 1000
"""The largest number of sampled networks, and of held-out networks, that are compared."""


@check_arguments
def judge_store(
    flow: Flow,
    samples: Store,
    stores: Collection,
    evaluate: Judge,
    *,
    most: int = MOST_JUDGED,
    generator: torch.Generator | None = None,
) -> Judgement:
    """Compare stored networks with the training networks and held-out networks of a flow; see `judge`.

    Args:
        flow: The flow. The facts about the flow's training determine the training networks and the splits.
        samples: The sampled networks.
        stores: The stores to which the flow was fitted.
        evaluate: A task, or a function of one network's parameters.
        most: The largest number of sampled networks, and of held-out networks, that are compared.
        generator: The random generator. Default: a generator with seed 0.

    Raises:
        ValueError: The flow was fitted to other stores.
    """
    known = {"checkpoints": flow.about.get("checkpoints"), **flow.about.get("selection", {})}
    is_last = known.get("final", known["checkpoints"] == "last")  # earlier versions stored this
    chosen = stores.find(known.get("where", ()), "last" if is_last else "all")
    parts = divide(stores, chosen, split_by=known.get("split_by") or None)
    counts = {name: len(part) for name, part in parts.items()}
    if counts != flow.about["networks"]:
        raise ValueError(
            f"the flow was fitted to {flow.about['networks']['train']} networks, but these stores have "
            f"{counts['train']} training networks; name the stores that it was fitted to"
        )
    return judge(
        samples.read(spread(np.arange(len(samples)), most)),
        stores.read(parts["train"]),
        stores.read(spread(parts["test"], most)),
        stores.symmetry(0),
        evaluate,
        generator=generator,
    )

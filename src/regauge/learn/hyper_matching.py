"""Hyper-matching: a hypernetwork maps the weights of B to a network that has a low-loss linear path from A."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from regauge.connect.straighten import FlatLine, LineTrainingConfig, first_names, train_end
from regauge.core.arguments import check_arguments
from regauge.core.given import given_or_seed
from regauge.core.params import Params, require_alike
from regauge.core.progress import Progress, no_progress
from regauge.core.task import Task
from regauge.training import AdamW, Optimizer
from regauge.training.descent import OnStep
from regauge.weightspace.hypernetwork import HyperNetwork


@dataclass(frozen=True, kw_only=True)
class HyperMatchingConfig(LineTrainingConfig):
    """Settings of `hyper_match`; see `LineTrainingConfig`. One step corresponds to one epoch of the paper.

    The paper's initial learning rate is 1e-4, which corresponds to a largest learning rate of 2.5e-3 in
    `HyperMatchingConfig`. For networks of width 64, training with 2.5e-3 works as well as with the default.

    Attributes:
        embedding: Length of the decoder's embeddings of rows.
        is_residual: Whether the output of the hypernetwork is added to the weights of B. Adding the weights of B is a
            departure from the paper.

    References:
        Paper 003, section 3.4.
    """

    steps: int | None = 1000
    batch: int | None = 10_000
    optimizer: Optimizer = field(default_factory=lambda: AdamW(lr=1e-3))
    code: int = 1024
    widths: tuple[int, ...] = (512, 512, 1024, 1024)
    embedding: int = 64
    hidden: int = 512
    is_residual: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.code, self.embedding, self.hidden, *self.widths) <= 0:
            raise ValueError(f"{self} cannot train: code, widths, embedding and hidden must be positive")

    def network(self, like: Mapping[str, Tensor], generator: torch.Generator | None = None) -> HyperNetwork:
        """Return the untrained hypernetwork."""
        return HyperNetwork(
            like,
            is_residual=self.is_residual,
            code=self.code,
            widths=self.widths,
            embedding=self.embedding,
            hidden=self.hidden,
            generator=generator,
        )


@check_arguments
def hyper_match(
    params_a: Mapping[str, Tensor],
    params_b: Mapping[str, Tensor],
    task: Task,
    config: HyperMatchingConfig | None = None,
    *,
    generator: torch.Generator | None = None,
    progress: Progress = no_progress,
    on_step: OnStep | None = None,
) -> FlatLine:
    """Train a hypernetwork on one pair: it maps the weights of B to a network with a low-loss linear path from A.

    The batch normalization of the hypernetwork always uses the statistics of the rows of B. The hypernetwork reads only
    one network, B. The hypernetwork is therefore only another parametrization of the result, while `straighten` trains
    the weights directly.

    Args:
        params_a: The network at the fixed endpoint of the path, which is not changed.
        params_b: The network that the hypernetwork reads, which is not changed.
        task: Module, batches and loss. The module is an MLP whose hidden layers have equal widths.
        generator: Random generator for the hypernetwork, the examples and the points on the path. Default: a generator
            with seed 0.
        on_step: A function that is called after each step with a `regauge.training.State`: the number of the step, the
            loss and the learning rate.

    Raises:
        ValueError: The networks have different parameters, contain NaN or Inf, or are not MLPs with hidden layers of
            equal width. The task has no batches. The error is also raised if the loss is not finite.

    References:
        Paper 003, section 3.4.
    """
    generator = given_or_seed(generator)
    config = config or HyperMatchingConfig()
    require_alike(params_a, params_b)
    first_names(task, params_b)
    read = {name: tensor.detach() for name, tensor in params_b.items()}
    network = config.network(read, generator).to(next(iter(read.values()))).train()

    def write(weights: Params) -> Params:
        made = torch.func.functional_call(network, weights, (read,))
        return {name: made[name] for name in read}

    start = dict(network.named_parameters())
    return train_end(
        *(params_a, params_b, task, config, start, write), generator=generator, progress=progress, on_step=on_step
    )

"""Networks in files, opened for comparison under the tensor names and with the symmetry of one model."""

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypedDict, Unpack

import torch

from regauge.checkpoints.checkpoint import Checkpoint
from regauge.checkpoints.formats.state_dicts import match
from regauge.checkpoints.job import open_job
from regauge.checkpoints.memory_limit import MemoryLimit, resident
from regauge.checkpoints.names.from_transformers import name_by
from regauge.checkpoints.output import Output
from regauge.comparison.common import find_common
from regauge.comparison.compare_networks import compare
from regauge.comparison.comparison import Comparison
from regauge.core.arguments import check_arguments
from regauge.core.progress import Progress
from regauge.core.symmetry import Symmetry
from regauge.core.task import Task
from regauge.hub import Model, Networks, Values, bring_together, model_with, name_model, open_model, open_networks

NO_TRACING: Mapping[str, Any] = MappingProxyType({})


class ComparisonSetting(TypedDict, total=False):
    """The keyword arguments of `rg.compare`, except the references and the memory limit."""

    task: Task | None
    draws: int
    generator: torch.Generator | None
    out: Output | str | Path | None
    exact: bool
    progress: Progress


@dataclass(frozen=True)
class Relatives:
    """Networks in files that can be compared with one another, as `open_relatives` returns them.

    Attributes:
        networks: The checkpoints, opened with the model and the symmetry of the first checkpoint. The remaining
            checkpoints may have other widths, vocabularies or numbers of layers.
        limit: The memory limit.
        is_streamed: Whether the networks stay on disk because they exceed the memory limit.
        note: A sentence that states which tokens are compared; empty if the networks have the same tokens.
    """

    networks: Networks
    limit: MemoryLimit
    is_streamed: bool
    note: str = ""

    def read_other(self, checkpoint: Checkpoint) -> Checkpoint:
        """Open a checkpoint with other shapes than the first checkpoint, under the tensor names of the symmetry.

        Raises:
            ValueError: The checkpoint has no comparable part in common with the first checkpoint, or lacks single
                tensors.
        """
        symmetry, first = self.networks.symmetry, self.networks.checkpoints[0]
        named = name_by(checkpoint, symmetry)
        if find_common(first, named, symmetry) is None:
            match(named.on_meta(), first.on_meta(), named.label, first.label)
        return named if self.is_streamed else named.with_params({name: named[name] for name in named})

    def can_compare(self, a: Checkpoint, b: Checkpoint) -> bool:
        """Return whether two networks have a common part on which the symmetry acts."""
        return find_common(a, b, self.networks.symmetry, has_widths=not self.is_streamed) is not None

    def compare(self, a: Checkpoint, b: Checkpoint, **setting: Unpack[ComparisonSetting]) -> Comparison:
        """Compare two of the opened networks as `rg.compare` does, with the same keyword arguments.

        Tensors that are read for one comparison are not kept in memory.
        """
        return compare(copy(a), copy(b), self.networks.symmetry, memory=self.limit, **setting)


@check_arguments
def open_relatives(
    paths: Sequence[str | Path],
    model: Model | str | Path | None = None,
    *,
    symmetry: Symmetry | None = None,
    tracing: Mapping[str, Any] = NO_TRACING,
    memory: int | str | MemoryLimit | None = None,
    data: bool = False,
) -> Relatives:
    """Open networks for comparison, with the symmetry of the first network.

    If vocabularies differ, only the common tokens are kept.

    Args:
        paths: Two or more checkpoints.
        model: The model of the first network, or its name. Default: the model is found as in `rg.open_networks`.
        symmetry: The symmetry. Default: the symmetry of the model.
        tracing: Further settings of `rg.open_model`, if the model is given by name.
        memory: The memory limit: a number of bytes, or text such as "2GB". Default: half of the machine's memory.
        data: Whether the caller will run the model on data. Running the model requires all networks in memory and with
            the same shapes.

    Raises:
        FileNotFoundError: A checkpoint does not exist.
        ValueError: The symmetry is unknown, a checkpoint is damaged or has no common part with the first checkpoint, or
            the model cannot be run with all checkpoints.
    """
    limit = MemoryLimit(MemoryLimit.of(memory).nbytes, base=resident())
    job = open_job(paths, len(paths) - 1, memory=limit)
    assert job is not None
    if job.is_streamed and data:
        raise ValueError(f"`data=...` runs the model and {job.needs_memory}")
    united = bring_together(job.checkpoints, is_shared=True)
    first, *others = united.networks
    alike = [one for one in others if _shapes(one) == _shapes(first)]
    if data and (united.files or len(alike) < len(others)):
        raise ValueError(
            "`data=...` needs one model for all networks, but their tensors or tokens differ; leave it out"
        )
    values: Values = "never" if job.is_streamed else "always" if data else "if small"
    with model_with(None if model is None or isinstance(model, Model) else str(model), united) as name:
        if name is None and symmetry is None and model is None:
            name = name_model(first)
        if not isinstance(model, Model) and name is not None:
            model = open_model(name, **tracing, values=values)
        found = open_networks([first, *alike], model, symmetry=symmetry, streamed=job.is_streamed)
        if isinstance(model, Model) and data:
            _ = model.module  # Build the module now, because its folder may be temporary.
    result = Relatives(found, limit, job.is_streamed, united.note)
    named = iter(found.checkpoints[1:])
    rest = (next(named) if one in alike else result.read_other(one) for one in others)
    return replace(result, networks=replace(found, checkpoints=(found.checkpoints[0], *rest)))


def _shapes(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    return {name: one.shape for name, one in checkpoint.stored.items()}

"""The weight change of a fine-tune, transformed by an element to fit another base, in memory or in files."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import cast

import torch
from torch import Tensor

from regauge.alignment import Method
from regauge.alignment.representatives import Rotate
from regauge.alignment.streamed.job import StreamedJob, plan_job
from regauge.checkpoints.checkpoint import require_alike
from regauge.checkpoints.job import FileJob
from regauge.checkpoints.memory_limit import large_blocks_returned
from regauge.checkpoints.representative_checkpoint import MovedCheckpoint
from regauge.core.arguments import check_arguments
from regauge.core.element import Element
from regauge.core.families import row_ranges
from regauge.core.params import VALUES, Params, round_to
from regauge.core.progress import Progress, no_progress
from regauge.core.symmetry import Symmetry
from regauge.core.task import Task
from regauge.merging.carried_adapter import GivenAdapter
from regauge.merging.extract_adapter import publish_adapter
from regauge.merging.rule import PIECE, small_piece

COPIES = 8
"""The number of float64 copies of a chunk during a transfer, in which three networks are read and transformed."""
RELATED = 0.8
"""The smallest cosine between an aligned base and base B at which the change is expected to transfer without data.

In measurements, networks from two random seeds had cosines of 0.44 to 0.64, and two releases of one network had a
cosine of 0.99.
"""


@dataclass(frozen=True)
class CarriedChange:
    """A weight change in the coordinates of another base.

    Attributes:
        change: Differences by tensor name, in float64.
        element: The element that transformed the change; None if linear maps transferred it.
        shrunk: Factors for running variances that decrease. Added differences could make variances negative, so
            decreasing variances are multiplied by factors instead.
        notes: Remarks on tensors whose change could not be transferred.
        products: The squared norms of the aligned first base and of base B, and their inner product, over the tensors
            on which a group acts.
    """

    change: Params
    element: Element | None = None
    shrunk: Params = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    products: Tensor = field(default_factory=lambda: torch.zeros(3, dtype=torch.float64))

    def on(self, base: Mapping[str, Tensor], scale: float) -> Params:
        """Return the base plus the change times a scale, rounded once.

        Tensors without a change are copied from the base.
        """
        return {name: self._on(name, tensor, scale) for name, tensor in base.items()}

    def _on(self, name: str, tensor: Tensor, scale: float) -> Tensor:
        if name not in self.change:
            return tensor
        made = tensor.double() + scale * self.change[name].to(tensor.device)
        if name in self.shrunk:
            made = torch.where(made < 0, tensor.double() * self.shrunk[name].to(tensor.device), made)
        return round_to(made, tensor.dtype, name)


def difference(
    symmetry: Symmetry, before: Mapping[str, Tensor], after: Mapping[str, Tensor], base: Mapping[str, Tensor]
) -> CarriedChange:
    """Return the difference of two networks that are aligned to a base. Structure tensors and counters are left out."""
    moved = {n for n, t in base.items() if n not in symmetry.structure and t.dtype in VALUES}
    shrunk = {
        n: (after[n].double() / before[n]).clamp(0, 1).nan_to_num(1.0)
        for n in moved & {*symmetry.buffers}
        if bool((base[n] >= 0).all() and (before[n] >= 0).all())
    }
    sums = torch.zeros(3, dtype=torch.float64)
    for name in moved & {*symmetry.sites}:
        x, y = (one[name].double().flatten() for one in (before, base))
        sums += torch.stack([x @ x, y @ y, x @ y]).cpu()
    return CarriedChange({n: after[n].double() - before[n].double() for n in moved}, shrunk=shrunk, products=sums)


def expectation(products: Tensor) -> tuple[str, ...]:
    """Return a warning if a change that was transferred without data will probably have little effect."""
    x, y, both = products.tolist()
    cosine = both / ((x * y) ** 0.5 or 1.0)
    if not x or cosine >= RELATED:
        return ()
    return (
        f"the aligned base A has a cosine of {cosine:.2f} with base B, as networks from different seeds have: expect "
        "that most of the gain is lost, or that the result is worse than base B; give inputs or labels to test it",
    )


def carry_by(
    symmetry: Symmetry, element: Element, networks: tuple[Mapping[str, Tensor], Mapping[str, Tensor]], base: Params
) -> CarriedChange:
    """Return the change between two networks in memory, transformed by an element into the coordinates of a base."""
    wide = [{n: t.double() if t.dtype in VALUES else t for n, t in one.items()} for one in networks]
    before, after = (symmetry.act(element, one) for one in wide)
    return replace(difference(symmetry, before, after, base), element=element)


@check_arguments
def plan_transport(
    job: FileJob,
    symmetry: Symmetry,
    *,
    method: Method | None = None,
    task: Task | None = None,
    rotate: Rotate = "auto",
) -> StreamedJob:
    """Plan the reads and the memory for aligning streamed checkpoints and transferring the change of a fine-tune.

    Args:
        job: The second base, the first base and its fine-tune, in this order.
        symmetry: The symmetry of all networks.
        method: The method of alignment, `WeightMatching()` by default.
        task: Must be None, because a task calls the model and streamed networks cannot be called.
        rotate: Whether residual streams are rotated, as in `align`.

    Raises:
        ValueError: The networks have different tensors, the method or a task needs the networks in memory, or the
            memory does not suffice.
    """
    require_alike(job.checkpoints)
    streamed = plan_job(job.of(*job.checkpoints[:2]), symmetry, method, task, rotate)
    largest = max(
        torch.Size(one.shape).numel() * _share(_ranges(streamed.symmetry, name, one.shape)[0], one.shape)
        for name, one in job.source.stored.items()
    )
    moving = streamed.plan.sizes.moving_peak(2)
    return streamed.with_memory(int(8 * COPIES * largest) + moving, "carrying a change")


def transport_job(
    job: FileJob,
    streamed: StreamedJob,
    scale: float,
    progress: Progress = no_progress,
    adapter: GivenAdapter | None = None,
) -> tuple[Params, Element, tuple[str, ...]]:
    """Transfer the change of a streamed fine-tune and write the result, tensor by tensor.

    Args:
        job: The second base, the first base and its fine-tune.
        streamed: The plan for the checkpoints of the job.
        scale: The factor of the change.
        progress: A function that shows each pass over the checkpoints, in bytes.
        adapter: The adapter, if the result is to be written as an adapter.

    Returns:
        The result, whose tensors are read on access, or the tensors of the adapter; the element; and notes.
    """
    base, *others = job.checkpoints
    symmetry = streamed.symmetry
    files = {str(one.resolve()): [one.stat().st_size, one.stat().st_mtime_ns] for one in others[1].files}
    with streamed.begin({"command": "transport", "scale": scale, "tuned": files}) as staging:
        (found,) = streamed.match(staging, progress)
        products = torch.zeros(3, dtype=torch.float64)
        moved = [MovedCheckpoint(one, found.symmetry, found.element, is_wide=True) for one in others]

        def changes(name: str) -> Iterator[tuple[Tensor, CarriedChange]]:
            """Yield ranges of a tensor of the second base with their changes."""
            for rows in _ranges(symmetry, name, base.stored[name].shape):
                tensor = base.read(name, rows=rows)
                if name in symmetry.structure or base.dtype_of(name) not in VALUES:
                    yield tensor, CarriedChange({})
                    continue
                with small_piece(rows):
                    own = [{name: one.read(name, rows=rows, dtype=torch.float64)} for one in moved]
                    made = difference(symmetry, own[0], own[1], {name: tensor})
                products.add_(made.products)
                yield tensor, made

        if adapter is not None:
            free = [name for name in base.stored if name not in symmetry.structure and base.dtype_of(name) in VALUES]
            tensors = adapter.carry(lambda name: (one.change[name] for _, one in changes(name)), base, scale, free)
            publish_adapter(staging, tensors, adapter.describe(job.source.label, tensors), progress)
            return tensors, found.element, (*found.notes, *expectation(products), *job.source.notes)

        def pieces(name: str) -> Iterator[Tensor]:
            for tensor, change in changes(name):
                yield change.on({name: tensor}, scale)[name]

        with large_blocks_returned():
            staging.write(streamed.job.shards, pieces, progress, job.checkpoints)
        params = cast(Params, staging.publish(streamed.job.shards, job.source))
    return params, found.element, (*found.notes, *expectation(products), *job.source.notes)


def _ranges(symmetry: Symmetry, name: str, shape: tuple[int, ...]) -> list[tuple[int, int] | None]:
    """Return the row ranges that are transformed at a time; None for running statistics, which are not split."""
    return [None] if name in symmetry.buffers else row_ranges(symmetry, name, shape, PIECE)


def _share(rows: tuple[int, int] | None, shape: tuple[int, ...]) -> float:
    return 1.0 if rows is None or not shape[0] else (rows[1] - rows[0]) / shape[0]

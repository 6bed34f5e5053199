"""Matching of two networks that stay on disk because they exceed the memory limit."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from regauge.alignment.representatives import has_representatives
from regauge.alignment.streamed.job import plan_job
from regauge.alignment.streamed.match import align_streamed
from regauge.alignment.streamed.source import Moved, measure_distances
from regauge.checkpoints.job import FileJob
from regauge.checkpoints.memory_limit import size_text
from regauge.checkpoints.representative_checkpoint import MovedCheckpoint, RepresentativeCheckpoint
from regauge.comparison.common import Common, find_common
from regauge.comparison.match_whole import ROTATED, perturb
from regauge.comparison.matched import Matched
from regauge.comparison.pair import Pair, measure_shares
from regauge.comparison.strangers import scramble
from regauge.comparison.verdicts import MOVED, by_chance
from regauge.core.behind_gains import zero_gains
from regauge.core.interpolation import mean_share
from regauge.core.progress import Progress
from regauge.core.symmetry import Symmetry
from regauge.core.task import Task


def match_streamed(
    job: FileJob, symmetry: Symmetry, *, task: Task | None, references: Sequence[object], progress: Progress
) -> Matched:
    """Align two checkpoints by reading their files repeatedly. Also measure the explained share (squared correlation)
    that alignment reaches by chance.

    The share by chance is measured with one scrambled copy of network B. Translations and gains are removed from
    tensors when they are read. Residual streams are rotated if rotations match them better than permutations.

    Raises:
        ValueError: References or a task are given, which require networks in memory, or the memory limit is too low.
    """
    if references:
        raise ValueError(f"references are compared by fingerprints, which {job.needs_memory}")
    a, b = stored = job.checkpoints
    bound = behind = symmetry.bind(a.on_meta())
    if has_representatives(bound):
        behind = bound.on_representatives()
        a, b = (RepresentativeCheckpoint(one, bound) for one in stored)
    streamed = plan_job(job, behind, None, task, chart=None if behind is bound else bound)
    found = align_streamed(a, b, streamed.plan, streamed.method, progress=progress)
    matched = control = streamed, found
    zero = [one for network in (a, b) for one in zero_gains(bound, network, bound.rotatable).values()]
    if bound.rotatable and not any(map(bool, zero)):
        far, _ = measure_distances(stored[0], stored[1], bound, bound.identity())
        _, left = measure_distances(a, b, found.symmetry, found.element)
        turned = plan_job(job.of(a, b), bound.on_representatives(rotate=True), None, task, chart=bound)
        if left > MOVED * far:
            control = turned, align_streamed(a, b, turned.plan, turned.method, progress=progress)
            if measure_distances(a, b, control[1].symmetry, control[1].element)[1] < ROTATED * left:
                matched = control

    def chance() -> float | None:
        plan, known = control
        stranger = Moved(b, partial(scramble, known.symmetry, seed=0))
        other = align_streamed(a, stranger, plan.plan, plan.method, progress=progress)
        return by_chance([mean_share(measure_shares(Pair(a, stranger, known.symmetry), other.element))])

    def noise(precisions: Sequence[float]) -> float:
        known, total = matched[1].symmetry, 0.0
        movers = known.identity(), matched[1].element
        for one, here, precision, mover in zip(stored, (a, b), precisions, movers, strict=True):
            near = RepresentativeCheckpoint(Moved(one, partial(perturb, precision=precision)), bound)
            first, second = (MovedCheckpoint(network, known, mover) for network in (here, near))
            total += measure_distances(first, second, known, known.identity())[0] ** 2
        return math.sqrt(total)

    found = matched[1]
    pair, given = Pair(a, b, found.symmetry), Pair(stored[0], stored[1], bound)
    stored_pair = None if behind is bound else given
    return Matched(pair, found.element, chance, tested=given, stored=stored_pair, noise=noise, notes=found.notes)


def without_widths(job: FileJob, symmetry: Symmetry) -> Common:
    """Return the comparable part of streamed networks, without tensors on which groups of different sizes act.

    In streamed networks, units of groups that differ in size are not matched.

    Raises:
        ValueError: Groups of different sizes act on all tensors, so none can be compared.
    """
    need = (
        f"matching units of networks of different widths needs {size_text(job.nbytes)} of memory, but "
        f"{size_text(job.limit.nbytes)} are allowed"
    )
    a, b = job.checkpoints
    common = find_common(a, b, symmetry, has_widths=False)
    if common is None:
        raise ValueError(f"no tensor has the same shape in both networks, and {need}; allow more")
    return replace(common, notes=(*common.notes, f"{need}: with more, all tensors would be compared"))

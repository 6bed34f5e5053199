"""Merging of checkpoints that stay on the disk.

The checkpoints are aligned to the first checkpoint or to the base, tensor by tensor.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import compress
from typing import cast

from regauge.alignment import Method
from regauge.alignment.representatives import Rotate
from regauge.alignment.streamed.job import StreamedJob, plan_job
from regauge.alignment.streamed.match import StreamedResult
from regauge.checkpoints.job import FileJob
from regauge.checkpoints.memory_limit import large_blocks_returned
from regauge.checkpoints.representative_checkpoint import MovedCheckpoint
from regauge.checkpoints.writing import save_text
from regauge.core.arguments import check_arguments
from regauge.core.params import Params
from regauge.core.progress import Progress, no_progress
from regauge.core.symmetry import Symmetry
from regauge.core.task import Task
from regauge.merging.blend import Blend, dtype_notes
from regauge.merging.merge_record import MergeRecord, MergeResult, Need, Needs, card_path, require_labels
from regauge.merging.rule import Rule
from regauge.merging.settings import Number, as_weights


def plan_blend(
    streamed: StreamedJob, *, rule: Rule, weights: Sequence[Number] | None, has_base: bool, seed: int | None = None
) -> tuple[StreamedJob, Blend]:
    """Plan the combination of streamed checkpoints after their alignment, and add its memory to the plan.

    Raises:
        ValueError: The rule needs the networks in memory, weights or settings do not fit, or memory does not suffice.
    """
    if rule.needs_task:
        raise ValueError(f"{rule} runs the model and {streamed.job.needs_memory}")
    first, *others = streamed.job.checkpoints
    blend = Blend(
        rule=rule,
        symmetry=streamed.symmetry,
        networks=tuple(others if has_base else (first, *others)),
        base=first if has_base else None,
        weights=None if weights is None else tuple(weights),
        seed=seed,
    )
    blend.check()
    moving = streamed.plan.sizes.moving_peak(len(others))
    return streamed.with_memory(blend.held() + moving, f"combining {len(blend.networks)} networks by {rule}"), blend


@check_arguments
def plan_merge(
    job: FileJob,
    symmetry: Symmetry,
    *,
    method: Method | None = None,
    rule: Rule,
    weights: Sequence[Number | str] | None = None,
    has_base: bool = False,
    task: Task | None = None,
    rotate: Rotate = "auto",
) -> StreamedJob:
    """Plan the reads and the memory for aligning and combining streamed checkpoints.

    Raises:
        ValueError: The checkpoints cannot be merged while they stay on the disk, or the memory does not suffice.
    """
    streamed = plan_job(job, symmetry, method, task, rotate)
    return plan_blend(streamed, rule=rule, weights=as_weights(weights), has_base=has_base)[0]


def report_of(found: StreamedResult, label: str) -> str:
    """Return a report on the alignment of one network, for the merge record."""
    return "\n".join([f"{label}: {found.course[0]}", *found.course[1:]])


def merge_job(
    streamed: StreamedJob,
    *,
    rule: Rule,
    weights: Sequence[Number] | None,
    has_base: bool,
    seed: int | None = None,
    labels: Sequence[str] | None = None,
    progress: Progress = no_progress,
) -> MergeResult:
    """Merge checkpoints; write the result with the record next to it. `params` are read from the output on access.

    Args:
        streamed: The checkpoints (the base first, if there is one), the plan of the merge, and the output.
        rule: A rule that needs no task.
        weights: One weight for each network, as the rule defines weights.
        has_base: Whether the first checkpoint is the base.
        seed: The seed of the random numbers, for random rules.
        labels: Names of the networks in the record; the base's name comes last. By default, the paths.
        progress: A function that shows each pass over the checkpoints, in bytes.

    Raises:
        ValueError: The rule needs the networks in memory, weights or labels do not fit, or the memory does not suffice.
    """
    streamed, blend = plan_blend(streamed, rule=rule, weights=weights, has_base=has_base, seed=seed)
    checkpoints, symmetry, start = streamed.job.checkpoints, streamed.symmetry, int(has_base)
    networks, count, first = checkpoints[start:], len(checkpoints) - start, checkpoints[0]
    names = require_labels(labels or [one.label for one in (*networks, *checkpoints[:start])], count, has_base)
    given = None if weights is None else [str(one) for one in weights]
    with streamed.begin({"command": "merge", "rule": str(rule), "weights": given, "seed": seed}) as staging:
        found = streamed.match(staging, progress)

        def need(k: int) -> Need:
            moved = MovedCheckpoint(checkpoints[k + 1], symmetry, found[k].element)
            return Need.of(symmetry, found[k].element, first, checkpoints[k + 1], moved)

        every = tuple(streamed.job.crew.map(need, range(len(found))))
        needs = Needs(every, is_forced=streamed.rotate == "always")
        elements = tuple([symmetry.identity(), *needs.keep([one.element for one in found], symmetry)][start:])
        spans = [(0.0, 0.0), *needs.spans][start:]
        told = [note for one in compress(found, needs.is_moved) for note in one.notes]
        is_any = any(needs.is_moved)
        record = MergeRecord(
            networks=tuple(names[:count]),
            base=names[-1] if has_base else None,
            rule=str(rule),
            alignment=f"{streamed.method if is_any else 'none'}, streamed",
            weights=blend.factors,
            initial=sum(one.initial for one in found),
            objective=sum(
                one.objective if moves else one.initial for one, moves in zip(found, needs.is_moved, strict=True)
            ),
            before=tuple(before for before, _ in spans),
            after=tuple(after for _, after in spans),
            reports=tuple(report_of(one, other.label) for one, other in zip(found, checkpoints[1:], strict=True)),
            notes=tuple(dict.fromkeys([*needs.notes, *told, *first.notes, *dtype_notes(checkpoints)])),
        )
        with large_blocks_returned():
            aligned = [
                network if network is first else MovedCheckpoint(network, symmetry, element, is_wide=True)
                for network, element in zip(networks, elements, strict=True)
            ]
            staging.write(streamed.job.shards, replace(blend, networks=tuple(aligned)).pieces, progress, checkpoints)
        if staging.provenance is not None:
            record = replace(record, origin=staging.provenance.facts(progress))
        if staging.is_first:
            save_text(record.card, staging.content / card_path(staging.out).name)
        params = cast(Params, staging.publish(streamed.job.shards, streamed.job.source))
        return MergeResult(params, elements, symmetry, record)

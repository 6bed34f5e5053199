"""Merging of checkpoints that stay on the disk: aligned to the first one or the base, and combined entry by entry."""

from collections.abc import Iterator, Sequence
from typing import cast

import torch
from torch import Tensor

from regauge.alignment.streamed.job import FileJob, plan_job
from regauge.alignment.streamed.pieces import measure_distances, move_tensor, row_ranges
from regauge.core.element import Element
from regauge.core.interpolation import shares_of
from regauge.core.params import Params
from regauge.core.symmetry import Symmetry
from regauge.core.task import Task
from regauge.merging.merge_record import MergeRecord, MergeResult, card_path, require_labels
from regauge.merging.rules import Average, Rule, TaskArithmetic
from regauge.storage.checkpoints.checkpoint import Checkpoint
from regauge.storage.checkpoints.writing import Pieces, save_text


def merge_streamed(
    job: FileJob,
    symmetry: Symmetry,
    *,
    method: object,
    rule: Rule,
    weights: Sequence[float] | None,
    has_base: bool,
    task: Task | None,
    labels: Sequence[str],
) -> MergeResult:
    """Merge checkpoints and write the result, with its record beside it; `params` are read from there when asked for.

    Args:
        job: The checkpoints, the base first where there is one, and the output.
        symmetry: The symmetry of all of them.
        method: See `plan_job`.
        rule: `Average`, or `TaskArithmetic`, which needs a base.
        weights: One for each network; see the rules.
        has_base: Whether the first checkpoint is the base.
        task: None; a task needs the networks in memory.
        labels: What the record calls the networks, the base last.

    Raises:
        ValueError: The checkpoints differ in their tensors, the rule or the method needs networks in memory, the
            weights do not fit, or the memory does not suffice.
    """
    if task is not None:
        raise ValueError("a task runs the model and needs it in memory; leave it out, or allow more memory")
    first, *others = job.checkpoints
    networks = others if has_base else [first, *others]
    names = require_labels(labels, len(networks), has_base=has_base)
    shares = entry_weights(rule, weights, len(networks), has_base=has_base)
    streamed = plan_job(job, symmetry, method)
    with streamed.begin({"command": "merge", "rule": str(rule), "weights": list(weights or ())}) as staging:
        found = [streamed.match(k, staging) for k in range(1, len(job.checkpoints))]
        elements = [one.element for one in found]
        spans = [
            measure_distances(first, other, streamed.symmetry, element)
            for other, element in zip(others, elements, strict=True)
        ]
        spans = spans if has_base else [(0.0, 0.0), *spans]
        record = MergeRecord(
            networks=tuple(names[: len(networks)]),
            base=names[-1] if has_base else None,
            rule=str(rule),
            alignment=f"{streamed.method}, streamed",
            weights=shares,
            initial=sum(one.initial for one in found),
            objective=sum(one.objective for one in found),
            before=tuple(before for before, _ in spans),
            after=tuple(after for _, after in spans),
            reports=tuple(f"{other.label}: {one}" for one, other in zip(found, others, strict=True)),
        )
        save_text(record.card, staging.content / card_path(staging.out).name)
        scale = rule.scale if isinstance(rule, TaskArithmetic) else 1.0
        pieces = merge_pieces(
            networks,
            elements if has_base else [None, *elements],
            streamed.symmetry,
            factors=[scale * share for share in shares],
            base=first if has_base else None,
        )
        moves = elements if has_base else [streamed.symmetry.identity(), *elements]
        return MergeResult(cast(Params, streamed.publish(staging, pieces)), tuple(moves), streamed.symmetry, record)


def entry_weights(rule: Rule, weights: Sequence[float] | None, count: int, *, has_base: bool) -> tuple[float, ...]:
    """The share of each network, or the factor of its difference from the base, for rules that go entry by entry.

    Raises:
        ValueError: The rule looks at more than one entry at a time, a base is missing or useless, or the weights do not
            fit.
    """
    if not isinstance(rule, Average | TaskArithmetic):
        raise ValueError(
            f"{rule} needs the networks in memory; choose the average or task arithmetic, which go entry by entry, "
            "or allow more memory"
        )
    if has_base == isinstance(rule, Average):
        raise ValueError(f"{rule} {'takes no base' if has_base else 'needs a base'}")
    if isinstance(rule, Average):
        return shares_of(weights, count)
    return rule.factors(weights, count)


def merge_pieces(
    networks: Sequence[Checkpoint],
    elements: Sequence[Element | None],
    symmetry: Symmetry,
    *,
    factors: Sequence[float],
    base: Checkpoint | None = None,
) -> Pieces:
    """The values of a merged network, with the dtypes of the base or else of the first network.

    Sums are taken in float32 or float64 and rounded once. Where there is a base, running statistics are the plain mean
    of those of the networks; integers are those of the first network or the base.

    Args:
        networks: The networks, of one architecture.
        elements: What moves each of them; None for those that stay.
        symmetry: The symmetry of all of them, with every size known.
        factors: What each network, or its difference from the base, is multiplied by.
        base: The network that task vectors count from.
    """
    equal = shares_of(None, len(networks))
    reference = networks[0] if base is None else base

    def pieces(name: str) -> Iterator[Tensor]:
        dtype, shape = reference.stored[name].dtype, reference.stored[name].shape
        is_mean = base is None or name in symmetry.buffers
        own = equal if base is not None and is_mean else factors
        for rows in row_ranges(shape, symmetry, name):
            if not dtype.is_floating_point:
                yield reference.read(name, rows=rows)
                continue
            work = torch.promote_types(dtype, torch.float32)
            start = None if is_mean else reference.read(name, rows=rows, dtype=work)
            total: Tensor | None = None
            for network, element, factor in zip(networks, elements, own, strict=True):
                value = network.read(name, rows=rows, dtype=work)
                if element is not None:
                    value = move_tensor(symmetry, element, name, value)
                if start is not None:
                    value = value - start
                value = value * factor
                total = value if total is None else total.add_(value)
            assert total is not None
            yield (total if start is None else total.add_(start)).to(dtype)

    return pieces

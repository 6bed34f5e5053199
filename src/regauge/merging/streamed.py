"""Merging of checkpoints that stay on the disk: aligned to the first one or the base, and combined entry by entry."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from regauge.alignment.streamed.job import StreamedJob
from regauge.alignment.streamed.memory import row_ranges
from regauge.alignment.streamed.source import measure_distances, move_tensor
from regauge.core.element import Element
from regauge.core.interpolation import shares_of
from regauge.core.movable import VALUES, require_shared
from regauge.core.params import Params
from regauge.core.progress import Progress, no_progress
from regauge.core.symmetry import Symmetry
from regauge.merging.merge_record import MergeRecord, MergeResult, card_path, require_labels
from regauge.merging.rules import Average, Rule, TaskArithmetic, require_base
from regauge.storage.checkpoints.checkpoint import Checkpoint
from regauge.storage.checkpoints.writing import Pieces, save_text


def merge_job(
    streamed: StreamedJob,
    *,
    rule: Rule,
    weights: Sequence[float] | None,
    has_base: bool,
    labels: Sequence[str] | None = None,
    progress: Progress = no_progress,
) -> MergeResult:
    """Merge checkpoints and write the result, with its record beside it; `params` are read from there when asked for.

    Args:
        streamed: The checkpoints, the base first where there is one, their plan, and the output.
        rule: `Average`, or `TaskArithmetic`, which needs a base.
        weights: One for each network; see the rules.
        has_base: Whether the first checkpoint is the base.
        labels: What the record calls the networks, the base last; the paths unless given.
        progress: Shows each pass over the checkpoints, in bytes.

    Raises:
        ValueError: The rule needs the networks in memory or another base, or weights or labels do not fit.
    """
    require_base(rule, has_base=has_base)
    if not isinstance(rule, Average | TaskArithmetic):
        raise ValueError(
            f"{rule} needs the networks in memory; choose the average or task arithmetic, which go entry by entry, "
            "or allow more memory"
        )
    checkpoints, symmetry, start = streamed.job.checkpoints, streamed.plan.symmetry, int(has_base)
    networks, count, first = checkpoints[start:], len(checkpoints) - start, checkpoints[0]
    names = require_labels(labels or [one.label for one in (*networks, *checkpoints[:start])], count, has_base)
    shares = rule.factors(weights, count)
    for name, one in first.stored.items():
        if one.dtype not in VALUES and name not in symmetry.sites:
            for rows in row_ranges(symmetry, name, one.shape):
                require_shared(name, [checkpoint.read(name, rows=rows) for checkpoint in checkpoints])
    settings = {"command": "merge", "rule": str(rule), "weights": list(weights or ())}
    with streamed.begin(settings) as staging:
        found = [streamed.match(k, staging, progress) for k in range(1, len(checkpoints))]
        elements = [symmetry.identity(), *(one.element for one in found)][start:]
        pairs = list(zip(networks, elements, strict=True))
        spans = [
            (0.0, 0.0) if network is first else measure_distances(first, network, symmetry, element)
            for network, element in pairs
        ]
        record = MergeRecord(
            networks=tuple(names[:count]),
            base=names[-1] if has_base else None,
            rule=str(rule),
            alignment=f"{streamed.method}, streamed",
            weights=shares,
            initial=sum(one.initial for one in found),
            objective=sum(one.objective for one in found),
            before=tuple(before for before, _ in spans),
            after=tuple(after for _, after in spans),
            reports=tuple(f"{other.label}: {one}" for one, other in zip(found, checkpoints[1:], strict=True)),
        )
        if staging.provenance is not None:
            record = replace(record, origin=staging.provenance.facts(progress))
        save_text(record.card, staging.content / card_path(staging.out).name)
        scale = rule.scale if isinstance(rule, TaskArithmetic) else 1.0
        pieces = _merge_pieces(pairs, symmetry, [scale * share for share in shares], first if has_base else None)
        staging.write(streamed.shards, pieces, progress)
        params = cast(Params, staging.publish(streamed.shards, streamed.source))
        return MergeResult(params, tuple(elements), symmetry, record)


def _merge_pieces(
    networks: Sequence[tuple[Checkpoint, Element]],
    symmetry: Symmetry,
    factors: Sequence[float],
    base: Checkpoint | None,
) -> Pieces:
    """The values of a merged network, with the dtypes of the base or else of the first network.

    Sums are taken in float32 or float64 and rounded once. Where there is a base, running statistics are the plain mean
    of those of the networks; counters are those of the first network or the base.

    Each network, or its difference from the base, is multiplied by its factor; without a base the first one stays.
    """
    reference = networks[0][0] if base is None else base
    every = [*([] if base is None else [(base, symmetry.identity())]), *networks]

    def pieces(name: str) -> Iterator[Tensor]:
        dtype, is_mean = reference.stored[name].dtype, base is None or name in symmetry.buffers
        own = shares_of(None, len(networks)) if base is not None and is_mean else factors
        for rows in row_ranges(symmetry, name, reference.stored[name].shape):
            if dtype not in VALUES:
                kept, *others = (move_tensor(symmetry, e, name, one.read(name, rows=rows)) for one, e in every)
                require_shared(name, [kept, *others])
                yield kept
                continue
            work = torch.promote_types(dtype, torch.float32)
            start = None if is_mean else reference.read(name, rows=rows, dtype=work)
            total: Tensor | None = None
            for (network, element), factor in zip(networks, own, strict=True):
                value = network.read(name, rows=rows, dtype=work)
                if network is not reference:
                    value = move_tensor(symmetry, element, name, value)
                value = (value if start is None else value - start) * factor
                total = value if total is None else total.add_(value)
            assert total is not None
            yield (total if start is None else total.add_(start)).to(dtype)

    return pieces

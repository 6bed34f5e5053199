"""Align networks with one another and make one of them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from regauge.alignment import MergeMany, Method, WeightMatching, align_many
from regauge.alignment.streamed.job import Network, open_job, plan_job
from regauge.core.interpolation import distance, mean
from regauge.core.movable import VALUES, require_shared
from regauge.core.params import Params
from regauge.core.progress import Progress, no_progress
from regauge.core.symmetry import Symmetry
from regauge.core.task import Task
from regauge.merging.merge_record import MergeRecord, MergeResult, card_path, require_labels
from regauge.merging.rules import Average, MeanRule, Rule, VectorRule, require_base
from regauge.merging.streamed import merge_job
from regauge.storage.checkpoints.memory_limit import MemoryLimit
from regauge.storage.checkpoints.provenance import Provenance, name_networks
from regauge.storage.checkpoints.writing import save_text


def merge(
    params: Sequence[Network],
    symmetry: Symmetry,
    *,
    method: Method | None = None,
    weights: Sequence[float] | None = None,
    rule: Rule | None = None,
    base: Network | None = None,
    task: Task | None = None,
    generator: torch.Generator | None = None,
    labels: Sequence[str] | None = None,
    out: str | Path | None = None,
    memory: int | str | MemoryLimit | None = None,
    resume: bool = False,
    overwrite: bool = False,
    progress: Progress = no_progress,
    provenance: Provenance | None = None,
) -> MergeResult:
    """Make one network of many: align them with one another, then average them or combine them by another rule.

    Running statistics are averaged like weights, by task-vector rules (`TaskArithmetic`, `Ties`, `Dare`) with equal
    shares. Recompute them with `reset_batchnorm`, or give a task that does (`prepare`): the result is prepared by it.

    Sums are taken in float32 or float64. Until they are, all aligned networks are held in memory. With a task, every
    network, the result and (for means) the same mean without alignment are evaluated on it for the record.

    Networks may be checkpoints on the disk. Those that need more than `memory`, and folders that are merged into a
    folder, are streamed: weights are matched to the first network or the base, the result is combined entry by entry
    (`Average` or `TaskArithmetic`), and its `params` are read from `out` when they are asked for.

    Args:
        params: The networks, one at least, of one architecture: parameters by name, or paths of checkpoints.
        symmetry: The symmetry of that architecture.
        method: How to align, as in `align_many`. `MergeMany()` unless given, and `WeightMatching()` with a base or
            where the networks are streamed; a method for pairs aligns every network to the first or to the base.
        weights: One for each network. For means they are shares, normalized to sum to one, equal unless given; for
            task vectors see the rule. The alignment does not depend on them.
        rule: How the aligned networks are combined; `Average()` unless given.
        base: The network that task vectors are relative to. The networks are aligned to it, and the result is in its
            coordinates; without a base in those of the first network.
        task: Model, data and loss, for methods and rules that use them, and for the record.
        generator: Source of randomness for methods and rules that use one.
        labels: Names of the networks in the record, the base last where there is one; numbers or paths unless given.
        out: Where the result is written, with the names, dtypes and header of the base or the first network: a
            `.safetensors` file, or a folder for networks in folders. The record is written beside it. For networks on
            the disk only, as are the following.
        memory: How much may be held: bytes, or text such as "2GB"; half of the machine's memory unless given.
        resume: Whether to continue what an interrupted run left.
        overwrite: Whether the output may be replaced.
        progress: Shows each pass over streamed files.
        provenance: What the output says about where it comes from; this call, unless given.

    Raises:
        FileExistsError: The output exists, and `overwrite` is false.
        ValueError: There is no network, weights or labels do not fit, the networks cannot be aligned, the rule needs a
            base, a task or a generator that is not there, or has no use for the base, or the memory does not suffice.

    References:
        Ainsworth et al. (2023), Git Re-Basin; Crisostomi et al. (2024), C2M3; those of the rules.
    """
    if not params:
        raise ValueError("there is no network to merge; give at least one")
    rule, has_base, start = Average() if rule is None else rule, base is not None, 0 if base is None else 1
    given: Sequence[Network] = params if base is None else [base, *params]
    if provenance is None:
        settings = {"rule": repr(rule), "weights": weights and list(weights), "method": repr(method)}
        seed = None if generator is None else generator.initial_seed()
        provenance = Provenance("rg.merge", settings, name_networks(networks=list(params), base=base), seed)
    job = open_job(
        given, 0, card_path, out=out, memory=memory, resume=resume, overwrite=overwrite, provenance=provenance
    )
    if job is not None:
        job.require_output()
        if job.is_streamed:
            streamed = plan_job(job, symmetry, method, task)
            return merge_job(streamed, rule=rule, weights=weights, has_base=has_base, labels=labels, progress=progress)
        paths = [one.label for one in job.checkpoints]
        labels = [*paths[start:], *paths[:start]] if labels is None else labels
        given = [checkpoint.params for checkpoint in job.checkpoints]
    names = require_labels(labels, len(params), has_base)
    require_base(rule, has_base=has_base)
    networks = [network for network in given if isinstance(network, Mapping)]
    # Weights that do not fit are refused before the work of aligning.
    factors = rule.factors(weights, len(params))
    method = (WeightMatching() if has_base else MergeMany()) if method is None else method
    aligned = align_many(networks, symmetry, method=method, task=task, generator=generator)
    before, after, reference, buffers = networks[start:], aligned.params[start:], networks[0], aligned.symmetry.buffers
    if isinstance(rule, MeanRule):
        factors = rule.choose(after, factors, task)
        merged = mean(after, factors)
    else:
        merged = _combine(reference, after, aligned.symmetry, rule, factors, generator)
    if task is not None:
        merged = task.prepare_average(merged)
    record = MergeRecord(
        networks=tuple(names[: len(params)]),
        base=names[-1] if has_base else None,
        rule=str(rule),
        alignment=str(method),
        weights=factors,
        initial=aligned.initial,
        objective=aligned.objective,
        before=tuple(distance(reference, network, buffers) for network in before),
        after=tuple(distance(reference, network, buffers) for network in after),
    )
    if task is not None:
        record = replace(
            record,
            metrics=tuple(task.evaluate(network) for network in before),
            base_metrics=task.evaluate(reference) if has_base else None,
            merged_metrics=task.evaluate(merged),
            unaligned_metrics=None if has_base else task.evaluate_average(mean(before, factors)),
        )
    if job is not None and job.out is not None:
        record = replace(record, origin=() if job.provenance is None else job.provenance.facts())
        job.write(merged)
        save_text(record.card, card_path(job.out))
    return MergeResult(merged, aligned.elements[start:], aligned.symmetry, record)


def _combine(
    base: Mapping[str, Tensor],
    networks: Sequence[Mapping[str, Tensor]],
    symmetry: Symmetry,
    rule: VectorRule,
    factors: Sequence[float],
    generator: torch.Generator | None,
) -> Params:
    """Add what the rule makes of the task vectors to the base, in float64; average running statistics."""
    statistics = mean([{name: network[name] for name in symmetry.buffers if name in network} for network in networks])
    tied = {name: names for names in symmetry.tied for name in names}
    result: Params = {}
    for name, tensor in base.items():
        known = next((other for other in tied.get(name, ()) if other in result), None)
        if known is not None:
            result[name] = result[known].clone()  # One tensor of the model: chance must not tell its names apart.
        elif tensor.dtype not in VALUES or tensor.numel() == 0:
            require_shared(name, [tensor, *(network[name] for network in networks)])
            result[name] = tensor.clone()
        elif name in statistics:
            result[name] = statistics[name].to(tensor)
        else:
            start = tensor.double()
            vectors = torch.stack([network[name].to(start) - start for network in networks])
            result[name] = (start + rule.combine(vectors, factors, generator)).to(tensor.dtype)
    return result

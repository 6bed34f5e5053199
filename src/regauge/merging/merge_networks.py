"""Alignment of networks to one another, and the merge of the aligned networks into one network."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regauge.alignment import MergeMany, Method, WeightMatching, align_many
from regauge.alignment.align_networks import with_learning
from regauge.alignment.representatives import Rotate
from regauge.alignment.table import METHODS
from regauge.checkpoints.checkpoint import Checkpoint
from regauge.checkpoints.job import Network, open_call, with_files
from regauge.checkpoints.memory_limit import MemoryLimit
from regauge.checkpoints.output import Output
from regauge.core.arguments import check_arguments
from regauge.core.element import Element
from regauge.core.given import as_networks, as_params, require_instance
from regauge.core.params import VALUES, Params, label, require_alike, to_work
from regauge.core.progress import Progress, no_progress
from regauge.core.symmetry import Symmetry
from regauge.core.task import Task, choose_and_judge
from regauge.merging.blend import Blend, dtype_notes
from regauge.merging.merge_record import MergeRecord, MergeResult, Need, Needs, require_labels
from regauge.merging.rule import Rule, draw_seed, require_networks
from regauge.merging.rules.average import Average
from regauge.merging.settings import Number, Setting, as_weights
from regauge.merging.table import RULES


@check_arguments
@with_files
def merge(
    params: Sequence[Network],
    symmetry: Symmetry,
    *,
    method: Method | None = None,
    weights: Sequence[Number | str] | None = None,
    rule: Rule | None = None,
    base: Network | None = None,
    task: Task | None = None,
    test: Task | None = None,
    generator: torch.Generator | None = None,
    rotate: Rotate = "auto",
    untie: bool = False,
    labels: Sequence[str] | None = None,
    out: Output | str | Path | None = None,
    memory: int | str | MemoryLimit | None = None,
    progress: Progress = no_progress,
) -> MergeResult:
    """Merge networks into one network: align them to one another, then average them or apply another rule.

    A network that already has the coordinates of the first network or of the base, such as a fine-tune of one base, is
    not transformed. A note in the record states that alignment changes nothing, or how much alignment improves the
    agreement of the networks. If a task is given or `rotate="always"`, all networks are transformed.

    Running statistics are averaged, with the weights of the rule if the rule is a mean, and otherwise with equal
    weights. Recompute running statistics with `reset_batchnorm`, or pass a task whose `prepare` function recomputes
    them for the result.

    Tensors are transformed and combined in float64, or in float32 if they have half precision, and are rounded once. If
    a task is given, every network and the result are evaluated for the record, after the task's `prepare` function. The
    evaluation uses examples that no method used. Without a base, the merge of the unaligned networks by the same rule
    is also evaluated.

    Networks may be checkpoints on the disk. If the checkpoints need more than `memory`, they are streamed. Streamed
    checkpoints are aligned to the first network or the base by weight matching, and the result is written to `out`
    tensor by tensor. The `params` of the result are read from `out` on access. The random numbers of a rule depend only
    on the generator and the tensor names.

    Args:
        params: A list of networks with one architecture. A network is a dictionary of parameters by name, or the path
            of a checkpoint. A merge needs at least two networks. Rules that accept a single task vector need only one
            network.
        symmetry: The symmetry of the networks' architecture.
        method: The alignment method, as in `align_many`. With a task, the default is `DataMatching()`. Without a task,
            the default is `MergeMany()`, or `WeightMatching()` if there is a base or the networks are streamed. A
            method for pairs aligns every network to the first network or to the base.
        weights: One weight for each network: a number, or a setting that differs between tensors. For means, weights
            are equal by default and are normalized to sum to one. For task vectors, the rule defines the weights. The
            alignment does not depend on the weights.
        rule: The rule that combines the aligned networks; `Average()` by default.
        base: The network that is subtracted from each network to compute its task vector. The networks are aligned to
            the base, and the result has the coordinates of the base. Without a base, the result has the coordinates of
            the first network.
        task: Model, data and loss, for methods and rules that use a task.
        test: The task that evaluates networks for the record. By default, half of the examples of `task` are held out
            for the evaluation, and methods use only the other half (`Task.split`).
        generator: The source of randomness for random methods and rules.
        rotate: Whether residual streams are rotated or permuted, as in `align`.
        untie: Whether tied output heads of networks in folders become separate tensors, as in `align`.
        labels: Names of the networks for the record; the base's name comes last. By default, indices or paths.
        out: The output path, or an `Output`. The result has the names, dtypes and header of the base or the first
            network. The record is written next to the result. `out` and the following arguments apply only to networks
            on the disk.
        memory: The memory limit: bytes, or a string such as "2GB". By default, the limit is half of the machine's
            memory.
        progress: A function that shows each pass over streamed files.

    Raises:
        FileExistsError: The output exists and may not be replaced.
        TypeError: The networks are not a list, a network is not a dictionary of tensors, or the rule or the method has
            a wrong type.
        ValueError: There are too few or too many networks for the rule. Weights, settings or labels are invalid. The
            networks cannot be aligned. The rule needs a base, a task or a generator that is missing, or the rule does
            not use the given base. The memory does not suffice.

    References:
        Ainsworth et al. (2023), Git Re-Basin; Crisostomi et al. (2024), C2M3; those of the rules.
    """
    rule = Average() if rule is None else rule
    weights = as_weights(weights)
    require_instance(rule, Rule, "rule", {name: f"rule=regauge.merging.{row.name}()" for name, row in RULES.items()})
    params = [_given(network, label(k)) for k, network in enumerate(as_networks(params))]
    base = None if base is None else _given(base, "the base")
    require_networks(rule, len(params), has_base=base is not None)
    has_base, start = base is not None, int(base is not None)
    seed = draw_seed(rule, generator)
    given: Sequence[Network] = params if base is None else [base, *params]
    told = None if weights is None else [str(one) if isinstance(one, Setting) else one for one in weights]
    settings = {"rule": repr(rule), "weights": told, "method": repr(method), **({"untie": True} if untie else {})}
    named: Any = {"networks": list(params), "base": base}
    files: Any = {"work": "merging", "symmetry": None if untie else symmetry, "generator": generator}
    job = open_call("rg.merge", settings, named, networks=given, out=out, memory=memory, **files)
    if untie:
        from regauge.hub.untied import untie_job  # importing the code that builds models is slow

        job = untie_job(job).named_by(symmetry)
    if job is not None:
        job = with_learning(job, method, task)
        if job.is_streamed:
            from regauge.alignment.streamed.job import plan_job
            from regauge.merging.streamed import merge_job

            streamed = plan_job(job, symmetry, method, task, rotate)
            return merge_job(
                streamed, rule=rule, weights=weights, has_base=has_base, seed=seed, labels=labels, progress=progress
            )
        paths = [one.label for one in job.checkpoints]
        labels = [*paths[start:], *paths[:start]] if labels is None else labels
        given = job.checkpoints
    if task is None and test is not None:
        raise ValueError("test measures the result of a choice by a task: give task, too")
    chosen_by, judged_by = (None, None) if task is None else choose_and_judge(task, test)
    names = require_labels(labels, len(params), has_base)
    networks = [network for network in given if isinstance(network, Mapping)]
    as_given = Blend(
        rule=rule,
        symmetry=symmetry.bind(networks[0]),
        networks=tuple(networks[start:]),
        base=networks[0] if has_base else None,
        weights=weights,
        seed=seed,
    )
    as_given.check()  # before the alignment
    if method is None:
        by_weights: type[Method] = WeightMatching if has_base else MergeMany
        method = (by_weights if task is None else METHODS["data"].load())()
    whole = [network.params if isinstance(network, Checkpoint) else network for network in networks]
    if has_base or labels is not None:  # Counting would count the base as the first network.
        ordered = (*names[len(params) :], *names[: len(params)])
        require_alike(*whole, structure=as_given.symmetry.structure, labels=ordered)
    # Transformed networks are not the result, so their entries may exceed half precision. A task runs networks in their
    # own dtype.
    moving = whole if chosen_by is not None else [to_work(network) for network in whole]
    aligned = align_many(moving, symmetry, method=method, task=chosen_by, generator=generator, rotate=rotate)
    of = partial(Need.of, aligned.symmetry)
    each = (of(aligned.elements[k], whole[0], whole[k], aligned.params[k]) for k in range(1, len(whole)))
    # Elements that were found with data are always applied, because distances of weights do not measure the function.
    needs = Needs(tuple(each), is_forced=chosen_by is not None or rotate == "always")
    elements = tuple([aligned.symmetry.identity(), *needs.keep(aligned.elements[1:], aligned.symmetry)][start:])
    as_given = replace(as_given, symmetry=aligned.symmetry)
    blend = _choose_networks(_blend_moved(as_given, elements), aligned.params[start:], chosen_by)
    merged = blend.params if chosen_by is None else chosen_by.prepare_average(blend.params)
    spans = [(0.0, 0.0), *needs.spans][start:]
    is_any = any(needs.is_moved)
    notes = (*needs.notes, *(aligned.notes if is_any else ()))
    record = MergeRecord(
        networks=tuple(names[: len(params)]),
        base=names[-1] if has_base else None,
        rule=str(rule),
        alignment=str(method) if is_any else "none",
        weights=blend.factors,
        initial=aligned.initial,
        objective=aligned.objective if is_any else aligned.initial,
        before=tuple(one for one, _ in spans),
        after=tuple(one for _, one in spans),
        notes=(*notes, *(() if job is None else (*job.source.notes, *dtype_notes(job.checkpoints)))),
    )
    if chosen_by is not None and judged_by is not None:
        record = _evaluate(
            replace(record, data=(chosen_by.name or repr(chosen_by), judged_by.name or repr(judged_by))),
            judged_by,
            whole,
            merged,
            as_given,
        )
    if job is not None and job.out is not None:
        origin = None if job.output is None else job.output.provenance
        record = replace(record, origin=() if origin is None else origin.facts())
        job.write(merged, record.card, progress)
    return MergeResult(merged, elements, aligned.symmetry, record)


def _choose_networks(blend: Blend, aligned: Sequence[Params], task: Task | None) -> Blend:
    """Return the merge of the networks that the rule chooses with a task, or of all networks for other rules."""
    if not blend.rule.needs_task:
        return blend
    tried = [k for k, weight in enumerate(blend.given) if weight != 0]
    own = [aligned[k] for k in tried]
    chosen = blend.rule.choose(own, lambda some: blend.only([tried[k] for k in some]).params, task)
    return blend.only([tried[k] for k in chosen])


def _evaluate(
    record: MergeRecord, task: Task, whole: Sequence[Mapping[str, Tensor]], merged: Params, as_given: Blend
) -> MergeRecord:
    """Return the record with the metrics of all networks, of the result, and of the rule without alignment."""
    has_base = as_given.base is not None
    return replace(
        record,
        metrics=tuple(task.evaluate_average(dict(network)) for network in whole[int(has_base) :]),
        base_metrics=task.evaluate_average(dict(whole[0])) if has_base else None,
        merged_metrics=task.evaluate(merged),
        unaligned_metrics=None if has_base else task.evaluate_average(as_given.params),
    )


def _given(network: Network, what: str) -> Network:
    """Return a path or a checkpoint unchanged; return any other network as a parameter dictionary."""
    return network if isinstance(network, str | Path | Checkpoint) else as_params(network, what)


def _blend_moved(blend: Blend, elements: Sequence[Element]) -> Blend:
    """Return the merge of aligned networks. Translated or rotated networks are transformed in float64 beforehand."""
    networks, left = list(blend.networks), list(elements)
    for k, element in enumerate(elements):
        is_first = k == 0 and blend.base is None  # not transformed; the result has its dtypes
        if not is_first and (element.translation or element.rotation):
            network = networks[k]
            given = network.params if isinstance(network, Checkpoint) else network
            wide = {name: t.double() if t.dtype in VALUES else t for name, t in given.items()}
            networks[k], left[k] = blend.symmetry.act(element, wide), blend.symmetry.identity()
    return replace(blend, networks=tuple(networks), elements=tuple(left))

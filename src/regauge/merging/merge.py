"""Align networks with one another and make one of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from regauge.alignment import ManyResult, MergeMany, Method, WeightMatching, align_many
from regauge.core.interpolation import distance, mean
from regauge.core.params import Params
from regauge.core.symmetry import Symmetry
from regauge.core.task import Task
from regauge.merging.record import Merged, MergeRecord
from regauge.merging.rules import Average, MeanRule, Rule, VectorRule


def merge(
    params: Sequence[Mapping[str, Tensor]],
    symmetry: Symmetry,
    *,
    method: Method | None = None,
    weights: Sequence[float] | None = None,
    rule: Rule | None = None,
    base: Mapping[str, Tensor] | None = None,
    task: Task | None = None,
    generator: torch.Generator | None = None,
) -> Params:
    """One network out of many: aligned with one another, then averaged, or combined by another rule.

    Running statistics are averaged like weights; recompute them with `reset_batchnorm` where the model has
    batch normalization. Rules for task vectors (`TaskArithmetic`, `Ties`, `Dare`) leave statistics alone and take
    the plain mean of those of the networks.

    Args:
        params: The networks, one at least; all of one architecture.
        symmetry: Of that architecture.
        method: How to align, as in `align_many`. `MergeMany()` unless given, and `WeightMatching()` with a base; a
            method for pairs aligns every network to the first or to the base.
        weights: One for each network. For means they are shares, normalized to sum to one, equal unless given; for
            task vectors see the rule. The alignment does not look at them.
        rule: What is done with the aligned networks; `Average()` unless given.
        base: The network that task vectors count from. The networks are aligned to it, and the result is in its
            coordinates; without a base in those of the first network.
        task: Model, data and loss, for methods and rules that use them.
        generator: Where chance comes from, for methods and rules that use it.

    Returns:
        New parameters with the dtypes, devices and integer buffers of the first network or the base. Sums are taken in
        float32 or float64. Until they are, all aligned networks are held in memory.

    Raises:
        ValueError: There is no network, weights do not fit, the networks cannot be aligned, or the rule needs a base, a
            task or a generator that is not there, or has no use for the base.

    References:
        Ainsworth et al. (2023), Git Re-Basin; Crisostomi et al. (2024), C2M3; those of the rules.
    """
    return _made(params, symmetry, method, weights, rule, base, task, generator).params


def merged(
    params: Sequence[Mapping[str, Tensor]],
    symmetry: Symmetry,
    *,
    method: Method | None = None,
    weights: Sequence[float] | None = None,
    rule: Rule | None = None,
    base: Mapping[str, Tensor] | None = None,
    task: Task | None = None,
    generator: torch.Generator | None = None,
    labels: Sequence[str] | None = None,
) -> Merged:
    """`merge`, and the record of it: `.params` is what `merge` returns, `.record` prints as a model card.

    With a task, every network, the result and (for means) the same mean without alignment are evaluated on it; means
    are prepared first as the task says.

    Args:
        params: The networks.
        symmetry: Of their architecture.
        method: How to align.
        weights: One for each network.
        rule: What is done with the aligned networks.
        base: The network that task vectors count from.
        task: For methods and rules that use it, and for the record.
        generator: For methods and rules that use chance.
        labels: What the record calls the networks, the base last where there is one; numbers unless given.

    Raises:
        ValueError: As `merge`, or the labels are not as many as the networks.
    """
    made = _made(params, symmetry, method, weights, rule, base, task, generator)
    expected = len(params) + (base is not None)
    names = [f"network {k + 1}" for k in range(len(params))] + ["base"][: expected - len(params)]
    if labels is not None and len(labels) != expected:
        raise ValueError(f"labels are {list(labels)}, but {expected} networks need one each (the base last)")
    names = names if labels is None else list(labels)
    reference = params[0] if base is None else base
    buffers = made.aligned.symmetry.buffers
    record = MergeRecord(
        networks=tuple(names[: len(params)]),
        base=None if base is None else names[-1],
        rule=str(made.rule),
        alignment=str(made.method),
        weights=made.weights,
        initial=made.aligned.initial,
        objective=made.aligned.objective,
        before=tuple(distance(reference, network, buffers) for network in params),
        after=tuple(distance(reference, network, buffers) for network in made.networks),
        metrics=() if task is None else tuple(task.evaluate(network) for network in params),
        base_metrics=None if task is None or base is None else task.evaluate(base),
        merged_metrics=None if task is None else task.evaluate_average(made.params),
        unaligned_metrics=None
        if task is None or base is not None
        else task.evaluate_average(mean(params, made.weights)),
    )
    return Merged(made.params, record)


@dataclass(frozen=True)
class _Made:
    params: Params
    networks: tuple[Params, ...]
    aligned: ManyResult
    weights: tuple[float, ...]
    rule: Rule
    method: Method


def _made(
    params: Sequence[Mapping[str, Tensor]],
    symmetry: Symmetry,
    method: Method | None,
    weights: Sequence[float] | None,
    rule: Rule | None,
    base: Mapping[str, Tensor] | None,
    task: Task | None,
    generator: torch.Generator | None,
) -> _Made:
    if not params:
        raise ValueError("there is no network to merge; give at least one")
    rule = Average() if rule is None else rule
    if isinstance(rule, MeanRule):
        if base is not None:
            raise ValueError(
                f"{rule} is a mean of the networks and takes no base; leave it out, put it among the networks, or "
                "use a rule for task vectors: TaskArithmetic, Ties or Dare"
            )
        # Weights that do not fit are refused before the work of aligning.
        Average().shares(params, weights, None)
        method = MergeMany() if method is None else method
        aligned = align_many(params, symmetry, method=method, task=task, generator=generator)
        networks = aligned.params
        shares = rule.shares(networks, weights, task)
        return _Made(mean(networks, shares), networks, aligned, shares, rule, method)
    if base is None:
        raise ValueError(f"{rule} combines what networks differ by from a base network; give it as `base`")
    factors = rule.factors(weights, len(params))
    method = WeightMatching() if method is None else method
    aligned = align_many([base, *params], symmetry, method=method, task=task, generator=generator)
    networks = aligned.params[1:]
    result = _combined(base, networks, aligned.symmetry, rule, factors, generator)
    return _Made(result, networks, aligned, factors, rule, method)


def _combined(
    base: Mapping[str, Tensor],
    networks: Sequence[Mapping[str, Tensor]],
    symmetry: Symmetry,
    rule: VectorRule,
    factors: Sequence[float],
    generator: torch.Generator | None,
) -> Params:
    """The base plus what the rule makes of the task vectors, in float64; statistics are averaged."""
    statistics = mean([{name: network[name] for name in symmetry.buffers if name in network} for network in networks])
    tied = {name: names for names in symmetry.tied for name in names}
    result: Params = {}
    for name, tensor in base.items():
        known = next((other for other in tied.get(name, ()) if other in result), None)
        if known is not None:
            result[name] = result[known].clone()  # One tensor of the model: chance must not tell its names apart.
        elif not tensor.is_floating_point() or tensor.numel() == 0:
            result[name] = tensor.clone()
        elif name in statistics:
            result[name] = statistics[name].to(tensor)
        else:
            start = tensor.double()
            vectors = torch.stack([network[name].to(start) - start for network in networks])
            result[name] = (start + rule.combine(vectors, factors, generator)).to(tensor.dtype)
    return result

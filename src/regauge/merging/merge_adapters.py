"""Merging of adapters without their base, by combining their weight changes instead of their factors."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regauge.checkpoints.checkpoint import Checkpoint
from regauge.checkpoints.formats.adapters import ORIGINAL, Factors, read_factors, require_whole_change
from regauge.checkpoints.location import ADAPTER_CONFIG
from regauge.checkpoints.output import Output
from regauge.checkpoints.outputs.provenance import Input, Provenance
from regauge.checkpoints.outputs.staging import require_new_folder
from regauge.checkpoints.plain_files import read_object
from regauge.core.arguments import check_arguments
from regauge.core.params import round_to
from regauge.core.progress import Progress, no_progress
from regauge.merging.extract_adapter import (
    DUST,
    ExtractedAdapter,
    ModuleChange,
    cut_off,
    cut_off_product,
    write_adapter,
)
from regauge.merging.rule import Rule, Target, draw_seed
from regauge.merging.rules.average import Average
from regauge.merging.rules.task_arithmetic import TaskArithmetic
from regauge.merging.rules.weighted_sum import WeightedSum
from regauge.merging.settings import Number, as_weights, find_depths

SUMS = Average | TaskArithmetic | WeightedSum
"""Rules whose result is a weighted sum of the changes, which therefore also has low rank."""
APART = "merge each adapter into its base (BASE+ADAPTER) and combine the networks"
"""Advice for adapters that can only be merged together with their base."""


@check_arguments
def merge_adapters(
    adapters: Sequence[str | Path],
    out: Output | str | Path,
    *,
    rule: Rule | None = None,
    weights: Sequence[Number | str] | None = None,
    rank: int | None = None,
    generator: torch.Generator | None = None,
    progress: Progress = no_progress,
) -> ExtractedAdapter:
    """Merge adapters of one base into one adapter: `d = rule(s_1 B_1 A_1, s_2 B_2 A_2, ...)` for every matrix.

    The weight changes of adapters of one base are task vectors, so task-vector rules do not need the base. No alignment
    is necessary, because `B A` does not depend on the choice of factors. If an adapter has no factors for a module, its
    change of this module is zero. The rank of a sum is at most the sum of the ranks, so a sum is exact unless `rank` is
    smaller. Results of other rules are truncated to the largest singular values, which gives the closest matrix of the
    given rank. Tensors that adapters store in full can only be averaged, that is, combined by weighted sums whose
    factors sum to one.

    Args:
        adapters: Folders of two or more LoRA adapters of one base.
        out: The folder of the result, which has the settings of the first adapter.
        rule: The rule; `Average()` by default.
        weights: One weight for each adapter, as the rule defines weights.
        rank: The largest rank. Default: the sum of the adapters' ranks, separately for each matrix.
        generator: The source of randomness for random rules.
        progress: A function that shows the modules as they are processed.

    Raises:
        FileExistsError: The output exists and may not be replaced.
        ValueError: An adapter is not a LoRA adapter, or the adapters change a module in different shapes. Tensors that
            are stored in full need the base (DoRA, tokens), or cannot be averaged. The rule needs a task. Weights or
            rank are invalid.

    References:
        Mangrulkar et al. (2022), PEFT, `add_weighted_adapter` with "svd"; Eckart and Young (1936), The approximation
        of one matrix by another of lower rank.
    """
    rule, given = Average() if rule is None else rule, as_weights(weights)
    _require(rule, len(adapters), rank)
    place, seed = Output.of(out), draw_seed(rule, generator)
    inputs = tuple(Input(f"adapter{k}", str(path)) for k, path in enumerate(adapters, 1))
    said = {"rule": str(rule), "weights": None if weights is None else [str(one) for one in weights], "rank": rank}
    provenance = Provenance("rg.merging.merge_adapters", said, inputs)
    require_new_folder(place, "an adapter")
    opened = [Checkpoint.open(path) for path in adapters]
    configs = [read_object(one.path.parent / ADAPTER_CONFIG) for one in opened]
    every = [_read(one, config) for one, config in zip(opened, configs, strict=True)]
    names = list(dict.fromkeys(module for factors in every for module in factors))
    depths, modules = find_depths(names), list[ModuleChange]()
    tensors: dict[str, Tensor] = {}
    advance = progress("merging", len(names))
    for name in names:
        target, count = Target(f"{name}.weight", depths.get(name, 0.0), seed), len(adapters)
        shares = rule.factors(None if given is None else [target.number(one) for one in given], count)
        rule.check(target, count)
        first = next(k for k, factors in enumerate(every) if name in factors)
        own, like = every[first][name], opened[first].on_meta()
        down, up, left = _merge_module(name, opened, every, rule, shares, target, rank)
        kept = like[own.down].dtype
        down = down.reshape(len(down), *like[own.down].shape[1:])
        up = up.reshape(*up.shape, *[1] * (like[own.up].ndim - 2))
        tensors[_plain(own.down)], tensors[_plain(own.up)] = (
            round_to(one, kept, name).contiguous() for one in (down, up)
        )
        offsets = [factors[name].offsets if name in factors else () for factors in every]
        if any(offsets):
            values = [
                factors[name].scale * one.read(found[0], dtype=torch.float64)
                if found
                else torch.zeros(len(up), dtype=torch.float64)
                for one, factors, found in zip(opened, every, offsets, strict=True)
            ]
            added = rule.combine(iter(values), shares, Target(f"{name}.bias", target.depth, seed))
            tensors[_plain(next(found[0] for found in offsets if found))] = round_to(added, kept, name)
        modules.append(ModuleChange(own.module, len(down), left))
        advance(1)
    whole = _merge_whole(opened, every, rule, given)
    config = _describe(configs, modules)
    write_adapter(place, tensors | whole, config, provenance, progress)
    return ExtractedAdapter(place.path, tuple(modules), tuple(whole))


def _require(rule: Rule, count: int, rank: int | None) -> None:
    """Raise an error unless a rule can merge a given number of adapters."""
    if rank is not None and rank < 1:
        raise ValueError(f"rank is {rank}; give a positive one, or none for the sum of the ranks")
    if rule.needs_task:
        raise ValueError(f"{rule} runs the model: merge the networks BASE+ADAPTER instead")
    if count < 2 or (rule.most is not None and count > rule.most):
        wanted = "two or more" if rule.most is None else f"two to {rule.most}"
        raise ValueError(f"there are {count} adapters, but {rule} merges {wanted}")


def _read(adapter: Checkpoint, config: Mapping[str, Any]) -> dict[str, Factors]:
    """Return the factors of an adapter by module name. Raise an error if the adapter needs its base."""
    factors = read_factors(adapter.path.parent, adapter.on_meta())
    require_whole_change(adapter.label, adapter, config, APART)
    return {own.module: own for own in factors.values()}


def _merge_module(
    name: str,
    adapters: Sequence[Checkpoint],
    every: Sequence[Mapping[str, Factors]],
    rule: Rule,
    shares: Sequence[float],
    target: Target,
    rank: int | None,
) -> tuple[Tensor, Tensor, float]:
    """Return the factors A and B of a module's merged change at scale one, and the share that they leave out."""
    ups, downs = [], []
    for adapter, factors in zip(adapters, every, strict=True):
        if name in factors:
            own = factors[name]
            ups.append(adapter.read(own.up, dtype=torch.float64).flatten(1) * own.scale)
            downs.append(adapter.read(own.down, dtype=torch.float64).flatten(1))
        else:
            ups.append(torch.zeros(0, 0, dtype=torch.float64))
            downs.append(torch.zeros(0, 0, dtype=torch.float64))
    shapes = {(len(up), down.shape[1]) for up, down in zip(ups, downs, strict=True) if up.numel()}
    if len(shapes) > 1:
        raise ValueError(
            f"the adapters change {name!r} as matrices of shapes {sorted(shapes)}; give adapters of one base"
        )
    rows, columns = shapes.pop()
    ups = [up if up.numel() else up.new_zeros(rows, 0) for up in ups]
    downs = [down if down.numel() else down.new_zeros(0, columns) for down in downs]
    most = min(sum(map(len, downs)) if rank is None else rank, rows, columns)
    if isinstance(rule, SUMS):
        # A sum of the unit vectors has the rule's factors as its entries.
        scaled = rule.combine(iter(torch.eye(len(ups), dtype=torch.float64)), shares, target)
        up = torch.cat([own * scale for own, scale in zip(ups, scaled, strict=True)], 1)
        return cut_off_product(up, torch.cat(downs), most)
    changes = (up @ down for up, down in zip(ups, downs, strict=True))
    change = rule.combine(changes, shares, target)
    return cut_off(change, most, DUST * float(change.norm()))


def _merge_whole(
    adapters: Sequence[Checkpoint],
    every: Sequence[Mapping[str, Factors]],
    rule: Rule,
    weights: Sequence[Number] | None,
) -> dict[str, Tensor]:
    """Return the tensors that adapters store in full: tensors equal in all adapters are copied, and all other tensors
    are averaged.
    """
    result: dict[str, Tensor] = {}
    known = [{name for own in factors.values() for name in (own.down, own.up, *own.offsets)} for factors in every]
    others = [
        {name for name in adapter if name not in own and ORIGINAL not in name}
        for adapter, own in zip(adapters, known, strict=True)
    ]
    for name in sorted(set().union(*others)):
        lacking = [one.label for one, own in zip(adapters, others, strict=True) if name not in own]
        if lacking:
            raise ValueError(
                f"{lacking[0]!r} does not store {name!r}, which another adapter stores as a whole, so its value "
                f"depends on the base; {APART}"
            )
        values, target = [one.read(name, dtype=torch.float64) for one in adapters], Target(name)
        if any(not torch.equal(values[0], one) for one in values[1:]):
            given = None if weights is None else [target.number(one) for one in weights]
            shares = rule.factors(given, len(adapters))
            if not isinstance(rule, SUMS) or abs(sum(shares) - 1) > 1e-9 or getattr(rule, "scale", 1.0) != 1.0:
                raise ValueError(
                    f"the adapters store {name!r} as a whole, but {rule} needs its base; merge each adapter into its "
                    "base (BASE+ADAPTER) and combine the networks, or average the adapters"
                )
            values[0] = rule.combine(iter(values), shares, target)
        result[_plain(name)] = round_to(values[0], adapters[0].stored[name].dtype, name)
    return result


def _plain(name: str) -> str:
    """Return a tensor's name without the adapter's name, as PEFT writes it to files."""
    return re.sub(r"\.default(?=\.|$)", "", name)


def _describe(configs: Sequence[Mapping[str, Any]], modules: Sequence[ModuleChange]) -> dict[str, Any]:
    """Return the configuration of the result: the first adapter's configuration, with alpha equal to the rank."""
    ranks = {one.name: one.rank for one in modules}
    most = max(ranks.values())
    # PEFT takes the first pattern that a path ends with.
    other = {name: ranks[name] for name in sorted(ranks, key=len, reverse=True) if ranks[name] != most}
    saved = sorted({name for config in configs for name in config.get("modules_to_save") or ()})
    return {
        **configs[0],
        "r": most,
        "lora_alpha": most,
        "rank_pattern": other,
        "alpha_pattern": other,
        "use_rslora": False,
        "init_lora_weights": True,
        "target_modules": sorted(ranks),
        "modules_to_save": saved or None,
        "lora_bias": any(config.get("lora_bias") for config in configs),
    }

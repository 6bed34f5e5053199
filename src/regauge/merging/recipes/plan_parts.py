"""The plan of a recipe's result: the sources, the rule, the settings and the factors of every tensor."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path

import torch

from regauge.checkpoints.checkpoint import Checkpoint
from regauge.checkpoints.formats.headers import TensorSpec
from regauge.hub.layer_stack import LayerStack
from regauge.merging.assembly import Part, Place
from regauge.merging.blend import list_dtypes
from regauge.merging.recipes.recipe import Recipe, Slice, Source
from regauge.merging.recipes.recipe_methods import METHODS, SINGLE
from regauge.merging.rule import Rule, Target
from regauge.merging.settings import Number, find_depths
from regauge.merging.table import RULES

LEAST = 1e-8
"""The smallest sum by which weights are divided to normalize them."""
LINEAR_FROM = 0.9995
"""The cosine above which mergekit's slerp interpolates linearly."""
ELECTING = ("ties", "dare_ties", "della", "breadcrumbs_ties")
"""Methods that elect a sign for each entry."""


@dataclass(frozen=True)
class _Made:
    """A tensor of the result before its rule and factors are chosen."""

    name: str
    like: tuple[int, str]
    part: Slice
    sources: tuple[tuple[Source, str], ...]
    depth: float


def plan_parts(
    recipe: Recipe,
    networks: Mapping[Path, Checkpoint],
    order: Sequence[str],
    *,
    statistics: frozenset[str] = frozenset(),
    keys: Mapping[str, str] | None = None,
) -> dict[str, Part]:
    """Return the plan of a recipe's result, tensor by tensor.

    Args:
        recipe: The recipe.
        networks: The checkpoints by folder. The result has the first checkpoint's names and dtypes.
        order: The tensor names of the first checkpoint in the order of the model. Tensors before the layers belong to
            the first slice, and tensors after the layers belong to the last slice.
        statistics: Names of running statistics, which are averaged.
        keys: For each tied name, the name that represents all tied names of the tensor.

    Raises:
        ValueError: A network lacks a tensor or a layer, shapes differ, or numbers of the recipe are invalid.
    """
    numbers = {folder: k for k, folder in enumerate(networks)}
    first = next(iter(networks.values()))
    parts = {}
    for made in _tensors(recipe, networks, order):
        like = list(networks.values())[made.like[0]].stored[made.like[1]]
        for source, name in made.sources:
            found = networks[source.model].stored.get(name)
            if found is None or found.shape != like.shape:
                shape = "it lacks it" if found is None else f"has shape {tuple(found.shape)}"
                raise ValueError(
                    f"{recipe.path}, line {source.line}: {made.name!r} has shape {tuple(like.shape)} in {first.label}, "
                    f"but in {source.model} {name!r} {shape}; merge models of one architecture"
                )
        places: dict[Path, Place] = {source.model: (numbers[source.model], name) for source, name in made.sources}
        spec = TensorSpec(made.name, tuple(like.shape), first.form.dtype_of(like.dtype))
        size = max(1, like.nbytes // like.dtype.itemsize)
        rule, used, factors = _rule(recipe, made, size)
        start = made.part.base if METHODS[recipe.method].base in ("needed", "optional") else None
        if made.name in statistics and used:
            # Running statistics are averaged: by the shares of a mean, or equally.
            rule, factors = RULES["sum"].build(), factors if start is None else tuple(1 / len(used) for _ in used)
            start = None
        if start is not None:
            places.setdefault(start, (numbers[start], made.sources[0][1]))
        if not used:  # the base alone
            assert start is not None
            rule, used, factors, start = RULES["passthrough"].build(), [start], (1.0,), None
        base = None if start is None else places[start]
        key = (keys or {}).get(made.name, made.name)
        parts[made.name] = Part(spec, tuple(places[model] for model in used), base, rule, factors, key)
    return parts


def plan_rule(
    rule: Rule,
    weights: Sequence[Number] | None,
    networks: Sequence[Checkpoint],
    *,
    has_base: bool,
    statistics: frozenset[str] = frozenset(),
    keys: Mapping[str, str] | None = None,
) -> dict[str, Part]:
    """Return the plan of a result that one rule makes of whole networks. The first network is the base, if any.

    Raises:
        ValueError: Weights or settings of the rule are invalid.
    """
    first, start, parts = networks[0], int(has_base), {}
    depths, count = find_depths(first), len(networks) - start
    for name, like in first.stored.items():
        key, own = (keys or {}).get(name, name), rule
        target = Target(key, depths[name])
        rule.check(target, count)
        factors = rule.factors(None if weights is None else [target.number(one) for one in weights], count)
        if name in statistics and (has_base or not rule.has_shares):
            own, factors = RULES["average"].build(), tuple(1 / count for _ in range(count))
        base = (0, name) if has_base and own is rule else None
        spec = TensorSpec(name, tuple(like.shape), first.form.dtype_of(like.dtype))
        sources = tuple((k, name) for k in range(start, len(networks)))
        parts[name] = Part(spec, sources, base, own, factors, key, depths[name])
    return parts


def _tensors(recipe: Recipe, networks: Mapping[Path, Checkpoint], order: Sequence[str]) -> Iterator[_Made]:
    """Yield every tensor of the result, with its slice, its sources, and its depth in the slice."""
    first = next(iter(networks.values()))
    depths = find_depths(first)
    if recipe.is_whole:
        (part,) = recipe.slices
        for name in first.stored:
            yield _Made(name, (0, name), part, tuple((source, name) for source in part.sources), depths[name])
        return
    stacks = recipe.stacks
    layers = {
        stack: {folder: LayerStack.of(one, one.label, stack) for folder, one in networks.items()} for stack in stacks
    }
    own = {stack: found[next(iter(networks))] for stack, found in layers.items()}
    place = {name: k for k, name in enumerate(order)}
    roots = {stack: _root(one.prefix, stack) for stack, one in own.items()}
    starts = {s: min((place[n] for n in order if one.split(n) is not None), default=0) for s, one in own.items()}
    for name in first.stored:
        if any(one.split(name) is not None for one in own.values()):
            continue
        inside = next((stack for stack, root in roots.items() if name.startswith(root)), None)
        is_behind = place.get(name, -1) >= starts.get(inside, len(order))
        part = stacks[inside][-1 if is_behind else 0] if inside in stacks else recipe.slices[0]
        depth = depths.get(name, 0.0)
        yield _Made(name, (0, name), part, tuple((source, name) for source in part.sources), depth)
    for stack, parts in stacks.items():
        yield from _stacked(recipe, networks, parts, layers[stack])


def _root(prefix: str, stack: str | None) -> str:
    """Return the common prefix of the tensors in the submodel `stack`; empty if the model has only one stack."""
    return "" if stack is None else prefix[: f".{prefix}".index(f".{stack}.") + len(stack) + 1]


def _stacked(
    recipe: Recipe, networks: Mapping[Path, Checkpoint], slices: Sequence[Slice], layers: Mapping[Path, LayerStack]
) -> Iterator[_Made]:
    """Yield the tensors of one stack of layers."""
    own, number = layers[next(iter(networks))], 0
    for part in slices:
        ranges = [source.layers or (0, layers[source.model].count) for source in part.sources]
        for source, (_, end) in zip(part.sources, ranges, strict=True):
            if end > layers[source.model].count:
                raise ValueError(
                    f"{recipe.path}, line {source.line}: the layers end at {end}, but {source.model} has "
                    f"{layers[source.model].count}"
                )
        count = ranges[0][1] - ranges[0][0]
        for k in range(count):
            model, start = part.sources[0].model, ranges[0][0] + k
            for name in networks[model].stored:
                found = layers[model].split(name)
                if found is not None and found[0] == start:
                    sources = tuple(
                        (source, f"{layers[source.model].prefix}{begin + k}{found[1]}")
                        for source, (begin, _) in zip(part.sources, ranges, strict=True)
                    )
                    like = (list(networks).index(model), name)
                    depth = k / (count - 1) if count > 1 else 1.0
                    yield _Made(f"{own.prefix}{number}{found[1]}", like, part, sources, depth)
            number += 1


def _rule(recipe: Recipe, made: _Made, size: int) -> tuple[Rule, list[Path], tuple[float, ...]]:
    """Return the rule for one tensor with its settings, the models that the rule combines, and their factors."""
    method, where = METHODS[recipe.method], f"{recipe.path}: at {made.name!r}"

    def common(key: str) -> float:
        found = recipe.number(key, made.part, None, made.name, made.depth)
        return _given(found, method.common[key], key, where)

    def own(source: Source, name: str, key: str) -> float:
        found = recipe.number(key, made.part, source, name, made.depth)
        return _given(found, method.own[key], f"{key} of {source.model}", where)

    is_apart = method.base in ("needed", "optional")
    chosen = [(source, name) for source, name in made.sources if not (is_apart and source.model == made.part.base)]
    used = [source.model for source, _ in chosen]
    numbers = {key: tuple(own(source, name, key) for source, name in chosen) for key in method.own}
    settings: dict[str, object] = {}
    weights = numbers.get("weight", (1.0,) * len(used))
    if recipe.method in SINGLE and len(used) == 1:
        return RULES["passthrough"].build(), used, (1.0,)
    if method.base == "member":
        t = common("t") if recipe.method == "slerp" else 0.5
        threshold = {"linear_from": LINEAR_FROM} if recipe.method == "slerp" else {}
        return (
            RULES[method.rule].build(**threshold),
            sorted(used, key=lambda model: model != made.part.base),
            (1 - t, t),
        )
    if recipe.method == "nuslerp" and len(used) == 2:
        total = sum(weights)
        t = weights[1] / total if abs(total) >= 1e-6 else 0.5
        # mergekit's "row-wise" is along the first axis.
        axis = None if common("nuslerp_flatten") else 0 if common("nuslerp_row_wise") else -1
        return RULES["slerp"].build(axis=axis), used, (1 - t, t)
    if recipe.method == "passthrough":
        return RULES["passthrough"].build(scale=numbers["scale"][0]), used, (1.0,)
    if recipe.method in ("karcher", "model_stock", "nuslerp", "sce"):
        weights = tuple(1 / len(used) for _ in used)
    is_normalized = any(common(key) for key in ("normalize", "normalize_weights") if key in method.common)
    if recipe.method in ELECTING:
        settings["is_normalized"] = is_normalized
    elif is_normalized and used:
        if abs(sum(weights)) < LEAST:
            raise ValueError(f"{where} the weights sum to {sum(weights):g} and cannot be normalized; change them")
        weights = tuple(weight / sum(weights) for weight in weights)
    if "lambda" in method.common:
        settings["scale"] = common("lambda")
    if "density" in numbers:
        kept = [k for k, density in enumerate(numbers["density"]) if density > 0]  # others contribute nothing
        used, weights = [used[k] for k in kept], tuple(weights[k] for k in kept)
        shares = {key: [one[k] for k in kept] for key, one in numbers.items()}
        norm = common("rescale_norm") if "rescale_norm" in method.common and common("rescale") else None
        settings |= _densities(recipe.method, shares, size, where, is_rescaled=bool(common("rescale")), norm=norm)
    if recipe.method == "karcher":
        settings |= {"steps": int(common("max_iter")), "tolerance": common("tol")}
    if recipe.method == "model_stock":
        settings["by_rows"] = bool(common("filter_wise"))
    if recipe.method == "nearswap":
        settings["reach"] = max(0.0, common("t"))
    if recipe.method == "sce":
        settings["density"] = common("select_topk")
        used = used if settings["density"] else []
    if method.rule == "ram":
        keys = {"epsilon": "least_change", "r": "gain", "alpha": "most_overlap"}
        settings |= {keys[key]: common(key) for key in method.common}
    if not used:
        return RULES["passthrough"].build(), used, ()
    try:
        return RULES[method.rule].build(**settings), used, weights
    except ValueError as error:
        raise ValueError(f"{where} {error}") from error


def _densities(
    method: str,
    numbers: Mapping[str, Sequence[float]],
    size: int,
    where: str,
    *,
    is_rescaled: bool,
    norm: float | None,
) -> dict[str, object]:
    """Return the settings of a rule that keeps, for each model, a fraction of the `size` entries of a tensor."""
    densities = numbers["density"]
    if "dare" in method:
        return {"drop": tuple(1 - density for density in densities), "is_rescaled": is_rescaled}
    if "della" in method:
        for density, epsilon in zip(densities, numbers["epsilon"], strict=True):
            if density < 1 and not (density - epsilon > 0 and density + epsilon < 1):
                raise ValueError(
                    f"{where} the density {density:g} with the epsilon {epsilon:g} makes probabilities from "
                    f"{density - epsilon:g} to {density + epsilon:g}, but both must lie between 0 and 1: choose a "
                    "smaller epsilon"
                )
        return {"density": tuple(densities), "epsilon": tuple(numbers["epsilon"]), "is_rescaled": is_rescaled}
    # mergekit keeps whole numbers of entries, rounded down.
    kept = [min(size, max(1, int(density * size))) for density in densities]
    settings: dict[str, object] = {"density": tuple(count / size for count in kept), "keeps_norm": norm}
    if "gamma" in numbers:
        largest = zip(numbers["gamma"], kept, strict=True)
        settings["gamma"] = tuple(min(int(gamma * size), size - count) / size for gamma, count in largest)
    return settings


def choose_dtype(recipe: Recipe, networks: Mapping[Path, Checkpoint]) -> tuple[str | None, str | None]:
    """Return the dtype of the result, or None to keep the dtypes of the models, and a message if the dtypes of the
    models differ.

    As in mergekit, the recipe sets the dtype. If the recipe sets no dtype, the widest dtype of the models is used.
    `passthrough` keeps the dtype of every tensor.
    """
    if recipe.dtype is not None:
        return recipe.dtype, None
    listed = list_dtypes(list(networks.values()))
    if listed is None:
        return None, None
    chosen, what = None, "keeps them, tensor by tensor"
    if recipe.method != "passthrough":
        found = {one.dtype for network in networks.values() for one in network.stored.values()}
        widest = reduce(torch.promote_types, (dtype for dtype in found if dtype.is_floating_point))
        chosen = str(widest).removeprefix("torch.")
        what = f"has {chosen}, which holds all"
    return chosen, f"the models differ in dtype ({listed}); the result {what}: write dtype in the recipe to choose"


def _given(found: float | None, default: float | None, key: str, where: str) -> float:
    if found is not None:
        return found
    if default is None:
        raise ValueError(f"{where} there is no {key}: no filter matches this tensor; add a value without a filter")
    return default

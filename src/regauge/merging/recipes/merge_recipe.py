"""Merges computed tensor by tensor, from a recipe or from folders with different tokens."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Unpack

from regauge.alignment import WeightMatching
from regauge.checkpoints.checkpoint import Checkpoint
from regauge.checkpoints.form import Form
from regauge.checkpoints.output import Output
from regauge.checkpoints.outputs.provenance import Input, Provenance
from regauge.core.arguments import check_arguments
from regauge.core.given import given_or_seed
from regauge.core.progress import no_progress
from regauge.hub.tokens import Vocabulary
from regauge.hub.vocabulary import read_choice
from regauge.merging.assemble_mixture import AssembledMixture, assemble_mixture
from regauge.merging.merge_record import MergeResult
from regauge.merging.recipes.assemble import Assembled, AssemblySetting, Planner, Request, assemble
from regauge.merging.recipes.plan_parts import choose_dtype, plan_parts, plan_rule
from regauge.merging.recipes.read_mixture import MixtureRecipe, read_mixture
from regauge.merging.recipes.read_recipe import read_recipe
from regauge.merging.recipes.recipe import Recipe
from regauge.merging.rule import Rule
from regauge.merging.rules.average import Average
from regauge.merging.settings import Number, as_weights

LOG = logging.getLogger("regauge.merging")
KEPT = "recipe.yml"
"""The file name of the recipe's copy in an output folder."""


def merge_recipe(
    path: str | Path, out: Output | str | Path, **setting: Unpack[AssemblySetting]
) -> MergeResult | AssembledMixture:
    """Merge models as described by a recipe, a YAML file in mergekit's format. Unaligned models are aligned first.

    If a recipe has `experts`, in the format of mergekit-moe, `assemble_mixture` assembles the described mixture of
    experts.

    Models may be larger than memory, because tensors are read, combined and written one at a time. Notes about the
    recipe, the models and their tokens are logged.

    Args:
        path: The recipe file. Relative folders in the recipe are relative to the folder of this file.
        out: The folder or `.safetensors` file for the result, or an `Output`. The model card is written next to the
            result. The output may set a dtype only if the recipe sets no dtype.
        setting: `model`, `symmetry` and `method` are used to align models. By default, the model is that of the first
            folder, and the method is `WeightMatching()`. `generator` is the source of randomness for random rules.
            Default: a generator with seed 0. `memory` and `progress` are as in `rg.merge`.

    Returns:
        The result with its record. The `params` of the result are read from `out` on access. For a mixture, the return
        value is the result of `assemble_mixture`.

    Raises:
        FileExistsError: The output exists and may not be replaced.
        FileNotFoundError: The recipe or one of its models does not exist.
        ValueError: A line of the recipe is unknown, the recipe does not fit the models, or the memory does not suffice.

    References:
        Goddard et al. (2024), mergekit.
    """
    mixture = read_mixture(Path(path))
    if mixture is not None:
        return _mix(mixture, Output.of(out), setting)
    return _result(_by_recipe(Path(path), Output.of(out), setting))


def plan_recipe(path: str | Path, out: Output | str | Path, **setting: Unpack[AssemblySetting]) -> Assembled:
    """Plan the reads, the memory and the output of `merge_recipe`, without writing anything.

    Raises:
        ValueError: The recipe describes a mixture.
    """
    if read_mixture(Path(path)) is not None:
        raise ValueError(f"{str(path)!r} is a recipe of a mixture, for which there is no plan; merge it without a plan")
    return _by_recipe(Path(path), Output.of(out), setting, dry_run=True)


@check_arguments
def merge_folders(
    folders: Sequence[str | Path],
    out: Output | str | Path,
    *,
    tokenizer: str = "union",
    rule: Rule | None = None,
    weights: Sequence[Number | str] | None = None,
    base: str | Path | None = None,
    **setting: Unpack[AssemblySetting],
) -> MergeResult:
    """Merge networks in folders with different tokens: convert them to one vocabulary, align them and combine them.

    Args:
        folders: Folders with config.json and a tokenizer.
        out: The output, as in `merge_recipe`.
        tokenizer: The vocabulary of the result. The vocabulary is "union" (all tokens), "base" (the tokens of the base,
            or of the first folder without a base), or the path of a folder whose tokens are used.
        rule: The rule that combines the aligned networks; `Average()` by default. Rules that need a task are not
            possible.
        weights: One weight for each network, as in `rg.merge`.
        base: The folder of the base. Task vectors are the differences of the networks from the base.
        setting: Settings as in `merge_recipe`.

    Raises:
        FileExistsError: The output exists and may not be replaced.
        ValueError: A folder has no tokenizer, the rule needs a task, or the memory does not suffice.
    """
    return _result(_by_tokens(folders, Output.of(out), tokenizer, rule, weights, base, setting))


def plan_folders(
    folders: Sequence[str | Path],
    out: Output | str | Path,
    *,
    tokenizer: str = "union",
    rule: Rule | None = None,
    weights: Sequence[Number | str] | None = None,
    base: str | Path | None = None,
    **setting: Unpack[AssemblySetting],
) -> Assembled:
    """Plan the reads, the memory and the output of `merge_folders`, without writing anything."""
    return _by_tokens(folders, Output.of(out), tokenizer, rule, weights, base, setting, dry_run=True)


def _result(made: Assembled) -> MergeResult:
    assert made.result is not None
    return made.result


def _mix(recipe: MixtureRecipe, out: Output, setting: AssemblySetting) -> AssembledMixture:
    """Assemble a mixture as described by a recipe."""
    given = [name for name in ("model", "symmetry", "method") if setting.get(name) is not None]
    if given == ["method"] and setting.get("method") == WeightMatching():
        given = []
    if given:
        raise ValueError(f"a mixture does not change its experts; leave {given[0]} out, and align experts first")
    if recipe.dtype is not None and out.dtype is not None:
        raise ValueError("the recipe sets the dtype of the result; leave `dtype=` out, or dtype in the recipe")
    if recipe.dtype is not None:
        out = replace(out, dtype=Form.of(recipe.dtype).dtype)
    return assemble_mixture(
        recipe.base,
        recipe.experts,
        out,
        router=recipe.router,
        chosen=recipe.chosen,
        shared=recipe.shared,
        generator=given_or_seed(setting.get("generator")),
        progress=setting.get("progress", no_progress),
    )


def _by_recipe(path: Path, out: Output, setting: AssemblySetting, *, dry_run: bool = False) -> Assembled:
    recipe = read_recipe(path)
    for note in recipe.notes:
        LOG.info("note: %s", note)
    folders = _order(recipe)
    if out.dtype is None or recipe.dtype is not None:
        dtype, told = choose_dtype(recipe, {folder: Checkpoint.open(str(folder)) for folder in folders})
        if told is not None:
            LOG.info("note: %s", told)
        if dtype is not None and out.dtype is not None:
            raise ValueError("the recipe sets the dtype of the result; leave `dtype=` out, or dtype in the recipe")
        out = out if dtype is None else replace(out, dtype=Form.of(dtype).dtype)
    plan: Planner = lambda networks, order, statistics, keys: plan_parts(  # noqa: E731
        recipe, dict(zip(folders, networks, strict=True)), order, statistics=statistics, keys=keys
    )
    provenance = out.provenance or _provenance("merge_recipe", out, setting, {}, [Input("recipe", str(path))])
    models = tuple(Input("model", str(folder)) for folder in folders)
    request = Request(
        folders=folders,
        has_base=recipe.base is not None,
        plan=plan,
        rule=f"{recipe.method} of {recipe.path.name}",
        provenance=replace(provenance, inputs=(*provenance.inputs, *models)),
        vocabulary=recipe.vocabulary,
        align=recipe.align,
        layers=_layers(recipe),
        template=recipe.chat_template,
        files={KEPT: recipe.path.read_bytes()},
    )
    return assemble(request, out, dry_run=dry_run, **setting)


def _by_tokens(
    folders: Sequence[str | Path],
    out: Output,
    tokenizer: str,
    rule: Rule | None,
    weights: Sequence[Number | str] | None,
    base: str | Path | None,
    setting: AssemblySetting,
    *,
    dry_run: bool = False,
) -> Assembled:
    chosen = Average() if rule is None else rule
    if chosen.needs_task:
        raise ValueError(f"`tokenizer=` cannot be combined with {chosen}, which needs data; choose another rule")
    paths = [Path(one) for one in ([*folders] if base is None else [base, *folders])]
    plan: Planner = lambda networks, _, statistics, keys: plan_rule(  # noqa: E731
        chosen, as_weights(weights), networks, has_base=base is not None, statistics=statistics, keys=keys
    )
    told = None if weights is None else list(map(str, weights))
    settings = {"rule": repr(chosen), "weights": told, "tokenizer": tokenizer}
    inputs = [Input("networks", str(one)) for one in folders]
    inputs += [] if base is None else [Input("base", str(base))]
    request = Request(
        folders=tuple(paths),
        has_base=base is not None,
        plan=plan,
        rule=str(chosen),
        provenance=out.provenance or _provenance("merge_folders", out, setting, settings, inputs),
        vocabulary=Vocabulary(read_choice(tokenizer, paths)),
    )
    return assemble(request, out, dry_run=dry_run, **setting)


def _provenance(
    name: str, out: Output, setting: AssemblySetting, settings: Mapping[str, object], inputs: list[Input]
) -> Provenance:
    """Return the provenance of an output that is written by a call from Python."""
    generator, method = setting.get("generator"), setting.get("method")
    known = {**settings, "method": repr(method or WeightMatching()), **out.form.settings}
    seed = 0 if generator is None else generator.initial_seed()
    return Provenance(f"rg.merging.{name}", known, tuple(inputs), seed)


def _order(recipe: Recipe) -> tuple[Path, ...]:
    """Return the folder of every model once: the base first, or the first model without a base."""
    found: dict[Path, Path] = {}
    for folder in recipe.models:
        known = found.setdefault(folder.resolve(), folder)
        if known != folder:
            raise ValueError(f"{recipe.path} calls one folder {str(known)!r} and {str(folder)!r}; give it one name")
    return tuple(found.values())


def _layers(recipe: Recipe) -> dict[str | None, tuple[int, ...]] | None:
    """Return, for each stack with selected layers, the source layers whose settings are copied to the layers of the
    result.
    """
    if recipe.is_whole:
        return None
    ranges = {stack: [part.sources[0].layers for part in parts] for stack, parts in recipe.stacks.items()}
    cut = {stack: [one for one in own if one is not None] for stack, own in ranges.items()}
    return {stack: tuple(k for first, end in own for k in range(first, end)) for stack, own in cut.items() if own}

"""`regauge merge --recipe FILE`: what a mergekit YAML file asks for, with models aligned where they differ."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path

from regauge.checkpoints.checkpoint import Checkpoint
from regauge.checkpoints.outputs.provenance import Input
from regauge.cli.assemble import Request, assemble
from regauge.cli.options import Matching, Merge, UsageError
from regauge.cli.output import warn
from regauge.cli.provenance import provenance_of
from regauge.merging.assembly import Part
from regauge.merging.recipes.plan_parts import choose_dtype, plan_parts
from regauge.merging.recipes.read_recipe import read_recipe
from regauge.merging.recipes.recipe import Recipe

KEPT = "recipe.yml"
"""The recipe in an output folder."""
SHARED = ("output", "recipe", *(one.name for one in fields(Matching)))
SAID = [one.name for one in fields(Merge) if one.name not in SHARED]
"""Options of `regauge merge` for what a recipe says."""


def run_recipe(options: Merge) -> None:
    """Write what the recipe asks for."""
    assert options.recipe is not None
    blank = {one.name: one.default for one in fields(Merge)} | {"checkpoints": ()}
    given = [name for name in SAID if getattr(options, name) != blank[name]]
    if given:
        what = "checkpoints" if given[0] == "checkpoints" else f"--{given[0]}"
        raise UsageError(f"the recipe says what is merged and how; leave {what} out, or merge without --recipe")
    recipe = read_recipe(options.recipe)
    for note in recipe.notes:
        warn(f"note: {note}")
    folders = _order(recipe)
    dtype, told = choose_dtype(recipe, {folder: Checkpoint.open(str(folder)) for folder in folders})
    if options.written.dtype is not None and recipe.dtype is None:
        dtype = told = None
    if told is not None:
        warn(f"note: {told}")

    def plan(
        networks: Sequence[Checkpoint], order: Sequence[str], statistics: frozenset[str], keys: Mapping[str, str]
    ) -> dict[str, Part]:
        named = dict(zip(folders, networks, strict=True))
        return plan_parts(recipe, named, order, statistics=statistics, keys=keys)

    provenance = provenance_of(options)
    settings = {name: value for name, value in provenance.settings.items() if name.replace("-", "_") not in SAID}
    models = tuple(Input("model", str(folder)) for folder in folders)
    assemble(
        options,
        Request(
            folders=folders,
            has_base=recipe.base is not None,
            plan=plan,
            rule=f"{recipe.method} of {recipe.path.name}",
            provenance=replace(provenance, settings=settings, inputs=(*provenance.inputs, *models)),
            vocabulary=recipe.vocabulary,
            align=recipe.align,
            layers=_layers(recipe),
            dtype=dtype,
            template=recipe.chat_template,
            files={KEPT: recipe.path.read_bytes()},
        ),
    )


def _order(recipe: Recipe) -> tuple[Path, ...]:
    """The folders of all models, each once: the base, else the first model, first."""
    found: dict[Path, Path] = {}
    for folder in recipe.models:
        known = found.setdefault(folder.resolve(), folder)
        if known != folder:
            raise UsageError(f"{recipe.path} calls one folder {str(known)!r} and {str(folder)!r}; give it one name")
    return tuple(found.values())


def _layers(recipe: Recipe) -> dict[str | None, tuple[int, ...]] | None:
    """By the stacks that are cut, for each layer of the result the number of the layer whose settings it has."""
    if recipe.is_whole:
        return None
    ranges = {stack: [part.sources[0].layers for part in parts] for stack, parts in recipe.stacks.items()}
    cut = {stack: [one for one in own if one is not None] for stack, own in ranges.items()}
    return {stack: tuple(k for first, end in own for k in range(first, end)) for stack, own in cut.items() if own}

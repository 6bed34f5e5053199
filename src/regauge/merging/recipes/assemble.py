"""Assembly of a network from the tensors of several networks. Tensors are transformed and combined one at a time.

Recipes, and merges of networks with different tokens, use this module.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, TypeAlias, TypedDict, Unpack, cast

import torch

from regauge.alignment import Method
from regauge.alignment.representatives import as_given
from regauge.alignment.streamed.job import StreamedJob, plan_job
from regauge.checkpoints.checkpoint import Checkpoint
from regauge.checkpoints.form import Form
from regauge.checkpoints.formats.headers import StoredTensor
from regauge.checkpoints.formats.state_dicts import match
from regauge.checkpoints.job import FileJob, open_job
from regauge.checkpoints.memory_limit import MemoryLimit, large_blocks_returned, size_text
from regauge.checkpoints.names.converted import Converted
from regauge.checkpoints.names.from_transformers import expected_of, name_for
from regauge.checkpoints.output import Output
from regauge.checkpoints.outputs.provenance import Provenance
from regauge.checkpoints.outputs.staging import Staging
from regauge.checkpoints.representative_checkpoint import MovedCheckpoint
from regauge.checkpoints.writing import SUFFIX, Shard, save_text
from regauge.core.element import Element
from regauge.core.params import Params
from regauge.core.progress import Progress, no_progress
from regauge.core.symmetry import Symmetry
from regauge.hub import Model, name_model, open_model, open_networks
from regauge.hub.configuration import CONFIG, Configuration
from regauge.hub.tokens import TokenPlan, Vocabulary
from regauge.hub.vocabulary import UNION, bring_together, choose_template, template_files, unite
from regauge.merging.assembly import Assembly, Part
from regauge.merging.merge_record import MergeRecord, MergeResult, Need, card_path
from regauge.merging.rule import draw_seed
from regauge.merging.streamed import report_of

LOG = logging.getLogger("regauge.merging")
Planner: TypeAlias = Callable[[Sequence[Checkpoint], Sequence[str], frozenset[str], Mapping[str, str]], dict[str, Part]]
"""A function that plans each tensor of the result. Arguments: the networks, the ordered tensor names, the names of
running statistics, and tied names."""


@dataclass(frozen=True)
class Request:
    """A request for a merge: the networks, and the form of the result.

    Attributes:
        folders: The networks. The result has the coordinates, names and files of the first network.
        has_base: Whether the first network is a base.
        plan: The function that plans the tensors of the result.
        rule: The rule's name on the model card.
        provenance: The provenance that is written with the output.
        vocabulary: The tokens of the result; None if all networks must have the same tokens.
        align: Whether the networks are aligned; "auto" aligns them only if alignment is needed.
        layers: For each stack from which layers are selected, indices of layers in the first network's configuration.
            The layers of the result get the settings of the selected layers.
        template: The chat template of the result.
        files: Further files of an output folder.
    """

    folders: tuple[Path, ...]
    has_base: bool
    plan: Planner
    rule: str
    provenance: Provenance
    vocabulary: Vocabulary | None = None
    align: bool | Literal["auto"] = True
    layers: Mapping[str | None, tuple[int, ...]] | None = None
    template: str | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class Assembled:
    """The result of merging tensor by tensor, or only the plan for it.

    Attributes:
        shards: The weight files of the result.
        alignment: The plan of the alignment; present only if no files were written and all layers are merged.
        result: The result; None if only a plan was made.
    """

    shards: tuple[Shard, ...]
    alignment: StreamedJob | None = None
    result: MergeResult | None = None


class AssemblySetting(TypedDict, total=False):
    """Settings for alignment, for reading networks, and for displaying progress; see `merge_recipe`."""

    model: Model | str | None
    symmetry: Symmetry | None
    method: Method | None
    generator: torch.Generator | None
    memory: int | str | MemoryLimit | None
    progress: Progress


class Setting(AssemblySetting, total=False):
    """The settings of `assemble`, which can also make only a plan."""

    dry_run: bool


@dataclass(frozen=True)
class _Ready:
    """Networks that are ready to be combined, with the objectives and notes of their alignment."""

    networks: tuple[Checkpoint, ...]
    symmetry: Symmetry
    elements: tuple[Element | None, ...]
    initial: float = 0.0
    objective: float = 0.0
    reports: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    spans: tuple[tuple[float, float], ...] = ()
    plan: StreamedJob | None = None


def assemble(request: Request, out: Output, **setting: Unpack[Setting]) -> Assembled:
    """Align the networks if alignment is needed, and write the combined network tensor by tensor, with a model card.

    Raises:
        FileExistsError: The output exists and may not be replaced.
        ValueError: The networks cannot be combined as the recipe says, or the memory does not suffice.
    """
    progress, dry_run = setting.get("progress", no_progress), setting.get("dry_run", False)
    memory = MemoryLimit.of(setting.get("memory")).from_now()
    out = replace(out, provenance=request.provenance)
    job = open_job(request.folders, 0, out=out, memory=memory, work="merging")
    assert job is not None
    if not dry_run:
        job.require_name()
    job, config, tokens, beside = _unite(request, job, out.path)
    with ExitStack() as stack:
        other = None if config is None or tokens is None else stack.enter_context(config.as_folder())
        order: list[str] = []
        if config is not None and request.layers is not None:
            order = [name for names in config.names_in(job.checkpoints[0]).values() for name in names]
        staging, ready = _align(request, job, other, stack, setting)
        networks, symmetry = ready.networks, ready.symmetry
        keys = {name: names[0] for names in symmetry.tied for name in names}
        parts = request.plan(networks, order, frozenset(symmetry.buffers), keys)
        random = next((part.rule for part in parts.values() if part.rule.is_random), None)
        chance = setting.get("generator") or torch.Generator().manual_seed(0)
        seed = None if random is None else draw_seed(random, chance)
        assembly = Assembly(parts, networks, symmetry, ready.elements, tokens, seed)
        if assembly.held() > job.limit.nbytes:
            raise ValueError(
                f"combining the largest tensor needs {size_text(assembly.held())} of memory, but only "
                f"{size_text(job.limit.nbytes)} are allowed; allow more"
            )
        if config is not None:
            if request.layers is not None:
                for cut, kept in request.layers.items():
                    config.keep_layers(kept, cut)
                _require_model(config, parts, networks[0])
            beside[CONFIG] = config.content
        shards = tuple(_shards(networks[0], parts, out.path, is_whole=request.layers is None))
        if staging is None:
            return Assembled(shards, ready.plan if request.layers is None else None)
        staging.beside = beside
        with large_blocks_returned():
            staging.write(shards, assembly.pieces, progress, networks)
        record = _record(request, ready, parts)
        record = replace(record, origin=request.provenance.facts(progress))
        if staging.is_first:
            save_text(record.card, staging.content / card_path(staging.out).name)
        params = cast(Params, staging.publish(shards, networks[0]))
    elements = tuple(symmetry.identity() if one is None else one for one in ready.elements[int(request.has_base) :])
    return Assembled(shards, result=MergeResult(params, elements, symmetry, record))


def _unite(
    request: Request, job: FileJob, out: Path
) -> tuple[FileJob, Configuration | None, TokenPlan | None, dict[str, bytes | None]]:
    """Convert the networks to one vocabulary.

    Returns:
        The networks; the configuration of the result if it changes; the plan for token rows; and those files of the
        output folder that differ from the files of the first network.
    """
    places = [one.path.parent for one in job.checkpoints]
    config = Configuration(places[0]) if request.vocabulary or request.layers is not None else None
    beside: dict[str, bytes | None] = dict(request.files)
    tokens: TokenPlan | None = None
    if request.vocabulary is None:
        found = bring_together(job.checkpoints, remedy=f"choose a common vocabulary: {UNION}")
        job, tokens = replace(job, checkpoints=found.networks), found.plan
    else:
        assert config is not None
        united = unite(job.checkpoints, request.vocabulary, config, base=0 if request.has_base else None)
        LOG.info("all networks have the same vocabulary" if united is None else united.note)
        if united is not None:
            united.require_place(out)
            job, tokens = replace(job, checkpoints=united.networks), united.plan
            beside |= united.files
    if request.template is not None:
        template = choose_template(request.template, places)
        beside |= {} if template is None else template_files(template, beside, places[0])
    return job, config, tokens, beside


def _align(
    request: Request, job: FileJob, other: Path | None, stack: ExitStack, setting: Setting
) -> tuple[Staging | None, _Ready]:
    """Return the staging folder of the output, and the networks in common coordinates.

    Args:
        request: The merge to carry out.
        job: The networks.
        other: A folder with the networks' new configuration, if it differs from the first network's configuration.
        stack: The exit stack that closes opened resources.
        setting: Settings of the alignment.
    """
    progress, dry_run = setting.get("progress", no_progress), setting.get("dry_run", False)
    first, *others = job.checkpoints
    labels = [one.label for one in job.checkpoints]
    alike = all(
        one.stored.keys() == first.stored.keys()
        and all(one.stored[name].shape == tensor.shape for name, tensor in first.stored.items())
        for one in others
    )
    if request.align is True and not alike:
        raise ValueError("models with different tensors cannot be aligned; write align: auto or false in the recipe")
    if request.align is False or not others or not alike:
        inputs = {
            "files": {str(f.resolve()): _stamp(f) for one in job.checkpoints for f in one.files},
            "recipe": request.provenance.to_json(has_weights=False),
            "form": repr(first.form),
        }
        staging = None
        if not dry_run:
            nbytes = 0 if request.layers else sum(shard.nbytes for shard in job.shards)
            staging = stack.enter_context(job.stage(inputs, nbytes))
        why = () if request.align is False or not others else ("not aligned: the models have different tensors",)
        return staging, _Ready(job.checkpoints, Symmetry(()), (None,) * len(labels), reports=why)
    model, symmetry = setting.get("model"), setting.get("symmetry")
    if model is None and symmetry is None:
        model = name_model(first)
    model = open_model(model, values="never") if isinstance(model, str) else model
    if model is not None and other is not None and model.name == first.home:
        model = model.in_folder(other)
    found = open_networks(job.checkpoints, model, symmetry=symmetry, streamed=True)
    for note in found.notes:
        LOG.info(note)
    plain, told_as_given = as_given(found.symmetry)
    streamed = plan_job(replace(job, checkpoints=found.checkpoints), plain, setting.get("method"))
    symmetry = streamed.symmetry
    if dry_run:
        return None, _Ready(found.checkpoints, symmetry, (None,) * len(labels), plan=streamed)
    settings = {"command": "merge", "recipe": request.provenance.to_json(has_weights=False)}
    staging = stack.enter_context(streamed.begin(settings))
    elements: list[Element | None] = [None]
    distances = [(0.0, 0.0)]
    reports, initial, objective = [], 0.0, 0.0
    notes: dict[str, None] = {}
    for k, result in enumerate(streamed.match(staging, progress), 1):
        moved = MovedCheckpoint(found.checkpoints[k], symmetry, result.element)
        need = Need.of(symmetry, result.element, found.checkpoints[0], found.checkpoints[k], moved)
        is_moved = need.is_there or request.align is True
        elements.append(result.element if is_moved else None)
        distances.append((need.before, need.after if is_moved else need.before))
        reports.append(need.explain(labels[k], labels[0]) if request.align == "auto" else report_of(result, labels[k]))
        notes |= dict.fromkeys((*result.notes, *told_as_given) if is_moved else ())
        initial, objective = initial + result.initial, objective + (result.objective if is_moved else result.initial)
    networks = found.checkpoints
    if request.layers is not None and isinstance(networks[0], Converted):
        if any(element is not None for element in elements):
            raise ValueError(
                "slices of aligned models cannot be written with the names in these files; align the models first, and "
                "write align: false in the recipe"
            )
        networks, symmetry = job.checkpoints, Symmetry(())
    told = (tuple(reports), tuple(notes), tuple(distances))
    return staging, _Ready(networks, symmetry, tuple(elements), initial, objective, *told)


def _record(request: Request, ready: _Ready, parts: Mapping[str, Part]) -> MergeRecord:
    """Return the record of the merge, for the card and the report."""
    used: dict[int, set[float]] = {}
    for part in parts.values():
        for (k, _), factor in zip(part.sources, part.factors, strict=True):
            used.setdefault(k, set()).add(factor)
    networks = [k for k in range(int(request.has_base), len(ready.networks)) if k in used or len(used) == 0]
    first, unknown = ready.networks[0], (math.nan, math.nan)
    spans = [ready.spans[k] if ready.spans else unknown if k else (0.0, 0.0) for k in networks]
    moved = sum(element is not None for element in ready.elements)
    return MergeRecord(
        networks=tuple(ready.networks[k].label for k in networks),
        base=first.label if request.has_base else None,
        rule=request.rule,
        alignment=f"weights of {moved} networks, streamed" if moved else "none",
        weights=tuple(_span(used[k]) for k in networks),
        initial=ready.initial,
        objective=ready.objective,
        before=tuple(before for before, _ in spans),
        after=tuple(after for _, after in spans),
        reports=ready.reports,
        notes=(*ready.notes, *first.notes),
    )


def _span(factors: set[float]) -> float | str:
    low, high = min(factors), max(factors)
    return low if low == high else f"{low:.4g} to {high:.4g}"


def _shards(first: Checkpoint, parts: Mapping[str, Part], out: Path, *, is_whole: bool) -> list[Shard]:
    """Return the files of the result: as in the first network, or files of similar size if the layers differ."""
    file = out.name if out.suffix == SUFFIX else None
    known = first.layout(file)
    if is_whole:
        return known
    whole = Shard(file or "model.safetensors", tuple(part.spec for part in parts.values()), first.header)
    if len(known) == 1:
        return [replace(whole, tensors=tuple(sorted(whole.tensors, key=lambda spec: -spec.dtype.itemsize)))]
    return Form(shard_size=first.form.shard_size or max(one.nbytes for one in known)).layout([whole], "model")


def _require_model(config: Configuration, parts: Mapping[str, Part], like: Checkpoint) -> None:
    """Raise an error if the tensors of the result do not match its configuration."""
    stored = {
        name: StoredTensor(name, like.path, part.spec.dtype, part.spec.shape, 0, part.spec.nbytes)
        for name, part in parts.items()
    }
    module = config.module
    try:
        result = name_for(Checkpoint("the result", like.path, stored, {like.path: {}}), module)
        match(result.on_meta(), expected_of(module, result), "the result", "a model with these layers")
    except ValueError as error:
        reason = str(error).partition("; give the checkpoint")[0]
        raise ValueError(
            f"these slices do not form a network: {reason}; keep layers of one kind in their places"
        ) from error


def _stamp(file: Path) -> list[int]:
    return [file.stat().st_size, file.stat().st_mtime_ns]

"""Low-rank adapters in PEFT's format: their changes of a network, and the symmetry of their factors.

An adapter is a folder with `adapter_config.json` and `adapter_model.safetensors`. A matrix W of the network becomes `W
+ s B A`, with a factor s from the configuration. Therefore the factors `(B M^-1, M A)` define the same adapter for
every invertible M.

References:
    Hu et al. (2022), LoRA, section 4.1; Kalajdzievski (2023), rsLoRA, definition 3.2; Liu et al. (2024), DoRA,
    equation 5.
"""

import json
import math
import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from regauge.checkpoints.formats.adapter_kinds import KINDS, split_modules
from regauge.checkpoints.formats.changes import Added, CarriedBias, LowRank, Mapped, Replaced, Trained
from regauge.checkpoints.formats.kinds.bases import without_smallest
from regauge.checkpoints.formats.kinds.entries import trained_rows
from regauge.checkpoints.formats.kinds.kind import ending
from regauge.checkpoints.location import ADAPTER_CONFIG
from regauge.checkpoints.plain_files import read_object
from regauge.core.counted import shorten
from regauge.core.groups import Group, Placement
from regauge.core.symmetry import Symmetry

Result = TypeVar("Result")
Value = TypeVar("Value")
PREFIX = "base_model.model."
FACTOR = re.compile(r"(?P<module>.+)\.lora_(?P<embedding>embedding_)?(?P<factor>[AB])(\.default)?(?P<end>\.weight|)")
MAGNITUDE = re.compile(r"(?P<module>.+)\.lora_magnitude_vector(\.default)?(\.weight)?")
DIAGONAL = re.compile(r"(?P<module>.+)\.lora_diag(\.default)?")
OFFSET = re.compile(r"(?P<module>.+)\.lora_B(\.default)?\.bias")
PARTIAL = re.compile(r".*\.(lora_magnitude_vector|trainable_tokens_delta)(\..+|)")
"""Names of tensors that define a change of the weights only together with the base network."""
TRAINING = re.compile(r".+\.lora_(velora|monteclora)_.+")
"""Names of tensors that are used only in training."""
TOKENS = re.compile(r"(?P<module>.+?)(\.token_adapter)?\.trainable_tokens_delta(\.default)?")
WRAPPED = re.compile(r"\.(modules_to_save(\.default)?|base_layer)(?=\.)")
"""Names that PEFT inserts into the tensor names of layers that it stores in full."""
ORIGINAL = ".original_module."
"""The part of a name that marks an original tensor, which the adapter replaces."""
HEADED = re.compile("LM|ConditionalGeneration|PreTraining")
"""Names of architectures with an output layer over the tokens."""
TIED = (
    "the adapter {!r} changes {!r}, which is also {} of its base (tie_word_embeddings), but not {}: no network with "
    "tied embeddings can compute this; untie them first"
)
TIED_WHOLE = (
    "the adapter {!r} stores {!r} as a whole tensor, but in this base it is the same tensor as the embedding "
    "(tie_word_embeddings). The base of the adapter had a separate head. Give the base a separate head tensor, with "
    "tie_word_embeddings false; or, if the head was not trained, remove it from the adapter (modules_to_save)"
)
INITIAL = (True, False, None, "gaussian", "eva", "orthogonal", "mica")
"""Methods of initializing factors that do not change the base."""
MERGEABLE = {"use_rslora", "use_dora", "use_bdlora", "kasa_config"}
"""Variants of LoRA that are equivalent to a change of the weights."""
HARMLESS = ("eva_config", "loftq_config", "runtime_config", "megatron_config", "corda_config", "lora_ga_config",
            "velora_config", "monteclora_config")  # fmt: skip
"""Settings that only concern training and initialization."""
ELSEWHERE = ("layer_replication", "alora_invocation_tokens")
"""Settings of variants that are not equivalent to a change of the weights."""
UNPAIRED = ("use_bdlora", "kasa_config")
"""Variants of LoRA whose factors are not a pair (B, A) that can be replaced by `(B M^-1, M A)` for any invertible M."""


def adapter_symmetry(params: Mapping[str, Tensor]) -> Symmetry:
    """Return the symmetry of an adapter's factors: an invertible matrix M for each module, acting as `(B M^-1, M A)`.

    No group acts on other tensors of the adapter, such as magnitudes, offsets and whole layers.

    Args:
        params: The tensors of an adapter, by their names in the file. Linear layers have factors `lora_A` `[rank, in]`
            and `lora_B` `[out, rank]`. Convolutions have the same factors with kernel axes appended. Embeddings have
            `lora_embedding_A` `[rank, tokens]` and `lora_embedding_B` `[width, rank]`.

    Raises:
        ValueError: A factor is missing, the two factors of a module have different ranks, or there are no factors.
    """
    groups: list[Group] = []
    shapes: dict[str, tuple[int, ...]] = {}
    for module, (a, b) in _pair_factors(params).items():
        places = (Placement(a, 0), Placement(b, 1, is_inverse=True))
        groups.append(Group(module, params[a].shape[0], places, is_permuted=False, matrix="linear"))
        shapes |= {name: tuple(params[name].shape) for name in (a, b)}
    return Symmetry(tuple(groups), shapes)


def read_changes(folder: Path, params: Mapping[str, Tensor]) -> dict[str, tuple[Trained, ...]]:
    """Return the changes that an adapter makes to each tensor, in order, by the names in the adapter.

    Args:
        folder: The adapter's folder, which contains the configuration.
        params: The adapter's tensors.

    Raises:
        ValueError: The kind of the adapter is not supported, or its configuration or tensors cannot be read.
    """
    settings = _read_settings(folder)
    if settings.get("peft_type") in KINDS:
        return _kind_changes(folder, params, settings)
    config = read_config(folder)
    pairs = _pair_factors(params, is_needed=False, are_blocks=bool(settings.get("use_bdlora")))
    magnitudes = {found["module"]: name for name in params if (found := MAGNITUDE.fullmatch(name))}
    diagonals = {found["module"]: name for name in params if (found := DIAGONAL.fullmatch(name))}
    known = {name for name in params if TRAINING.fullmatch(name)}
    known = known.union(magnitudes.values(), diagonals.values(), *pairs.values())
    changes: dict[str, tuple[Trained, ...]] = {}

    def add(name: str, change: Trained) -> None:
        changes[name] = (*changes.get(name, ()), change)

    offsets = {name: found["module"] for name in params if (found := OFFSET.fullmatch(name))}
    for name in [name for name in params if TOKENS.fullmatch(name)]:
        known.add(name)
        module = WRAPPED.sub("", TOKENS.sub(r"\g<module>", name)).removeprefix(PREFIX)
        rows = _named(folder, trained_rows, module, params[name], settings.get("trainable_token_indices"))
        add(f"{module}.weight", rows)
    for name in [name for name in params if name not in known and name not in offsets and ORIGINAL not in name]:
        add(WRAPPED.sub("", name).removeprefix(PREFIX), Replaced(params[name]))
    for module, (a, b) in pairs.items():
        rank, name = params[a].shape[0], WRAPPED.sub("", module).removeprefix(PREFIX)
        magnitude = params[magnitudes[module]].flatten() if module in magnitudes else None
        is_transposed = config.is_transposed or ".lora_embedding_A" in a
        up, down = _named(folder, _whole_factors, name, params[b], params[a], settings.get("use_bdlora"))
        if module in diagonals:
            up = up * params[diagonals[module]]
            add(f"{name}.weight", without_smallest(rank))
        add(f"{name}.weight", LowRank(up, down, config.scale(name, rank), is_transposed, magnitude))
    for name, module in offsets.items():
        if module not in pairs:
            raise ValueError(
                f"the adapter {str(folder)!r} holds {name!r} without its factors; it is not complete: save it again "
                "with peft"
            )
        scale = config.scale(module.removeprefix(PREFIX), params[pairs[module][0]].shape[0])
        add(f"{module.removeprefix(PREFIX)}.bias", Added(params[name], scale))
    if not changes:
        raise ValueError(f"the adapter {str(folder)!r} holds no tensors; save it again")
    return changes


def _whole_factors(module: str, up: Tensor, down: Tensor, blocks: Any) -> tuple[Tensor, Tensor]:
    """Return both factors as full matrices. In BD-LoRA, one factor is block diagonal, and the file stores only its
    blocks.
    """
    rank = down.shape[0]
    if blocks:
        last, count = module.rpartition(".")[2], int(blocks.get("nblocks", 1))
        if any(key in last for key in blocks.get("target_modules_bd_a") or ()):
            return up.reshape(-1, rank), torch.block_diag(*down.chunk(count))  # type: ignore[no-untyped-call]
        if any(key in last for key in blocks.get("target_modules_bd_b") or ()):
            return torch.block_diag(*up.chunk(count)), down.flatten(1)  # type: ignore[no-untyped-call]
    return up.reshape(-1, rank), down.flatten(1)


def _kind_changes(
    folder: Path, params: Mapping[str, Tensor], settings: Mapping[str, Any]
) -> dict[str, tuple[Trained, ...]]:
    """Return the changes that an adapter of a kind other than LoRA makes."""
    kind = KINDS[settings["peft_type"]]
    modules, shared, known = split_modules(kind, params, PREFIX)
    changes: dict[str, tuple[Trained, ...]] = {
        WRAPPED.sub("", name).removeprefix(PREFIX): (Replaced(tensor),)
        for name, tensor in params.items()
        if name not in known and ORIGINAL not in name
    }
    for module, parts in modules.items():
        own = WRAPPED.sub("", module)
        for name, change in _named(folder, lambda *given: [*kind.make(*given)], own, parts, settings, shared):
            is_transposed = bool(settings.get("fan_in_fan_out")) and name == "weight"
            made = replace(change, is_transposed=is_transposed) if isinstance(change, Mapped) else change
            changes[f"{own}.{name}"] = (*changes.get(f"{own}.{name}", ()), made)
    if not modules:
        how = " with save_indices=True" if "unilora_theta_d" in shared else ""
        raise ValueError(f"the adapter {str(folder)!r} contains no tensors of its type; save it again{how}")
    return changes


def _named(folder: Path, make: Callable[..., Result], *given: Any) -> Result:
    """Return the result of a call; convert errors to errors about the adapter in the given folder."""
    try:
        return make(*given)
    except (ValueError, KeyError, TypeError, IndexError, RuntimeError, re.error) as error:
        raise ValueError(f"the adapter {str(folder)!r} cannot be read: {error}; save it again with peft") from error


def place_changes(
    folder: Path,
    changes: Mapping[str, tuple[Trained, ...]],
    expected: Mapping[str, Sequence[int]],
    read: Callable[[str], Tensor],
) -> dict[str, tuple[Trained, ...]] | None:
    """Return the changes by the tensor names of a network; None if the network lacks a changed tensor.

    Args:
        folder: The adapter's folder, for error messages.
        changes: The changes, by the tensor names in the adapter.
        expected: The shapes of the network's tensors.
        read: A function that reads one of the tensors as it is before the adapter is added.

    Raises:
        ValueError: A tensor has an unexpected shape.
    """
    names = names_in(changes, expected)
    changes = {
        names[name]: own
        for name, own in changes.items()
        if names[name] in expected or not all(isinstance(one, Mapped | CarriedBias) and one.is_optional for one in own)
    }
    if any(name not in expected for name in changes):
        return None
    placed = {
        name: tuple(_fit(one, name, tuple(expected[name]), folder) for one in own) for name, own in changes.items()
    }
    return {
        name: tuple(
            replace(one, weight=partial(read, f"{name.removesuffix('bias')}weight"))
            if isinstance(one, CarriedBias)
            else one
            for one in own
        )
        for name, own in placed.items()
    }


def names_in(names: Iterable[str], expected: Mapping[str, object]) -> dict[str, str]:
    """Map an adapter's tensor names to the names of the same tensors in a network."""
    renamed = _rename_attention({name: name for name in names}, expected)
    start = _find_prefix(renamed, expected)
    return {name: start + new for new, name in renamed.items()}


def find_tied(base: Path, changed: Mapping[str, Sequence[int]]) -> list[str]:
    """Return changed tensors with one row per token, if the base uses one matrix as embedding and output layer."""
    sizes = _tied_sizes(base)
    return [name for name, shape in changed.items() if len(shape) == 2 and shape[0] in sizes]


def refuse_absent(
    base: Path, folder: Path, changes: Mapping[str, tuple[Trained, ...]], known: Container[str]
) -> ValueError:
    """Return an error that names the tensors that the adapter changes and the base lacks."""
    absent, sizes = [name for name in changes if name not in known], _tied_sizes(base)
    for name in absent:
        if any(isinstance(one, LowRank) and {len(one.up), one.down.shape[1]} & sizes for one in changes[name]):
            return ValueError(TIED.format(str(folder), name, "the embedding", "the embedding"))
        if any(isinstance(one, Replaced) and set(one.value.shape[:1]) & sizes for one in changes[name]):
            return ValueError(TIED_WHOLE.format(str(folder), name))
    return ValueError(
        f"the adapter {str(folder)!r} changes {shorten(absent or [*changes])}, which its base lacks; give the base "
        "that it was trained on"
    )


def _tied_sizes(base: Path) -> set[int]:
    """Return the numbers of tokens of a base whose output layer is its embedding. The result is empty if the base has a
    separate output layer, or if the configuration is unknown.
    """
    try:
        config = json.loads((base / "config.json").read_text(encoding="utf-8"))
        is_tied = config.get("tie_word_embeddings") and any(map(HEADED.search, config.get("architectures") or ()))
        sizes = {part.get("vocab_size") for part in (config, config.get("text_config") or {})}
    except (OSError, ValueError, AttributeError, TypeError):
        return set()
    return {size for size in sizes if isinstance(size, int)} if is_tied else set()


def _fit(change: Trained, name: str, shape: tuple[int, ...], folder: Path) -> Trained:
    """Return a change that fits a tensor of a given shape, or raise an error about the different shape."""
    if isinstance(change, CarriedBias):
        return change
    if isinstance(change, Replaced | Added):
        is_fitting = change.value.shape == shape
    elif isinstance(change, Mapped):
        turned = replace(change, is_transposed=not change.is_transposed)
        change = change if change.fits(shape) or not turned.fits(shape) else turned
        is_fitting = change.fits(shape)
    else:
        sides = (len(change.up), change.down.shape[1])
        wanted = (shape[0], math.prod(shape[1:]))
        # The configuration has one setting for all modules, but some modules may be stored transposed.
        if wanted != (sides[::-1] if change.is_transposed else sides):
            change = replace(change, is_transposed=not change.is_transposed)
        is_fitting = wanted == (sides[::-1] if change.is_transposed else sides)
        is_fitting &= change.magnitude is None or len(change.magnitude) == sides[0]
    if not is_fitting:
        raise ValueError(
            f"the adapter {str(folder)!r} changes {name!r}, which has shape {shape} in the base, by another shape; "
            "give the base that it was trained on"
        )
    return change


@dataclass(frozen=True)
class AdapterConfig:
    """The settings in an adapter's configuration that concern the factors."""

    alpha: float
    alphas: Mapping[str, float]
    is_rank_stabilized: bool
    is_transposed: bool

    def scale(self, module: str, rank: int) -> float:
        """Return the factor of `B A` in a module."""
        alpha = next((one for key, one in self.alphas.items() if ending(key).fullmatch(module)), self.alpha)
        return alpha / (math.sqrt(rank) if self.is_rank_stabilized else rank)


def read_config(folder: Path) -> AdapterConfig:
    """Return the configuration of an adapter.

    Raises:
        ValueError: The configuration is damaged, or describes an adapter that is not a change of the weights.
    """
    path, config = folder / ADAPTER_CONFIG, _read_settings(folder)
    kind = config["peft_type"]
    if kind != "LORA":
        known = ", ".join(("LORA", *KINDS))
        raise ValueError(
            f"the adapter {str(folder)!r} is of type {kind}; {known} can be read: merge it with peft first"
            if kind not in KINDS
            else f"the adapter {str(folder)!r} is of type {kind}, and has no factors of LORA; merge it into its base"
        )
    try:
        alphas = config.get("alpha_pattern") or {}
        found = AdapterConfig(
            float(config.get("lora_alpha", 8)),
            {str(key): float(one) for key, one in alphas.items()},
            bool(config.get("use_rslora")),
            bool(config.get("fan_in_fan_out")),
        )
        for pattern in found.alphas:
            ending(pattern)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(
            f"{str(path)!r} is not a configuration of an adapter: {type(error).__name__} {error}"
        ) from error
    initial = config.get("init_lora_weights")
    if initial not in INITIAL:
        raise ValueError(
            f"the adapter {str(folder)!r} was initialized by {initial!r}, which changed its base: save it with peft's "
            "path_initial_model_for_weight_conversion, or merge it with peft"
        )
    flags = [key for key, value in config.items() if key.startswith("use_") and value and key not in MERGEABLE]
    configs = [
        key for key, value in config.items() if key.endswith("_config") and value and key not in (*HARMLESS, *MERGEABLE)
    ]
    others = [*flags, *configs, *(key for key in ELSEWHERE if config.get(key))]
    # If a parameter is not named `weight`, its factors have only the name of its module. The factors of several experts
    # are stacked.
    others += [
        key for key in ("target_parameters",) if any(not f".{one}".endswith(".weight") for one in config.get(key) or ())
    ]
    if others:
        raise ValueError(
            f"the adapter {str(folder)!r} has {shorten(others)}, which is not a low-rank change B A of weights; merge "
            "it with peft"
        )
    return found


def _read_settings(folder: Path) -> Mapping[str, Any]:
    """Return the settings in an adapter's configuration file."""
    path = folder / ADAPTER_CONFIG
    found = read_object(path)
    if not isinstance(found.get("peft_type"), str):
        raise ValueError(
            f"{str(path)!r} is not a configuration of an adapter: it has no 'peft_type'; save the adapter again with "
            "peft"
        )
    return found


class Factors(NamedTuple):
    """The factors of one module of an adapter.

    Attributes:
        module: The path of the module, as the configuration names it.
        down: The name of A, `[rank, in, ...]`.
        up: The name of B, `[out, rank, ...]`.
        offsets: The name of the tensor that is added to the bias; None without such a tensor.
        rank: The rank of the factors.
        scale: The factor of `B A`.
    """

    module: str
    down: str
    up: str
    offsets: tuple[str, ...]
    rank: int
    scale: float


def read_factors(folder: Path | None, params: Mapping[str, Tensor]) -> dict[str, Factors]:
    """Return the factors of an adapter by module; without a folder, the change is `B A` with scale one.

    Raises:
        ValueError: The configuration or the factors cannot be read, or there are no factors.
    """
    config, settings = (None, {}) if folder is None else (read_config(folder), _read_settings(folder))
    found = {}
    if unpaired := [key for key in UNPAIRED if settings.get(key)]:
        raise ValueError(
            f"the adapter {str(folder)!r} has {shorten(unpaired)}, not only factors B and A; merge it into its base"
        )
    offsets = {one["module"]: name for name in params if (one := OFFSET.fullmatch(name))}
    for module, (down, up) in _pair_factors(params).items():
        rank, own = params[down].shape[0], module.removeprefix(PREFIX)
        added = (offsets[module],) if module in offsets else ()
        found[module] = Factors(own, down, up, added, rank, 1.0 if config is None else config.scale(own, rank))
    return found


def require_whole_change(label: str, names: Iterable[str], config: Mapping[str, Any], remedy: str) -> None:
    """Raise an error if an adapter defines its change only together with the base, as the magnitudes of DoRA do."""
    partial_ones = [name for name in names if PARTIAL.fullmatch(name)]
    if partial_ones or config.get("use_dora"):
        raise ValueError(
            f"the adapter {label!r} contains {shorten(partial_ones or ['use_dora'])}, whose effect depends on the "
            f"base; {remedy}"
        )


def _pair_factors(
    params: Mapping[str, Tensor], *, is_needed: bool = True, are_blocks: bool = False
) -> dict[str, tuple[str, str]]:
    """Return the names of both factors of each module. For a block diagonal factor, the file stores fewer columns."""
    factors: dict[str, dict[str, str]] = {}
    for name in params:
        found = FACTOR.fullmatch(name)
        if found is not None and bool(found["end"]) != bool(found["embedding"]):
            factors.setdefault(found["module"], {})[found["factor"]] = name
    if is_needed and not factors:
        raise ValueError("these parameters hold no factors of an adapter (lora_A and lora_B); give those of an adapter")
    pairs = {}
    for module, own in factors.items():
        if len(own) < 2:
            raise ValueError(f"the adapter has only one of the two factors of {module!r}; save it again with peft")
        a, b = params[own["A"]], params[own["B"]]
        if a.ndim < 2 or b.ndim < 2 or (a.shape[0] != b.shape[1] and not are_blocks) or math.prod(b.shape[2:]) != 1:
            raise ValueError(
                f"the factors of {module!r} have shapes {tuple(a.shape)} and {tuple(b.shape)}, which cannot be "
                "multiplied; save the adapter again with peft"
            )
        pairs[module] = (own["A"], own["B"])
    return pairs


def _rename_attention(changes: Mapping[str, Value], expected: Iterable[str]) -> dict[str, Value]:
    """Return the changes, where packed projections of `torch.nn.MultiheadAttention` have the names of the tensors in
    the network.
    """
    packed = {name.removesuffix(".in_proj_weight") for name in expected if name.endswith(".in_proj_weight")}
    attentions = {f".{one}" for one in packed}
    return {
        f"{name.removesuffix('weight')}in_proj_weight"
        if name.endswith(".weight") and any(one.endswith(f".{name.removesuffix('.weight')}") for one in attentions)
        else name: own
        for name, own in changes.items()
    }


def _find_prefix(changes: Mapping[str, object], expected: Mapping[str, object]) -> str:
    """Return the prefix that all names have in the base but not in the adapter, such as `model.`."""
    first = next(iter(changes), "")
    starts = sorted((name.removesuffix(first) for name in expected if name.endswith(first)), key=len)
    return next((s for s in starts if all(s + name in expected for name in changes)), "")

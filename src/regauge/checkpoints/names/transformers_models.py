"""Models that transformers builds, and the conversion of their tensors from files, as defined by transformers.

The library renames, stacks and splits tensors while it loads a network. This module applies the library's
transformations to uninitialized tensors and tracks every entry.
"""

import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from regauge.checkpoints.names.boxes import Boxes, whole
from regauge.checkpoints.names.conversion import Blank, Conversion, conversion_of
from regauge.checkpoints.names.rearranging import RearrangementError, Rearranging
from regauge.checkpoints.plain_files import read_json, require_plain
from regauge.core.counted import shorten

CONFIG = "config.json"
REMOTE, CODE = "trust_remote_code", "it needs code from its own folder, which is never run"
"""The words by which the error of transformers about a folder with code is recognized, and the sentence that replaces
this error."""
LAYERS, EXPERTS = re.compile(r"(^|_)(layers?|depths?|blocks)$"), re.compile(r"(^|_)experts$")
"""Patterns of the settings that define the numbers of layers and of experts."""
LEAST, MOST, MOST_EXPERTS = 256, 2_000, 10_000
"""Limits on the number of layers (for files with few tensors, and for unknown files), and on the number of experts."""


def choose_factory(folder: Path, stored: Mapping[str, Blank] | None = None) -> Callable[[], Any]:
    """Return a factory of the model of a folder with config.json.

    The class is named by the configuration, or is `AutoModel`. The files may hold tensors (`stored`) that the class
    lacks and does not ignore, such as an additional head. If the files hold tensors that this class lacks, a class of
    the same family that has these tensors is used.

    Raises:
        ImportError: transformers is not installed.
        ValueError: transformers does not know the configuration, or cannot build a model from it.
    """
    import transformers

    require_plain(folder / CONFIG)
    with _configured(folder, "is no configuration that can be read"):
        _require_sizes(read_json(folder / CONFIG), MOST if stored is None else max(LEAST, len(stored)))
    with _configured(folder, "is no configuration that transformers knows"):
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if getattr(config, "use_cache", False):
        config.use_cache = False  # A cache does not change the outputs, but needs a second export.
    with _configured(folder, "names no model class"):
        named = _find_class(transformers, getattr(config, "architectures", None) or [])
        _choose_attention(config)
    automatic: Any = transformers.AutoModel
    first = partial(named, config) if named else partial(automatic.from_config, config)
    if stored is None:
        return first
    with _configured(folder, "is a configuration from which no model can be built"), torch.device("meta"):
        module = first()
    if not find_conversion(stored, module).unknown:
        return first
    for other in _siblings(type(module)):
        with torch.device("meta"):
            module = other(config)
        conversion = find_conversion(stored, module)
        if not conversion.unknown and not find_lacking(conversion, module):
            return partial(other, config)
    return first


def _require_sizes(settings: Any, most: int) -> None:
    """Raise a ValueError if a configuration has more layers than its files can hold tensors for."""
    left = [settings]
    while left:
        part = left.pop()
        for key, value in part.items() if isinstance(part, dict) else ():
            left.append(value)
            limit = most if LAYERS.search(key) else MOST_EXPERTS if EXPERTS.search(key) else None
            for one in value if isinstance(value, list) else [value]:
                if limit is not None and isinstance(one, int) and one > limit:
                    raise ValueError(
                        f"{key!r} is {one}, but its files hold {limit} at most; give the files of the model"
                    )


def _find_class(transformers: Any, names: Any) -> Any:
    """Return the model class that a configuration names; None if transformers has no class of this name."""
    if not isinstance(names, list | tuple) or not names:
        return None
    found = getattr(transformers, str(names[0]), None)
    if found is not None and not (inspect.isclass(found) and issubclass(found, transformers.PreTrainedModel)):
        raise ValueError(f"{names[0]!r} is not a model class of transformers; give the files of the model")
    return found


def _choose_attention(config: Any) -> None:
    """Choose an attention implementation of torch, because transformers would search the hub for any other
    implementation.
    """
    for part in (config, *(getattr(config, name, None) for name in getattr(config, "sub_configs", ()))):
        if getattr(part, "_attn_implementation", None) not in (None, "eager", "sdpa"):
            part._attn_implementation = "eager"


@contextmanager
def _configured(folder: Path, what: str) -> Iterator[None]:
    """Convert any exception of transformers code in the block to an error about the configuration."""
    try:
        yield
    except Exception as error:
        reason = CODE if REMOTE in str(error) else f"{type(error).__name__}: {error}"
        raise ValueError(
            f"{str(folder / CONFIG)!r} {what}: {reason}; give the model as package.module:factory instead"
        ) from error


def find_conversion(stored: Mapping[str, Blank], module: nn.Module) -> Conversion:
    """Return, for each tensor of a transformers module, the tensors of the files from which it is made.

    Transformations are tried in the order of `from_pretrained`.

    Raises:
        ValueError: A transformation does more than rearrange entries, or two tensors become one.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    model: Any = module
    state = model.state_dict()
    mapping = get_model_conversion_mapping(model)
    renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
    converters = [one for one in mapping if isinstance(one, WeightConverter)]
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    prefix = model.base_model_prefix
    collected: dict[str, Any] = {}
    sources: dict[str, list[str]] = {}
    extra: dict[str, str] = {}
    mode = Rearranging()
    for name in sorted(stored, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if target not in state and name in state:
            target, pattern = rename_source_key(name, [], [], prefix, state)
        if target not in state:
            extra[name] = target
            continue
        sources.setdefault(target, []).append(name)
        if pattern is not None:
            one = collected.setdefault(target, deepcopy(by_pattern[pattern]))
            one.add_tensor(target, name, pattern, mode.blank(name, stored[name]))
    made: dict[str, tuple[tuple[int, ...], Boxes]] = {}
    for target, names in sources.items():
        if target in collected:
            made |= _run(collected[target], target, names, model, mode)
        elif len(names) > 1:
            raise ValueError(f"{shorten(names)} all stand for {target!r} of the model; keep one of them")
        else:
            made[target] = (stored[names[0]].shape, whole(names[0], stored[names[0]].numel))
    ignored = _ignored(model)
    known = tuple(name for name, target in extra.items() if _is_inert(stored[name]) or ignored(name, target))
    return conversion_of(stored, {name: made[name] for name in state if name in made}, tuple(extra), known)


def find_lacking(conversion: Conversion, module: nn.Module) -> list[str]:
    """Return module tensors that the files lack under all names of the tensor, including tied names."""
    state = module.state_dict(keep_vars=True)
    found = {id(state[name]) for name in (*conversion.renamed, *conversion.made)}
    return [name for name, tensor in state.items() if id(tensor) not in found]


def _run(
    converter: Any, target: str, names: list[str], model: Any, mode: Rearranging
) -> dict[str, tuple[tuple[int, ...], Boxes]]:
    """Return the tensors that a transformation produces, with their shapes and the sources of their entries."""
    try:
        with mode:
            results = converter.convert(target, model=model, config=model.config)
        found = {name: one[0] if isinstance(one, list) else one for name, one in results.items()}
        return {name: (tuple(tensor.shape), mode.boxes(tensor)) for name, tensor in found.items()}
    except (RearrangementError, RuntimeError, ValueError, IndexError, AttributeError) as error:
        operations = ", ".join(map(repr, converter.operations))
        raise ValueError(f"{target!r} is made of {shorten(names, 2)} by {operations}: {error}") from error


def _is_inert(blank: Blank) -> bool:
    """Return whether a tensor has no entries that can be rearranged, because it is a scalar or a mask."""
    return not blank.shape or blank.dtype == torch.bool


def _ignored(model: Any) -> Callable[[str, str], bool]:
    """Return a function that decides whether a tensor is ignored, from its name in the file and its new name.

    A tensor is ignored if the library ignores it while loading, or if it is a buffer that the model recomputes.
    """
    buffers = {name for name, _ in model.named_buffers()}
    patterns = [*(model._keys_to_ignore_on_load_unexpected or ())]
    patterns += [r"rotary_emb\.inv_freq"] if any(name.endswith("rotary_emb.inv_freq") for name in buffers) else []
    patterns += [r"(^|\.)position_ids$"] if any(name.endswith("position_ids") for name in buffers) else []

    def ignored(name: str, target: str) -> bool:
        return target in buffers or any(re.search(pattern, one) for pattern in patterns for one in (name, target))

    return ignored


def _siblings(cls: type) -> list[Any]:
    """Return the model classes of a family in the order of their source file, except the given class."""
    members = vars(sys.modules[cls.__module__]).values()
    config = getattr(cls, "config_class", None)
    found = [one for one in members if inspect.isclass(one) and one.__module__ == cls.__module__ and one is not cls]
    return [one for one in found if getattr(one, "config_class", None) is config and "forward" in vars(one)]

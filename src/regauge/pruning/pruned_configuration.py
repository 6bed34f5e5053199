"""The configuration of a smaller transformers model, whose values set the sizes of the model's groups."""

import copy
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

from regauge.checkpoints.plain_files import read_object
from regauge.core.params import Params
from regauge.core.symmetry import Symmetry
from regauge.hub.folder_model import traceable
from regauge.pruning import cut_symmetry
from regauge.pruning.resized_module import Accept, new_sizes

Path_: TypeAlias = tuple[str | int, ...]
Shapes: TypeAlias = Mapping[str, tuple[int, ...]]
CONFIG = "config.json"
MOST_CONFIGURATIONS = 400
"""The largest number of configurations that are tried for one set of sizes."""


class PrunedConfigs:
    """A search for configuration values with which the built model has the required shapes.

    Args:
        module: The model of the folder.
        folder: The folder that contains config.json.
        symmetry: The symmetry of the model.
    """

    def __init__(self, module: nn.Module, folder: Path, symmetry: Symmetry) -> None:
        self._module: Any = module
        self._symmetry = symmetry
        self.original: dict[str, Any] = read_object(folder / CONFIG)
        self.found: dict[str, Any] | None = None
        self._built: dict[str, dict[str, tuple[int, ...]] | None] = {}

    @cached_property
    def _start(self) -> dict[str, Any]:
        """All configuration values, including defaults that the file omits."""
        found: dict[str, Any] = json.loads(self._module.config.to_json_string(use_diff=False))
        return found

    def sets(self) -> list[tuple[str, ...]]:
        """Return sets of groups that must be cut to equal sizes, because one configuration value sets the sizes of all
        groups in the set.

        If no value sets the sizes of one kind of layers alone, all groups of the same size are tried together, for
        example the groups of an encoder and its decoder.
        """
        kinds: dict[tuple[str, int], list[str]] = {}
        for group in self._symmetry.groups:
            if group.is_permuted and group.matrix == "none" and group.size > 1:
                kinds.setdefault((re.sub(r"\d+", "#", group.name), group.size), []).append(group.name)
        result, others = [], dict[int, list[str]]()
        for (_, size), names in kinds.items():
            if self._is_possible(names):
                result.append(tuple(names))
            else:
                others.setdefault(size, []).extend(names)
        for size, names in others.items():
            several = len([1 for _, known in kinds if known == size]) > 1
            if several and self._is_possible(names):
                result.append(tuple(names))
            else:
                result += [tuple(own) for key, own in kinds.items() if key[1] == size and own[0] in names]
        return result

    def __call__(self, params: Params, after: Symmetry, accept: Accept) -> nn.Module:
        """Return the model, with given parameters, whose configuration gives the sizes of a symmetry.

        Raises:
            ValueError: No configuration gives the sizes of the symmetry, or its model computes another function.
        """
        for config in self.find(after):
            with torch.random.fork_rng(devices=[]):
                model: nn.Module = traceable(type(self._module)(self._config(config)))
            dtype = next(t.dtype for t in params.values() if t.is_floating_point())
            model = model.to(dtype).eval()
            model.load_state_dict(params, strict=False)
            if accept(model):
                self.found = config
                return model
        raise ValueError("a norm over its units: without some units, the others would compute another function")

    def find(self, after: Symmetry) -> Iterator[dict[str, Any]]:
        """Yield configurations with few changed values whose models have the shapes of a symmetry.

        Raises:
            ValueError: No configuration has the shapes of the pruned network.
        """
        wanted = after.shapes
        changed = [name for name, shape in self._symmetry.shapes.items() if wanted[name] != shape]
        sizes, seen = new_sizes(changed, self._symmetry, after), set[str]()
        waiting = [(self._wrong(self._start, wanted) or set(), self._start)]
        least, is_found = waiting[0][0], False
        while waiting and len(seen) < MOST_CONFIGURATIONS:
            wrong, config = waiting.pop()
            if not wrong:
                is_found = True
                yield config
                continue
            least = min(least, wrong, key=len)
            for is_open in (False, True):
                better = []
                for trial in _changed(config, sizes, is_open=is_open):
                    key = json.dumps(trial, sort_keys=True)
                    left = self._wrong(trial, wanted) if key not in seen else None
                    seen.add(key)
                    if left is not None and len(left) < len(wrong):
                        better.append((left, trial))
                waiting += better
                if better:
                    break
        if not is_found:
            listed = sorted(least)[0]
            raise ValueError(
                f"{CONFIG} cannot describe it: no model of this class has {listed!r} of shape {tuple(wanted[listed])}"
            )

    def files(self) -> dict[str, bytes | None]:
        """Return the configuration file of the smaller model, if any value changed."""
        if self.found is None or not self.changes():
            return {}
        result = copy.deepcopy(self.original)
        for path, number in _numbers(self.found):
            if _at(self._start, path) != number:
                _put(result, path, number)
        return {CONFIG: (json.dumps(result, indent=2) + "\n").encode()}

    def changes(self) -> dict[str, tuple[Any, Any]]:
        """Return the configuration values that changed, each with the old and the new value."""
        found = {} if self.found is None else dict(_numbers(self.found))
        before = {path: _at(self._start, path) for path in found}
        return {".".join(map(str, p)): (before[p], number) for p, number in found.items() if before[p] != number}

    def _is_possible(self, names: Sequence[str]) -> bool:
        try:
            next(self.find(cut_symmetry(self._symmetry, {name: self._symmetry[name].size - 1 for name in names})))
        except ValueError:
            return False
        return True

    def _config(self, numbers: dict[str, Any]) -> Any:
        config = type(self._module.config).from_dict(copy.deepcopy(numbers))
        config.use_cache = getattr(self._module.config, "use_cache", False)
        return config

    def _wrong(self, config: dict[str, Any], wanted: Shapes) -> set[str] | None:
        """Return the names whose shapes differ in a configuration's model; None if the model cannot be built."""
        key = json.dumps(config, sort_keys=True)
        if key not in self._built:
            try:
                with torch.device("meta"):
                    state = type(self._module)(self._config(config)).state_dict()
                self._built[key] = {name: tuple(tensor.shape) for name, tensor in state.items()}
            except Exception:  # transformers may raise any error for unsuitable sizes
                self._built[key] = None
        shapes = self._built[key]
        return None if shapes is None else {name for name, shape in wanted.items() if shapes.get(name) != tuple(shape)}


def _changed(config: dict[str, Any], sizes: Mapping[int, Sequence[int]], *, is_open: bool) -> Iterator[dict[str, Any]]:
    """Yield configurations with one more changed value. The changed value may be missing in the configuration."""
    every = [size for known in sizes.values() for size in known]
    for path, number in [*_numbers(config)]:
        if (number is None) != is_open:
            continue
        for new in sizes.get(number, []) if number is not None else dict.fromkeys(every):
            trial = copy.deepcopy(config)
            _put(trial, path, new)
            yield trial


def _numbers(config: Any, path: Path_ = ()) -> Iterator[tuple[Path_, int | None]]:
    """Yield the integer values of a configuration, and the values that it omits, with their paths."""
    items: Any = config.items() if isinstance(config, dict) else enumerate(config) if isinstance(config, list) else ()
    for key, value in items:
        if type(value) is int or value is None:
            yield (*path, key), value
        else:
            yield from _numbers(value, (*path, key))


def _at(config: Any, path: Path_) -> Any:
    for key in path:
        config = config[key]
    return config


def _put(config: Any, path: Path_, number: int | None) -> None:
    *parents, last = path
    for key in parents:
        config = config.setdefault(key, {}) if isinstance(config, dict) else config[key]
    config[last] = number

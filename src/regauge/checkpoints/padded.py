"""Adapters of different ranks and scales, rewritten with common ranks and scales so that they can be averaged.

An adapter changes a matrix by `s B A`. The change stays the same if zero columns are appended to B and zero rows to A.
The change also stays the same if B is multiplied by a factor and s is divided by the same factor. Adapters of different
ranks and scales can therefore be written as adapters of the largest rank, and have the symmetry of adapters of the
largest rank.

References:
    Hu et al. (2022), LoRA, section 4.1; the documentation of PEFT's LoraConfig for `rank_pattern` and `alpha_pattern`.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from regauge.checkpoints.checkpoint import Checkpoint, CheckpointView
from regauge.checkpoints.formats.adapters import Factors, read_factors
from regauge.checkpoints.location import ADAPTER_CONFIG
from regauge.checkpoints.plain_files import read_object
from regauge.core.counted import shorten
from regauge.core.params import round_to, work_dtype


class Padded(CheckpointView):
    """An adapter rewritten with other ranks and scales, without changing its effect on the network.

    If the configuration of the adapter changes, `replaced` contains the new configuration.

    Attributes:
        source: The adapter as stored in its files.
        factors: The new rank and scale of every module.
    """

    def __init__(self, source: Checkpoint, factors: Mapping[str, Factors], config: bytes | None) -> None:
        own = read_factors(source.path.parent, source.on_meta())
        self._axes: dict[str, tuple[int, int]] = {}
        self._scales: dict[str, float] = {}
        stored = dict(source.stored)
        for module, wanted in factors.items():
            there = own[module]
            for name, axis in ((there.down, 0), (there.up, 1)):
                one = stored[name]
                shape = (*one.shape[:axis], wanted.rank, *one.shape[axis + 1 :])
                stored[name] = one._replace(shape=shape, nbytes=one.nbytes // one.shape[axis] * wanted.rank)
                self._axes[name] = axis, wanted.rank
            if there.scale != wanted.scale:
                self._scales |= dict.fromkeys((there.up, *there.offsets), there.scale / wanted.scale)
        super().__init__(source, stored)
        self.factors = factors
        if config is not None:
            self.replaced = {**source.replaced, ADAPTER_CONFIG: config}

    @property
    def files(self) -> tuple[Path, ...]:
        """All files from which the adapter is read, including the configuration."""
        return (*self.source.files, self.path.parent / ADAPTER_CONFIG)

    def dtype_of(self, name: str) -> torch.dtype:
        """Return the dtype in which a tensor is read. The dtype is wider if the tensor is rescaled."""
        dtype = super().dtype_of(name)
        return work_dtype(dtype) if self._params is None and name in self._scales else dtype

    def read(self, name: str, *, rows: tuple[int, int] | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """Return a copy of one tensor, or of a range of its first axis, rescaled and padded with zeros."""
        if self._params is not None:
            return super().read(name, rows=rows, dtype=dtype)
        dtype, scale = dtype or self.dtype_of(name), self._scales.get(name, 1.0)
        value = self.source.read(name, dtype=work_dtype(dtype) if scale != 1 else dtype)
        axis, size = self._axes.get(name, (0, value.shape[0] if value.ndim else 0))
        if value.ndim and size > value.shape[axis]:
            shape = (*value.shape[:axis], size - value.shape[axis], *value.shape[axis + 1 :])
            value = torch.cat([value, value.new_zeros(shape)], axis)
        value = round_to(value * scale if scale != 1 else value, dtype, name)
        return value if rows is None else value[rows[0] : rows[1]].clone()


def match_adapters(adapters: Sequence[Checkpoint], number: int) -> tuple[Checkpoint, ...]:
    """Return adapters that all have the largest rank of each module, and the scales of adapter `number`.

    Adapters that already have the required ranks and scales are returned unchanged.

    Raises:
        ValueError: The adapters change different modules, or some scales are zero and other scales are not.
    """
    every = [_factors(one) for one in adapters]
    first, scaled = every[0], every[number]
    for one, factors in zip(adapters[1:], every[1:], strict=True):
        only = sorted(first.keys() ^ factors.keys())
        if only:
            raise ValueError(
                f"the adapters {adapters[0].label!r} and {one.label!r} change different modules: only one of them has "
                f"{shorten(only)}; merge each into its base (BASE+ADAPTER) and combine the networks"
            )
    wanted = {}
    for module, own in scaled.items():
        rank, scales = max(one[module].rank for one in every), {one[module].scale for one in every}
        if own.scale == 0 and len(scales) > 1:
            raise ValueError(
                f"{module!r} has scale 0 in {adapters[number].label!r}, so other adapters cannot get its scale; merge "
                "each into its base (BASE+ADAPTER) and combine the networks"
            )
        wanted[module] = own._replace(rank=rank)
    return tuple(
        one
        if all((factors[m].rank, factors[m].scale) == (wanted[m].rank, wanted[m].scale) for m in wanted)
        else Padded(one, wanted, _describe(one.path.parent, wanted) if one is adapters[number] else None)
        for one, factors in zip(adapters, every, strict=True)
    )


def _factors(adapter: Checkpoint) -> Mapping[str, Factors]:
    if isinstance(adapter, Padded):
        return adapter.factors
    return read_factors(adapter.path.parent, adapter.on_meta())


def _describe(folder: Path, factors: Mapping[str, Factors]) -> bytes:
    """Return the configuration of the adapter in a folder, with the given ranks and scales."""
    config = read_object(folder / ADAPTER_CONFIG)
    ranks = {module: one.rank for module, one in factors.items()}
    alphas = {
        m: _tidy(one.scale * (one.rank**0.5 if config.get("use_rslora") else one.rank)) for m, one in factors.items()
    }
    for key, pattern, values in (("r", "rank_pattern", ranks), ("lora_alpha", "alpha_pattern", alphas)):
        config[key] = Counter(values.values()).most_common(1)[0][0]
        config[pattern] = {factors[m].module: value for m, value in values.items() if value != config[key]}
    return (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()


def _tidy(value: float) -> float:
    """Return an integral float as an integer, because adapter configurations mostly store integers."""
    return round(value) if abs(value - round(value)) < 1e-12 * abs(value) else value

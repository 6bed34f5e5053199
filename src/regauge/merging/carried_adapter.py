"""Transfer of LoRA adapters to another base. The new adapter has the same rank and the same tensor names."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regauge.checkpoints.checkpoint import Checkpoint
from regauge.checkpoints.formats.adapters import (
    FACTOR,
    ORIGINAL,
    PREFIX,
    TIED,
    WRAPPED,
    Factors,
    names_in,
    place_changes,
    read_changes,
    read_factors,
    require_whole_change,
)
from regauge.checkpoints.formats.changes import LowRank, Replaced, Trained
from regauge.checkpoints.location import ADAPTER_CONFIG
from regauge.checkpoints.plain_files import read_object
from regauge.core.counted import shorten
from regauge.core.params import Params, round_to
from regauge.core.symmetry import Symmetry
from regauge.merging.extract_adapter import DUST, cut_off_product

MORE = 8
"""The number of random vectors, beyond the rank, that are multiplied with a change. The products show whether the rank
has increased."""
LOST = 1e-12
"""The largest share of a change's squared norm that the factors may leave out."""
UNTOUCHED = 1e-10
"""A share of a tensor's norm. Smaller changes of the tensor are rounding errors in float64."""
REMEDY = "give the fine-tune as BASE+ADAPTER to transfer the change of the whole network"

Pieces = Callable[[str], Iterable[Tensor]]
"""A function that yields the change of a tensor in float64, in ranges of the first axis."""


@dataclass(frozen=True)
class GivenAdapter:
    """An adapter of the first base, A, in the form in which the caller gave it.

    Attributes:
        label: The folder of the adapter, or a description for messages.
        params: The tensors of the adapter, by their names in its file.
        factors: The factors of the adapter, by the names of the tensors that they change.
        turned: The names of tensors that the base stores transposed.
        whole: The tensors that the adapter stores in full. Keys are names in the network, and entries are names in the
            adapter's file.
        config: The configuration of the adapter; empty for factors without a configuration.
    """

    label: str
    params: Params = field(repr=False)
    factors: Mapping[str, Factors]
    turned: frozenset[str]
    whole: Mapping[str, str]
    config: Mapping[str, Any]

    @classmethod
    def of(
        cls, given: Checkpoint | Mapping[str, Tensor], base: Mapping[str, Tensor], symmetry: Symmetry
    ) -> "GivenAdapter":
        """Return an adapter from its folder, or from a dictionary of factors, which change `W` to `W + B A`.

        Raises:
            ValueError: The adapter is not a LoRA adapter, or changes a tensor that the base lacks or that is tied to
                another tensor. An adapter such as DoRA defines a change only together with its base.
        """
        folder = given.path.parent if isinstance(given, Checkpoint) else None
        params = given.params if isinstance(given, Checkpoint) else dict(given)
        label = "of factors" if folder is None else str(folder)
        config = {} if folder is None else read_object(folder / ADAPTER_CONFIG)
        require_whole_change(label, params, config, REMEDY)
        own = {WRAPPED.sub("", one.module): one for one in read_factors(folder, params).values()}
        used = {name for one in own.values() for name in (one.up, one.down, *one.offsets)}
        rest = {n: WRAPPED.sub("", n).removeprefix(PREFIX) for n in params if n not in used and ORIGINAL not in n}
        trained: Mapping[str, tuple[Trained, ...]] = {
            f"{module}.weight": (LowRank(params[one.up].flatten(1), params[one.down].flatten(1), 1.0),)
            for module, one in own.items()
        }
        trained = {**trained, **{new: (Replaced(params[name]),) for name, new in rest.items()}}
        trained = trained if folder is None else read_changes(folder, params)
        shapes = {name: tensor.shape for name, tensor in base.items()}
        placed = place_changes(Path(label), trained, shapes, lambda name: base[name])
        names = names_in(trained, shapes)
        stored = {names.get(new, name): name for name, new in rest.items()}
        lacking = [name for name in (*names.values(), *stored) if name not in shapes]
        if placed is None or lacking:
            raise ValueError(
                f"the adapter {label!r} changes {shorten(lacking)}, which base A lacks; give the base that it was "
                "trained on"
            )
        tied = {name: [one for one in group if one != name] for group in symmetry.tied for name in group}
        for name in placed.keys() & tied.keys():
            raise ValueError(TIED.format(label, name, repr(tied[name][0]), repr(tied[name][0])))
        factors = {names[f"{module}.weight"]: one for module, one in own.items()}
        turned = {n for n, every in placed.items() for one in every if isinstance(one, LowRank) and one.is_transposed}
        return cls(label, params, factors, frozenset(turned), stored, config)

    @property
    def touched(self) -> frozenset[str]:
        """Return the names of the network's tensors that the adapter may change."""
        return frozenset({*self.factors, *self.whole, *map(_bias, self.factors)})

    def network(self, base: Mapping[str, Tensor], params: Mapping[str, Tensor]) -> Params:
        """Return a base plus an adapter with given tensors, in the base's dtypes and with gradients of the tensors."""
        made = dict(base) | {name: params[stored].to(base[name]) for name, stored in self.whole.items()}
        for name, own in self.factors.items():
            up, down = (params[one].flatten(1).to(base[name]) for one in (own.up, own.down))
            change = own.scale * (up @ down)
            made[name] = base[name] + (change.T if name in self.turned else change).reshape(base[name].shape)
            offset, bias = _offset(own.up), _bias(name)
            if offset in params and bias in base:
                made[bias] = made[bias] + own.scale * params[offset].to(base[bias])
        return made

    def carry(self, pieces: Pieces, base: Mapping[str, Tensor], scale: float, names: Iterable[str]) -> Params:
        """Return the adapter's tensors for another base, computed from the transferred change times `scale`.

        An element multiplies a change `B A` from both sides, `L B A R`, so the rank stays the same. Therefore the
        factors are computed exactly, from products with a few random vectors (sampled with seed 0).

        Args:
            pieces: A function that yields the change of a tensor.
            base: The second base.
            scale: The factor of the change.
            names: The names of tensors that may have changed.

        Raises:
            ValueError: The rank of a change increases, or a tensor changes that the adapter cannot store.
        """
        made, offsets, homeless = dict(self.params), dict[str, Tensor](), []
        biases = {_bias(name): own for name, own in self.factors.items() if _bias(name) in base}
        for name in names:
            if name in self.factors:
                made |= self._factorize(name, pieces(name), base[name], scale)
                continue
            if name in self.whole:
                stored = self.whole[name]
                value = base[name].double() + scale * torch.cat([*map(torch.atleast_1d, pieces(name))]).view_as(
                    base[name]
                )
                made[stored] = round_to(value, self.params[stored].dtype, stored)
                continue
            kept = list[Tensor]()
            size = 0.0
            for piece in pieces(name):
                size += float(piece.square().sum())
                kept += [piece] if name in biases else []
            if size**0.5 <= UNTOUCHED * float(base[name].double().norm()):
                continue
            if name not in biases or not biases[name].scale:
                homeless.append(name)
                continue
            offsets[name] = scale / biases[name].scale * torch.cat(kept)
        if homeless:
            raise ValueError(
                f"transferring the adapter {self.label!r} also changes {shorten(homeless)}, which it cannot store; "
                f"{REMEDY}"
            )
        if offsets or any(own.offsets for own in self.factors.values()):
            for bias, own in biases.items():
                kept_dtype = self.params[own.up].dtype
                value = offsets.get(bias, torch.zeros(base[bias].shape, dtype=torch.float64))
                made[_offset(own.up)] = round_to(value, kept_dtype, bias)
        return made

    def _factorize(self, name: str, pieces: Iterable[Tensor], base: Tensor, scale: float) -> Params:
        """Return the factors of one matrix, computed from the change of the matrix."""
        own = self.factors[name]
        shapes = {stored: self.params[stored].shape for stored in (own.up, own.down)}
        up, down, left = probe(pieces, own.rank)
        if left > LOST:
            raise ValueError(
                f"the change of {name!r} has rank {own.rank} in base A and a larger one in base B: rotations, or whole "
                f"tensors in the adapter {self.label!r}, change its coordinates; {REMEDY}, or set `rotate='never'`"
            )
        up = up * (scale / own.scale if own.scale else 0.0)
        up, down = (down.T, up.T) if name in self.turned else (up, down)
        return {
            stored: round_to(value.reshape(shapes[stored]), self.params[stored].dtype, stored).contiguous()
            for stored, value in ((own.up, up), (own.down, down))
        }

    def describe(self, label: str, params: Collection[str]) -> dict[str, Any]:
        """Return the configuration of an adapter with given tensors for another base."""
        has_offsets = any(_offset(own.up) in params for own in self.factors.values())
        made = {**self.config, "base_model_name_or_path": label}
        return made | {"lora_bias": True} if has_offsets else made


def loose_adapter(tuned: object, base: object) -> Checkpoint | Mapping[str, Tensor] | None:
    """Return the adapter if `tuned` is the folder or the factors of an adapter and the base is in memory; otherwise
    None.
    """
    if isinstance(base, str | Path | Checkpoint):
        return None
    if isinstance(tuned, str | Path | Checkpoint):
        opened = Checkpoint.open(tuned)
        return opened if opened.is_adapter else None
    is_factors = isinstance(tuned, Mapping) and any(isinstance(n, str) and FACTOR.fullmatch(n) for n in tuned)
    is_network = isinstance(base, Mapping) and any(name in base for name in tuned) if is_factors else False  # type: ignore[attr-defined]
    return tuned if is_factors and not is_network else None  # type: ignore[return-value]


def probe(pieces: Iterable[Tensor], rank: int) -> tuple[Tensor, Tensor, float]:
    """Return factors `[rows, rank]` and `[rank, columns]` of a matrix of known rank, which is given in chunks of rows.

    For random `P` and `Q`, `M = (M P) ((Q M P)^+ Q M)`, where `^+` is the pseudoinverse. The last return value is the
    fraction of M's squared norm that the factors leave out. The fraction that is left out is zero up to rounding,
    unless M has a larger rank.

    References:
        Tropp, Yurtsever, Udell and Cevher (2017), Practical sketching algorithms for low-rank matrix approximation,
        section 4.
    """
    generator = torch.Generator().manual_seed(0)
    images, lefts = list[Tensor](), list[Tensor]()
    sums, right, count = torch.zeros(()), None, rank + MORE
    for piece in pieces:
        rows = piece.flatten(1)
        if right is None:
            right = torch.randn(rows.shape[1], count, generator=generator, dtype=torch.float64).to(rows.device)
            sums = rows.new_zeros(2 * count, rows.shape[1])
        left = torch.randn(2 * count, len(rows), generator=generator, dtype=torch.float64).to(rows.device)
        images.append(rows @ right)
        lefts.append(left)
        sums = sums + left @ rows
    image, left = torch.cat(images), torch.cat(lefts, 1)
    basis, values, _ = torch.linalg.svd(image, full_matrices=False)
    basis = basis[:, values > DUST * values[:1]]
    if not basis.shape[1]:
        return image.new_zeros(len(image), rank), sums.new_zeros(rank, sums.shape[1]), 0.0
    down, up, lost = cut_off_product(basis, torch.linalg.lstsq(left @ basis, sums).solution, rank)
    absent = rank - len(down)
    return torch.nn.functional.pad(up, (0, absent)), torch.nn.functional.pad(down, (0, 0, 0, absent)), lost


def _offset(up: str) -> str:
    """Return the name of the bias of a LoRA factor B."""
    return f"{up.removesuffix('.weight')}.bias"


def _bias(weight: str) -> str:
    """Return the name of the bias that belongs to a weight."""
    return f"{weight.removesuffix('weight')}bias"

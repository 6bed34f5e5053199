"""Whether the scale pairs of a table preserve the function of a model, by how much not, and what they leave out."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from regauge.core.arguments import check_arguments
from regauge.core.outputs import Outputs
from regauge.core.params import Params
from regauge.core.probe import InDouble, Probe, exact_probe, relative_change
from regauge.core.scales import directions
from regauge.core.symmetry import Symmetry
from regauge.gauging.mappings import ScalePair, resolve_pair
from regauge.gauging.methods.equalize import diagonal, scaled_element

Convert = Callable[[Params], Params]
"""From parameters under the names of the table to those of the model."""


@dataclass(frozen=True)
class Finding:
    """What was found of one pair of modules of a row of a table.

    Attributes:
        row: The number of the row.
        smooth: The module that is divided.
        balance: The modules whose inputs are multiplied.
        verdict: "holds"; "broken"; "skipped" where sizes do not agree; "unmatched" where the row names no modules.
        change: The relative change of the outputs when the pair is scaled by random factors in [1/2, 2].
        missing: Parameters that must be scaled, too, and are not.
        extra: Parameters that must not be scaled so.
        reason: A sentence.
    """

    row: int
    smooth: str
    balance: tuple[str, ...]
    verdict: Literal["holds", "broken", "skipped", "unmatched"]
    change: float | None = None
    missing: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    reason: str = ""


@check_arguments
def audit(
    table: Sequence[ScalePair],
    params: Mapping[str, Tensor],
    symmetry: Symmetry,
    module: nn.Module,
    inputs: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    generator: torch.Generator,
    outputs: Outputs = None,
    convert: Convert = dict,
) -> list[Finding]:
    """Try every pair of a table: scale it alone by random factors, as a tool would, and run the model in float64.

    Args:
        table: Pairs with patterns; see `read_table`.
        params: One network, under the names that the table means.
        symmetry: Of the model, under its own names; says what a broken pair leaves out.
        module: The model, on a real device.
        inputs: Positional inputs.
        kwargs: Keyword inputs.
        generator: Source of the factors.
        outputs: Which outputs are compared.
        convert: From `params` to the parameters under the names of the model.
    """
    with InDouble():
        probe, tolerance = exact_probe(module, inputs, dict(kwargs or {}), outputs)
        return _Audit(table, params, symmetry, module, probe, tolerance, generator, convert).run()


@dataclass(frozen=True)
class _Audit:
    table: Sequence[ScalePair]
    params: Mapping[str, Tensor]
    symmetry: Symmetry
    module: nn.Module
    probe: Probe
    tolerance: float
    generator: torch.Generator
    convert: Convert

    def run(self) -> list[Finding]:
        wide = {n: t.detach().cpu().double() if t.is_floating_point() else t for n, t in self.params.items()}
        start = self._named(wide)
        reference = self.probe(start)
        modules = [name.removesuffix(".weight") for name in wide if name.endswith(".weight")]
        found = []
        for row, pattern in enumerate(self.table):
            pairs = resolve_pair(pattern, modules)
            if not any(pair.balance for pair in pairs):
                found.append(Finding(row, pattern.smooth, pattern.balance, "unmatched", reason="no modules match"))
            for pair in pairs:
                if pair.balance:
                    found.append(self._try(row, pair, wide, start, reference))
        return found

    def _try(self, row: int, pair: ScalePair, wide: Params, start: Params, reference: list[Tensor]) -> Finding:
        size = wide[f"{pair.smooth}.weight"].shape[0]
        drawn = torch.rand(size, generator=self.generator, device=self.generator.device, dtype=torch.float64)
        factors = torch.exp2(2 * drawn.cpu() - 1)
        scaled = self._scaled(pair, wide, factors)
        if isinstance(scaled, str):
            return Finding(row, pair.smooth, pair.balance, "skipped", reason=scaled)
        moved = self._named(scaled)
        change = relative_change(reference, self.probe(moved))
        if change <= self.tolerance:
            return Finding(row, pair.smooth, pair.balance, "holds", change)
        missing, extra, reason = self._explain(f"{pair.smooth}.weight", factors, start, moved)
        return Finding(row, pair.smooth, pair.balance, "broken", change, missing, extra, reason)

    def _scaled(self, pair: ScalePair, wide: Params, factors: Tensor) -> Params | str:
        """The network as a tool makes it; a reason where sizes do not agree."""
        result = dict(wide)
        weight = wide[f"{pair.smooth}.weight"]
        offset = self._offset(pair.smooth, weight) if weight.ndim == 1 else 0.0
        by_row = factors.reshape(-1, *[1] * (weight.ndim - 1))
        result[f"{pair.smooth}.weight"] = (weight + offset) / by_row - offset
        bias = wide.get(f"{pair.smooth}.bias")
        if bias is not None:
            result[f"{pair.smooth}.bias"] = bias / factors
        for name in pair.balance:
            reader = result[f"{name}.weight"]
            axis = next((axis for axis in (1, 0) if axis < reader.ndim and reader.shape[axis] == len(factors)), None)
            if axis is None:
                return f"it has {len(factors)} channels, but {name} reads {reader.shape[-1]}: no tool scales these"
            shape = [len(factors) if k == axis else 1 for k in range(reader.ndim)]
            result[f"{name}.weight"] = reader * factors.reshape(shape)
        return result

    def _offset(self, name: str, weight: Tensor) -> float:
        """What a norm adds to its gain before it multiplies: one in Gemma, zero elsewhere."""
        try:
            norm = self.module.get_submodule(name)
        except AttributeError:
            return 0.0
        x = torch.linspace(-1, 2, 2 * len(weight), dtype=torch.float64).reshape(2, -1)
        bias = {"bias": torch.zeros_like(weight)} if getattr(norm, "bias", None) is not None else {}
        for offset in (0.0, 1.0):
            try:
                once, twice = (
                    torch.func.functional_call(norm, {"weight": w, **bias}, (x,))
                    for w in (weight, 2 * (weight + offset) - offset)
                )
            except (RuntimeError, TypeError):
                return 0.0
            if torch.allclose(2 * once, twice, rtol=1e-4, atol=1e-6):
                return offset
        return 0.0

    def _explain(
        self, name: str, factors: Tensor, start: Params, moved: Params
    ) -> tuple[tuple[str, ...], tuple[str, ...], str]:
        """What differs from the family of scales that comes nearest to what was done."""
        best: tuple[tuple[str, ...], tuple[str, ...]] | None = None
        for direction in directions(diagonal(self.symmetry), "move"):
            place = next((p for p in direction.places if p.name == name and p.axes[-1] == 0), None)
            if place is None or len(place.axes) > 1:
                continue
            logs = torch.zeros(direction.count, dtype=torch.float64)
            logs[place.index.flatten()] = -factors.log()[place.positions] / (place.exponent / 2)
            right = self.symmetry.act(scaled_element(self.symmetry.identity(), [(direction, logs)]), start)
            wrong = [one for one in right if not torch.allclose(right[one], moved[one], rtol=1e-9, atol=1e-12)]
            missing = tuple(one for one in wrong if torch.equal(moved[one], start[one]))
            extra = tuple(one for one in wrong if one not in missing)
            if best is None or len(missing) + len(extra) < len(best[0]) + len(best[1]):
                best = missing, extra
        if best is None:
            frozen = next((one.reason for one in self.symmetry.frozen if one.parameter == name), "")
            why = f": {frozen}" if frozen else ""
            return (), (), f"no positive scale of its channels leaves the function as it is{why}"
        return *best, "" if any(best) else "the scales of the symmetry differ from these"

    def _named(self, wide: Params) -> Params:
        """The parameters of the model, tied ones under all names."""
        named = self.convert(wide)
        for names in self.symmetry.tied:
            known = next((name for name in names if name in named), None)
            named |= {} if known is None else {name: named[known] for name in names if name not in named}
        dtype = next(iter(self.probe.params.values())).dtype
        own = {n: t.to(dtype) if t.is_floating_point() else t for n, t in named.items() if n in self.probe.params}
        return {**self.probe.params, **own}

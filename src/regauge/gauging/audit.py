"""Tests of scale pairs in a table: whether they preserve a model's function, and which parameters are missing."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn

from regauge.checkpoints.job import Network, open_job
from regauge.core.arguments import check_arguments
from regauge.core.given import example_arguments, given_or_seed
from regauge.core.outputs import Outputs, evaluating
from regauge.core.params import Params, require_finite
from regauge.core.probe import InDouble, Probe, exact_probe, relative_change
from regauge.core.scales import directions
from regauge.core.symmetry import Symmetry
from regauge.gauging.mappings import ScalePair, resolve_pair
from regauge.gauging.methods.equalize import diagonal, scaled_element

Convert = Callable[[Params], Params]
"""A function that converts parameters under the table's names to parameters under the model's names."""


@dataclass(frozen=True)
class Finding:
    """The verdict on one pair of modules in a row of a table.

    Attributes:
        row: The index of the row in the table.
        smooth: The module whose outputs are divided.
        balance: The modules whose input weights are multiplied.
        verdict: "holds"; "broken"; "skipped" if sizes differ such that no tool scales the pair; "unmatched" if the row
            matches no modules.
        change: The relative change of the outputs when the pair is scaled by random factors in [1/2, 2].
        missing: Parameters that the symmetry scales, but the pair does not.
        extra: Parameters that the pair scales, but the symmetry does not.
        reason: The reason for the verdict.
    """

    row: int
    smooth: str
    balance: tuple[str, ...]
    verdict: Literal["holds", "broken", "skipped", "unmatched"]
    change: float | None = None
    missing: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    reason: str = ""

    def __str__(self) -> str:
        parts = [self.reason] if self.reason else []
        parts += [f"must be scaled, too: {', '.join(self.missing)}"] if self.missing else []
        parts += [f"must not be scaled so: {', '.join(self.extra)}"] if self.extra else []
        return f"row {self.row}, {self.smooth}: {'; '.join(parts)}"


def audit_rows(findings: Sequence[Finding], table: Sequence[ScalePair]) -> list[dict[str, Any]]:
    """Return, for each row of a table, the number of pairs with each verdict, and the largest change of outputs."""
    rows: list[dict[str, Any]] = []
    for number, pattern in enumerate(table):
        own = [one for one in findings if one.row == number]
        changes = [one.change for one in own if one.change is not None]
        counts = {v: sum(one.verdict == v for one in own) for v in ("holds", "broken", "skipped", "unmatched")}
        verdict = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
        largest = f"{max(changes):.1e}" if changes else ""
        rows.append({"row": number, "smooth layer": pattern.smooth, "verdict": verdict, "largest change": largest})
    return rows


@check_arguments
def audit(
    table: Sequence[ScalePair],
    params: Network,
    symmetry: Symmetry,
    module: nn.Module,
    example_inputs: Any,
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    generator: torch.Generator | None = None,
    outputs: Outputs = None,
    convert: Convert = dict,
) -> list[Finding]:
    """Test every pair of a table: scale it by random factors, as quantization tools do, and compare the model's outputs
    in float64.

    Tools multiply the input channels of balance layers, and divide the output channels of the smooth layer. If the
    balance layers read only a part of the smooth layer's outputs, tools divide its last outputs. For example, only the
    values of a fused layer of queries, keys and values are divided. The symmetry determines the input axis of a layer.
    If no group acts on the input axis, the axis follows from the convention of torch's layers. The lengths of axes are
    not used to find the input axis.

    Args:
        table: Pairs with patterns; see `read_table`.
        params: One network, under the names in the table: parameters by name, or the path of a checkpoint.
        symmetry: The symmetry of the model, under the model's names. The symmetry determines which parameters are
            missing in a broken pair.
        module: The model, not on the meta device.
        example_inputs: Example inputs; see `discover`.
        example_kwargs: Keyword inputs.
        generator: The random generator for the factors. Default: a generator with seed 0.
        outputs: The names of the outputs that are compared.
        convert: A function that converts `params` to parameters under the model's names. The function is not needed for
            a checkpoint.
    """
    generator = given_or_seed(generator)
    job = open_job([params], 0)
    if job is not None:
        view = job.named_for(module).source
        require_finite(view.params, view.label, symmetry.structure)
        params, convert = view.as_stored(), view.from_stored
    assert isinstance(params, Mapping)
    with InDouble():
        probe, tolerance = exact_probe(module, *example_arguments(example_inputs, example_kwargs), outputs)
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

    @cached_property
    def wide(self) -> Params:
        """The parameters in float64, under the table's names."""
        return {n: t.detach().cpu().double() if t.is_floating_point() else t for n, t in self.params.items()}

    @cached_property
    def start(self) -> Params:
        """The parameters in float64, under the model's names."""
        return self._named(self.wide)

    @cached_property
    def own_names(self) -> dict[str, str]:
        """The model's names of tensors that have other names in the table, for example their names in files."""
        names = list(self.wide)
        marks = {name: torch.full(t.shape, k, dtype=torch.float64) for k, (name, t) in enumerate(self.wide.items())}
        found = {own: mark.flatten() for own, mark in self.convert(marks).items() if mark.numel()}
        # A tensor that several layers share has several marks.
        return {names[int(mark[0])]: own for own, mark in found.items() if bool((mark == mark[0]).all())}

    def run(self) -> list[Finding]:
        wide, start = self.wide, self.start
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
        name = f"{pair.smooth}.weight"
        axis = self._output_axis(name, wide)
        made = wide[name].shape[axis]
        counts = {one: wide[f"{one}.weight"].shape[self._input_axis(f"{one}.weight", wide)] for one in pair.balance}
        reason = _why_skipped(made, counts, is_norm=wide[name].ndim == 1)
        if any(self._layer_number(one, "groups") > 1 for one in pair.balance):
            reason = "a balance layer reads its channels in groups: no tool scales these"
        if reason:
            return Finding(row, pair.smooth, pair.balance, "skipped", reason=reason)
        size = next(iter(counts.values()))
        drawn = torch.rand(size, generator=self.generator, device=self.generator.device, dtype=torch.float64)
        factors = torch.exp2(2 * drawn.cpu() - 1)
        moved = self._named(self._scaled(pair, wide, factors))
        change = relative_change(reference, self.probe(moved))
        if change <= self.tolerance:
            return Finding(row, pair.smooth, pair.balance, "holds", change)
        own = self.own_names.get(name, name)
        missing, extra, reason = self._explain(own, axis, _of_last(factors, made), start, moved)
        return Finding(row, pair.smooth, pair.balance, "broken", change, missing, extra, reason)

    def _scaled(self, pair: ScalePair, wide: Params, factors: Tensor) -> Params:
        """Return the network with one pair scaled as quantization tools scale it."""
        result = dict(wide)
        name = f"{pair.smooth}.weight"
        weight, axis = wide[name], self._output_axis(name, wide)
        divisors = _of_last(factors, weight.shape[axis])
        offset = self._offset(pair.smooth, weight) if weight.ndim == 1 else 0.0
        result[name] = (weight + offset) / _along(divisors, axis, weight.ndim) - offset
        bias = wide.get(f"{pair.smooth}.bias")
        if bias is not None:
            result[f"{pair.smooth}.bias"] = bias / divisors
        for name in (f"{one}.weight" for one in pair.balance):
            reader = result[name]
            result[name] = reader * _along(factors, self._input_axis(name, wide), reader.ndim)
        return result

    def _input_axis(self, name: str, wide: Params) -> int:
        """Return the axis of a weight over which its layer sums inputs."""
        own = self.own_names.get(name, name)
        names = next((names for names in self.symmetry.tied if own in names), (own,))
        known = {axis for one, axis in self.symmetry.readers if one in names}
        if len(known) == 1:
            return known.pop()
        is_first = self._layer_number(name.removesuffix(".weight"), "transposed") > 0
        return 0 if is_first else min(1, wide[name].ndim - 1)

    def _layer_number(self, name: str, number: str) -> int:
        """Return a numeric attribute of a torch layer; zero if the layer is unknown or lacks the attribute."""
        return int(getattr(self._layer(name), number, 0))

    def _layer(self, name: str) -> nn.Module | None:
        """Return the module that holds a weight, or None if the weight belongs to several layers."""
        own = self.own_names.get(f"{name}.weight", "")
        return self.module.get_submodule(own.rpartition(".")[0]) if own else None

    def _output_axis(self, name: str, wide: Params) -> int:
        """Return the axis of a weight that indexes the outputs of its layer."""
        return 1 if wide[name].ndim > 1 and self._input_axis(name, wide) == 0 else 0

    def _offset(self, name: str, weight: Tensor) -> float:
        """Return the constant that a norm adds to its gain: one in Gemma, zero in other models."""
        norm = self._layer(name)
        if norm is None:
            return 0.0
        x = torch.linspace(-1, 2, 2 * len(weight), dtype=torch.float64).reshape(2, -1)
        bias = {"bias": torch.zeros_like(weight)} if getattr(norm, "bias", None) is not None else {}
        for offset in (0.0, 1.0):
            try:
                with evaluating(norm):
                    once, twice = (
                        torch.func.functional_call(norm, {"weight": w, **bias}, (x,))
                        for w in (weight, 2 * (weight + offset) - offset)
                    )
            except (RuntimeError, TypeError, ValueError):  # Batch normalization of images does not accept rows.
                return 0.0
            if torch.allclose(2 * once, twice, rtol=1e-4, atol=1e-6):
                return offset
        return 0.0

    def _explain(
        self, name: str, axis: int, divisors: Tensor, start: Params, moved: Params
    ) -> tuple[tuple[str, ...], tuple[str, ...], str]:
        """Return the missing parameters, the extra parameters and a reason, compared with the most similar family of
        scales.
        """
        best: tuple[tuple[str, ...], tuple[str, ...]] | None = None
        for direction in directions(diagonal(self.symmetry), "move"):
            place = next((p for p in direction.places if p.name == name and p.axes[-1] == axis), None)
            if place is None or len(place.axes) > 1:
                continue
            logs = torch.zeros(direction.count, dtype=torch.float64)
            logs[place.index.flatten()] = -divisors.log()[place.positions] / (place.exponent / 2)
            right = self.symmetry.act(scaled_element(self.symmetry.identity(), [(direction, logs)]), start)
            wrong = [one for one in right if not torch.allclose(right[one], moved[one], rtol=1e-9, atol=1e-12)]
            missing = tuple(one for one in wrong if torch.equal(moved[one], start[one]))
            extra = tuple(one for one in wrong if one not in missing)
            if best is None or len(missing) + len(extra) < len(best[0]) + len(best[1]):
                best = missing, extra
        if best is None:
            frozen = next((one.reason for one in self.symmetry.frozen if one.parameter == name), "")
            why = f": {frozen}" if frozen else ""
            return (), (), f"no positive scale of its channels keeps the function{why}"
        return *best, "" if any(best) else "the scales of the symmetry are different"

    def _named(self, wide: Params) -> Params:
        """Return the model's parameters; tied parameters are included under all of their names."""
        named = self.convert(wide)
        for names in self.symmetry.tied:
            known = next((name for name in names if name in named), None)
            named |= {} if known is None else {name: named[known] for name in names if name not in named}
        dtype = self.probe.dtype
        own = {n: t.to(dtype) if t.is_floating_point() else t for n, t in named.items() if n in self.probe.params}
        return {**self.probe.params, **own}


def _why_skipped(made: int, counts: Mapping[str, int], *, is_norm: bool) -> str:
    """Return the reason why tools do not scale a pair with these numbers of channels. The reason is empty if tools
    scale the pair.
    """
    if len({*counts.values()}) > 1:
        listed = ", ".join(f"{name} reads {count}" for name, count in counts.items())
        return f"its balance layers read different numbers of channels ({listed}): no tool scales these"
    name, count = next(iter(counts.items()))
    if made < count or (is_norm and made > count):
        return f"it has {made} channels, but {name} reads {count}: no tool scales these"
    return ""


def _of_last(factors: Tensor, made: int) -> Tensor:
    """Return factors for all outputs of a layer: the given factors for the last outputs, and ones for all others."""
    return torch.cat([torch.ones(made - len(factors), dtype=factors.dtype), factors])


def _along(factors: Tensor, axis: int, ndim: int) -> Tensor:
    return factors.reshape([-1 if k == axis else 1 for k in range(ndim)])

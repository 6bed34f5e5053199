"""Folding of gains, biases and means into later layers, which leaves the function unchanged."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regauge.core.arguments import check_arguments
from regauge.core.given import as_params, example_arguments
from regauge.core.outputs import Outputs
from regauge.core.params import Params
from regauge.core.probe import exact_probe, relative_change
from regauge.core.symmetry import Symmetry
from regauge.discovery.discover import REFUSED, discover
from regauge.discovery.rewrites.gains import fold_gains

EXACT = 1e-12
"""An amount that a translation would subtract counts as zero if it is below this fraction of the parameter's largest
entry."""


@dataclass(frozen=True)
class Folded:
    """A network that computes the same function as the original network, but has gains of one.

    Attributes:
        params: Parameters of the same architecture, with the same names, shapes, dtypes and devices.
        ones: The gains that are now exactly one; pass them to `discover` as `ones=folded.ones`.
        zeros: Biases, or parts of biases, that are now zero because other parameters have absorbed them.
        centered: The name and axis of each parameter from which the mean along the axis was subtracted. A later norm
            subtracts the mean anyway, so the function stays the same.
        max_error: The largest relative change of the outputs on the example inputs, in float64.
        notes: Messages about parameters that could not be changed, with the reasons.
    """

    params: Params
    ones: tuple[str, ...]
    zeros: tuple[str, ...]
    centered: tuple[tuple[str, int], ...]
    max_error: float
    notes: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join(
            [
                f"folded: {len(self.ones)} gains are one, {len(self.zeros)} biases are taken up by others, "
                f"{len(self.centered)} axes are centered; outputs unchanged (relative error {self.max_error:.1e})",
                *self.notes,
            ]
        )


@check_arguments
def fold(
    params: Mapping[str, Tensor],
    module: nn.Module,
    example_inputs: Any,
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    outputs: Outputs = None,
    symmetry: Symmetry | None = None,
) -> Folded:
    """Rewrite a network to remove redundant parameters, without changing its function.

    Three rewrites remove redundant parameters. The rewrites use the gains and translations of the network's symmetry.

    - A gain is multiplied into the parameters that read its output, by scales and signs of the symmetry. The gain
      becomes one. If a gain is zero, the parameters that read the gain's output become zero, unless a bias is added
      after the gain.

    - A bias is moved into a parameter that can absorb it, and the bias becomes zero. The bias of a LayerNorm moves into
      the layers that read its output. The bias of attention values moves into the output projection. The bias of a
      recurrent state moves into the bias of the layer's input. Biases that have no effect, such as a key bias before a
      softmax, also become zero.

    - If a LayerNorm or softmax subtracts a mean from its input, this mean is also subtracted from the parameters that
      write to the input. Parameters whose inputs sum to zero are centered in the same way.

    If gains are one, the residual stream of a transformer can be rotated. To find rotations of the residual stream,
    pass `ones` to `discover`. Each rewrite is checked on the example inputs in float64. A rewrite that changes the
    outputs is undone, and a note is added. The architecture stays the same.

    Args:
        params: One network.
        module: A module with the architecture of the network. The module's own parameters are not used.
        example_inputs: Example inputs, as for `discover`.
        example_kwargs: Keyword arguments of the module.
        outputs: The outputs that must not change, as for `discover`.
        symmetry: The symmetry that `discover` finds for the module without `ones`. By default, the symmetry is
            discovered.

    Raises:
        TraceError: `torch.export` cannot trace the module.
        KeyError: A parameter is missing.
        ValueError: The parameters belong to another architecture or to a population, the module is on the meta device,
            its outputs are not finite, or the symmetry was discovered with `ones`.

    References:
        Ashkboos et al. (2024), SliceGPT, section 3, for gains and means of transformers.
    """
    params = as_params(params)
    inputs, kwargs = example_arguments(example_inputs, example_kwargs)
    if any(t.is_meta for t in [*module.state_dict().values(), *params.values()]):
        raise ValueError("the module is on the meta device, where nothing can be checked; give it real parameters")
    if symmetry is not None and symmetry.ones:
        raise ValueError(
            "this symmetry was discovered with `ones` and no longer scales the gains that are to be folded; give the "
            "symmetry that `regauge.discover` finds without `ones`, or leave it out"
        )
    is_known = symmetry is not None and (symmetry.gains or symmetry.translations)
    found = symmetry if symmetry is not None and is_known else discover(module, inputs, kwargs, outputs=outputs)
    found = found.bind(params).on_data
    state = {name: params.get(name, t) for name, t in module.state_dict().items()}
    for name in found.sites:
        if name in state and state[name].ndim != len(found.shapes[name]):
            raise ValueError(f"{name!r} has a leading model axis; fold the networks of a population one by one")
    folding = _Folding(found, state, exact_probe(module, inputs, kwargs, outputs))
    folding.run()
    return folding.result(params)


class _Folding:
    """The rewrites so far, and the current network in float64, including constants that the model adds to gains."""

    def __init__(self, symmetry: Symmetry, state: Params, probe: Any) -> None:
        self.symmetry = symmetry
        self.probe, self.tolerance = probe
        self.given = {n: t.detach().to("cpu", torch.float64) if t.is_floating_point() else t for n, t in state.items()}
        self.start = symmetry.sums(self.given)
        self.params = dict(self.start)
        self.reference = self._outputs(self.params)
        if not all(bool(t.isfinite().all()) for t in self.reference):
            raise ValueError(
                "the network's outputs are NaN or Inf on these inputs, so nothing can be checked; give example inputs "
                "that it can handle"
            )
        self.ones: tuple[str, ...] = ()
        self.zeros: list[str] = []
        self.centered: list[tuple[str, int]] = []
        self.notes = [note for note in symmetry.notes if note.endswith(REFUSED)]
        self.max_error = 0.0
        self.is_careful = False

    def run(self) -> None:
        """Remove translations, fold the gains, and then remove translations that have become possible.

        Translations are removed first, because a bias that is added after a gain of zero could prevent folding.
        """
        self._check("translations", self._take_out)
        self._check("gains", self._fold)
        self._check("translations", self._take_out)

    def result(self, params: Mapping[str, Tensor]) -> Folded:
        result, own = dict(params), self.symmetry.from_sums(self.params, self.given)
        for name, tensor in params.items():
            if name in own and not torch.equal(own[name], self.given[name]):
                result[name] = own[name].to(tensor)
        tied = {name: names for names in self.symmetry.tied for name in names}
        ones = tuple(sorted({key for name in self.ones for key in tied.get(name, (name,))}))
        return Folded(result, ones, tuple(self.zeros), tuple(self.centered), self.max_error, tuple(self.notes))

    def _check(self, subject: str, step: Callable[[], None]) -> None:
        """Run a step of several rewrites, and check that the outputs stay the same.

        If the outputs change, run the step again and check every rewrite separately.
        """
        before = dict(self.params), self.ones, tuple(self.zeros), tuple(self.centered), tuple(self.notes)
        for self.is_careful in (False, True):
            step()
            error = self._error()
            if error <= self.tolerance:
                self.max_error = max(self.max_error, error)
                return
            params, self.ones, zeros, centered, notes = before
            self.params, self.zeros, self.centered, self.notes = dict(params), [*zeros], [*centered], [*notes]
        self.notes.append(
            f"The {subject} were not changed, because rewriting them changed the outputs by {error:.1e} (tolerance "
            f"{self.tolerance:.0e}): please report this model."
        )

    def _take(self, name: str, changed: Mapping[str, Tensor]) -> bool:
        """Accept a rewrite that changed parameters, and return True.

        If each rewrite is checked separately, a rewrite that changes the outputs is rejected.
        """
        before = dict(self.params)
        self._write(changed)
        if not self.is_careful or self._error() <= self.tolerance:
            return True
        self.params = before
        self.notes.append(f"{name!r} {REFUSED}")
        return False

    def _error(self) -> float:
        return relative_change(self.reference, self._outputs(self.params))

    def _outputs(self, params: Params) -> list[Tensor]:
        example, own = self.probe.params, self.symmetry.from_sums(params, self.given)
        result: list[Tensor] = self.probe({name: tensor.to(example[name]) for name, tensor in own.items()})
        return result

    def _write(self, changed: Mapping[str, Tensor]) -> None:
        tied = {name: names for names in self.symmetry.tied for name in names}
        for name, tensor in changed.items():
            self.params |= dict.fromkeys(tied.get(name, (name,)), tensor)

    def _take_out(self) -> None:
        """Use each translation family to set either the entries of one parameter, or the mean of these entries, to
        zero.
        """
        for family in self.symmetry.translations:
            home = family.entries.parameter
            coordinate, size = family.read(self.params), float(self.params[home].abs().max())
            if not bool((coordinate.abs() > EXACT * size).any()):
                continue
            moved = family.add(self.params, coordinate, sign=-1.0)
            if not family.constant:  # Remove rounding errors: these entries are exactly zero.
                family.entries.of(moved[home]).zero_()
            if not self._take(family.name, {name: moved[name] for name in family.parameters}):
                continue
            is_whole = family.entries.sizes == self.symmetry.shapes[home]
            if family.constant:
                split = len(family.entries.sizes) - len(self.symmetry.shapes[home])  # an axis cut into groups
                self.centered.append((home, family.constant[0] - split))
            else:
                self.zeros.append(home if is_whole else f"{home} (part)")
        self.zeros, self.centered = list(dict.fromkeys(self.zeros)), list(dict.fromkeys(self.centered))

    def _fold(self) -> None:
        self.params, self.ones, kept = fold_gains(self.params, self.symmetry.on_sums, self.symmetry.gains)
        tied = [names for names in self.symmetry.tied if any(len(self.symmetry.shapes[name]) > 1 for name in names)]
        for name, reason in kept.items():
            note = f"The gain {name!r} was kept, because {reason}"
            costs = [g for g in self.symmetry.groups if any(p.parameter == name for p in g.placements)]
            if costs:
                note += (
                    f"; the group {costs[0].name!r} on its axis keeps its {costs[0].kind} kind and gains no rotations"
                )
            if tied and reason.startswith("no scale"):
                note += (
                    f". {' and '.join(repr(n) for n in tied[0])} are one tensor, which reads behind the gain and "
                    "writes elsewhere: give each module a parameter of its own (and, for transformers, set "
                    "`config.tie_word_embeddings = False`), then fold again"
                )
            self.notes.append(note + ".")

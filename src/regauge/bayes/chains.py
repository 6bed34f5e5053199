"""Diagnostics of Markov chains up to symmetry: R-hat and effective sample sizes, which ArviZ computes."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from regauge.alignment.methods.merge_many import MergeMany, gather
from regauge.bayes.importers.particle_samples import from_samples
from regauge.bayes.posteriors.gaussian import GaussianPosterior
from regauge.bayes.posteriors.particles import ParticlePosterior
from regauge.canonical import canonicalize
from regauge.core.arguments import check_arguments
from regauge.core.behind_gains import zero_gains
from regauge.core.outputs import Outputs, evaluating, output_tensors
from regauge.core.params import Params, require_same_shapes
from regauge.core.symmetry import Symmetry
from regauge.core.task import call

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Floats = NDArray[np.float64]
Chain = ParticlePosterior | Mapping[str, Tensor] | Sequence[Mapping[str, Tensor]]

KINDS = {"posterior": "parameters", "aligned": "aligned parameters", "predictions": "predictions"}
"""The names of the three groups of variables in the data set, with the words that describe each group."""
CONVERGED = 1.01
"""The largest R-hat that Vehtari et al. (2021) recommend."""
AGREE, SHARE = 1.05, 0.95
"""The criterion for agreement of chains: a limit on R-hat, and the share of entries that must be within the limit."""
GRID = -30
"""The exponent of the grid to which entries are rounded before ranking. The spacing is about 2^GRID times the largest
entry of the tensor, rounded up to a power of two."""
ZERO = 1e-12
"""A threshold relative to the largest entry of all tensors. If all entries of a tensor are below the threshold, the
entries count as zeros with rounding errors."""
FEWEST = 4
"""The smallest number of draws in a chain. Each chain is split into halves, which need two draws each."""


@dataclass(frozen=True, eq=False)
class ChainDiagnosis:
    """The convergence of Markov chains: of parameters, of parameters up to symmetry, and of functions.

    Attributes:
        data: An ArviZ data set (`xarray.DataTree`) with the groups "posterior" (unaligned parameters), "aligned"
            (parameters of the aligned networks) and, if a module was given, "predictions". The first axes of every
            variable are chain and draw.
        rhat: For each group and variable, the rank-normalized split R-hat of each entry; NaN if the entry is constant.
        ess_bulk: For each group and variable, the bulk effective sample size of each entry.
        ess_tail: For each group and variable, the tail effective sample size of each entry.
    """

    data: Any
    rhat: Mapping[str, Mapping[str, Floats]]
    ess_bulk: Mapping[str, Mapping[str, Floats]]
    ess_tail: Mapping[str, Mapping[str, Floats]]

    def summary(self) -> list[dict[str, Any]]:
        """Return one row per group: the numbers of entries and of constant entries, and quantiles of R-hat and of
        sample sizes.
        """
        rows = []
        for group, values in self.rhat.items():
            rhat, bulk, tail = (_moving(one[group]) for one in (self.rhat, self.ess_bulk, self.ess_tail))
            constant = sum(one.size for one in values.values()) - rhat.size
            rows.append(
                {
                    "group": group,
                    "entries": rhat.size,
                    "constant": constant,
                    "rhat_median": _quantile(rhat, 0.5),
                    "rhat_95": _quantile(rhat, SHARE),
                    "rhat_max": _quantile(rhat, 1.0),
                    "above": float((rhat > CONVERGED).mean()) if rhat.size else math.nan,
                    "bulk_median": _quantile(bulk, 0.5),
                    "bulk_min": _quantile(bulk, 0.0),
                    "tail_min": _quantile(tail, 0.0),
                }
            )
        return rows

    def agrees(self, group: str) -> bool:
        """Return whether 95% of the entries of a group have an R-hat of at most 1.05."""
        return _quantile(_moving(self.rhat[group]), SHARE) <= AGREE

    @property
    def verdict(self) -> str:
        """A message that states whether the chains agree: in parameters, up to symmetry, or only as functions."""
        is_same, is_aligned = self.agrees("posterior"), self.agrees("aligned")
        if "predictions" in self.rhat and not self.agrees("predictions"):
            return (
                "The chains differ as functions, which no symmetry explains. Sample for longer, or expect several "
                "modes."
            )
        if is_aligned:
            return (
                "The chains agree in their parameters, also without alignment."
                if is_same
                else "The chains agree after alignment: their parameters differed only by symmetries."
            )
        if "predictions" in self.rhat:
            return (
                "The chains agree as functions, but not in their parameters, even after alignment. The parameters mix "
                "slowly, or the alignment ended in a local optimum."
            )
        return (
            "The chains differ in their parameters even after alignment. Give a module and inputs to compare functions."
        )

    def plot(self) -> "Figure":
        """Plot, for each group, the number of entries below each R-hat and above each effective sample size."""
        from regauge.report.chain_figures import chains_figure

        rhat, bulk = ({KINDS[kind]: _moving(one) for kind, one in some.items()} for some in (self.rhat, self.ess_bulk))
        return chains_figure(rhat, bulk, CONVERGED)

    def __str__(self) -> str:
        chains, draws = (self.data["posterior"].sizes[axis] for axis in ("chain", "draw"))
        lines = [
            f"{chains} chains of {draws} draws",
            f"{'':<20}{'entries':>9}{'R-hat':>9}{'95%':>9}{'largest':>9}{'> 1.01':>8}"
            f"{'bulk ESS':>10}{'least':>8}{'tail':>8}",
        ]
        for row in self.summary():
            lines.append(
                f"{KINDS[row['group']]:<20}{row['entries']:>9,}{row['rhat_median']:>9.3f}{row['rhat_95']:>9.3f}"
                f"{row['rhat_max']:>9.3f}{row['above']:>8.1%}{row['bulk_median']:>10.0f}{row['bulk_min']:>8.0f}"
                f"{row['tail_min']:>8.0f}"
            )
        return "\n".join([*lines, self.verdict])


@check_arguments
def diagnose(
    chains: Sequence[Chain],
    symmetry: Symmetry,
    *,
    module: nn.Module | None = None,
    inputs: Any = None,
    outputs: Outputs = None,
) -> ChainDiagnosis:
    """Measure how well Markov chains mix: their parameters, their parameters up to symmetry, and their functions.

    A chain may jump between symmetric copies of one mode, and different chains may stay in different copies. If chains
    stay in different copies, the R-hat of parameters shows no convergence, although the chains agree as functions.
    Therefore each draw is first transformed to its canonical form. Afterwards, all draws are aligned to their common
    mean (`MergeMany`). The alignment uses the whole symmetry, except that translations are set to zero or centered. Up
    to rounding, the result depends only on the orbits of the draws, not on the position of a draw on its orbit.

    ArviZ computes the rank-normalized split R-hat and the bulk and tail effective sample sizes of each entry. The
    diagnostics take about 0.6 milliseconds of CPU time per entry. Buffers are not diagnosed. The data set works with
    all other functions of ArviZ.

    Args:
        chains: The draws of each chain: a stack with one leading axis, a list of networks, or a `ParticlePosterior`.
            All chains must have the same number of draws, at least four.
        symmetry: The symmetry of the networks.
        module: The module that computes predictions on `inputs`, in evaluation mode.
        inputs: One batch of inputs, as for `Task`. Predictions are the outputs of the module for the batch `inputs`.
        outputs: The output to diagnose, if the module returns several tensors. Default: the first tensor.

    Raises:
        ImportError: ArviZ is not installed.
        TypeError: A single chain or a Gaussian was given instead of a list of chains.
        ValueError: The list of chains is empty. Chains have different numbers of draws or fewer than four. Networks
            have different architectures, do not fit the symmetry, or are not finite. The error is also raised if only
            one of `module` and `inputs` is given.

    References:
        Vehtari et al. (2021), Rank-normalization, folding, and localization: an improved R-hat.
    """
    if isinstance(chains, GaussianPosterior):
        raise TypeError("a Gaussian has no chains; use `rg.bayes.compare_with_prior` to compare it with its prior")
    if isinstance(chains, Mapping | ParticlePosterior):
        raise TypeError(f"chains is one {type(chains).__name__}; give a list of chains, [first, second]")
    if (module is None) != (inputs is None):
        raise ValueError("predictions need both a module and inputs; give both or neither")
    stacks = [_stack(one) for one in chains]
    counts = [len(next(iter(one.values()))) for one in stacks]
    if not counts or len(set(counts)) > 1 or counts[0] < FEWEST:
        raise ValueError(f"the chains have {counts} draws; give chains of equal length, at least {FEWEST} draws each")
    for one in stacks[1:]:
        require_same_shapes(stacks[0], one)
    draws = {name: torch.cat([one[name] for one in stacks]) for name in stacks[0]}
    symmetry = symmetry.bind(draws)
    skipped = {*symmetry.buffers, *(name for names in symmetry.tied for name in names[1:])}
    aligned = _align(draws, symmetry, len(counts))
    kinds = {
        kind: {name: one for name, one in some.items() if name not in skipped and one.is_floating_point()}
        for kind, some in {"posterior": draws, "aligned": aligned}.items()
    }
    if module is not None:
        kinds["predictions"] = {"outputs": _predict(draws, module, inputs, outputs)}
    shape = (len(counts), counts[0])
    arrays = {
        kind: {name: one.reshape(*shape, *one.shape[1:]).cpu().double().numpy() for name, one in some.items()}
        for kind, some in kinds.items()
    }
    return _measure(arrays)


def _stack(chain: Chain) -> Params:
    """Return the draws of a chain, stacked on a leading axis, in float64."""
    posterior = chain if isinstance(chain, ParticlePosterior) else from_samples(chain)
    return {name: one.double() if one.is_floating_point() else one for name, one in posterior.stack.items()}


def _align(draws: Params, symmetry: Symmetry, chains: int) -> Params:
    """Return all draws, aligned to one another. Up to rounding, the result depends only on the orbits of the draws."""
    canonical = canonicalize(draws, symmetry)
    names = symmetry.rotatable
    zero = zero_gains(symmetry, canonical, names)
    is_free = bool(names) and not any(bool(one.any()) for one in zero.values())
    behind = symmetry.on_representatives(rotate=is_free)
    settings, count = MergeMany(), len(next(iter(draws.values())))
    # The networks that are aligned first come from all chains, evenly over their draws.
    first = np.linspace(0, count - 1, min(settings.core, count)).round().astype(int).tolist()
    rest = [k for k in range(count) if k not in set(first)]
    *_, found = gather(canonical, behind, settings, order=[*first, *rest])
    return found.params


def _predict(draws: Params, module: nn.Module, inputs: Any, outputs: Outputs) -> Tensor:
    """Return the outputs of the module for each draw, `[draws, ...]`."""
    dtypes = {name: one.dtype for name, one in module.state_dict().items()}
    rows = []
    with torch.no_grad(), evaluating(module):
        for k in range(len(next(iter(draws.values())))):
            one = {name: tensor[k].to(dtypes.get(name, tensor.dtype)) for name, tensor in draws.items()}
            rows.append(output_tensors(call(module, one, inputs), outputs)[0])
    return torch.stack(rows)


def _measure(arrays: Mapping[str, Mapping[str, Floats]]) -> ChainDiagnosis:
    """Return the ArviZ data set of arrays `[chain, draw, ...]`, and ArviZ's diagnostics of all entries that vary."""
    try:
        arviz_base, arviz_stats = import_module("arviz_base"), import_module("arviz_stats")
    except ImportError as error:
        raise ImportError("diagnosing chains needs ArviZ: pip install 'regauge[chains]'") from error
    found: dict[str, dict[str, dict[str, Floats]]] = {"rhat": {}, "bulk": {}, "tail": {}}
    for kind, some in arrays.items():
        largest = max((np.abs(values).max(initial=0.0) for values in some.values()), default=0.0)
        rounded = {name: _round(values, float(largest)) for name, values in some.items()}
        moves = {name: values.max((0, 1)) > values.min((0, 1)) for name, values in rounded.items()}
        columns = np.concatenate([values[:, :, moves[name]] for name, values in rounded.items()], -1)
        tree = arviz_base.from_dict({"posterior": {"entries": columns}})
        # If a chain does not move, its variance is zero, and R-hat is infinite.
        with np.errstate(divide="ignore", invalid="ignore"):
            numbers = {"rhat": arviz_stats.rhat(tree, method="rank")} if columns.shape[-1] else {}
            for way in ("bulk", "tail") if columns.shape[-1] else ():
                numbers[way] = arviz_stats.ess(tree, method=way)
        for what, by_kind in found.items():
            flat = np.asarray(numbers[what]["entries"]) if numbers else np.zeros(0)
            start, by_kind[kind] = 0, {}
            for name, moving in moves.items():
                place = np.full(moving.shape, math.nan)
                place[moving] = flat[start : start + int(moving.sum())]
                by_kind[kind][name] = place
                start += int(moving.sum())
    data = arviz_base.from_dict({kind: dict(some) for kind, some in arrays.items()})
    return ChainDiagnosis(data, found["rhat"], found["bulk"], found["tail"])


def _round(values: Floats, largest: float) -> Floats:
    """Round values to a grid on which medians are exact. A tensor that contains only rounding errors becomes zero.

    Without rounding, ranks would depend on the last bits, because entries that are equal up to rounding have no stable
    order. R-hat also ranks the distances of draws from their median. If the number of draws is even, two draws have the
    same distance from their median. Ranks are reproducible only if the distances of the two draws are exactly equal.
    """
    size = float(np.abs(values).max(initial=0.0))
    if size <= ZERO * largest:
        return np.zeros_like(values)
    step = 2.0 ** (GRID + math.ceil(math.log2(size)))
    rounded: Floats = np.rint(values / step) * step
    return rounded


def _moving(values: Mapping[str, Floats]) -> Floats:
    """Return the indices of all entries that vary."""
    flat = np.concatenate([one.ravel() for one in values.values()])
    kept: Floats = flat[~np.isnan(flat)]
    return kept


def _quantile(values: Floats, share: float) -> float:
    """Return the smallest value that is at least as large as the given share of all values; NaN without values."""
    return float(np.quantile(values, share, method="higher")) if values.size else math.nan

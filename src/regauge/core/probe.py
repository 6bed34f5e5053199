"""Evaluation of a model as a function of its parameters, as exactly as possible, and results of numerical checks."""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from regauge.core.outputs import Outputs, SelectedOutputs
from regauge.core.params import Params

PROBE_TOLERANCE = 1e-9
"""The largest relative error that is allowed if a model computes in float64."""
TOLERANCE_SINGLE = 1e-5
"""The largest relative error that is allowed if a model rounds to float32 internally, in any parameter dtype."""
TOLERANCE_FLOAT32 = 1e-4
"""The largest relative error that is allowed if a model cannot run in float64 at all."""
ROUNDED = 4
"""The size of the parameter changes whose effect on the outputs is tested, in units of the rounding error."""
STEADY = 1e-2
"""The largest change of the outputs that small parameter errors may cause, as a fraction of the tolerance."""


NOISE = 65_537
"""The number of random numbers that are sampled to perturb a tensor.

A tensor with more entries than random numbers uses them repeatedly. The number of random numbers is prime, so no two
rows of a tensor get the same noise.
"""


class Trial(NamedTuple):
    """An evaluation of a model at one point: the parameters, the outputs, and whether all outputs are finite."""

    params: Params
    reference: list[Tensor]
    is_finite: bool


def away(
    params: Params,
    buffers: set[str],
    fixed: Mapping[str, float],
    generator: torch.Generator,
    run: Callable[[Params], list[Tensor]],
    tolerance: float,
) -> Trial:
    """Return perturbed parameters with which the outputs are finite and insensitive to rounding errors.

    In a chain of sines with high frequencies, every layer amplifies rounding errors if the weights are as large as in
    other networks. A model that amplifies rounding errors is evaluated with smaller weights. If rounding errors are
    amplified with all sizes of weights that are tried, the weights with the smallest errors are returned. Parameters in
    `fixed` keep the given value.
    """
    best: tuple[float, Trial] | None = None
    infinite: Trial | None = None
    for strength, is_raised in ((0.3, True), (0.1, True), (0.01, True), (0.3, False), (0.1, False), (0.01, False)):
        point = perturb(params, buffers, generator, strength, is_raised=is_raised, fixed=fixed)
        trial = Trial(point, run(point), is_finite=True)
        if not _is_finite(trial.reference):
            infinite = trial._replace(is_finite=False) if is_raised else infinite
            continue
        error = relative_change(trial.reference, run(_round_off(point, generator)))
        if error <= STEADY * tolerance:
            return trial
        if best is None or error < best[0]:
            best = (error, trial)
    chosen = infinite if best is None else best[1]
    assert chosen is not None
    return chosen


def exact_probe(
    module: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any], outputs: Outputs = None
) -> tuple["Probe", float]:
    """Return a copy of the model that computes as exactly as possible, and the relative error to allow for rounding."""
    single = partial(Probe, module, inputs, kwargs, outputs, dtype=torch.float32)
    try:
        probe = Probe(module, inputs, kwargs, outputs)
        result, tolerance = probe.examine(probe.params)
    except RuntimeError:
        # Some models make float32 tensors of their own and cannot run in float64.
        return single(), TOLERANCE_FLOAT32
    if not _is_finite(result) and _is_finite((found := single()).examine(found.params)[0]):
        # Some masks in float32 multiply zeros by the smallest number of the parameters' dtype. For float64, this number
        # is minus Inf in float32.
        return found, TOLERANCE_FLOAT32
    return probe, tolerance


def first_trial(
    module: nn.Module,
    inputs: tuple[Any, ...],
    kwargs: dict[str, Any],
    outputs: Outputs,
    fixed: Mapping[str, float],
    generator: torch.Generator,
) -> tuple["Probe", float, Trial] | None:
    """Return a float64 probe, the relative error to allow for its rounding, and a trial, with only one evaluation.

    In most cases, this function gives the same probe and parameters as `exact_probe` and `away`. However, `first_trial`
    does not measure how sensitive the outputs are to rounding errors. The result is None if the model cannot run in
    float64, or if the outputs are not finite.
    """
    try:
        probe = Probe(module, inputs, kwargs, outputs)
        point = perturb(probe.params, set(probe.buffers), generator, fixed=fixed)
        reference, tolerance = probe.examine(point)
    except RuntimeError:
        return None
    return (probe, tolerance, Trial(point, reference, is_finite=True)) if _is_finite(reference) else None


class Probe:
    """A copy of a module in float64 and evaluation mode, called as a function of its parameters and buffers."""

    def __init__(
        self,
        module: nn.Module,
        inputs: tuple[Any, ...],
        kwargs: dict[str, Any],
        outputs: Outputs,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        def cast(value: Any) -> Any:
            if isinstance(value, Tensor) and value.is_complex():  # `Module.to` would drop the imaginary parts.
                return value.to(dtype.to_complex())
            return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

        self.dtype = dtype
        self.evaluations = 0
        widened = _copy(module)._apply(cast)  # type: ignore[no-untyped-call]
        self.module = SelectedOutputs(widened.eval(), outputs)
        self.inputs, self.kwargs = pytree.tree_map(cast, (tuple(inputs), kwargs))
        state = {name: t for name, t in self.module.state_dict().items() if isinstance(t, Tensor)}
        self.params: Params = {name.removeprefix("module."): t.detach() for name, t in state.items()}
        self.buffers = [name.removeprefix("module.") for name, _ in self.module.named_buffers()]

    def examine(self, params: Params) -> tuple[list[Tensor], float]:
        """Return the outputs of the model and the error to allow for its rounding.

        The allowed error is larger if the model computes some results that depend on parameters in single or half
        precision.
        """
        self.evaluations += 1
        named = self._name_all(params)
        for name, tensor in named.items():
            # Kernels of batch normalization have no derivatives with respect to running statistics.
            is_parameter = name.removeprefix("module.") not in self.buffers
            tensor.requires_grad_(is_parameter and tensor.is_floating_point())
        with torch.enable_grad(), self._same_draws(), _Precision() as precision:
            result = torch.func.functional_call(self.module, named, self.inputs, self.kwargs, tie_weights=False)
        return [
            t.detach() for t in pytree.tree_leaves(result)
        ], TOLERANCE_SINGLE if precision.is_lost else PROBE_TOLERANCE

    @contextmanager
    def _same_draws(self) -> Iterator[None]:
        """Make every forward pass of the model use the same random numbers."""
        devices = {tensor.get_device() for tensor in self.params.values() if tensor.is_cuda}
        with torch.random.fork_rng(devices=sorted(devices)):
            torch.manual_seed(0)
            yield

    def __call__(self, params: Mapping[str, Tensor]) -> list[Tensor]:
        self.evaluations += 1
        with torch.no_grad(), self._same_draws():
            # Tied parameters are given under all their names.
            named = self._name_all(params)
            result = torch.func.functional_call(self.module, named, self.inputs, self.kwargs, tie_weights=False)
        return [t.detach() for t in pytree.tree_leaves(result)]

    def _name_all(self, params: Mapping[str, Tensor]) -> Params:
        """Return all tensors by their full names. Buffers are copied because a forward pass may overwrite them."""
        named = {f"module.{name}": tensor.detach() for name, tensor in params.items()}
        for name, tensor in self.module.named_buffers(remove_duplicate=False):
            named[name] = named.get(name, tensor).clone()
        return named


def _copy(module: nn.Module) -> nn.Module:
    """Return a copy of a module in which tensors with an autograd graph are detached.

    A module may keep a tensor from an earlier forward pass, together with its autograd graph. Torch cannot copy a
    tensor together with its graph.
    """
    held = [one for part in module.modules() for one in pytree.tree_leaves(dict(vars(part)))]
    memo = {id(one): one.detach().clone() for one in held if isinstance(one, Tensor) and not one.is_leaf}
    return copy.deepcopy(module, memo)


def perturb(
    params: Params,
    buffers: set[str],
    generator: torch.Generator,
    strength: float = 0.3,
    *,
    is_raised: bool = True,
    fixed: Mapping[str, float] | None = None,
) -> Params:
    """Return parameters plus random noise, in which no bias or weight is zero, and no gain is one.

    Buffers without negative entries, such as running variances, keep their signs. Tied names stay tied. The size of the
    noise is proportional to the size of the entries. If `is_raised`, small weights are enlarged until each layer's
    outputs are about as large as its inputs. Parameters in `fixed` get the given value.
    """
    seen: dict[tuple[int, torch.Size, tuple[int, ...]], Tensor] = {}
    result = {}
    for name, tensor in params.items():
        if not tensor.is_floating_point() or tensor.numel() == 0:
            result[name] = tensor
            continue
        key = (tensor.data_ptr(), tensor.shape, tensor.stride())
        if key not in seen:
            seen[key] = _perturb_one(tensor, name in buffers, generator, strength, is_raised=is_raised)
        result[name] = seen[key]
    return result | {name: torch.full_like(result[name], value) for name, value in (fixed or {}).items()}


def _is_finite(outputs: list[Tensor]) -> bool:
    return all(bool(t.isfinite().all()) for t in outputs)


def relative_change(before: list[Tensor], after: list[Tensor]) -> float:
    """Return the largest absolute difference between two lists of outputs, relative to each output's largest entry.

    If an output has different shapes in the two lists, the change is infinite. For example, the length of an output may
    depend on the parameters.
    """
    worst = 0.0
    for a, b in zip(before, after, strict=True):
        if a.shape != b.shape:
            return float("inf")
        if a.numel() == 0:
            continue
        if not (a.is_floating_point() or a.is_complex()):
            worst = worst if torch.equal(a, b) else float("inf")
            continue
        difference = float((a - b).abs().max()) / max(float(a.abs().max()), 1e-30)
        worst = max(worst, difference if difference == difference else float("inf"))
    return worst


def _perturb_one(
    tensor: Tensor, is_buffer: bool, generator: torch.Generator, strength: float, *, is_raised: bool
) -> Tensor:
    if is_buffer and not bool(tensor.isfinite().all()):
        return tensor  # Masks and limits contain Inf on purpose.

    def noise() -> Tensor:
        count = min(tensor.numel(), NOISE)
        drawn = torch.randn(count, generator=generator, device=generator.device, dtype=torch.float64)
        return drawn.to(device=tensor.device, dtype=tensor.dtype)

    factor = torch.exp(strength * noise())
    if is_buffer and bool((tensor >= 0).all()) and bool((tensor > 0).any()):
        return _by_pieces(tensor, factor, torch.zeros_like(factor))
    rms = float(torch.linalg.vector_norm(tensor)) / tensor.numel() ** 0.5
    added = strength * (rms if rms > 1e-3 else 0.3) * noise()
    if tensor.ndim >= 2 and not is_buffer and is_raised and rms > 1e-8:
        # If weights are very small, every check would pass. Scale the output of each layer to about one.
        fan_in = tensor.numel() / tensor.shape[0]
        larger = max(1.0, 0.7 / (rms * fan_in**0.5 + 1e-12))
        factor, added = larger * factor, larger * added
    return _by_pieces(tensor, factor, added)


def _by_pieces(tensor: Tensor, factor: Tensor, added: Tensor) -> Tensor:
    """Return `tensor * factor + added`. A factor or summand that is smaller than the tensor is repeated."""
    flat = tensor.detach().flatten()
    whole = flat.numel() // factor.numel() * factor.numel()
    result = torch.empty_like(flat)
    torch.addcmul(added, flat[:whole].view(-1, factor.numel()), factor, out=result[:whole].view(-1, factor.numel()))
    torch.addcmul(added[: flat.numel() - whole], flat[whole:], factor[: flat.numel() - whole], out=result[whole:])
    return result.view(tensor.shape)


def _round_off(params: Params, generator: torch.Generator) -> Params:
    """Return parameters to which random rounding errors were added."""
    result = dict(params)
    for name, tensor in params.items():
        if tensor.is_floating_point() and tensor.numel():
            noise = torch.randn(min(tensor.numel(), NOISE), generator=generator, device=generator.device).to(tensor)
            factor = 1 + ROUNDED * torch.finfo(tensor.dtype).eps * noise
            result[name] = _by_pieces(tensor, factor, torch.zeros_like(factor))
    return result


class _Precision(TorchFunctionMode):
    """A mode of torch that detects results in single or half precision that depend on parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.is_lost = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.dtype in (torch.float32, torch.float16, torch.bfloat16):
            self.is_lost |= result.requires_grad
        return result


class InDouble(TorchFunctionMode):
    """A context in which results stay in float64, even if the code of the model converts them to float32.

    Many normalization layers convert their inputs to float32.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            return args[0].double()
        wider = {name: torch.float64 if value is torch.float32 else value for name, value in (kwargs or {}).items()}
        return func(*(torch.float64 if value is torch.float32 else value for value in args), **wider)


@dataclass(frozen=True)
class Check:
    """The result of a verification: the largest relative change of an output by all groups, and by each group.

    The accepted change is 1e-9. If the model rounds to float32, the accepted change is 1e-5. If the model cannot run in
    float64, the accepted change is 1e-4.

    Attributes:
        max_error: The largest change of an output, whether caused by all groups together or by one group alone.
        per_group: The change of the outputs caused by each group and each translation family. If a group was not tested
            alone, its entry is the change caused by all groups together. The dictionary `per_group` is empty if only
            all groups together were tested.
        tolerance: The largest accepted change of an output.
        alone: The groups and translation families that were tested one at a time.
        evaluations: The number of evaluations of the model.
    """

    max_error: float
    per_group: Mapping[str, float]
    tolerance: float
    alone: frozenset[str] = frozenset()
    evaluations: int = 0

    @property
    def ok(self) -> bool:
        """Whether no change of an output exceeds the tolerance."""
        return self.max_error <= self.tolerance

    @property
    def failed(self) -> tuple[str, ...]:
        """The groups that change the function of the network, and therefore are not symmetries."""
        return tuple(name for name, error in self.per_group.items() if not error <= self.tolerance)

    def __str__(self) -> str:
        if self.ok:
            alone = f", and {len(self.alone)} of them alone," if self.alone else ""
            return (
                f"verified: all groups together{alone} leave the outputs unchanged (largest relative error "
                f"{self.max_error:.1e}, tolerance {self.tolerance:.0e}, {self.evaluations} evaluations of the model)"
            )
        if not self.failed:
            return (
                "NOT a symmetry: each group alone leaves the outputs unchanged, but all groups together change them by "
                f"{self.max_error:.1e} (tolerance {self.tolerance:.0e}); two groups have the same axis"
            )
        worst = sorted(self.failed, key=lambda name: -self.per_group[name])[:5]
        listed = ", ".join(f"{name} ({self.per_group[name]:.1e})" for name in worst)
        return (
            f"NOT a symmetry: {len(self.failed)} of {len(self.per_group)} groups change the outputs: {listed}; "
            "an axis is missing from their placements or tied to the wrong group. Remove the group, or correct "
            "its placements; if `discover` found it, report the model"
        )

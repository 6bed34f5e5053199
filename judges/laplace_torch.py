"""Posteriors that the tests of laplace-torch fit, read by regauge.

    PEERS=FOLDER .venv/bin/python judges/laplace_torch.py [PIECE-OF-A-NAME ...]

The tests run as they are. A case is a test that passes and in which a parametric approximation is fitted to finite
curvature, and it passes if all of these become posteriors of regauge. Of diagonal ones, means and variances are theirs,
and both draw the same values with the same noise. Of Kronecker-factored ones, means and the variances of biases are
theirs, those of weights are the stated ones, and no wider than theirs. Approximations with full or low-rank
covariances must be refused, by name.
"""

import io
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, chdir, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from judge import Case, Failed, Peer, judge, sentence
from torch import Tensor
from weight_nets import pretend, require_close

from regauge import bayes

PEER = Peer(
    "Laplace",
    "https://github.com/aleximmer/Laplace",
    "44ea62ac1f8cfd6f797f31c75e2cf34414fdddae",
    (
        "asdfghjkl==0.1a4",
        "backpack-for-pytorch==1.7.1",
        "curvlinops-for-pytorch==2.0.1",
        "einconv==0.1.0",
        "einops==0.8.1",
        "lightning-utilities==0.15.3",
        "pytest-mock==3.17.0",
        "torchmetrics==1.9.0",
        "unfoldNd==0.2.3",
    ),
    ("opt_einsum", "pytest", "scipy", "tqdm"),
)
FILES = ("test_baselaplace", "test_lllaplace", "test_subnetlaplace", "test_serialization", "test_subset_params")
FULL = ("FullLaplace", "LowRankLaplace", "FullLLLaplace", "FullSubnetLaplace")
"""Classes with covariances that no posterior of regauge holds."""
DRAWS = 5


def cases(checkout: Path) -> Iterable[Case]:
    """Every case, in the order of the record."""
    import torchmetrics  # noqa: F401
    import transformers  # noqa: F401  # both before the absent modules, which they look for

    pretend("torchvision", "torchvision.models", "laplace.curvature.asdfghjkl")
    sys.path.insert(0, str(checkout))
    chosen = [file for file in FILES if any(file in piece or piece in file for piece in sys.argv[1:])]
    for file in chosen or FILES:
        for name, outcome in run_tests(checkout, file).items():
            yield Case(f"{file}.py::{name}", outcome)


def run_tests(checkout: Path, file: str) -> dict[str, Callable[[], str | None]]:
    """Run the tests of a file, and say what became of the posteriors of each that fits some."""
    import pytest

    dtype, recorder = torch.get_default_dtype(), Recorder()
    out = io.StringIO()
    try:
        with chdir(checkout), redirect_stdout(out), redirect_stderr(out):
            options = ["-q", "-p", "no:cacheprovider", f"--rootdir={checkout}", "-k", "not large"]  # of torchvision
            pytest.main([*options, f"tests/{file}.py"], plugins=[recorder])
    finally:
        torch.set_default_dtype(dtype)
    return recorder.found


class Recorder:
    """A plugin of pytest that reads what tests fitted, as long as they have it."""

    def __init__(self) -> None:
        self.found: dict[str, Callable[[], str | None]] = {}

    def pytest_pyfunc_call(self, pyfuncitem: Any) -> bool:
        """Run a test, and keep what becomes of what it fitted."""
        fitted: list[Any] = []
        arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
        with watched(fitted):
            pyfuncitem.obj(**arguments)
        known = {id(one): one for one in fitted if isinstance(one.mean, Tensor) and is_finite(one)}
        if known:
            self.found[pyfuncitem.name] = read_all(list(known.values()))
        return True


def watched(fitted: list[Any]) -> ExitStack:
    """Collect what is fitted."""
    from laplace import ParametricLaplace

    def kinds(one: type) -> Iterator[type]:
        yield one
        for below in one.__subclasses__():
            yield from kinds(below)

    def record(own: Callable[..., Any]) -> Callable[..., Any]:
        def fit(self: Any, *given: Any, **settings: Any) -> Any:
            made = own(self, *given, **settings)
            fitted.append(self)
            return made

        return fit

    stack = ExitStack()
    for kind in dict.fromkeys(kinds(ParametricLaplace)):
        if "fit" in vars(kind):
            stack.enter_context(patch.object(kind, "fit", record(kind.fit)))
    return stack


def is_finite(fitted: Any) -> bool:
    """Whether means are finite, and curvature that is one tensor, and Kronecker factors are decomposed."""
    if type(fitted.H).__name__ == "Kron":  # which some dtypes have no decomposition for
        return False
    tensors = [fitted.mean, *([fitted.H] if isinstance(fitted.H, Tensor) else [])]
    return all(bool(x.isfinite().all()) for x in tensors)


def read_all(fitted: list[Any]) -> Callable[[], str | None]:
    """What becomes of posteriors, as a case."""
    try:
        notes = [read(one) for one in fitted]
    except Failed as error:
        return raising(error)
    except Exception as error:  # of regauge, which is no passing case
        return raising(Failed(sentence(error)))
    told = [note for note in notes if note is not None]
    return lambda: told[0] if told else None


def raising(error: Exception) -> Callable[[], str | None]:
    """A case that does not pass."""

    def run() -> str | None:
        raise error

    return run


def read(fitted: Any) -> str | None:
    """Compare a fitted approximation with its posterior in regauge; the note of one that is refused."""
    kind = type(fitted).__name__
    if kind in FULL:
        try:
            bayes.from_laplace(fitted)
        except ValueError as error:
            if kind not in str(error):
                raise Failed(f"refused without its name: {sentence(error)}") from error
            return "refused: no posterior of regauge holds its covariance"
        raise Failed(f"a {kind} is read as something else")
    found = bayes.from_laplace(fitted)
    module = fitted.model.model if "LL" in kind else fitted.model
    uncertain = [p for p in (fitted.model.last_layer if "LL" in kind else module).parameters() if p.requires_grad]
    names = [next(name for name, one in module.named_parameters() if one is p) for p in uncertain]
    for name, tensor in module.state_dict().items():
        if name not in names:
            require_close(found.mean[name], tensor, 0.0, f"means of {name}")
    require_close(flat(found.mean, names), fitted.mean.detach(), 0.0, "means")
    if "Kron" in kind:
        read_factors(fitted, found, names)
        return None
    assert isinstance(found, bayes.GaussianPosterior)
    variance = fitted.posterior_variance.detach()
    chosen = getattr(fitted.backend, "subnetwork_indices", None)
    if chosen is not None:
        variance = torch.zeros_like(fitted.mean, dtype=variance.dtype).index_put((chosen,), variance)
    tolerance = max(1e-5, 4 * torch.finfo(fitted.mean.dtype).eps)
    std = {name: found.std.get(name, torch.zeros_like(found.mean[name])) for name in names}
    require_close(flat(std, names).square(), variance, tolerance, "variances")
    count = len(variance) if chosen is None else len(chosen)
    noise = torch.randn(DRAWS, count, generator=torch.Generator().manual_seed(0), dtype=fitted.mean.dtype)
    try:
        theirs = fitted.sample(DRAWS, generator=torch.Generator().manual_seed(0)).detach()
    except RuntimeError as error:
        if "dtypes match" not in str(error):
            raise
        return "means and variances are equal; laplace-torch cannot sample from it in this dtype"
    if chosen is not None:
        noise = torch.zeros(DRAWS, len(variance), dtype=noise.dtype).index_copy(1, chosen, noise)
    sizes = [found.mean[name].numel() for name in names]
    pieces = zip(names, noise.split(sizes, 1), strict=True)
    ours = found.at({name: x.reshape(DRAWS, *found.mean[name].shape) for name, x in pieces if name in found.std})
    require_close(torch.cat([ours[name].flatten(1) for name in names], 1), theirs, tolerance, "samples")
    return None


def read_factors(fitted: Any, found: Any, names: list[str]) -> None:
    """Compare variances with those of the precision that is stated, and with the exact ones."""
    precision, tolerance = fitted.posterior_precision, max(1e-5, 4 * torch.finfo(fitted.mean.dtype).eps)
    std = found.moments().std if isinstance(found, bayes.KroneckerPosterior) else found.std
    for k, name in enumerate(names):
        values, vectors = precision.eigenvalues[k], precision.eigenvectors[k]
        delta = precision.deltas.expand(len(names))[k]
        own = std[name].detach().square().flatten()
        if len(values) == 1:
            exact = (vectors[0].square() @ (values[0] + delta).reciprocal()).detach()
            require_close(own, exact, tolerance, f"variances of {name}")
            continue
        exact = (vectors[0].square() @ (torch.outer(*values) + delta).reciprocal() @ vectors[1].square().T).detach()
        if not bool((own <= exact.flatten() * (1 + 10 * tolerance)).all()):
            raise Failed(f"variances of {name} are wider than theirs")


def flat(params: Any, names: list[str]) -> Tensor:
    """Parameters as one vector."""
    return torch.cat([params[name].flatten() for name in names])


if __name__ == "__main__":
    judge(PEER, cases)

"""States of distributions that the tests of posteriors make, read by regauge.

    PEERS=FOLDER .venv/bin/python judges/posteriors.py [PIECE-OF-A-NAME ...]

The tests of `tests/ekf`, `tests/laplace`, `tests/sgmcmc` and `tests/vi` run as they are, chains for fewer steps. A case
passes if its test does, and if the states that transforms made in it become posteriors of regauge: diagonal Gaussians
with their means and standard deviations, from which both draw the same values with the same noise; chains, the same
samples. States with full covariances must be refused, by name. States of one tensor or of a tuple are read under names
that are given to their leaves.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from judge import Case, Failed, Peer, judge, sentence
from torch import Tensor
from weight_nets import load, require_close

from regauge import bayes

PEER = Peer(
    "posteriors",
    "https://github.com/normal-computing/posteriors",
    "769204273520048bb029bcb507d2ddc869f61296",
    (),
    ("torchopt", "optree", "tensordict", "pytest"),
)
FOLDERS = ("ekf", "laplace", "vi", "sgmcmc")
WIDTHS: dict[str, Callable[[Tensor], Tensor]] = {
    "sd_diag": lambda x: x,
    "log_sd_diag": torch.exp,
    "prec_diag": torch.rsqrt,
}
"""Fields that say how wide a diagonal state is, and the standard deviations that they stand for."""
DENSE = ("cov", "prec", "L_factor")
"""Fields of full covariances."""
UPDATES = 2000
"""Updates of a chain; those of the tests of chains are 100,000, which takes an hour."""
CHAIN = 50
"""Last states of a chain that are read."""


class Enough(Exception):
    """A chain has been updated as often as wanted."""


def cases(checkout: Path) -> Iterable[Case]:
    """Every case, in the order of the record."""
    sys.path.insert(0, str(checkout))
    for folder in FOLDERS:
        for path in sorted((checkout / "tests" / folder).glob("test_*.py")):
            module = load(path, f"tests.{folder}.{path.stem}")
            for name, arguments in tests_of(module):
                values = (getattr(value, "__name__", str(value)) for value in arguments.values())
                title = f"{folder}/{path.name}::{name}" + (f"[{'-'.join(values)}]" if arguments else "")
                test = getattr(module, name)
                yield Case(title, lambda test=test, arguments=arguments: run(test, arguments))


def tests_of(module: ModuleType) -> Iterator[tuple[str, dict[str, Any]]]:
    """The tests of a module, with the arguments of each."""
    for name, test in vars(module).items():
        if not name.startswith("test_") or name.startswith("test_nelbo"):  # which makes no state
            continue
        given: list[dict[str, Any]] = [{}]
        for mark in getattr(test, "pytestmark", []):
            key, values = mark.args
            given = [{**known, key: value} for value in values for known in given]
        yield from ((name, arguments) for arguments in given)


def transforms() -> list[ModuleType]:
    """The modules of their transforms."""
    packages = [import_module(f"posteriors.{folder}") for folder in FOLDERS]
    return [one for package in packages for one in vars(package).values() if hasattr(one, "build")]


@contextmanager
def recorded(states: list[tuple[ModuleType, Any]]) -> Iterator[None]:
    """Collect the states that transforms make, with the modules of these."""

    def watched(module: ModuleType, own: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any, **settings: Any) -> Any:
            made = own(*given, **settings)
            states.append((module, made[0] if isinstance(made, tuple) else made))
            if len(states) > UPDATES and module.__name__.startswith("posteriors.sgmcmc"):
                raise Enough
            return made

        return run

    with ExitStack() as stack:
        for module in transforms():
            for name in ("init", "update"):
                stack.enter_context(patch.object(module, name, watched(module, getattr(module, name))))
        yield


def run(test: Callable[..., None], arguments: dict[str, Any]) -> str | None:
    """Run a test, and read the states that it made."""
    states: list[tuple[ModuleType, Any]] = []
    stopped = None
    with recorded(states):
        try:
            test(**arguments)
        except Enough:
            stopped = f"the chain is stopped after {UPDATES} updates, before the assertions about its moments"
    module, last = states[-1]
    widths = [name for name in WIDTHS if getattr(last, name, None) is not None]
    if widths:
        read_diagonal(module, name_leaves(last), widths[0])
    elif any(getattr(last, name, None) is not None for name in DENSE):
        return refuse_dense(name_leaves(last))
    else:
        read_chain([name_leaves(state) for _, state in states[-CHAIN:]])
    return stopped


def name_leaves(state: Any) -> Any:
    """A state of one tensor as one of a dictionary with one tensor."""
    if not isinstance(state.params, Tensor):
        return state
    known = {name: getattr(state, name) for name in type(state).__dataclass_fields__}
    shape = state.params.shape
    named = {
        name: {"params": value.detach()} if isinstance(value, Tensor) and value.shape == shape else value
        for name, value in known.items()
    }
    return type(state)(**named)


def read_diagonal(module: ModuleType, state: Any, field: str) -> None:
    """Compare means, standard deviations, and samples with the same noise."""
    from optree import tree_map

    std = {name: WIDTHS[field](x.detach()) for name, x in getattr(state, field).items()}
    if not all(bool(x.isfinite().all()) for x in std.values()):
        try:
            bayes.from_posteriors(state)
        except ValueError:
            return
        raise Failed("standard deviations that are not finite are not refused")
    found = bayes.from_posteriors(state)
    assert isinstance(found, bayes.GaussianPosterior)
    for name, tensor in state.params.items():
        require_close(found.mean[name], tensor.detach(), 0.0, f"means of {name}")
        require_close(found.std[name], std[name], 1e-6, f"standard deviations of {name}")
    torch.manual_seed(0)
    theirs = module.sample(state, (7,))
    torch.manual_seed(0)
    noise = tree_map(lambda x: torch.randn((7, *x.shape)), state.params)
    ours = found.at({name: noise[name] for name in found.std})
    for name, tensor in ours.items():
        require_close(tensor, theirs[name].detach(), 1e-5, f"samples of {name}")


def refuse_dense(state: Any) -> str:
    """Raise `Failed` unless a full covariance is refused as such."""
    try:
        bayes.from_posteriors(state)
    except ValueError as error:
        if "full covariance" not in str(error):
            raise Failed(f"refused for another reason: {sentence(error)}") from error
        return "refused: it has a full covariance, which no posterior of regauge holds"
    raise Failed("a full covariance is read as something else")


def read_chain(states: Sequence[Any]) -> None:
    """Compare the samples of a chain: a list of its states, and one state of all, as their examples combine them."""
    from optree import tree_map

    combined = tree_map(lambda *x: torch.stack(x), *states)
    for what, given in (("a list of states", list(states)), ("a stack of states", combined)):
        found = bayes.from_posteriors(given)
        assert isinstance(found, bayes.ParticlePosterior)
        for name in found.stack:
            wanted = torch.stack([state.params[name].detach() for state in states])
            if not torch.equal(found.stack[name], wanted):
                raise Failed(f"{name} of {what} is read otherwise")


if __name__ == "__main__":
    judge(PEER, cases)

"""Laws of the diagnosis of Markov chains modulo symmetry."""

import math

import pytest
import torch
from posterior_cases import NETS, network
from torch import Tensor

import regauge as rg
from regauge import Params, Symmetry
from regauge.bayes.chains import diagnose

pytest.importorskip("arviz_stats")
NAMES = [name for name in NETS if name != "batch norm"]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def chain(params: Params, seed: int, draws: int = 200, size: float = 0.02) -> Params:
    """Return independent draws near one network."""
    chance = generator(seed)
    return {
        name: one + size * torch.randn(draws, *one.shape, generator=chance, dtype=one.dtype)
        for name, one in params.items()
    }


def case(name: str) -> tuple[torch.nn.Module, Tensor, Symmetry, Params]:
    module, inputs, symmetry = network(name)
    params = {key: one.detach().clone() for key, one in module.state_dict().items()}
    return module, inputs, symmetry.bind(params), params


def scatter(draws: Params, symmetry: Symmetry, seed: int) -> Params:
    """Return the draws, each transformed by a separate element."""
    count = len(next(iter(draws.values())))
    return symmetry.act(symmetry.random(generator(seed), batch=(count,)), draws)


@pytest.mark.parametrize("name", NAMES)
def test_the_diagnosis_is_the_same_wherever_draws_are_on_their_orbits(name: str) -> None:
    module, inputs, symmetry, params = case(name)
    chains = [chain(params, 1), chain(params, 2)]
    moved = [scatter(one, symmetry, 3 + k) for k, one in enumerate(chains)]
    known, found = (diagnose(one, symmetry, module=module, inputs=inputs) for one in (chains, moved))
    for group in ("aligned", "predictions"):
        for which in ("rhat", "ess_bulk", "ess_tail"):
            for key, values in getattr(known, which)[group].items():
                other = torch.as_tensor(getattr(found, which)[group][key])
                torch.testing.assert_close(other, torch.as_tensor(values), rtol=1e-8, atol=1e-8, equal_nan=True)
    assert found.agrees("aligned")
    assert found.agrees("predictions")


@pytest.mark.parametrize("name", NAMES)
def test_copies_of_a_chain_agree_after_alignment_and_not_before(name: str) -> None:
    module, inputs, symmetry, params = case(name)
    first = chain(params, 1)
    element = symmetry.random(generator(5))
    second = symmetry.act(element.expand(200), first)
    found = diagnose([first, second], symmetry, module=module, inputs=inputs)
    rows = {row["group"]: row for row in found.summary()}
    assert not found.agrees("posterior")
    assert rows["posterior"]["rhat_max"] > 1.5
    same = {row["group"]: row for row in diagnose([first, first], symmetry).summary()}
    assert rows["aligned"]["rhat_max"] == pytest.approx(same["aligned"]["rhat_max"], abs=1e-8)
    assert found.agrees("aligned")
    assert "their parameters differed only by symmetries" in found.verdict


@pytest.mark.parametrize("name", NAMES)
def test_different_modes_are_told(name: str) -> None:
    module, inputs, symmetry, params = case(name)
    other = {key: one + 0.5 * torch.randn(one.shape, generator=generator(9)).double() for key, one in params.items()}
    found = diagnose([chain(params, 1), chain(other, 2)], symmetry, module=module, inputs=inputs)
    assert not found.agrees("predictions")
    assert not found.agrees("aligned")
    assert found.verdict.startswith("The chains differ as functions")
    assert found.verdict in str(found)


def test_constants_have_no_numbers() -> None:
    _, _, symmetry, params = case("relu")
    one = chain(params, 1)
    one["4.bias"] = torch.zeros_like(one["4.bias"])
    found = diagnose([one, one], symmetry)
    assert all(math.isnan(value) for value in found.rhat["posterior"]["4.bias"])
    assert found.summary()[0]["constant"] == 2
    assert "predictions" not in found.rhat


def test_bad_input_is_refused() -> None:
    module, _, symmetry, params = case("relu")
    one = chain(params, 1)
    with pytest.raises(TypeError, match="give a list of chains"):
        diagnose(one, symmetry)
    with pytest.raises(ValueError, match="both a module and inputs"):
        diagnose([one, one], symmetry, module=module)
    with pytest.raises(ValueError, match="equal length"):
        diagnose([one, chain(params, 2, 30)], symmetry)
    with pytest.raises(ValueError, match="equal length"):
        diagnose([], symmetry)
    with pytest.raises(ValueError, match="NaN"):
        diagnose([one, {**one, "0.bias": one["0.bias"] * math.nan}], symmetry)
    assert rg.bayes.from_samples(one).count == 200


def test_a_gaussian_is_sent_to_its_own_measure() -> None:
    _, _, symmetry, params = case("relu")
    with pytest.raises(TypeError, match="compare_with_prior"):
        diagnose(rg.bayes.GaussianPosterior(params, {}), symmetry)


def test_the_picture_has_a_curve_for_each_group() -> None:
    module, inputs, symmetry, params = case("relu")
    found = diagnose([chain(params, 1), chain(params, 2)], symmetry, module=module, inputs=inputs)
    left, right = found.plot().axes
    assert len(left.lines) - 1 == len(right.lines) == 3  # The line at which chains converged is in the first one.
    assert diagnose([chain(params, 1)] * 2, symmetry).plot().axes[1].lines[0].get_xdata().size > 0

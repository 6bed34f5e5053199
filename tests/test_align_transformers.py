"""Networks after folded gains are aligned by rotations of their streams, together with heads and hidden units."""

import pytest
import torch
from transformer_cases import CASES, Case, change, discovered, folded, generator, network

import regauge as rg
from regauge.alignment.methods.weight_matching import random_isometry
from regauge.core.params import Params

EXACT = 1e-7
"""The tolerance. Procrustes moves rotations towards the identity by 1e-9 of the cost, which small singular values
enlarge."""


def prepared(case: Case) -> tuple[torch.nn.Module, rg.discovery.Folded, rg.Symmetry]:
    module, params = network(case)
    result = folded(case, module, params)
    return module, result, discovered(case, module, result.ones)


def noisy(found: rg.discovery.Folded, share: float, seed: int) -> Params:
    """Return the folded network with noise on everything except gains."""
    chance = generator(seed)
    return {
        name: t if name in found.ones else t + share * t.std() * torch.randn(t.shape, generator=chance, dtype=t.dtype)
        for name, t in found.params.items()
    }


def distance(a: Params, b: Params) -> float:
    """Return the distance relative to the norm of the first network."""
    squares = [sum(float(t.square().sum()) for t in ts) for ts in ([a[k] - b[k] for k in a], a.values())]
    return float((squares[0] / squares[1]) ** 0.5)


@pytest.mark.parametrize("name", CASES)
def test_planted_rotations_heads_and_hidden_units_are_recovered(name: str) -> None:
    case = CASES[name]
    module, found, symmetry = prepared(case)
    a = found.params
    for share in (0.0, 0.1, 0.4):
        b = noisy(found, share, 0)
        moved = symmetry.act(random_isometry(symmetry, generator(1)), b)
        assert distance(a, moved) > 0.9
        result = rg.align(a, moved, symmetry, method=rg.WeightMatching(scales="keep"))
        assert distance(a, result.params) <= distance(a, b) + EXACT
        # With less noise than signal the recovered element differs from the planted one by what the noise turns.
        assert distance(b, result.params) <= 0.75 * distance(a, b) + EXACT
    assert change(case, module, moved, result.params) <= case.tolerance


@pytest.mark.parametrize("name", ["GPT", "Llama", "ViT"])
def test_invertible_matrices_within_heads_are_recovered(name: str) -> None:
    case = CASES[name]
    module, found, symmetry = prepared(case)
    start = symmetry.act(symmetry.random(generator(1)), found.params)
    result = rg.align(found.params, start, symmetry)
    assert distance(found.params, result.params) <= 1e-6
    assert change(case, module, start, result.params) <= case.tolerance
    plain = rg.align(found.params, start, symmetry, method=rg.WeightMatching(scales="keep"))
    assert distance(found.params, plain.params) > 0.01


@pytest.mark.parametrize("name", ["transformers GPT-2", "transformers Llama"])
def test_what_is_aligned_and_merged_loads_into_the_original_architecture(name: str) -> None:
    case = CASES[name]
    module, found, symmetry = prepared(case)
    moved = symmetry.act(random_isometry(symmetry, generator(1)), found.params)
    merged = rg.merge([found.params, moved], symmetry).params
    module.load_state_dict(merged, strict=True)
    assert all(torch.equal(merged[key], torch.ones_like(merged[key])) for key in found.ones)
    # Both are one network, so their average computes what they do.
    assert change(case, module, found.params, merged) <= 10 * case.tolerance
    naive = {key: (found.params[key] + moved[key]) / 2 for key in merged}
    assert change(case, module, found.params, naive) > 0.05


def test_signs_of_rotary_pairs_are_matched_for_all_query_heads_of_a_key() -> None:
    """With gains on queries and keys, a rotary pair has only a sign, which acts on several query heads at once."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    sizes = {
        "hidden_size": 16,
        "intermediate_size": 12,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
    }
    config = Gemma3TextConfig(vocab_size=24, num_hidden_layers=1, pad_token_id=0, **sizes)
    torch.manual_seed(0)
    module = Gemma3ForCausalLM(config).double().eval()
    symmetry = rg.discover(module, (), {"input_ids": torch.randint(3, 24, (1, 6))}, outputs=["logits"])
    assert any(group.signs and not group.is_permuted for group in symmetry.groups)
    chance = generator(0)
    a = {
        name: t + 0.1 * torch.randn(t.shape, generator=chance, dtype=t.dtype) for name, t in module.state_dict().items()
    }
    moved = symmetry.act(symmetry.random(chance, ("permutation", "sign")), a)
    assert distance(a, rg.align(a, moved, symmetry).params) <= EXACT

"""Folding preserves the function, removes redundant parameters, and makes rotations of the stream possible."""

import pytest
import torch
from coverings import every_other
from models import CASES as MODELS
from torch import Tensor, nn
from transformer_cases import CASES, HF, TOKENS, Case, change, discovered, folded, generator, hf_gpt2, network

import regauge as rg

STREAMS = {
    "GPT": "embedding.weight",
    "Llama": "embedding.weight",
    "ViT": "positions",
    "transformers GPT-2": "transformer.wpe.weight",
    "transformers Llama": "model.embed_tokens.weight",
}


def stream(name: str, symmetry: rg.Symmetry) -> rg.Group:
    """Return the group on the last axis of the first tensor that writes to the stream."""
    (found,) = [g for g in symmetry.groups for p in g.placements if p.parameter == STREAMS[name] and p.axis == 1]
    return found


@pytest.mark.parametrize("name", CASES)
def test_folding_keeps_the_function_and_uncovers_the_rotations_of_the_stream(name: str) -> None:
    case = CASES[name]
    module, params = network(case)
    result = folded(case, module, params)
    assert change(case, module, params, result.params) <= case.tolerance
    assert result.max_error <= case.tolerance
    assert not result.notes
    assert {k: (t.shape, t.dtype) for k, t in result.params.items()} == {
        k: (t.shape, t.dtype) for k, t in params.items()
    }
    gains = [key for key in params if "norm" in key or "ln_" in key if key.endswith("weight")]
    assert sorted(result.ones) == sorted(gains)
    assert all(torch.equal(result.params[key], torch.ones_like(params[key])) for key in gains)
    plain, symmetry = discovered(case, module, ()), discovered(case, module, result.ones)
    assert stream(name, plain).kind == "scaled"
    assert stream(name, symmetry).kind == case.stream
    rotation = symmetry.identity().replace(
        stream(name, symmetry).name, symmetry.random(generator(3))[stream(name, symmetry).name]
    )
    assert change(case, module, params, symmetry.act(rotation, result.params)) <= case.tolerance
    # Without folded gains the same rotation is no symmetry.
    assert change(case, module, params, symmetry.act(rotation, params)) > 1e-3
    with pytest.raises(ValueError, match=r"holds for networks whose gains are one.*`rg.discovery.fold`"):
        rg.align(result.params, params, symmetry)
    again = folded(case, module, result.params)
    assert not again.zeros
    assert not again.centered
    assert all(torch.equal(again.params[key], result.params[key]) for key in params)
    assert rg.Symmetry.from_json(symmetry.to_json()) == symmetry


@pytest.mark.parametrize("name", ["GPT", "Llama", "ViT"])
def test_the_stream_has_every_rotation_that_the_outputs_allow(name: str) -> None:
    """A rotation that changes the vector of ones changes networks with LayerNorm, and only these."""
    case = CASES[name]
    module, params = network(case)
    result = folded(case, module, params)
    symmetry = discovered(case, module, result.ones)
    group = stream(name, symmetry)
    assert symmetry.verify(module, case.inputs, generator=generator(0)).ok
    whole = rg.Group(group.name, group.size, group.placements, is_permuted=False, matrix="orthogonal")
    other = rg.Symmetry((whole,), {p.parameter: symmetry.shapes[p.parameter] for p in group.placements})
    moved = {**result.params, **other.act(other.random(generator(1)), result.params)}
    assert (change(case, module, params, moved) > 1e-3) == (case.stream == "centered")


def test_a_tied_embedding_keeps_the_last_gain_and_the_sentence_says_what_to_do() -> None:
    case = Case(hf_gpt2, (TOKENS,), "permutation", **HF)
    module, params = network(case)
    params["lm_head.weight"] = params["transformer.wte.weight"]
    result = folded(case, module, params)
    assert "transformer.ln_f.weight" not in result.ones
    assert len(result.ones) == 2
    (note,) = result.notes
    assert "'transformer.ln_f.weight' was kept" in note
    assert "'lm_head.weight' are one tensor" in note
    assert "`config.tie_word_embeddings = False`" in note
    assert stream("transformers GPT-2", discovered(case, module, result.ones)).kind == "permutation"
    assert result.params["lm_head.weight"] is result.params["transformer.wte.weight"]


def test_the_parts_of_a_fused_bias_are_taken_up_one_by_one() -> None:
    case = CASES["transformers GPT-2"]
    module, params = network(case)
    result = folded(case, module, params)
    query, key, value = result.params["transformer.h.0.attn.c_attn.bias"].split(12)
    assert bool(query.all())
    assert not bool(key.any() or value.any())
    assert "transformer.h.0.attn.c_attn.bias (part)" in result.zeros


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_have_one_bias(kind: type[nn.RNNBase]) -> None:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.head = kind(3, 5, 2, batch_first=True), nn.Linear(5, 2)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.head(self.cell(x)[0])
            return result

    case = Case(Reader, (torch.randn(2, 4, 3, generator=generator(0)),), "")
    module, params = network(case)
    result = folded(case, module, params)
    assert change(case, module, params, result.params) <= 1e-9
    for layer in ("cell.bias_hh_l0", "cell.bias_hh_l1"):
        left = result.params[layer]
        # The gate of a GRU that multiplies the state keeps its own bias.
        assert not bool(left[: 10 if kind is nn.GRU else None].any())
        assert bool(left[10:].all()) or kind is not nn.GRU


class Normed(nn.Module):
    """Two layers around a LayerNorm, on vectors."""

    def __init__(self, inputs: int = 4, *, bias: bool = True) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(inputs, 6), nn.LayerNorm(6), nn.Linear(6, 5, bias=bias)
        self.last = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(torch.tanh(self.second(self.norm(self.first(x)))))
        return result


VECTORS = Case(Normed, (torch.randn(7, 4, generator=generator(0)),), "centered")


def test_negative_gains_and_gains_of_zero() -> None:
    module, params = network(VECTORS)
    params["norm.weight"] = torch.tensor([-2.0, 0.0, 3.0, 0.5, -1.0, 1.0]).double()
    result = folded(VECTORS, module, params)
    assert result.ones == ("norm.weight",)
    assert torch.equal(result.params["norm.weight"], torch.ones(6).double())
    assert change(VECTORS, module, params, result.params) <= 1e-12
    # The mean over the features is removed afterwards: all that the unit without gain had is gone before.
    assert torch.allclose(result.params["second.weight"].sum(1), torch.zeros(5).double(), atol=1e-12)


def test_a_gain_of_zero_beside_a_bias_that_nothing_takes_up_stays() -> None:
    case = Case(lambda: Normed(bias=False), VECTORS.inputs, "centered")
    module, params = network(case)
    params["norm.weight"][1] = 0.0
    result = folded(case, module, params)
    assert result.ones == ()
    assert torch.equal(result.params["norm.weight"], params["norm.weight"])
    (note,) = result.notes
    assert "it is zero where the bias next to it is not" in note
    assert bool(result.params["norm.bias"].all())


def test_what_an_activation_sees_is_left_alone() -> None:
    module, params = network(VECTORS)
    result = folded(VECTORS, module, params)
    assert result.zeros == ("norm.bias",)
    assert ("first.weight", 0) in result.centered
    assert ("first.bias", 0) in result.centered
    for key in ("last.weight", "last.bias"):
        assert torch.equal(result.params[key], params[key])
    assert ("second.weight", 0) not in result.centered


def test_half_precision_stays_and_the_inputs_are_not_written_to() -> None:
    module, params = network(VECTORS)
    half = {name: tensor.bfloat16() for name, tensor in params.items()}
    copies = {name: tensor.clone() for name, tensor in half.items()}
    result = folded(VECTORS, module, half)
    assert all(torch.equal(half[name], copies[name]) for name in half)
    assert {tensor.dtype for tensor in result.params.values()} == {torch.bfloat16}
    assert result.params["last.weight"] is half["last.weight"]


class Blind(nn.Module):
    """Attention in which the first token attends to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.value, self.out = nn.LayerNorm(6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(4, 4, dtype=torch.bool).tril(-1)
        y = self.norm(x)
        mixed = nn.functional.scaled_dot_product_attention(y, y, self.value(y), attn_mask=mask)
        result: Tensor = self.out(mixed)
        return result


def test_what_the_numbers_refuse_stays_and_the_rest_is_folded() -> None:
    case = Case(Blind, (torch.randn(2, 4, 6, generator=generator(0)),), "")
    module, params = network(case)
    result = folded(case, module, params)
    assert change(case, module, params, result.params) <= 1e-12
    assert bool(result.params["value.bias"].all())
    assert result.centered == (("value.weight", 1),)  # whose readers are behind a gain that stays
    assert "'value.bias' stays, because what should make up for it did not on these inputs" in result.notes[0]
    assert "value.bias" not in result.zeros
    # Queries and keys of this model are the normalized tokens themselves, so that neither gain nor bias can go.
    assert result.zeros == ()
    assert result.ones == ()


KNOWN = (
    *("resnet20_layer_B", "resnet20_batch_A", "convnext", "lstm_both_ways", "gru", "torch_transformer", "hf_bert"),
    *("hf_gpt_neox", "hf_qwen3", "hf_clip", "hf_dinov2"),
)


@pytest.mark.parametrize("name", every_other(KNOWN, part=1))
def test_every_rewrite_of_known_architectures_is_checked(name: str) -> None:
    """Every rewrite that the analysis allows passes the numerical check."""
    (known,) = [case for case in MODELS if case.name == name]
    case = Case(known.module, known.inputs(), "", tuple(known.kwargs().items()), known.outputs, 1e-5)
    torch.manual_seed(0)
    module, params = network(case)
    result = folded(case, module, params)
    assert result.max_error <= 1e-9 or "hf" in name
    assert result.ones or result.zeros
    assert not any("report" in note or "did not on these inputs" in note for note in result.notes)
    assert change(case, module, params, result.params) <= case.tolerance


def test_what_cannot_be_folded_is_refused() -> None:
    module, params = network(VECTORS)
    symmetry = discovered(VECTORS, module, ("norm.weight",))
    with pytest.raises(ValueError, match=r"discovered with `ones`.*without `ones`, or leave it out"):
        rg.discovery.fold(params, module, VECTORS.inputs, symmetry=symmetry)
    with pytest.raises(ValueError, match=r"meta device.*give it real parameters"):
        rg.discovery.fold(params, module.to("meta"), VECTORS.inputs)
    with pytest.raises(ValueError, match=r"ones names \['nom.weight'\].*names of its parameters"):
        discovered(VECTORS, Normed(), ("nom.weight",))
    with pytest.raises(ValueError, match="fold the networks of a population one by one"):
        rg.discovery.fold(
            {name: tensor.expand(2, *tensor.shape) for name, tensor in params.items()}, Normed(), VECTORS.inputs
        )
    with pytest.raises(ValueError, match=r"NaN or Inf.*example inputs"):
        rg.discovery.fold(params, Normed(), (VECTORS.inputs[0] * torch.inf,))


def test_after_folding_nothing_continuous_is_missing() -> None:
    """With gains of one, the groups and the known shifts span the null space of the Jacobian."""
    module, inputs = Normed(8, bias=False), (torch.randn(7, 8, generator=generator(0)),)
    symmetry = rg.discover(module, inputs, ones=("norm.weight",))
    found = rg.discovery.nullity(module, inputs, symmetry=symmetry)
    assert found.unexplained == 0
    assert found.found == symmetry.dimension

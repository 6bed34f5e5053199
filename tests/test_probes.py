"""Learned inputs on which networks are evaluated: as invariant as all other features, learned, and saved in files."""

import copy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from weightspace_cases import find_case, generator, move_changes, move_units, population, symmetry

import regauge as rg
from regauge import weightspace as ws
from regauge.core.element import PARTS
from regauge.core.params import select
from regauge.nets.mlp import MLP

INSIDE_SINGLE = {"hf_llama": 1e-5}
"""Models that compute internally in single precision, for any parameters."""
EXACT = 1e-9
CASES = ("mlp_relu", "siren", "cnn_flatten", "resnet8_batch_A", "grouped_conv", "lstm", "vit", "hf_gpt2", "hf_llama")
UNSEEN = {
    "lstm": {"rnn.weight_ih_l0"},
    "grouped_conv": {"0.blocks"},
    "vit": {"blocks.0.attention.query.blocks", "blocks.1.attention.query.blocks"},
    "hf_gpt2": {"transformer.h.0.attn.c_attn.blocks", "transformer.h.1.attn.c_attn.blocks"},
    "hf_llama": {"model.layers.0.self_attn.q_proj.blocks", "model.layers.1.self_attn.q_proj.blocks"},
}
"""Sets of units without separate activations: units of operators that compute several layers, and blocks of units."""
HEADS: dict[str, Any] = {
    "invariant": ws.Invariant(3),
    "equivariant": ws.Equivariant(),
    "unit_features": ws.UnitFeatures(5),
}


def probes(case: str, inputs: int | tuple[int, ...] = 6, dtype: torch.dtype = torch.float64) -> ws.Probes:
    return ws.Probes(
        module(case).to(dtype), find_case(case).inputs(), find_case(case).kwargs(), inputs, find_case(case).outputs
    )


def module(case: str) -> nn.Module:
    return copy.deepcopy(_module(case))


@cache
def _module(case: str) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return find_case(case).module().eval()


@cache
def net(case: str, head: str = "invariant", parts: tuple[str, ...] | None = None) -> ws.Metanet:
    """Return a small net in float64 that evaluates networks on probes."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        result = ws.Metanet(
            symmetry(case),
            layer=ws.LAYERS["propagation"](),
            head=HEADS[head],
            width=8,
            depth=2,
            probes=probes(case),
            parts=parts,
            generator=generator(0),
        )
    result = result.double().eval()
    result.standardize(population(case, seed=7))
    return result


def encoder(of: ws.Metanet) -> Any:
    return of.probes[0]


def far(a: Any, b: Any) -> float:
    """Return the largest difference, relative to the largest value of each tensor."""
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        return max((far(a[name], b[name]) for name in a), default=0.0)
    return float((a - b).detach().abs().max() / b.detach().abs().max().clamp(min=1e-30))


@pytest.mark.parametrize("case", CASES)
def test_a_net_with_probes_is_invariant(case: str) -> None:
    networks = population(case)
    moved = symmetry(case).act(symmetry(case).random(generator(1), net(case).parts, (3,)), networks)
    assert far(net(case)(moved), net(case)(networks)) < INSIDE_SINGLE.get(case, EXACT)


@pytest.mark.parametrize("head", ["equivariant", "unit_features"])
@pytest.mark.parametrize("case", ["mlp_relu", "siren", "cnn_flatten", "vit"])
def test_a_net_with_probes_is_equivariant(case: str, head: str) -> None:
    networks, found = population(case), net(case, head)
    element = symmetry(case).random(generator(1), found.parts, (3,))
    before, after = found(networks), found(symmetry(case).act(element, networks))
    if head == "unit_features":
        before = {name: move_units(found.layout, name, element, values) for name, values in before.items()}
    else:
        before, after = move_changes(case, element, before, after)
    assert far(after, before) < EXACT


@pytest.mark.parametrize("case", CASES)
def test_activations_belong_to_the_units_that_they_move_with(case: str) -> None:
    found = net(case)
    networks = population(case)
    element = symmetry(case).random(generator(1), ("permutation",), (3,))
    probed, inputs = encoder(found).probed, encoder(found).inputs
    # Activations are compared as they are, so neither scales nor signs may be chosen anew.
    before, outputs = probed.run(networks, inputs)
    after, same = probed.run(symmetry(case).act(element, networks), inputs)
    tolerance = INSIDE_SINGLE.get(case, 1e-8)
    assert far(same, outputs) < tolerance
    for reading, x, y in zip(probed.readings, before, after, strict=True):
        assert x.shape == (3, *found.layout.units[reading.units].sizes, 6)  # every reading tells probes apart
        assert far(y, move_units(found.layout, reading.units, element, x)) < tolerance, reading
    permuted = {name for name, units in found.layout.units.items() if units.is_permuted}
    assert permuted - {reading.units for reading in probed.readings} == UNSEEN.get(case, set())


@pytest.mark.parametrize("case", ["mlp_relu", "siren", "cnn_flatten", "resnet8_batch_A", "lstm", "vit"])
def test_probes_are_what_the_module_computes_one_network_after_the_other(case: str) -> None:
    probed, inputs = encoder(net(case)).probed, encoder(net(case)).inputs
    networks = population(case)
    _, outputs = probed.run(networks, inputs)
    assert probed.is_stacked == (case != "lstm")
    for k in range(3):
        one = {name: tensor[k] for name, tensor in networks.items()}
        wanted = torch.func.functional_call(module(case).double(), one, (inputs["0"],))
        torch.testing.assert_close(outputs[k], wanted.movedim(0, -1).flatten().detach(), rtol=1e-9, atol=1e-9)


@cache
def outputs_alone(case: str, inputs: int | tuple[int, ...] = 6) -> ws.Metanet:
    """Return a net that reads only outputs at probes."""
    torch.manual_seed(0)
    given = probes(case, inputs)
    if not isinstance(inputs, int):
        examples = torch.randn(given.count, 2, generator=generator(2), dtype=torch.float64)
        given = replace(given, examples=(examples,))
    made = ws.Metanet(symmetry(case), head=ws.Invariant(3), depth=0, probes=given, generator=generator(0))
    made = made.double().eval()
    made.standardize(population(case, seed=7))
    return made


@pytest.mark.parametrize(("case", "inputs"), [("siren", 6), ("siren", (4, 5)), ("resnet8_batch_A", 6), ("vit", 6)])
def test_outputs_alone_are_read(case: str, inputs: Any, tmp_path: Path) -> None:
    found, networks = outputs_alone(case, inputs), population(case)
    moved = symmetry(case).act(symmetry(case).random(generator(1), PARTS, (3,)), networks)
    assert far(found(moved), found(networks)) < EXACT
    assert far(found(select(networks, slice(1, 2))), found(networks)[1:2]) < 1e-12
    last = {name: 2 * t if name == [*networks][-1] else t for name, t in networks.items()}
    assert far(found(last), found(networks)) > 1e-6
    trained = copy.deepcopy(found).train()
    trained(networks).sum().backward()
    assert not [n for n, p in trained.named_parameters() if p.grad is None or not bool(p.grad.abs().max() > 0)]
    again, _ = ws.load_net(found.save(tmp_path / "net.safetensors"), module=module(case).double())
    assert far(again(networks), found(networks)) < 1e-12
    with pytest.raises(ValueError, match="depth of at least 1"):
        found.read_weights(networks)


def test_the_order_of_a_sheet_counts() -> None:
    found, networks = outputs_alone("siren", (4, 5)), population("siren")
    (x,) = encoder(found).learned.values()
    rolled = copy.deepcopy(found)
    with torch.no_grad():
        next(iter(encoder(rolled).learned.values())).copy_(x.reshape(4, 5, 2).transpose(0, 1).reshape(20, 2))
    assert far(rolled(networks), found(networks)) > 1e-3


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_weights_and_outputs_are_averaged(share: float) -> None:
    found, networks = copy.deepcopy(net("siren")), population("siren")
    found.share.fill_(share)
    weights, outputs = found.read_weights(networks), found.read_probes(networks)
    assert far(found(networks), (1 - share) * weights + share * outputs) < 1e-12
    assert far(weights, outputs) > 1e-3


@pytest.mark.parametrize("case", ["mlp_relu", "siren", "cnn_flatten", "lstm", "vit", "hf_gpt2"])
def test_probes_learn(case: str) -> None:
    made_net = copy.deepcopy(net(case, parts=PARTS)).train()  # of what a representative has zero nothing is learned
    made_net(population(case)).sum().backward()
    without = [n for n, p in made_net.named_parameters() if p.grad is None or not bool(p.grad.abs().max() > 0)]
    assert not without
    assert any("learned" in name for name, _ in made_net.named_parameters()) == (case != "hf_gpt2")


def test_networks_do_not_see_their_neighbors() -> None:
    networks = population("siren")
    alone = net("siren")({name: tensor[1:2] for name, tensor in networks.items()})
    assert far(alone, net("siren")(networks)[1:2]) < 1e-12


def test_single_precision() -> None:
    networks = population("siren", 16, dtype=torch.float32)  # three alone standardize features by chance
    small = ws.Metanet(
        symmetry("siren"),
        head=ws.Invariant(3),
        width=8,
        probes=probes("siren", 5, torch.float32),
        generator=generator(0),
    )
    small.standardize(networks)
    assert len(encoder(small).probed.readings) == 3
    moved = symmetry("siren").act(symmetry("siren").random(generator(1), small.parts, (16,)), networks)
    assert small(networks).dtype == torch.float32
    assert far(small(moved), small(networks)) < 1e-3


def test_activations_that_signs_change_are_features_that_signs_change() -> None:
    signs = encoder(net("siren")).signs
    assert signs
    assert all(any(any(exponents) for exponents in sign) for sign in signs)
    fixed = ws.Metanet(symmetry("siren"), layer=ws.MessagePassing(), head=ws.Invariant(1), probes=probes("siren"))
    assert not any(any(any(exponents) for exponents in sign) for sign in encoder(fixed).signs)


def test_probes_begin_as_examples_as_far_as_there_are_some() -> None:
    examples = torch.randn(9, 5, generator=generator(0))
    few, many = (ws.Probes(module("mlp_relu"), (examples,), inputs=count) for count in (4, 2000))
    drawn = few.draw(generator(0))["0"]
    assert all(any(torch.equal(row, known) for known in examples) for row in drawn)
    assert len(torch.unique(drawn, dim=0)) == 4
    drawn = many.draw(generator(0))["0"]
    assert drawn.shape == (2000, 5)
    assert float(drawn.mean()) == pytest.approx(float(examples.mean()), abs=0.1)
    assert float(drawn.std()) == pytest.approx(float(examples.std()), rel=0.1)


@pytest.mark.parametrize("case", ["siren", "hf_gpt2"])
def test_a_net_with_probes_is_the_same_after_it_was_saved(case: str, tmp_path: Path) -> None:
    path = net(case).save(tmp_path / "net.safetensors")
    networks = population(case)
    again, _ = ws.load_net(path, module=module(case).double())
    assert far(again(networks), net(case)(networks)) < 1e-12
    with pytest.raises(ValueError, match="1 architectures on probes, but 0 modules were given"):
        ws.load_net(path)
    with pytest.raises(KeyError, match="the parameters lack"):
        ws.load_net(path, module=nn.Linear(2, 2))


def test_numbers_of_units_may_differ() -> None:
    def mlp(*widths: int) -> tuple[nn.Module, rg.Symmetry, rg.Params]:
        made_mlp = MLP(widths).double()
        networks = {
            name: torch.randn(3, *t.shape, generator=generator(4), dtype=torch.float64)
            for name, t in made_mlp.state_dict().items()
        }
        return made_mlp, rg.discover(made_mlp, (torch.randn(2, 4, dtype=torch.float64),)), networks

    (narrow, found, networks), (wide, other, more) = mlp(4, 6, 6, 3), mlp(4, 10, 8, 3)
    given = ws.Probes(narrow, (torch.randn(2, 4, generator=generator(0)),), inputs=5)
    small = ws.Metanet(found, head=ws.Invariant(2), width=8, depth=2, probes=given, generator=generator(0))
    small = small.double().eval()
    with pytest.raises(ValueError, match="give the `module` of the other"):
        small.adapt(other)
    small.adapt(other, wide)
    moved = other.act(other.random(generator(1), small.parts, (3,)), more)
    assert small(more).shape == small(networks).shape
    assert far(small(moved), small(more)) < EXACT


def test_one_net_has_probes_for_several_architectures() -> None:
    names = ("mlp_relu", "siren")
    both = ws.Metanet(
        tuple(map(symmetry, names)),
        head=ws.Invariant(2),
        width=8,
        depth=2,
        probes=[probes(name) for name in names],
        generator=generator(0),
    )
    both = both.double().eval()
    for name in names:
        networks = population(name)
        moved = symmetry(name).act(symmetry(name).random(generator(1), both.parts, (3,)), networks)
        assert far(both(moved), both(networks)) < EXACT


def test_what_makes_no_sense_gets_a_sentence(tmp_path: Path) -> None:
    mlp, example = module("mlp_relu"), torch.randn(4, 5)
    with pytest.raises(ValueError, match="at least one probe"):
        ws.Probes(mlp, (example,), inputs=0)
    with pytest.raises(ValueError, match="two or three axes"):
        ws.Probes(mlp, (example,), inputs=(2, 2, 2, 2))
    with pytest.raises(ValueError, match="there are 4; give one example for each probe"):
        ws.Probes(mlp, (example,), inputs=(3, 3)).draw(None)
    with pytest.raises(ValueError, match="are invalid"):
        ws.Probes(mlp, (example,), dropout=1.0)
    with pytest.raises(ValueError, match="give `probes` and this head"):
        ws.Metanet(symmetry("mlp_relu"), head=ws.Invariant(2), depth=0)
    with pytest.raises(ValueError, match="only a net with probes"):
        ws.Metanet(symmetry("mlp_relu"), head=ws.Invariant(2), width=8).read_probes(population("mlp_relu"))
    with pytest.raises(ValueError, match="hold no tensor"):
        ws.Probes(mlp, ())
    with pytest.raises(ValueError, match="wrap the module"):
        ws.Probes(mlp, (example,), {"more": [1]})

    def build(**options: Any) -> ws.Metanet:
        return ws.Metanet(symmetry("mlp_relu"), head=ws.Invariant(2), width=8, generator=generator(0), **options)

    with pytest.raises(ValueError, match="probes for 2 architectures"):
        build(probes=[ws.Probes(mlp, (example,))] * 2)
    with pytest.raises(ValueError, match="on the meta device"):
        build(probes=ws.Probes(copy.deepcopy(mlp).to("meta"), (example,)))

    class Otherwise(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + self[0](x).std(1, keepdim=True)  # which scales of units change

    with pytest.raises(ValueError, match=r"outputs of the probes' module change by"):
        build(probes=ws.Probes(Otherwise(*mlp), (example,)))
    chosen = build(probes=ws.Probes(mlp, (example,), outputs=lambda output: output))
    with pytest.raises(ValueError, match="name the outputs"):
        chosen.save(tmp_path / "net.safetensors")
    networks = population("mlp_relu", dtype=torch.float32)
    plain = build().save(tmp_path / "plain.safetensors")
    with pytest.raises(ValueError, match="none for a net without probes"):
        ws.load_net(plain, module=mlp)
    assert build(probes=ws.Probes(mlp, (example,)))(networks).shape == (3, 2)

"""Results for a network and for a translated copy are equal, because everything works on representatives."""

from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from coverings import covering
from torch import Tensor
from translation_nets import EVERY, NETS, gap, generator, network, outputs

import regauge as rg
from regauge import flow
from regauge import weightspace as ws
from regauge.checkpoints.writing import save
from regauge.comparison import compare_many, fingerprint
from regauge.core.lazy_chart import LazyRepresentative
from regauge.core.params import Params
from regauge.learn.layer_statistics import invariant_statistics
from regauge.pruning import cut_symmetry
from regauge.pruning.cut_translations import cut_translations
from regauge.pruning.extension import extend_symmetry

TRANSLATED = ("translation",)
CUT = {
    "decoder": {"blocks.1.up": 7},
    "tied decoder": {"tokens": 5},
    "patches": {"block.1.up": 7},
    "linear layers": {"2": 2},
    "two norms": {"0": 4, "2": 3},
    "group norm": {"1.0": 2},
    "GRU": {"layer.weight_ih_l0": 2},
    "convolutions": {"1": 2},
}
"""Groups of some networks, and the numbers of their remaining units."""


def translated(symmetry: rg.Symmetry, params: Params, seed: int = 1, parts: tuple[str, ...] = TRANSLATED) -> Params:
    """Return a copy that is transformed by a random element."""
    return symmetry.act(symmetry.random(generator(seed), parts), params)


def far(symmetry: rg.Symmetry, a: Params, b: Params) -> float:
    """Return the distance of two fingerprints, relative to the first fingerprint."""
    one, other = (fingerprint(params, symmetry) for params in (a, b))
    return float((one - other).norm() / one.norm())


@pytest.mark.parametrize("name", NETS)
def test_fingerprints_are_those_of_representatives(name: str) -> None:
    _, _, symmetry, params = network(name)
    for parts in (TRANSLATED, EVERY):
        moved = translated(symmetry, params, parts=parts)
        assert gap(moved, params) > 0.1
        assert far(symmetry, params, moved) < 1e-9
    blind = replace(symmetry, translations=())
    assert far(blind, params, translated(symmetry, params)) > 0.01


@pytest.mark.parametrize("name", ["decoder", "two norms"])
def test_networks_with_a_gain_of_zero_are_compared(name: str) -> None:
    _, _, symmetry, params = network(name)
    gain = symmetry.gains[0]
    dead = {**params, gain: params[gain].index_fill(0, torch.tensor(0), 0.0)}
    noise = {key: torch.randn(t.shape, generator=generator(2)) for key, t in dead.items() if t.is_floating_point()}
    other = dead | {key: dead[key] + added for key, added in noise.items()}
    for pair in ((dead, other), (other, dead), (dead, {**other, gain: dead[gain]})):
        assert rg.compare(*pair, symmetry).verdict not in ("identical", "same network in another gauge")
    moved = translated(symmetry, dead, parts=("permutation", "sign", "translation"))  # No scale of what reads zeros.
    assert rg.compare(dead, moved, symmetry).verdict == "same network in another gauge"


def described(symmetry: rg.Symmetry) -> list[tuple[Any, ...]]:
    """Return families as tuples, without the strides of axes of length one, which have no meaning."""

    def plain(value: Any) -> Any:
        if isinstance(value, tuple) and len(value) == 4 and isinstance(value[3], int):
            name, sizes, strides, start = value
            return name, sizes, tuple(s if n > 1 else 0 for n, s in zip(sizes, strides, strict=True)), start
        return tuple(map(plain, value)) if isinstance(value, tuple | list) else value

    return [plain(astuple(family)) for family in symmetry.translations]


@pytest.mark.parametrize("name", CUT)
def test_a_smaller_network_has_the_translations_that_are_found_on_it(name: str) -> None:
    module, x, symmetry, params = network(name)
    task = rg.Task(module, [((x,), torch.zeros(1))], lambda output, _: output.square().mean())
    share = {group: 1 - size / symmetry[group].size for group, size in CUT[name].items()}
    pruned = rg.prune(params, symmetry, share=share, criterion=rg.pruning.Magnitude(), task=task)
    assert pruned.module is not None
    found = rg.discover(pruned.module.eval(), (x,))
    assert described(pruned.symmetry) == described(found)
    assert len(found.translations) == len(symmetry.translations)
    moved = translated(found, pruned.params)
    assert torch.allclose(outputs(pruned.module, moved, x), outputs(pruned.module, pruned.params, x), atol=1e-10)


def test_families_whose_rest_lies_in_no_order_are_left_out() -> None:
    _, _, symmetry, _ = network("decoder")
    whole = {family.name for family in symmetry.translations}
    masks = {"tokens.weight": {1: torch.tensor([1, 1, 0, 1, 1, 1, 1, 1], dtype=torch.bool)}}
    left = cut_translations(symmetry.translations, symmetry.shapes, masks)
    assert {"blocks.0.k.bias", "tokens.weight.mean(1)"} < left.keys()
    gone = {name: shape for name, shape in symmetry.shapes.items() if name != "blocks.0.o.weight"}
    left = cut_translations(symmetry.translations, gone, {})
    assert whole - left.keys() == {"blocks.0.v.bias", "blocks.0.o.weight.mean(0)"}
    odd = {"blocks.0.v.bias": {0: torch.tensor([1, 1, 0, 1, 1, 0, 1, 1], dtype=torch.bool)}}
    left = cut_translations(symmetry.translations, symmetry.shapes, odd)
    assert "blocks.0.v.bias" in whole - left.keys()
    assert extend_symmetry(symmetry, {"blocks.1.up": 14}).translations == ()


@pytest.mark.parametrize("name", ["decoder", "patches", "linear layers", "two norms"])
def test_translated_copies_without_some_units_are_found(name: str) -> None:
    _, _, symmetry, params = network(name)
    pruned = rg.prune(symmetry.split(params)[0], symmetry, share=dict.fromkeys(CUT[name], 0.4))
    moved = translated(pruned.symmetry, pruned.params, parts=EVERY)
    found = rg.compare(params, moved, symmetry, generator=generator(0))
    assert found.verdict == "descended"
    assert "in their common part, an element of the group" in found.reason
    assert found.orbit_distance < 1e-6 * found.norm < 0.1 * found.distance
    assert cut_symmetry(symmetry, {g: pruned.sizes[g][1] for g in CUT[name]}) == pruned.symmetry


@pytest.mark.usefixtures("streamed")
@pytest.mark.parametrize("name", ["decoder", "tied decoder", "gain plus one", "batch norm"])
def test_streamed_networks_are_read_as_representatives(name: str, tmp_path: Path) -> None:
    _, _, symmetry, params = network(name)
    paths = []
    for k, one in enumerate((params, translated(symmetry, params, parts=EVERY))):
        own = {key: t for key, t in one.items() if not (name == "tied decoder" and key == "head.weight")}
        paths.append(save(own, tmp_path / f"{k}.safetensors"))
    numbers = [fingerprint(path, symmetry, memory="2GB") for path in paths]
    assert float((numbers[0] - fingerprint(params, symmetry)).norm()) < 1e-6
    assert float((numbers[0] - numbers[1]).norm()) < 1e-9
    found = rg.compare(*paths, symmetry, memory="2GB")
    assert str(found.verdict) == "same network in another gauge"
    assert found.orbit_distance < 1e-6 * found.norm < 0.01 * found.distance
    lazy = LazyRepresentative(symmetry.bind(params), lambda key, _: params[key])
    again = {key: lazy.parameter(key).to(params[key]) for key in lazy}
    assert gap(again, symmetry.split(params)[0]) == 0


NETS_WITH_BOTH = ("decoder", "tied decoder", "post-norm", "batch norm", "layer scale", "two norms", "fused attention")


IN_CI = (*NETS_WITH_BOTH, *sorted(NETS)[::5])
"""Cases with which each kind of layer reads some networks."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in IN_CI else pytest.mark.thorough) for name in NETS]
)
def test_nets_over_networks_read_representatives(name: str) -> None:
    _, _, symmetry, params = network(name)
    wide = {key: t.double() for key, t in params.items()}
    population = {key: torch.stack([t, t + 0.1 * torch.rand_like(t)]) for key, t in wide.items()}
    layer = list(ws.LAYERS.values())[sorted(NETS).index(name) % len(ws.LAYERS)]()
    made = {"layer": layer, "width": 8, "depth": 2}
    moved = symmetry.act(symmetry.random(generator(1), TRANSLATED, batch=(2,)), population)
    numbers = []
    for parts in (None, ("permutation", "sign", "scale", "shift", "linear")):
        net = ws.Metanet(symmetry, head=ws.Invariant(3), parts=parts, generator=generator(0), **made).double().eval()
        net.standardize(population)
        assert ("translation" in net.parts) == (parts is None)
        before = net(population).detach()
        numbers.append(float(((net(moved).detach() - before) / before.abs().max()).abs().max()))
    assert numbers[0] < 1e-9
    assert numbers[1] > 1e-4
    if name in NETS_WITH_BOTH:
        net = ws.Metanet(symmetry, head=ws.Equivariant(0.1), generator=generator(0), **made).double().eval()
        net.requires_grad_(requires_grad=False)
        element = symmetry.random(generator(2), EVERY, batch=(2,))
        changed = {key: t + net(population).get(key, 0) for key, t in population.items()}
        one = symmetry.act(element, population)
        other = {key: t + net(one).get(key, 0) for key, t in one.items()}
        assert gap(changed, population) > 1e-3
        assert gap(symmetry.act(element, changed), other) < 1e-9
    read = ws.find_readers(symmetry)
    shared = ws.Metanet(symmetry, layer=ws.MessagePassing(), head=ws.Invariant(1), readers=read)
    assert ("translation" in shared.parts) == (not read)
    statistics = invariant_statistics(symmetry)
    assert abs(statistics(moved) - statistics(population)).max() < 1e-6


def test_representatives_are_differentiated() -> None:
    _, _, symmetry, params = network("decoder")
    names = ("norm.weight", "blocks.0.norm.weight", "blocks.0.o.weight", "blocks.1.norm.bias")

    def compute(*values: Tensor) -> Tensor:
        found = symmetry.split({**params, **dict(zip(names, values, strict=True))})[0]
        return torch.cat([found["head.weight"].sin().sum()[None], found["blocks.1.up.bias"], found["blocks.0.q.bias"]])

    assert torch.autograd.gradcheck(compute, tuple(params[name].clone().requires_grad_() for name in names))


def test_gaussians_are_not_rotated_behind_gains() -> None:
    _, _, symmetry, params = network("means")
    q = rg.bayes.GaussianPosterior(params, {key: torch.full_like(t, 0.1) for key, t in params.items()})
    with pytest.raises(ValueError, match="behind uncertain gains, so the result is not a Gaussian of this kind"):
        q.push(symmetry, symmetry.random(generator(3), ("rotation",)))


def test_gaussians_are_translated_where_all_networks_are_translated_alike() -> None:
    _, _, symmetry, params = network("fused attention")
    std = {key: 0.1 + 0.1 * torch.rand_like(t) for key, t in params.items()}
    deviations = {key: torch.randn(3, *t.shape, dtype=t.dtype) for key, t in params.items()}
    drawn = symmetry.random(generator(3), ("sign", "permutation", "translation"))
    keys = drawn.translated({"attention.in_proj_bias[8:16]": torch.ones(8, dtype=torch.float64)})
    for q in (rg.bayes.GaussianPosterior(params, std), rg.bayes.LowRankPosterior(params, std, deviations)):
        noise, moved = q.draw(4, generator(0)), q.push(symmetry, keys)
        samples = moved.at(q.push_noise(symmetry, keys, noise))
        assert gap(samples, symmetry.act(keys, q.at(noise))) < 1e-12
        with pytest.raises(
            ValueError, match="depend on uncertain parameters, so the result is not a Gaussian of this kind"
        ):
            q.push(symmetry, drawn)
    q = rg.bayes.GaussianPosterior(params, std)
    before, after = (rg.bayes.compare_with_prior(one, 2.0, 100).kl for one in (q, q.push(symmetry, keys)))
    biases = symmetry.act(keys, params)["attention.in_proj_bias"], params["attention.in_proj_bias"]
    assert after - before == pytest.approx(float((biases[0].square() - biases[1].square()).sum()) / 8)
    stack = {key: torch.stack([t, t + std[key]]) for key, t in params.items()}
    particles = rg.bayes.ParticlePosterior(stack, symmetry.buffers).push(symmetry, drawn)
    assert gap(particles.stack, symmetry.act(drawn, stack)) == 0
    shifted = q.push(symmetry, keys)
    found = rg.bayes.align_posteriors(q, shifted, symmetry)
    assert not found.element.translation


CRITERIA = {"magnitude": rg.pruning.Magnitude(), "output": rg.pruning.OutputError(), "taylor": rg.pruning.Taylor()}


@pytest.mark.parametrize(
    ("name", "criterion"),
    covering(["decoder", "patches", "two norms", "batch norm", "layer scale", "gain plus one"], CRITERIA),
)
def test_units_are_removed_from_representatives(name: str, criterion: str) -> None:
    module, x, symmetry, params = network(name)
    if name == "decoder":  # the third unit is read by nothing but the mean that the next norm removes
        params["blocks.1.down.weight"][:, 3] = 0.7
    targets = torch.randint(0, 2, outputs(module, params, x).shape[:1])
    task = rg.Task(module, [(x, targets)], lambda out, y: out.flatten(1).std(1).sub(y).square().mean())
    groups = {"layer scale": "scale", "gain plus one": "gain", "batch norm": "1.0"}
    group = groups.get(name, next(iter(CUT.get(name, {"": 0}))))
    made = {"share": {group: 0.5}, "criterion": CRITERIA[criterion], "task": task, "test": task}
    pruned = [rg.prune(one, symmetry, **made) for one in (params, translated(symmetry, params))]
    for one in pruned:
        assert one.certificate is not None
        assert one.certificate.ok
        assert one.module is not None
    assert torch.equal(pruned[0].kept[group], pruned[1].kept[group])
    assert [str(one) for one in pruned[0].exact] == [str(one) for one in pruned[1].exact]
    if name == "decoder":
        assert "blocks.1.up[3]: unread" in [str(one) for one in pruned[0].exact]
    made_of = [outputs(one.module, one.params, x) for one in pruned if one.module is not None]
    assert torch.allclose(made_of[0], made_of[1], atol=1e-9)
    assert gap(pruned[0].params, pruned[1].params) > 1e-3
    assert gap(pruned[0].symmetry.split(pruned[0].params)[0], pruned[1].symmetry.split(pruned[1].params)[0]) < 1e-8


def test_nothing_is_written_where_nothing_is_removed() -> None:
    module, x, symmetry, params = network("decoder")
    task = rg.Task(module, [((x,), torch.zeros(1))], lambda out, _: out.square().mean())
    for one in (params, {key: t.float() if t.is_floating_point() else t for key, t in params.items()}):
        kept = rg.prune(one, symmetry, task=task)
        assert all(torch.equal(kept.params[key], one[key]) for key in one)
        some = rg.prune(one, symmetry, share={"blocks.1.up": 0.5}, criterion=rg.pruning.Magnitude(), task=task)
        assert torch.equal(some.params["blocks.1.up.bias"], one["blocks.1.up.bias"][some.kept["blocks.1.up"]])


@pytest.mark.parametrize("name", ["mixture", "two norms", "batch norm", "fused attention"])
def test_flows_are_of_representatives_and_have_one_density_for_an_orbit(name: str) -> None:
    module, x, symmetry, params = network(name)
    source = generator(5)
    noise = {key: torch.randn(24, *t.shape, generator=source, dtype=torch.float64) for key, t in params.items()}
    population = {
        key: t.expand(24, *t.shape) if key in symmetry.buffers or not t.is_floating_point() else t + 0.1 * noise[key]
        for key, t in params.items()
    }
    few = {key: t[:3] for key, t in population.items()}
    moved = symmetry.act(symmetry.random(generator(1), TRANSLATED, batch=(3,)), few)
    made, apart = {"net": flow.Perceptron(8, 1), "epochs": 1, "batch": 12}, []
    for scales in ("sphere", "flat", "keep"):  # Aligned networks come back from translations, so those as given do not.
        config = flow.FlowConfig(representation=flow.Representation(scales), is_aligned=scales != "keep", **made)
        found = flow.fit(population, symmetry, config, generator=generator(0))
        one, other = (found.log_density(networks, steps=2, probes=2) for networks in (few, moved))
        apart.append(float(((one - other) / one).abs().max()))
        drawn = {key: t[0].to(params[key]) for key, t in found.sample(1, generator=generator(2), steps=2).items()}
        assert outputs(module, drawn, x).isfinite().all()
    assert max(apart[:2]) < 1e-9 < 1e-6 < apart[2]


@pytest.mark.usefixtures("unsaved")
@pytest.mark.parametrize(
    ("name", "by"),
    covering(["decoder", "patches", "linear layers", "layer scale", "batch norm"], ["weights", "loss"], part=1, of=2),
)
def test_translated_copies_get_one_gauge(name: str, by: Any, tmp_path: Path) -> None:
    module, x, symmetry, params = network(name)
    before = outputs(module, params, x)
    drawn = symmetry.random(generator(1), TRANSLATED).translation
    far_away = [symmetry.identity().translated({key: f * t for key, t in drawn.items()}) for f in (9.0, -6.0)]
    copies = [symmetry.act(element, params) for element in far_away]
    task = rg.Task(module, [((x,), before)], lambda out, y: (out - y).square().mean())
    methods = (rg.gauging.Equalize(), rg.gauging.Hadamard())
    method = rg.gauging.BestGauge(methods=methods, is_kept_always=True, by=by)
    found = [rg.gauge(one, symmetry, method=method, task=task, test=task, generator=generator(0)) for one in copies]
    assert gap(found[0].params, found[1].params) < 1e-8
    assert gap(found[0].params, copies[0]) > 0.1
    for one in found:
        assert one.certificate is not None
        assert one.certificate.ok
        assert torch.allclose(outputs(module, one.params, x), before, atol=1e-9)
    as_it_was = rg.gauge(params, symmetry, method=replace(method, is_kept_always=False), task=task, test=task)
    assert as_it_was.objective >= as_it_was.initial
    path = save(copies[0], tmp_path / "a.safetensors")
    out = tmp_path / "b.safetensors"
    made = rg.gauge(path, symmetry, method=method, task=task, test=task, out=out, generator=generator(0))
    assert gap(dict(made.params), found[0].params) < 1e-12
    assert outputs(module, dict(made.params), x).allclose(before, atol=1e-9)


def test_in_16_bits_a_gauge_leaves_translations_alone() -> None:
    _, _, symmetry, params = network("decoder")
    half = {key: t.bfloat16() if t.is_floating_point() else t for key, t in translated(symmetry, params).items()}
    found = rg.gauge(half, symmetry, method=rg.gauging.BestGauge(methods=(rg.gauging.Equalize(),), is_kept_always=True))
    assert all(not move.element.translation for move in found.moves)


def test_a_family_whose_streams_somebody_rotated_has_one_gauge() -> None:
    _, _, symmetry, params = network("decoder")
    assert symmetry.rotatable
    networks, source = {"base": params}, generator(3)
    for child, parent in {"first": "base", "second": "base", "third": "first"}.items():
        networks[child] = {
            key: t + 0.05 * torch.randn(t.shape, generator=source, dtype=torch.float64)
            if key not in symmetry.buffers and t.is_floating_point()
            else t
            for key, t in networks[parent].items()
        }
    moved = {key: symmetry.act(symmetry.random(generator(k)), one) for k, (key, one) in enumerate(networks.items())}
    found = compare_many(
        [*moved], lambda a, b: rg.compare(moved[a], moved[b], symmetry, draws=9), read=moved.__getitem__
    )
    (tree,) = found.trees
    assert all(one.support is not None for one in tree)
    assert {one.child: one.parent for one in tree}["third"] == "first"


@pytest.mark.parametrize("name", [pytest.param("patches", marks=pytest.mark.thorough), "encoder, norms first"])
def test_translated_copies_have_their_place_in_a_tree(name: str) -> None:
    _, _, symmetry, params = network(name)
    source = generator(3)
    steps = [
        {key: 0.02 * torch.randn(t.shape, generator=source, dtype=torch.float64).to(t) for key, t in params.items()}
        for _ in range(2)
    ]
    first, second = ({key: t + step[key] for key, t in params.items()} for step in steps)
    networks = {"base": params, "first": first, "second": second}
    moved = {key: translated(symmetry, one, seed) for seed, (key, one) in enumerate(networks.items())}
    found = [
        compare_many([*nets], lambda a, b, nets=nets: rg.compare(nets[a], nets[b], symmetry, draws=9))
        for nets in (networks, moved)
    ]
    assert [len(one.families) for one in found] == [1, 1]
    assert (found[0].distances > 1e-3).sum() == 6
    assert torch.allclose(found[0].distances, found[1].distances, rtol=1e-6)
    assert [[branch.parent for branch in tree] for tree in found[0].trees] == [
        [branch.parent for branch in tree] for tree in found[1].trees
    ]

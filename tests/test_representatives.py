"""Rotations behind gains belong to the group, and networks are aligned, merged and compared as representatives."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pretend_device import PretendDevice
from torch import nn
from translation_nets import EVERY as UNROTATED
from translation_nets import NETS, Stream, gap, generator, network, outputs, stranger, stream

import regauge as rg
from regauge import weightspace as ws
from regauge.alignment import representatives
from regauge.alignment.methods import weight_matching
from regauge.checkpoints import load_alignment
from regauge.comparison import fingerprint
from regauge.core.behind_gains import lift, lower
from regauge.core.interpolation import distance, interpolate
from regauge.core.params import Params
from regauge.core.rotations import keeping_ones

EVERY = (*UNROTATED, "rotation")
"""All parts of an element."""


ROTATABLE = [
    *("decoder", "sink", "patches", "two biases", "writes weights", "windows", "windows, padded beside a beta"),
    *("two norms", "means"),
]
"""Networks of `NETS` with a stream after gains that is rotated."""


def case(name: str) -> tuple[nn.Module, torch.Tensor, rg.Symmetry, Params]:
    return stream() if name == "stream" else network(name)


def test_streams_of_norms_with_gains_say_that_they_are_rotated() -> None:
    symmetry = stream()[2]
    assert symmetry.rotatable == ("first",)
    assert symmetry["first"].behind_gains == "orthogonal"
    assert network("decoder")[2]["tokens"].behind_gains == "centered"
    assert not network("tied decoder")[2].rotatable  # A tied head reads the stream and writes it.
    assert not network("post-norm")[2].rotatable  # A gain is written onto the stream.
    assert [name for name in NETS if network(name)[2].rotatable] == ROTATABLE


@pytest.mark.parametrize("name", ["stream", *ROTATABLE])
def test_rotations_behind_gains_are_elements_like_others(name: str, tmp_path: Path) -> None:
    module, x, symmetry, params = case(name)
    before = outputs(module, params, x)
    alone = symmetry.random(generator(3), ("rotation",))
    moved = symmetry.act(alone, params)
    assert gap(moved, params) > 0.3
    assert torch.allclose(outputs(module, moved, x), before, atol=1e-11)
    assert gap(symmetry.split(moved)[0], symmetry.split(params)[0]) > 0.1
    assert all(torch.allclose(c, symmetry.split(params)[1][n]) for n, c in symmetry.split(moved)[1].items())
    g, h = (symmetry.random(generator(seed), EVERY) for seed in (1, 2))
    assert gap(symmetry.act(h, symmetry.act(g, params)), symmetry.act(symmetry.compose(h, g), params)) < 1e-11
    assert gap(symmetry.act(symmetry.inverse(g), symmetry.act(g, params)), params) < 1e-11
    batch = symmetry.random(generator(4), EVERY, (2,))
    for k in range(2):
        one = {n: t[k] if t.ndim > params[n].ndim else t for n, t in symmetry.act(batch, params).items()}
        assert gap(one, symmetry.act(batch.item(k), params)) < 1e-12
    rg.checkpoints.Alignment(symmetry, g).save(tmp_path / "g.safetensors")
    loaded = load_alignment(tmp_path / "g.safetensors")
    assert gap(loaded.symmetry.act(loaded.element, params), symmetry.act(g, params)) == 0
    copy = {name: tensor.clone() for name, tensor in params.items()}
    symmetry.act_(g, copy)
    assert gap(copy, symmetry.act(g, params)) < 1e-13


@pytest.mark.parametrize("rotate", [False, True])
@pytest.mark.parametrize("name", ["stream", *ROTATABLE])
def test_what_acts_on_representatives_is_an_element_of_the_whole_group(name: str, rotate: bool) -> None:
    module, x, symmetry, params = case(name)
    behind, names = symmetry.on_representatives(rotate=rotate), symmetry.rotatable if rotate else ()
    representative = symmetry.split(params)[0]
    element = behind.random(generator(1))
    moved = behind.act(element, representative)
    assert torch.allclose(outputs(module, moved, x), outputs(module, params, x), atol=1e-11)
    whole = lift(symmetry, element, names)
    assert gap(symmetry.split(symmetry.act(whole, params))[0], moved) < 1e-12
    again = lower(symmetry, whole, names)
    assert all(
        torch.allclose(t, dict(again[n].items())[f], atol=1e-12) for n, v in element.items() for f, t in v.items()
    )


def test_a_network_with_a_gain_of_zero_is_not_rotated() -> None:
    module, x, symmetry, params = stream()
    params["norms.1.weight"][3] = 0.0
    moved = symmetry.act(symmetry.random(generator(3), ("rotation",)), params)
    assert gap(moved, params) < 1e-13
    other = symmetry.act(symmetry.random(generator(1), ("permutation", "sign", "scale")), params)
    found = rg.align(params, other, symmetry, rotate="always")
    assert not found.element.rotation
    assert torch.allclose(found.params["first.weight"], params["first.weight"], atol=1e-7)
    assert torch.allclose(outputs(module, found.params, x), outputs(module, params, x), atol=1e-10)


@pytest.mark.parametrize("name", ["stream", *ROTATABLE])
def test_copies_moved_by_any_part_come_back(name: str) -> None:
    _, _, symmetry, params = case(name)
    for seed, parts in enumerate((("rotation",), ("translation",), EVERY)):
        moved = symmetry.act(symmetry.random(generator(seed), parts), params)
        found = rg.align(params, moved, symmetry, rotate="always")
        assert gap(found.params, params) < 1e-6
        assert gap(symmetry.act(found.element, moved), found.params) == 0
        compared = rg.compare(params, moved, symmetry)
        assert compared.verdict in ("same network in another gauge", "identical")
        assert compared.orbit_distance <= 1e-6 * compared.norm
    assert gap(rg.merge([params, moved], symmetry, rotate="always").params, params) < 1e-6
    several = rg.align_many([params, moved, moved], symmetry, rotate="always")
    assert all(gap(one, params) < 1e-6 for one in several.params)
    stacked = {n: torch.stack([params[n], moved[n]]) for n in params}
    pairs = rg.alignment.align_pairs(params, stacked, symmetry, rotate="always")
    assert all(gap({n: t[k] for n, t in pairs.params.items()}, params) < 1e-6 for k in range(2))


@pytest.mark.parametrize("name", ["residual", "batch norm", "decoder"])
def test_an_element_moves_the_second_network_to_what_is_returned(name: str) -> None:
    """The element is right even if running variances are a part of gains, so that a bias has another coordinate."""
    _, _, symmetry, params = network(name)
    far = symmetry.act(symmetry.random(generator(6), UNROTATED), stranger(params, symmetry, 0.5))
    found = rg.align(params, far, symmetry)
    assert found.element.translation
    assert gap(found.symmetry.act(found.element, far), found.params) == 0


@pytest.mark.parametrize("name", ["residual", "batch norm", "decoder", "tied decoder"])
def test_gains_behind_running_statistics_are_matched_as_they_are(name: str) -> None:
    """The order is determined on networks without translations, with these gains. Other gains become one."""
    _, _, symmetry, params = network(name)
    has_statistics = name in ("residual", "batch norm")
    matched = representatives.on_matched(symmetry)
    assert symmetry.gains
    assert matched.gains == (() if has_statistics else symmetry.gains)
    assert matched.translations == symmetry.on_data.translations
    if not has_statistics:
        return
    far = stranger(params, symmetry, 0.5)
    found = rg.align(params, far, symmetry)
    plain = replace(symmetry, translations=(), gains=())
    given = rg.align(matched.split(params)[0], matched.split(far)[0], plain)
    several = rg.align_many([params, far], symmetry, method=rg.WeightMatching())
    assert found.objective >= found.initial
    assert found.objective == pytest.approx(given.objective, rel=1e-9)
    for group in symmetry.groups:
        order = found.element[group.name].perm
        assert torch.equal(order, given.element[group.name].perm)
        assert torch.equal(order, several.element[group.name].perm[1])


def test_copies_that_one_climb_misses_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Further ascents start at random elements. For strangers, no further ascents start."""
    _, _, symmetry, params = case("linear layers")

    def align(second: Params) -> tuple[float, int]:
        found = rg.align(params, second, symmetry)
        return gap(found.params, params), len(found.starts)

    copies = [symmetry.act(symmetry.random(generator(seed)), params) for seed in (1, 4, 6)]
    found = [align(copy) for copy in copies]
    assert max(far for far, _ in found) < 1e-4
    assert max(starts for _, starts in found) > 1
    assert align(stranger(params, symmetry, 0.5))[1] == 1
    monkeypatch.setattr(weight_matching, "TRIES", 0)
    assert max(far for far, _ in map(align, copies)) > 0.1


def test_a_copy_is_rotated_although_orders_explain_nearly_all(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, symmetry, params = case("means")
    (stream_name,) = symmetry.rotatable
    x = torch.randn(5, 5, generator=generator(0), dtype=torch.float64)
    small = keeping_ones(torch.linalg.matrix_exp(0.05 * (x - x.mT)))
    copy = symmetry.act(symmetry.identity().rotated({stream_name: small}), params)
    assert gap(copy, params) > 0.01
    assert gap(rg.align(params, copy, symmetry).params, params) < 1e-6
    rounded = symmetry.act(symmetry.random(generator(2), ("permutation", "translation")), params)
    found = rg.align(params, {name: t.bfloat16().double() for name, t in rounded.items()}, symmetry)
    assert len(found.starts) == 1
    assert not found.element.rotation
    monkeypatch.setattr(representatives, "are_isometric", lambda symmetry, a, b: torch.zeros(1, dtype=torch.bool))
    assert gap(rg.align(params, copy, symmetry).params, params) > 0.01


@pytest.mark.parametrize("name", NETS)
def test_a_translated_copy_is_the_same_network_to_every_method(name: str) -> None:
    """The line to the aligned network is the line between representatives."""
    module, x, symmetry, params = network(name)
    other = stranger(params, symmetry, 0.4)
    moved = symmetry.act(symmetry.random(generator(2), ("translation",)), other)
    found = [rg.align(params, one, symmetry) for one in (other, moved)]
    assert gap(found[0].params, found[1].params) < 1e-5 * max(float(t.abs().max()) for t in other.values())
    assert found[0].objective == pytest.approx(found[1].objective, rel=1e-9)
    assert torch.allclose(outputs(module, found[1].params, x), outputs(module, other, x), atol=1e-9)


def test_strangers_are_rotated_and_fine_tunes_reordered() -> None:
    module, x, symmetry, params = stream()
    far, near = stream(seed=1)[3], stranger(params, symmetry, 0.02)
    auto, never = (rg.align(params, far, symmetry, rotate=rotate) for rotate in ("auto", "never"))
    assert set(auto.element.rotation) == {"first"}
    assert "rotated" in auto.report
    assert not never.element.rotation
    behind = [symmetry.split(one)[0] for one in (params, auto.params, never.params)]
    assert distance(behind[0], behind[1]) < 0.95 * distance(behind[0], behind[2])
    assert torch.allclose(outputs(module, auto.params, x), outputs(module, far, x), atol=1e-10)
    middle = outputs(module, interpolate(params, auto.params), x)
    assert torch.allclose(outputs(module, interpolate(*behind[:2]), x), middle, atol=1e-10)
    assert not rg.align(params, near, symmetry).element.rotation


def test_elements_of_the_whole_group_begin_a_match() -> None:
    _, _, symmetry, params = stream()
    moved = symmetry.act(symmetry.random(generator(1), EVERY), params)
    start = symmetry.random(generator(2), EVERY)
    for rotate in ("always", "never"):
        method = rg.alignment.ContinuousDescent(init=start, steps=4)
        x = torch.randn(16, 5, dtype=torch.float64)
        task = rg.Task(Stream().double().eval(), [(x, torch.arange(16) % 3)], nn.functional.cross_entropy)
        found = rg.align(params, moved, symmetry, method=method, task=task, rotate=rotate)
        assert found.objective >= found.initial


def test_kept_scales_multiply_nothing() -> None:
    """With kept scales, networks are matched as stored, also by methods that begin with a matching of kept scales."""
    _, _, symmetry, params = stream()
    other = stranger(params, symmetry, 0.5)
    keep = rg.WeightMatching(scales="keep")
    for method in (keep, rg.Sinkhorn(loss="l2", init=keep, steps=2)):
        found = rg.align(params, other, symmetry, method=method, rotate="always")
        for name, tensor in other.items():
            values = (one.abs().flatten().sort().values for one in (tensor, found.params[name]))
            assert torch.equal(*values), name
        assert "nothing is rotated" in found.report
    for method, is_read in ((rg.alignment.BestOf((keep, rg.WeightMatching())), False), (rg.Sinkhorn(), True)):
        assert method.reads_representatives(symmetry, has_task=True) == is_read


def test_elements_within_tuples_of_methods_begin_a_match() -> None:
    _, _, symmetry, params = stream()
    start = symmetry.random(generator(2), EVERY)
    task = rg.Task(Stream().double().eval(), [(torch.randn(16, 5).double(), torch.arange(16) % 3)])
    method = rg.alignment.BestOf((rg.alignment.ContinuousDescent(init=start, steps=4), rg.WeightMatching()))
    found = rg.align(params, stream(seed=1)[3], symmetry, method=method, task=task, rotate="never")
    assert found.objective >= found.initial


def test_a_near_copy_among_many_is_left_as_close_as_its_noise() -> None:
    """In the coordinates of the first network, its small gains would enlarge noise."""
    _, _, symmetry, params = stream()
    params["norms.0.weight"] *= torch.linspace(0.02, 1, 8, dtype=torch.float64)
    noisy = {
        n: t + 1e-2 * t.std() * torch.randn(t.shape, generator=generator(3), dtype=t.dtype) for n, t in params.items()
    }
    moved = symmetry.act(symmetry.random(generator(1), ("permutation", "sign", "scale")), noisy)
    for many in ([params, moved], [params, moved, moved]):
        found = rg.align_many(many, symmetry)
        assert distance(params, found.params[1]) <= 1.05 * distance(params, noisy)


def test_many_networks_are_not_rotated_where_one_of_them_has_a_gain_of_zero() -> None:
    module, x, symmetry, params = stream()
    far = [stream(seed=seed)[3] for seed in (1, 2)]
    assert rg.align_many([params, *far], symmetry).element.rotation
    far[1]["norms.1.weight"][3] = 0.0
    found = rg.align_many([params, *far], symmetry, rotate="always")
    assert not found.element.rotation
    assert "not rotated: 'norms.1.weight' is zero" in found.report
    assert all(
        torch.allclose(outputs(module, p, x), outputs(module, q, x), atol=1e-9)
        for p, q in zip(found.params[1:], far, strict=True)
    )


def test_that_nothing_can_be_rotated_is_told() -> None:
    module, x = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), torch.randn(2, 3)
    symmetry, params = rg.discover(module, (x,)), {n: t.detach() for n, t in module.state_dict().items()}
    assert "nothing is rotated" in rg.align(params, params, symmetry, rotate="always").report
    assert "nothing is rotated" in rg.align_many([params, params], symmetry, rotate="always").report
    assert "rotated" not in rg.align(params, params, symmetry).report
    with pytest.raises(ValueError, match="rotate"):
        rg.align(params, params, symmetry, rotate="sometimes")  # type: ignore[arg-type]


def test_tiny_gains_of_the_first_network_are_not_given_to_others() -> None:
    module, x, symmetry, params = stream()
    first, other = dict(params), stranger(params, symmetry, 0.5)
    first["norms.0.weight"] = params["norms.0.weight"].clone()
    first["norms.0.weight"][2] = 1e-9
    found = rg.align(first, other, symmetry)
    assert "gains of 1 channel are kept" in found.report
    assert max(float(t.abs().max()) for t in found.params.values()) < 1e3
    assert torch.allclose(outputs(module, found.params, x), outputs(module, other, x), atol=1e-9)


@pytest.mark.parametrize("name", ["stream", "decoder"])
def test_a_stored_rotation_that_is_none_is_refused(name: str, tmp_path: Path) -> None:
    _, _, symmetry, _ = case(name)
    (group,) = symmetry.rotatable
    element = symmetry.random(generator(1), ("rotation",))
    stretched = element.rotation[group] * 1.01
    size = len(stretched)
    turned = torch.linalg.qr(torch.randn(size, size, dtype=torch.float64, generator=generator(2)))[0]
    broken = [stretched, stretched * torch.nan, *([turned] if name == "decoder" else [])]  # which moves the mean
    for k, matrix in enumerate(broken):
        rg.checkpoints.Alignment(symmetry, element.rotated({group: matrix})).save(tmp_path / f"{k}.safetensors")
        with pytest.raises(ValueError, match="is not a rotation; align again"):
            load_alignment(tmp_path / f"{k}.safetensors")


def test_elements_with_rotations_belong_to_their_symmetry() -> None:
    _, _, symmetry, params = stream()
    with pytest.raises(ValueError, match="rotates 'nothing'"):
        symmetry.act(symmetry.identity().rotated({"nothing": torch.eye(8).double()}), params)
    with pytest.raises(ValueError, match=r"rotation 'first' of the element has shape \(3, 3\)"):
        symmetry.act(symmetry.identity().rotated({"first": torch.eye(3).double()}), params)
    with pytest.raises(ValueError, match="translates or rotates"):
        symmetry.compile(symmetry.random(generator(0), ("rotation",)))


@pytest.mark.parametrize("name", ["stream", "decoder"])
def test_networks_on_another_device_are_matched_there(name: str) -> None:
    _, _, symmetry, params = case(name)
    moved = symmetry.act(symmetry.random(generator(1), EVERY), params)
    with PretendDevice() as device:
        a, b = device.bring(params), device.bring(moved)
        for rotate in ("always", "never"):
            found = rg.align(a, b, symmetry, rotate=rotate)
            assert all(device.holds(tensor) for tensor in found.params.values())
        assert all(device.holds(tensor) for tensor in rg.align_many([a, b], symmetry).params[1].values())


@pytest.mark.parametrize("name", ["stream", *ROTATABLE])
def test_one_network_for_each_orbit_also_of_rotated_streams(name: str, tmp_path: Path) -> None:
    module, x, symmetry, params = case(name)
    found, before = rg.canonicalize(params, symmetry), outputs(module, params, x)
    assert torch.allclose(outputs(module, found, x), before, atol=1e-11)
    assert gap(rg.canonicalize(found, symmetry), found) < 1e-11
    for parts in (None, ("rotation",)):
        moved = symmetry.act(symmetry.random(generator(1), parts), params)
        assert gap(rg.canonicalize(moved, symmetry), found) < 1e-11
        assert rg.canonical.orbit_distance(params, moved, symmetry) < 1e-10
        assert str(rg.compare(params, moved, symmetry).verdict) == "same network in another gauge"
        blind = [rg.canonicalize(one, symmetry, parts=UNROTATED) for one in (params, moved)]
        assert gap(*blind) > 0.1
        left = [rg.canonicalize(one, symmetry, reference=stranger(params, symmetry, 0.1)) for one in (params, moved)]
        assert gap(*left) < 1e-10
    element = rg.canonical.canonical_element(params, symmetry)
    assert gap(symmetry.act(element, params), found) < 1e-12
    elements = symmetry.random(generator(2), batch=(2,))
    floating = [key for key in params if params[key].is_floating_point()]
    copies = rg.canonicalize(
        symmetry.act(elements, {key: t.expand(2, *t.shape) for key, t in params.items()}), symmetry
    )
    for k in range(2):
        assert gap({key: copies[key][k] for key in floating}, {key: found[key] for key in floating}) < 1e-11
    path = rg.save(params, tmp_path / "a.safetensors")
    rg.canonicalize(path, symmetry, out=tmp_path / "b.safetensors")
    assert gap(rg.load(tmp_path / "b.safetensors"), found) == 0
    loaded = load_alignment(tmp_path / "b.alignment.safetensors")
    assert gap(loaded.symmetry.act(loaded.element, params), found) < 1e-12
    assert not rg.canonical.canonical_manifold(symmetry).left


def test_a_noisy_copy_is_nearer_than_without_rotations() -> None:
    _, _, symmetry, params = network("decoder")
    other = stranger(params, symmetry, 0.01)
    moved = symmetry.act(symmetry.random(generator(1)), other)
    unrotated = replace(symmetry, groups=tuple(replace(group, behind_gains="none") for group in symmetry.groups))
    near, far, blind = (
        rg.canonical.orbit_distance(params, two, one)
        for two, one in ((other, symmetry), (moved, symmetry), (moved, unrotated))
    )
    assert near == pytest.approx(far, rel=1e-6)
    assert near < rg.canonical.orbit_distance(params, other, unrotated) < 0.1 * blind


def test_canonical_forms_reorder_what_a_gain_of_zero_keeps_from_rotating() -> None:
    _, _, symmetry, params = stream()
    stopped = params | {"norms.1.weight": params["norms.1.weight"] * (torch.arange(8) != 3)}
    g = symmetry.random(generator(1), ("permutation", "rotation"))  # what reads a gain of zero keeps its scale
    both = {name: torch.stack([params[name], stopped[name]]) for name in params}
    found = rg.canonicalize(both, symmetry)
    assert gap(rg.canonicalize(symmetry.act(g, both), symmetry), found) < 1e-11
    for k, one in enumerate((params, stopped)):
        assert gap({name: t[k] for name, t in found.items()}, rg.canonicalize(one, symmetry)) < 1e-12
    assert rg.canonical.orbit_distance(stopped, symmetry.act(g, stopped), symmetry) < 1e-10
    numbers = fingerprint(both, symmetry)
    assert float((fingerprint(symmetry.act(g, both), symmetry) - numbers).norm()) < 1e-9
    assert float((numbers[1] - numbers[0]).norm()) > 0.01


def test_rotations_are_fixed_behind_translations_alone() -> None:
    _, _, symmetry, params = network("decoder")
    with pytest.raises(
        ValueError, match="rotations can only be fixed together with translations; name the part 'translation', too"
    ):
        rg.canonicalize(params, symmetry, parts=("permutation", "rotation"))
    parts = ("translation", "rotation")
    found = rg.canonicalize(params, symmetry, parts=parts)
    moved = symmetry.act(symmetry.random(generator(1), parts), params)
    assert gap(rg.canonicalize(moved, symmetry, parts=parts), found) < 1e-11
    both = [rg.canonicalize(one, symmetry, parts=("permutation",)) for one in (params, moved)]
    assert gap(*both) > 0.1


@pytest.mark.usefixtures("streamed")
@pytest.mark.parametrize("name", ["stream", *ROTATABLE])
def test_fingerprints_are_those_of_rotated_copies(name: str, tmp_path: Path) -> None:
    _, _, symmetry, params = case(name)
    numbers = fingerprint(params, symmetry)
    moved = symmetry.act(symmetry.random(generator(1)), params)
    assert float((fingerprint(moved, symmetry) - numbers).norm()) < 1e-9 * float(numbers.norm())
    other = fingerprint(stranger(params, symmetry, 0.1), symmetry)
    assert float((other - numbers).norm()) > 1e-3 * float(numbers.norm())
    path = rg.save(moved, tmp_path / "a.safetensors")
    assert float((fingerprint(path, symmetry, memory="2GB") - numbers).norm()) < 1e-9 * float(numbers.norm())


def test_nets_over_networks_respect_no_rotations_and_say_so() -> None:
    _, _, symmetry, params = stream()
    made = {"head": ws.Invariant(2), "width": 8, "depth": 1, "generator": generator(0)}
    with pytest.raises(ValueError, match="do not respect rotations behind gains; leave the part 'rotation' out"):
        ws.Metanet(symmetry, parts=("permutation", "rotation"), **made)
    net = ws.Metanet(symmetry, **made).double().requires_grad_(requires_grad=False)
    assert "rotation" not in net.parts
    moved = symmetry.act(symmetry.random(generator(1), ("rotation",)), params)
    given = [{key: t.unsqueeze(0) for key, t in one.items()} for one in (params, moved)]
    canonical = [rg.canonicalize(one, symmetry) for one in given]
    assert float((net(given[0]) - net(given[1])).abs().max()) > 1e-4
    assert float((net(canonical[0]) - net(canonical[1])).abs().max()) < 1e-9

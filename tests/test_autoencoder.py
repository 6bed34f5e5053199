"""Autoencoders: one latent vector for each orbit, decoded networks with the same function, saved files, and
refusals.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import regauge as rg
from regauge import flow, learn
from regauge import weightspace as ws
from regauge.core.params import Params, select
from regauge.learn.autoencoder_training import _judge
from regauge.learn.running import Runner
from regauge.nets.mlp import MLP
from regauge.nets.siren import Siren
from regauge.nets.transformer import ViT


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def cnn() -> nn.Module:
    """Return convolutions with batch normalization, a flatten and a classifier."""
    layers = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 3), nn.BatchNorm2d(3), nn.Tanh()
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(12, 3))


FAMILIES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: MLP((4, 6, 5, 3)), (12, 4)),
    "siren": (lambda: Siren(2, 6, 1, depth=2, omega=5.0), (20, 2)),
    "cnn": (cnn, (10, 1, 6, 6)),
    "vit": (lambda: ViT(8, 4, width=8, heads=2, layers=1), (6, 1, 8, 8)),
}
FAMILY = pytest.mark.parametrize("family", list(FAMILIES))
DECODER: dict[str, Any] = {"mlp": ws.MLPDecoder((16,)), "template": ws.TemplateDecoder(width=8, depth=1)}
TINY = learn.AutoencoderConfig(
    layer=ws.Propagation(channels=2), width=8, depth=1, latent=4, decoder=DECODER["mlp"], epochs=1, batch=8
)


@cache
def members(family: str) -> tuple[nn.Module, rg.Symmetry, Params, Tensor]:
    """Return an architecture, random networks of it in float64, and inputs."""
    make, shape = FAMILIES[family]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = make().eval()
    inputs = torch.randn(*shape, generator=generator(2))
    networks: Params = {}
    chance = generator(1)
    for name, tensor in module.state_dict().items():
        if not tensor.is_floating_point():
            networks[name] = tensor.expand(20, *tensor.shape)
            continue
        drawn = tensor.double() + 0.3 * torch.randn(20, *tensor.shape, generator=chance, dtype=torch.float64)
        networks[name] = drawn.abs() + 0.1 if name.endswith("running_var") else drawn
    return module, rg.discover(module, (inputs[:2],)), networks, inputs


@cache
def fitted(family: str, decoder: str = "mlp") -> learn.Autoencoder:
    module, symmetry, networks, inputs = members(family)
    config = learn.AutoencoderConfig(**{**vars(TINY), "decoder": DECODER[decoder]})
    return learn.fit_autoencoder(networks, symmetry, config, generator=generator(), module=module, inputs=inputs)


def far(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max())


@FAMILY
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-10), (torch.float32, 1e-6)])
def test_an_orbit_has_one_latent_and_one_decoded_network(family: str, dtype: torch.dtype, bound: float) -> None:
    _, symmetry, networks, _ = members(family)
    auto = fitted(family)
    given = {name: t.to(dtype) if t.is_floating_point() else t for name, t in networks.items()}
    moved = symmetry.act(symmetry.random(generator(5), auto.encoder.parts, batch=(20,)), given)
    assert max(far(moved[name].double(), t.double()) for name, t in given.items() if t.ndim > 2) > 0.1
    assert "translation" in auto.encoder.parts
    latents = auto.encode(given)
    assert latents.shape == (20, 4)
    assert latents.dtype == dtype
    assert far(auto.encode(moved), latents) < bound
    assert float(latents.std(0).min() / latents.abs().max()) > 1e-3  # and networks are told apart
    made, again = auto.decode(latents), auto.canonicalize(moved)
    assert all(far(again[name].double(), t.double()) < 100 * bound for name, t in made.items() if t.is_floating_point())


@FAMILY
@pytest.mark.parametrize("decoder", list(DECODER))
def test_decoded_networks_are_of_the_architecture(family: str, decoder: str) -> None:
    module, _, networks, inputs = members(family)
    made = fitted(family, decoder).canonicalize(networks)
    assert {n: (t.shape, t.dtype) for n, t in made.items()} == {n: (t.shape, t.dtype) for n, t in networks.items()}
    outputs = Runner(rg.Task(module.double(), ())).outputs(made, inputs.double())
    assert bool(outputs.isfinite().all())
    assert float(outputs.std(0).max()) > 1e-4  # what is decoded depends on what was encoded


@pytest.mark.parametrize("decoder", list(DECODER))
def test_what_networks_compute_is_learned(decoder: str) -> None:
    module = Siren(2, 8, 1, depth=1, omega=3.0, generator=generator())
    chance = generator(1)
    networks = {n: t + 0.5 * torch.randn(160, *t.shape, generator=chance) for n, t in module.state_dict().items()}
    symmetry, inputs = rg.discover(module, (torch.randn(5, 2),)), learn.grid((5, 5))
    config = learn.AutoencoderConfig(
        width=16, depth=1, latent=16, decoder=DECODER[decoder], epochs=8, batch=16, lr=1e-2, examples=15
    )
    auto = learn.fit_autoencoder(networks, symmetry, config, generator=generator(), module=module, inputs=inputs)
    scores = auto.about["scores"]
    assert scores["autoencoder"]["squared error"] < 0.5 * scores["the mean output, for all"]["squared error"]
    # The scores are those of the test networks.
    assert auto.tested is not None
    test = select(networks, torch.from_numpy(auto.tested))
    run = torch.func.vmap(lambda one: torch.func.functional_call(module, one, (inputs,)))
    error = float((run(auto.canonicalize(test)) - run(test)).square().mean())
    assert error == pytest.approx(scores["autoencoder"]["squared error"], rel=1e-3)
    # Copies are nearest to the networks that they are copies of.
    moved = symmetry.act(symmetry.random(generator(3), batch=(len(auto.tested),)), test)
    numbers, distances = auto.nearest(moved, test, count=2)
    assert numbers[:, 0].tolist() == list(range(len(auto.tested)))
    assert bool((distances[:, 0] < 1e-3 * distances[:, 1]).all())


def test_classifiers_are_distilled_or_trained_on_a_task() -> None:
    module, symmetry, networks, inputs = members("mlp")
    config = learn.AutoencoderConfig(**{**vars(TINY), "epochs": 20, "lr": 3e-2})
    distilled = learn.AutoencoderConfig(**{**vars(config), "loss": learn.Distillation(2.0)})
    auto = learn.fit_autoencoder(networks, symmetry, distilled, generator=generator(), module=module, inputs=inputs)
    assert auto.trained is not None
    first, last = auto.trained.history[0], auto.trained.history[-1]
    assert last["loss"] < 0.8 * first["loss"]
    assert 0 <= auto.about["scores"]["autoencoder"]["agreement"] <= 1
    labels = torch.arange(12) % 3
    task = rg.Task(module, [(inputs[:8], labels[:8]), (inputs[8:], labels[8:])])
    auto = learn.fit_autoencoder(networks, symmetry, config, generator=generator(), task=task)
    made = {name: tensor.float() for name, tensor in auto.canonicalize(networks).items()}
    plain = {name: tensor.float() for name, tensor in networks.items()}
    assert float(task.evaluate_each(made)["loss"].mean()) < 0.8 * float(task.evaluate_each(plain)["loss"].mean())


def test_a_verdict_says_whether_decoded_networks_come_near() -> None:
    module, symmetry, networks, inputs = members("mlp")
    labels = torch.arange(12) % 3
    task = rg.Task(module, [(inputs[:5], labels[:5]), (inputs[5:], labels[5:])])
    settings = {**vars(TINY), "loss": learn.SquaredError()}
    poor = learn.fit_autoencoder(
        networks, symmetry, learn.AutoencoderConfig(**{**settings, "lr": 1e-6}), generator=generator(), task=task
    )
    scores = poor.about["scores"]
    test = select(networks, torch.from_numpy(poor.tested))  # type: ignore[arg-type]
    as_read = [{name: t.float() for name, t in one.items()} for one in (test, poor.canonicalize(test))]
    own, made = (task.evaluate_each(one)["accuracy"] for one in as_read)
    assert scores["autoencoder"]["accuracy error"] == pytest.approx(float((own - made).abs().mean()), abs=1e-6)
    sample = select(networks, torch.from_numpy(flow.divide(networks)["train"]))
    median = task.evaluate_each({name: t.float() for name, t in sample.items()})["accuracy"].median()
    constant = scores["the mean output, for all"]
    assert constant["accuracy error"] == pytest.approx(float((own - median).abs().mean()), abs=1e-6)
    assert poor.about["is_near"] == (scores["autoencoder"]["accuracy error"] <= constant["accuracy error"] / 2)
    plain = learn.fit_autoencoder(networks, symmetry, TINY, generator=generator(), module=module, inputs=inputs)
    assert "accuracy error" not in plain.about["scores"]["autoencoder"]
    assert not plain.about["is_near"]
    assert plain.about["verdict"].startswith(
        "Decoded networks differ too much from the encoded ones (a quarter of the second error is the limit)"
    )
    near = _judge({"accuracy error": 0.02}, {"accuracy error": 0.04})
    assert near["is_near"]
    assert near["verdict"].startswith(
        "Decoded networks have nearly the same outputs as the encoded ones: accuracy error 0.02 against"
    )
    far = _judge({"accuracy error": 0.021}, {"accuracy error": 0.04})
    assert not far["is_near"]
    assert "More epochs or seconds, more networks" in far["verdict"]
    on_targets = learn.fit_autoencoder(networks, symmetry, TINY, generator=generator(), task=task)
    assert "verdict" not in on_targets.about  # Decoded networks are to answer rightly, not as the encoded ones do.


def test_distillation_is_the_divergence_of_softened_probabilities() -> None:
    wanted, made = torch.randn(2, 3, 5, 4, generator=generator()).unbind()
    soft = (wanted / 3).softmax(-1)
    expected = 9 * (cross_entropy((made / 3).flatten(0, 1), soft.flatten(0, 1), reduction="none")).reshape(3, 5).mean(1)
    entropy = 9 * (soft * soft.log()).sum(-1).mean(1)
    assert far(learn.Distillation(3.0)(made, wanted, None), expected + entropy) < 1e-5
    with pytest.raises(ValueError, match="cannot be logits"):
        learn.Distillation()(made[..., :1], wanted[..., :1], None)


def test_losses_of_chains_by_hand_are_those_of_autograd() -> None:
    module, _, networks, inputs = members("siren")
    given = {name: tensor.requires_grad_() for name, tensor in select(networks, slice(0, 20)).items()}
    wanted = torch.randn(20, 20, 1, generator=generator(), dtype=torch.float64)
    runner = Runner(rg.Task(module.double(), ()))

    def judge(made: Tensor, part: slice) -> Tensor:
        return (made - wanted[part]).pow(4).mean((1, 2))

    by_hand = runner.losses(given, inputs.double(), judge)
    plain = judge(runner.outputs(given, inputs.double()), slice(None))
    assert far(by_hand.detach(), plain.detach()) < 1e-12
    weights = torch.rand(20, generator=generator(1), dtype=torch.float64)
    found = (torch.autograd.grad((weights * x).sum(), [*given.values()]) for x in (by_hand, plain))
    for one, two in zip(*found, strict=True):
        assert far(one, two) < 1e-10


@pytest.mark.parametrize("family", ["cnn", "vit"])
@pytest.mark.parametrize(("together", "calls"), [(0, 20), (3, 7), (20, 1)])
def test_networks_are_evaluated_a_few_at_a_time(
    family: str, together: int, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, _, networks, inputs = members(family)
    module, inputs = module.double(), inputs.double()
    labels = torch.arange(len(inputs)) % 3
    task = rg.Task(module, [(inputs, labels)])
    with torch.enable_grad():
        outputs = Runner(task).outputs(networks, inputs)  # all at once
    losses = torch.stack([cross_entropy(own, labels) for own in outputs])
    run, count = rg.Task.run, 0

    def counted(self: rg.Task, params: Params, given: Any) -> Tensor:
        nonlocal count
        count += 1
        return run(self, params, given)

    monkeypatch.setattr(rg.Task, "run", counted)
    monkeypatch.setattr("regauge.core.task.NUMBERS_AT_ONCE", together * inputs.numel())
    with torch.no_grad():
        assert far(Runner(task).outputs(networks, inputs), outputs.detach()) < 1e-12
    assert count == calls
    assert far(task.evaluate_each(networks)["loss"], losses.detach()) < 1e-12
    assert count == 2 * calls


@pytest.mark.parametrize(
    ("batches", "examples", "used"),
    [(1, 2, [8]), (2, 2, [4, 4]), (6, 2, [2] * 4), (6, 9, [2] * 4), (1, None, [12]), (1, 3, [12])],
)
def test_validation_uses_no_more_inputs_than_a_few_steps(
    batches: int, examples: int | None, used: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    module, symmetry, networks, inputs = members("mlp")
    known, chosen = Runner.outputs, list[Tensor]()

    def noted(self: Runner, params: Params, given: Any) -> Tensor:
        chosen.append(given)
        return known(self, params, given)

    monkeypatch.setattr(Runner, "outputs", noted)
    task = rg.Task(module, [(part, torch.arange(12)[: len(part)] % 3) for part in inputs.chunk(batches)])
    config = learn.AutoencoderConfig(**{**vars(TINY), "loss": learn.Distillation(), "examples": examples})
    made = learn.fit_autoencoder(networks, symmetry, config, generator=generator(), task=task)
    steps = [k for k, given in enumerate(chosen) if k >= batches]
    sizes = [len(chosen[k]) for k in steps]
    # One epoch of two steps of 8 networks, then the validation: networks before and after, on each batch.
    assert sizes[2 : 2 + 2 * len(used)] == [size for size in used for _ in range(2)]
    for given in chosen[batches + 2 : batches + 2 + 2 * len(used)]:
        assert all(bool((row == inputs.float()).all(1).any()) for row in given)  # of the inputs, without change
        assert len(given.unique(dim=0)) == len(given)
    assert sum(sizes[2 + 2 * len(used) :]) == 3 * 12  # The test networks see all inputs: before, after, and the mean.
    assert made.about["scores"]["autoencoder"]["agreement"] >= 0


@pytest.mark.parametrize("decoder", list(DECODER))
def test_a_saved_autoencoder_is_the_same(tmp_path: Path, decoder: str) -> None:
    networks = members("cnn")[2]
    auto = fitted("cnn", decoder)
    auto.save(tmp_path / "auto.safetensors")
    loaded = learn.load_autoencoder(tmp_path / "auto.safetensors")
    latents = auto.encode(networks)
    assert torch.equal(loaded.encode(networks), latents)
    made = loaded.decode(latents)
    assert all(torch.equal(made[name], tensor) for name, tensor in auto.decode(latents).items())
    assert loaded.about == auto.about


def test_a_latent_path_encodes_its_ends_once(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, networks, _ = members("mlp")
    auto, (a, b) = fitted("mlp"), (select(networks, k) for k in (0, 1))
    encode, calls = learn.Autoencoder.encode, []

    def spy(self: learn.Autoencoder, params: Params) -> Tensor:
        calls.append(params)
        return encode(self, params)

    monkeypatch.setattr(learn.Autoencoder, "encode", spy)
    met: list[Params] = []

    def judge(params: Params) -> dict[str, float]:
        met.append(params)
        return {"loss": 0.0}

    rg.line(a, b, judge, points=5, path=learn.LatentPath(auto))
    assert len(calls) == 1
    latent = torch.lerp(*encode(auto, {name: torch.stack([a[name], b[name]]) for name in a}), 0.25)
    expected = auto.decode(latent.unsqueeze(0))
    assert all(torch.allclose(met[1][name], expected[name][0]) for name in a)


def test_what_cannot_be_encoded_gets_a_sentence(tmp_path: Path) -> None:
    module, symmetry, networks, inputs = members("mlp")
    auto = fitted("mlp")
    name = next(iter(networks))
    broken = {**networks, name: networks[name].clone()}
    broken[name][3] = float("nan")
    with pytest.raises(ValueError, match="NaN or Inf"):
        auto.encode(broken)
    with pytest.raises(ValueError, match="NaN or Inf"):
        learn.fit_autoencoder(broken, symmetry, TINY, generator=generator(), module=module, inputs=inputs)
    with pytest.raises(ValueError, match="lack"):
        auto.encode(members("cnn")[2])
    with pytest.raises(ValueError, match="takes \\[models, 4\\]"):
        auto.decode(torch.zeros(2, 5))
    with pytest.raises(ValueError, match="no network belongs"):
        auto.decode(torch.full((2, 4), float("nan")))
    with pytest.raises(ValueError, match="give `inputs`"):
        learn.fit_autoencoder(networks, symmetry, TINY, generator=generator(), module=module)
    with pytest.raises(ValueError, match="cannot be run"):
        learn.fit_autoencoder(networks, symmetry, TINY, generator=generator(), module=module, inputs=torch.zeros(3, 9))
    with pytest.raises(TypeError, match="the symmetry is a list of 2"):
        learn.fit_autoencoder([networks, members("cnn")[2]], [symmetry, members("cnn")[1]], TINY, generator=generator())
    with pytest.raises(FileNotFoundError, match="there is no autoencoder"):
        learn.load_autoencoder(tmp_path / "none.safetensors")
    auto.encoder.save(tmp_path / "net.safetensors")
    with pytest.raises(ValueError, match="is no autoencoder"):
        learn.load_autoencoder(tmp_path / "net.safetensors")


def test_a_unit_that_is_split_in_two_changes_no_latent() -> None:
    module, symmetry, networks, inputs = members("mlp")
    config = learn.AutoencoderConfig(**{**vars(TINY), "widening": True})
    auto = learn.fit_autoencoder(networks, symmetry, config, generator=generator(), module=module, inputs=inputs)
    order = torch.tensor([0, 0, 1, 2, 3, 4, 5])
    shares = torch.tensor([0.3, 0.7, 1, 1, 1, 1, 1], dtype=torch.float64)
    first, second, third = list(networks)[:3]
    wide = {**networks, first: networks[first][:, order], second: networks[second][:, order]}
    wide[third] = networks[third][:, :, order] * shares
    assert isinstance(auto.encoder, ws.Metanet)
    auto.encoder.adapt(rg.discover(MLP((4, 7, 5, 3)), (inputs[:2],)))
    assert far(auto.encode(wide), auto.encode(networks)) < 1e-10


def test_an_encoder_of_ones_own_is_trained_but_not_saved(tmp_path: Path) -> None:
    module, symmetry, networks, inputs = members("siren")

    class Sizes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(len(networks), 4)

        def forward(self, population: Params) -> Tensor:
            sizes = torch.stack([tensor.flatten(1).norm(dim=1) for tensor in population.values()], 1)
            made: Tensor = self.last(sizes)
            return made

    encoder = Sizes()
    before = encoder.last.weight.detach().clone()
    auto = learn.fit_autoencoder(
        networks, symmetry, TINY, generator=generator(), module=module, inputs=inputs, encoder=encoder
    )
    assert auto.encode(networks).shape == (20, 4)
    assert not torch.equal(before.double(), encoder.last.weight)
    with pytest.raises(ValueError, match="which cannot be described in a file"):
        auto.save(tmp_path / "auto.safetensors")

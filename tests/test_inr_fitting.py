"""Fitting INRs: the gradient equals automatic differentiation, and fits follow their settings."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from progress import Recorded
from torch import Tensor, nn

from regauge.inr import fitting
from regauge.inr.fields.signal_samples import Samples, entropy_floor, image_samples, voxel_samples
from regauge.inr.fit_config import FitConfig
from regauge.inr.fitting import LOSSES, Focal, bce, fit, fit_images, fit_many, image_inr, mean_loss
from regauge.inr.representation import Inr
from regauge.training import Adam, DescentConfig, fit_signals

CASES = [
    (Inr(width=9, depth=1), "bce"),
    (Inr(width=9, depth=3), "bce"),
    (Inr(width=9, depth=2, signal="occupancy", omega=7.0), "focal"),
    (Inr("relu", width=9, depth=3), "bce"),
    (Inr("siren", 2, 3, 9, 2, "image", pixels=(8, 8)), "mse"),
    (Inr("relu", 2, 3, 9, 1, "image", pixels=(8, 8)), "mse"),
]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def samples_for(inr: Inr, count: int = 50, dtype: torch.dtype = torch.float64) -> Samples:
    points = torch.rand(count, inr.in_features, generator=seeded(1), dtype=dtype) * 2 - 1
    labels = torch.rand(count, inr.out_features, generator=seeded(2), dtype=dtype)
    return Samples(points, labels.round() if inr.signal == "occupancy" else labels)


def waves(count: int = 400, dtype: torch.dtype = torch.float32) -> Samples:
    """Return labels that a small network can learn."""
    points = torch.rand(count, 3, generator=seeded(3), dtype=dtype) * 2 - 1
    return Samples(points, torch.sigmoid(3 * torch.sin(4 * points.sum(1, keepdim=True))))


def picture(size: int = 8) -> Tensor:
    ys, xs = torch.meshgrid(torch.linspace(0, 1, size), torch.linspace(0, 1, size), indexing="ij")
    return torch.stack([ys, xs * ys])


@pytest.mark.parametrize(("inr", "loss"), CASES, ids=str)
@pytest.mark.parametrize("rows", [50, 64, 7, 1], ids="{} rows".format)
def test_the_gradient_is_that_of_autograd(inr: Inr, loss: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "BLOCK_VALUES", rows * inr.width)
    monkeypatch.setattr(fitting, "LEAST", 1)
    samples, start = samples_for(inr), inr.start(seeded(), dtype=torch.float64)
    module = inr.module(start)
    expected = LOSSES[loss](module(samples.points), samples.labels).mean()
    expected.backward()
    params = {name: tensor.clone() for name, tensor in start.items()}
    compute = fitting.Gradient(inr, params["layers.0.weight"], LOSSES[loss])
    assert compute.rows == rows
    for _ in range(2):  # nothing is left of an earlier call
        found, gradients = compute(params, (samples.points, samples.labels))
    torch.testing.assert_close(found, expected.detach(), rtol=1e-12, atol=0)
    for name, own in zip(params, gradients, strict=True):
        torch.testing.assert_close(own, module.get_parameter(name).grad, rtol=1e-10, atol=1e-14)


def test_the_gradient_in_single_precision(library: str) -> None:
    inr = Inr(width=64, depth=2)
    samples, start = samples_for(inr, dtype=torch.float32), inr.start(seeded())
    module = inr.module(start)
    bce(module(samples.points), samples.labels).mean().backward()
    params = dict(start)
    compute = fitting.Gradient(inr, params["layers.0.weight"], bce)
    _, gradients = compute(params, (samples.points, samples.labels))
    for name, own in zip(params, gradients, strict=True):
        torch.testing.assert_close(own, module.get_parameter(name).grad, rtol=1e-4, atol=1e-7)


def test_the_focal_loss() -> None:
    outputs = torch.tensor([[1.5], [-0.3], [2.0]], dtype=torch.float64)
    labels = torch.tensor([[1.0], [1.0], [0.0]], dtype=torch.float64)
    p = torch.sigmoid(outputs)
    right = torch.where(labels == 1, p, 1 - p)
    weights = torch.where(labels == 1, 0.9, 0.1).double()
    torch.testing.assert_close(Focal()(outputs, labels), -weights * (1 - right) ** 3 * right.log())
    torch.testing.assert_close(Focal(alpha=0.5, gamma=0.0)(outputs, labels), bce(outputs, labels) / 2)
    with pytest.raises(ValueError, match="alpha between 0 and 1"):
        Focal(alpha=1.0)


@pytest.mark.parametrize("kind", ["siren", "relu"])
def test_a_fit_beats_a_constant(kind: str) -> None:
    inr = Inr(kind, width=24, depth=2)  # type: ignore[arg-type]
    samples, config = waves(), FitConfig(steps=150, batch=100, optimizer=Adam(3e-3 if kind == "siren" else 1e-2))
    fitted = fit(inr, samples, config, start=inr.start(seeded()), generator=seeded())
    mean = samples.labels.mean()
    constant = bce(torch.logit(mean).expand_as(samples.labels), samples.labels).mean().item()
    floor = entropy_floor(samples.labels)
    found = mean_loss(inr, fitted.params, samples, config)
    assert floor < found < floor + 0.5 * (constant - floor)
    assert fitted.losses.shape == (150,)
    assert fitted.losses[-50:].mean() < fitted.losses[:50].mean()


def test_a_step_is_one_of_adam() -> None:
    inr, config = Inr(width=9, depth=2), FitConfig(steps=5, batch=None, optimizer=Adam(1e-2))
    samples, start = samples_for(inr), inr.start(seeded(), dtype=torch.float64)
    module = inr.module(start)
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-2)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(module(samples.points), samples.labels)
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
    fitted = fit(inr, samples, config, start=start, generator=seeded())
    assert fitted.losses.tolist() == pytest.approx(losses, rel=1e-10)
    for name, tensor in module.state_dict().items():
        torch.testing.assert_close(fitted.params[name], tensor, rtol=1e-8, atol=1e-10)


def test_fits_are_functions_of_their_generator() -> None:
    inr, config, samples = Inr(width=9, depth=2), FitConfig(steps=4, batch=10), waves()
    start = inr.start(seeded())
    before = {name: tensor.clone() for name, tensor in start.items()}
    steps = Recorded()
    first, second, other = (
        fit(inr, samples, config, start=start, generator=seeded(k), progress=steps) for k in (0, 0, 1)
    )
    assert sum(steps.amounts) == 12
    assert all(torch.equal(first.params[name], second.params[name]) for name in start)
    assert not torch.equal(first.params["layers.1.weight"], other.params["layers.1.weight"])
    assert all(torch.equal(start[name], tensor) for name, tensor in before.items())
    assert all(not t.requires_grad and t.grad is None and t.dtype == torch.float32 for t in first.params.values())


def test_cells_are_learned() -> None:
    grid = torch.zeros(6, 6, 6, dtype=torch.bool)
    grid[:3] = True
    inr, samples = Inr(width=16, depth=1, signal="occupancy", omega=3.0), voxel_samples(grid)
    fitted = fit(
        inr, samples, FitConfig(steps=300, optimizer=Adam(1e-2)), start=inr.start(seeded()), generator=seeded()
    )
    with torch.no_grad():
        is_inside = inr.module(fitted.params)(samples.points) > 0
    assert torch.equal(is_inside, samples.labels.bool())


def test_an_image_is_learned() -> None:
    image = picture()
    inr = image_inr(8, 8, 2, units=16)
    config = FitConfig(steps=300, optimizer=Adam(2e-3))
    fitted = fit(inr, image_samples(image), config, start=inr.start(seeded()), generator=seeded())
    assert mean_loss(inr, fitted.params, image_samples(image)) < 1e-2 * image.var().item()


def test_a_population_of_images() -> None:
    images = torch.stack([picture(), 1 - picture(), picture().flip(1)])
    config = FitConfig(steps=200, batch=None, optimizer=Adam(2e-3))
    inr = image_inr(8, 8, 2, units=16)
    params = fit_images(images, inr, config)
    assert params["layers.0.weight"].shape == (3, 16, 2)
    for k, image in enumerate(images):
        own = {name: tensor[k] for name, tensor in params.items()}
        assert mean_loss(inr, own, image_samples(image)) < 3e-2 * image.var().item()
    fewer = fit_images(images[:2], inr, config)
    torch.testing.assert_close(fewer["layers.1.weight"], params["layers.1.weight"][:2], rtol=1e-3, atol=1e-4)
    with pytest.raises(ValueError, match="but the network 2 of"):
        fit_images(images[..., :7], inr)
    with pytest.raises(ValueError, match="squared error"):
        fit_images(images, inr, replace(config, loss="bce"))
    with pytest.raises(ValueError, match="at least one"):
        fit_images(images[:0])
    with pytest.raises(ValueError, match="diverged"):
        fit_images(images * float("inf"), inr, config)


def test_a_population_fits_as_its_networks_would() -> None:
    """The stack and the loop over modules are two programs for the same computation."""
    images = torch.rand(2, 1, 5, 5, generator=seeded(), dtype=torch.float64)
    inr, config = image_inr(5, 5, units=6), FitConfig(steps=10, batch=None, optimizer=Adam(1e-3))
    found = fit_images(images, inr, config, seed=3)
    start = fit_images(images, inr, replace(config, optimizer=Adam(1e-30)), seed=3)
    points = image_samples(images[0]).points
    expected = fit_signals(
        inr.module(),
        start,
        points,
        images.flatten(2).transpose(1, 2),
        DescentConfig(steps=10, batch=None, optimizer=Adam(1e-3)),
    )
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-7, atol=1e-9)


def test_shapes_side_by_side_are_shapes_one_by_one() -> None:
    inr, config = Inr(width=9, depth=2), FitConfig(steps=6, batch=20)
    samples = [waves(), waves(90), waves(60)]
    starts = [inr.start(seeded(k)) for k in range(3)]
    steps = Recorded()
    together = fit_many(
        inr,
        samples,
        config,
        starts=starts,
        generators=[seeded(k) for k in range(3)],
        workers=2,
        progress=steps,
    )
    assert sum(steps.amounts) == 18
    for k, fitted in enumerate(together):
        alone = fit(inr, samples[k], config, start=starts[k], generator=seeded(k))
        for name, tensor in alone.params.items():
            torch.testing.assert_close(fitted.params[name], tensor, rtol=1e-5, atol=1e-7)
    with pytest.raises(ValueError, match="each network needs one of each"):
        fit_many(inr, samples, config, starts=starts[:2], generators=[seeded(k) for k in range(3)])


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: FitConfig(steps=0), "must be positive"),
        (lambda: FitConfig(batch=0), "must be at least 1"),
        (lambda: FitConfig(optimizer=Adam(-1.0)), "lr is -1.0, but must lie in"),
        (lambda: FitConfig(loss="l1"), "there is no loss"),  # type: ignore[arg-type]
    ],
)
def test_settings_that_make_no_sense(make: Callable[[], FitConfig], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        make()


def test_samples_of_another_kind_are_refused() -> None:
    inr = Inr(width=9, depth=2)
    with pytest.raises(ValueError, match="from 2 coordinates to 2 values"):
        fit(inr, image_samples(picture()), start=inr.start(seeded()), generator=seeded())


def test_a_fit_that_fails_says_so() -> None:
    inr = Inr(width=8, depth=2)
    generator = torch.Generator().manual_seed(0)
    start = inr.start(generator)
    broken = Samples(torch.full((9, 3), float("nan")), torch.rand(9, 1, generator=generator))
    with pytest.raises(ValueError, match="in step 1 of 2 the loss is nan"):
        fit(inr, broken, FitConfig(steps=2, batch=4), start=start, generator=generator)
    whole = Samples(torch.zeros(9, 3), torch.rand(9, 1, generator=generator))
    with pytest.raises(ValueError, match=r"has shape \(8, 3\) in the start, but \(9, 3\) in the network"):
        fit(Inr(width=9, depth=2), whole, FitConfig(steps=2), start=start, generator=generator)
    with pytest.raises(ValueError, match=r"'layers\.0\.bias'"):
        fit(
            inr,
            whole,
            FitConfig(steps=2),
            start={n: t for n, t in start.items() if n != "layers.0.bias"},
            generator=generator,
        )

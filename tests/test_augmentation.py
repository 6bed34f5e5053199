"""Random changes of images: their values, and their use in training."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from regauge.bayes.variational.mean_field import VariationalConfig, fit
from regauge.nets.augmentation import Augmentation
from regauge.nets.classification import ClassifierConfig, initialize, train


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def crops(image: Tensor, shift: int, *, mirrors: bool) -> list[Tensor]:
    """Return all images that one image `[channels, height, width]` may become."""
    _, height, width = image.shape
    padded = pad(image, [shift] * 4)
    found = [
        padded[:, top : top + height, left : left + width]
        for top in range(2 * shift + 1)
        for left in range(2 * shift + 1)
    ]
    return [*found, *(crop.flip(2) for crop in found)] if mirrors else found


@pytest.mark.parametrize("mirrors", [True, False])
def test_every_image_becomes_one_of_its_crops_and_all_of_them_occur(mirrors: bool) -> None:
    image = torch.rand(3, 5, 7, generator=generator())
    changed = Augmentation(shift=1, mirrors=mirrors)(image.expand(400, 3, 5, 7), generator(1))
    possible = crops(image, 1, mirrors=mirrors)
    which = [next(k for k, crop in enumerate(possible) if torch.equal(crop, one)) for one in changed]
    assert set(which) == set(range(len(possible)))
    if mirrors:
        assert sum(k >= 9 for k in which) == pytest.approx(200, abs=40)


def test_images_of_a_batch_change_by_themselves() -> None:
    images = torch.rand(6, 1, 4, 4, generator=generator())
    changed = Augmentation(shift=2)(images, generator(1))
    for image, one in zip(images, changed, strict=True):
        assert any(torch.equal(one, crop) for crop in crops(image, 2, mirrors=True))
    assert torch.equal(Augmentation(shift=0, mirrors=False)(images, generator()), images)
    assert torch.equal(changed, Augmentation(shift=2)(images, generator(1)))


def test_trainings_see_changed_images() -> None:
    module = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 2))
    images, labels = torch.rand(20, 1, 4, 4, generator=generator()), torch.arange(20) % 2
    start = initialize(module, generator(1))
    plain, same, changed = (
        train(
            module,
            start,
            images,
            labels,
            ClassifierConfig(epochs=2, batch=5),
            generator=generator(2),
            augmentation=change,
        )
        for change in (None, None, Augmentation(1))
    )
    assert all(torch.equal(plain[name], same[name]) for name in plain)
    assert not torch.equal(plain["0.weight"], changed["0.weight"])
    settings = VariationalConfig(epochs=2, batch=5)
    first, second = (
        fit(start, module, images, labels, settings, generator=generator(2), augmentation=change).mean
        for change in (None, Augmentation(1))
    )
    assert not torch.equal(first["0.weight"], second["0.weight"])


def test_what_cannot_be_changed_is_refused() -> None:
    with pytest.raises(ValueError, match="fewer than 0 pixels"):
        Augmentation(shift=-1)
    with pytest.raises(ValueError, match=r"images are \[n, channels, height, width\]"):
        Augmentation()(torch.rand(4, 28, 28), generator())

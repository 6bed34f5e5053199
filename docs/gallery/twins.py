"""Digits that are networks, and their canonical twins: networks that an autoencoder decodes from their weights."""

import sys
from pathlib import Path

import torch

import regauge as rg
from regauge import learn
from regauge import weightspace as ws
from regauge.data import digits
from regauge.report.figures import picture_figure
from regauge.report.pictures import Images

folder, is_quick = Path(sys.argv[1]), "--quick" in sys.argv
images = digits().train_images[: 40 if is_quick else 1400]
inr, generator = rg.inr.image_inr(8, 8, units=16), torch.Generator().manual_seed(0)
population = rg.inr.fit_images(images, inr)
symmetry = rg.discover(inr.module(), (torch.zeros(4, 2),))
config = learn.AutoencoderConfig(
    layer=ws.Propagation(channels=1, expansion=1), depth=1, examples=64, seconds=1 if is_quick else 120
)
auto = learn.fit_autoencoder(
    population, symmetry, config, module=inr.module(), inputs=learn.grid((8, 8)), generator=generator
)


def rendered(networks: rg.Params) -> torch.Tensor:
    return torch.stack(
        [rg.inr.render_image(inr, {name: t[k] for name, t in networks.items()}, 8, 8)[..., 0] for k in range(10)]
    )


rows = ("networks", "twins")
values = torch.stack([rendered(population), rendered(auto.decode(auto.encode(population)))])
picture = Images.of("Digits as networks", rows, tuple(map(str, range(1, 11))), values)
picture_figure((picture,)).savefig(folder / "twins.png", dpi=110)

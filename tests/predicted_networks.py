"""Small sine networks whose outputs are predicted, and settings of short trainings."""

from functools import cache

import torch
from torch import Tensor, nn

import regauge as rg
from regauge import learn
from regauge import weightspace as ws
from regauge.core.params import Params
from regauge.nets.siren import Siren
from regauge.storage.architecture import Architecture

NETWORKS = 500
GRID = learn.grid((4, 4))
CONFIG = learn.PredictorConfig(layer=ws.LAYERS["propagation"](), width=24, depth=2, epochs=15, batch=32)
ARCHITECTURE = Architecture("SIREN", "regauge.nets.siren:Siren", {"width": 8, "depth": 1, "omega": 3.0})


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@cache
def sirens() -> tuple[nn.Module, rg.Symmetry, Params, Tensor]:
    """Return small sine networks, and their outputs at the points of a grid."""
    module = Siren(2, 8, 1, depth=1, omega=3.0, generator=generator())
    chance = generator(1)
    networks = {
        name: torch.randn(NETWORKS, *tensor.shape, generator=chance) / max(1, tensor[0].numel()) ** 0.5
        for name, tensor in module.state_dict().items()
    }
    values = torch.func.vmap(lambda one: torch.func.functional_call(module, one, (GRID,)))(networks)
    return module, rg.discover(module, (torch.randn(5, 2),)), networks, values.squeeze(-1)

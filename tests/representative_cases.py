"""Networks that are matched as representatives."""

import torch
from translation_nets import EVERY as UNROTATED
from translation_nets import generator, network, stream

import regauge as rg
from regauge.core.params import Params
from regauge.nets.transformer import Llama

EVERY = (*UNROTATED, "rotation")
"""All parts of an element."""
Case = tuple[torch.nn.Module, torch.Tensor, rg.Symmetry, Params]


def case(name: str) -> Case:
    if name == "stream":
        return stream()
    if name != "llama":
        return network(name)
    torch.manual_seed(0)
    module, x = Llama(11, width=16, layers=2, heads=4, kv_heads=2).double().eval(), torch.arange(8).reshape(2, 4)
    params = {
        key: t + 0.1 * torch.randn_like(t) if t.is_floating_point() else t for key, t in module.state_dict().items()
    }
    return module, x, rg.discover(module, (x,)), params


def moved(symmetry: rg.Symmetry, params: Params, seed: int = 1, parts: tuple[str, ...] = EVERY) -> Params:
    return symmetry.act(symmetry.random(generator(seed), parts), params)

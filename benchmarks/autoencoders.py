"""Canonicalizing autoencoders: a training step of this library, compared with the published code of paper 002.

The published step has the released settings for images of digits. ScaleGMN with 128 features and four layers reads
SIRENs 2-32-32-1, and an MLP 128-256-512-1185 writes their parameters. Both networks render 28 x 28 pixels, and AdamW
with clipped gradients minimizes the squared difference. The row "The same function" is `ChainScaleGMN`, `MLPDecoder`
and the objective of `learn.fit_autoencoder`, with the same parameters. The first line reports the deviations of loss
and gradients from the published code, in double precision without dropout, relative to the largest value. The published
code releases a decoder of (2, 4) hidden units; all rows use (256, 512), as in the paper. Every row runs in a separate
process with one thread. Seconds are CPU time, as the median of several rounds after one warm-up round. Megabytes are
the peak memory above the memory before the nets were made.

    python benchmarks/autoencoders.py --sagma FOLDER [--packages FOLDER] [--networks 16] [--rounds 3]

The command needs a checkout of odyboufalaki/Symmetry-Aware-Graph-Metanetwork-Autoencoders. If torch_geometric and
einops are not installed, it also needs a folder with these packages.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
import yaml
from deep_weight_space import Step, table
from scale_gmn import as_published, fill, find_published, give_parameters, networks, our_net
from torch import Tensor, nn

import regauge as rg
from regauge import learn
from regauge import weightspace as ws
from regauge.learn.objective import Objective
from regauge.nets.siren import Siren

SIREN, HIDDEN, LATENT, SIDE = (2, 32, 32, 1), [256, 512], 128, 28
CLIP = 10.0
ABSENT = ("nfn", "nfn.common", "torchvision", "torchvision.transforms", "torchvision.utils")
"""Packages that the published files import but the nets do not need."""


def settings_of(folder: Path, dropout: float) -> dict[str, Any]:
    """Return the released settings with the paper's decoder, completed as by the published reader."""
    found: dict[str, Any] = yaml.safe_load((folder / "configs/mnist_rec/scalegmn_autoencoder.yml").read_text())
    found["decoder_args"].update(d_hidden=list(HIDDEN), data_layer_layout=list(SIREN))
    found["scalegmn_args"].update(layer_layout=list(SIREN))
    found["scalegmn_args"]["gnn_args"]["dropout"] = dropout
    return found


def population(count: int, dtype: torch.dtype) -> rg.Params:
    """Return sine networks with weights of about the size of trained weights, computed by a formula."""
    return {name: tensor * 0.1 for name, tensor in named(networks(SIREN, count, dtype)).items()}


def named(params: rg.Params) -> rg.Params:
    """Return parameters under the names of a SIREN, in its order."""
    return dict(zip(siren().state_dict(), params.values(), strict=True))


def siren() -> Siren:
    return Siren(SIREN[0], SIREN[1], SIREN[-1], depth=2)


def pixels(dtype: torch.dtype) -> Tensor:
    """Return the points that the published code renders."""
    axis = torch.linspace(-1, 1, SIDE, dtype=torch.float64).float().to(dtype)
    rows, columns = torch.meshgrid(axis, axis, indexing="ij")
    return torch.stack([columns.flatten(), rows.flatten()], 1)


class Published(nn.Module):
    """The published autoencoder. Calling it returns the loss of a step."""

    def __init__(self, settings: dict[str, Any], params: rg.Params) -> None:
        super().__init__()
        from src.scalegmn.autoencoder import get_autoencoder

        self.net = get_autoencoder(settings, "inr")
        self.graphs, self.weights, self.biases = as_published(settings["scalegmn_args"], params)

    def forward(self) -> Tensor:
        from src.phase_canonicalization.test_inr import test_inr
        from src.scalegmn.autoencoder import create_batch_wb

        wanted = test_inr(self.weights, self.biases, permuted_weights=True)
        made = test_inr(*create_batch_wb(self.net(self.graphs.clone())))
        return nn.functional.mse_loss(made, wanted)


class Ours(nn.Module):
    """An encoder and a decoder of this library. Calling them returns the loss of a step of `learn.fit_autoencoder`."""

    def __init__(self, encoder: nn.Module, params: rg.Params) -> None:
        super().__init__()
        dtype = next(iter(params.values())).dtype
        symmetry = symmetry_of()
        self.encoder, self.decoder = encoder, ws.MLPDecoder(tuple(HIDDEN)).build(symmetry, LATENT)
        self.objective = Objective.of(siren(), pixels(dtype), None, None, None, params, "cpu")
        self.params, self.chance = params, torch.Generator()

    def forward(self) -> Tensor:
        decoded = self.decoder(self.encoder(self.params))
        return self.objective.train_loss(decoded, self.params, self.chance) * self.objective.scale


def symmetry_of() -> rg.Symmetry:
    return rg.discover(siren(), (torch.randn(2, SIREN[0]),), verify=False).bind(siren().state_dict())


def same_function(settings: dict[str, Any], params: rg.Params) -> Ours:
    """Return nets that compute the published function; the encoder reads networks by the names of an MLP."""
    net = our_net(settings["scalegmn_args"])
    names = list(networks(SIREN, 1))

    class Renamed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, given: rg.Params) -> Tensor:
            made: Tensor = net(dict(zip(names, given.values(), strict=True)))
            return made

    return Ours(Renamed(), params)


def layers_of(config: learn.AutoencoderConfig, params: rg.Params) -> Ours:
    """Return the nets that some settings describe."""
    net = ws.Metanet(
        symmetry_of(),
        layer=config.layer,
        head=ws.Invariant(config.latent, config.hidden),
        width=config.width,
        depth=config.depth,
    )
    net.standardize(params)
    return Ours(net, params)


def compare(folder: Path) -> tuple[float, float]:
    """Return the deviations of the loss, and of its gradient by the decoder's parameters, from the published code."""
    torch.set_default_dtype(torch.float64)
    from src.scalegmn import inr

    coordinates = inr.make_coordinates  # always of single precision
    inr.make_coordinates = lambda *given: coordinates(*given).double()
    settings, params = settings_of(folder, 0.0), population(3, torch.float64)
    ours, published = same_function(settings, params).double(), Published(settings, params).double()
    fill(ours.encoder.net)
    give_parameters(ours.encoder.net, published.net.encoder)
    theirs = [p for layer in published.net.decoder.net.fc for p in (layer.weight, layer.bias)]
    own = [p for layer in ours.decoder.layers for p in (layer.weight, layer.bias)]
    with torch.no_grad():
        for a, b in zip(own, theirs, strict=True):
            a.copy_(0.1 * torch.randn(a.shape, generator=torch.Generator().manual_seed(a.numel())))
            b.copy_(a)
    losses = ours(), published()
    gradients = [
        torch.cat([g.flatten() for g in torch.autograd.grad(x, p)]) for x, p in zip(losses, (own, theirs), strict=True)
    ]
    torch.set_default_dtype(torch.float32)
    inr.make_coordinates = coordinates
    apart = float((gradients[0] - gradients[1]).abs().max() / gradients[1].abs().max())
    return abs(float(losses[0].detach() / losses[1].detach()) - 1), apart


def train(net: nn.Module) -> Step:
    """Take a training step."""
    weights = list(net.train().parameters())
    optimizer = torch.optim.AdamW(weights, lr=1e-3, weight_decay=0.01)

    def step() -> None:
        optimizer.zero_grad()
        net().backward()
        nn.utils.clip_grad_norm_(weights, CLIP)
        optimizer.step()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sagma", type=Path, required=True)
    parser.add_argument("--packages", type=Path)
    parser.add_argument("--networks", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    find_published(options.sagma, options.packages)
    sys.modules.update({name: MagicMock() for name in ABSENT})
    loss, gradient = compare(options.sagma)
    print(f"The same function: loss {loss:.0e}, gradient by the decoder {gradient:.0e} from the published ones")
    print(f"Load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    settings, params = settings_of(options.sagma, 0.2), population(options.networks, torch.float32)
    quick = learn.AutoencoderConfig(layer=ws.Propagation(channels=1, expansion=1), width=64, depth=1, hidden=256)
    rows = {
        "ScaleGMN autoencoder, published": lambda: train(Published(settings, params)),
        "the same function": lambda: train(same_function(settings, params)),
        "`propagation` of docs/measurements/autoencoders.md, another function": lambda: train(layers_of(quick, params)),
        "the default encoder, another function": lambda: train(layers_of(learn.AutoencoderConfig(), params)),
    }
    for _ in range(2):
        table(f"2-32-32-1, {options.networks} networks", rows, options.rounds)


if __name__ == "__main__":
    main()

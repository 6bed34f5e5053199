"""Nets, trainings and methods on a real CUDA device, compared with the CPU, for properties that a pretended device
cannot test.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import weightspace_cases as cases
from torch import Tensor, nn

import regauge as rg
from regauge import learn
from regauge import weightspace as ws
from regauge.__main__ import main
from regauge.nets.siren import Siren

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

HEADS: dict[str, Any] = {"invariant": ws.Invariant(3), "equivariant": ws.Equivariant(), "units": ws.UnitFeatures(4)}
ARCHITECTURES = ("mlp_relu", "siren", "cnn_flatten", "resnet8_batch_A", "vit", "hf_gpt2")
METHODS: dict[str, Any] = {
    "weights": rg.WeightMatching(),
    "restarts": rg.WeightMatching(restarts=2),
    "frank_wolfe": rg.FrankWolfe(),
}
SHORT: dict[str, Any] = {"epochs": 2, "batch": 4, "device": "cuda"}


def there(params: Mapping[str, Tensor]) -> rg.Params:
    return {name: tensor.cuda() for name, tensor in params.items()}


def chance(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("layer", ws.LAYERS)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_nets_say_there_what_they_say_here(name: str, layer: str, head: str) -> None:
    symmetry, networks = cases.symmetry(name), cases.population(name)
    net = ws.Metanet(
        symmetry, layer=ws.LAYERS[layer](), head=HEADS[head], width=8, depth=1, generator=chance()
    ).double()
    here = net(networks)
    found = net.cuda()(there(networks))
    pairs = [(here, found)] if isinstance(here, Tensor) else [(here[n], found[n]) for n in here]
    for expected, one in pairs:
        assert one.is_cuda
        torch.testing.assert_close(one.cpu(), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_networks_are_aligned_there_as_here(name: str, method: str) -> None:
    symmetry, networks = cases.symmetry(name), cases.population(name, 2)
    a, b = ({n: t[k] for n, t in networks.items()} for k in range(2))
    here = rg.align(a, b, symmetry, method=METHODS[method], generator=chance())
    found = rg.align(there(a), there(b), symmetry, method=METHODS[method], generator=chance())
    assert all(tensor.is_cuda for tensor in found.params.values())
    assert found.objective == pytest.approx(here.objective, rel=1e-6)
    moved = symmetry.act(symmetry.random(chance()), there(a))
    assert all(tensor.is_cuda for tensor in rg.canonicalize(moved, symmetry).values())


@pytest.mark.parametrize(
    ("paper", "name"), [("merging", "cifar10"), ("transformers", "vit-cifar10"), ("004", "figure12")]
)
def test_experiments_run_there(paper: str, name: str, tmp_path: Path) -> None:
    pytest.importorskip("tyro")
    main(["reproduce", paper, name, "--device", "cuda", "--out", str(tmp_path)])
    found = json.loads((tmp_path / f"{paper}-{name}-smoke.json").read_text())
    assert f"--device cuda`, regauge {rg.__version__}; networks were trained and evaluated on" in found["notes"][0]


TRAININGS: dict[str, Callable[[rg.Params, rg.Symmetry, rg.Task], object]] = {
    "predictor": lambda networks, symmetry, task: learn.fit_predictor(
        networks,
        torch.arange(24) % 2,
        symmetry,
        learn.PredictorConfig(width=4, depth=1, probes=2, render=1.0, statistics=False, **SHORT),
        module=task.module,
        inputs=task.batches[0][0],
        generator=chance(),
    ),
    "matching": lambda networks, symmetry, task: learn.fit_matching(
        networks,
        symmetry,
        learn.MatchingConfig(width=4, depth=1, probes=2, checked=2, **SHORT),
        task=task,
        module=task.module,
        inputs=task.batches[0][0],
        generator=chance(),
    ),
    "autoencoder": lambda networks, symmetry, task: learn.fit_autoencoder(
        networks,
        symmetry,
        learn.AutoencoderConfig(width=4, depth=1, latent=2, **SHORT),
        module=task.module,
        inputs=task.batches[0][0],
        generator=chance(),
    ),
}


@pytest.mark.parametrize("name", TRAININGS)
def test_nets_are_trained_there_on_networks_of_the_cpu(name: str) -> None:
    torch.manual_seed(0)
    module, inputs = Siren(2, 4, 1), torch.rand(8, 2)
    symmetry = rg.discover(module, (inputs,), verify=False)
    networks = {
        n: torch.stack([t + 0.1 * torch.randn_like(t) for _ in range(24)]) for n, t in module.state_dict().items()
    }
    task = rg.Task(module, [(inputs, torch.rand(8, 1))], nn.functional.mse_loss)
    TRAININGS[name](networks, symmetry, task)

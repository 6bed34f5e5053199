"""Published deep weight space networks, compared with a plain reference case by case, and the faults of the published
code.
"""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regauge as rg
from regauge import weightspace as ws
from regauge.core.params import Params
from regauge.nets.mlp import MLP
from regauge.weightspace.layers.reading import Pools
from regauge_papers import chains
from regauge_papers.chains.net import ChainDWS
from regauge_papers.chains.reading import axes_of

WIDTHS = (5, 6, 4, 7, 3)
LAYERS = len(WIDTHS) - 1
SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"is_diagonal": False},
    {"is_diagonal": False, "sets": "mean", "pooling": "mean"},
    {"are_biases_blind": False},
    {"are_biases_blind": False, "is_last_constant": False, "is_diagonal": False},
    {"inputs_to": 2, "are_biases_blind": False},
)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@cache
def symmetry() -> rg.Symmetry:
    return rg.discover(MLP(WIDTHS), (torch.randn(2, WIDTHS[0], generator=generator(0)),))


def networks(seed: int = 0) -> Params:
    chance = generator(seed)
    shapes = MLP(WIDTHS).state_dict().items()
    return {name: torch.randn(3, *t.shape, generator=chance, dtype=torch.float64) for name, t in shapes}


def make(head: Any, **settings: Any) -> ChainDWS:
    config = chains.ChainConfig(**{"hidden": 4, "layers": 2, "heads": 2, **settings})
    net = ChainDWS(symmetry(), config, head=head, generator=generator(1)).double().eval()
    with torch.no_grad():
        for name, parameter in net.named_parameters():  # They begin equal, or tiny.
            if name.endswith(("query", "bias")):
                parameter.copy_(torch.randn(parameter.shape, generator=generator(2)))
    return net


def plain_set(module: nn.Module, x: Tensor, config: chains.ChainConfig, heads: int) -> Tensor:
    """Return a layer of sets `[units, inputs]`, computed one unit and one head at a time."""
    maps = list(module.modules())
    linears = [m for m in maps if isinstance(m, nn.Linear)]
    if config.sets == "mean":
        own, rest = linears
        pooled = x.max(0).values if config.pooling == "max" else x.mean(0)
        return torch.stack([own(row) - rest(pooled) for row in x])
    query, key, value, out = linears
    width = out.out_features // heads
    rows = []
    for row in x:
        parts = []
        for k in range(heads):
            here = slice(k * width, (k + 1) * width)
            scores = torch.stack([query(row)[here] @ key(other)[here] for other in x]) / out.out_features**0.5
            weights = scores.exp() / scores.exp().sum()
            parts.append(query(row)[here] + sum(w * value(other)[here] for w, other in zip(weights, x, strict=True)))
        y = torch.cat(parts)
        rows.append(y + out(y).clamp(min=0))
    return torch.stack(rows)


def plain_map(net: ChainDWS, module: Any, x: Tensor, source: int, target: int, heads: int) -> Tensor:
    """Return the message from tensor `source` to tensor `target` of one network. Weights come first, then biases."""
    config = net.config
    pool = (lambda t, dims: t.amax(dims)) if config.pooling == "max" else (lambda t, dims: t.mean(dims))
    n, last = list(WIDTHS), LAYERS - 1
    n[0] = config.inputs_to or n[0]
    i, j, width = source % LAYERS, target % LAYERS, module.outputs
    is_weight, to_weight = source < LAYERS, target < LAYERS
    shape = (n[j], n[j + 1], width) if to_weight else (n[j + 1], width)
    linear = module.maps[0]
    if is_weight and to_weight and i == j and 0 < i < last:
        a, b, c, d = module.maps
        rows, columns = b(pool(x, (0,))), c(pool(x, (1,)))
        return (a(x) + rows[None] + columns[:, None] + d(pool(x, (0, 1)))) / 4
    is_blind = is_weight and not to_weight and config.are_biases_blind
    keeps_inputs, keeps_classes = i == 0 and is_weight and not is_blind, i == last and not is_blind
    # The unit axis that both have: where it is in the source, and where in the target.
    mine = (i, i + 1) if is_weight else (i + 1,)
    theirs = (j, j + 1) if to_weight else (j + 1,)
    common = [p for p in mine if p in theirs and (0 < p < LAYERS or is_blind)]
    kept = [
        k for k, p in enumerate(mine) if p in common or (p == 0 and keeps_inputs) or (p == LAYERS and keeps_classes)
    ]
    away = tuple(k for k in range(len(mine)) if k not in kept)
    pooled = pool(x, away) if away else x
    if common and mine[kept[0]] != common[0]:
        pooled = pooled.transpose(0, 1)
    constant = config.is_last_constant and target == last and source in (last - 1, *range(LAYERS, 2 * LAYERS - 2))
    if not common:
        made = linear(pooled.flatten())
        if to_weight and j == 0:
            return made.reshape(n[0], 1, width).expand(shape)
        is_wide = j == last and not constant and not is_blind
        return (made.reshape(-1, width) if is_wide else made).expand(shape)
    made = plain_set(linear, pooled.reshape(n[common[0]], -1), config, heads)
    if not to_weight:
        return made
    if j == 0:
        return made.reshape(n[1], n[0], width).transpose(0, 1)
    if j == last and not constant:
        return made.reshape(shape)
    return (made[:, None] if common[0] == j else made[None]).expand(shape)


def plain_features(net: ChainDWS, params: Params, model: int) -> list[Tensor]:
    names = list(params)
    x = [params[name][model].T[..., None] for name in names[::2]] + [
        params[name][model][..., None] for name in names[1::2]
    ]
    for k, layer in enumerate(net.layers):
        if k:
            for name, norm in net.norms[k - 1].items():
                t = x[int(name)]
                x[int(name)] = norm(t.reshape(-1, t.shape[-1])).reshape(t.shape).relu()
        whole, is_last = x[0], k == net.config.layers - 1
        if net.config.inputs_to:
            x = [plain_resize(layer.down, whole), *x[1:]]
        made = [torch.zeros(0)] * len(x)
        for target, sources in layer.sources.items():
            heads = 1 if is_last else net.config.heads
            parts = [plain_map(net, layer.maps[f"{s}_{target}"], x[s], s, target, heads) for s in sources]
            made[target] = sum(parts, torch.zeros(())) / (2 * LAYERS)
        if net.config.inputs_to and 0 in layer.sources:
            made[0] = plain_resize(layer.up, made[0]) + layer.skip(whole)
        x = made
    return x


def plain_resize(module: Any, x: Tensor) -> Tensor:
    """Compute the map feature by feature and unit by unit."""
    features = []
    for f in range(x.shape[-1]):
        scores = torch.stack([module.query @ x[:, unit, f] for unit in range(x.shape[1])]).softmax(0)
        average = sum(score * x[:, unit, f] for unit, score in enumerate(scores))
        features.append(torch.stack([module.own(x[:, u, f]) - module.pooled(average) for u in range(x.shape[1])], 1))
    return torch.stack(features, -1)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("head", [ws.UnitFeatures(3), ws.Invariant(2)], ids=["units", "numbers"])
def test_equals_the_plain_reference(settings: dict[str, Any], head: Any) -> None:
    net, params = make(head, **settings), networks()
    found = net.features(params)
    with torch.no_grad():
        wanted = plain_features(net, params, 1)
    compared = [(a[1], b) for a, b in zip(found, wanted, strict=True) if b.numel()]
    assert len(compared) == (LAYERS - 1 if isinstance(head, ws.UnitFeatures) else 2 * LAYERS)
    for mine, plain in compared:
        torch.testing.assert_close(mine.detach(), plain, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_permutations_are_respected(settings: dict[str, Any]) -> None:
    params = networks()
    element = symmetry().random(generator(3), ("permutation",), (3,))
    moved = symmetry().act(element, params)
    numbers, units = make(ws.Invariant(2), **settings), make(ws.UnitFeatures(3), **settings)
    torch.testing.assert_close(numbers(moved), numbers(params), rtol=1e-10, atol=1e-12)
    before = units(params)
    for name, after in units(moved).items():
        order = element[name].perm
        assert order is not None
        expected = before[name].gather(1, order.unsqueeze(-1).expand_as(before[name]))
        torch.testing.assert_close(after, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("is_blind", [True, False])
def test_biases_tell_inputs_apart_without_the_fault(is_blind: bool) -> None:
    net, params = make(ws.UnitFeatures(3), layers=1, are_biases_blind=is_blind), networks()
    first = next(iter(params))
    before, after = net(params), net({**params, first: params[first].flip(2)})
    same = all(torch.allclose(after[name], before[name], rtol=1e-12) for name in before)
    assert same is is_blind


@pytest.mark.parametrize("is_constant", [True, False])
def test_the_last_weight_tells_classes_apart_without_the_fault(is_constant: bool) -> None:
    net = make(ws.Invariant(2), is_last_constant=is_constant)
    heard = net.layers[0].maps[f"{LAYERS - 2}_{LAYERS - 1}"]
    x = net.chain.read(networks())
    made = heard(Pools.of(x[LAYERS - 2], "max"))
    assert made.shape[2] == (1 if is_constant else WIDTHS[-1])
    assert is_constant or float(made.detach().std(2).max()) > 1e-3


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("head", [ws.UnitFeatures(3), ws.Invariant(2)], ids=["units", "numbers"])
def test_nothing_is_computed_in_vain(settings: dict[str, Any], head: Any) -> None:
    net = make(head, **settings).train()
    made = net(networks())
    tensors = [made] if isinstance(made, Tensor) else list(made.values())
    sum((t * torch.randn(t.shape, generator=generator(4), dtype=t.dtype)).sum() for t in tensors).backward()
    assert not [name for name, parameter in net.named_parameters() if parameter.grad is None]


def test_dropout_is_off_in_evaluation() -> None:
    net, params = make(ws.Invariant(2), dropout=0.5), networks()
    assert torch.equal(net(params), net(params))
    net.train()
    assert not torch.equal(net(params), net(params))


def test_heads_need_not_divide_the_inputs() -> None:
    net = make(ws.UnitFeatures(3), inputs_to=3, hidden=8, heads=8)
    assert all(x.shape[-1] == 3 for x in net(networks()).values())


def test_axes_are_those_of_a_chain() -> None:
    assert axes_of(4) == ((0, 1), (1, 2), (2, 3), (1,), (2,), (3,))


def test_what_is_no_chain_is_refused() -> None:
    for widths in ((4, 6, 3), (4, 3)):
        found = rg.discover(MLP(widths), (torch.randn(2, 4),))
        with pytest.raises(ValueError, match="at least three linear layers"):
            ChainDWS(found, chains.ChainConfig(), head=ws.UnitFeatures(3))
    with pytest.raises(ValueError, match="no head of the published code"):
        ChainDWS(symmetry(), chains.ChainConfig(), head=ws.Invariant(3, hidden=8))
    with pytest.raises(ValueError, match="do not divide hidden=6"):
        chains.ChainConfig(hidden=6, heads=4)

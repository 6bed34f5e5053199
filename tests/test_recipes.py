"""Recipes: mergekit's files, with every method computed a second time in this file, tensor by tensor."""

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import regauge as rg
from regauge.checkpoints.checkpoint import Checkpoint, load
from regauge.checkpoints.outputs.provenance import hash_file, read_provenance
from regauge.cli.main import main
from regauge.core.element import PARTS
from regauge.hub.layer_stack import LayerStack
from regauge.merging.assembly import Assembly
from regauge.merging.recipes.merge_recipe import plan_recipe
from regauge.merging.recipes.read_recipe import read_recipe

transformers = pytest.importorskip("transformers")

from folder_cases import CASES, open_clean  # noqa: E402

LAYERS = 3
SIZES = {"hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2, "max_position_embeddings": 16}
Params = Mapping[str, Tensor]


def build(seed: int, layers: int = LAYERS, **settings: Any) -> Any:
    """Return a random Llama."""
    torch.manual_seed(seed)
    own = {"vocab_size": 24, "initializer_range": 0.3, "num_hidden_layers": layers, "tie_word_embeddings": False}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES | own | settings)).eval()


@pytest.fixture(scope="module", name="folders")
def _folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a base, three networks that were fine-tuned from it, and one that was not. One of the networks is
    sharded.
    """
    place = tmp_path_factory.mktemp("models")
    base = build(0)
    base.save_pretrained(place / "base")
    common = {name: 0.02 * torch.randn_like(tensor) for name, tensor in base.state_dict().items()}
    for seed, name in enumerate(("one", "two", "three")):
        model = build(0)
        torch.manual_seed(10 + seed)
        tuned = {n: t + common[n] + 0.03 * torch.randn_like(t) for n, t in base.state_dict().items()}
        model.load_state_dict(tuned)
        model.save_pretrained(place / name, max_shard_size="4KB" if name == "two" else "1GB")
    build(5).save_pretrained(place / "stranger")
    return place


@pytest.fixture(autouse=True)
def _here(folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in folders.iterdir():
        (tmp_path / folder.name).symlink_to(folder)
    monkeypatch.chdir(tmp_path)


def merged(text: str, out: str = "out") -> Params:
    Path("recipe.yml").write_text(text)
    main(["merge", "--recipe", "recipe.yml", "-o", out])
    return load(out)


def depth(name: str) -> float:
    parts = name.split(".")
    return int(parts[2]) / (LAYERS - 1) if parts[1] == "layers" else 0.0


def gradient(values: list[float], t: float) -> float:
    low = min(int(t * (len(values) - 1)), len(values) - 2)
    share = t * (len(values) - 1) - low
    return values[low] * (1 - share) + values[low + 1] * share


def largest(delta: Tensor, density: float) -> Tensor:
    kept = torch.zeros_like(delta).flatten()
    chosen = delta.flatten().abs().argsort(descending=True)[: int(density * delta.numel())]
    kept[chosen] = delta.flatten()[chosen]
    return kept.reshape(delta.shape)


def between(delta: Tensor, density: float, gamma: float) -> Tensor:
    order, count = delta.flatten().abs().argsort(), delta.numel()
    top = min(int(gamma * count), count - int(density * count))
    bottom = count - int(density * count) - top
    kept = torch.zeros_like(delta).flatten()
    chosen = order[bottom : count - top]
    kept[chosen] = delta.flatten()[chosen]
    return kept.reshape(delta.shape)


def restored(kept: Tensor, delta: Tensor, order: float = 1) -> Tensor:
    """Rescale a tensor to its original norm."""
    return kept * (delta.flatten().norm(order) / kept.flatten().norm(order))


def elect(deltas: list[Tensor], weights: list[float], *, is_mean: bool) -> Tensor:
    weighted = torch.stack([w * d for w, d in zip(weights, deltas, strict=True)])
    agrees = weighted.sign() == weighted.sum(0).sign()
    masses = sum(w * a for w, a in zip(weights, agrees, strict=True))
    sums = (weighted * agrees).sum(0)
    return sums / torch.where(masses == 0, 1.0, masses) if is_mean else sums


def arc(a: Tensor, b: Tensor, t: float) -> Tensor:
    angle = math.acos(min(1.0, float((a * b).sum() / (a.norm() * b.norm()))))
    return (math.sin((1 - t) * angle) * a + math.sin(t * angle) * b) / math.sin(angle)


def slerped(a: Tensor, b: Tensor, t: float) -> Tensor:
    """Interpolate on the arc, or linearly if tensors are nearly parallel."""
    return (1 - t) * a + t * b if float((a * b).sum() / (a.norm() * b.norm())) > 0.9995 else arc(a, b, t)


def arcs(a: Tensor, b: Tensor, t: float, axis: int) -> Tensor:
    """Apply spherical interpolation separately to every vector along an axis."""
    if a.ndim < 2:
        return arc(a, b, t)
    pairs = zip(a.movedim(axis, -1), b.movedim(axis, -1), strict=True)
    return torch.stack([arc(*pair, t) for pair in pairs]).movedim(-1, axis)


def direction(tensors: list[Tensor], weights: list[float], *, is_normalized: bool = True) -> Tensor:
    shares = [w / sum(weights) if is_normalized else w for w in weights]
    mean = sum((s * t / t.norm() for s, t in zip(shares, tensors, strict=True)), torch.zeros(()))
    return mean / mean.norm() * sum(s * t.norm() for s, t in zip(shares, tensors, strict=True))


def stock(deltas: list[Tensor]) -> Tensor:
    pairs = [(a, b) for k, a in enumerate(deltas) for b in deltas[k + 1 :]]
    cosine = sum(float((a * b).sum() / (a.norm() * b.norm())) for a, b in pairs) / len(pairs)
    t = max(0.0, len(deltas) * cosine / (1 + (len(deltas) - 1) * cosine))
    return t * sum(deltas, torch.zeros(())) / len(deltas)


def chosen(deltas: list[Tensor], share: float) -> Tensor:
    """Compute SCE: the entries with the largest variance, weighted by mean squares, with the sign of the sum."""
    stack = torch.stack(deltas)
    variance = stack.var(0, unbiased=False).flatten()
    kept = torch.zeros_like(variance)
    if share < 1:
        kept[variance.argsort(descending=True)[: int(share * len(variance))]] = 1
        stack = stack * kept.reshape(stack.shape[1:])
    squares = stack.square().flatten(1).mean(1)
    agrees = stack.sign() == torch.where(stack.sum(0) >= 0, 1.0, -1.0)
    weights = (squares / squares.sum()).reshape(-1, *[1] * (stack.ndim - 1)) * agrees
    return (weights * stack).sum(0) / weights.sum(0).clamp(min=1e-6)


def reinforced(deltas: list[Tensor], epsilon: float, r: float, alpha: float) -> Tensor:
    """Compute RAM+."""
    stack = torch.stack(deltas)
    changed = stack.abs() > epsilon
    counts = changed.sum(0)
    alone, shared = changed & (counts == 1), changed & (counts > 1)
    ratios = shared.flatten(1).sum(1) / alone.flatten(1).sum(1).clamp(min=epsilon)
    gains = (1 + r * ratios.clamp(max=alpha)).reshape(-1, *[1] * (stack.ndim - 1))
    return (stack * alone * gains + stack * shared / counts.clamp(min=1)).sum(0)


def fused(base: Tensor, other: Tensor) -> Tensor:
    """Compute Arcee fusion."""
    p, q = (one.softmax(-1) + 1e-8 for one in (other, base))
    importance = (other - base).abs() * (p * (p / q).log()).sum(-1, keepdim=True)
    order = importance.flatten().sort().values
    quarter, median, three = (order[int(q * (len(order) - 1))] for q in (0.25, 0.5, 0.75))
    return torch.where(importance >= median + 1.5 * (three - quarter), other, base)


MODELS = "models: [{model: one, parameters: {%s}}, {model: two, parameters: {%s}}, {model: three, parameters: {%s}}]\n"
VECTORS = "base_model: base\n" + MODELS
WEIGHTS = [0.3, 0.9, 0.5]
Expected = Callable[[str, Tensor, list[Tensor]], Tensor]
"""A function of a name, the base's tensor and the tensors of the three networks, in float64."""

METHODS: dict[str, tuple[str, Expected]] = {
    "linear": (
        "merge_method: linear\n" + MODELS % ("weight: 0.3", "weight: [0.9, -0.1]", "weight: 0.5"),
        lambda name, base, nets: (
            (0.3 * nets[0] + gradient([0.9, -0.1], depth(name)) * nets[1] + 0.5 * nets[2])
            / (0.8 + gradient([0.9, -0.1], depth(name)))
        ),
    ),
    "linear with filters, not normalized": (
        "merge_method: linear\nparameters: {normalize: false, weight: 0.25}\n"
        + MODELS % ("weight: [{filter: mlp, value: [0, 2]}, {filter: self_attn, value: 1}]", "", "weight: 0"),
        lambda name, base, nets: (
            (2 * depth(name) if "mlp" in name else 1 if "self_attn" in name else 0.25) * nets[0] + 0.25 * nets[1]
        ),
    ),
    "slerp": (
        "merge_method: slerp\nbase_model: two\nmodels: [{model: one}, {model: two}]\n"
        "parameters:\n  t:\n    - {filter: self_attn, value: [0.1, 0.5, 0.9, 0.2]}\n    - value: 0.3\n",
        lambda name, base, nets: slerped(
            nets[1], nets[0], gradient([0.1, 0.5, 0.9, 0.2], depth(name)) if "self_attn" in name else 0.3
        ),
    ),
    "nuslerp of task vectors": (
        "merge_method: nuslerp\nbase_model: base\n"
        "models: [{model: one, parameters: {weight: 1}}, {model: two, parameters: {weight: 3}}]\n",
        lambda name, base, nets: base + arc(nets[0] - base, nets[1] - base, 0.75),
    ),
    "slerp with a base that is none of the models": (
        "merge_method: slerp\nbase_model: base\nmodels: [{model: one}]\nparameters: {t: 0.3}\n",
        lambda name, base, nets: slerped(base, nets[0], 0.3),
    ),
    "nuslerp, weights that cancel": (
        "merge_method: nuslerp\n"
        "models: [{model: one, parameters: {weight: 1}}, {model: two, parameters: {weight: -1}}]\n",
        lambda name, base, nets: arc(nets[0], nets[1], 0.5),
    ),
    "karcher of two": (
        "merge_method: karcher\nmodels: [{model: one}, {model: two}]\n",
        lambda name, base, nets: direction(nets[:2], [1, 1]),
    ),
    "karcher with a base that is none of the models": (
        "merge_method: karcher\nbase_model: base\nmodels: [{model: one}]\n",
        lambda name, base, nets: direction([base, nets[0]], [1, 1]),
    ),
    "linear with a base that is none of the models": (
        "merge_method: linear\nbase_model: base\nparameters: {weight: 0.5}\n"
        "models: [{model: one, parameters: {weight: 1}}]\n",
        lambda name, base, nets: (nets[0] + 0.5 * base) / 1.5,
    ),
    "multislerp of task vectors": (
        "merge_method: multislerp\n" + VECTORS % ("weight: 0.3", "weight: 0.9", "weight: 0.5"),
        lambda name, base, nets: base + direction([t - base for t in nets], WEIGHTS),
    ),
    "multislerp": (
        "merge_method: multislerp\n" + MODELS % ("weight: 0.3", "weight: 0.9", "weight: 0.5"),
        lambda name, base, nets: direction(nets, WEIGHTS),
    ),
    "nuslerp by vectors along the last axis": (
        "merge_method: nuslerp\nparameters: {nuslerp_flatten: false}\n"
        "models: [{model: one, parameters: {weight: 1}}, {model: two, parameters: {weight: 3}}]\n",
        lambda name, base, nets: arcs(nets[0], nets[1], 0.75, -1),
    ),
    "nuslerp of task vectors by vectors along the first axis": (
        "merge_method: nuslerp\nbase_model: base\nparameters: {nuslerp_flatten: false, nuslerp_row_wise: true}\n"
        "models: [{model: one, parameters: {weight: 1}}, {model: two, parameters: {weight: 3}}]\n",
        lambda name, base, nets: base + arcs(nets[0] - base, nets[1] - base, 0.75, 0),
    ),
    "nuslerp, by vectors in some tensors": (
        "merge_method: nuslerp\nparameters: {nuslerp_flatten: [{filter: mlp, value: false}, {value: true}]}\n"
        "models: [{model: one, parameters: {weight: 1}}, {model: two, parameters: {weight: 3}}]\n",
        lambda name, base, nets: arcs(nets[0], nets[1], 0.75, -1) if "mlp" in name else arc(nets[0], nets[1], 0.75),
    ),
    "multislerp, weights as they are": (
        "merge_method: multislerp\nparameters: {normalize_weights: false, eps: 1.0e-8}\n"
        + VECTORS % ("weight: 0.3", "weight: 0.9", "weight: 0.5"),
        lambda name, base, nets: base + direction([t - base for t in nets], WEIGHTS, is_normalized=False),
    ),
    "multislerp, a negative weight": (
        "merge_method: multislerp\n" + MODELS % ("weight: 0.3", "weight: 0.9", "weight: -0.5"),
        lambda name, base, nets: direction(nets, [0.3, 0.9, -0.5]),
    ),
    "task_arithmetic": (
        "merge_method: task_arithmetic\nparameters: {lambda: 0.7}\n"
        + VECTORS % ("weight: 0.3", "weight: 0.9", "weight: -0.5"),
        lambda name, base, nets: (
            base + 0.7 * (0.3 * (nets[0] - base) + 0.9 * (nets[1] - base) - 0.5 * (nets[2] - base))
        ),
    ),
    "task_arithmetic, normalized": (
        "merge_method: task_arithmetic\nparameters: {normalize: true}\n"
        + VECTORS % ("weight: 0.3", "weight: 0.9", "weight: -0.5"),
        lambda name, base, nets: (
            base + (0.3 * (nets[0] - base) + 0.9 * (nets[1] - base) - 0.5 * (nets[2] - base)) / 0.7
        ),
    ),
    "dare_linear without one of the models": (
        "merge_method: dare_linear\n" + VECTORS % ("weight: 0.3, density: 0", "weight: 0.9", "weight: 0.5"),
        lambda name, base, nets: base + 0.9 * (nets[1] - base) + 0.5 * (nets[2] - base),
    ),
    "della without one of the models": (
        "merge_method: della\n" + VECTORS % ("weight: 0.3, density: 0", "weight: 0.9", "weight: 0.5"),
        lambda name, base, nets: base + elect([t - base for t in nets[1:]], WEIGHTS[1:], is_mean=True),
    ),
    "della_linear without any": (
        "merge_method: della_linear\nparameters: {density: 0}\n" + VECTORS % (*["weight: 1"] * 3,),
        lambda name, base, nets: base,
    ),
    "breadcrumbs without as many outliers": (
        "merge_method: breadcrumbs\nparameters: {density: 0.75, gamma: 0.5}\n"
        + VECTORS % ("weight: 0.3", "weight: 0.9", "weight: 0.5"),
        lambda name, base, nets: (
            base + sum((w * between(t - base, 0.75, 0.5) for w, t in zip(WEIGHTS, nets, strict=True)), torch.zeros(()))
        ),
    ),
    "model_stock by rows": (
        "merge_method: model_stock\nparameters: {filter_wise: true}\n" + VECTORS % ("", "", ""),
        lambda name, base, nets: (
            base + stock([t - base for t in nets])
            if base.ndim < 2
            else base + torch.stack([stock(list(rows)) for rows in zip(*(t - base for t in nets), strict=True)])
        ),
    ),
    "passthrough, scaled": (
        "merge_method: passthrough\nmodels: [{model: one, parameters: {scale: [{filter: mlp, value: 0.5}]}}]\n",
        lambda name, base, nets: nets[0] * (0.5 if "mlp" in name else 1.0),
    ),
    "ties": (
        "merge_method: ties\nparameters: {lambda: 1.2, int8_mask: true}\n"
        + VECTORS % ("weight: 0.3, density: 0.4", "weight: 0.9, density: [0.9, 0.3]", "weight: 0.5"),
        lambda name, base, nets: (
            base
            + 1.2
            * elect(
                [
                    largest(nets[0] - base, 0.4),
                    largest(nets[1] - base, gradient([0.9, 0.3], depth(name))),
                    nets[2] - base,
                ],
                WEIGHTS,
                is_mean=True,
            )
        ),
    ),
    "ties without one of the models": (
        "merge_method: ties\n" + VECTORS % ("weight: 0.3, density: 0", "weight: 0.9", "weight: 0.5"),
        lambda name, base, nets: base + elect([t - base for t in nets[1:]], WEIGHTS[1:], is_mean=True),
    ),
    **{
        f"ties, rescaled by the norm {norm}": (
            f"merge_method: ties\nparameters: {{rescale: true, rescale_norm: {norm}, density: 0.4}}\n"
            + VECTORS % ("weight: 0.3", "weight: 0.9", "weight: 0.5"),
            lambda name, base, nets, order=order: (
                base + elect([restored(largest(t - base, 0.4), t - base, order) for t in nets], WEIGHTS, is_mean=True)
            ),
        )
        for norm, order in (("l1", 1.0), ("l2", 2.0), ("linf", math.inf))
    },
    "ties, rescaled, a negative weight": (
        "merge_method: ties\nparameters: {rescale: true, density: 0.4}\n"
        + VECTORS % ("weight: 0.3", "weight: 0.9", "weight: -0.5"),
        lambda name, base, nets: (
            base + elect([restored(largest(t - base, 0.4), t - base) for t in nets], [0.3, 0.9, -0.5], is_mean=True)
        ),
    ),
    "breadcrumbs, rescaled": (
        "merge_method: breadcrumbs\nparameters: {rescale: true, density: 0.6, gamma: 0.2}\n"
        + VECTORS % ("weight: 0.3", "weight: 0.9", "weight: 0.5"),
        lambda name, base, nets: (
            base
            + sum(
                (w * restored(between(t - base, 0.6, 0.2), t - base) for w, t in zip(WEIGHTS, nets, strict=True)),
                torch.zeros(()),
            )
        ),
    ),
    "dare_ties without drops, negative weights": (
        "merge_method: dare_ties\n" + VECTORS % ("weight: 0.3", "weight: -0.9", "weight: -0.5"),
        lambda name, base, nets: base + elect([t - base for t in nets], [0.3, -0.9, -0.5], is_mean=False),
    ),
    "della, all weights zero": (
        "merge_method: della\n" + VECTORS % ("weight: 0", "weight: 0", "weight: 0"),
        lambda name, base, nets: base,
    ),
    "breadcrumbs_ties": (
        "merge_method: breadcrumbs_ties\nparameters: {density: 0.6, gamma: 0.2}\n"
        + VECTORS % ("weight: 0.3", "weight: 0.9", "weight: 0.5"),
        lambda name, base, nets: base + elect([between(t - base, 0.6, 0.2) for t in nets], WEIGHTS, is_mean=False),
    ),
    "dare_ties without drops": (
        "merge_method: dare_ties\n" + VECTORS % ("weight: 0.3", "weight: 0.9, density: 1.0", "weight: 0.5"),
        lambda name, base, nets: base + elect([t - base for t in nets], WEIGHTS, is_mean=False),
    ),
    "della without drops": (
        "merge_method: della\n" + VECTORS % ("weight: 0.3", "weight: 0.9", "weight: 0.5"),
        lambda name, base, nets: base + elect([t - base for t in nets], WEIGHTS, is_mean=True),
    ),
    "sce": (
        "merge_method: sce\nparameters: {int8_mask: true}\n" + VECTORS % ("", "", ""),
        lambda name, base, nets: base + chosen([t - base for t in nets], 1.0),
    ),
    "sce of some entries": (
        "merge_method: sce\nparameters: {select_topk: [0.2, 0.6]}\n" + VECTORS % ("", "", ""),
        lambda name, base, nets: base + chosen([t - base for t in nets], gradient([0.2, 0.6], depth(name))),
    ),
    "sce of no entries": (
        "merge_method: sce\nparameters: {select_topk: 0}\n" + VECTORS % ("", "", ""),
        lambda name, base, nets: base,
    ),
    "sce of one model": (
        "merge_method: sce\nbase_model: base\nmodels: [{model: base}, {model: one}]\n",
        lambda name, base, nets: nets[0],
    ),
    "nearswap": (
        "merge_method: nearswap\nbase_model: base\nmodels: [{model: base}, {model: one}]\n"
        "parameters: {t: [{filter: mlp, value: [0, 0.04]}, {value: 0.02}]}\n",
        lambda name, base, nets: (
            base
            + (nets[0] - base)
            * ((0.04 * depth(name) if "mlp" in name else 0.02) / (nets[0] - base).abs().clamp(min=1e-6)).clamp(max=1)
        ),
    ),
    "ram": (
        "merge_method: ram\nparameters: {epsilon: 0.03}\n" + VECTORS % ("", "", ""),
        lambda name, base, nets: base + reinforced([t - base for t in nets], 0.03, 0.0, 0.0),
    ),
    "ramplus_tl": (
        "merge_method: ramplus_tl\nparameters: {epsilon: 0.03, r: 0.4, alpha: 1.5}\n" + VECTORS % ("", "", ""),
        lambda name, base, nets: base + reinforced([t - base for t in nets], 0.03, 0.4, 1.5),
    ),
    "arcee_fusion": (
        "merge_method: arcee_fusion\nbase_model: base\nmodels: [{model: one}]\n",
        lambda name, base, nets: fused(base, nets[0]),
    ),
    "arcee_fusion, the base second": (
        "merge_method: arcee_fusion\nbase_model: two\nmodels: [{model: one}, {model: two}]\n",
        lambda name, base, nets: fused(nets[1], nets[0]),
    ),
    "model_stock": (
        "merge_method: model_stock\n" + VECTORS % ("", "", ""),
        lambda name, base, nets: base + stock([t - base for t in nets]),
    ),
}


@pytest.mark.parametrize("name", METHODS)
def test_every_method_is_what_mergekit_defines(name: str) -> None:
    text, expected = METHODS[name]
    # These networks need no alignment, which two of the methods find out by themselves.
    found = merged(text if name in ("linear", "ties") else text + "regauge: {align: false}\n")
    networks = {folder: load(folder) for folder in ("base", "one", "two", "three")}
    for tensor, value in found.items():
        base, *nets = (networks[folder][tensor].double() for folder in networks)
        torch.testing.assert_close(value, expected(tensor, base, nets).float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("method", "seed"), [("dare_linear", 1), ("della_linear", 2)])
def test_entries_are_dropped_by_the_seed(method: str, seed: int) -> None:
    text = f"merge_method: {method}\nparameters: {{density: 0.5, epsilon: 0.1}}\n" + VECTORS % (*["weight: 1"] * 3,)
    text = text if "della" in method else text.replace(", epsilon: 0.1", "")
    text += "regauge: {align: false}\n"
    Path("recipe.yml").write_text(text)
    for out in ("a", "b"):
        main(["merge", "--recipe", "recipe.yml", "--seed", str(seed), "-o", out])
    main(["merge", "--recipe", "recipe.yml", "--seed", "9", "-o", "c"])
    assert Path("a/model.safetensors").read_bytes() == Path("b/model.safetensors").read_bytes()
    assert Path("a/model.safetensors").read_bytes() != Path("c/model.safetensors").read_bytes()


@pytest.mark.parametrize("method", ["dare_linear", "dare_ties", "della", "della_linear"])
def test_what_is_kept_at_random_is_enlarged_unless_the_recipe_says_no(method: str) -> None:
    text = f"merge_method: {method}\nbase_model: base\nmodels: [{{model: one}}]\nregauge: {{align: false}}\n"
    text += "parameters: {weight: 1, density: 0.5, rescale: %s}\n"
    plain, enlarged, base, one = merged(text % "false"), merged(text % "true", "out2"), load("base"), load("one")
    for name, tensor in plain.items():
        kept = ~torch.isclose(tensor, base[name], rtol=0, atol=1e-7)
        torch.testing.assert_close(tensor, torch.where(kept, one[name], base[name]))
        assert torch.equal(kept, ~torch.isclose(enlarged[name], base[name], rtol=0, atol=1e-7))
        factors = ((enlarged[name] - base[name]).double() / (one[name] - base[name]))[kept]
        # From 1 / (density + epsilon) to 1 / (density - epsilon), or 1 / density; vectors of one entry have the latter.
        low, high = (1 / 0.65, 1 / 0.35) if "della" in method else (2.0, 2.0)
        assert bool(((factors > low - 0.02) & (factors < high + 0.02)).all())
        assert kept.numel() < 64 or 0.3 < float(kept.double().mean()) < 0.7


IDLE = {
    "merge_method: slerp\nbase_model: one\nparameters: {t: 0.5}\n"
    "models: [{model: one, parameters: {weight: 0.6}}, {model: two}]\n": "weight changes nothing: slerp takes t",
    "merge_method: karcher\nparameters: {density: 2}\nmodels: [{model: one}, {model: two}]\n": (
        "density changes nothing: karcher takes max_iter, tol"
    ),
    "merge_method: linear\nparameters: {weight: 0.5}\nslices:\n"
    "  - {sources: [{model: one, layer_range: [0, 3]}, {model: two, layer_range: [0, 3]}], residual_weight: 0.2}\n": (
        "residual_weight changes nothing, as in mergekit 0.1.5"
    ),
    "merge_method: nuslerp\nparameters: {weight: 1, nuslerp_row_wise: true}\nmodels: [{model: one}, {model: two}]\n": (
        "nuslerp_row_wise changes nothing: a tensor has one angle unless nuslerp_flatten is false"
    ),
    "merge_method: task_arithmetic\nparameters: {weight: 1, rescale: true, int8_mask: true}\n"
    + VECTORS % ("", "", ""): ("rescale changes nothing: task_arithmetic drops no entries"),
}


@pytest.mark.parametrize("text", IDLE)
def test_what_changes_nothing_is_told(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    merged(text + "regauge: {align: false}\n")
    said = capsys.readouterr()
    assert IDLE[text] in " ".join((said.out + said.err).split())


def test_layers_are_stacked_and_the_result_loads() -> None:
    found = merged(
        "merge_method: passthrough\nslices:\n"
        "  - sources: [{model: one, layer_range: [0, 2]}]\n"
        "  - sources:\n      - model: two\n        layer_range: [1, 3]\n"
        "        parameters: {scale: [{filter: down_proj, value: 0.5}, {value: 1}]}\n"
    )
    one, two = load("one"), load("two")
    for name, tensor in found.items():
        if name.startswith("model.layers"):
            number, _, rest = name.removeprefix("model.layers.").partition(".")
            source, old = (one, int(number)) if int(number) < 2 else (two, int(number) - 1)
            factor = 0.5 if "down_proj" in name and int(number) >= 2 else 1.0
            torch.testing.assert_close(tensor, factor * source[f"model.layers.{old}.{rest}"])
    assert torch.equal(found["model.embed_tokens.weight"], one["model.embed_tokens.weight"])
    assert torch.equal(found["lm_head.weight"], two["lm_head.weight"])
    assert open_clean("out").config.num_hidden_layers == 4


@pytest.mark.parametrize("name", ["deepseek v3", "gpt neox", "mixtral"])
def test_stacks_of_other_families_are_refused_or_load(name: str) -> None:
    """Names in files differ from names in modules. DeepSeek's first layer is of another kind than all other layers."""
    model = CASES[name].save(Path("a"), 0, shard="4KB")
    slices = "".join(f"  - sources: [{{model: a, layer_range: [0, {end}]}}]\n" for end in (1, 2))
    Path("r.yml").write_text(f"merge_method: passthrough\nslices:\n{slices}")
    if name == "deepseek v3":
        with pytest.raises(SystemExit):
            main(["merge", "--recipe", "r.yml", "-o", "out"])
        assert not Path("out").exists()
        return
    main(["merge", "--recipe", "r.yml", "-o", "out"])
    open_clean("out", type(model))


STACKS = {
    "t5": ("decoder", "encoder"),
    "bart": ("encoder", "decoder"),
    "whisper": ("decoder", "encoder"),
    "clip": ("text_model", "vision_model"),
    "llava": ("language_model", "vision_tower"),
}


@pytest.mark.parametrize("name", STACKS)
def test_stacks_are_cut_by_their_names(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One stack gets a second copy of its first layer, from another network. All other stacks stay, and the result
    loads.
    """
    model = CASES[name].save(Path("a"), 0, shard="8KB")
    CASES[name].save(Path("b"), 1)
    stack, other = STACKS[name]
    # The first layers of T5 hold the positions of all.
    first, last = (2, 1) if name == "t5" else (1, 0)
    ends = f"[0, {first}]", f"[{last}, {last + 1}]"
    parts = [f"{{sources: [{{model: {folder}, layer_range: {end}}}]}}" for folder, end in zip("ab", ends, strict=True)]
    slices = f"slices: [{', '.join(parts)}]"
    method = "merge_method: passthrough\nregauge: {align: false}\n"
    Path("r.yml").write_text(f"{method}{slices}\n")
    with pytest.raises(SystemExit):
        main(["merge", "--recipe", "r.yml", "-o", "out"])
    assert "name the one that is cut under 'modules', such as modules: {" in capsys.readouterr().err
    Path("r.yml").write_text(f"{method}modules: {{{stack}: {{{slices}}}}}\n")
    main(["merge", "--recipe", "r.yml", "-o", "out"])
    result, report = type(model).from_pretrained("out", output_loading_info=True)
    assert not any(report.values()), report
    one, two = model.state_dict(), type(model).from_pretrained("b").state_dict()
    found, layers = result.state_dict(), LayerStack.of(one, "a", stack)
    assert LayerStack.of(found, "out", stack).count == first + 1
    assert LayerStack.of(found, "out", other) == LayerStack.of(one, "a", other)
    for key, tensor in found.items():
        place = layers.split(key)
        if place is not None:
            number, source = (place[0], one) if place[0] < first else (last, two)
            assert torch.equal(tensor, source[f"{layers.prefix}{number}{place[1]}"])
        elif f".{stack}." not in f".{key}" and key != "lm_head.weight":  # in LLaVA's files it is in the language model
            assert torch.equal(tensor, one[key])


def test_slices_have_bases_of_their_own() -> None:
    found = merged(
        "merge_method: task_arithmetic\nparameters: {weight: 0.5}\nregauge: {align: false}\nslices:\n"
        "  - base_model: base\n"
        "    sources: [{model: one, layer_range: [0, 2]}, {model: base, layer_range: [0, 2]}]\n"
        "  - base_model: one\n"
        "    sources: [{model: three, layer_range: [2, 3]}, {model: one, layer_range: [2, 3]}]\n"
    )
    networks = {folder: load(folder) for folder in ("base", "one", "three")}
    for name, tensor in found.items():
        is_last = name.startswith(("model.layers.2.", "model.norm", "lm_head"))
        start, other = ("one", "three") if is_last else ("base", "one")
        torch.testing.assert_close(tensor, (networks[start][name] + networks[other][name]) / 2)
    text = "merge_method: slerp\nbase_model: one\nparameters: {t: 0.3}\nregauge: {align: false}\nslices:\n  - %s"
    text += "sources: [{model: one, layer_range: [0, 3]}, {model: two, layer_range: [0, 3]}]\n"
    turned, same = merged(text % "base_model: two\n    ", "b"), merged(text.replace("0.3", "0.7") % "", "c")
    for name, tensor in turned.items():
        torch.testing.assert_close(tensor, same[name])


def test_the_only_stack_of_layers_is_called_default() -> None:
    listed = "{slices: [{sources: [{model: one, layer_range: [1, 3]}]}]}"
    one = merged(f"merge_method: passthrough\nmodules: {{default: {listed}}}\n")
    other = merged("merge_method: passthrough\nslices: [{sources: [{model: one, layer_range: [1, 3]}]}]\n", "other")
    assert one.keys() == other.keys()
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_slices_are_merged_by_depth_within_the_slice() -> None:
    found = merged(
        "merge_method: slerp\nbase_model: one\nparameters: {t: [0, 1]}\nslices:\n"
        "  - sources: [{model: one, layer_range: [0, 2]}, {model: two, layer_range: [1, 3]}]\n"
        "  - sources: [{model: one, layer_range: [2, 3]}, {model: two, layer_range: [0, 1]}]\n"
        "    parameters: {t: 0.5}\n"
    )
    one, two = load("one"), load("two")
    name = "model.layers.{}.mlp.up_proj.weight"
    torch.testing.assert_close(found[name.format(0)], one[name.format(0)])
    torch.testing.assert_close(found[name.format(1)], two[name.format(2)])
    halfway = arc(one[name.format(2)].double(), two[name.format(0)].double(), 0.5).float()
    torch.testing.assert_close(found[name.format(2)], halfway)


def logits(folder: str) -> Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    tokens = torch.randint(3, 24, (2, 6), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found: Tensor = model(tokens).logits
    return found


def move(source: str, out: str) -> None:
    """Return a network that was moved along its orbit."""
    main(["discover", "one", "-o", "symmetry.json"])
    checkpoint = Checkpoint.open(source)
    symmetry = rg.Symmetry.from_json(Path("symmetry.json").read_text()).bind(checkpoint.params)
    element = symmetry.random(torch.Generator().manual_seed(0), PARTS)  # parents are matched as they are stored
    model = build(0)
    model.load_state_dict(symmetry.act(element, checkpoint.params))
    model.save_pretrained(out)


MEAN = "merge_method: linear\nparameters: {weight: 1}\nmodels: [{model: one}, {model: %s}]\n"


def test_parents_are_aligned_where_they_differ(capsys: pytest.CaptureFixture[str]) -> None:
    move("one", "moved")
    merged(MEAN % "moved")
    said = capsys.readouterr().out
    assert "moved is aligned to one" in said
    expected = logits("one")
    assert float((logits("out") - expected).abs().max()) < 1e-5 * float(expected.abs().max())
    merged(MEAN % "moved" + "regauge: {align: false}\n", "apart")
    assert float((logits("apart") - expected).abs().max()) > 0.1 * float(expected.abs().max())
    merged(MEAN % "two", "tuned")
    assert "two needs no alignment, because its units correspond to those of one" in capsys.readouterr().out
    merged(MEAN % "two" + "regauge: {align: false}\n", "same")
    assert all(torch.equal(tensor, load("same")[name]) for name, tensor in load("tuned").items())
    merged(MEAN % "stranger", "far")
    assert "stranger is aligned to one" in capsys.readouterr().out


def test_the_output_says_where_it_comes_from() -> None:
    merged(MEAN % "two" + "dtype: bfloat16\n")
    assert Path("out/recipe.yml").read_text() == Path("recipe.yml").read_text()
    found = read_provenance("out")
    assert found is not None
    hashes = {one["path"]: one["sha256"] for one in found["inputs"]}
    assert hashes["recipe.yml"] == {"recipe.yml": hash_file(Path("recipe.yml"))}
    assert hashes["one"]["model.safetensors"] == hash_file(Path("one/model.safetensors"))
    assert "weights" not in found["settings"]
    assert {tensor.dtype for tensor in load("out").values()} == {torch.bfloat16}
    assert '"dtype": "bfloat16"' in Path("out/config.json").read_text()
    assert transformers.AutoModelForCausalLM.from_pretrained("out", dtype="auto").dtype == torch.bfloat16


DTYPES = {
    "linear, the second wider": ("linear", "half one", "float32", "has float32, which holds all"),
    "linear, the first wider": ("linear", "one half", "float32", "has float32, which holds all"),
    "linear, said": ("linear\ndtype: bfloat16", "half one", "bfloat16", None),
    "linear, said at the end": ("linear\nout_dtype: float16", "one half", "float16", None),
    "linear, alike": ("linear", "half half2", "bfloat16", None),
    "slerp of a narrow base": ("slerp\nbase_model: half", "one half", "float32", "has float32, which holds all"),
    "slerp of a wide base": ("slerp\nbase_model: one", "one half", "float32", "has float32, which holds all"),
    "task_arithmetic": ("task_arithmetic\nbase_model: half", "one", "float32", "has float32, which holds all"),
}


@pytest.mark.parametrize("name", DTYPES)
def test_dtypes_that_differ_are_told(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    method, models, dtype, told = DTYPES[name]
    for source, out in (("two", "half"), ("three", "half2")):
        transformers.AutoModelForCausalLM.from_pretrained(source).bfloat16().save_pretrained(out)
    parameter = "t: 0.5" if "slerp" in method else "weight: 1"
    listed = ", ".join(f"{{model: {model}}}" for model in models.split())
    text = f"merge_method: {method}\nmodels: [{listed}]\nparameters: {{{parameter}}}\n"
    found = merged(text + "regauge: {align: false}\n")
    assert {str(tensor.dtype) for tensor in found.values()} == {f"torch.{dtype}"}
    assert transformers.AutoModelForCausalLM.from_pretrained("out", dtype="auto").dtype == getattr(torch, dtype)
    said = " ".join(capsys.readouterr().err.split())
    assert ("differ in dtype" in said) == (told is not None)
    if told is not None:
        assert "half in bfloat16" in said
        assert f"the result {told}: write dtype in the recipe to choose" in said


def test_an_option_chooses_the_dtype_where_the_recipe_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    transformers.AutoModelForCausalLM.from_pretrained("two").bfloat16().save_pretrained("half")
    Path("recipe.yml").write_text(MEAN % "half")
    main(["merge", "--recipe", "recipe.yml", "-o", "out", "--dtype", "float16"])
    assert {tensor.dtype for tensor in load("out").values()} == {torch.float16}
    assert "differ in dtype" not in capsys.readouterr().err


def test_slices_of_a_single_model_are_taken_over() -> None:
    found = merged(
        "merge_method: slerp\nbase_model: one\nparameters: {t: 0.5}\nregauge: {align: false}\nslices:\n"
        "  - sources: [{model: one, layer_range: [0, 1]}, {model: two, layer_range: [0, 1]}]\n"
        "  - sources: [{model: two, layer_range: [1, 2]}]\n"
    )
    name = "model.layers.{}.mlp.up_proj.weight"
    one, two = load("one"), load("two")
    halfway = arc(one[name.format(0)].double(), two[name.format(0)].double(), 0.5).float()
    torch.testing.assert_close(found[name.format(0)], halfway)
    assert torch.equal(found[name.format(1)], two[name.format(1)])


LINEAR = "merge_method: linear\nmodels:\n  - model: one\n    parameters: {weight: 1}\n  - model: two\n"
FAULTS = {
    "merge_method: magic\nmodels: [{model: one}]": "line 1: the merge method 'magic' is unknown; choose from linear",
    LINEAR: "line 5: linear needs 'weight' for every model",
    LINEAR + "    parameters: {weight: 1, speed: 2}": "line 6: 'speed' is unknown in the parameters of linear",
    "merge_method: ties\nparameters: {rescale_norm: l3, weight: 1}\n" + VECTORS % ("", "", ""): "is 'l3'; there are l1",
    "merge_method: slerp\nbase_model: one\nmodels: [{model: one, parameters: {t: 1}}, {model: two}]": (
        "'t' is unknown in a model's parameters"
    ),
    LINEAR + "    parameters: {weight: heavy}": "line 6: 'weight' is 'heavy', but must be a finite number",
    LINEAR + "parameters: {weight: 1}\nspeed: 3": "line 7: 'speed' is unknown in the recipe; choose from",
    LINEAR + "parameters: {weight: 1}\ndtype: int4": "line 7: 'dtype' is 'int4'; there are float16",
    LINEAR + "parameters: {weight: 1}\nregauge: {align: perhaps}": "line 7: 'align' is 'perhaps'",
    LINEAR
    + "parameters: {weight: 1}\nchat_template: alpacas": "line 7: 'chat_template' is 'alpacas'; there can be auto, ",
    LINEAR + "parameters: {weight: 1}\nmerge_method: linear": "line 7: 'merge_method' occurs twice",
    LINEAR
    + "parameters: {weight: 1}\ntokenizer: {pad_to_multiple_of: 1.5}": "line 7: 'pad_to_multiple_of' is 1.5, but",
    LINEAR + "parameters: {weight: [{filter: mlp, value: 1}]}": "no filter matches this tensor",
    LINEAR.replace("two", "meta/llama-9"): "fetch it, since regauge does not: hf download meta/llama-9 --local-dir",
    LINEAR.replace("two", "/abs/two"): "no checkpoint '/abs/two'; check the path; give folders relative to the recipe",
    LINEAR.replace("two", "one"): "a model occurs twice",
    "merge_method: ties\nmodels: [{model: one}]": "line 1: the method ties needs a 'base_model'",
    "merge_method: multislerp\n" + MODELS % ("weight: 1", "weight: -1", "weight: 0"): "sum to 0 and cannot be normal",
    "merge_method: passthrough\nslices: [{sources: [{model: one, layer_range: [0, 9]}]}]": "but one has 3",
    "merge_method: passthrough\nslices: [{sources: [{model: one, layer_range: [2, 1]}]}]": "'layer_range' is [2.0",
    "merge_method: slerp\nbase_model: one\nmodels: [{model: one}, {model: two}]": "slerp needs the parameter 't'",
    "merge_method: slerp\nbase_model: base\nmodels: [{model: one}, {model: two}]\nparameters: {t: 0.5}": (
        "line 3: slerp combines at most 2 models here, but there are 3 (the base is one, too)"
    ),
    "merge_method: slerp\nmodels: [{model: one}, {model: two}]\nparameters: {t: 0.5}": "slerp needs a 'base_model'",
    "merge_method: linear\nbase_model: base\nmodels: [{model: one, parameters: {weight: 1}}]": (
        "line 3: linear needs 'weight' for every model (the base is one, too)"
    ),
    "merge_method: passthrough\nbase_model: base\nmodels: [{model: one}]": "passthrough combines at most 1 model here",
    "merge_method: nuslerp\nbase_model: base\nmodels: [{model: one}]\nparameters: {weight: 1}": "there are 1",
    "merge_method: nuslerp\nparameters: {weight: 1}\n" + MODELS % ("", "", ""): "combines at most 2 models here",
    "merge_method: nearswap\nbase_model: base\nmodels: [{model: one}]": "nearswap needs the parameter 't'",
    "merge_method: nearswap\nparameters: {t: 1}\n" + VECTORS % ("", "", ""): "nearswap combines at most 1 model here",
    "merge_method: arcee_fusion\n" + VECTORS % ("", "", ""): "arcee_fusion combines at most 2 models here",
    "merge_method: arcee_fusion\nmodels: [{model: one}, {model: two}]": "arcee_fusion needs a 'base_model'",
    "merge_method: sce\nmodels: [{model: one}, {model: two}]": "sce needs a 'base_model'",
    "merge_method: sce\nparameters: {select_topk: 2}\n" + VECTORS % ("", "", ""): "must be a share",
    "merge_method: model_stock\nbase_model: base\nmodels: [{model: one}]": "combines at least 2 models here",
    "merge_method: task_arithmetic\nparameters: {weight: 1}\nmodels: [{model: one}]": "needs a 'base_model'",
    "merge_method: linear\n" + MODELS % ("weight: 1", "weight: -1", "weight: 0"): "sum to 0 and cannot be normalized",
    "merge_method: della\nparameters: {weight: 1, density: 0.66, epsilon: 1.35}\n" + VECTORS % ("", "", ""): (
        "the density 0.66 with the epsilon 1.35 makes probabilities from -0.69 to 2.01, but both must lie between"
    ),
    "merge_method: della_linear\nparameters: {weight: 1, density: 0.85}\n" + VECTORS % ("", "", ""): (
        "makes probabilities from 0.7 to 1, but both must lie between 0 and 1"
    ),
    "merge_method: della\nparameters: {weight: 1, density: 0.1}\n" + VECTORS % ("", "", ""): "from -0.05 to 0.25",
    "merge_method: ties\nparameters: {weight: 1, density: 1.5}\n" + VECTORS % ("", "", ""): "must be a share",
    "merge_method: breadcrumbs\nparameters: {weight: 1, gamma: 2}\n" + VECTORS % ("", "", ""): "must be a share",
    "models: [1, 2": "is no YAML file",
    "merge_method: linear\nmodels: [{model: &x {model: *x}}]": "refers to itself",
    "- linear": "'the recipe' holds a list, but must hold keys and values",
    "": "is empty",
}


AT_LAST = "sum to 0|no filter|at least 2 models|must lie between|needs a 'base_model'"
LATE = [text for text, said in FAULTS.items() if re.search(AT_LAST, said)]


@pytest.mark.parametrize("text", FAULTS)
def test_what_is_not_understood_is_refused_by_its_line(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        # What is refused only when tensors are merged needs no alignment before it.
        merged(f"{text.rstrip()}\nregauge: {{align: false}}\n" if text in LATE else text)
    assert stop.value.code == 2
    assert FAULTS[text] in capsys.readouterr().err
    assert not list(Path().glob("out*"))


def test_folders_seen_from_the_place_of_the_command_are_named_as_the_recipe_sees_them(
    refused: Callable[..., str],
) -> None:
    Path("recipes").mkdir()
    Path("recipes/mine.yml").write_text(MEAN % "two")
    told = refused("merge", "--recipe", "recipes/mine.yml", "-o", "out")
    assert "there is no folder 'recipes/one', as folders are relative to the recipe: write '../one'" in told


@pytest.mark.parametrize("options", [["one"], ["--weights", "1"], ["--base", "base"], ["--rule", "ties"]])
def test_a_recipe_leaves_nothing_to_options(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    Path("recipe.yml").write_text(MEAN % "two")
    with pytest.raises(SystemExit):
        main(["merge", *options, "--recipe", "recipe.yml", "-o", "out"])
    assert "the recipe says what is merged and how" in capsys.readouterr().err


@pytest.mark.parametrize("align", ["false", "auto"])
def test_an_interrupted_run_goes_on_with_the_same_recipe_alone(
    align: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = f"merge_method: linear\nparameters: {{weight: 1}}\nregauge: {{align: {align}}}\n"
    text += "models: [{model: two}, {model: one}]\n"
    expected = merged(text, "whole")
    written = []

    def stop(self: Assembly, name: str) -> Any:
        if len(written) == 20:
            raise KeyboardInterrupt
        written.append(name)
        return pieces(self, name)

    pieces = Assembly.pieces
    monkeypatch.setattr(Assembly, "pieces", stop)
    with pytest.raises(SystemExit):
        merged(text)
    monkeypatch.setattr(Assembly, "pieces", pieces)
    assert Path("out.partial").exists()
    Path("recipe.yml").write_text(text.replace("weight: 1", "weight: [1, 2]"))
    with pytest.raises(SystemExit):
        main(["merge", "--recipe", "recipe.yml", "-o", "out", "--resume"])
    assert "had other inputs or settings (recipe)" in capsys.readouterr().err
    Path("recipe.yml").write_text(text)
    main(["merge", "--recipe", "recipe.yml", "-o", "out", "--resume"])
    assert all(torch.equal(tensor, load("out")[name]) for name, tensor in expected.items())
    files = {path.name for path in Path("whole").iterdir()}
    assert {path.name for path in Path("out").iterdir()} == files
    assert all(Path("whole", name).read_bytes() == Path("out", name).read_bytes() for name in files)


def test_paths_are_seen_from_the_recipe() -> None:
    Path("deep").mkdir()
    Path("deep/r.yml").write_text((MEAN % "two").replace("one", "../one").replace("two", "../two"))
    assert read_recipe(Path("deep/r.yml")).models == (Path("deep/../one"), Path("deep/../two"))


def test_python_merges_as_the_command_does() -> None:
    text = (
        "merge_method: ties\nbase_model: ./base\nmodels: [{model: ./one}, {model: ./two}]\nparameters: {weight: 0.5}\n"
    )
    expected = merged(text)
    planned = plan_recipe("recipe.yml", "python")
    assert not Path("python").exists()
    assert sum(one.nbytes for one in planned.shards) == sum(tensor.nbytes for tensor in expected.values())
    result = rg.merging.merge_recipe("recipe.yml", "python")
    assert all(torch.equal(result.params[name], tensor) for name, tensor in expected.items())
    origin = read_provenance("python")
    assert origin is not None
    assert origin["command"] == "rg.merging.merge_recipe"

"""Networks by their histories, for `benchmarks/lineage_pairs.py`. A history is a list of steps, written as JSON.

The first step makes a network, such as `["train", 500, 0, 0]` (initialized with seed 500, trained on the first half of
the data in order 0). Each further step changes the network: `["tune", 0.1, 1, 7]`, `["move", 3, "bfloat16", null]`.
Some steps need another network, which is given by its history. Every network is written once to a folder.
"""

import copy
import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from aligned_strangers import loss, mix, noisy, rounded
from lineage_networks import BATCH, STEPS, Examples, Family, Params, halves, prune
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

import regauge as rg
from regauge.data.images import digits
from regauge.data.packaged import help_topics, windows
from regauge.nets.transformer import GPT, Llama, ViT

History = list[list[Any]]
BLOCKS = 3
"""The number of blocks of a network from which no block was dropped or doubled."""
WIDTH, HEADS, KEYS, CONTEXT, EXPERTS = 32, 4, 2, 32, 4
FAMILIES = ("MLP", "CNN", "ViT", "GPT", "Llama", "Mixture")
LANGUAGE = ("GPT", "Llama", "Mixture")


def stack(first: nn.Module, blocks: list[nn.Module], *rest: nn.Module) -> nn.Sequential:
    """Return a network whose repeated blocks are named `blocks.0`, `blocks.1` and so on."""
    parts: list[tuple[str, nn.Module]] = [("first", first), ("blocks", nn.Sequential(*blocks))]
    parts += [(f"rest{k}", one) for k, one in enumerate(rest[:-1])]
    return nn.Sequential(OrderedDict([*parts, ("head", rest[-1])]))


def dense(blocks: int, classes: int) -> nn.Module:
    """Return a network with hidden layers of 96 units with ReLU."""
    hidden: list[nn.Module] = [nn.Sequential(nn.Linear(96, 96), nn.ReLU()) for _ in range(blocks)]
    return stack(nn.Sequential(nn.Flatten(), nn.Linear(64, 96), nn.ReLU()), hidden, nn.Linear(96, classes))


def convolutional(blocks: int, classes: int) -> nn.Module:
    """Return a network of 3 x 3 convolutions with 24 channels, batch normalization and biases."""

    def layer(before: int, after: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU())

    hidden = [layer(24, 24) for _ in range(blocks)]
    return stack(layer(1, 24), hidden, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, classes))


class Mixture(nn.Module):
    """A Mixtral language model of transformers, from tokens to logits, with two of four experts for each token."""

    def __init__(self, symbols: int, blocks: int) -> None:
        super().__init__()
        from transformers import MixtralConfig, MixtralForCausalLM

        config = MixtralConfig(
            vocab_size=symbols, hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=blocks,
            num_attention_heads=HEADS, num_key_value_heads=KEYS, num_local_experts=EXPERTS, num_experts_per_tok=2,
            max_position_embeddings=CONTEXT, attn_implementation="eager", use_cache=False,
        )  # fmt: skip
        self.net = MixtralForCausalLM(config)

    def train(self, mode: bool = True) -> "Mixture":
        """In training, loop over experts, which is faster. In evaluation, apply all experts at once, which can be
        traced.
        """
        self.net.set_experts_implementation("eager" if mode else "batched_mm")
        return super().train(mode)

    def reset_parameters(self) -> None:
        """Sample the parameters that do not belong to torch's layers: experts, routers and gains."""
        for tensor in self.parameters():
            nn.init.ones_(tensor) if tensor.ndim == 1 else nn.init.normal_(tensor, std=tensor.shape[-1] ** -0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.net(tokens, use_cache=False).logits


@cache
def data(family: str) -> tuple[Examples, Examples]:
    """Return examples for training and for tests."""
    if family in LANGUAGE:
        text = help_topics()
        return windows(text.train, CONTEXT), windows(text.validation, CONTEXT)
    images = digits()
    return (images.train_images, images.train_labels), (images.test_images, images.test_labels)


@cache
def family_of(name: str, blocks: int = BLOCKS, added: int = 0) -> Family:
    """Return an architecture with another number of blocks, and with additional rows for symbols or classes."""
    symbols, classes = len(help_topics().symbols) + added, 10 + added
    makers: dict[str, tuple[float, Callable[[], nn.Module]]] = {
        "MLP": (2e-3, lambda: dense(blocks, classes)),
        "CNN": (3e-3, lambda: convolutional(blocks, classes)),
        "ViT": (2e-3, lambda: ViT(8, 2, classes=classes, width=WIDTH, layers=blocks, heads=HEADS)),
        "GPT": (3e-3, lambda: GPT(symbols, CONTEXT, width=WIDTH, layers=blocks, heads=HEADS)),
        "Llama": (3e-3, lambda: Llama(symbols, width=WIDTH, layers=blocks, heads=HEADS, kv_heads=KEYS)),
        "Mixture": (3e-3, lambda: Mixture(symbols, blocks)),
    }
    lr, make = makers[name]
    train, test = data(name)
    return Family(name, make().eval(), lr, halves(*train), test)


def family_after(name: str, history: History) -> Family:
    """Return the architecture at the end of a history."""
    blocks, added = BLOCKS, 0
    for step, *rest in history:
        blocks += {"drop": -1, "double": 1}.get(step, 0)
        added += rest[0] if step == "extend" else 0
    return family_of(name, blocks, added)


def blocks_of(module: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks of a network."""
    return list(module.net.model.layers if isinstance(module, Mixture) else module.blocks)  # type: ignore[arg-type, union-attr]


@dataclass(frozen=True)
class Workshop:
    """Networks of one family, made by their histories and stored in a folder."""

    name: str
    folder: Path

    def __call__(self, history: History) -> Params:
        """Return the network with a history."""
        digest = hashlib.sha256(json.dumps(history).encode()).hexdigest()[:20]
        path = self.folder / f"{self.name} {digest}.safetensors"
        if not path.exists():
            made = self._make(history)
            partial = path.with_suffix(".partial")
            save_file({n: t.detach().clone().contiguous() for n, t in made.items()}, partial)
            partial.rename(path)
        return load_file(path)

    def _make(self, history: History) -> Params:
        *before, (step, *rest) = history
        family = family_after(self.name, history)
        if step in FIRST:
            return FIRST[step](self, family, *rest)
        return NEXT[step](self, family, self(before), *rest)


def train(shop: Workshop, family: Family, seed: int, half: int, order: int) -> Params:
    """Initialize a network with a seed, and train it on one half of the data in some order."""
    return family.train(family.initialize(seed), half, order, STEPS)


def distill(shop: Workshop, family: Family, teacher: History, seed: int, order: int) -> Params:
    """Train a network with another initialization to reproduce a teacher's outputs."""
    return family.train(family.initialize(seed), 0, order, STEPS, teacher=shop(teacher))


def mimic(shop: Workshop, family: Family, target: History, seed: int, order: int) -> Params:
    """Train a network with another initialization until the outputs of its blocks equal those of the target's
    blocks.
    """
    module, teacher = copy.deepcopy(family.module), copy.deepcopy(family.module)
    module.load_state_dict(family.initialize(seed))
    teacher.load_state_dict(shop(target))

    def activations(one: nn.Module, inputs: Tensor) -> list[Tensor]:
        seen: list[Tensor] = []
        hooks = [
            block.register_forward_hook(lambda _m, _i, out: seen.append(out[0] if isinstance(out, tuple) else out))
            for block in blocks_of(one)
        ]
        seen.append(one(inputs))
        for hook in hooks:
            hook.remove()
        return seen

    def objective(inputs: Tensor, _targets: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = activations(teacher, inputs)
        pairs = zip(activations(module.train(), inputs), wanted, strict=True)
        return sum((functional.mse_loss(x, y) / y.var() for x, y in pairs), torch.tensor(0.0))

    return minimize(family, module, list(module.parameters()), objective, 0, order, STEPS)


def tune(shop: Workshop, family: Family, params: Params, amount: float, half: int, order: int) -> Params:
    """Continue training for a share of a whole training."""
    return family.train(params, half, order, max(1, round(amount * STEPS)))


def tune_away(shop: Workshop, family: Family, params: Params, amount: float, half: int, order: int) -> Params:
    """Continue training with an additional loss that moves matrices away from the original ones: the mean squared
    cosine.
    """
    module = copy.deepcopy(family.module)
    module.load_state_dict(params)
    matrices = {n: params[n].flatten() for n, t in module.named_parameters() if t.ndim > 1}

    def objective(inputs: Tensor, targets: Tensor) -> Tensor:
        now = dict(module.named_parameters())
        near = [functional.cosine_similarity(now[n].flatten(), old, dim=0).square() for n, old in matrices.items()]
        return loss(module.train()(inputs), targets) + torch.stack(near).mean()

    return minimize(family, module, list(module.parameters()), objective, half, order, round(amount * STEPS))


def lora(
    shop: Workshop, family: Family, params: Params, rank: int, amount: float, half: int, order: int
) -> Params:  # fmt: skip
    """Train low-rank products that are added to the matrices of all blocks, and merge them."""
    module, source = family.module, torch.Generator().manual_seed(order)
    inside = [n for n in params if any(part.isdigit() for part in n.split("."))]
    shapes = {n: params[n].flatten(1).shape for n in inside if params[n].ndim in (2, 4)}
    left = {n: torch.zeros(rows, rank, requires_grad=True) for n, (rows, _) in shapes.items()}
    right = {n: (torch.randn(rank, size, generator=source) / rank).requires_grad_() for n, (_, size) in shapes.items()}

    def merged() -> Params:
        return params | {n: params[n] + (left[n] @ right[n]).view_as(params[n]) for n in shapes}

    def objective(inputs: Tensor, targets: Tensor) -> Tensor:
        return loss(functional_call(module.eval(), merged(), (inputs,)), targets)

    minimize(family, module, [*left.values(), *right.values()], objective, half, order, round(amount * STEPS))
    return {n: t.detach() for n, t in merged().items()}


def minimize(
    family: Family,
    module: nn.Module,
    free: list[Any],
    objective: Callable[[Tensor, Tensor], Tensor],
    half: int,
    order: int,
    steps: int,
) -> Params:
    """Minimize an objective over batches of one half of the data, and return the module's tensors."""
    generator = torch.Generator().manual_seed(order)
    inputs, targets = family.halves[half]
    optimizer = torch.optim.Adam(free, lr=family.lr)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = family.lr * (1 - step / steps)
        rows = torch.randint(len(inputs), (BATCH,), generator=generator)
        optimizer.zero_grad()
        objective(inputs[rows], targets[rows]).backward()
        optimizer.step()
    return {n: t.detach().clone() for n, t in module.eval().state_dict().items()}


def extend(shop: Workshop, family: Family, params: Params, number: int, seed: int) -> Params:
    """Add rows for new symbols or classes, sampled like an initialization."""
    fresh = family.initialize(seed)
    return {n: torch.cat([t, fresh[n][len(t) :]]) if fresh[n].shape != t.shape else t for n, t in params.items()}


def repeat(params: Params, order: list[int]) -> Params:
    """Return a network with its blocks in another order, where some blocks are dropped or repeated."""
    found = Params()
    for name, tensor in params.items():
        words = name.split(".")
        at = next((k for k, word in enumerate(words) if word in ("blocks", "layers")), None)
        if at is None:
            found[name] = tensor
            continue
        for new, old in enumerate(order):
            if words[at + 1] == str(old):
                found[".".join([*words[: at + 1], str(new), *words[at + 2 :]])] = tensor
    return found


def drop(shop: Workshop, family: Family, params: Params, block: int) -> Params:
    """Drop a block."""
    return repeat(params, [k for k in range(BLOCKS) if k != block])


def double(shop: Workshop, family: Family, params: Params, block: int) -> Params:
    """Repeat a block."""
    return repeat(params, sorted([*range(BLOCKS), block]))


def move(
    shop: Workshop, family: Family, params: Params, seed: int, dtype: str, parts: list[str] | None, times: int = 1
) -> Params:
    """Transform by random elements of the group or of some of its parts, and store in a format."""
    generator = torch.Generator().manual_seed(seed)
    moved = {n: t.double() if t.is_floating_point() else t for n, t in params.items()}
    for _ in range(times):
        moved = family.symmetry.act(family.symmetry.random(generator, parts), moved)
    return {n: t.to(getattr(torch, dtype)) if t.is_floating_point() else t for n, t in moved.items()}


def align(shop: Workshop, family: Family, params: Params, target: History, method: str, is_partly: bool) -> Params:
    """Align to another network by weights or by activations, only in every second group if requested."""
    inputs, targets = family.halves[0]
    task = rg.Task(family.module, [(inputs[:200], targets[:200])], criterion=loss)
    is_weighed = method == "weights"
    found = rg.align(
        shop(target),
        params,
        family.symmetry,
        method=rg.WeightMatching() if is_weighed else rg.ActivationMatching(),
        task=None if is_weighed else task,
        generator=torch.Generator().manual_seed(0),
    )
    element, blank = found.element, found.symmetry.identity()
    for group in found.symmetry.groups[1::2] if is_partly else ():
        element = element.replace(group.name, blank[group.name])
    return found.symmetry.act(element, params)


FIRST: dict[str, Callable[..., Params]] = {"train": train, "distill": distill, "mimic": mimic}
NEXT: dict[str, Callable[..., Params]] = {
    "tune": tune,
    "tune away": tune_away,
    "lora": lora,
    "extend": extend,
    "drop": drop,
    "double": double,
    "move": move,
    "align": align,
    "prune": lambda _shop, _family, params, share: prune(params, share),
    "round": lambda _shop, _family, params, bits: rounded(params, bits),
    "noise": lambda _shop, _family, params, share, seed: noisy(params, share, seed),
    "mix": lambda shop, _family, params, share, other: mix(params, shop(other), share),
}

"""Scores of other methods for two networks, for `benchmarks/lineage_pairs.py`, implemented as described in their
papers.

`fingerprint_similarity` is AWM (Zeng et al., 2025, arXiv 2510.06738): a signed assignment of the columns of both
embeddings, followed by the unbiased linear CKA of query and key matrices. `match_rows` and `match_blocks` are two tests
of Zhu et al. (2025, arXiv 2502.12292). `match_rows` tests the order of the best matching rows (algorithms 2 to 4).
`match_blocks` (MATCH) tests, for gated blocks, whether gates and the values that they multiply are matched in the same
order. `kit_scores` calls cisco-ai-provenance-kit, if the environment variable `PROVENANCE_KIT` names the folder that
contains it:

    pip install --target FOLDER --no-deps --ignore-requires-python cisco-ai-provenance-kit
    pip install --target FOLDER --no-deps structlog pydantic-settings python-dotenv typing-inspection
"""

import importlib
import math
import os
import sys
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from lineage_networks import Family, Params
from scipy.optimize import linear_sum_assignment
from scipy.stats import chi2, spearmanr
from torch import Tensor
from torch.func import functional_call
from torch.nn.functional import normalize

from regauge.data.packaged import help_topics

FEED_FORWARD = (".up.weight", "feed_forward.gate.weight", "experts.gate_up_proj")
NAMES = {
    "embedding.weight": "model.embed_tokens.weight",
    "blocks.": "model.layers.",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.out": "self_attn.o_proj",
    "feed_forward.gate": "mlp.gate_proj",
    "feed_forward.up": "mlp.up_proj",
    "feed_forward.down": "mlp.down_proj",
    "attention_norm": "input_layernorm",
    "feed_forward_norm": "post_attention_layernorm",
    "head.weight": "lm_head.weight",
}
"""Parts of parameter names, with the corresponding names in transformers."""


def find(params: Params, *endings: str) -> list[Tensor]:
    """Return the tensors whose names end in one of the given endings, in the order of the endings."""
    return [tensor.float() for name, tensor in params.items() if name.endswith(endings)]


def fingerprint_similarity(a: Params, b: Params) -> float | None:
    """Return AWM's similarity of two language models; None for other networks."""
    embeddings = [find(one, "embedding.weight", "embed_tokens.weight") for one in (a, b)]
    if not all(embeddings):
        return None
    shared = min(len(one[0]) for one in embeddings)
    x, y = (normalize(one[0][:shared], dim=0) for one in embeddings)
    near = x.T @ y
    _, order = linear_sum_assignment(-near.abs().numpy())
    signs = near[torch.arange(len(order)), torch.from_numpy(order)].sign()
    values = []
    for kind in ("query.weight", "key.weight"), ("q_proj.weight", "k_proj.weight"):
        for ending in kind:
            first, second = find(a, ending), [one[:, order] * signs for one in find(b, ending)]
            if first:
                table = torch.tensor([[unbiased_cka(p.T, q.T) for q in second] for p in first])
                rows, columns = linear_sum_assignment(-table.numpy())
                values.append(float(table[rows, columns].mean()))
    return sum(values) / len(values)


def unbiased_cka(x: Tensor, y: Tensor) -> float:
    """Return the linear CKA of two matrices of examples by features, by the unbiased estimate of Song et al. (2012)."""

    def dependence(k: Tensor, m: Tensor) -> Tensor:
        n = len(k)
        k, m = (one - one.diagonal().diag() for one in (k, m))
        middle = k.sum() * m.sum() / ((n - 1) * (n - 2)) - 2 * k.sum(0) @ m.sum(0) / (n - 2)
        return ((k * m).sum() + middle) / (n * (n - 3))

    left, right = x @ x.T, y @ y.T
    scale = dependence(left, left) * dependence(right, right)
    return float(dependence(left, right) / scale.clamp_min(1e-20).sqrt())


def match(x: Tensor, y: Tensor) -> Tensor:
    """Return the order of the rows of the second matrix that best matches the first matrix, by cosine."""
    near = normalize(x, dim=1) @ normalize(y, dim=1).T
    return torch.from_numpy(linear_sum_assignment(-near.numpy())[1])


def combine(p_values: list[float]) -> float:
    """Return the negative decimal logarithm of Fisher's combined p-value, at most 300."""
    statistic = -2 * sum(math.log(max(p, 1e-300)) for p in p_values)
    return min(300.0, -float(chi2.logsf(statistic, 2 * len(p_values))) / math.log(10))


def match_rows(a: Params, b: Params) -> float:
    """Test whether the best matching rows have the same indices. Return -log10 of the p-value."""
    found = []
    for name, x in a.items():
        is_hidden = name.endswith(FEED_FORWARD) or (("first" in name or "blocks" in name) and "feed" not in name)
        y = b.get(name)
        if y is not None and x.shape == y.shape and x.ndim > 1 and is_hidden and "attention" not in name:
            x, y = (one.float().flatten(0, 1) if name.endswith("gate_up_proj") else one.flatten(1) for one in (x, y))
            order = match(x, y)
            result = spearmanr(range(len(order)), order.numpy(), alternative="greater")
            found.append(float(result.pvalue))
    return combine(found)


def match_blocks(first: tuple[Family, Params], second: tuple[Family, Params]) -> float:
    """Test by MATCH whether gates and the values that they multiply are matched in the same order. Return -log10 of the
    p-value.

    Both networks read the same text. In a mixture of experts, all tokens pass through all experts.
    """
    seen = [gated(*side) for side in (first, second)]
    found = []
    for (gate, up), (other_gate, other_up) in zip(*seen, strict=False):
        one, two = match(gate, other_gate), match(up, other_up)
        found.append(float(spearmanr(one.numpy(), two.numpy(), alternative="greater").pvalue))
    return combine(found)


def gated(family: Family, params: Params) -> list[tuple[Tensor, Tensor]]:
    """Return the gates and the values that they multiply, `[unit, token]`, of each block."""
    seen: list[Tensor] = []
    parts = [m for n, m in family.module.named_modules() if n.endswith((".feed_forward", ".mlp"))]
    hooks = [one.register_forward_pre_hook(lambda _m, given: seen.append(given[0].flatten(0, -2))) for one in parts]
    with torch.no_grad():
        functional_call(family.module, params, (family.test[0][:20],))
    for hook in hooks:
        hook.remove()
    if fused := find(params, "experts.gate_up_proj"):
        halves = [one.chunk(2, dim=1) for one in fused]
        matrices = [(gate.flatten(0, 1), up.flatten(0, 1)) for gate, up in halves]
    else:
        matrices = list(zip(find(params, "ward.gate.weight"), find(params, "ward.up.weight"), strict=True))
    return [(gate @ x.T, up @ x.T) for (gate, up), x in zip(matrices, seen, strict=True)]


def kit_scores(first: tuple[Family, Params], second: tuple[Family, Params]) -> dict[str, float | None]:
    """Return the kit's score of the weights, and its final score, which is 1 for two equal configurations."""
    kit = load_kit()
    if kit is None:
        return {"kit": None, "gate": None}
    signals, scoring = kit
    symbols = list(map(str, help_topics().symbols))
    networks = [params for _, params in (first, second)]
    seen = [signals.extract_signals(renamed(one), configuration(one), vocab=symbols) for one in networks]
    parts = [getattr(signals, f"{name}_similarity")(*seen) for name in ("eas", "nlf", "lep", "end", "wvc")]
    score = float(scoring.compute_identity_score(*parts))
    is_one = configuration(first[1]) == configuration(second[1])
    return {"kit": score, "gate": 1.0 if is_one else score}


def configuration(params: Params) -> Any:
    """Return the part of a configuration that the kit reads."""
    embedding = find(params, "embedding.weight", "embed_tokens.weight")[0]
    layers = {part for name in params for part in name.split(".") if part.isdigit()}
    return SimpleNamespace(
        hidden_size=embedding.shape[1], num_hidden_layers=len(layers), vocab_size=len(embedding), model_type="llama"
    )


def renamed(params: Params) -> Params:
    """Return a network under the names of transformers."""
    result = Params()
    for name, tensor in params.items():
        new = name.removeprefix("net.")
        if new == name:  # No mixture, whose names are those of transformers.
            for old, other in NAMES.items():
                new = new.replace(old, other)
        result[new] = tensor
    return result


@cache
def load_kit() -> tuple[Any, Any] | None:
    """Return the kit's modules for signals and scores; None if the kit is not installed."""
    if "PROVENANCE_KIT" not in os.environ:
        return None
    sys.path.append(os.environ["PROVENANCE_KIT"])
    logs = importlib.import_module("structlog")
    logs.configure(wrapper_class=logs.make_filtering_bound_logger(50))
    names = ("provenancekit.core.signals.weight_signals", "provenancekit.core.scoring")
    return importlib.import_module(names[0]), importlib.import_module(names[1])

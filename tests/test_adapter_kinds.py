"""Kinds of adapters other than LoRA: merged by the formulas of their papers, and with the results of peft 0.21.2."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from regauge.checkpoints.checkpoint import Checkpoint, load
from regauge.checkpoints.formats.adapter_kinds import KINDS
from regauge.checkpoints.formats.adapters import read_factors
from regauge.checkpoints.writing import save

PREFIX = "base_model.model."
BASE = {
    "lin.weight": torch.sin(0.7 * torch.arange(24.0)).reshape(4, 6),
    "lin.bias": torch.cos(torch.arange(4.0)),
    "norm.weight": torch.ones(6),
    "norm.bias": torch.zeros(6),
}
WEIGHT = BASE["lin.weight"].double()
Formula = Callable[[Mapping[str, Tensor]], Tensor]


def rotation(q: Tensor, terms: int | None = None) -> Tensor:
    """Return Cayley's transform of an antisymmetric matrix of three angles, or the first terms of its series."""
    a, b, c = q.tolist()
    matrix = torch.tensor([[0, a, b], [-a, 0, c], [-b, -c, 0]], dtype=torch.float64)
    one = torch.eye(3, dtype=torch.float64)
    if terms is None:
        return torch.linalg.inv(one + matrix) @ (one - matrix)
    # The transform of -q, cut off: 1 + 2 q + 2 q q + ... + q ... q.
    assert terms == 4
    return one + 2 * matrix + 2 * matrix @ matrix + matrix @ matrix @ matrix


def blocks(q: Tensor, terms: int | None = None, count: int = 2) -> Tensor:
    return torch.block_diag(*(rotation(q[k % len(q)], terms) for k in range(count)))


def reflections(u: Tensor) -> Tensor:
    one, product = torch.eye(6, dtype=torch.float64), torch.eye(6, dtype=torch.float64)
    for column in u.T:
        product = product @ (one - 2 * torch.outer(column, column) / (column @ column))
    return product


def apart(u: Tensor) -> Tensor:
    """Return the second column, made orthogonal to the first column."""
    first = u[:, 0] / u[:, 0].norm()
    return torch.stack([first, u[:, 1] - (first @ u[:, 1]) * first], 1)


def scattered(p: Mapping[str, Tensor]) -> Tensor:
    found = WEIGHT.clone()
    for value, row, column in zip(p["shira_weight"], *p["shira_indices"].long(), strict=True):
        found[row, column] += value
    return found


def near(q: Tensor) -> Tensor:
    """Return angles whose matrix has at most norm 0.4."""
    return q * min(1.0, 0.4 / math.sqrt(2 * float(q.square().sum())))


def circulant(kernel: Tensor) -> Tensor:
    """Return blocks of two rows, each with the second row rotated, divided by the number of columns."""
    rows = []
    for own in kernel:
        rows.append(torch.cat([torch.stack([x, y]) for x, y in own]))
        rows.append(torch.cat([torch.stack([y, x]) for x, y in own]))
    return torch.stack(rows) / 6


def bounded(p: Mapping[str, Tensor]) -> Tensor:
    """Return outer products of unit vectors, with the lengths of the base's columns."""
    pairs = zip(p["delora_A"], p["delora_B"].T, strict=True)
    units = [torch.outer(b / b.norm(), a / a.norm()) for a, b in pairs]
    return float(p["delora_lambda"]) / 2 * (units[0] + units[1]) * p["delora_w_norm"]


def waves(spectrum: Tensor) -> Tensor:
    """Return a sum of waves over the matrix, at positions that a seed determines."""
    found = torch.zeros(4, 6, dtype=torch.float64)
    rows, columns = torch.arange(4.0).double()[:, None], torch.arange(6.0).double()
    places = torch.randperm(24, generator=torch.Generator().manual_seed(11))[:5].tolist()
    for value, place in zip(spectrum.tolist(), places, strict=True):
        found += value * torch.cos(2 * math.pi * (place // 6 * rows / 4 + place % 6 * columns / 6)) / 24
    return 12 * found


def by_blocks(block: Tensor) -> Tensor:
    """Return the change of every block of two rows and columns."""
    found = WEIGHT.clone()
    for row in range(0, 4, 2):
        for column in range(0, 6, 2):
            own = WEIGHT[row : row + 2, column : column + 2]
            found[row : row + 2, column : column + 2] += own @ block[row // 2] + block[row // 2]
    return found


def turns(theta: Tensor, alpha: Tensor, variant: int, group: int) -> Tensor:
    """Return the matrix that rotates pairs of outputs, half a group apart."""
    found, half = torch.zeros(4, 4, dtype=torch.float64), group // 2
    for start in range(0, 4, group):
        for k in range(half):
            one, two = start + k, start + half + k
            if variant == 4:
                first, second = 2 * start, 2 * start + group
                places = [(first + k, second + k), (first + half + k, second + half + k)]
            else:
                near = start // 2 + k if variant == 1 else one
                places = [(near, near), (near, near) if variant == 1 else (two, two)]
            (c1, s1), (c2, s2) = places
            found[one, one], found[one, two] = alpha[c1] * theta[c1].cos(), -alpha[s1] * theta[s1].sin()
            found[two, two], found[two, one] = alpha[c2] * theta[c2].cos(), alpha[s2] * theta[s2].sin()
    return found


def road(variant: int, group: int, count: int, row: tuple[float, ...], bias: tuple[float, ...]) -> "Case":
    def turned(p: Mapping[str, Tensor], value: Tensor) -> Tensor:
        return turns(p["road_theta"], p["road_alpha"], variant, group) @ value

    return Case(
        {"road_alpha": (count,), "road_theta": (count,)},
        {"variant": f"road_{variant}", "group_size": group},
        lambda p: turned(p, WEIGHT),
        row,
        also={"lin.bias": lambda p: turned(p, BASE["lin.bias"].double())},
        bias=bias,
    )


def by_parts(p: Mapping[str, Tensor]) -> Tensor:
    """Return a change whose blocks of two rows and three columns have separate factors."""
    found = torch.zeros(4, 6, dtype=torch.float64)
    for row in range(2):
        for column in range(2):
            a, b = p["gralora_A"][column][:, row], p["gralora_B"][row][column]
            found[2 * row : 2 * row + 2, 3 * column : 3 * column + 3] = torch.outer(b, a)
    return found


def from_bank(p: Mapping[str, Tensor]) -> Tensor:
    """Return factors whose pairs of entries are means of two vectors, weighted by the two largest logits."""

    def mean(logits: Tensor) -> Tensor:
        first, second = sorted(range(5), key=lambda k: -float(logits[k]))[:2]
        share = 1 / (1 + math.exp(float(logits[second] - logits[first])))
        bank = p["base_model.vblora_vector_bank"]
        return share * bank[first] + (1 - share) * bank[second]

    a = torch.stack([torch.cat([mean(piece) for piece in row]) for row in p["vblora_logits_A"]])
    columns = [torch.cat([mean(p["vblora_logits_B"][piece, k]) for piece in range(2)]) for k in range(2)]
    return WEIGHT + torch.stack(columns, 1) @ a


def of_full_rank(p: Mapping[str, Tensor]) -> Tensor:
    """Return a sum of products of random factors, each scaled along its rank and its columns."""
    found = torch.zeros(6, 4, dtype=torch.float64)
    for k in range(2):
        b, a = p["base_model.randlora_B"][:, k], p["base_model.randlora_A"][:, 0]
        found += b @ torch.diag(p["randlora_lambda"][:, k]) @ a @ torch.diag(p["randlora_gamma"][k])
    return WEIGHT + 3 / 2 * found.T


def butterfly(p: Mapping[str, Tensor]) -> Tensor:
    skew = (p["boft_R"][0] - p["boft_R"][0].mT) / 2
    one = torch.eye(3, dtype=torch.float64)
    turn = torch.block_diag(*((one - own) @ torch.linalg.inv(one + own) for own in skew))
    return p["boft_s"] * (WEIGHT @ turn.T)


def with_entries(p: Mapping[str, Tensor]) -> Tensor:
    found = WEIGHT.flatten().clone()
    for value, place in zip(p["supertuning_values"], p["supertuning_indices"].long(), strict=True):
        found[place] += value
    return found.reshape(4, 6)


def largest(count: int) -> Tensor:
    """Return the sum of the products of the largest singular vectors, computed by the eigenvectors of the Gram
    matrix.
    """
    vectors = torch.linalg.eigh(WEIGHT @ WEIGHT.T).eigenvectors[:, -count:]
    return vectors @ vectors.T @ WEIGHT


def tweaked(p: Mapping[str, Tensor]) -> Tensor:
    """Return the base with every column changed by a network with one hidden layer and a skip connection."""
    columns = []
    for column in WEIGHT.T:
        first = (p["peanut_A.weight"] @ column).relu()
        second = (p["peanut_encoders.0.weight"] @ first).relu()
        columns.append(p["peanut_B.weight"] @ ((p["peanut_decoders.0.weight"] @ second).relu() + first))
    return WEIGHT + 2 * torch.stack(columns, 1)


def drawn(spectrum: Tensor) -> Tensor:
    found = torch.zeros(24, dtype=torch.float64)
    found[torch.randperm(24, generator=torch.Generator().manual_seed(11))[:5]] = spectrum
    return found.reshape(4, 6)


def haar(entries: Tensor) -> Tensor:
    """Return sums and differences of neighbors, where the upper right quarter contains differences of rows."""
    found = torch.zeros(4, 6, dtype=torch.float64)
    for i in range(4):
        for j in range(6):
            row, column, up, right = i // 2, j // 2, (-1) ** (i % 2), (-1) ** (j % 2)
            found[i, j] = (entries[row, column] + up * entries[row, 3 + column]) / 2
            found[i, j] += right * (entries[2 + row, column] + up * entries[2 + row, 3 + column]) / 2
    return found


def in_principal_space(p: Mapping[str, Tensor]) -> Tensor:
    """Return a rotation of two singular directions, with the signs that float32 gives them."""
    u, s, v = (one.double() for one in torch.linalg.svd(BASE["lin.weight"], full_matrices=False))
    q = float(p["psoft_R.weight"])
    cosine, sine = (1 - q * q) / (1 + q * q), 2 * q / (1 + q * q)
    turn = torch.tensor([[cosine, sine], [-sine, cosine]], dtype=torch.float64)
    turn = torch.diag(p["psoft_R.vector_b"]) @ turn @ torch.diag(p["psoft_R.vector_a"])
    return WEIGHT + u[:, :2] @ torch.diag(s[:2]) @ (turn - torch.eye(2, dtype=torch.float64)) @ v[:2]


def tiny(p: Mapping[str, Tensor]) -> Tensor:
    mixed = sum(v * own for v, own in zip(p["base_model.tinylora_v.0"], p["tinylora_P"], strict=True))
    return WEIGHT + p["tinylora_B"] @ mixed @ p["tinylora_A"]


def shared_values(p: Mapping[str, Tensor]) -> Tensor:
    a, b = (
        torch.stack([p["base_model.unilora_theta_d"][row] for row in p[f"unilora_indices_{k}"].long()])
        * p[f"unilora_scales_{k}"]
        for k in "AB"
    )
    return WEIGHT + b @ a


def product(p: Mapping[str, Tensor], letter: str) -> Tensor:
    return p[f"glora_{letter}.Xd"] @ p[f"glora_{letter}.Xu"]


def replaced(p: Mapping[str, Tensor]) -> Tensor:
    """Return the base from unit columns and V, with other lengths and four additional entries."""
    v = p["base_model.frod_V.lin"]
    columns = WEIGHT @ torch.linalg.pinv(v, rtol=1e-9).T
    lengths = columns.norm(dim=0)
    units = torch.stack([c / n if n > 1e-12 else c * 0 for c, n in zip(columns.T, lengths, strict=True)], 1)
    inner = torch.diag(p["frod_lambda_l"])
    for value, row, column in zip(p["frod_lambda_s_values"], *p["base_model.frod_s_indices.lin"].long(), strict=True):
        inner[row, column] += value
    return units @ inner @ v.T


@dataclass(frozen=True)
class Case:
    """An adapter: its tensors in order, its settings, the formula, and row 1 of the matrix as peft computed it.

    `judges/peft.py` compares the kinds that have no row here.
    """

    shapes: Mapping[str, tuple[int, ...]]
    config: Mapping[str, Any]
    formula: Formula
    row: tuple[float, ...] | None = None
    name: str = "lin.weight"
    also: Mapping[str, Formula] = field(default_factory=dict)
    bias: tuple[float, ...] | None = None


LOHA = {"hada_w1_a": (4, 2), "hada_w1_b": (2, 6), "hada_w2_a": (4, 2), "hada_w2_b": (2, 6)}
CASES = {
    "IA3": Case(
        {"ia3_l": (4, 1)},
        {"feedforward_modules": []},
        lambda p: p["ia3_l"] * WEIGHT,
        (-0.12878, -0.14517, -0.09328, 0.00248, 0.09708, 0.14601),
        also={"lin.bias": lambda p: p["ia3_l"].flatten() * BASE["lin.bias"]},
    ),
    "IA3, feed forward": Case(
        {"ia3_l": (1, 6)},
        {"feedforward_modules": ["lin"]},
        lambda p: p["ia3_l"] * WEIGHT,
        (0.0, -0.14517, -0.17822, 0.00659, 0.30617, 0.49285),
    ),
    "LOHA": Case(
        LOHA,
        {"r": 2, "alpha": 3},
        lambda p: WEIGHT + 1.5 * (p["hada_w1_a"] @ p["hada_w1_b"]) * (p["hada_w2_a"] @ p["hada_w2_b"]),
        (-0.88302, -0.99882, -0.64537, 0.01138, 0.66358, 1.00596),
    ),
    "LOKR": Case(
        {"lokr_w1": (2, 2), "lokr_w2": (2, 3)},
        {"r": 2, "alpha": 3},
        lambda p: WEIGHT + 1.5 * torch.cat([torch.cat([x * p["lokr_w2"] for x in row], 1) for row in p["lokr_w1"]]),
        (-0.87158, -0.98245, -0.63127, 0.12168, 0.74658, 1.05449),
    ),
    "ADALORA": Case(
        {"lora_A": (2, 6), "lora_B": (4, 2), "lora_E": (2, 1)},
        {"r": 8, "lora_alpha": 3},
        lambda p: WEIGHT + 3 / 2.00001 * p["lora_B"] @ torch.diag(p["lora_E"].flatten()) @ p["lora_A"],
        (-0.74273, -0.81788, -0.44567, 0.20685, 0.8345, 1.13729),
    ),
    "VERA": Case(
        {"vera_lambda_b": (4,), "vera_lambda_d": (2,), "base_model.vera_A": (2, 6), "base_model.vera_B": (4, 2)},
        {"r": 2},
        lambda p: (
            WEIGHT
            + torch.diag(p["vera_lambda_b"])
            @ p["base_model.vera_B"]
            @ torch.diag(p["vera_lambda_d"])
            @ p["base_model.vera_A"]
        ),
        (-0.87034, -0.97757, -0.62316, 0.02741, 0.66913, 1.00077),
    ),
    "HRA": Case(
        {"hra_u": (6, 2)},
        {"r": 2},
        lambda p: WEIGHT @ reflections(p["hra_u"]),
        (-0.76318, -0.46015, 0.12249, 0.73871, 1.09485, 0.98903),
    ),
    "HRA, apart": Case(
        {"hra_u": (6, 2)},
        {"r": 2, "apply_GS": True},
        lambda p: WEIGHT @ reflections(apart(p["hra_u"])),
        (1.12988, 0.92832, 0.52134, 0.00861, -0.50916, -0.92855),
    ),
    "OFT": Case(
        {"oft_R.weight": (2, 3)},
        {"oft_block_size": 3},
        lambda p: WEIGHT @ blocks(p["oft_R.weight"]).T,
        (-0.59326, -0.45068, -1.25231, -0.82764, -0.49749, 0.68985),
    ),
    "OFT by terms": Case(
        {"oft_R.weight": (2, 3)},
        {"use_cayley_neumann": True, "num_cayley_neumann_terms": 4},
        lambda p: WEIGHT @ blocks(p["oft_R.weight"], 4).T,
        (-0.92863, -1.09147, 0.26799, 1.07609, 0.4314, -0.62914),
    ),
    "OFT, shared and near": Case(
        {"oft_R.weight": (1, 3)},
        {"coft": True, "eps": 0.4, "block_share": True},
        lambda p: WEIGHT @ blocks(near(p["oft_R.weight"])).T,
        (-0.63069, -0.5222, -1.20536, -0.26372, 0.12099, 1.15074),
    ),
    "HIRA": Case(
        {"hira_A": (2, 6), "hira_B": (4, 2)},
        {"r": 2},
        lambda p: WEIGHT * (1 + p["hira_B"] @ p["hira_A"]),
        (-1.07238, -1.25564, -0.82121, 0.0218, 0.83194, 1.19761),
    ),
    "SHIRA": Case(
        {"shira_indices": (2, 10), "shira_weight": (10,)},
        {},
        scattered,
        (-0.87158, -0.68322, -0.63127, -0.2481, 0.65699, 1.46995),
    ),
    "BEFT": Case(
        {"beft_bias": (1, 4)},
        {},
        lambda p: WEIGHT,
        (-0.87158, -0.98245, -0.63127, 0.01681, 0.65699, 0.98817),
        also={"lin.bias": lambda p: BASE["lin.bias"] + p["beft_bias"][0]},
        bias=(1.0, 0.68806, -0.13383, -0.59833),
    ),
    "C3A": Case(
        {"c3a_kernel": (2, 3, 2)},
        {"block_size": 2},
        lambda p: WEIGHT + circulant(p["c3a_kernel"]),
        (-0.84695, -0.98245, -0.56599, 0.06387, 0.74011, 1.06584),
    ),
    "DELORA": Case(
        {"delora_A": (2, 6), "delora_B": (4, 2), "delora_lambda": (1,), "delora_w_norm": (6,)},
        {"r": 2},
        lambda p: WEIGHT + bounded(p),
        (-0.86509, -0.99086, -0.65601, -0.01998, 0.61662, 0.95396),
    ),
    "FOURIERFT": Case(
        {"fourierft_spectrum": (5,)},
        {"scaling": 12.0, "random_loc_seed": 11},
        lambda p: WEIGHT + waves(p["fourierft_spectrum"]),
        (-1.15926, -1.1356, -0.42344, 0.19515, 0.73685, 0.96298),
    ),
    "MISS": Case(
        {"miss_block": (4, 4)},
        {"init_weights": True},
        lambda p: WEIGHT + torch.cat([p["miss_block"].T, p["miss_block"].T[:, :2]], 1),
        (-0.72382, -0.48371, -0.41758, -0.32707, 0.80475, 1.48692),
    ),
    "MISS by products": Case(
        {"miss_block": (2, 2, 2)},
        {"init_weights": "bat"},
        lambda p: by_blocks(p["miss_block"]),
        (-0.86662, -1.10436, -0.3442, 0.32179, 1.21829, 1.86394),
    ),
    "MISS, small": Case(
        {"miss_block": (3, 2)},
        {"init_weights": "mini"},
        lambda p: WEIGHT + p["miss_block"].T.repeat(2, 2),
        (-0.72382, -0.59079, -0.13252, 0.16457, 1.04865, 1.48692),
    ),
    "ROAD": road(1, 2, 2, (0.0,) * 6, (0.0, 0.0, 0.01329, -0.15812)),
    "ROAD by two": road(
        2, 4, 4, (-0.11643, -0.17449, -0.15048, -0.0557, 0.06527, 0.15555), (0.0, 0.13853, 0.03218, -0.24871)
    ),
    "ROAD by four": road(
        4, 4, 8, (-0.11907, -0.22709, -0.2283, -0.12215, 0.04146, 0.18557), (0.07628, 0.2163, -0.02194, -0.3403)
    ),
    "LN_TUNING": Case(
        {"ln_tuning_layers.bias": (6,), "ln_tuning_layers.weight": (6,)},
        {},
        lambda p: p["ln_tuning_layers.weight"],
        (0.42074, 0.48178, 0.49979, 0.47315, 0.40425, 0.29924),
        name="norm.weight",
        also={"norm.bias": lambda p: p["ln_tuning_layers.bias"]},
    ),
    "TRAINABLE_TOKENS": Case(
        {"trainable_tokens_delta": (2, 6)},
        {"token_indices": [1, 3]},
        lambda p: torch.stack([WEIGHT[0], p["trainable_tokens_delta"][0], WEIGHT[2], p["trainable_tokens_delta"][1]]),
        (0.0, 0.14776, 0.28232, 0.39166, 0.46602, 0.49875),
    ),
    "PVERA": Case(
        {
            "pvera_lambda_b": (4,),
            "pvera_lambda_d": (4,),
            "base_model.pvera_A": (4, 6),
            "base_model.pvera_B": (4, 2),
        },
        {"r": 2},
        lambda p: (
            WEIGHT
            + torch.diag(p["pvera_lambda_b"])
            @ p["base_model.pvera_B"]
            @ torch.diag(p["pvera_lambda_d"][:2])
            @ p["base_model.pvera_A"][:2]
        ),
        (-0.87034, -0.97757, -0.62316, 0.02741, 0.66913, 1.00077),
    ),
    "GRALORA": Case(
        {"gralora_A": (2, 3, 2), "gralora_B": (2, 2, 2)},
        {"r": 2, "alpha": 3, "gralora_k": 2},
        lambda p: WEIGHT + 3 / 2 * by_parts(p),
        (-0.87158, -0.77843, -0.29449, 0.3624, 0.89668, 1.03825),
    ),
    "GRALORA and LoRA": Case(
        {
            "gralora_A": (2, 3, 2),
            "gralora_A_general.weight": (1, 6),
            "gralora_B": (2, 2, 2),
            "gralora_B_general.weight": (4, 1),
        },
        {"r": 2, "alpha": 3, "gralora_k": 2, "hybrid_r": 1},
        lambda p: WEIGHT + by_parts(p) + p["gralora_B_general.weight"] @ p["gralora_A_general.weight"],
        (-0.90476, -0.91519, -0.49693, 0.03774, 0.6655, 0.97301),
    ),
    "VBLORA": Case(
        {"vblora_logits_A": (2, 3, 5), "vblora_logits_B": (2, 2, 5), "base_model.vblora_vector_bank": (5, 2)},
        {"r": 2, "topk": 2, "vector_length": 2, "num_vectors": 5},
        from_bank,
        (-0.96077, -1.08548, -0.74235, -0.10674, 0.67572, 0.97387),
    ),
    "RANDLORA": Case(
        {
            "randlora_gamma": (2, 4),
            "randlora_lambda": (2, 2),
            "base_model.randlora_A": (2, 1, 4),
            "base_model.randlora_B": (6, 2, 2),
        },
        {"r": 2, "randlora_alpha": 3},
        of_full_rank,
    ),
    "DEFT": Case(
        {"deft_P": (4, 2), "deft_R": (2, 6)},
        {"r": 2, "alpha": 3},
        lambda p: WEIGHT + p["deft_P"] @ (1.5 * p["deft_R"] - p["deft_P"].relu().T @ WEIGHT),
        (-0.68151, -0.88403, -0.58839, 0.03602, 0.66053, 0.9549),
    ),
    "DEFT by a basis": Case(
        {"deft_P": (4, 2)},
        {"r": 2, "para": True, "decomposition_method": "qr"},
        lambda p: WEIGHT - p["deft_P"] @ torch.linalg.inv(p["deft_P"].T @ p["deft_P"]) @ p["deft_P"].T @ WEIGHT,
        (-0.76021, -0.96445, -0.71509, -0.12942, 0.51712, 0.92046),
    ),
    "BOFT": Case(
        {"boft_R": (1, 2, 3, 3), "boft_s": (4, 1)},
        {"boft_block_size": 3},
        butterfly,
        (-0.57301, -0.33432, -0.22967, -0.26274, 0.25079, 0.44156),
    ),
    "SUPERTUNING": Case(
        {
            "supertuning_indices": (5,),
            "supertuning_lora_A.weight": (2, 6),
            "supertuning_lora_B.weight": (4, 2),
            "supertuning_values": (5,),
        },
        {"r": 2, "lora_alpha": 3, "save_precomputed_indices": True},
        lambda p: with_entries(p) + 1.5 * p["supertuning_lora_B.weight"] @ p["supertuning_lora_A.weight"],
    ),
    "OSF": Case(
        {"osf_svd_params.S_low": (3,), "osf_svd_params.U_low": (4, 3), "osf_svd_params.V_low": (3, 6)},
        {"effective_rank": 1},
        lambda p: (
            largest(1) + p["osf_svd_params.U_low"] @ torch.diag(p["osf_svd_params.S_low"]) @ p["osf_svd_params.V_low"]
        ),
        (-0.45184, -0.90406, -0.94641, -0.55581, 0.08827, 0.68788),
    ),
    "PEANUT": Case(
        {
            "peanut_A.weight": (2, 4),
            "peanut_B.weight": (4, 2),
            "peanut_decoders.0.weight": (2, 2),
            "peanut_encoders.0.weight": (2, 2),
        },
        {"r": 2, "depth": 1, "act_fn": "relu", "scaling": 2.0},
        tweaked,
        (-0.73978, -0.53446, -0.06774, 0.43084, 0.78741, 0.98817),
    ),
    "WAVEFT": Case(
        {"waveft_spectrum": (5,)},
        {"scaling": 12.0, "random_loc_seed": 11, "n_frequency": 5},
        lambda p: WEIGHT + 12 * haar(drawn(p["waveft_spectrum"])),
        (-0.87158, -0.98245, -2.32519, -1.67711, 0.21085, 1.4343),
    ),
    "WAVEFT in entries": Case(
        {"waveft_spectrum": (5,)},
        {"scaling": 12.0, "random_loc_seed": 11, "n_frequency": 5, "use_idwt": False},
        lambda p: WEIGHT + 12 * drawn(p["waveft_spectrum"]),
        (-0.87158, -0.98245, 1.14185, 0.01681, 0.65699, 0.98817),
    ),
    "PSOFT": Case(
        {"psoft_R.vector_a": (2,), "psoft_R.vector_b": (2,), "psoft_R.weight": (1,)},
        {"r": 2},
        in_principal_space,
        (-0.05583, -0.01425, 0.03403, 0.06631, 0.0674, 0.03679),
    ),
    "TINYLORA": Case(
        {"tinylora_A": (2, 6), "tinylora_B": (4, 2), "tinylora_P": (3, 2, 2), "base_model.tinylora_v.0": (3,)},
        {"r": 2, "u": 3},
        tiny,
        (-0.80429, -0.90213, -0.54507, 0.10118, 0.73199, 1.0471),
    ),
    "UNILORA": Case(
        {
            "unilora_indices_A": (2, 6),
            "unilora_indices_B": (4, 2),
            "unilora_scales_A": (2, 6),
            "unilora_scales_B": (4, 2),
            "base_model.unilora_theta_d": (7,),
        },
        {"r": 2, "theta_d_length": 7, "save_indices": True},
        shared_values,
        (-0.86633, -0.97236, -0.61859, 0.04955, 0.69232, 1.01182),
    ),
    "GLORA": Case(
        {
            "glora_A.Xd": (4, 2),
            "glora_A.Xu": (2, 6),
            "glora_B.Xd": (4, 2),
            "glora_B.Xu": (2, 6),
            "glora_C.Xd": (6, 2),
            "glora_C.Xu": (2, 1),
            "glora_D.X": (1,),
            "glora_E.X": (1,),
        },
        {"r": 2},
        lambda p: WEIGHT + WEIGHT * product(p, "A") + product(p, "B"),
        (-1.07368, -1.19979, -0.792, -0.10426, 0.50556, 0.76938),
        also={
            "lin.bias": lambda p: (
                BASE["lin.bias"] * (1 + p["glora_D.X"]) + p["glora_E.X"] + (WEIGHT @ product(p, "C")).flatten()
            )
        },
        bias=(2.03591, -0.59387, 0.48352, 0.36095),
    ),
    "GLORA by vectors": Case(
        {"glora_A.X": (4, 1), "glora_B.X": (4, 1), "glora_C.zeros": (6, 1), "glora_D.X": (4,), "glora_E.X": (4,)},
        {"r": 2, "config_A_B": "vector", "config_C": "none", "config_D_E": "vector"},
        lambda p: WEIGHT + WEIGHT * p["glora_A.X"] + p["glora_B.X"],
        (-0.51858, -0.64584, -0.24276, 0.50108, 1.23584, 1.61596),
        also={"lin.bias": lambda p: BASE["lin.bias"] * (1 + p["glora_D.X"]) + p["glora_E.X"]},
    ),
    "FROD": Case(
        {
            "base_model.frod_V.lin": (6, 6),
            "base_model.frod_s_indices.lin": (2, 2),
            "frod_lambda_l": (6,),
            "frod_lambda_s_values": (2,),
        },
        {"sparse_rate": 0.06},
        replaced,
    ),
}


PLACES = {
    "unilora_indices_A": 7,
    "unilora_indices_B": 7,
    "supertuning_indices": 24,
    "base_model.frod_s_indices.lin": 6,
}
"""Tensors of integers, and their meanings."""


def tensors_of(case: Case) -> dict[str, Tensor]:
    """Return the tensors of an adapter, by their last names."""
    made = {}
    # In the order of their whole names, in which the modules stand before what they share.
    for k, (name, shape) in enumerate(case.shapes.items()):
        count = math.prod(shape)
        if name == "shira_indices":
            made[name] = torch.stack([torch.arange(count // 2) % 4, (torch.arange(count // 2) * 5) % 6]).int()
        elif name in PLACES:
            made[name] = torch.arange(count).reshape(shape) * 5 % PLACES[name]
        elif name == "base_model.frod_V.lin":
            made[name] = torch.eye(6) + 0.5 * torch.sin(0.3 * torch.arange(36.0)).reshape(6, 6)
        else:
            made[name] = (0.5 * torch.sin(0.3 * torch.arange(float(count)) + k)).reshape(shape)
    return made


def write(place: Path, tensors: Mapping[str, Tensor], kind: str, module: str = "lin", **config: Any) -> str:
    """Write the base and an adapter, and return the name of their sum."""
    folder = place / "adapter"
    folder.mkdir()
    whole = {n if n.startswith("base_model.") else f"{PREFIX}{module}.{n}": t for n, t in tensors.items()}
    save(whole, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": kind, **config}))
    save(BASE, place / "base.safetensors")
    return f"{place / 'base.safetensors'}+{folder}"


@pytest.mark.parametrize("name", CASES)
def test_an_adapter_changes_its_base_by_the_formula(tmp_path: Path, name: str) -> None:
    case, tensors = CASES[name], tensors_of(CASES[name])
    module = case.name.removesuffix(".weight")
    found = Checkpoint.open(write(tmp_path, tensors, name.split(",")[0].split(" ")[0], module, **case.config))
    exact = {key: tensor.double() for key, tensor in tensors.items()}
    expected = {key: tensor.double() for key, tensor in BASE.items()}
    expected |= {case.name: case.formula(exact)} | {key: formula(exact) for key, formula in case.also.items()}
    for key, tensor in expected.items():
        torch.testing.assert_close(found[key].double(), tensor.double(), rtol=0, atol=1e-6)
        torch.testing.assert_close(found.read(key, rows=(1, 3)).double(), tensor[1:3].double(), rtol=0, atol=1e-6)
    if case.row is not None:
        row = found[case.name] if case.name == "norm.weight" else found[case.name][1]
        torch.testing.assert_close(row.double(), torch.tensor(case.row, dtype=torch.float64), rtol=0, atol=1e-5)
    if case.bias is not None:
        assert found["lin.bias"].tolist() == pytest.approx(case.bias, abs=1e-5)


def test_every_kind_is_here() -> None:
    assert {name.split(",")[0].split(" ")[0] for name in CASES} == KINDS.keys()


def test_kernels_are_matrices_of_their_rows(tmp_path: Path) -> None:
    """In a convolution in two groups, (IA)3 scales the outputs, or the inputs of each group."""
    kernel = torch.sin(torch.arange(4 * 3 * 2.0)).reshape(4, 3, 2)
    scales = torch.arange(1.0, 7)
    for kind, config, values, expected in (
        ("IA3", [], torch.arange(1.0, 5), kernel * torch.arange(1.0, 5)[:, None, None]),
        ("IA3", ["conv"], scales, kernel * torch.cat([scales[:3].expand(2, 3), scales[3:].expand(2, 3)])[..., None]),
    ):
        place = tmp_path / str(len(config))
        place.mkdir()
        path = write(place, {"ia3_l": values.reshape(1, -1, 1)}, kind, "conv", feedforward_modules=config)
        save({"conv.weight": kernel}, place / "base.safetensors", overwrite=True)
        torch.testing.assert_close(Checkpoint.open(path)["conv.weight"], expected)


def test_tokens_and_packed_projections_of_lora(tmp_path: Path) -> None:
    rows, a, b = torch.ones(2, 6), torch.ones(1, 6), torch.ones(12, 1)
    tensors = {
        f"{PREFIX}emb.token_adapter.trainable_tokens_delta": rows,
        f"{PREFIX}mha.lora_A.weight": a,
        f"{PREFIX}mha.lora_B.weight": b,
        f"{PREFIX}mha.base_layer.out_proj.lora_A.weight": a,
        f"{PREFIX}mha.base_layer.out_proj.lora_B.weight": b[:6],
        f"{PREFIX}mha.lora_velora_embed": torch.ones(3),
    }
    path = write(tmp_path, tensors, "LORA", r=1, lora_alpha=2, trainable_token_indices={"emb": [0, 3]})
    base = {"emb.weight": torch.zeros(4, 6), "mha.in_proj_weight": torch.zeros(12, 6)}
    save(base | {"mha.out_proj.weight": torch.zeros(6, 6)}, tmp_path / "base.safetensors", overwrite=True)
    found = Checkpoint.open(path)
    assert found["emb.weight"].sum(1).tolist() == [6, 0, 0, 6]
    assert found["mha.in_proj_weight"].unique().tolist() == [2]
    assert found["mha.out_proj.weight"].unique().tolist() == [2]


@pytest.mark.parametrize(
    ("name", "change", "config", "said"),
    [
        ("SHIRA", {"shira_indices": torch.full((2, 10), 9)}, {}, r"does not fit a tensor of shape \(4, 6\)"),
        ("TRAINABLE_TOKENS", {}, {"token_indices": [1, 99]}, "does not fit a tensor of shape"),
        ("MISS", {"miss_block": torch.ones(4, 3)}, {}, "does not fit a tensor of shape"),
        ("OFT by terms", {}, {"num_cayley_neumann_terms": 10**9}, "must be from 1 to 100"),
        ("LOHA", {}, {"alpha_pattern": {"((": 1}}, "cannot be read"),
        ("PEANUT", {}, {"act_fn": "swish"}, "its activation 'swish' is none of relu, gelu, silu"),
        ("WAVEFT", {}, {"wavelet_family": "db7"}, "its wavelet 'db7' is none of db1, db2, sym2"),
        ("PSOFT", {}, {"use_cayley_neumann": True, "num_cayley_neumann_terms": 0}, "must be from 1 to 100"),
        ("GRALORA", {"gralora_B": torch.ones(3, 1, 2)}, {}, "cannot be read"),
        ("GLORA by vectors", {"glora_E.X": torch.ones(5)}, {}, "does not fit a tensor of shape"),
        ("TINYLORA", {"base_model.tinylora_v.1": torch.ones(3)}, {"weight_tying": 0.5}, "share a vector"),
        ("IA3", {}, {"feedforward_modules": "(("}, "cannot be read"),
    ],
)
def test_what_does_not_fit_ends_in_a_sentence(
    tmp_path: Path, name: str, change: Mapping[str, Tensor], config: Mapping[str, Any], said: str
) -> None:
    case = CASES[name]
    path = write(tmp_path, tensors_of(case) | dict(change), name.split(" ")[0], **{**case.config, **config})
    with pytest.raises(ValueError, match=said):
        load(path)


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("ADAMSS", {}, "is of type ADAMSS; LORA, IA3, LOHA, LOKR, ADALORA"),
        ("PVERA", {"base_model.pvera_A": None}, "lacks the projections that all modules share"),
        ("RANDLORA", {"base_model.randlora_B": None}, "lacks the projections that all modules share"),
        ("FROD", {"base_model.frod_V.lin": None}, "lacks the projections that all modules share"),
        ("TINYLORA", {"tinylora_P": None}, "lacks the projections that all modules share"),
        (
            "TINYLORA",
            {"base_model.tinylora_v.1": torch.ones(3)},
            "its projection_seed 42 does not give the projections",
        ),
        ("UNILORA", {"unilora_indices_A": None}, "save it with save_indices=True"),
        ("SUPERTUNING", {"supertuning_indices": None}, "save it with save_precomputed_indices=True"),
        ("BOFT", {"boft_R": torch.ones(2, 2, 3, 3)}, "has several butterfly factors; merge it with peft"),
        ("BOFT", {"boft_s": torch.ones(5, 1)}, r"changes 'lin.weight', which has shape \(4, 6\)"),
        ("LOHA", {"hada_w1_a": None}, "cannot be read: 'hada_w1_a'"),
        (
            "LOHA",
            {"hada_w1_a": torch.ones(5, 2), "hada_w2_a": torch.ones(5, 2)},
            r"changes 'lin.weight', which has shape",
        ),
        ("HRA", {"hra_u": torch.ones(7, 2)}, r"changes 'lin.weight', which has shape \(4, 6\)"),
        ("VERA", {"base_model.vera_A": None}, "lacks the projections that all modules share"),
        ("TRAINABLE_TOKENS", {"trainable_tokens_delta": torch.ones(3, 6)}, "rows for 3 tokens of 'lin', which its"),
        ("HRA", {"hra_u": None}, "contains no tensors of its type"),
    ],
)
def test_what_is_no_adapter_of_the_base_is_refused(
    tmp_path: Path, name: str, change: Mapping[str, Tensor | None], said: str
) -> None:
    case = CASES.get(name, CASES["HRA"])
    tensors = {key: t for key, t in (tensors_of(case) | dict(change)).items() if t is not None}
    path = write(tmp_path, tensors or {"lora_A.weight": torch.ones(1, 6)}, name, **case.config)
    with pytest.raises(ValueError, match=said):
        Checkpoint.open(path)


def test_vectors_of_tinylora_belong_to_the_modules_whose_seeds_gave_the_projections(tmp_path: Path) -> None:
    """No file contains the numbers of the modules. The projections, which the seed and the number determine, identify
    them.
    """
    projections = [torch.normal(0, 2**-0.5, (3, 2, 2), generator=torch.Generator().manual_seed(5 + k)) for k in (0, 1)]
    factors = {"tinylora_A": torch.ones(2, 6), "tinylora_B": torch.ones(4, 2)}
    vectors = [torch.tensor([1.0, 2, 3]), torch.tensor([3.0, -1, 1])]
    tensors = {f"base_model.tinylora_v.{k}": own for k, own in enumerate(vectors)}
    base = {"first.weight": torch.zeros(4, 6), "lin.weight": torch.zeros(4, 6)}
    for name, own in (("lin", projections[0]), ("first", projections[1])):
        parts = {**factors, "tinylora_P": own}
        tensors |= {f"{PREFIX}{name}.{part}": tensor.clone() for part, tensor in parts.items()}
    path = write(tmp_path, tensors, "TINYLORA", projection_seed=5, r=2, u=3)
    save(base, tmp_path / "base.safetensors", overwrite=True)
    found = Checkpoint.open(path)
    for name, number in (("lin", 0), ("first", 1)):
        total = torch.einsum("i,ijk->", vectors[number], projections[number])
        torch.testing.assert_close(found[f"{name}.weight"], torch.full((4, 6), float(total)))


def test_a_bias_follows_the_weight_before_the_adapter(tmp_path: Path) -> None:
    """GLoRA's `b + W C` uses the weight of the network to which it is added, even if an earlier adapter changed this
    network.
    """
    case = CASES["GLORA"]
    first = write(tmp_path, {"glora_A.X": torch.ones(1), "glora_C.X": torch.zeros(6, 1)}, "GLORA")
    (tmp_path / "second").mkdir()
    second = write(tmp_path / "second", tensors_of(case), "GLORA").rpartition("+")[2]
    exact = {name: tensor.double() for name, tensor in tensors_of(case).items()}
    doubled = 2 * WEIGHT @ product(exact, "C")
    bias = BASE["lin.bias"].double() * (1 + exact["glora_D.X"]) + exact["glora_E.X"] + doubled.flatten()
    torch.testing.assert_close(Checkpoint.open(f"{first}+{second}")["lin.bias"].double(), bias, rtol=0, atol=1e-6)


def test_a_base_loses_its_smallest_directions_by_kasa(tmp_path: Path) -> None:
    a, b, scales = (
        torch.sin(torch.arange(18.0)).reshape(3, 6),
        torch.cos(torch.arange(12.0)).reshape(4, 3),
        torch.ones(3),
    )
    tensors = {"lora_A.weight": a, "lora_B.weight": b, "lora_diag": scales * 2}
    path = write(tmp_path, tensors, "LORA", r=3, lora_alpha=6, kasa_config={"beta": 1.0})
    expected = largest(1) + 2 * b.double() @ torch.diag(scales.double() * 2) @ a.double()
    torch.testing.assert_close(Checkpoint.open(path)["lin.weight"].double(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("side", "ab")
def test_one_factor_of_bd_lora_is_a_diagonal_of_blocks(tmp_path: Path, side: str) -> None:
    a, b = torch.sin(torch.arange(12.0)).reshape(2, 6), torch.cos(torch.arange(8.0)).reshape(4, 2)
    stored = {"lora_A.weight": a[:, :3] if side == "a" else a, "lora_B.weight": b[:, :1] if side == "b" else b}
    blocks = {"nblocks": 2, f"target_modules_bd_{side}": ["lin"]}
    path = write(tmp_path, {n: t.contiguous() for n, t in stored.items()}, "LORA", r=2, lora_alpha=2, use_bdlora=blocks)
    own = a[:, :3] if side == "a" else b[:, :1]
    halves = torch.block_diag(*own.chunk(2))
    expected = WEIGHT + (b @ halves if side == "a" else halves @ a).double()
    torch.testing.assert_close(Checkpoint.open(path)["lin.weight"].double(), expected, rtol=0, atol=1e-6)
    with pytest.raises(ValueError, match="has 'use_bdlora', not only factors B and A; merge it into its base"):
        read_factors(tmp_path / "adapter", load(tmp_path / "adapter"))


def test_a_parameter_of_a_layer_is_its_weight(tmp_path: Path) -> None:
    a, b = torch.sin(torch.arange(12.0)).reshape(2, 6), torch.cos(torch.arange(8.0)).reshape(4, 2)
    tensors = {"lora_A.weight": a, "lora_B.weight": b}
    path = write(tmp_path, tensors, "LORA", r=2, lora_alpha=2, target_parameters=["lin.weight"])
    torch.testing.assert_close(
        Checkpoint.open(path)["lin.weight"].double(), WEIGHT + (b @ a).double(), rtol=0, atol=1e-6
    )

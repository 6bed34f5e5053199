"""Kinds of adapters that rotate or reflect the inputs or outputs of a matrix of shape `[out, in]`.

References:
    Yuan et al. (2024), HRA, section 3.1; Qiu et al. (2023), OFT, section 4, and Cayley's transform; Liu et al. (2024),
    BOFT; Petrushkov et al. (2024), RoAd, section 3.
"""

import math

import torch
from torch import Tensor

from regauge.checkpoints.formats.changes import Mapped
from regauge.checkpoints.formats.kinds.kind import Config, Made, Parts, antisymmetric, require_terms


def hra(module: str, parts: Parts, config: Config, shared: Parts) -> Made:
    """`W H_1 ... H_r` with reflections `H = 1 - 2 u u^T`, where the vectors u are the normalized columns of `hra_u`."""
    columns = parts["hra_u"].double()
    if config.get("apply_GS"):
        columns = torch.linalg.qr(columns).Q

    def reflect(weight: Tensor) -> Tensor:
        for u in (columns / columns.norm(dim=0)).to(weight).T:
            weight = weight - 2 * torch.outer(weight @ u, u)
        return weight

    yield "weight", Mapped(reflect, (None, len(columns)))


def oft(module: str, parts: Parts, config: Config, shared: Parts) -> Made:
    """`W R^T`, or `W R` for embeddings, with a block-diagonal rotation `R = (1 - Q)(1 + Q)^-1` for antisymmetric Q."""
    is_embedding = "oft_embedding_R.weight" in parts
    values = parts["oft_embedding_R.weight" if is_embedding else "oft_R.weight"].double()
    size = round((1 + math.sqrt(1 + 8 * values.shape[1])) / 2)
    matrix = antisymmetric(values, size)
    if config.get("coft"):
        most = float(config.get("eps", 6e-5)) / math.sqrt(len(values))
        matrix = matrix * (most / torch.linalg.matrix_norm(matrix, keepdim=True).clamp(min=1e-300)).clamp(max=1.0)
    one = torch.eye(size, dtype=torch.float64)
    if config.get("use_cayley_neumann"):
        terms = require_terms(config)
        powers = [torch.linalg.matrix_power(matrix, k) for k in range(terms)]
        blocks = powers[0] + 2 * sum(powers[1:-1], torch.zeros_like(matrix)) + powers[-1] * (terms > 1)
    else:
        blocks = torch.linalg.solve(one + matrix, one - matrix, left=False)

    def rotate(weight: Tensor) -> Tensor:
        parted = weight.reshape(len(weight), -1, size)
        rotated: Tensor = torch.einsum("nbi,bij->nbj", parted, blocks.to(weight).expand(parted.shape[1], -1, -1))
        return rotated.reshape(weight.shape)

    blocks = blocks if is_embedding else blocks.mT
    yield "weight", Mapped(rotate, (None, None if config.get("block_share") else size * len(values)))


def boft(module: str, parts: Parts, config: Config, shared: Parts) -> Made:
    """`diag(s) W R^T` with a block-diagonal rotation `R = (1 - Q)(1 + Q)^-1` for antisymmetric Q."""
    values, scale = parts["boft_R"].double(), parts["boft_s"].double().flatten()
    if len(values) > 1:
        raise ValueError("it has several butterfly factors; merge it with peft on a GPU")
    matrix, one = (values[0] - values[0].mT) / 2, torch.eye(values.shape[-1], dtype=torch.float64)
    blocks = torch.linalg.solve(one + matrix, one - matrix, left=False)

    def rotate(weight: Tensor) -> Tensor:
        parted = weight.reshape(len(weight), len(blocks), -1)
        rotated: Tensor = torch.einsum("nbi,bji->nbj", parted, blocks.to(weight))
        return scale.to(weight)[:, None] * rotated.reshape(weight.shape)

    yield "weight", Mapped(rotate, (len(scale), blocks.shape[0] * blocks.shape[1]))


def road(module: str, parts: Parts, config: Config, shared: Parts) -> Made:
    """`R W` and `R b`, where R rotates and scales pairs of outputs, one from each half of every group of outputs."""
    theta, alpha = parts["road_theta"].double(), parts["road_alpha"].double()
    half = int(config.get("group_size", 64)) // 2
    if config.get("variant", "road_1") == "road_4":
        one, two = theta.reshape(-1, 2, 2 * half).unbind(1)
        first, second = alpha.reshape(-1, 2, 2 * half).unbind(1)
        cosines, sines = (first * one.cos()).flatten(), (second * two.sin()).flatten()
    else:
        shape = (-1, 1 if config.get("variant", "road_1") == "road_1" else 2, half)
        cosines, sines = (
            (alpha * turned).reshape(shape).expand(-1, 2, -1).flatten() for turned in (theta.cos(), theta.sin())
        )
    cosines, sines = (one.reshape(-1, 2, half, 1) for one in (cosines, sines))

    def turn(weight: Tensor) -> Tensor:
        parted = weight.reshape(-1, 2, half, weight.shape[1])
        across = torch.stack([-parted[:, 1], parted[:, 0]], 1)
        return (cosines.to(weight) * parted + sines.to(weight) * across).reshape(weight.shape)

    yield "weight", Mapped(turn, (cosines.numel(), None))
    yield "bias", Mapped(turn, (cosines.numel(), 1), is_optional=True)

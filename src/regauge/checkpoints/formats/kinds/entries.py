"""Kinds of adapters that store entries, rows, blocks or coefficients of a change, or scales of rows and columns.

A matrix of the base has the shape `[out, in]`, and a bias has the shape `[out, 1]`. `d` is the change, and `s` is a
factor in the configuration.

References:
    Liu et al. (2022), (IA)3, section 3.3; Bhardwaj et al. (2024), SHiRA, section 4; "Super-Tuning" (2026), arXiv
    2607.09287; Chen et al. (2024), C3A; Gao et al. (2024), FourierFT, section 3; Bilican et al. (2025), WaveFT;
    Daubechies (1988), the wavelets; Kang and Yin (2024), MiSS.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from regauge.checkpoints.formats.changes import Mapped, Replaced
from regauge.checkpoints.formats.kinds.kind import Config, Made, Parts, added, exact
from regauge.core.expressions import Expression

HAAR = (0.5**0.5,) * 2
FOUR = tuple((x + y * 3**0.5) / 32**0.5 for x, y in ((1, 1), (3, 1), (3, -1), (1, -1)))
"""Filter coefficients of the Daubechies wavelets of length four, the shortest after Haar's."""
WAVELETS = {"db1": HAAR, "db2": FOUR, "sym2": FOUR}


def ia3(module: str, parts: Parts, config: Config, shared: Parts) -> Made:
    """`diag(l) W` and `l b`, or `W diag(l)` for a feed-forward module."""
    scale, listed = parts["ia3_l"].flatten(), config.get("feedforward_modules") or []
    is_inner = bool(Expression(listed).fullmatch(module)) if isinstance(listed, str) else module.endswith(tuple(listed))
    count = len(scale)

    def outer(weight: Tensor) -> Tensor:
        return weight * scale.to(weight)[:, None]

    def inner(weight: Tensor) -> Tensor:
        # Each group of a grouped convolution has its own inputs.
        groups = scale.to(weight).reshape(-1, weight.shape[1])
        rows = groups.repeat_interleave(len(weight) // len(groups), 0)
        return weight * rows.reshape(*weight.shape[:2], *[1] * (weight.ndim - 2))

    yield "weight", Mapped(inner, keeps_shape=True) if is_inner else Mapped(outer, (count, None))
    if not is_inner:
        yield "bias", Mapped(outer, (count, 1), is_optional=True)


def norms(module: str, parts: Parts, config: Config, shared: Parts) -> Made:
    """Yield the trained weights and biases of normalization layers, which replace the tensors of the base."""
    for name, value in parts.items():
        yield name.removeprefix("ln_tuning_layers."), Replaced(value)


def trained_rows(module: str, delta: Tensor, indices: Any) -> Mapped:
    """Return the change that replaces the rows of some tokens by trained rows.

    Raises:
        ValueError: The configuration does not name tokens for this module, or names a different number of tokens.
    """
    if isinstance(indices, Mapping):
        indices = next((own for key, own in indices.items() if f".{module}".endswith(f".{key}")), None)
    if not isinstance(indices, list) or len(indices) != len(delta):
        raise ValueError(f"it has rows for {len(delta)} tokens of {module!r}, which its configuration does not name")
    places = torch.tensor(indices)

    def put(weight: Tensor) -> Tensor:
        return weight.index_copy(0, places, delta.to(weight))

    return Mapped(put, (None, delta.shape[1]))


def tokens(module: str, parts: Parts, config: Config, shared: Parts) -> Made:
    yield "weight", trained_rows(module, parts["trainable_tokens_delta"], config.get("token_indices"))


def beft(module: str, parts: Parts, config: Config, shared: Parts) -> Made:
    """`b + d`."""
    yield "bias", added(parts["beft_bias"].flatten()[:, None])


def shira(module: str, parts: Parts, config: Config, shared: Parts) -> Made:
    """`W + d`, where d is nonzero only in the entries that the adapter lists."""
    rows, columns = parts["shira_indices"].long()

    def add(weight: Tensor) -> Tensor:
        return weight.index_put((rows, columns), parts["shira_weight"].to(weight), accumulate=True)

    yield "weight", Mapped(add, None)


def supertuning(module: str, parts: Parts, config: Config, shared: Parts) -> Made:
    """`W + d`, where d is nonzero only in the entries that the adapter lists; plus `s B A` if there are factors."""
    if "supertuning_indices" not in parts:
        raise ValueError("it does not say which entries it changes; save it with save_precomputed_indices=True")
    places, p = parts["supertuning_indices"].long(), exact(parts)

    def add(weight: Tensor) -> Tensor:
        values = p["supertuning_values"].to(weight)
        return weight.flatten().index_put((places,), values, accumulate=True).reshape(weight.shape)

    yield "weight", Mapped(add)
    if "supertuning_lora_A.weight" in p:
        a, b = p["supertuning_lora_A.weight"], p["supertuning_lora_B.weight"]
        yield "weight", added(float(config.get("lora_alpha", 8)) / len(a) * b @ a)


def c3a(module: str, parts: Parts, config: Config, shared: Parts) -> Made:
    """`W + d / in`, where every block of d is circulant: entry (p, q) of a block is entry q - p of the kernel."""
    kernel = parts["c3a_kernel"].double()
    rows, columns, size = kernel.shape
    places = (torch.arange(size) - torch.arange(size)[:, None]) % size
    whole = kernel[..., places].permute(0, 2, 1, 3).reshape(rows * size, columns * size)
    yield "weight", added(whole / whole.shape[1])


def fourier(module: str, parts: Parts, config: Config, shared: Parts) -> Made:
    """`d = s Re F^-1(E)`, the inverse Fourier transform of a few entries E at positions sampled with a seed."""
    spectrum, seed = parts["fourierft_spectrum"].double(), int(config.get("random_loc_seed", 777))
    scale = float(config.get("scaling", 150.0))

    def add(weight: Tensor) -> Tensor:
        places = torch.randperm(weight.numel(), generator=torch.Generator().manual_seed(seed))[: len(spectrum)]
        entries = torch.zeros(weight.numel(), dtype=torch.float64).index_put((places,), spectrum)
        change: Tensor = torch.fft.ifft2(entries.reshape(weight.shape)).real
        return weight + scale * change.to(weight)

    yield "weight", Mapped(add)


def waveft(module: str, parts: Parts, config: Config, shared: Parts) -> Made:
    """`d = s F^-1(E)`, the inverse wavelet transform of a few entries E at positions sampled with a seed."""
    spectrum, seed = parts["waveft_spectrum"].double(), int(config.get("random_loc_seed", 777))
    family, scale = str(config.get("wavelet_family", "db1")), float(config.get("scaling", 25.0))
    is_transformed = bool(config.get("use_idwt", True))
    if is_transformed and family not in WAVELETS:
        raise ValueError(f"its wavelet {family!r} is none of {', '.join(WAVELETS)}; merge it with peft")
    low = torch.tensor(WAVELETS.get(family, (1.0,)), dtype=torch.float64)

    def sides(size: int) -> tuple[Tensor, int]:
        """Return the matrix that transforms the padded coefficients of one axis, and the index of the first entry."""
        taps, padded = len(low), size + len(low) - 2
        padded += padded % 2
        high = low.flip(0) * torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(taps // 2)
        matrix = torch.zeros(padded + taps, padded, dtype=torch.float64)
        for k in range(padded // 2):
            matrix[2 * k : 2 * k + taps, k], matrix[2 * k : 2 * k + taps, padded // 2 + k] = low, high
        whole = padded + 2 - taps
        first = taps - 2 + (whole - size) // 2
        return matrix[first : first + size], (padded - size) // 2

    def add(weight: Tensor) -> Tensor:
        places = torch.randperm(weight.numel(), generator=torch.Generator().manual_seed(seed))[: len(spectrum)]
        rows, columns = places // weight.shape[1], places % weight.shape[1]
        if not is_transformed:
            return weight.index_put((rows, columns), scale * spectrum.to(weight), accumulate=True)
        (left, top), (right, start) = sides(weight.shape[0]), sides(weight.shape[1])
        entries = torch.zeros(left.shape[1], right.shape[1], dtype=torch.float64)
        entries[rows + top, columns + start] = spectrum
        return weight + scale * _quarters(entries, left, right).to(weight)

    yield "weight", Mapped(add)


def _quarters(entries: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Return the inverse wavelet transform, summed over the four quadrants of the coefficients.

    As in peft, the upper right quadrant contains the coefficients with high frequencies for rows and low frequencies
    for columns.
    """
    row, column = left.shape[1] // 2, right.shape[1] // 2
    low, high = left[:, :row], left[:, row:]
    near, far = right[:, :column].T, right[:, column:].T
    return (low @ entries[:row, :column] + high @ entries[:row, column:]) @ near + (
        low @ entries[row:, :column] + high @ entries[row:, column:]
    ) @ far


def miss(module: str, parts: Parts, config: Config, shared: Parts) -> Made:
    """`W + d`, where the columns of d repeat a block. The variant "bat" computes `W + W B + B` blockwise."""
    block = parts["miss_block"].double()

    def repeat(weight: Tensor) -> Tensor:
        rows = block.repeat(1, len(weight) // block.shape[1]).to(weight)
        return weight + rows[torch.arange(weight.shape[1]) % len(rows)].T

    def multiply(weight: Tensor) -> Tensor:
        size, own = block.shape[-1], block.to(weight)
        parted = weight.reshape(len(weight) // size, size, -1, size)
        made: Tensor = torch.einsum("apbq,aqr->apbr", parted, own) + own[:, :, None]
        return weight + made.reshape(weight.shape)

    yield "weight", Mapped(multiply if config.get("init_weights") == "bat" else repeat)

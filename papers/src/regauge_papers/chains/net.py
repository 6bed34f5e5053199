"""Complete published deep weight space networks: layers, normalization, and the two heads of the published code."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from regauge.core.symmetry import Symmetry
from regauge.weightspace.heads.invariant import Invariant
from regauge.weightspace.heads.unit_features import UnitFeatures
from regauge.weightspace.layers.reading import Pools
from regauge.weightspace.layout.compile import compile_layout
from regauge_papers.chains.config import ChainConfig
from regauge_papers.chains.maps import Map, Resize, plain, pooled
from regauge_papers.chains.reading import Chain, axes_of


class ChainDWS(nn.Module):
    """A reimplementation of the nets of DWSNets and Deep-Align for chains of linear layers, for comparisons.

        net = ChainDWS(symmetry, ChainConfig(inputs_to=8), head=UnitFeatures(128), generator=generator)
        net(population)                       # {group: [models, units, 128]}, as Deep-Align matches by

    Inputs and classes remain axes of the first and last tensors in all layers. Therefore the cost of a layer is
    proportional to the size of the first weight. `Metanet` with `layer=DWS()` projects inputs and classes once, and
    reads any network. The net does not standardize weights. Standardize weights by one number for each tensor, because
    the per-entry statistics of the published scripts break the symmetry. Each tensor is pooled once, and values that no
    head reads are not computed. All computed values equal the values of the published code, except for its faults. Two
    faults are settings of `ChainConfig`. The following faults are not repeated:

    - dropout was active in evaluation;
    - values that only unread outputs of the last layer need were computed, and had parameters without gradients;
    - the number of heads had to divide the number of inputs, even if there is no attention over inputs;
    - if all features of a unit were zero, the normalized features were NaN. In `ChainDWS`, the normalized features are
    zero.

    The net respects only permutations (`net.parts`). The net does not read convolutions, which the published code pads
    to one size.

    Args:
        symmetry: The symmetry of the networks, which are chains of at least three linear layers with biases.
        config: The settings of the net.
        head: `UnitFeatures` returns the features of hidden biases in the last layer, each divided by its norm, times
            one learned number. `Invariant` without a hidden layer maps the features of all tensors, pooled over hidden
            units, to numbers.
        generator: The random generator of the initial weights.

    Raises:
        ValueError: The networks are no chains, the head is of another class, or the head has a hidden layer.
    """

    parts = ("permutation",)

    def __init__(
        self,
        symmetry: Symmetry,
        config: ChainConfig,
        *,
        head: UnitFeatures | Invariant,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        is_matched = isinstance(head, UnitFeatures)
        if not is_matched and not (isinstance(head, Invariant) and head.hidden is None):
            raise ValueError(
                f"{head} is no head of the published code; choose UnitFeatures, or Invariant without a hidden layer"
            )
        self.config, self.head = config, head
        self.chain = Chain.of(compile_layout(symmetry))
        sizes, count = self.chain.sizes, len(self.chain.weights)
        axes = axes_of(len(sizes))
        last = head.width if isinstance(head, UnitFeatures) else config.hidden
        widths = [1, *[config.hidden] * (config.layers - 1), last]
        read = [*range(count, 2 * count - 1)] if is_matched else [*range(2 * count)]
        links = [_links(config, axes, read)]
        while len(links) < config.layers:
            read = sorted({source for sources in links[0].values() for source in sources})
            links.insert(0, _links(config, axes, read))
        self.layers, self.norms = nn.ModuleList(), nn.ModuleList()
        for k, link in enumerate(links):
            heads = 1 if k == config.layers - 1 else config.heads
            self.layers.append(_Layer(config, sizes, link, (widths[k], widths[k + 1]), heads, generator))
            if k:
                self.norms.append(nn.ModuleDict({f"{t}": nn.BatchNorm1d(widths[k]) for t in links[k - 1]}))
        if isinstance(head, UnitFeatures):
            self.scale = nn.Parameter(torch.ones(1))
        else:
            fixed = sum(sizes[place] for place in (0, -1, -1))
            self.classify = plain(last * (len(axes) - 3 + fixed), head.outputs, generator)

    def forward(self, population: Mapping[str, Tensor]) -> Any:
        """Return unit features `{group: [models, units, width]}`, or numbers `[models, outputs]`."""
        x = self.features(population)
        if isinstance(self.head, UnitFeatures):
            hidden = x[len(self.chain.weights) : -1]
            units = (self.scale * nn.functional.normalize(bias, dim=-1) for bias in hidden)
            return dict(zip(self.chain.sets, units, strict=True))
        x = [self._drop(nn.functional.relu(tensor)) for tensor in x]
        first, *inner, last = x[: len(self.chain.weights)]
        *biases, output = x[len(self.chain.weights) :]
        numbers = [pooled(tensor, (1, 2), self.config) for tensor in inner]
        numbers += [pooled(first, (2,), self.config).flatten(1), pooled(last, (1,), self.config).flatten(1)]
        numbers += [*(pooled(bias, (1,), self.config) for bias in biases), output.flatten(1)]
        return self.classify(torch.cat(numbers, -1))

    def features(self, population: Mapping[str, Tensor], *, layers: int | None = None) -> list[Tensor]:
        """Return the features of weights `[models, inputs, outputs, width]` and then biases, after some or all layers.

        Tensors that neither a later layer nor the head reads are empty.
        """
        dtype = next(self.parameters()).dtype
        x = [tensor.to(dtype) for tensor in self.chain.read(population)]
        for k, layer in enumerate(self.layers[:layers]):
            if k:
                norms = self.norms[k - 1]
                assert isinstance(norms, nn.ModuleDict)
                x = [self._normalize(norms[f"{t}"], y) if f"{t}" in norms else y for t, y in enumerate(x)]
            x = layer(x)
        return x

    def _normalize(self, norm: nn.Module, x: Tensor) -> Tensor:
        """Normalize by statistics over networks and entries, which no permutation changes."""
        return self._drop(nn.functional.relu(norm(x.flatten(0, -2)).reshape(x.shape)))

    def _drop(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, self.config.dropout, self.training)


def _links(config: ChainConfig, axes: tuple[tuple[int, ...], ...], targets: list[int]) -> dict[int, list[int]]:
    """Return, for each tensor that is written, the tensors that it reads."""
    return {
        target: [k for k, places in enumerate(axes) if not config.is_diagonal or {*places} & {*axes[target]}]
        for target in targets
    }


class _Layer(nn.Module):
    """A layer that sums all maps between tensors and divides by the number of tensors."""

    def __init__(
        self,
        config: ChainConfig,
        sizes: tuple[int, ...],
        sources: dict[int, list[int]],
        widths: tuple[int, int],
        heads: int,
        generator: torch.Generator | None,
    ) -> None:
        super().__init__()
        self.config = config
        places, count = len(sizes), len(sizes) - 1
        core = sizes if config.inputs_to is None else (config.inputs_to, *sizes[1:])
        axes = axes_of(places)
        self.sources = sources
        hidden, everywhere = frozenset(range(1, places - 1)), frozenset(range(places))
        self.maps = nn.ModuleDict()
        for target, heard in sources.items():
            for source in heard:
                sets = hidden
                is_constant = target == count - 1 and source in (count - 2, *range(count, 2 * count - 2))
                if source < count <= target and config.are_biases_blind:
                    sets = everywhere
                elif is_constant and config.is_last_constant:
                    sets = hidden | {places - 1}
                made = Map(axes[source], axes[target], sets, core, widths, heads, config, generator)
                self.maps[f"{source}_{target}"] = made
        self.is_resized = config.inputs_to is not None
        if self.is_resized:
            self.down = Resize(sizes[0], core[0], generator)
            if 0 in sources:
                self.up = Resize(core[0], sizes[0], generator)
                self.skip = plain(*widths, generator)

    def forward(self, x: list[Tensor]) -> list[Tensor]:
        whole = x[0]
        if self.is_resized:
            x = [self.down(whole), *x[1:]]
        pools = [Pools.of(tensor, self.config.pooling) for tensor in x]
        made = [tensor.new_zeros(0) for tensor in x]
        for target, sources in self.sources.items():
            parts = [self.maps[f"{source}_{target}"](pools[source]) for source in sources]
            total = torch.zeros((), dtype=whole.dtype, device=whole.device)
            for part in sorted(parts, key=Tensor.numel):  # The whole array is touched last.
                total = total + part
            shape = (*x[target].shape[:-1], total.shape[-1])
            made[target] = (total / len(x)).expand(shape)
        if self.is_resized and 0 in self.sources:
            made[0] = self.up(made[0]) + self.skip(whole)
        return made

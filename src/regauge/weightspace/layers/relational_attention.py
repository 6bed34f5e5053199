"""Relational attention: units attend to connected units through the weights between them."""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from string import ascii_lowercase

import torch
from torch import Tensor, nn

from regauge.weightspace.features import Features, at_units, from_nested, order_as, others, spread
from regauge.weightspace.layers.dense import Dense, Norm
from regauge.weightspace.layers.plan import ForEnds, Layer, LayerPlan
from regauge.weightspace.layers.trunk import PairUpdate, Update
from regauge.weightspace.layout.blocks import Block, End
from regauge.weightspace.layout.compile import Layout
from regauge.weightspace.shares import LOGARITHM_FLOOR, Shares, log_weights, weigh


@dataclass(frozen=True)
class RelationalAttention(Layer):
    """A layer in which units attend to connected units, themselves, the network, and units that contain them.

    For units x and y, and the features `e` of the weight between x and y, attention computes

        logit = q_x k_y + (A e) k_y + q_x (B e) + c e,      message = (M e) * v_y + V e

    The softmax runs over all keys to which x attends, separately for each head. Before the attention, `e <- e + MLP(e,
    x, y)`. After the attention, `x <- x + MLP(x, messages)`. Every norm normalizes single vectors. Attention is
    computed only between units that a weight connects, in dense blocks; a weight of zero also connects units. In the
    paper, units attend to all units instead. The term `c e` replaces the paper's product of `A e` and `B e`. Norms come
    before the layers (pre-norm), which helps deep nets to keep information about the inputs.

    Attributes:
        heads: The number of attention heads.
        expansion: The width of the attention and of the MLPs' hidden layers, as a multiple of the net's width.

    References:
        Kofinas et al. (2024), section 3; Diao and Loynd (2023), section 3, for attention with features of edges.
    """

    heads: int = 4
    expansion: int = 2

    def __post_init__(self) -> None:
        if self.heads < 1 or self.expansion < 1:
            raise ValueError(f"heads={self.heads} and expansion={self.expansion} must be at least 1")

    def build(self, plan: LayerPlan) -> nn.Module:
        """Return the torch module of one layer; see `weightspace.layers`."""
        return _Layer(self, plan)


@dataclass(frozen=True)
class _Tokens:
    """The logits `[..., tokens, heads]` and values `[..., tokens, heads, head width]` of tokens in attention."""

    logits: Tensor
    values: Tensor

    def collect(self, weights: Tensor) -> Tensor:
        """Return the sum of the values of tokens, weighted by attention, `[..., heads, head width]`."""
        return torch.einsum("...nh,...nhd->...hd", weights, self.values)


class _Token(nn.Module):
    """The linear maps from tokens to keys and values, for tokens that no weight connects to the unit: the unit itself,
    units that contain it, and the network.
    """

    def __init__(self, width: int, heads: int, attention: int, generator: torch.Generator | None) -> None:
        super().__init__()
        self.heads = heads
        self.key = Dense(width, attention, is_biased=False, generator=generator)
        self.value = Dense(width, attention, generator=generator)
        self.logit = nn.Parameter(torch.zeros(heads))

    def forward(self, query: Tensor, x: Tensor) -> _Tokens:
        """Return logits and values of tokens `[..., tokens, width]` for queries `[..., heads, head width]`."""
        keys, values = (_split(dense(x), self.heads) for dense in (self.key, self.value))
        return _Tokens(torch.einsum("...hd,...nhd->...nh", query, keys) + self.logit, values)


class _Connection(nn.Module):
    """The part of attention that depends on the features of weights, for the units of one set that a block of weights
    connects.

    A network has many weights but few units. Therefore unit vectors, not features of weights, are multiplied by the
    matrices of linear maps. For the same reason, features are summed before a linear map is applied.
    """

    def __init__(self, width: int, heads: int, attention: int, generator: torch.Generator | None) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.addend = (
            Dense(width, attention, is_biased=False, generator=generator) for _ in range(3)
        )
        self.factor = Dense(width, attention, generator=generator)
        self.logit = Dense(width, heads, generator=generator)

    def pull(self, dense: Dense, x: Tensor) -> Tensor:
        """Apply the transposed linear map to features of each head: `[..., heads, head width]` becomes `[..., heads,
        width]`.
        """
        return torch.einsum("...hd,chd->...hc", x, _split(dense.weight.T, self.heads))

    def push(self, pooled: Tensor) -> Tensor:
        """Apply a linear map to features of each head: `[..., heads, width]` becomes `[..., heads, head width]`."""
        return torch.einsum("...hc,chd->...hd", pooled, _split(self.addend.weight.T, self.heads))


@dataclass(frozen=True)
class _Edges:
    """The connections of the units of one set through a block of weights. An end is one of the unit sets that the block
    connects.

    The field `values` contains the values of the units at all other ends of the block.

    The logits are `[models, *sizes, connections, heads]`.
    """

    logits: Tensor
    block: Block
    end: End
    connection: _Connection
    features: Tensor
    values: Tensor

    def collect(self, weights: Tensor) -> Tensor:
        """Return the sum of the values of connections, weighted by attention, `[models, *sizes, heads, head width]`."""
        away, heads = others(self.end, self.block), weights.shape[-1]
        order = _order(self.end, self.block)
        weights = weights.reshape(len(weights), *(self.block.sizes[k] for k in order), heads)
        weights = weights.permute(0, *(1 + order.index(k) for k in range(len(order))), weights.ndim - 1)
        message = self.connection.factor(self.features) * self.values
        message = _split(message, heads) * weights.unsqueeze(-1)
        message = order_as((message.sum(away) if away else message).flatten(-2), self.end)
        labels, end = _letters(self.end, self.block)
        pooled = torch.einsum(f"m{labels}y,m{labels}z->m{end}yz", weights, self.features)
        return _split(message, heads) + self.connection.push(pooled)


class _Layer(nn.Module):
    def __init__(self, settings: RelationalAttention, plan: LayerPlan) -> None:
        super().__init__()
        width, hidden = plan.width, settings.expansion * plan.width
        heads = self.heads = settings.heads
        attention = heads * math.ceil(hidden / heads)
        self.scale = (attention / heads) ** -0.5

        def token() -> _Token:
            return _Token(width, heads, attention, plan.generator)

        self.network = Update(plan, hidden, is_read="network" in plan.reads)
        if plan.has_units:
            self.units = Update(plan, hidden)
            self.query, self.value = plan.dense(width, attention), plan.dense(width, attention)
            self.key = plan.dense(width, attention, is_biased=False)
            self.heard = plan.dense(attention, hidden, is_biased=False)
            self.whole = token()
            if self.network.is_read:
                self.asked, self.member = plan.dense(width, attention), token()
                self.network_heard = plan.dense(attention, hidden, is_biased=False)
        if plan.is_nested:
            self.base, self.inner = token(), token()
        if plan.has_pairs:
            self.pairs, self.heard_norm = PairUpdate(plan, hidden), Norm(width)
            self.connections = ForEnds(
                _Connection(width, heads, attention, plan.generator) for _ in range(plan.count_ends())
            )

    def forward(self, features: Features, layout: Layout) -> Features:
        units = {name: self.units.norm(x) for name, x in features.units.items()}
        network = self.network.norm(features.network)
        pairs = self.pairs.change(features, units, layout) if layout.pair_blocks else {}
        attended = self._attend(units, pairs, network, layout, features.shares) if units else {}
        result = {
            name: self.units(features.units[name], units[name], [self.heard(heard)]) for name, heard in attended.items()
        }
        changed = self.network(features.network, network, self._hear_members(network, result, layout, features.shares))
        return features.change(result, pairs, changed)

    def _hear_members(
        self, network: Tensor, units: dict[str, Tensor], layout: Layout, shares: Shares
    ) -> Iterator[Tensor]:
        """Yield the message to the network's feature vector, which attends to all units."""
        if units:
            everything = torch.cat([self.units.norm(x).flatten(1, -2) for x in units.values()], 1)
            tokens = self.member(_split(self.asked(network), self.heads) * self.scale, everything)
            logits = tokens.logits
            if shares:
                ones = [torch.ones(*x.shape[:-1], 1).to(x) for x in units.values()]
                grids = [layout.grids[name] for name in units]
                weighed = [weigh(x, range(1, x.ndim - 1), g, shares) for x, g in zip(ones, grids, strict=True)]
                # softmax(logit + log w) is the softmax in which each unit occurs w times.
                logits = logits + torch.cat([x.flatten(1, -2) for x in weighed], 1).clamp_min(LOGARITHM_FLOOR).log()
            yield self.network_heard(tokens.collect(logits.softmax(-2)).flatten(-2))

    def _attend(
        self, units: dict[str, Tensor], pairs: dict[str, Tensor], network: Tensor, layout: Layout, shares: Shares
    ) -> dict[str, Tensor]:
        """Return the messages that every unit receives by attention, `[models, *sizes, attention]`."""
        queries = {name: _split(self.query(x), self.heads) * self.scale for name, x in units.items()}
        keys = {name: _split(self.key(x), self.heads) for name, x in units.items()}
        values = {name: self.value(x) for name, x in units.items()}
        found: dict[str, list[_Tokens | _Edges]] = {}
        for name, query in queries.items():
            own = _Tokens((query * keys[name]).sum(-1).unsqueeze(-2), _split(values[name], self.heads).unsqueeze(-3))
            found[name] = [own, self.whole(query, at_units(network, query))]
            for is_outer, there in from_nested(name, units, layout, shares):
                found[name].append((self.base if is_outer else self.inner)(query, there.unsqueeze(-2)))
        for block in layout.pair_blocks:
            counts = [log_weights(others(end, block), layout.grid(block.name), shares) for end in block.ends]
            for edges in self._edges(block, self.heard_norm(pairs[block.name]), queries, keys, values, counts):
                found[edges.end.units].append(edges)
        result = {}
        for name, sources in found.items():
            weights = torch.cat([source.logits for source in sources], -2).softmax(-2)
            total, start = torch.zeros(()).to(weights), 0
            for source in sources:
                count = source.logits.shape[-2]
                total = total + source.collect(weights.narrow(-2, start, count))
                start += count
            result[name] = total.flatten(-2)
        return result

    def _connection(self, end: int) -> _Connection:
        found = self.connections[self.connections.number(end)]
        assert isinstance(found, _Connection)
        return found

    def _edges(
        self,
        block: Block,
        features: Tensor,
        queries: dict[str, Tensor],
        keys: dict[str, Tensor],
        values: dict[str, Tensor],
        counts: list[Tensor | None],
    ) -> list[_Edges]:
        """Return the connections of a block for each unit set that it connects. The log weights of units are added to
        the logits.
        """
        at = [self._connection(k) for k in range(len(block.ends))]
        logits = [connection.logit(features) for connection in at]
        logits = [made if one is None else made + one for made, one in zip(logits, counts, strict=True)]
        for k, end in enumerate(block.ends):
            # One product with the features for all that comes from this end: its queries, and its keys for the others.
            pulled = [at[k].pull(at[k].key, queries[end.units])]
            receivers = [k, *(j for j in range(len(block.ends)) if j != k)]
            pulled += [at[j].pull(at[j].query, keys[end.units]) * self.scale for j in receivers[1:]]
            labels, own = _letters(end, block)
            products = torch.einsum(f"m{labels}z,m{own}yz->m{labels}y", features, torch.cat(pulled, -2))
            for j, product in zip(receivers, _split(products, len(receivers)).unbind(-2), strict=True):
                logits[j] = logits[j] + product
            for j in receivers[1:]:
                logits[j] = logits[j] + _between(queries, block.ends[j], keys, end, block)
        result = []
        for k, end in enumerate(block.ends):
            order = _order(end, block)
            kept = [block.sizes[axis] for axis in end.axes]
            arranged = logits[k].permute(0, *(1 + axis for axis in order), logits[k].ndim - 1)
            count = math.prod(block.sizes) // math.prod(kept)
            heard = [spread(values[other.units], other, block) for j, other in enumerate(block.ends) if j != k]
            result.append(
                _Edges(
                    arranged.reshape(len(arranged), *kept, count, self.heads),
                    block,
                    end,
                    at[k],
                    features,
                    functools.reduce(torch.add, heard),
                )
            )
        return result


def _split(x: Tensor, parts: int) -> Tensor:
    """Split the last axis of a tensor: `[..., width]` becomes `[..., parts, width / parts]`."""
    return x.reshape(*x.shape[:-1], parts, -1)


def _order(end: End, block: Block) -> tuple[int, ...]:
    """Return the axes of a block: first the axes of one unit set, in their order in the set, then all other axes."""
    return (*end.axes, *(axis - 1 for axis in others(end, block)))


def _letters(end: End, block: Block) -> tuple[str, str]:
    """Return letters for `einsum`: for the axes of a block, and for the axes of one unit set that the block connects.
    The letters m, y and z are not used.
    """
    letters = [letter for letter in ascii_lowercase if letter not in "myz"][: len(block.sizes)]
    return "".join(letters), "".join(letters[axis] for axis in end.axes)


def _between(queries: dict[str, Tensor], one: End, keys: dict[str, Tensor], other: End, block: Block) -> Tensor:
    """Return products of queries of one unit set with keys of another unit set, `[models, *ones, heads]`."""
    labels, left = _letters(one, block)
    _, right = _letters(other, block)
    out = "".join(letter for letter in labels if letter in left + right)
    products = torch.einsum(f"m{left}yz,m{right}yz->m{out}y", queries[one.units], keys[other.units])
    shape = [size if letter in out else 1 for letter, size in zip(labels, block.sizes, strict=True)]
    return products.reshape(len(products), *shape, -1)

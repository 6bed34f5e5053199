"""Scaled dot-product attention, written out as its products and its softmax."""

from collections.abc import Sequence

from regauge.discovery.builder import Builder
from regauge.discovery.laws import Value
from regauge.discovery.operator_call import Call, NoRuleError, Rule, as_value
from regauge.discovery.rules.norms import normalized
from regauge.discovery.rules.products import apply_matmul


def attention(b: Builder, call: Call) -> Value:
    """softmax(q k^T + mask) v; with grouped queries, each key-value head serves several query heads."""
    if call.get("dropout_p", 0.0):
        raise NoRuleError("chance")
    q, k, v = (as_value(b, call[key]) for key in ("query", "key", "value"))
    if call.get("enable_gqa", False) and q.shape[-3] != k.shape[-3]:
        times = q.shape[-3] // k.shape[-3]
        k, v = _repeated(b, k, times), _repeated(b, v, times)
    lead = list(call.shape[:-2])
    rows, columns = q.shape[-2], k.shape[-2]
    order = [*range(k.ndim - 2), k.ndim - 1, k.ndim - 2]
    scores = apply_matmul(b, q, as_value(b, b.permute(k, order)), [*lead, rows, columns])
    mask = call.get("attn_mask")
    if call.get("is_causal", False):
        mask = Value.fixed([rows, columns])
    if mask is not None:
        scores = b.add([scores, as_value(b, mask)], scores.shape)
    weights = normalized(b, scores, [-1])
    return apply_matmul(b, weights, v, [*lead, rows, v.shape[-1]])


def _repeated(b: Builder, x: Value, times: int) -> Value:
    """Each head repeated for the query heads that it serves."""
    *lead, heads, length, dim = x.shape
    wide = b.expand(as_value(b, b.unsqueeze(x, len(lead) + 1)), [*lead, heads, times, length, dim])
    shape: Sequence[int] = [*lead, heads * times, length, dim]
    return as_value(b, b.view(wide, shape))


RULES: dict[str, Rule] = {"scaled_dot_product_attention": attention}

"""Can entries be equal? Which of several equal entries comes first depends on their order, not on their values."""

from typing import Any

from torch.fx import Node

GENERIC = """
    conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution addmm baddbmm addmv embedding
    lstm gru rnn_tanh bilinear
"""
"""Operators whose results are different for almost all parameters, whatever comes in."""
PRODUCTS = "matmul mm bmm mv einsum mul multiply scaled_dot_product_attention"
"""Operators whose results are different if all operands' entries are."""
SUMS = "add sub subtract rsub"
"""Operators whose results are different if one operand's entries are."""
INJECTIVE = """
    softmax _softmax log_softmax _log_softmax _safe_softmax sigmoid log_sigmoid tanh exp exp2 expm1 log log2 log10
    log1p softplus elu selu celu leaky_relu silu gelu mish abs absolute square pow sqrt rsqrt reciprocal neg negative
    sin cos erf atan asinh sinh tan layer_norm native_layer_norm rms_norm _fused_rms_norm batch_norm group_norm
    _native_batch_norm_legit_no_training native_group_norm instance_norm view _unsafe_view reshape flatten unflatten
    permute transpose t mT movedim squeeze unsqueeze slice select narrow unbind split split_with_sizes chunk clone
    contiguous detach alias dropout _to_copy to float double type_as div divide true_divide sum mean cumsum var std
    linalg_vector_norm logsumexp getitem amax amin
"""
"""Operators whose results are different if the first operand's entries are."""


def may_tie(node: Any) -> bool:
    """Whether entries of a traced tensor are equal with a probability that is not zero (zeros of a ReLU)."""
    return _Search().may_tie(node)


_KINDS = {
    name: kind
    for kind, names in (("generic", GENERIC), ("product", PRODUCTS), ("sum", SUMS), ("injective", INJECTIVE))
    for name in names.split()
}


class _Search:
    def __init__(self) -> None:
        self.known: dict[Node, bool] = {}

    def may_tie(self, node: Any) -> bool:
        if isinstance(node, list | tuple):
            return any(self.may_tie(part) for part in node)
        if not isinstance(node, Node):
            return bool(node == 0)
        if node not in self.known:
            self.known[node] = False
            self.known[node] = self._decide(node)
        return self.known[node]

    def _decide(self, node: Node) -> bool:
        if node.op in ("placeholder", "get_attr"):
            return False
        schema = getattr(node.target, "_schema", None)
        name = schema.name.split("::")[-1] if schema is not None else getattr(node.target, "__name__", "")
        tensors = [arg for arg in node.args[:3] if isinstance(arg, Node | list | tuple)]
        kind = _KINDS.get(name)
        if kind == "generic":
            return False
        if name == "linear":
            return len(node.args) < 3 and self.may_tie(tensors[:2])
        if kind == "product":
            return self.may_tie([arg for arg in node.args if not isinstance(arg, str)])
        if kind == "sum":
            return all(self.may_tie(tensor) for tensor in tensors)
        if kind == "injective":
            return self.may_tie(node.args[0])
        return True

"""Kinds of adapters other than LoRA, and the tensors that each kind stores."""

import re
from collections.abc import Mapping

from torch import Tensor

from regauge.checkpoints.formats.kinds.bases import deft, frod, osf, peanut, psoft
from regauge.checkpoints.formats.kinds.entries import (
    beft,
    c3a,
    fourier,
    ia3,
    miss,
    norms,
    shira,
    supertuning,
    tokens,
    waveft,
)
from regauge.checkpoints.formats.kinds.factors import (
    adalora,
    delora,
    glora,
    gralora,
    hira,
    loha,
    lokr,
    pvera,
    randlora,
    tinylora,
    unilora,
    vblora,
    vera,
)
from regauge.checkpoints.formats.kinds.kind import Kind, Parts
from regauge.checkpoints.formats.kinds.turns import boft, hra, oft, road

KINDS: Mapping[str, Kind] = {
    "IA3": Kind("ia3_l", ia3),
    "LOHA": Kind("hada_(w[12]_[ab]|t[12])", loha),
    "LOKR": Kind("lokr_(w[12](_[ab])?|t2)", lokr),
    "ADALORA": Kind("lora_[ABE]", adalora),
    "VERA": Kind("vera_(lambda_[bd]|[AB])", vera),
    "HRA": Kind("hra_u", hra),
    "OFT": Kind(r"oft_(embedding_)?R\.weight", oft),
    "HIRA": Kind("hira_(embedding_)?[AB]", hira),
    "BEFT": Kind("beft_bias", beft),
    "C3A": Kind("c3a_kernel", c3a),
    "DELORA": Kind("delora_(A|B|lambda|w_norm)", delora),
    "FOURIERFT": Kind("fourierft_spectrum", fourier),
    "MISS": Kind("miss_block", miss),
    "ROAD": Kind("road_(theta|alpha)", road),
    "SHIRA": Kind("shira_(weight|indices)", shira),
    "LN_TUNING": Kind(r"ln_tuning_layers\.(weight|bias)", norms),
    "TRAINABLE_TOKENS": Kind("trainable_tokens_delta", tokens),
    "PEANUT": Kind(r"peanut_([AB]|(en|de)coders\.\d+)\.weight", peanut),
    "WAVEFT": Kind("waveft_spectrum", waveft),
    "PSOFT": Kind(r"psoft_R\.(weight|vector_[ab])", psoft),
    "PVERA": Kind("pvera_(lambda_[bd]|[AB])", pvera),
    "GRALORA": Kind(r"gralora_[AB](_general\.weight)?", gralora),
    "VBLORA": Kind("vblora_(logits_[AB]|vector_bank)", vblora),
    "RANDLORA": Kind("randlora_(lambda|gamma|[AB])", randlora),
    "DEFT": Kind("deft_[PR]", deft),
    "BOFT": Kind("boft_[Rs]", boft),
    "SUPERTUNING": Kind(r"supertuning_(values|indices|lora_[AB]\.weight)", supertuning),
    "GLORA": Kind(r"glora_[A-E]\.(Xd|Xu|X|zeros)", glora),
    "TINYLORA": Kind(r"tinylora_([ABP]|v\.\d+)", tinylora),
    "UNILORA": Kind("unilora_(theta_d|(indices|scales)_[AB])", unilora),
    "FROD": Kind(r"frod_(lambda_l|lambda_s_values|(V|s_indices|s_size)\.[^.]+)", frod),
    "OSF": Kind(r"osf_svd_params\.[USV]_low", osf),
}
"""Every kind of adapter except LoRA, by its name in configurations."""


def split_modules(kind: Kind, params: Mapping[str, Tensor], prefix: str) -> tuple[dict[str, Parts], Parts, set[str]]:
    """Return the tensors of each module, the tensors that all modules share, and the names of all these tensors."""
    modules: dict[str, dict[str, Tensor]] = {}
    known: set[str] = set()
    pattern = re.compile(rf"(?P<module>.+)\.(?P<part>{kind.names})(\.default)?")
    for name, tensor in params.items():
        found = pattern.fullmatch(name.removeprefix(prefix))
        if found is not None:
            modules.setdefault(found["module"], {})[found["part"]] = tensor
            known.add(name)
    shared = modules.pop("base_model", {})
    return {**modules}, shared, known

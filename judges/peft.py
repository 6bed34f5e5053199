"""peft's adapters on regauge: every adapter of its tests of small models, merged by both.

    PEERS=FOLDER .venv/bin/python judges/peft.py [PIECE-OF-A-NAME ...]

peft adapts the model of a case, the trained values are moved at random, and the adapter is saved. A case passes if
every tensor of `BASE+ADAPTER` is that of peft's own `merge_and_unload`, to 1e-6 of its largest entry. Kinds that peft
cannot merge pass if they are refused.
"""

import os
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from judge import Case, Failed, Peer, judge, sentence
from safetensors.torch import save_file
from torch import Tensor

from regauge.checkpoints.checkpoint import Checkpoint

PEER = Peer(
    "peft",
    "https://github.com/huggingface/peft",
    "5d602fdbff04c33c1c4de55cda9d4ae1d7cb7e40",
    ("peft==0.21.2", "accelerate==1.15.0", "psutil", "parameterized"),
    ("transformers", "pytest"),
)
TOLERANCE = 1e-6
TWICE = (
    "peft's merge_and_unload adds the change of out_proj twice, so that its merged model computes something else than "
    "its adapted one; regauge adds it once"
)
UNSAVED = (
    "peft draws the places of Uni-LoRA's values anew for all modules in the order of the model, which no file holds; "
    "adapters saved with save_indices=True are read"
)
CLUSTERED = (
    "peft finds the rows of AdaMSS's subspaces anew, by a k-means of scikit-learn of the base's singular vectors; the "
    "file has only how many rows each subspace has"
)
ROUNDED = "peft cuts the smallest singular values in float32, regauge in float64"
EXPLAINED = {
    "MHA 1 LoRA": TWICE,
    "MHA 2 LoRA": TWICE,
    "Vanilla MLP 1 LoRA with KaSA": ROUNDED,
    "Embedding + transformers Conv1D 1 UniLora": UNSAVED,
    **{f"Vanilla MLP {k} UniLora": UNSAVED for k in range(1, 6)},
    **{f"Vanilla MLP {k} Adamss": CLUSTERED for k in range(1, 5)},
    "Vanilla MLP 5 Adamss with custom params": CLUSTERED,
    "Vanilla MLP 6 Adamss with ASA": CLUSTERED,
    "Vanilla MLP 7 Adamss with dynamic rank": CLUSTERED,
}
"""Sentences for cases that do not pass."""


def cases(checkout: Path) -> Iterable[Case]:
    """Every case, in the order of the record."""
    import peft  # that of the wheel, before the checkout is in the path for its tests

    assert not Path(peft.__file__ or "").is_relative_to(checkout)
    sys.path.insert(0, str(checkout))
    for name in ("diffusers", "datasets"):  # which other tests use
        sys.modules.setdefault(name, MagicMock())
    from tests.test_custom_models import TEST_CASES, MockTransformerWrapper

    seen: dict[str, int] = {}
    for name, model, kind, settings in TEST_CASES:
        seen[name] = seen.get(name, 0) + 1
        title = name if seen[name] == 1 else f"{name} ({seen[name]})"
        yield Case(
            title,
            lambda model=model, kind=kind, settings=settings: merge_both(
                MockTransformerWrapper.from_pretrained(model), kind, settings
            ),
        )


def merge_both(model: Any, kind: Any, settings: Mapping[str, Any]) -> str | None:
    """Merge an adapter by both, and compare."""
    from peft import get_peft_model

    base = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    config = kind(**settings)
    adapted = get_peft_model(model, config)
    torch.manual_seed(1)
    for name, value in adapted.named_parameters():
        is_base = ".base_layer." in name and not any(f".{one}" in name for one in ("lora_", "modules_to_save"))
        if value.requires_grad and value.is_floating_point() and not is_base:
            value.data += 0.1 * torch.randn_like(value)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place, "adapter")
        adapted.save_pretrained(str(folder))
        save_file({name: tensor.contiguous() for name, tensor in base.items()}, Path(place, "base.safetensors"))
        try:
            merged = adapted.merge_and_unload(safe_merge=True).state_dict()
            theirs = {n.replace(".modules_to_save.default", ""): t for n, t in merged.items() if ".original_" not in n}
        except Exception as error:
            theirs, reason = None, sentence(error)
        try:
            found = Checkpoint.open(f"{place}/base.safetensors+{folder}")
            ours = {name: found[name] for name in found}
        except ValueError as error:
            if theirs is None:
                return f"refused by both; regauge: {sentence(error)}"
            raise Failed(f"refused: {sentence(error)}") from error
        if theirs is None:
            raise Failed(f"peft cannot merge this ({reason}), regauge does")
        return compare(ours, theirs)


def compare(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> str | None:
    """Raise `Failed` where the networks differ by more than they may."""
    if ours.keys() != theirs.keys():
        raise Failed(f"other tensors: {sorted(ours.keys() ^ theirs.keys())[:4]}")
    far = {
        n: float((ours[n].double() - t.double()).abs().max() / t.double().abs().max().clamp(min=1e-30))
        for n, t in theirs.items()
    }
    wrong = [name for name in far if not far[name] <= TOLERANCE]
    if wrong:
        worst = max(wrong, key=lambda name: far[name])
        raise Failed(f"{len(wrong)} of {len(far)} tensors differ, {worst} by {far[worst]:.2g} of its largest entry")
    return None


if __name__ == "__main__":
    judge(PEER, cases, EXPLAINED)

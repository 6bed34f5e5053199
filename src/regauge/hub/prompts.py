"""Token ids of texts, and residual streams that language models in folders compute from texts."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regauge.hub.tokenizers import load_tokenizer


def open_tokens(folder: str | Path) -> Callable[[str], Tensor]:
    """Return a function that maps a text to token ids `[1, token]`, beginning with the beginning-of-sequence token.

    Raises:
        ValueError: The folder has no tokenizer. The returned function raises the error if a text has no tokens.
    """
    tokenizer = load_tokenizer(Path(folder), "it reads the prompts: add tokenizer.json")

    def read(text: str) -> Tensor:
        found: Tensor = tokenizer([(tokenizer.bos_token or "") + text], return_tensors="pt", add_special_tokens=False)[
            "input_ids"
        ]
        if not found.numel():
            raise ValueError(f"{text!r} has no tokens; give a text")
        return found

    return read


def open_streams(folder: str | Path) -> Callable[[str], Tensor]:
    """Return a function that maps texts to the residual streams before the layers, `[layer, token, width]`, in float32.

    The model computes in the dtype of its files, on one text at a time.
    """
    from transformers import AutoModelForCausalLM

    read = open_tokens(folder)
    local: Any = {"local_files_only": True, "trust_remote_code": False, "dtype": "auto"}
    model: Any = AutoModelForCausalLM.from_pretrained(folder, **local)
    model.train(False)

    def run(text: str) -> Tensor:
        with torch.no_grad():
            states = model(input_ids=read(text), output_hidden_states=True).hidden_states[:-1]
        return torch.cat(list(states)).float()

    return run

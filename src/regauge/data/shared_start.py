"""The one initialization that all networks of inr2vec start from."""

from pathlib import Path

from safetensors.torch import load
from torch import Tensor

from regauge.data.files import DataFile, read

SHARED_START = DataFile(
    "the shared initialization of inr2vec",
    "inr2vec_init",
    "in3_out1_h512_l4.safetensors",
    "7c7e0541185294c26d56b77148337e863cdf52d1966b7c9a00c280577dd5a57c",
)


def shared_start(folder: str | Path | None = None) -> dict[str, Tensor]:
    """Parameters of a SIREN 3-512-512-512-512-1 with omega 30, by the names of `regauge.nets.siren.Siren`.

    Args:
        folder: Where the file is; `inr2vec_init` in the folder that the environment variable `REGAUGE_DATA` names if
            left out.

    Raises:
        FileNotFoundError: The file is not there; it has no public address.
        ValueError: The file's checksum is wrong.

    References:
        De Luigi et al. (2023), section 3.
    """
    content = read(SHARED_START, folder)
    tensors = load(content)
    # There a sine layer is a linear layer and its activation, so that names have one more number: layers.0.0.weight.
    parts = {name: name.split(".") for name in tensors}
    return {f"layers.{part[1]}.{part[-1]}": tensors[name] for name, part in sorted(parts.items())}

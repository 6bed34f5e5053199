"""Autoencoders of networks: an encoder maps each orbit to one vector, and a decoder maps vectors to networks."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor, nn

from regauge.checkpoints.claims import Claims
from regauge.checkpoints.described import DAMAGE, damage, read_described
from regauge.checkpoints.writing import save
from regauge.core.params import Params, below, require_finite, select, work_dtype
from regauge.learn.course import Trained
from regauge.learn.populations import read_blocks, to_net
from regauge.storage.architecture import Architecture
from regauge.storage.collection import Collection, Networks
from regauge.weightspace.decoders import DecoderSettings, decoder_of, describe_decoder
from regauge.weightspace.heads.invariant import Invariant
from regauge.weightspace.metanet import Metanet
from regauge.weightspace.net_files import make_net

KIND = "regauge autoencoder"
VERSION = "1"
DECODED_AT_ONCE = 256
"""The number of latent vectors that are decoded at a time."""


class Autoencoder:
    """A trained encoder and decoder for networks of one architecture.

        auto = load_autoencoder("auto.safetensors")
        latents = auto.encode(population)      # [models, latent], the same for all networks of an orbit
        auto.decode(latents)                   # canonical networks with nearly the same functions

    Latent vectors are computed in double precision. All networks of an orbit therefore have equal latent vectors, up to
    the rounding of the networks' weights. The latent vectors have the precision of the networks, but at least single
    precision.

    Attributes:
        encoder: The net that maps networks to latent vectors.
        decoder: The net that maps latent vectors to networks.
        settings: The settings of the decoder.
        rest: Tensors of a network that the decoder does not generate: buffers, and tensors without influence on the
            outputs.
        about: Facts about the training run, as JSON. The entry "scores" contains the scores of the autoencoder and of
            its baselines on test networks, and "networks" the numbers of networks. Further entries contain the
            settings.
        trained: The training history; None if the autoencoder was loaded from a file.
        tested: Indices of the test networks; None if the autoencoder was loaded from a file.
    """

    def __init__(
        self,
        encoder: nn.Module,
        decoder: nn.Module,
        settings: DecoderSettings,
        rest: Params,
        about: Mapping[str, Any],
        trained: Trained | None = None,
        tested: NDArray[np.int64] | None = None,
    ) -> None:
        self.encoder, self.decoder = encoder.double().eval(), decoder.double().eval()
        self.settings, self.rest, self.about, self.trained, self.tested = settings, rest, about, trained, tested

    @property
    def architecture(self) -> Architecture | None:
        """The architecture of the networks, if they were read from a store; otherwise None."""
        text = self.about.get("architecture")
        return None if text is None else Architecture.from_json(text)

    @torch.no_grad()
    def encode(self, networks: Networks | Sequence[Networks] | Collection) -> Float[Tensor, "models latent"]:
        """Return the latent vectors of networks.

        Args:
            networks: Parameters with a leading model axis, or a store, which is streamed; or a list of populations and
                stores.

        Raises:
            ValueError: The encoder does not accept the architecture of the networks, or a network is not finite.
        """
        collection = Collection(networks)
        latents: Tensor | None = None
        for places, params in read_blocks(collection, np.arange(len(collection))):
            read = self.encoder.layout.parameters if isinstance(self.encoder, Metanet) else params
            names = [name for name in read if name in params]
            require_finite({name: params[name] for name in names}, f"the networks from {places[0]} on")
            made: Tensor = self.encoder(to_net(params, self.encoder))
            if latents is None:
                floats = [tensor.dtype for tensor in params.values() if tensor.is_floating_point()]
                latents = made.new_empty(len(collection), made.shape[1], dtype=work_dtype(*floats))
            latents[torch.from_numpy(places)] = made.to(latents.dtype)
        if latents is None:
            raise ValueError("there are no networks to encode; give some")
        if not bool(latents.isfinite().all()):
            bad = int((~latents.isfinite().all(1)).nonzero()[0])
            raise ValueError(f"network {bad} has values that are too large to be encoded; leave it out")
        return latents

    @torch.no_grad()
    def decode(self, latents: Float[Tensor, "models latent"]) -> Params:
        """Return the networks that latent vectors describe, in canonical form: tensors with a leading model axis.

        Raises:
            ValueError: The vectors have the wrong length, or are not finite.
        """
        if not bool(torch.isfinite(latents).all()):
            raise ValueError(
                "some latent vectors hold NaN or Inf; no network belongs to them: check how they were made"
            )
        blocks = [self.decoder(part.double()) for part in torch.split(latents, DECODED_AT_ONCE)]
        made = {name: torch.cat([block[name] for block in blocks]).to(latents.dtype) for name in blocks[0]}
        for name, tensor in self.rest.items():
            made[name] = tensor.to(latents.dtype if tensor.is_floating_point() else tensor.dtype).expand(
                len(latents), *tensor.shape
            )
        return made

    def canonicalize(self, networks: Networks | Sequence[Networks] | Collection) -> Params:
        """Return the reconstruction of each network. All networks of an orbit have the same reconstruction."""
        return self.decode(self.encode(networks))

    def distances(self, networks: Networks, among: Networks | None = None) -> NDArray[np.float64]:
        """Return the distances between the latent vectors of `networks` and of `among` (default: `networks`)."""
        own = self.encode(networks).double()
        others = own if among is None else self.encode(among).double()
        found: NDArray[np.float64] = torch.cdist(own, others, compute_mode="donot_use_mm_for_euclid_dist").numpy()
        return found

    def nearest(
        self, networks: Networks, among: Networks, *, count: int = 5
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return, for each network, the networks of another population whose latent vectors are nearest, nearest first.

        Returns:
            The indices and the distances of the nearest networks, both `[networks, count]`. A population of fewer than
            `count` networks gives one column for each network.
        """
        found = torch.from_numpy(self.distances(networks, among)).sort(stable=True)
        return found.indices[:, :count].numpy(), found.values[:, :count].numpy()

    def save(self, path: str | Path, *, overwrite: bool = False) -> Path:
        """Write the autoencoder as one safetensors file, atomically.

        Raises:
            FileExistsError: The file exists and `overwrite` is false.
            ValueError: The name does not end in `.safetensors`, or the encoder is not a net of regauge.
        """
        if not isinstance(self.encoder, Metanet):
            raise ValueError(
                f"the encoder is a {type(self.encoder).__name__}, which cannot be described in a file; save its "
                "`state_dict()`, or let `fit_autoencoder` make the encoder"
            )
        modules = {"encoder": self.encoder, "decoder": self.decoder}
        tensors = {
            f"{name}/{key}": tensor.float() if tensor.is_floating_point() else tensor
            for name, module in modules.items()
            for key, tensor in module.state_dict().items()
        }
        tensors |= {f"rest/{name}": tensor for name, tensor in self.rest.items()}
        header = {
            "kind": KIND,
            "version": VERSION,
            "encoder": json.dumps(self.encoder.describe()),
            "decoder": json.dumps(describe_decoder(self.settings)),
            "about": json.dumps(dict(self.about)),
        }
        return save(tensors, path, overwrite=overwrite, metadata=header)


@dataclass(frozen=True, eq=False)
class LatentPath:
    """A path between two networks, for `rg.line`: decoded points on the line segment between the networks' latent
    vectors.

    The endpoints of the path are the reconstructions of the two networks, not the networks themselves.

    Attributes:
        autoencoder: The autoencoder that encodes the networks and decodes the path.

    References:
        Paper 002, appendix D.2.
    """

    autoencoder: Autoencoder

    def at(self, params_a: Mapping[str, Tensor], params_b: Mapping[str, Tensor], t: float) -> Params:
        """Return the network at t, from 0 (first network) to 1 (second network)."""
        return self.walk(params_a, params_b)(t)

    def walk(self, params_a: Mapping[str, Tensor], params_b: Mapping[str, Tensor]) -> Callable[[float], Params]:
        """Return a function from t to the network at t. The two networks are encoded only once."""
        both = {name: torch.stack([tensor, params_b[name]]) for name, tensor in params_a.items()}
        first, second = self.autoencoder.encode(both)
        return lambda t: select(self.autoencoder.decode(torch.lerp(first, second, t).unsqueeze(0)), 0)


def load_autoencoder(path: str | Path) -> Autoencoder:
    """Load an autoencoder from a file.

    Raises:
        FileNotFoundError: The file `path` does not exist.
        ValueError: The file is damaged, has another version, or does not contain an autoencoder.
    """
    header, tensors = read_described(
        path, kind=KIND, version=VERSION, name="autoencoder", writer="regauge learn autoencoder"
    )
    try:
        encoder = make_net(json.loads(header["encoder"]), below("encoder/", tensors))
        settings = decoder_of(json.loads(header["decoder"]))
        head = encoder.settings.head
        assert isinstance(head, Invariant)
        with Claims(tensors):
            decoder = settings.build(encoder.symmetries[0], head.outputs)
        decoder.load_state_dict(below("decoder/", tensors))
        about = dict(json.loads(header["about"]))
    except DAMAGE as error:
        raise damage("autoencoder", path, error) from error
    return Autoencoder(encoder, decoder, settings, below("rest/", tensors), about)

"""Results of training an autoencoder, as JSON: scores, a map of latent vectors, and decoded networks."""

from typing import Any

import torch

from regauge.core.task import Task
from regauge.learn.autoencoder import Autoencoder
from regauge.learn.populations import spread
from regauge.learn.running import Runner
from regauge.names import VERSION
from regauge.storage.collection import Collection
from regauge.storage.store import Store
from regauge.weightspace.heads.invariant import Invariant
from regauge.weightspace.metanet import Metanet

SHOWN = 10
"""The number of networks whose outputs are compared with the outputs of their reconstructions."""
SHOWN_POINTS = 3000
"""The largest number of outputs and of latent vectors."""


def autoencoder_results(
    autoencoder: Autoencoder,
    collection: Collection,
    inputs: Any,
    *,
    grid: tuple[int, ...] | None = None,
    color: str | None = None,
) -> dict[str, Any]:
    """Return the results of a training run: the training history, the scores, and the decoded test networks.

    `regauge.report.write_page` renders these results as a page.

    Args:
        autoencoder: The result of `fit_autoencoder`.
        collection: The stored networks on which the autoencoder was trained.
        inputs: The inputs on which networks are compared.
        grid: The height and width, if the inputs are a pixel grid. The outputs are then shown as images.
        color: The column that determines the colors in the map of latent vectors.

    Raises:
        KeyError: There is no column of this name.
        ValueError: The autoencoder was loaded from a file, which does not record the test networks.
    """
    trained, tested, encoder = autoencoder.trained, autoencoder.tested, autoencoder.encoder
    head = encoder.settings.head if isinstance(encoder, Metanet) else None
    if trained is None or tested is None or not isinstance(encoder, Metanet) or not isinstance(head, Invariant):
        raise ValueError(
            "an autoencoder from a file has no results; those of its training were written next to it: read that file"
        )
    modules = {"encoder": encoder, "decoder": autoencoder.decoder}
    return {
        "format": "regauge.autoencoder",
        "version": VERSION,
        "parts": list(encoder.parts),
        "latent": head.outputs,
        "loss": "divergence" if "loss" in autoencoder.about["scores"]["autoencoder"] else "squared error",
        "parameters": {name: sum(p.numel() for p in module.parameters()) for name, module in modules.items()},
        **autoencoder.about,
        "history": [dict(row) for row in trained.history],
        "best": trained.best,
        "ended": trained.ended,
        "latents": _map(autoencoder, collection, color),
        **_outputs(autoencoder, collection, inputs, grid),
    }


def _map(autoencoder: Autoencoder, collection: Collection, color: str | None) -> dict[str, Any]:
    """Return the latent vectors of test networks, projected to their two principal axes, and the color column."""
    assert autoencoder.tested is not None
    chosen = autoencoder.tested[:SHOWN_POINTS]
    latents = autoencoder.encode(collection.read(chosen)).double()
    centered = latents - latents.mean(0)
    _, sizes, axes = torch.linalg.svd(centered, full_matrices=False)
    column = collection.column(color)[chosen].tolist() if color else []
    values = [float(v) if isinstance(v, float) else v for v in column]
    points = (centered @ axes[:2].T).tolist() if len(sizes) > 1 else [[x, 0.0] for x in centered[:, 0].tolist()]
    share = float(sizes[:2].square().sum() / sizes.square().sum().clamp_min(1e-30))
    return {"points": points, "labels": values, "share": share, "column": color or ""}


@torch.no_grad()
def _outputs(
    autoencoder: Autoencoder, collection: Collection, inputs: Any, grid: tuple[int, ...] | None
) -> dict[str, Any]:
    """Return the outputs of some test networks and of their reconstructions, as images if the inputs are a grid."""
    assert autoencoder.tested is not None
    chosen = spread(autoencoder.tested, SHOWN)
    networks = collection.read(chosen)
    member = collection.members[0]
    assert isinstance(member, Store)
    runner = Runner(Task(member.architecture.module(), ()))
    outputs = [runner.outputs(one, inputs).double() for one in (networks, autoencoder.canonicalize(networks))]
    if grid is not None and len(grid) == 2:
        originals, decoded = (one.reshape(len(chosen), *grid, -1).round(decimals=4).tolist() for one in outputs)
        return {"pictures": {"originals": originals, "decoded": decoded}, "outputs": None}
    flat = [one.flatten() for one in outputs]
    places = torch.linspace(0, len(flat[0]) - 1, min(SHOWN_POINTS, len(flat[0]))).long()
    originals, decoded = (one[places].tolist() for one in flat)
    return {"pictures": None, "outputs": {"originals": originals, "decoded": decoded}}

"""Figure 3.4 of paper 003: distances between embeddings of networks, before and after alignment."""

from dataclasses import dataclass, replace

import torch

import regauge as rg
from regauge.core.params import Params
from regauge.core.progress import Progress
from regauge.data.shapes import SHAPES_SHA256
from regauge.inr.embedding import Embedding, EmbeddingConfig, train_embedding
from regauge.inr.fields.fields import CloudField
from regauge.inr.fields.signal_samples import Queries, Samples, field_samples
from regauge.inr.fit_config import FitConfig
from regauge.inr.fitting import fit
from regauge.inr.representation import Inr
from regauge.training import Adam, AdamW
from regauge_papers.experiment import Run, Scale
from regauge_papers.shapes.alignment import COMPARED, PICTURED, WAYS
from regauge_papers.shapes.study import BALL, SHAPES, Study, clouds, networks, starts, study
from regauge_papers.table import Quantity, Row, Table


@dataclass(frozen=True)
class Embeddings:
    """Settings: networks that are compared by their codes, and the population for training the encoder."""

    study: Study  # the networks that are compared
    seen: tuple[str, ...]  # the shapes that the encoder learns, none of which is compared
    count: int  # networks of the population, all from the shared start, each of a stretched shape
    queries: Queries  # samples of each of these
    training: EmbeddingConfig


def config(scale: Scale) -> Embeddings:
    """Return the settings: a small encoder of networks of width 64; the paper's networks of ModelNet40 have
    width 512.
    """
    if scale == "smoke":
        small = EmbeddingConfig(epochs=2, batch=2, examples=20, code=8, widths=(8, 8), width=8, octaves=2)
        return Embeddings(study(scale, 64), (BALL,), 4, Queries(50, 40, 5, 5), small)
    whole = replace(study(scale, 64), shapes=SHAPES)
    others = tuple(name for name in SHAPES_SHA256 if name not in SHAPES)
    if scale == "cpu":
        quick = replace(whole, inr=Inr(width=64), fit=FitConfig(steps=300, batch=2000, optimizer=Adam(3e-4)), pairs=2)
        training = EmbeddingConfig(
            epochs=60, examples=500, optimizer=AdamW(1e-3), code=128, widths=(128, 128, 256), width=128, octaves=6
        )
        return Embeddings(quick, others, 144, Queries(25_000, 20_000, 2_500, 2_500), training)
    return Embeddings(replace(whole, inr=Inr(width=512)), others, 20_000, Queries(), EmbeddingConfig())


def measure(config: Embeddings, run: Run) -> Table:
    """Fit the population, train the encoder on it, and compare the codes of pairs."""
    study = config.study
    samples = [_stretch(config, k, run) for k in range(config.count)]

    def member(unit: Progress, k: int) -> Params:
        def make() -> Params:
            start, generator = starts(study, "first", "", run), run.generator("member", k)
            return fit(study.inr, samples[k], study.fit, start=start, generator=generator, progress=unit).params

        return run.network((study.inr, study.fit, config.queries, "population", config.seen), str(k), make)

    members = run.grid("fitting the population", member, range(config.count))
    population = {name: torch.stack([one[name] for one in members]) for name in members[0]}
    generator = run.generator("embedding")
    embedding = train_embedding(
        study.inr, population, samples, config.training, generator=generator, progress=run.progress
    )
    found = networks(study, run)
    rows = []
    for way in WAYS:
        if way.label not in PICTURED:
            continue
        pairs = [[(one, way.move(one, k)[0]) for k in range(way.count(study))] for one in found]
        values = {
            "distance of codes": [[embedding.distance(one.first, second) for one, second in own] for own in pairs],
            "loss of the decoded": [[_decode(embedding, second, one.judge) for one, second in own] for own in pairs],
        }
        rows.append(Row(way.label, values))
    codes = [embedding.codes(one.first) for one in found]
    between = [[float((a - b).double().norm()) for b in codes if b is not a] for a in codes]
    if len(codes) > 1:
        rows.append(Row("two shapes, same start", {"distance of codes": between}))
    notes = (
        "the paper: codes of aligned networks (permutations) are closer than of networks as fitted, and further than "
        "from one start; it prints no numbers. What it decodes from the codes of aligned networks is too noisy to "
        "recognize",
        f"encoder of {config.training.widths}, code of {config.training.code}, decoder {config.training.width} wide, "
        f"{config.training.epochs} epochs on {config.count} networks from the shared start, of other shapes "
        f"({', '.join(config.seen)}), stretched by 2/3 to 3/2 along each axis; its "
        f"last losses have a mean of {float(embedding.losses[-20:].mean()):.3f}",
        study.description,
        "± is the standard error over shapes, each the mean of its pairs, or of its distances to the other shapes",
        "loss of the decoded: cross entropy of what the decoder says from the second network's code, on "
        f"{study.judged:,} samples",
        *study.notes,
    )
    quantities = (Quantity("distance of codes", 2), Quantity("loss of the decoded"))
    return Table("Distances of embeddings", notes, quantities, tuple(rows), unit="shape", paired=COMPARED)


def _stretch(config: Embeddings, k: int, run: Run) -> Samples:
    """Return samples of the stretched shape of member k in the unit ball."""
    name = config.seen[k % len(config.seen)]
    points = clouds(name)[k % 2] * (1.5 ** (2 * torch.rand(3, generator=run.generator("stretch", k)) - 1))
    points = points - points.mean(0)
    field, generator = CloudField(points / points.norm(dim=1).max()), run.generator("member samples", k)
    return field_samples(field, config.study.inr, config.queries, generator=generator)


def _decode(embedding: Embedding, params: Params, judge: rg.Task) -> float:
    (points, labels), *_ = judge.batches
    return float(judge.criterion(embedding.decode(embedding.codes(params), points), labels))

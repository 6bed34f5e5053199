"""Flows over sine networks of digits: networks are sampled for a class, rendered, and classified.

Flows that represent digit images are not part of paper 000. An image classifier that was trained on real images decides
whether a sampled network shows the requested digit.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from regauge import flow
from regauge.core.params import Params
from regauge.core.symmetry import Symmetry
from regauge.data.images import ImageData, digits, mnist
from regauge.flow.alignment import align_points, find_reference
from regauge.flow.judging import make_controls
from regauge.flow.manifold import Points
from regauge.flow.novelty import nearest
from regauge.flow.space import Space
from regauge.inr.rendering.field_values import render_image
from regauge.nets.classification import ClassifierConfig, initialize, train
from regauge.nets.cnn import CNN
from regauge.report.pictures import Images, Picture
from regauge.storage import Store
from regauge.storage.architecture import Architecture
from regauge.training.initialization import Initialization
from regauge.zoo import PopulationConfig
from regauge.zoo.presets import mnist_inrs_one_start
from regauge_papers.autoencoders.digits import split
from regauge_papers.experiment import Run, Scale, make_once
from regauge_papers.table import Quantity, Record, Row, Table
from regauge_papers.zoo_populations import train_population

QUANTITIES = (
    Quantity("recognized", 3),
    Quantity("confidence", 3),
    Quantity("nearest", 3),
    Quantity("spread", 3),
)
DRAWN = "drawn from the flow"
SHOWN = {
    DRAWN: (0, 1),
    "held-out networks": (0,),
    "normal, all covariances": (0,),
    "means of 2": (0,),
}
"""The kinds of networks that the picture shows for each class, with the indices of the shown networks."""
COMPONENTS = 100
"""The number of principal components in which the flow is fitted."""
AT_ONCE = 512
"""The number of images that are compared or classified at a time."""


@dataclass(frozen=True)
class Study:
    """Settings: populations by initialization, and the flow that is fitted to each population."""

    populations: tuple[tuple[str, PopulationConfig], ...]
    settings: flow.FlowConfig
    data: str  # the images, of which networks show some
    side: int
    examples: int  # real images that the classifier is trained on
    drawn: int  # networks of each class
    steps: int


def config(scale: Scale) -> Study:
    """Return the settings: 20,000 digits and 240 CPU seconds per flow; at scale `paper`, all digits and two hours per
    flow.
    """
    count, seconds = {"smoke": (140, 0.3), "cpu": (20_000, 240.0), "paper": (70_000, 7200.0)}[scale]
    common = mnist_inrs_one_start(count)
    if scale == "smoke":
        known = common.architecture
        small = Architecture("SIREN 2-6-6-1", known.factory, {**known.settings, "width": 6})
        common = replace(common, architecture=small, data="digits-signals", steps=10)
    own = replace(common, initialization=Initialization())
    populations = ("one start", common), ("starts of their own", own)
    settings = flow.FlowConfig(
        representation=flow.Representation("keep", components=3 if scale == "smoke" else COMPONENTS),
        net=flow.Perceptron(8, 1) if scale == "smoke" else flow.Perceptron(384, 4),
        prior=flow.MatchedGaussian(),
        is_aligned=True,
        labels="label",
        seconds=seconds,
        is_cpu_time=True,
        epochs=2 if scale == "smoke" else 3000,
        average=0.998,
        lr=2e-3,
        batch=128,
    )
    if scale == "smoke":
        return Study(populations, settings, "digits", 8, 400, 2, 2)
    return Study(populations, settings, "MNIST", 28, 20_000 if scale == "cpu" else 60_000, 50, 20)


def measure(study: Study, run: Run) -> Table:
    """Fit a flow to each population, sample for every class, and classify the samples."""
    rows, notes, pictures = [], [], dict[str, Picture]()
    for label, settings in study.populations:
        store = train_population(f"signals-{label.split()[0]}", settings, run)
        found = run.record((study, label, settings), "digits", functools.partial(_judge, study, label, store, run))
        rows += [Row.of(f"{label}: {kind}", [[record]], QUANTITIES) for kind, record in found["kinds"].items()]
        counts = ", ".join(f"{count} for {name}" for name, count in found["networks"].items())
        notes.append(
            f"{label}: networks {settings.architecture.name}, {settings.steps} steps each, {counts}; those for testing "
            f"show test images; mean squared error of the networks {found['error']:.4f}"
        )
        name = "digits-" + label.split()[0]
        pictures[name] = (Images.from_json(found["picture"]),)
    about = (
        f"sine networks of {study.data}; {study.drawn} drawn for each of ten classes, and as many of every control, "
        "made of the aligned training networks of that class",
        "recognized: share that a CNN names as the class asked for; confidence: its probability of that class; it was "
        f"trained on {study.examples} real images; what networks render is cut to values from 0 to 1",
        "nearest: median distance, between images, to the nearest of all training networks; spread: mean distance of "
        "two of one class; both in units of held-out networks",
        "one start: all networks of a population began alike, and so their units have the same order by themselves; "
        "starts of their own: they are aligned to their middle",
    )
    return Table(
        "Digits drawn from flows over sine networks", (*notes, *about), QUANTITIES, tuple(rows), pictures=pictures
    )


def _judge(study: Study, label: str, store: Store, run: Run) -> Record:
    """Evaluate networks sampled from a flow to a population, and controls, by class."""
    parts, symmetry = split(store), store.require_symmetry()
    made = _fit(study, label, store, parts, run)
    classes = {name: torch.as_tensor(store.rows["label"][numbers]).long() for name, numbers in parts.items()}
    networks = {name: store.read(parts[name]) for name in ("train", "test")}
    train_points, test_points, space = _align(networks["train"], networks["test"], symmetry)
    module = store.architecture.module()

    def render(params: Params) -> Tensor:
        return render_image(module, params, study.side, study.side)[..., 0].flatten(1)

    kinds: dict[str, list[Tensor]] = {}
    for value in range(10):
        own, held_out = train_points[classes["train"] == value], test_points[classes["test"] == value]
        distance = float(nearest(space, held_out, own)[0].median())
        controls = make_controls(space, own, distance, study.drawn, run.generator("controls", label, value))
        chance = run.generator("draw", label, value)
        drawn = made.sample(study.drawn, generator=chance, steps=study.steps, label=value)
        kinds.setdefault(DRAWN, []).append(render(drawn))
        kinds.setdefault("held-out networks", []).append(render(space.leave(held_out[: study.drawn])))
        for name, points in controls.items():
            kinds.setdefault(name, []).append(render(space.leave(points)))
    known = render(networks["train"])
    classify = _classifier(study, run)
    unit = _nearest(torch.cat(kinds["held-out networks"]), known)[0].median()
    width = _spread(kinds["held-out networks"])
    records = {}
    for name, images in kinds.items():
        probabilities = classify(torch.cat(images))
        wanted = torch.cat([torch.full((len(own),), value) for value, own in enumerate(images)])
        records[name] = {
            "recognized": float((probabilities.argmax(1) == wanted).double().mean()),
            "confidence": float(probabilities[torch.arange(len(wanted)), wanted].mean()),
            "nearest": float(_nearest(torch.cat(images), known)[0].median() / unit),
            "spread": float(_spread(images) / width),
        }
    errors = store.rows["validation_loss"]
    return {
        "kinds": records,
        "networks": {name: len(numbers) for name, numbers in parts.items()},
        "error": float(torch.as_tensor(errors[parts["train"]]).double().mean()),
        "picture": asdict(_show(study, label, kinds, known)),
    }


def _fit(study: Study, label: str, store: Store, parts: Mapping[str, NDArray[np.int64]], run: Run) -> flow.Flow:
    """Return the flow, fitted now or by an earlier run."""
    place = run.place("flows", ("signals", label, study.populations, study.settings))
    state, generator = place.with_suffix(".partial.safetensors"), run.generator("flow", label)

    def write() -> None:
        settings, progress = study.settings, run.progress
        made = flow.fit(store, config=settings, generator=generator, split=parts, state=state, progress=progress)
        made.save(place)
        state.unlink(missing_ok=True)

    make_once(place, write)
    return flow.load_flow(place)


def _align(train_networks: Params, test_networks: Params, symmetry: Symmetry) -> tuple[Points, Points, Space]:
    """Return points of training and test networks, aligned to the mean of the training networks."""
    space = Space.of(train_networks, symmetry, flow.Representation("keep"))
    points = space.enter(train_networks)
    middle = find_reference(space, points)
    first, second = (align_points(space, middle, own) for own in (points, space.enter(test_networks)))
    return first, second, space


def _classifier(study: Study, run: Run) -> Callable[[Tensor], Tensor]:
    """Return the CNN that classifies images `[images, pixels]`, trained on real images now or by an earlier run."""
    is_small = study.data == "digits"
    module = CNN((8, 16), 32, 10, image=study.side) if is_small else CNN((16, 32), 64, 10, image=study.side)
    training = ClassifierConfig(epochs=3, batch=64)
    settings, key = ("classifier of images", study.data, study.examples, training), "classifier"

    def make() -> Params:
        data = _images(study.data)
        images, labels = data.train_images[: study.examples], data.train_labels[: study.examples]
        chance = run.generator("classifier")
        return train(
            module,
            initialize(module, chance),
            images,
            labels,
            training,
            generator=chance,
            state=run.state(settings, key),
            progress=run.progress,
        )

    params = run.network(settings, key, make)

    def classify(images: Tensor) -> Tensor:
        with torch.no_grad():
            shaped = images.reshape(-1, 1, study.side, study.side)
            parts = [torch.func.functional_call(module, params, (part,)) for part in torch.split(shaped, AT_ONCE)]
            return torch.cat(parts).softmax(1)

    return classify


def _images(name: str) -> ImageData:
    return digits() if name == "digits" else mnist()


def _nearest(images: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distance to the nearest known image, and its index."""
    found = [torch.cdist(part, known).min(1) for part in torch.split(images, AT_ONCE)]
    return torch.cat([one.values for one in found]), torch.cat([one.indices for one in found])


def _spread(images: list[Tensor]) -> Tensor:
    """Return the mean distance of two images of one class."""
    return torch.stack([nn.functional.pdist(own).mean() for own in images if len(own) > 1]).mean()


def _show(study: Study, label: str, kinds: Mapping[str, list[Tensor]], known: Tensor) -> Images:
    """Return images of every class, and the training network nearest to the first sampled network."""
    rows = [(name, torch.stack([own[k % len(own)] for own in kinds[name]])) for name, ks in SHOWN.items() for k in ks]
    first = rows[0][1]
    rows.insert(1, ("nearest to it of all training networks", known[_nearest(first, known)[1]]))
    shaped = torch.stack([images for _, images in rows]).reshape(len(rows), 10, study.side, study.side)
    return Images.of(f"Sine networks, {label}", [name for name, _ in rows], [str(k) for k in range(10)], shaped)

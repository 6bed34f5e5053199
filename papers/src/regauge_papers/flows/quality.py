"""Paper 000, tables 7.1 and 7.2 and figures 7.3 to 7.5: quality and novelty of networks sampled from flows."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch

from regauge import flow
from regauge.core.params import Params, select
from regauge.flow.alignment import align_points
from regauge.flow.components import Components
from regauge.flow.guiding import descend
from regauge.flow.judgement import Judgement
from regauge.flow.judging import KnownNetworks
from regauge.report.pictures import Chart, Picture, Series
from regauge_papers.experiment import Run
from regauge_papers.flows.networks import Networks, unit_head
from regauge_papers.flows.studies import Drawing, Fitted, Study
from regauge_papers.table import Quantity, Record, Row, Table

QUANTITIES = (
    Quantity("accuracy", 4),
    Quantity("loss", 4),
    Quantity("loss / held-out", 3),
    Quantity("nearest", 3),
    Quantity("spread", 3),
    Quantity("two-sample", 3),
    Quantity("divergence", 5),
    Quantity("disagreement", 4),
    Quantity("accuracy of average", 4),
    Quantity("CPU s", 0),
)
SIZES = (1, 3, 10, 30, 100)
"""The numbers of networks in an ensemble, whose class probabilities are averaged."""


def measure(study: Study, run: Run) -> Table:
    """Fit the flows, sample from them, and evaluate the samples."""
    networks = Networks.of(study.name, study.population, run)
    comparison = Comparison(study, networks)
    controls: dict[str, Record] = {}
    rows, curves, averages = [], {}, {}
    for fitted in study.flows:
        for drawing in fitted.drawings:
            settings = (study.name, study.population, fitted, drawing, study.drawn)
            found = run.records(
                f"drawn: {drawing.label}", settings, partial(comparison.judge, fitted, drawing), range(fitted.seeds)
            )
            paper = dict(zip(("accuracy", "loss"), drawing.paper, strict=False))
            rows.append(Row.of(drawing.label, [[one["generated"]] for one in found], QUANTITIES, paper=paper))
            averages[drawing.label] = found[0]["averages"]
            if drawing.is_plotted:
                curves[drawing.label] = found[0]["steps"]
            controls |= found[0]["others"]
    paper = dict(zip(("accuracy", "loss"), study.target, strict=False))
    rows.append(Row.of("held-out networks", [[controls.pop("held-out")]], QUANTITIES, paper=paper))
    rows += [Row.of(name, [[record]], QUANTITIES) for name, record in controls.items()]
    counts = {name: len(part) for name, part in networks.parts.items()}
    notes = (
        f"{study.population.architecture.name} on {study.what}: {counts['train']} networks for training, "
        f"{counts['test']} held out, divided by run; {study.drawn} networks drawn from each flow; "
        f"seeds of this library's flow: {study.flows[0].seeds}",
        *study.notes,
        "nearest: median distance to the nearest training network; spread: mean distance of two; in units of held-out "
        "networks, after pairs are aligned; divergence: Jensen-Shannon, of two networks' class probabilities, mean "
        "over examples and pairs, where the thesis compares sets of outputs by a density estimate; disagreement: the "
        "share of examples that two networks put into different classes",
    )
    if any(drawing.strength for fitted in study.flows for drawing in fitted.drawings):
        notes += (
            "guided: by the loss on the examples that the networks were trained on, at the predicted end; strength: "
            "the sum of the learning rates of all steps; dropped: that share of the inputs' values is set to zero, "
            "others in each step; controls of this library's flow take as many gradient steps with the same losses at "
            "the same rates",
        )
    if any(fitted.settings.representation.components for fitted in study.flows):
        notes += (
            "rest drawn anew: what components leave over of held-out networks is drawn as for networks of a flow; a "
            "perfect flow of components would draw networks as good as these",
        )
    if any(fitted.settings.predicts == "end" for fitted in study.flows):
        last = study.flows[-1].settings
        notes += (
            "its sampler: ends are predicted, and `end - start` is followed in place of `(end - x) / (1 - t)`",
            "unit last layer: what Geometric flows draw, and trained networks made so; the loss changes, classes do "
            "not",
            f"thesis' flows: one seed, width {last.net.width}, where the thesis has 64 or 32, and "  # type: ignore[attr-defined]
            f"{last.seconds:.0f} CPU seconds, where it has 6 to 40 hours of a GPU",
        )
    pictures = {
        "steps": _draw("Networks by steps of Euler's method", "steps", "loss", study.steps, curves),
        "averages": _draw("Averages of class probabilities", "networks", "accuracy", SIZES, averages),
    }
    return Table(f"Networks drawn from flows: {study.what}", notes, QUANTITIES, tuple(rows), pictures=pictures)


@dataclass(frozen=True, eq=False)
class Comparison:
    """The networks and examples with which sampled networks are compared."""

    study: Study
    networks: Networks

    @cached_property
    def task(self) -> Any:
        """The task on the test examples."""
        return self.networks.task()

    @cached_property
    def learned(self) -> Any:
        """The task on the examples on which the networks were trained."""
        return self.networks.task("learned")

    @cached_property
    def known(self) -> KnownNetworks:
        """The training networks, held-out networks and controls."""
        train, symmetry = self.networks.read("train"), self.networks.store.require_symmetry()
        return KnownNetworks.of(train, self.held_out, symmetry, self.task, self.study.drawn)

    @cached_property
    def held_out(self) -> Params:
        """Networks to which no flow was fitted."""
        return self.networks.read("test", self.study.drawn)

    def judge(self, fitted: Fitted, drawing: Drawing, seed: int) -> Record:
        """Sample networks from a flow, and compare the samples with training networks, held-out networks and
        controls.
        """
        settings = fitted.settings
        began = time.process_time()
        made = self.networks.fit(f"{fitted.label} {seed}", settings)
        seconds = time.process_time() - began
        chance = self.networks.run.generator("draw", drawing.label, seed)
        drawn = self._draw(made, drawing, self.study.drawn, drawing.steps, chance)
        found = self.known.judge(drawn)
        others = {score.name: self._record(found, score.name) for score in found.scores[1:]}
        if settings.representation.head_form == "unit":
            names = f"{self.study.head}.weight", f"{self.study.head}.bias"
            metrics = self.task.evaluate_each(unit_head(self.held_out, *names))
            others["held-out networks, unit last layer"] = {k: float(v.mean()) for k, v in metrics.items()}
        if isinstance(made.space, Components):
            metrics = self.task.evaluate_each(self._with_rest_anew(made.space))
            others["held-out networks, rest drawn anew"] = {k: float(v.mean()) for k, v in metrics.items()}
        if drawing.strength and drawing.solver == "heun" and not seed:
            others |= self._descended(made, drawing)
        trained = {"CPU s": seconds} if seconds > 0.5 * (settings.seconds or 0) else {}
        return {
            "generated": self._record(found, "generated") | trained,
            "others": others,
            "averages": self._averages(drawn),
            "steps": self._steps(made, drawing) if drawing.is_plotted and not seed else [],
        }

    def _draw(self, made: flow.Flow, drawing: Drawing, count: int, steps: int, chance: torch.Generator) -> Params:
        loss = flow.BatchLoss(self.learned, drawing.dropout)
        guidance = flow.Guidance(loss, drawing.strength) if drawing.strength else None
        return made.sample(
            count, generator=chance, steps=steps, solver=drawing.solver, noise=drawing.noise, guidance=guidance
        )

    def _with_rest_anew(self, components: Components) -> Params:
        """Return held-out networks whose residuals (outside of the principal components) are sampled again, as in flow
        samples.
        """
        space = components.networks
        points = align_points(space, components.mean.float(), space.enter(self.held_out))
        chance = self.networks.run.generator("rest")
        return components.with_rest(len(points), chance).leave(components.reduce(points))

    def _descended(self, made: flow.Flow, drawing: Drawing) -> dict[str, Record]:
        """Return samples of the flow's prior, and copies of training networks, after the number of gradient steps that
        guidance takes.
        """
        chance = self.networks.run.generator("descend", drawing.label)
        train = self.networks.read("train")
        places = torch.randint(len(self.networks.parts["train"]), (self.study.drawn,), generator=chance)
        firsts = {
            "starts of the flow": made.draw_starts(self.study.drawn, chance),
            "copies": select(train, places),
        }
        found, steps = {}, 2 * drawing.steps  # Heun's method has two gradients a step
        for name, first in firsts.items():
            loss = flow.BatchLoss(self.learned, drawing.dropout)
            moved = descend(loss, first, steps=steps, rate=drawing.strength / steps)
            judged = self.known.judge(moved)
            label = f"{name}, {steps} gradient steps, {drawing.strength:g}" + (", dropped" if drawing.dropout else "")
            found[label] = self._record(judged, "generated")
        return found

    def _record(self, found: Judgement, name: str) -> Record:
        score = asdict(found[name])
        return {
            "accuracy": score["accuracy"],
            "loss": score["loss"],
            "loss / held-out": score["loss"] / found["held-out"].loss,
            "nearest": score["distance"],
            "spread": score["spread"],
            "two-sample": score["two_sample"],
            "divergence": score["divergence"],
            "disagreement": score["disagreement"],
            "accuracy of average": score["average_accuracy"],
        }

    def _averages(self, drawn: Params) -> list[float]:
        """Return the accuracy of an ensemble: the averaged class probabilities of the first few networks."""
        totals: list[float] = []
        for size in SIZES:
            right = count = 0
            few = select(drawn, slice(0, size))
            for inputs, classes in self.task.batches:
                outputs = torch.func.vmap(self.task.run, in_dims=(0, None))(few, inputs).softmax(-1).mean(0)
                right, count = right + int((outputs.argmax(-1) == classes).sum()), count + len(classes)
            totals.append(right / count)
        return totals

    def _steps(self, made: flow.Flow, drawing: Drawing) -> list[float]:
        """Return the mean loss of sampled networks for each number of solver steps."""
        euler = replace(drawing, solver="thesis" if drawing.solver == "thesis" else "euler")
        found = []
        for steps in self.study.steps:
            chance = self.networks.run.generator("steps", drawing.label)
            drawn = self._draw(made, euler, min(100, self.study.drawn), steps, chance)
            found.append(float(self.task.evaluate_each(drawn)["loss"].mean()))
        return found


def _draw(title: str, x_label: str, y_label: str, xs: Sequence[int], curves: Mapping[str, Sequence[float]]) -> Picture:
    """Return a chart of this library's flows, and one chart of the thesis' flows for each sampler."""
    groups: dict[str, list[Series]] = {}
    for label, values in curves.items():
        way = label.rpartition(", ")[2] if label.startswith("thesis") else ""
        groups.setdefault(way, []).append(Series(label.removesuffix(f", {way}"), xs, values))
    return tuple(
        Chart(
            f"Thesis' flows, {way}" if way else title,
            x_label,
            y_label,
            tuple(series),
            is_log_x=True,
            is_log_y=y_label == "loss",
        )
        for way, series in groups.items()
    )

"""The command `regauge reproduce`, which runs an experiment of a paper and writes its table and figures."""

import json
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from rich.table import Table as Printed

import regauge as rg
from regauge.checkpoints.plain_files import read_json
from regauge.checkpoints.writing import save_text
from regauge.cli.options import UsageError
from regauge.cli.output import show, show_progress, tell
from regauge.core.devices import find_device
from regauge.inr.rendering.strips import load_strips
from regauge.names import did_you_mean
from regauge.report.figures import picture_figure
from regauge.training.threads import one_thread
from regauge_papers.experiment import Experiment, Run
from regauge_papers.experiments import EXPERIMENTS
from regauge_papers.methods_figure import methods_figure
from regauge_papers.options import Reproduce
from regauge_papers.seeds import join_seeds
from regauge_papers.strips_figure import strips_figure
from regauge_papers.table import Table


def run(options: Reproduce) -> None:
    """Run an experiment, print its table, and write the table, its numbers and its figures. Without an experiment,
    print the list of experiments.
    """
    if options.draw:
        draw(options, options.draw)
        return
    if not options.experiment and options.paper in ("", *EXPERIMENTS):
        tell(list_experiments(options.paper))
        return
    experiment = choose(options.paper, options.experiment)
    if not options.seed or len({*options.seed}) < len(options.seed):
        raise UsageError(f"--seed takes one seed or several different ones, not {[*options.seed]}")
    if options.columns or options.by_group:
        raise UsageError("--columns and --by-group are for a table that --draw reads; a run writes all columns")
    if options.device != "cpu" and not experiment.takes_device:
        raise UsageError(
            f"{options.paper} {options.experiment} runs on the CPU only; --device {options.device} is for "
            f"{name_movable()}"
        )
    device = find_device(options.device)
    options.out.mkdir(parents=True, exist_ok=True)
    name = f"{options.paper}-{options.experiment}-{options.scale}"
    with one_thread(), show_progress() as progress:
        runs = [Run(options.scale, seed, options.out, progress, name, device) for seed in options.seed]
        table = join_seeds({one.seed: experiment(one) for one in runs})
    command = ["regauge", "reproduce", options.paper, options.experiment]
    command += ["--scale", options.scale, "--seed", *map(str, options.seed)]
    if device.type != "cpu":
        command += ["--device", options.device]
    origin = f"`{shlex.join(command)}`, regauge {rg.__version__}"
    if device.type == "cuda":
        origin += f"; networks were trained and evaluated on an {torch.cuda.get_device_name(device)}"
    table = replace(table, notes=(origin, *table.notes))
    show(render(table))
    for note in table.notes:
        tell(f"- {note}")
    write(table, runs[0], options)


def draw(options: Reproduce, paths: Sequence[Path]) -> None:
    """Write the table and figures of earlier runs again from their numbers. Join the numbers of several runs."""
    if options.paper:
        named = ", ".join(repr(str(path)) for path in paths)
        raise UsageError(f"--draw names the experiment by its file {named}; leave {options.paper!r} out")
    found = [read_run(path) for path in paths]
    origins = {origin for origin, _, _ in found}
    if len(origins) > 1:
        raise UsageError(
            f"--draw joins runs of one experiment and scale, not of {', '.join(map(str, sorted(origins)))}"
        )
    seeds = [seed for _, own, _ in found for seed in own]
    if len(found) > 1 and (len({*seeds}) < len(seeds) or len(seeds) > len(found)):
        raise UsageError(f"--draw joins runs of one seed each, all different; these have the seeds {seeds}")
    try:
        tables = [one for _, _, one in found]
        table = tables[0] if len(tables) == 1 else join_seeds(dict(zip(seeds, tables, strict=True)))
        shown = table.by_group(options.by_group) if options.by_group else table
        shown = shown.excerpt(options.columns) if options.columns else shown
    except ValueError as error:
        raise UsageError(f"{str(paths[0])!r} cannot be drawn: {error}") from error
    stem = options.out / paths[0].stem
    if len(found) > 1 and Path(f"{stem}.json").resolve() in [path.resolve() for path in paths]:
        raise UsageError(f"the joined run would replace {str(paths[0])!r}; give another folder as --out")
    options.out.mkdir(parents=True, exist_ok=True)
    show(render(shown))
    written = [save_numbers(table, stem, found[0][0], seeds)] if len(found) > 1 else []
    tell(f"written: {stem}" + ", ".join([*written, *write_drawn(shown, stem)]))


class Origin(NamedTuple):
    """The paper, experiment and scale of a run."""

    paper: str
    experiment: str
    scale: str

    def __str__(self) -> str:
        return " ".join(self)


def read_run(path: Path) -> tuple[Origin, list[int], Table]:
    """Read the origin, the seeds and the table of a run from its file."""
    try:
        known = read_json(path)
        table = Table.from_json(known)
        origin = Origin(*(str(known.get(name, "")) for name in Origin._fields))
        return origin, [int(seed) for seed in known.get("seeds", [known.get("seed", 0)])], table
    except (TypeError, ValueError) as error:
        raise UsageError(f"{str(path)!r} cannot be drawn: {error}") from error


def choose(paper: str, name: str) -> Experiment:
    """Return the experiment with a given name."""
    if paper not in EXPERIMENTS:
        raise UsageError(f"there are no experiments of paper {paper!r}; there are those of {', '.join(EXPERIMENTS)}")
    if name not in EXPERIMENTS[paper]:
        hint = f"{did_you_mean(name, EXPERIMENTS[paper])}there are {', '.join(EXPERIMENTS[paper])}"
        raise UsageError(f"paper {paper!r} has no experiment {name!r}; {hint}")
    return EXPERIMENTS[paper][name]


def name_movable() -> str:
    """Return a sentence that lists the experiments that run on other devices than the CPU."""
    return "; ".join(
        f"{paper} {name}"
        for paper, experiments in EXPERIMENTS.items()
        for name, experiment in experiments.items()
        if experiment.takes_device
    )


def list_experiments(paper: str) -> str:
    """List the experiments of one paper or of all papers, one per line."""
    rows = [
        (f"{key} {name}", experiment.summary)
        for key, experiments in EXPERIMENTS.items()
        if paper in ("", key)
        for name, experiment in experiments.items()
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"regauge reproduce {name:<{width}}  {summary}" for name, summary in rows)


def render(table: Table) -> Printed:
    """Render the table for the terminal."""
    result = Printed(title=table.title, title_justify="left")
    header, *rows = table.cells()
    for title in header:
        result.add_column(title, justify="right" if result.columns else "left")
    for cells in rows:
        result.add_row(*cells)
    return result


def write(table: Table, result: Run, options: Reproduce) -> None:
    """Write the numbers as JSON, the table as Markdown, and the figures."""
    origin = Origin(options.paper, options.experiment, options.scale)
    numbers = save_numbers(table, result.file(""), origin, options.seed)
    written = [numbers, *write_drawn(table, result.file(""))]
    for name, path in table.strips.items():
        strips_figure(load_strips(path)).savefig(path.with_suffix(".png"), dpi=150)
        written += [f"-{name}.npz", f"-{name}.png"]
    tell(f"written: {result.file('')}" + ", ".join(written))


def save_numbers(table: Table, stem: Path, origin: Origin, seeds: Sequence[int]) -> str:
    """Write every number of a table as JSON, and return the suffix that the file name adds to the stem."""
    what = origin._asdict() | {"seeds": [*seeds]} | table.to_json()
    save_text(json.dumps(what, indent=1) + "\n", stem.with_name(f"{stem.name}.json"))
    return ".json"


def write_drawn(table: Table, stem: Path) -> list[str]:
    """Write the table as Markdown, and its figures; return the suffixes that the file names add to the stem."""
    save_text(table.markdown(), stem.with_name(f"{stem.name}.md"))
    figures = {f"-{name}.svg": picture_figure(picture) for name, picture in table.pictures.items()}
    curves = {row.label: row.curve for row in table.rows if row.curve}
    if curves:
        figures[".svg"] = methods_figure(curves, table.loss)
    for name, figure in figures.items():
        figure.savefig(stem.with_name(f"{stem.name}{name}"), metadata={"Date": None})
    return [".md", *figures]

"""Options that repeat an argument of the library, which needs torch, have the same default and the same choices."""

import inspect
from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import pytest

import regauge as rg
from regauge import alignment, connect, flow, gauging, inr, pruning, zoo
from regauge.cli.align_options import Matching, Merge
from regauge.cli.command_help import NOTHING
from regauge.cli.compare_options import Compare
from regauge.cli.flow_options import FlowGuide, FlowJudge, FlowSample
from regauge.cli.gauge_options import Gauge
from regauge.cli.inr_options import InrFit, InrOrbit, InrRender
from regauge.cli.line_options import Line, Plane
from regauge.cli.main import main
from regauge.cli.prune_options import Prune
from regauge.cli.zoo_options import ZooExport, ZooTrain
from regauge.cli.zoo_population_options import ZooAlign, ZooNearest
from regauge.connect.straighten import train_path
from regauge.gauging.named_methods import METHODS as GAUGES
from regauge.inr.signal_fits import fit_signal
from regauge.merging import RULES

REPEATED: dict[Any, dict[type, str]] = {
    rg.WeightMatching: {Matching: "restarts scales"},
    alignment.ActivationMatching: {Matching: "statistic scales"},
    alignment.FrankWolfe: {Matching: "restarts scales"},
    rg.compare: {Compare: "draws"},
    gauging.RoundToNearest: {Gauge: "bits group"},
    gauging.LearnedRotation: {Gauge: "steps by"},
    gauging.BestGauge: {Gauge: "steps always=is_kept_always"},
    rg.prune: {Prune: "share"},
    fit_signal: {InrFit: "kind width depth signal start bias"},
    inr.Projection: {InrRender: "points=count"},
    inr.orbit: {InrOrbit: "parts noise reach"},
    rg.line: {Line: "points"},
    train_path: {Line: "steps"},
    connect.plane: {Plane: "resolution margin"},
    flow.sample_store: {
        FlowSample: "networks steps solver noise like label seed",
        FlowGuide: "networks steps label seed",
    },
    flow.Guidance: {FlowGuide: "start"},
    flow.judge_store: {FlowJudge: "most"},
    zoo.plan_training: {ZooTrain: "shard=size storage device"},
    zoo.plan_population: {ZooAlign: "sample=count seed"},
    zoo.Fingerprints.nearest: {ZooNearest: "count"},
}
"""Options, by the functions and classes with the same arguments; `option=argument` if the names differ."""

NAMED: dict[str, tuple[type, str, Mapping[str, Any], set[str]]] = {
    "gauges": (Gauge, "method", GAUGES, {"best"}),
    "criteria": (Prune, "criterion", pruning.CRITERIA, set()),
    "exporters": (ZooExport, "format", zoo.EXPORTERS, set()),
}
"""Choices of an option that are the names in a table, and additional choices."""


def choices(hint: Any) -> set[str]:
    """Return the words that an option or an argument accepts."""
    inner = get_args(hint)[:1] if get_origin(hint) is Annotated else get_args(hint)
    return {*inner} if get_origin(hint) is Literal else {one for part in inner for one in choices(part)}


@pytest.mark.parametrize(
    ("where", "options", "names"), [(where, *row) for where, rows in REPEATED.items() for row in rows.items()]
)
def test_options_have_the_defaults_of_the_library(where: Any, options: type, names: str) -> None:
    known = {one.name: one.default for one in fields(options)}
    hints, given = get_type_hints(options, include_extras=True), inspect.signature(where).parameters
    for name in names.split():
        option, _, argument = name.partition("=")
        default = given[argument or option].default
        assert known[option] == default or (known[option] in (0, *NOTHING) and default in NOTHING), name
        theirs = choices(get_type_hints(where).get(argument or option))
        assert not theirs or choices(hints[option]) == theirs, name


@pytest.mark.parametrize("what", NAMED)
def test_choices_are_the_names_of_the_library(what: str) -> None:
    options, option, table, further = NAMED[what]
    assert choices(get_type_hints(options, include_extras=True)[option]) == {*table} | further


def test_the_help_of_merge_names_the_defaults_of_its_rules(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["merge", "--help-all"])
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for name, row in RULES.items():
        settings = defaults(row.build())
        for setting in settings.keys() & {one.name for one in fields(Merge)} & {*row.settings}:
            start = text.index(f"--{setting} SETTING")
            value = f"{settings[setting]:g}"
            assert value in text[start : start + 260].replace(",", " ").replace(";", " ").split(), (name, setting)


def defaults(rule: Any) -> dict[str, Any]:
    """Return the settings of a rule, and of the rule that combines its remaining entries."""
    own = {one.name: getattr(rule, one.name) for one in fields(rule)}
    return {name: one for name, one in own.items() if name != "rule"} | (defaults(own["rule"]) if "rule" in own else {})

"""Every code block of the README and the docs runs, page by page from top to bottom, in one folder.

Python blocks share one namespace. Lines of `sh` blocks that begin with `regauge` run in this process. A `text` block
directly after such a block is its expected output, where `...` matches anything. CONTRIBUTING.md explains how to mark
blocks that do not run.
"""

import ast
import contextlib
import importlib
import io
import json
import re
import shlex
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from sources import PAGES, ROOT

import regauge as rg
from regauge.cli.main import main, parse
from regauge.merging.merge_record import Needs
from regauge_papers.table import Table

TEXTS = [ROOT / "README.md", *PAGES]
"""The README and the pages."""
RECORDS = ROOT / "docs" / "records"
Script = Callable[[str], Any]
FENCE = re.compile(r"^```(.*)$")
EXCERPT = re.compile(r"^<!-- (regauge reproduce --draw .*) -->$")
"""The comment above a table with only some columns of its record: the command that makes the table."""
DRAWN = 3
"""The position of the record in such a command."""


@dataclass(frozen=True)
class Block:
    """The lines between two fences, with the text after the first fence."""

    info: tuple[str, ...]
    text: str
    line: int
    is_behind: bool

    @property
    def kind(self) -> str:
        return self.info[0] if self.info else ""


def blocks_of(page: Path) -> list[Block]:
    """Yield the fenced blocks of a page. `is_behind` is true if at most one empty line separates a block from the
    previous block.
    """
    found, opened, end = [], None, -9
    lines = page.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        fence = FENCE.match(line)
        if fence and opened is None:
            opened = (number, tuple(fence[1].split()))
        elif fence and opened is not None:
            start, info = opened
            found.append(Block(info, "\n".join(lines[start : number - 1]) + "\n", start, start - end <= 2))
            opened, end = None, number
    assert opened is None, f"{page.name}: the block of line {opened} has no end"
    return found


def commands_of(block: Block) -> list[list[str]]:
    """Return the words of each command of a block, without comments. A backslash continues a line."""
    lines = block.text.replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def excerpts_of(page: Path) -> list[tuple[list[str], list[str]]]:
    """Yield the words of each command in a comment that makes a table, and the lines of the table below the comment."""
    lines, found = page.read_text(encoding="utf-8").splitlines(), []
    for number, line in enumerate(lines, 1):
        if command := EXCERPT.match(line):
            below = lines[number + 1 :]
            end = next((k for k, one in enumerate(below) if not one.startswith("|")), len(below))
            found.append((shlex.split(command[1]), below[:end]))
    return found


def require_parsed(words: list[str]) -> None:
    """Assert that the command line accepts a command, its options and their values."""
    if words[0] == "regauge" and "..." not in words:
        parse(words[1 : words.index(">") if ">" in words else None])


def require_names(tree: ast.AST) -> None:
    """Assert that all public names of regauge in a piece of code exist."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("regauge"):
            exec(ast.unparse(node), {})
        chain = ast.unparse(node).split(".") if isinstance(node, ast.Attribute) else []
        if chain[:1] == ["rg"] and all(part.isidentifier() for part in chain):
            found: Any = rg
            for part in chain[1:]:
                assert hasattr(found, part), ast.unparse(node)
                found = getattr(found, part)


def require_output(expected: str, printed: str, place: str) -> None:
    """Assert that the printed output equals the output on the page, where `...` matches anything."""
    pattern = re.escape(expected.strip()).replace(re.escape("..."), ".*?")
    assert re.fullmatch(pattern, printed.strip(), re.DOTALL), (
        f"{place} prints\n{printed}\nbut the page says\n{expected}"
    )


def require_tables(lines: Iterable[str], page: str) -> None:
    """Assert that a page contains all tables in the lines, which empty lines separate."""
    assert [table for table in "\n".join(lines).split("\n\n") if table not in page] == []


def text_of(page: str) -> str:
    """Return the text of a page in the documentation folder."""
    return (ROOT / "docs" / page).read_text(encoding="utf-8")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    """Return a function that imports a script by its folder and name."""

    def load(place: str) -> Any:
        folder, _, name = place.partition("/")
        monkeypatch.syspath_prepend(ROOT / folder)
        return importlib.import_module(name)

    return load


@cache
def tables_of_records() -> set[str]:
    """Return the tables of all records of experiments."""
    return {Table.from_json(json.loads(path.read_text("utf-8"))).markdown() for path in RECORDS.glob("*.json")}


@pytest.mark.usefixtures("nothing_registered")
@pytest.mark.parametrize("page", TEXTS, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_block_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    torch.manual_seed(0)
    names: dict[str, Any] = {"__name__": "page"}
    printed = ""
    for block in blocks_of(page):
        place = f"{page.name}, line {block.line}"
        assert block.kind in ("python", "sh", "text", "yaml", "json", "toml"), f"{place}: what language is this?"
        assert set(block.info[1:]) <= {"long", "part"}, f"{place}: no mark {block.info}"
        if block.kind == "text" and block.is_behind and printed:
            require_output(block.text, printed, place)
        printed = ""
        out = io.StringIO()
        if block.kind == "python":
            tree = ast.parse(block.text)
            if block.info[1:]:
                require_names(tree)
                continue
            with contextlib.redirect_stdout(out):
                exec(compile("\n" * block.line + block.text, str(page), "exec"), names)
            printed = out.getvalue()
        elif block.kind == "sh":
            for words in commands_of(block):
                if block.info[1:]:
                    require_parsed(words)
                    continue
                assert words[0] == "regauge", f"{place}: {words[0]!r} cannot run here; mark the block as `sh long`"
                with contextlib.redirect_stdout(out):
                    main(words[1:])
            printed = out.getvalue()


def test_the_page_on_limits_agrees_with_its_records(script: Script) -> None:
    study = script("examples/when_it_fails")
    records, page = study.read(), text_of("limits.md")
    assert len(records) == len(study.cells())
    assert "\n".join(study.table(records)) in page


@pytest.mark.parametrize("part", ["uniform", "noise", "widths"])
def test_the_page_on_comparison_agrees_with_its_records(part: str, script: Script) -> None:
    study = script("benchmarks/lineage")
    page = text_of("comparison.md") + text_of("measurements/comparison.md")
    rows = study.read(RECORDS / f"lineage-{part}.jsonl")
    for table in "\n".join(study.lines_of(part, rows)).split("\n\n"):
        assert table.replace("\n", "\n  ") in page or table in page


def test_the_page_on_comparison_agrees_with_the_pairs_of_known_history(script: Script) -> None:
    study = script("benchmarks/lineage_pairs")
    page = text_of("measurements/comparison.md")
    rows = study.read(RECORDS / "lineage-verdicts.jsonl")
    require_tables(study.lines_of(rows), page)
    fresh = study.read(RECORDS / "lineage-fresh.jsonl")
    assert all("\n".join(make(fresh)) in page for make in (study.summary, study.kinship_table))
    known = study.read(RECORDS / "lineage-pairs.jsonl")
    first = known[0]["a"][0][1]  # The seed of the first network, from which the whole list follows.
    assert known == [pair for family in study.FAMILIES for pair in study.pairs(family, first)]
    assert sorted(row["id"] for row in rows) == sorted(pair["id"] for pair in known)


def test_the_page_on_comparison_agrees_with_its_families(script: Script) -> None:
    study = script("benchmarks/lineage_family")
    text = (RECORDS / "lineage-family.jsonl").read_text("utf-8")
    rows = [json.loads(line) for line in text.splitlines()]
    page = text_of("measurements/comparison.md")
    assert "\n".join(study.table(rows)) in page
    families = [row for row in rows if row["what"] == "family"]
    right, parents, certain, wrong, control = (
        sum(row[name] for row in families) for name in ("right", "parents", "certain", "wrong", "control")
    )
    words = " ".join(page.split())
    assert f"{right} of {parents} networks are connected with their parent" in words
    assert (wrong, f"none of the {certain} certain branches is wrong" in words) == (0, True)
    assert f"The control has {control} of the true branches" in words
    shares = [[*row["shares"].values()] for row in rows if row["what"] == "merge"]
    assert all(abs(x - y) < 0.005 for own in shares for x, y in zip(own, study.SHARES, strict=True))


def test_the_page_on_comparison_agrees_with_its_hard_negatives(script: Script) -> None:
    study = script("benchmarks/aligned_strangers")
    page = text_of("measurements/comparison.md")
    rows = study.read(RECORDS / "aligned-strangers.jsonl")
    require_tables(study.lines_of(rows), page)
    judged = [row for row in rows if row["part"] == "judged"]
    assert not any(row["verdict"] == "descended" for row in judged if row["relation"] == "stranger")
    same = ("descended", "same network in another gauge")
    assert all(row["verdict"] in same for row in judged if row["relation"] == "relative")


def test_the_page_on_merges_of_fine_tunes_agrees_with_its_record(script: Script) -> None:
    """The rule, whose limits were checked on even seeds, also holds on odd seeds."""
    study = script("benchmarks/aligned_merges")
    page = text_of("measurements/aligned_merges.md")
    rows = study.read(RECORDS / "aligned-merges.jsonl")
    require_tables(study.lines_of(rows), page)
    tested = [row for row in rows if row["aligned"] and row["seed"] % 2]
    assert all(study.need_of(row).is_there == (row["amount"] == study.STRANGERS) for row in tested)
    told = {Needs((study.need_of(row),)).notes[0].partition(":")[0].partition(",")[0] for row in tested}
    assert told == {"one base", "aligning helps the other network"}


def test_the_page_on_the_memory_of_learning_agrees_with_its_record(script: Script) -> None:
    """The announced memory is an upper bound of the measured memory in every row."""
    record = RECORDS / "learning-memory.jsonl"
    assert script("benchmarks/learning_memory").table(record) in text_of("measurements/checkpoints.md")
    rows = [json.loads(line) for line in record.read_text("utf-8").splitlines()]
    assert all(row["announced"] >= row["measured"] for row in rows)


def test_the_page_on_flows_agrees_with_the_record_of_defaults(script: Script) -> None:
    study = script("benchmarks/defaults")
    page = text_of("measurements/flows.md")
    record = RECORDS / "defaults.jsonl"
    parts = {json.loads(line)["part"] for line in record.read_text("utf-8").splitlines()}
    assert "flow" in parts <= set(study.PARTS)
    for part in parts:
        assert study.table(record, part) in page


def test_the_page_on_alignment_agrees_with_the_record_of_batch_normalization(script: Script) -> None:
    study, record = script("benchmarks/normed_cnns"), RECORDS / "normed-cnns.jsonl"
    assert study.table(record) in text_of("measurements/alignment.md")
    rows = [json.loads(line) for line in record.read_text("utf-8").splitlines()]
    assert len({(row["population"], row["pair"], row["kind"]) for row in rows}) == len(rows)
    assert {row["population"] for row in rows} == set(study.POPULATIONS)


def test_the_page_of_headlines_is_drawn_from_the_records(script: Script) -> None:
    """Each number of a paper is next to our number with n and the differences, or next to the reason why there is
    none.
    """
    study = script("benchmarks/headlines")
    assert study.draw() == study.PAGE.read_text(encoding="utf-8")
    headlines = [one for several in study.PAPERS.values() for one in several]
    assert len({(one.where, one.quantity) for one in headlines}) == len(headlines)
    for one in headlines:
        where, printed, own, n, _, _, differs = one.cells()
        assert differs
        assert bool(own) == bool(n) == bool(one.record), where
        assert printed or not one.record, where
    twice = replace(next(one for one in headlines if one.where.startswith("table 1, MNIST, Naive")), paper="2.007")
    with pytest.raises(ValueError, match="the record of"):
        twice.cells()


def test_the_page_on_transport_agrees_with_its_record(script: Script) -> None:
    study = script("benchmarks/transport")
    text = (RECORDS / "transport.jsonl").read_text("utf-8")
    page = text_of("measurements/transport.md")
    for part in study.table([json.loads(line) for line in text.splitlines()]).split("\n\n"):
        assert part.strip() in page


def test_the_page_on_gauges_agrees_with_its_records(script: Script) -> None:
    study = script("benchmarks/quantization")
    rows = study.read(RECORDS / "quantization.jsonl")
    page = text_of("measurements/gauges.md")
    assert "\n".join(study.tables(rows)) in page


def test_the_page_on_the_census_agrees_with_its_record(script: Script) -> None:
    study = script("benchmarks/census")
    rows = study.read(RECORDS / "census.jsonl")
    assert study.table(rows) in text_of("census.md")
    answers = [row for row in rows if row["kind"] == "discovered"]
    assert len(answers) > 200
    assert max(row["error"] for row in answers) < 1e-4  # Some models compute in float32 inside.
    assert not any(row["kind"] == "wrong" for row in rows)


def test_the_page_of_judges_is_drawn_from_their_records(script: Script) -> None:
    page, judge = script("judges/page"), script("judges/judge")
    assert page.draw() == text_of("judges.md")
    for path in judge.RECORDS.glob("*.jsonl"):
        rows = judge.read_rows(path)
        assert len({row.case for row in rows}) == len(rows)
        assert all(row.passed or row.reason for row in rows)
        run = [row.passed for row in rows if row.passed is not None]
        assert sum(run) >= 0.95 * len(run), path.stem


@pytest.mark.usefixtures("unsaved")
@pytest.mark.parametrize("record", sorted((ROOT / "docs" / "records").glob("*.json")), ids=lambda path: path.stem)
def test_tables_agree_with_their_records(record: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["reproduce", "--draw", str(record), "--out", str(tmp_path)])
    drawn = (tmp_path / f"{record.stem}.md").read_text(encoding="utf-8").splitlines()
    table = "\n".join(line for line in drawn if line.startswith("|"))
    is_cut = any(words[DRAWN] == f"docs/records/{record.name}" for page in TEXTS for words, _ in excerpts_of(page))
    count = sum(table in page.read_text(encoding="utf-8") for page in TEXTS)
    assert count == 1 or (is_cut and not count)
    assert f"written: {tmp_path / record.stem}.md" in capsys.readouterr().out.replace("\n", "")


def tables_of(page: Path) -> list[str]:
    """Return the tables of a page that no comment makes."""
    text = re.sub(r"(?ms)^```.*?^```$", "", page.read_text(encoding="utf-8"))
    drawn = {"\n".join(shown) for _, shown in excerpts_of(page)}
    return [one for one in re.findall(r"(?m)(?:^\|.*(?:\n|\Z))+", text) if one.strip() not in drawn]


PAPERS = (
    *("flows", "deep_align", "learned_alignment", "autoencoders", "shapes", "posteriors", "weightspace"),
    *("merging", "transformers", "residual"),
)


@pytest.mark.parametrize("name", PAPERS)
def test_every_table_of_a_paper_comes_from_a_record(name: str, script: Script) -> None:
    """The best number of each page also comes from a record: no number outside of such a table is bold."""
    defaults = script("benchmarks/defaults")
    known = tables_of_records() | {defaults.table(RECORDS / "defaults.jsonl", part) for part in defaults.PARTS}
    lines = (RECORDS / "physics-attention.jsonl").read_text("utf-8").splitlines()
    known.add(script("benchmarks/physics_attention").table([json.loads(line) for line in lines]))
    page = ROOT / "docs" / "measurements" / f"{name}.md"
    assert [table for table in tables_of(page) if not any(table.strip() in one for one in known)] == []
    assert re.findall(r"\*\*[\d.]+\*\*", page.read_text(encoding="utf-8")) == []


@pytest.mark.usefixtures("unsaved")
@pytest.mark.parametrize("page", TEXTS, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_excerpts_agree_with_their_records(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for words, shown in excerpts_of(page):
        main([*words[1:], "--out", str(tmp_path)])
        drawn = (tmp_path / f"{Path(words[DRAWN]).stem}.md").read_text(encoding="utf-8").splitlines()
        assert shown == [line for line in drawn if line.startswith("|")], shlex.join(words)


def test_links_of_pages_lead_somewhere() -> None:
    for page in TEXTS:
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8")):
            is_made = "docs/reference/" in (page.parent / target).as_posix()  # by `make docs`, which checks them
            is_here = "://" in target or is_made or (page.parent / target).exists()
            assert is_here, f"{page.name} links to {target}, which is not there"


def test_how_to_pages_have_one_task_and_fit_a_screen() -> None:
    pages = sorted((ROOT / "docs" / "howto").glob("*.md"))
    index = text_of("howto.md")
    for page in pages:
        text = page.read_text(encoding="utf-8")
        assert len(text.split()) <= 350, page.name
        assert len(re.findall("^# ", re.sub("(?ms)^```.*?^```$", "", text), re.MULTILINE)) == 1, page.name
        assert f"](howto/{page.name})" in index


def test_nothing_is_told_twice() -> None:
    """A sentence of at least ten words occurs on only one page."""
    places: dict[str, set[str]] = {}
    for page in (page for page in TEXTS if "measurements" not in page.parts):
        prose = re.sub(r"(?ms)^```.*?^```$|^!\[.*?$", "", page.read_text(encoding="utf-8"))
        for paragraph in re.split(r"\n\s*\n|\n(?=\s*[-*|] )", prose):
            for sentence in re.split(r"(?<=[.:])\s", " ".join(paragraph.split())):
                if len(sentence.split()) >= 10 and not sentence.startswith("|"):
                    places.setdefault(sentence, set()).add(page.relative_to(ROOT).as_posix())
    assert {sentence: where for sentence, where in places.items() if len(where) > 1} == {}


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 900


@pytest.mark.parametrize("path", ["README.md", "pyproject.toml", "CITATION.cff", "docs", "src"])
def test_nothing_is_called_proved(path: str) -> None:
    """A check in float64 is evidence, as the README states. No page, help text or message claims more."""
    claim = re.compile(r"\b(?:proof|prove[dsn]?|any PyTorch (?:model|network))\b", re.IGNORECASE)
    places = [ROOT / path] if (ROOT / path).is_file() else [*(ROOT / path).rglob("*.md"), *(ROOT / path).rglob("*.py")]
    found = [
        f"{place.relative_to(ROOT)}: {line.strip()}"
        for place in places
        for line in place.read_text().splitlines()
        if claim.search(line) and not re.search("not (?:a )?proof", line)
    ]
    assert found == []


def test_the_readme_counts_the_architectures_of_the_page() -> None:
    rows = [row for row in (ROOT / "docs/architectures.md").read_text().splitlines() if row.startswith("| ")]
    count = len(rows) - 2  # less the head and its rule
    assert f"lists {count} checked architectures" in (ROOT / "README.md").read_text()


def test_the_rules_can_fail(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\nprint(3)\n```\n\n```text\n4\n```\n\n```sh long\nregauge align --nothing\n```\n")
    shown, expected, command = blocks_of(page)
    drawn = "regauge reproduce --draw some.json --columns 'CPU s'"
    page.write_text(f"<!-- {drawn} -->\n\n| a |\n| --- |\n\n| another |\n\n<!-- {drawn} -->\n")
    assert excerpts_of(page) == [(shlex.split(drawn), ["| a |", "| --- |"]), (shlex.split(drawn), [])]
    assert tables_of(page) == ["| another |\n"]
    assert (shown.kind, expected.is_behind, command.info) == ("python", True, ("sh", "long"))
    with pytest.raises(AssertionError, match="prints"):
        require_output(expected.text, "3\n", "here")
    require_output("a ... c\n", "a b c\n", "here")
    with pytest.raises(SystemExit):
        require_parsed(commands_of(command)[0])
    with pytest.raises(AssertionError, match="no_such_name"):
        require_names(ast.parse("rg.no_such_name(1)"))

"""The page of the judges, `docs/judges.md`, drawn from their records.

.venv/bin/python judges/page.py
"""

from collections import Counter
from pathlib import Path

from judge import RECORDS, Row, read_rows

PAGE = Path(__file__).parent.parent / "docs" / "judges.md"
KINDS = (
    "recipe", "refused", "example", "same", "law", "moved", "phases", "reads", "control", "model", "test", "spec",
    "matching", "Awq", "SmoothQuant", "SpinQuant", "graph", "copy", "merge", "similar", "dissimilar",
)  # fmt: skip
"""Words that names of cases begin with."""
HEAD = """# Judged by others

regauge runs the tests, tables and examples of other tools without changes to them. The folder `judges/` has one script
for each tool. A script names a commit of the tool, needs a checkout of this commit, and installs the requirements of
the tool in a separate folder. It writes one line for each case to `judges/records/`. This page is drawn from these
lines.

```text
PEERS=FOLDER make judges      # FOLDER has git checkouts such as FOLDER/mergekit; a script prints what is missing
```

Cases in a record are not run again. To repeat them, delete their lines or the file. The lists of cases were fixed
before we changed anything in regauge for them. All lists have been run to the end.
The column "not run" counts cases that need something that our machine lacks, such as a GPU or a download. The share is
the share of passed cases among all other cases.
"""


def main() -> None:
    """Write the page."""
    PAGE.write_text(draw(), encoding="utf-8")


def draw() -> str:
    """The text of the page."""
    records = {path.stem: read_rows(path) for path in sorted(RECORDS.glob("*.jsonl"))}
    lines = [HEAD, "| peer | cases | passed | share | not run | CPU seconds |", "| --- | --- | --- | --- | --- | --- |"]
    for peer, rows in records.items():
        passed, run = sum(bool(row.passed) for row in rows), sum(row.passed is not None for row in rows)
        cells = (peer, len(rows), passed, f"{passed / run:.1%}", len(rows) - run)
        lines.append(f"| {' | '.join(map(str, cells))} | {sum(row.seconds for row in rows):.0f} |")
    for peer, rows in records.items():
        lines += ["", f"## {peer}", "", *_section(rows)]
    return "\n".join(lines) + "\n"


def _section(rows: list[Row]) -> list[str]:
    """Kinds of cases, those that do not pass with their reasons, and what holds for others instead of equality."""
    kinds = Counter(_kind(row) for row in rows)
    passed = Counter(_kind(row) for row in rows if row.passed)
    lines = ["| cases of | number | passed |", "| --- | --- | --- |"]
    lines += [*(f"| {kind} | {count} | {passed[kind]} |" for kind, count in kinds.items()), ""]
    for state, title in ((False, "does not pass, for example"), (None, "not run, for example")):
        own = [row for row in rows if row.passed is state]
        if own:
            lines += [f"| {title} | cases | because |", "| --- | --- | --- |"]
            counts = Counter(row.reason for row in own)
            first = {row.reason: row.case for row in reversed(own)}
            lines += [f"| {_cell(first[why])} | {count} | {_cell(why or '')} |" for why, count in counts.items()]
            lines.append("")
    notes = Counter(_note(row.reason) for row in rows if row.passed and row.reason)
    if notes:
        lines += ["| passes, with a note | cases |", "| --- | --- |"]
        lines += [f"| {_cell(note)} | {count} |" for note, count in notes.items()]
    return lines


def _kind(row: Row) -> str:
    """The first word of a case's name; cases without such words are all of one kind."""
    start = row.case.partition(":")[0].partition(" ")[0]
    return start if start in KINDS or start.endswith(".py") else "tests" if ".py::" in start else "cases"


def _note(reason: str) -> str:
    """A note without what differs from case to case."""
    start = next((start for start in ("refused by both", "random") if reason.startswith(start)), reason)
    return {"random": "random: as many entries change, by as much"}.get(start, start)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


if __name__ == "__main__":
    main()

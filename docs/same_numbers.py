"""Which features were compared on which meshes with one device, by the notes of a test run.

    pytest tests/sharding/test_same_numbers.py -m "not torch" --same-numbers docs/same_numbers.json
    pytest tests/train tests/models -m "not torch and not exhaustive" --same-numbers docs/same_numbers.json
    python docs/make_reference.py       # writes docs/reference/same-numbers.md

`tests/same_numbers.py` has the features, the meshes and the comparison.
"""

import json
from pathlib import Path
from typing import Any

NOTES = Path(__file__).with_suffix(".json")
LEVELS = ("suite", "long", "exhaustive")
SIGNS = {"suite": "**yes**", "long": "long", "exhaustive": "product"}


def page() -> str:
    """Returns the page, as Markdown."""
    notes: dict[str, Any] = json.loads(NOTES.read_text())
    tests = notes["tests"]
    cells: dict[tuple[str, str], str] = {}
    for level in reversed(LEVELS):
        for program in (program for note in tests.values() if note["level"] == level for program in note["programs"]):
            cells |= {(f, m): SIGNS[level] for f in program["features"] for m in program["meshes"]}
    rows = "".join(
        f"| {feature} | {' | '.join(cells.get((feature, mesh), '') for mesh in notes['meshes'])} |\n"
        for feature in notes["features"]
    )
    files = dict.fromkeys(name.partition("::")[0] for name in tests)
    counts = {level: sum(note["level"] == level for note in tests.values()) for level in LEVELS}
    heads, rule = " | ".join(notes["meshes"]), "|".join("---" for _ in notes["meshes"])
    return PAGE.format(heads=heads, rule=rule, rows=rows, files=", ".join(f"`{file}`" for file in files), **counts)


PAGE = """# The same numbers on every mesh

<!-- Written by docs/make_reference.py from docs/same_numbers.json, notes of a test run; see docs/same_numbers.py. -->

A step on a mesh must be the step of one device. For each cell a test takes one step of a small model in float32 on a
mesh of virtual CPU devices and on one device, from the same parameters and batch, and compares within 1e-5: each loss
by its name, the number of tokens, the norm of the gradients, every gradient (clipped, as Adam's first moment) and the
update of every parameter; frozen parameters must not move. It does so for two batches: one whose tokens are masked at
random, so that ranks have different numbers of them, and one with tokens in the second half of the last sample alone,
so that every other rank has none.

**yes**: in `make test` ({suite} tests); long: in `make test-all` ({long} tests); product: in `make test-layouts`
({exhaustive} tests); empty: not compared in this way by the tests that were run for this page. [What can be
combined](compatibility.md) has the pairs that are refused. A mesh often divides in several ways at once, and counts
in each of its columns.

| | {heads} |
|---|{rule}|
{rows}
The tests are in {files}.
"""

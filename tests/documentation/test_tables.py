"""Every figure in a table of the pages has its JSON: tables are what docs/draw_tables.py draws from docs/data."""

import json
import re
from pathlib import Path
from types import ModuleType

import pages
import pytest
import torch.distributed as dist

DOCS = Path(__file__).resolve().parents[2] / "docs"
# A cell that is a measured figure, whatever stands behind it: 161.3, 161.3 (1.00), 19.53, 36.93, 0.87 (1 x H100).
FIGURE = re.compile(r"^[~<]?\d+\.\d+\b")
NOT_JOBS = {"aims", "history"}
# Pages with decimals in tables that are no measured figures, or that other tests hold.
OTHERS = {
    "integrations.md": "releases of libraries",
    "versions.md": "releases of torch",
    "low_precision.md": "bytes of formats; losses, which test_low_precision_losses.py reads",
    "planner.md": "test_planner_accuracy.py computes them anew",
}
# Pages all of whose tables are drawn, also those without decimals.
PAGES_OF_FIGURES = ("benchmarks.md", "history.md")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return pages.script("draw_tables")


def table_lines(script: ModuleType, text: str) -> list[str]:
    """The lines of tables that nobody draws."""
    rest = re.sub(r"^```.*?^```", "", script.MARKED.sub("", text), flags=re.S | re.M)
    return [line for line in rest.splitlines() if line.startswith("|")]


def figures(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|") if FIGURE.match(cell.strip())]


def test_tables_are_what_the_script_draws(script: ModuleType) -> None:
    for page in script.pages():
        text = page.read_text()
        assert script.redrawn(text) == text, f"{page.name} is stale: run python docs/draw_tables.py"
    text = (DOCS / "benchmarks.md").read_text()
    assert "127.3 (1.18)" in script.draw("2xh200")
    assert script.redrawn(text.replace("127.3 (1.18)", "117.3 (1.28)")) == text
    with pytest.raises(ValueError, match=r"draw expects one of headline, .* but got 'nothing'"):
        script.draw("nothing")


def test_every_table_of_figures_is_drawn(script: ModuleType) -> None:
    for page in script.pages():
        lines = table_lines(script, page.read_text())
        if page.name in PAGES_OF_FIGURES:
            assert lines == [], page.name
        if page.name not in OTHERS:
            assert [line for line in lines if figures(line)] == [], f"{page.name}: put them into docs/data"


def test_a_table_that_is_not_drawn_is_noticed(script: ModuleType) -> None:
    text = "<!-- table: casts -->\nwhen\n|a|\n|---|\n|1.5|\n\n|b|\n|---|\n|2.5 (1.2)|x|\n"
    assert table_lines(script, text) == ["|b|", "|---|", "|2.5 (1.2)|x|"]
    assert figures("|2.5 (1.2)|x|") == ["2.5 (1.2)"]


def test_each_job_says_where_its_figures_come_from(script: ModuleType) -> None:
    for path in sorted((DOCS / "data").glob("*.json")):
        if path.stem == "aims":
            continue
        file = json.loads(path.read_text())
        environment = file.get("environment", file)
        assert file["machine"], path.name
        assert file["revision"], path.name
        assert re.match(r"20\d\d-\d\d-\d\d", environment["date"]), path.name
        assert environment.get("torch") or file["versions"]["torch"], path.name
        assert "examples/benchmarks/" in environment["command"], path.name
        assert script.rows(path.stem) or path.stem in NOT_JOBS, path.name


@pytest.mark.parametrize(("name", "job"), [("2 x H100, `882cfba`", "2xh100"), ("2 x H100, `b71d7b9`", "2xh100_peers")])
def test_rows_that_are_predicted_are_those_that_a_benchmark_wrote(script: ModuleType, name: str, job: str) -> None:
    (predicted,) = (known for known in json.loads(script.MEASURED.read_text())["jobs"] if known["name"] == name)
    for row in predicted["rows"]:
        measured = script.figure(job, "ms", mode=row["mode"], seq_len=row["seq_len"])
        assert measured == pytest.approx(row["ms"], abs=0.051), row


def test_each_file_has_a_table(script: ModuleType) -> None:
    used = {line.job for table in script.STEPS.values() for line in table.lines}
    used |= {job for _, jobs in script.TABLES.values() for job in jobs} | NOT_JOBS
    assert {path.stem for path in (DOCS / "data").glob("*.json")} == used
    text = "".join(page.read_text() for page in script.pages())
    drawn = {match["name"] for match in script.MARKED.finditer(text)} - {None}
    assert drawn == (set(script.STEPS) | set(script.TABLES)) - {script.HEADLINE}


def test_tables_of_steps(script: ModuleType) -> None:
    """Each line has figures, of one job, and one row is the unit of the others."""
    for name, table in script.STEPS.items():
        for line in table.lines:
            assert any(script._step_cells(line, table)[1:]), f"{name}: nothing for {line.label}"
        for part in script.jobs_of(table):
            assert len({line.job for line in part.lines}) == 1
            drawn = script.draw_steps(part).splitlines()[2:]
            assert any(set(re.findall(r"\((\d\.\d\d)\)", line)) == {"1.00"} for line in drawn), drawn


def test_tables_of_several_jobs_name_the_job_of_each_figure(script: ModuleType) -> None:
    aims = script.content("aims")["aims"]
    for aim, line in zip(aims, script.draw("aims").splitlines()[2:], strict=True):
        assert set(re.findall(r"\(data/(\w+)\.json\)", line)) == {ratio["job"] for ratio in aim["reached"]}
        assert not re.search(r"\d\.\d", aim["missing"]), "figures are computed"


@pytest.mark.parametrize("page", [DOCS.parent / "README.md", DOCS / "index.md"], ids=lambda page: page.name)
def test_the_headline_is_defined_below_it(page: Path) -> None:
    below = page.read_text().partition("<!-- /headline -->")[2][:150]
    assert "compute: " in below
    assert "`capture_step`: " in below


def test_each_row_is_defined() -> None:
    """Above the tables, in words."""
    text = (DOCS / "benchmarks.md").read_text()
    defined, _, measured = text.partition("## 2 x H100")
    labels = {line.strip("|").split("|")[0] for line in re.findall(r"^\|.*\(\d\.\d\d\).*$", measured, re.M)}
    parts = {part.strip(" `") for label in labels for part in label.replace("the default of", ",").split(",")}
    others = re.compile(r"[0-9a-f]{7}$|DeepSeek|Mixtral|\d+$|float8_|step$|$")  # revisions, models, sizes, recipes
    assert [part for part in parts if part not in defined and not others.match(part)] == []


def test_charts_are_what_the_script_draws() -> None:
    for name, picture in pages.script("draw_charts").pictures().items():
        assert (DOCS / "images" / name).read_text() == picture, "run python docs/draw_charts.py"


def test_the_notebook_shows_a_report() -> None:
    """What it holds was made by its cells: they are run anew, and show the same parameters. Plans may change."""
    held = json.loads((DOCS / "report.ipynb").read_text())
    made = pages.script("draw_notebook").cells()
    dist.destroy_process_group()
    assert [cell["source"] for cell in held["cells"]] == [cell["source"] for cell in made], "run docs/draw_notebook.py"
    (shown,) = (o["data"]["text/html"] for cell in made for o in cell.get("outputs", ()) if "data" in o)
    pictures = ("".join(shown), (DOCS / "_static" / "report.html").read_text())
    tables = [re.findall(r"<h2>Parameters</h2>.*?</table>", picture, re.S) for picture in pictures]
    assert tables[0] == tables[1], "run docs/draw_notebook.py"
    assert len(tables[0]) == 1

"""Pages keep their size; their links point at files, headings and (by the name in the tooltip) tests that exist."""

import ast
import builtins
import re
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pages
import pytest

ROOT = pages.ROOT
PAGES = pages.all_paths()
MAX_WORDS = 18_000  # of docs together without docs/reference, as `wc -w` counts
MAX_COLUMNS = 106  # of code: what the site shows without a scroll bar
MAX_LINES = {"README.md": 120, "docs/benchmarks.md": 215, "docs/tutorials/": 135, "docs/howto/": 65}

_TARGET = r'(?P<target>[^)\s"]+)(?:\s+"(?P<title>[^"]*)")?'
_LINKS = re.compile(
    rf"\]\({_TARGET}\)|^\[[^\]]+\]:\s+{_TARGET.replace('target', 'ref').replace('title', 'ref_title')}", re.M
)


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def prose(page: Path) -> str:
    """A page without its code and comments."""
    text = re.sub(r"^( *)(`{3,}).*?^ *\2$", "", page.read_text(), flags=re.M | re.S)
    return re.sub(r"<!--.*?-->", "", text, flags=re.S)


def links(text: str) -> Iterator[tuple[str, str]]:
    """Target and tooltip of each link that stays within the repository."""
    for match in _LINKS.finditer(re.sub(r"`[^`\n]*`", "code", text)):
        target = match["target"] or match["ref"]
        if not re.match(r"[a-z]+:", target):
            yield target, match["title"] or match["ref_title"] or ""


def anchors(page: Path) -> set[str]:
    """Of the headings of a page, by GitHub's rule: the second of the same words ends in -1."""
    found: list[str] = []
    for heading in re.findall(r"^#+ +(.*?) *$", prose(page), re.M):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-")
        found.append(f"{slug}-{count}" if (count := found.count(slug)) else slug)
    return set(found)


def broken_links(page: Path) -> list[str]:
    broken = []
    for target, title in links(prose(page)):
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists():
            broken.append(f"{target}: no such file")
        elif anchor and file.suffix == ".md" and anchor not in anchors(file):
            broken.append(f"{target}: no such heading")
        elif title.startswith("test_") and not re.search(rf"def {title}\(", file.read_text()):
            broken.append(f"{target}: no {title} in it")
    return broken


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_point_at_what_is_there(page: Path) -> None:
    assert broken_links(page) == []
    defined = set(re.findall(r"^\[([^\]]+)\]:", prose(page), re.M))
    assert defined == set(re.findall(r"\]\[([^\]]+)\]", prose(page)))


def test_broken_links_are_found(tmp_path: Path) -> None:
    (tmp_path / "there.md").write_text("# One `two`: three\n\n## Same\n\n## Same\n\n```text\n# Not one\n```\n")
    (tmp_path / "page.md").write_text(
        "# Here\n[a](there.md#one-two-three) [b](there.md#same-1) [c](#here) [d](https://pytorch.org#no) `[e](no.md)`\n"
        "[f](no.md) [g](there.md#not-one) [h](#there) [i](there.md#same-2)\n"
    )
    found = broken_links(tmp_path / "page.md")
    assert [link.split(":")[0] for link in found] == ["no.md", "there.md#not-one", "#there", "there.md#same-2"]


@pytest.mark.parametrize("picture", sorted((ROOT / "docs").rglob("*.svg")), ids=name)
def test_browsers_can_read_a_picture(picture: Path) -> None:
    assert ElementTree.parse(picture).getroot().tag == "{http://www.w3.org/2000/svg}svg"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_page_is_short_and_its_code_narrow(page: Path) -> None:
    text = page.read_text()
    limits = [limit for start, limit in MAX_LINES.items() if name(page).startswith(start)]
    assert len(text.splitlines()) <= min(limits, default=10_000)
    shown = re.findall(r"^ *`{3}.*?^ *`{3}$", text, re.M | re.S)
    assert [line for block in shown for line in block.splitlines() if len(line) > MAX_COLUMNS] == []


def unbound_names(program: str) -> set[str]:
    """What a program reads and nobody in it defines, wherever it stands."""
    bound, read = set(dir(builtins)) | {"__name__"}, set()
    for node in ast.walk(ast.parse(program)):
        match node:
            case ast.Name(id=word, ctx=ast.Load()):
                read.add(word)
            case ast.Name(id=word) | ast.arg(arg=word) | ast.FunctionDef(name=word) | ast.ClassDef(name=word):
                bound.add(word)
            case ast.alias():
                bound.add((node.asname or node.name).partition(".")[0])
            case ast.ExceptHandler(name=str(word)):
                bound.add(word)
    return read - bound


@pytest.mark.parametrize("page", map(pages.read, PAGES), ids=lambda page: page.name)
def test_readers_see_all_that_a_program_needs(page: pages.Page) -> None:
    program = pages.shown_program(page)
    assert unbound_names(program) == set()
    if page.ranks and program:
        assert f"torchrun --nproc-per-node {page.ranks}" in page.path.read_text() or page.is_long, (
            "says how to start it"
        )
    lines = [line for line in program.splitlines() if re.search(r"""["']cuda["':]""", line)]
    assert set(lines) <= {'device = "cuda" if torch.cuda.is_available() else "cpu"'}, "runs on GPUs and CPUs"
    # Checkpoints are {"model": ..., "optimizer": ...}. torch's own load has no word for a missing key.
    assert re.findall(r"\bdcp\.(?:load|save)\(", program) == []
    assert re.findall(r"checkpoint\.(?:load|save|async_save)\([\w.]+\.state_dict\(\)", program) == []


def test_unbound_names_are_found() -> None:
    assert unbound_names("import a.b, c as d\nfor i in range(3):\n    d(i, j, a, c)") == {"j", "c"}


# What a user does on the first days, by the page that has it.
JOBS = {
    "port": "tutorials/from_fully_shard.md",
    "tensor parallelism": "howto/add_tp.md",
    "save and resume": "howto/resume_on_other_gpus.md",
    "export": "howto/export.md",
    "averages": "howto/ema.md",
    "float8": "tutorials/fp8.md",
    "will it fit": "tutorials/will_it_fit.md",
    "read the report": "howto/read_the_report.md",
    "why is it slow": "tutorials/slow_step.md",
    "mend an error": "howto/ranks_diverge.md",
}


def test_the_front_page_leads_to_each_job() -> None:
    index = ROOT / "docs" / "index.md"
    reached = {target for target, _ in links(prose(index))}
    assert set(JOBS.values()) <= reached
    without_program = {job for job, page in JOBS.items() if not pages.shown_program(pages.read(ROOT / "docs" / page))}
    assert without_program == {"read the report"}  # its notebook makes one


def test_all_pages_together_are_short() -> None:
    indexes = [page for page in (ROOT / "docs").rglob("*.rst") if "reference" not in page.parts]
    assert ROOT / "docs" / "project.rst" in indexes
    pages_of_docs = [page for page in PAGES if page != ROOT / "README.md"]
    words = {name(page): len(page.read_text().split()) for page in [*pages_of_docs, *indexes]}
    assert sum(words.values()) <= MAX_WORDS, (sum(words.values()), words)

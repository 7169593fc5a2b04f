"""Tests that the code in the documentation runs, and that what the documentation names exists.

The Python blocks of a page run in order on two CPU ranks, as one program. A comment before a block
marks a block with other needs:

    <!-- torchrun -->       the block runs as a separate program
    <!-- needs: ... -->     the block is compiled but not run; NOT_RUN counts these blocks
    <!-- setup ... -->      the comment is hidden code that runs before the block
"""

from __future__ import annotations

import logging
import re
import runpy
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import collx
from tests.common.commands import ROOT
from tests.common.pool import Pool
from tests.common.rank import Rank

from .test_readme import output_of

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
OTHERS = [*ROOT.glob("*.md"), ROOT / "benchmarks" / "README.md"]
LANGUAGES = {"python", "sh", "text", "dockerfile", "cpp", "{eval-rst}", "{include}"}
LANGUAGES |= {"{schemas}", "{toctree}"}
NOT_RUN = 6
BLOCK = re.compile(
    r"(?:<!-- (?P<mark>(?:(?!-->).)*?)\s*-->\n)?"
    r"^(?P<indent> *)```(?P<language>\S*)[^\n]*\n(?P<code>.*?)^ *```$",
    re.DOTALL | re.MULTILINE,
)


class Block(NamedTuple):
    page: Path
    mark: str
    language: str
    code: str


def blocks(page: Path) -> list[Block]:
    return [
        Block(page, found["mark"] or "", found["language"], found["code"])
        for found in BLOCK.finditer(page.read_text())
    ]


ALL = [block for page in PAGES for block in blocks(page)]
PYTHON = [block for block in ALL if block.language == "python"]


def program(page: Path) -> str:
    """Returns the code of a page that runs on the ranks of a pool, including setups."""
    parts = []
    for block in blocks(page):
        if block.mark.startswith("setup"):
            parts.append(block.mark.removeprefix("setup"))
        if block.language == "python" and not block.mark.startswith(("torchrun", "needs")):
            parts.append(block.code)
    return "\n".join(parts)


def _run_page(rank: Rank, code: str, name: str) -> None:
    torch.manual_seed(rank.rank)
    comm = rank.new_communicator(None)
    names: dict[str, Any] = {"torch": torch, "dist": torch.distributed, "collx": collx}
    names |= {"F": torch.nn.functional, "comm": comm, "group": comm.group, "__name__": name}
    try:
        exec(compile(code, name, "exec"), names)
    finally:
        logging.getLogger("collx").setLevel(logging.NOTSET)  # as before the page
        if not comm.destroyed:
            comm.destroy()


def _named(pages: list[Path]) -> list[Any]:
    return [pytest.param(page, id=str(page.relative_to(DOCS))) for page in pages]


@pytest.mark.parametrize("page", _named([page for page in PAGES if program(page)]))
@pytest.mark.worlds(2)
def test_the_code_of_a_page_runs(pool: Pool, page: Path) -> None:
    pool.run(_run_page, program(page), str(page.relative_to(ROOT)))


TORCHRUN = [block for block in PYTHON if block.mark == "torchrun"]


@pytest.mark.parametrize("block", TORCHRUN, ids=lambda block: block.page.stem)
def test_a_program_of_the_docs_runs(block: Block, tmp_path: Path) -> None:
    output_of(block.code, "cpu", tmp_path)


def test_blocks_that_do_not_run_are_counted_and_compile() -> None:
    not_run = [block for block in PYTHON if block.mark.startswith("needs: ")]
    for block in not_run:
        compile(block.code, str(block.page), "exec")
    assert len(not_run) == NOT_RUN


def test_every_block_says_what_it_is() -> None:
    assert {block.language for block in ALL} <= LANGUAGES
    marked = [block.mark.split()[0] for block in ALL if block.mark]
    assert set(marked) <= {"torchrun", "needs:", "setup"}
    for page in PAGES:
        assert page.read_text().count("```") == 2 * len(blocks(page)), page
        assert not re.search(r"\n\n    \S", BLOCK.sub("", page.read_text())), f"{page}: indented"


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_to_files_and_headings() -> None:
    """Sphinx also checks links between pages of docs/, but not the other files."""
    wrong = []
    for page in [*OTHERS, *PAGES]:
        for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
            name, _, anchor = link.partition("#")
            target = page.parent / name if name else page
            if "://" in link:
                continue
            if not target.exists() or (anchor and anchor not in _anchors(target)):
                wrong.append(f"{page.relative_to(ROOT)}: {link}")
    assert wrong == []


def test_commands_name_what_exists() -> None:
    """The targets of make and the scripts in commands exist."""
    targets = set(re.findall(r"^([a-z][a-z0-9-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    text = "\n".join(document.read_text() for document in [*OTHERS, *PAGES])
    named = set(re.findall(r"(?:`|^)make (?:[A-Z]+=\S+ )*([a-z][a-z0-9-]*)", text, re.MULTILINE))
    assert named - targets == set()
    scripts = re.findall(r"\b(?:benchmarks|examples|tools|docs/figures)/\w[\w/]*\.(?:py|sh)", text)
    assert [script for script in set(scripts) if not (ROOT / script).exists()] == []


def test_paths_of_the_docs_exist_where_code_names_them() -> None:
    tracked = subprocess.run(
        ["git", "grep", "-hIE", "docs/"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if tracked.returncode > 1:
        pytest.skip("no git checkout")
    named = re.findall(r"(?<![\w./-])docs/[\w/-]+\.(?:md|svg|json|py)", tracked.stdout)
    assert {path for path in named if not (ROOT / path).exists()} == set()


def test_every_operator_is_on_a_page() -> None:
    names = {name.split(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    operators = {name.removeprefix("collx::") for name in names if name.startswith("collx::")}
    on_pages = re.findall(r"```\{schemas\} (.*)", "\n".join(p.read_text() for p in PAGES))
    assert {name for line in on_pages for name in line.split()} == operators


@pytest.mark.parametrize(
    ("name", "page", "command"),
    [
        ("doctor", "tools", "GLOO_SOCKET_IFNAME="),
        ("bench", "tools", "collx bench allreduce -g 2"),
        ("tune", "tuning", "collx tune --ops"),
    ],
)
def test_the_picture_of_a_command_shows_what_its_page_shows(
    name: str, page: str, command: str
) -> None:
    drawn = runpy.run_path(str(DOCS / "figures" / "terminal.py"))["picture"]
    found = blocks(DOCS / "guide" / f"{page}.md")
    [at] = [i for i, block in enumerate(found) if command in block.code]
    picture = drawn(found[at].code.strip(), found[at + 1].code)
    assert picture == (DOCS / "figures" / f"{name}.svg").read_text()


def test_the_pictures_are_those_of_their_script(tmp_path: Path) -> None:
    script = DOCS / "figures" / "pictures.py"
    names: dict[str, Any] = {"__name__": "pictures", "__file__": str(tmp_path / "pictures.py")}
    exec(compile(script.read_text(), str(script), "exec"), names)
    names["main"]()
    drawn = {file.name: file.read_text() for file in (tmp_path / "pictures").iterdir()}
    assert drawn == {file.name: file.read_text() for file in (DOCS / "figures/pictures").iterdir()}


def _parts_of_plot(svg: str) -> tuple[list[str], list[float]]:
    """Returns the text and the numbers of a plot. The last bits of numbers, and the names of
    elements, which matplotlib derives from them, depend on the processor."""
    names = list(dict.fromkeys(re.findall(r'id="([mp][0-9a-f]{10})"', svg)))
    for number, name in enumerate(names):
        svg = svg.replace(name, f"element{number}")
    decimal = r"-?\d+\.\d+"
    return re.split(decimal, svg), [float(found) for found in re.findall(decimal, svg)]


def test_the_plots_show_the_tables_of_their_page(tmp_path: Path) -> None:
    version = pytest.importorskip("matplotlib").__version__
    script = runpy.run_path(str(DOCS / "figures" / "plots.py"))
    text = (DOCS / "guide" / "performance.md").read_text()
    assert [len(rows) for rows in script["overlap_rows"](text).values()] == [6, 6]
    for ranks in script["RANKS"]:
        assert len(script["collective_points"](text, ranks)) == 8
    script["main"](tmp_path)
    drawn = {file.name: file.read_text() for file in tmp_path.iterdir()}
    kept = {name: (DOCS / "figures" / name).read_text() for name in drawn}
    for name, picture in drawn.items():
        if f"Matplotlib v{version}," not in kept[name]:
            pytest.skip("another version of matplotlib has drawn the plots")
        (words, numbers), (kept_words, kept_numbers) = map(_parts_of_plot, (picture, kept[name]))
        same = words == kept_words and numbers == pytest.approx(kept_numbers, abs=1e-4)
        assert same, f"{name} shows other figures: python docs/figures/plots.py"

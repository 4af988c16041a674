"""How Sphinx makes a site of the pages as GitHub shows them: `make site`.

The pages are those of docs/README.md, in its order; the first is the README of the repository. A link to any other file
of the repository leads to it on GitHub. A link or anchor that leads nowhere is a warning, and a warning ends the build.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from posixpath import normpath
from typing import Any

from IPython.lib.lexers import IPython3Lexer
from pygments.lexer import bygroups
from pygments.token import Keyword, Operator, Text

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
URL = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Repository"]
INDEX = "docs/README.md"

PICTURE = re.compile(
    r'<picture>\s*<source [^>]*srcset="(.+?)">\s*<img alt="(.+?)" src="(.+?)"(?: width="(\d+)")?>\s*</picture>'
)
LINK = re.compile(r"(?<=\]\()([^)\s:#]+)(?=[)#])")
SECTION = re.compile(r"^## (.+)\n((?:.|\n)*?)(?=^## |\Z)", re.MULTILINE)
ENTRY = re.compile(r"^- \[\S+\]\((\S+)\.md\)", re.MULTILINE)

project = "nbtrain"
root_doc = "README"
include_patterns = ["*.md", "docs/**"]
exclude_patterns = [".*", "build", "dist", "js", "node_modules", "nbtrain", "notebooks", "tests"]
extensions = ["myst_parser", "sphinx_copybutton"]
templates_path = ["templates"]

myst_enable_extensions = ["attrs_inline"]
myst_heading_anchors = 4
copybutton_selector = "div.highlight-python pre, div.highlight-sh pre"

html_title = "nbtrain"
html_theme = "pydata_sphinx_theme"
html_context = {"default_mode": "auto"}
html_sidebars = {"**": ["pages.html"]}
html_show_sourcelink = html_copy_source = html_show_sphinx = False
html_theme_options = {
    "navbar_center": [],
    "secondary_sidebar_items": ["page-toc"],
    "icon_links": [{"name": "GitHub", "url": URL, "icon": "fa-brands fa-github"}],
    "footer_start": [],
    "footer_end": [],
}


class CellLexer(IPython3Lexer):
    """Below `%%distributed` a cell is Python; IPython's own lexer takes the body of any magic for plain text."""

    tokens = {
        **IPython3Lexer.tokens,
        "root": [(r"(%%)(\w+)(.*\n)", bygroups(Operator, Keyword, Text)), *IPython3Lexer.tokens["root"]],
    }


def setup(app: Any) -> None:
    app.add_lexer("python", CellLexer)
    app.connect("source-read", as_a_page)
    app.connect("build-finished", with_an_index)


def as_a_page(app: Any, name: str, source: list[str]) -> None:
    """Pictures for light and dark, links out of the site, and on the first page the order of all pages."""
    folder = (Path(app.srcdir) / name).parent

    def led_out(link: re.Match[str]) -> str:
        file = (folder / link[1]).resolve()
        if not file.exists() or file.suffix in (".md", ".png", ".svg"):
            return link[1]
        return f"{URL}/tree/main/{file.relative_to(app.srcdir).as_posix()}"

    source[0] = LINK.sub(led_out, PICTURE.sub(_for_both_grounds, source[0]))
    if name == root_doc:
        source[0] += "".join(_contents((Path(app.srcdir) / INDEX).read_text(encoding="utf-8")))


def _for_both_grounds(picture: re.Match[str]) -> str:
    dark, words, light, width = picture.groups()
    size = f" width={width}px" if width else ""
    return f"![{words}]({light}){{.only-light{size}}}\n![{words}]({dark}){{.only-dark{size}}}"


def _contents(index: str) -> Iterator[str]:
    yield _toctree("Pages", ["/docs/README"])
    for title, entries in SECTION.findall(index):
        yield _toctree(title, [normpath(f"/docs/{page}") for page in ENTRY.findall(entries)])


def _toctree(title: str, pages: list[str]) -> str:
    return f"\n\n```{{toctree}}\n:hidden:\n:caption: {title}\n\n" + "\n".join(pages) + "\n```\n"


def with_an_index(app: Any, error: Exception | None) -> None:
    if error is None and app.builder.format == "html":
        shutil.copyfile(Path(app.outdir) / "README.html", Path(app.outdir) / "index.html")

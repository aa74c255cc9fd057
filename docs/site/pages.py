"""A hook of mkdocs: pages that live outside docs/ (recipes, changelog), and links that lead out of the site.

The same files are read on GitHub, so their links are those of the repository. Here a link to a file that is a page of
the site leads to that page, and one to any other file of the repository leads to GitHub; one to nothing is a warning,
which fails the strict build. Formulas become MathML, which browsers draw without a script, and a search lists guides
before the members of the reference.
"""

from __future__ import annotations

import html
import logging
import posixpath
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files
from mkdocs.utils import get_relative_url

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"(?<=\]\()([^)\s]+)(?=\))")
HREF = re.compile(r'(?<=href=")([^"]+)(?=")')
FORMULA = re.compile(r'(?<=class="arithmatex">)\\(?P<kind>[(\[])(?P<latex>.*?)\\[)\]](?=</)', re.S)
CODE = re.compile(r"(^```.*?^```|`[^`\n]*`)", re.M | re.S)
log = logging.getLogger("mkdocs.hooks.pages")


def carried() -> dict[str, Path]:
    """Files outside docs/ that the site has, by their address in it."""
    found = {"changelog.md": ROOT / "CHANGELOG.md", "contributing.md": ROOT / "CONTRIBUTING.md"}
    for pattern in ("recipes/*/README.md", "assets/pictures/*"):
        found |= {path.relative_to(ROOT).as_posix(): path for path in ROOT.glob(pattern)}
    return found


def on_files(files: Files, config: Any) -> Files:
    """Add the pages and pictures from outside docs/."""
    for address, path in carried().items():
        files.append(File.generated(config, address, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Point the links of a page to pages of the site where there are such, else to GitHub."""
    if not page.file.src_uri.startswith(("reference/", "changelog", "invariants", "families")):
        page.meta["search"] = {"boost": 3}

    def pointed(match: re.Match[str]) -> str:
        here = posixpath.dirname(page.file.src_uri) or "."
        return address(match[1], page, config, files, lambda file: posixpath.relpath(file.src_uri, here))

    parts = CODE.split(markdown)
    return "".join(part if part.startswith("`") else LINK.sub(pointed, part) for part in parts)


def on_page_content(content: str, page: Any, config: Any, files: Files) -> str:
    """Write formulas as MathML, and point the links of notebooks, which are HTML before their links are read."""

    def drawn(match: re.Match[str]) -> str:
        return convert(html.unescape(match["latex"]), display="inline" if match["kind"] == "(" else "block")

    def pointed(match: re.Match[str]) -> str:
        return address(match[1], page, config, files, lambda file: get_relative_url(file.url, page.url))

    content = FORMULA.sub(drawn, content)
    return HREF.sub(pointed, content) if page.file.src_uri.endswith(".ipynb") else content


def address(link: str, page: Any, config: Any, files: Files, within: Any) -> str:
    """Where a link of a page leads on the site; `within` gives it for a file of the site."""
    place, hash, heading = link.partition("#")
    if not place or ":" in place:
        return link
    target = (Path(page.file.abs_src_path).resolve().parent / place).resolve()
    for file in files:
        if file.abs_src_path and not file.inclusion.is_excluded() and Path(file.abs_src_path).resolve() == target:
            return within(file) + hash + heading
    if target.exists() and target.is_relative_to(ROOT):
        kind = "tree" if target.is_dir() else "blob"
        return f"{config.repo_url.rstrip('/')}/{kind}/main/{target.relative_to(ROOT).as_posix()}{hash}{heading}"
    log.warning("%s links to %s, which does not exist", page.file.src_uri, link)
    return link

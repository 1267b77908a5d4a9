"""Check the Markdown documentation and render it to HTML in ``build/docs``.

Every relative link must name a file of the repository and every ``#anchor`` a heading of its page
(anchors as code-hosting sites derive them). Exits with 1 and a list of what is broken otherwise.
"""

from __future__ import annotations

import html
import os
import re
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from urllib.parse import unquote, urlsplit

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).resolve().parent.parent
MARKDOWN = MarkdownIt("commonmark").enable("table")
FRAME = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 48rem; margin: 2rem auto; padding: 0 1rem }}
pre {{ background: #f5f5f5; padding: .75rem; overflow-x: auto }}
code {{ font: 14px/1.4 ui-monospace, monospace }}
table {{ border-collapse: collapse }}
td, th {{ border: 1px solid #ccc; padding: .25rem .5rem; text-align: left }}
nav {{ font-size: 14px; border-bottom: 1px solid #ccc; padding-bottom: .5rem }}
</style>
<nav>{nav}</nav>
{body}</html>
"""


def pages(root: Path) -> list[Path]:
    """The Markdown files: those at the top, then those in ``docs/``."""
    return [*sorted(root.glob("*.md")), *sorted((root / "docs").rglob("*.md"))]


def parse(page: Path) -> list[Token]:
    """Markdown tokens of a page, every heading with its anchor as ``id``."""
    tokens = MARKDOWN.parse(page.read_text("utf-8"))
    seen: dict[str, int] = {}
    for opening, content in pairwise(tokens):
        if opening.type == "heading_open":
            text = "".join(t.content for t in content.children or () if t.type in ("text", "code_inline"))
            slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
            count = seen[slug] = seen.get(slug, -1) + 1
            opening.attrSet("id", f"{slug}-{count}" if count else slug)
    return tokens


def anchors(page: Path) -> set[str]:
    """The anchors of a page."""
    return {str(token.attrGet("id")) for token in parse(page) if token.type == "heading_open"}


def links(tokens: list[Token]) -> Iterator[tuple[Token, str]]:
    """Every link and image with the attribute that names its target."""
    for token in tokens:
        for child in token.children or ():
            if child.type in ("link_open", "image"):
                yield child, "href" if child.type == "link_open" else "src"


def check(root: Path) -> list[str]:
    """What is broken, one line each; empty if all is well."""
    problems = []
    for page in pages(root):
        for token, attribute in links(parse(page)):
            target = str(token.attrGet(attribute))
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            file = (page.parent / unquote(parts.path)).resolve() if parts.path else page.resolve()
            where = f"{page.relative_to(root)}: {target}"
            if not file.exists() or not file.is_relative_to(root.resolve()):
                problems.append(f"{where}: no such file")
            elif parts.fragment and file.suffix == ".md" and unquote(parts.fragment) not in anchors(file):
                problems.append(f"{where}: no such heading")
    return problems


def render(root: Path, out: Path) -> list[Path]:
    """Write one HTML file per page, with links between pages kept; returns them."""
    written = []
    for page in pages(root):
        target = out / page.relative_to(root).with_suffix(".html")
        tokens = parse(page)
        for token, attribute in links(tokens):
            parts = urlsplit(str(token.attrGet(attribute)))
            if parts.path and not parts.scheme and not parts.netloc:
                token.attrSet(
                    attribute, parts._replace(path=_moved(page.parent / unquote(parts.path), root, out, target)).geturl()
                )
        nav = " · ".join(
            f'<a href="{_moved(other, root, out, target)}">{html.escape(str(other.relative_to(root).with_suffix("")))}</a>'
            for other in pages(root)
        )
        body = MARKDOWN.renderer.render(tokens, MARKDOWN.options, {})
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(FRAME.format(title=html.escape(page.stem), nav=nav, body=body), "utf-8")
        written.append(target)
    return written


def _moved(file: Path, root: Path, out: Path, source: Path) -> str:
    """The path to ``file``, or to its rendering, as seen from the rendered page ``source``."""
    file = file.resolve()
    if file.suffix == ".md":
        file = out.resolve() / file.relative_to(root.resolve()).with_suffix(".html")
    return Path(os.path.relpath(file, source.resolve().parent)).as_posix()


def main() -> int:
    """Check, then render."""
    problems = check(ROOT)
    for problem in problems:
        print(problem, file=sys.stderr)
    written = render(ROOT, ROOT / "build" / "docs") if not problems else []
    print(f"{len(written)} pages in build/docs, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

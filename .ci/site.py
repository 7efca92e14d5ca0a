"""Hook of mkdocs that adds the codemap, the pages outside ``docs``, and the files that pages link to.

Links to them are rewritten, so that mkdocs checks all links of all pages. A link to a file that does not exist stays as
it is, and mkdocs reports it.
"""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # For tests.codemap, as mkdocs starts elsewhere.
from tests.codemap import codemap  # noqa: E402

#: Pages outside ``docs`` by their path in the project, with their path in the site.
PAGES = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "ARCHITECTURE.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "SECURITY.md": "SECURITY.md",
    "servers/README.md": "servers/README.md",
    "examples/README.md": "examples/README.md",
}
#: Weights of sections in the search: guides come before references, and these before formats.
_BOOST = {"How to": 3.0, "Internals": 0.1, "Project": 0.1}
#: Longest word of code that fits on a line of a phone.
_WHOLE_MAX = 30
#: A link's or a picture's target in Markdown and in HTML, without anchor.
_TARGET = re.compile(r'(\]\(|(?:src|srcset|href)=")(?!https?:|#|mailto:)([^)#"\s]+)')


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages outside ``docs``, and the files that any page links to."""
    for path, site_path in PAGES.items():
        files.append(File.generated(config, site_path, abs_src_path=str(ROOT / path)))
    files.append(File.generated(config, "codemap.md", content=codemap()))
    for page in list(files.documentation_pages()):
        for _, target in _TARGET.findall(page.content_string):
            path = _project_path(page.src_uri, target)
            if _is_source(path) and files.get_file_from_path(path) is None:
                files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite links of the project's folders to links of the site, and let the search prefer guides."""
    page.meta.setdefault(
        "search", {"boost": next((_BOOST[one.title] for one in page.ancestors if one.title in _BOOST), 1.0)}
    )

    def rewritten(match: re.Match[str]) -> str:
        path = _project_path(page.file.src_uri, match[2])
        if path.startswith("docs/"):
            path = path.removeprefix("docs/")
        elif path in PAGES:
            path = PAGES[path]
        elif not _is_source(path):
            return match[0]
        return match[1] + posixpath.relpath(path, posixpath.dirname(page.file.src_uri) or ".")

    return _TARGET.sub(rewritten, markdown)


def on_page_content(html: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Keep the words of code in texts and tables whole: browsers break them at hyphens. A long one may break at its
    punctuation."""

    def word(text: str) -> str:
        if len(text) > _WHOLE_MAX:
            return re.sub(r"(?<=[./(=_,:\[-])(?=\w)", "<wbr>", text)
        return f'<span class="whole">{text}</span>'

    return re.sub(
        r"(?<!</span>)<code>([^<]+)</code>",
        lambda code: f"<code>{' '.join(word(one) for one in code[1].split(' '))}</code>",
        html,
    )


def _project_path(page: str, target: str) -> str:
    """The path in the project of a link's target. page: the page's path in the site."""
    origin = {site_path: path for path, site_path in PAGES.items()}.get(page, f"docs/{page}")
    return posixpath.normpath(posixpath.join(posixpath.dirname(origin), target))


def _is_source(path: str) -> bool:
    """True for a file outside ``docs`` that is no page of the site."""
    return not path.startswith(("docs/", "../")) and path not in PAGES and (ROOT / path).is_file()

"""MkDocs hook: the pages that lie outside docs/ join the site, and links lead to them as they do in the repository."""

import re
from pathlib import Path

from mkdocs.structure.files import File

PAGES = {"README.md": "start.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""Name in the repository's root, and in the site."""


def on_files(files, config):
    """Add the root's pages to those of docs/."""
    root = Path(config.config_file_path).parent
    for name, page in PAGES.items():
        text = re.sub(r"\]\((\w+\.md)\b", lambda link: f"]({PAGES.get(link[1], link[1])}", (root / name).read_text())
        files.append(File.generated(config, page, content=text.replace("](docs/", "](")))
    return files


def on_page_markdown(markdown, **_):
    """Point `../README.md` and its like to the site's page."""
    return re.sub(r"\]\(\.\./(\w+\.md)\b", lambda link: f"]({PAGES.get(link[1], link[0][2:])}", markdown)

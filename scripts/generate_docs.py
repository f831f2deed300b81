"""Writes the pages of docs/ that come from code."""

from __future__ import annotations

from pathlib import Path

from padtrace.recording import document
from padtrace.report import explain_view
from padtrace.sharing import page

DOCS = Path(__file__).resolve().parent.parent / "docs"


def pages() -> dict[str, str]:
    """File name to content of every generated page."""
    return {
        "contracts.md": explain_view.markdown(),
        "recording-format.md": document.markdown(),
        "sharing.md": page.markdown(),
    }


if __name__ == "__main__":
    for name, text in pages().items():
        (DOCS / name).write_text(text)
        print(f"wrote docs/{name}")

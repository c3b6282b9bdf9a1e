"""Runs every notebook from its paired text, and checks that the two agree.

    python notebooks/execute.py

Fails if a cell raises, or if cells differ from the text (`jupytext --sync` mends that).
"""

import sys
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).parent


def sources(notebook: nbformat.NotebookNode) -> list[tuple[str, str]]:
    return [(cell.cell_type, cell.source) for cell in notebook.cells]


def main() -> int:
    for path in sorted(HERE.glob("*.ipynb")):
        notebook = nbformat.read(path, as_version=4)
        text = jupytext.read(path.with_suffix(".py"))
        if sources(notebook) != sources(text):
            print(f"{path.name} differs from its text; run: jupytext --sync {path}")
            return 1
        NotebookClient(notebook, timeout=600, resources={"metadata": {"path": HERE}}).execute()
        print(f"{path.name}: {len(notebook.cells)} cells ran")
    return 0


if __name__ == "__main__":
    sys.exit(main())

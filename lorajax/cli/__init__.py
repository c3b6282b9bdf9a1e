"""The command line: `lorajax demo`, `lorajax generate`, `lorajax inspect` (extra `cli`)."""

import importlib
import importlib.util
import sys

_NEEDS = ("typer", "rich", "tokenizers")


def main() -> None:
    """Entry point of the `lorajax` command."""
    missing = [name for name in _NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        print(
            f"the command line needs {', '.join(missing)}; run: pip install 'lorajax[cli]'",
            file=sys.stderr,
        )
        raise SystemExit(2)
    importlib.import_module("lorajax.cli.app").run()

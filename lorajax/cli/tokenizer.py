"""Prompts of text to token ids."""

from pathlib import Path

from tokenizers import Tokenizer

from lorajax.cli.lines import Encode
from lorajax.cli.options import UsageError
from lorajax.engine import RequestError


def encoder(path: Path) -> Encode:
    """Text to ids with a model's tokenizer, special tokens included; read when a line has text.

    Args:
        path: Of the `tokenizer.json`. If there is none, or it cannot read a text, the function that
            is returned raises `RequestError`; if it is broken, `UsageError`.
    """
    loaded: list[Tokenizer] = []

    def encode(text: str) -> list[int]:
        if not path.is_file():
            raise RequestError(
                f'"prompt" needs a tokenizer.json in the model\'s folder; got none at {path}; give '
                '"prompt_ids"'
            )
        if not loaded:
            loaded.append(_tokenizer(path))
        try:
            return loaded[0].encode(text).ids
        except Exception as error:  # lone surrogates, for one
            raise RequestError(
                f'"prompt" must be text that the tokenizer can read; got {error}; correct it'
            ) from error

    return encode


def _tokenizer(path: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises nothing narrower
        raise UsageError(
            f"tokenizer.json must be readable; got {error} for {path}; restore the file"
        ) from error

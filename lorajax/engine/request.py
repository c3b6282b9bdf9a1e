"""What the engine takes and gives."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from lorajax.errors import LoraError

#: None for the base model, a registered name, or names with weights.
AdapterChoice = str | Mapping[str, int | float] | None


class RequestError(LoraError):
    """A request cannot be served; the others of its batch are unaffected."""


@dataclass(frozen=True)
class Request:
    """One prompt to continue greedily.

    Attributes:
        id: Given back with the result.
        prompt_ids: Token ids, at least one.
        max_tokens: Tokens to generate at most, at least 1.
        adapter: None for the base model, a registered name, or names with weights.
    """

    id: str
    prompt_ids: tuple[int, ...]
    max_tokens: int
    adapter: AdapterChoice = None


@dataclass(frozen=True, eq=False)
class Result:
    """A finished request.

    Attributes:
        request: What was asked.
        token_ids: What was generated, with the end-of-sequence token if there was one.
        logprobs: Natural log of each token's probability.
        error: Why it failed, or None. A failed request has no tokens.
        logits: `f32[len(token_ids), V]`, if the engine keeps them.
    """

    request: Request
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    error: str | None = None
    logits: np.ndarray | None = None


@dataclass(frozen=True)
class Limits:
    """What a model can serve.

    Attributes:
        vocab_size: V; token ids are in [0, V).
        max_length: Tokens of a prompt and its continuation together: the length of a cache row.
    """

    vocab_size: int
    max_length: int

    def check(self, request: Request) -> None:
        """Refuses a request that does not fit the model.

        Raises:
            RequestError: It is empty, too long, asks for no tokens, or has an id out of range.
        """
        prompt, wanted = request.prompt_ids, request.max_tokens
        if wanted < 1:
            raise RequestError(
                f"max_tokens must be at least 1; got {wanted}; ask for one token or more"
            )
        if not prompt:
            raise RequestError("a prompt must have a token; got none; start it with the BOS id")
        wrong = next((t for t in prompt if not 0 <= t < self.vocab_size), None)
        if wrong is not None:
            raise RequestError(
                f"token ids must be in [0, {self.vocab_size}); got {wrong}; use ids of this "
                "model's tokenizer"
            )
        if len(prompt) + wanted > self.max_length:
            raise RequestError(
                f"prompt and max_tokens together must fit {self.max_length} positions; got "
                f"{len(prompt)} + {wanted}; shorten the prompt or lower max_tokens"
            )

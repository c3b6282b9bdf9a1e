"""Error types: every refusal is one of these, and reads "rule; got; do"."""

from lorajax.kernels_pallas import ImplementationError as ImplementationError


class LoraError(ValueError):
    """Base class of every error that lorajax raises on bad input."""


class SpecError(LoraError):
    """A spec, shape or array does not fit the rules of the slot arrays."""


class AdapterError(LoraError):
    """An adapter cannot be loaded exactly, so it is refused; nothing was changed."""


class UnknownAdapterError(LoraError, KeyError):
    """A name was never registered, or was unloaded."""

    __str__ = Exception.__str__  # KeyError would print the message's repr


class PoolFullError(LoraError):
    """The slots needed are held by pinned or leased adapters."""


class ModelError(LoraError):
    """A model directory cannot be read, or its architecture is not supported."""

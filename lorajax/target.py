"""One adaptable matrix product, or the look-up of the embedding."""

from dataclasses import dataclass
from typing import Literal

from lorajax.errors import SpecError


@dataclass(frozen=True)
class Target:
    """One matrix product that adapters may change, alike in all layers or outside of them.

    Attributes:
        name: Key of the target in a state, for example "self_attn.o_proj".
        d_in: Input features; of an embedding the vocabulary V.
        d_out: Output features: an int, or the widths of the G slices of a merged target. Of an
            output head the vocabulary V.
        modules: Path below the layer of the module that each slice stands for in adapter files, for
            example ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"); by default `name`
            for one slice. Outside of the layers the whole path ("model.embed_tokens", "lm_head").
        parallel: What it is, and so how tensor parallelism cuts it. In every layer a "column"
            product (d_out is cut) or a "row" product (d_in); once in a model the "embedding" (d_in,
            the vocabulary) and the output "head" (d_out, the vocabulary).
        heads: Attention heads of each slice (of d_in, in a row target), which shards hold whole; a
            slice with fewer heads than shards is copied. Empty where columns are independent.
    """

    name: str
    d_in: int
    d_out: int | tuple[int, ...]
    modules: tuple[str, ...] = ()
    parallel: Literal["column", "row", "embedding", "head"] = "column"
    heads: tuple[int, ...] = ()

    def __post_init__(self):
        widths = (self.d_out,) if isinstance(self.d_out, int) else tuple(self.d_out)
        object.__setattr__(self, "d_out", widths)
        object.__setattr__(self, "modules", tuple(self.modules) or (self.name,))
        if self.d_in <= 0 or not widths or min(widths) <= 0:
            raise SpecError(
                f"features of a target must be positive; got d_in={self.d_in}, d_out={widths} for "
                f"{self.name!r}; take them from the base model's weight"
            )
        if not self.layered and (len(widths) > 1 or self.heads):
            raise SpecError(
                "an embedding or output head must have one slice and no attention heads; got "
                f"d_out={widths}, heads={self.heads} for {self.name!r}; give its width alone"
            )
        cut = widths if self.parallel == "column" else (self.d_in,)
        if self.heads and (
            len(self.heads) != len(cut)
            or any(h <= 0 or n % h for n, h in zip(cut, self.heads, strict=True))
        ):
            raise SpecError(
                f"heads of a target must divide {list(cut)} one by one; got {self.heads} for "
                f"{self.name!r}; give the number of heads of each slice, or leave it out"
            )
        if len(self.modules) != len(widths):
            raise SpecError(
                f"a target must name one module for each slice; got {len(self.modules)} for "
                f"{len(widths)} slices of {self.name!r}; give `modules` in the order of `d_out`"
            )

    @property
    def layered(self) -> bool:
        """Whether every layer has one; an embedding or head stands outside of the layers."""
        return self.parallel in ("column", "row")

    @property
    def slices(self) -> tuple[int, ...]:
        """Widths of the G slices of d_out."""
        return self.d_out  # pyright: ignore[reportReturnType]  (normalised in __post_init__)

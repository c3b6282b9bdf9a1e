"""What can be adapted and how much memory it takes: static, hashable, no arrays."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from jax.typing import DTypeLike

from lorajax import families
from lorajax.errors import SpecError
from lorajax.target import Target

_SCALE_BYTES = 4  # float32


@dataclass(frozen=True)
class LoraSpec:
    """The slots of a base model.

    Attributes:
        targets: What may be adapted.
        num_layers: L, layers of the base model.
        num_slots: S, slots. An adapter of rank r takes ceil(r / R) of them.
        slot_rank: R, rank of one slot; a multiple of 8.
        dtype: Element type of A and B.
        layers: Path of the layer list in adapter files; "model.layers" means modules like
            "model.layers.0.self_attn.q_proj". A leading wrapper ("language_model", "model") is
            understood by the loader.
        fused: (module, parts) pairs: adapter files may hold one module for several, with B's rows
            in the order of the parts, for example ("mlp.gate_up_proj", ("mlp.gate_proj", ...)).
        vocab_size: Tokens of the base model, or None if that is not known: adapters that add tokens
            are refused.
        base: Folder of the base model, or None if that is not known: what an adapter file repeats
            of the base's weights is compared with them.
        stack_layers: One array for all layers (loops over layers, Pallas kernels), or one for each
            layer (unrolled models on plain XLA, where slicing a stacked array is a copy).
    """

    targets: tuple[Target, ...]
    num_layers: int
    num_slots: int
    slot_rank: int = 16
    dtype: DTypeLike = "bfloat16"
    layers: str = "model.layers"
    fused: tuple[tuple[str, tuple[str, ...]], ...] = ()
    vocab_size: int | None = None
    base: str | None = field(default=None, compare=False)  # where files lie changes no slot
    stack_layers: bool = False

    def __post_init__(self):
        object.__setattr__(self, "targets", tuple(self.targets))
        object.__setattr__(self, "dtype", np.dtype(self.dtype))
        if not self.targets or self.num_layers < 1 or self.num_slots < 1:
            raise SpecError(
                "a spec needs at least one target, layer and slot; got "
                f"{len(self.targets)} targets, {self.num_layers} layers, {self.num_slots} slots; "
                "name what may be adapted"
            )
        if self.slot_rank < 8 or self.slot_rank % 8:
            raise SpecError(
                f"slot_rank must be a multiple of 8; got {self.slot_rank}; use 8, 16 or 32 (an "
                "adapter of a larger rank takes several slots)"
            )
        for what, names in (
            ("target", [t.name for t in self.targets]),
            ("module", [m for t in self.targets for m in t.modules]),
        ):
            twice = {n for n in names if names.count(n) > 1}
            if twice:
                raise SpecError(f"a {what} must be named once; got {sorted(twice)} twice; drop one")
        for module, parts in self.fused:
            unknown = [p for p in parts if p not in self.module_slices]
            if unknown:
                raise SpecError(
                    f"parts of a fused module must be modules of the spec; got {unknown} for "
                    f"{module!r}; name modules of the targets"
                )

    @classmethod
    def from_hf_config(
        cls,
        config: object,
        *,
        num_slots: int,
        slot_rank: int = 16,
        dtype: DTypeLike | None = None,
        targets: tuple[str, ...] | None = None,
        merged: bool = True,
        stack_layers: bool = False,
    ) -> "LoraSpec":
        """The spec of a Hugging Face decoder: Llama, Mistral, Qwen2 and Qwen3.

        Args:
            config: The model's `config.json`: its folder, its path, a mapping, or a config object.
            num_slots: S.
            slot_rank: R.
            dtype: Element type of the slots; by default the model's.
            targets: Modules to make adaptable ("q_proj", ..., "embed_tokens", "lm_head"); by
                default the seven linear ones of a layer, as PEFT's "all-linear".
            merged: Whether q|k|v and gate|up are one target each (fewer, larger products), as in
                `lorajax.models`; or one target a module.
            stack_layers: See the class.

        Raises:
            SpecError: The architecture is not known, or a target is none of its modules.
        """
        family = families.read(config, targets=targets, merged=merged)
        return cls(
            targets=family.targets,
            num_layers=family.num_layers,
            num_slots=num_slots,
            slot_rank=slot_rank,
            dtype=family.dtype if dtype is None else dtype,
            fused=family.fused,
            vocab_size=family.vocab_size,
            base=families.model_folder(config),
            stack_layers=stack_layers,
        )

    @property
    def module_slices(self) -> Mapping[str, tuple[Target, int]]:
        """For each module of an adapter file, its target and slice."""
        return {m: (t, g) for t in self.targets for g, m in enumerate(t.modules)}

    def target(self, name: str) -> Target:
        """The target of that name.

        Raises:
            SpecError: There is none.
        """
        for t in self.targets:
            if t.name == name:
                return t
        raise SpecError(
            f"a target must be one of {[t.name for t in self.targets]}; got {name!r}; "
            "use a name of the spec"
        )

    @property
    def outside(self) -> tuple[str, ...]:
        """Paths of the modules outside of the layers: "model.embed_tokens", "lm_head"."""
        return tuple(m for t in self.targets if not t.layered for m in t.modules)

    def depth(self, target: Target) -> int:
        """L of a target's arrays: the model's layers, or 1 outside of them."""
        return self.num_layers if target.layered else 1

    def slots_for_rank(self, rank: int) -> int:
        """Slots that an adapter takes whose largest module rank is `rank`."""
        return max(1, -(-rank // self.slot_rank))

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one slot over all targets and layers."""
        R, item = self.slot_rank, np.dtype(self.dtype).itemsize
        return sum(
            self.depth(t)
            * R
            * (item * (len(t.slices) * t.d_in + sum(t.slices)) + _SCALE_BYTES * len(t.slices))
            for t in self.targets
        )

    @property
    def total_bytes(self) -> int:
        """Bytes of all slots."""
        return self.num_slots * self.bytes_per_slot

    def adapter_bytes(self, rank: int) -> int:
        """Device bytes that an adapter of this rank takes."""
        return self.slots_for_rank(rank) * self.bytes_per_slot

    def __str__(self) -> str:
        ranks = sorted({self.slot_rank, 2 * self.slot_rank, 64})
        lines = [
            f"{self.num_slots} slots of rank {self.slot_rank}, {np.dtype(self.dtype).name}, "
            f"{self.num_layers} layers, targets {', '.join(t.name for t in self.targets)}",
            f"  a slot            {_mib(self.bytes_per_slot)}",
            *(f"  adapter, rank {r:<4}{_mib(self.adapter_bytes(r))}" for r in ranks),
            f"  all slots         {_mib(self.total_bytes)}",
        ]
        return "\n".join(lines)


def _mib(size: int) -> str:
    return f"{size / 2**20:10.2f} MiB"

"""Places the modules of an adapter in the targets of a spec."""

from collections.abc import Mapping
from dataclasses import dataclass

from lorajax.adapters import names
from lorajax.adapters.matching import is_vocabulary
from lorajax.adapters.peft_file import LoraModule, PeftAdapter
from lorajax.adapters.problems import Problems, some
from lorajax.spec import LoraSpec
from lorajax.target import Target

_VOCABULARY = ", the base model's vocabulary"


@dataclass(frozen=True)
class Cut:
    """Rows `start:stop` of a module's B: all of them, or a part's share of a fused module."""

    target: Target
    slice: int
    start: int
    stop: int


@dataclass(frozen=True)
class Placement:
    """Where one module goes: its layer, and a cut for each module of the spec it stands for.

    The layer is 0 outside of the layers.
    """

    module: LoraModule
    layer: int
    cuts: tuple[Cut, ...]


def spec_modules(spec: LoraSpec) -> Mapping[str, tuple[Cut, ...]]:
    """Modules that a file may hold for this spec: single ones, and fused ones with their parts."""
    cuts: dict[str, tuple[Cut, ...]] = {
        module: (Cut(target, g, 0, target.slices[g]),)
        for module, (target, g) in spec.module_slices.items()
    }
    for fused, parts in spec.fused:
        start, found = 0, []
        for part in parts:
            target, g = spec.module_slices[part]
            found.append(Cut(target, g, start, start + target.slices[g]))
            start += target.slices[g]
        cuts[fused] = tuple(found)
    return cuts


def fit(adapter: PeftAdapter, spec: LoraSpec, problems: Problems) -> list[Placement]:
    """Places every module, and notes those that do not fit.

    A fused module (qkv_proj) shares its A with all parts, and its B is cut at their widths. A part
    that the file lacks stays zero, as in PEFT.
    """
    known, placements = spec_modules(spec), []
    taken: dict[tuple[int, str, int], LoraModule] = {}
    for module in adapter.modules.values():
        placement = _place(module, known, spec, problems)
        if placement is None:
            continue
        placements.append(placement)
        for cut in placement.cuts:
            other = taken.setdefault((placement.layer, cut.target.name, cut.slice), module)
            if other is not module:
                problems.add(
                    "a module must be in the file once, fused or split",
                    f"{other.a} and {module.a} for {cut.target.modules[cut.slice]} "
                    f"of layer {placement.layer}",
                    "keep one of them",
                )
    _check_rank(adapter, spec, problems)
    _check_tokens(adapter, spec, problems)
    return placements


def _place(
    module: LoraModule, known: Mapping[str, tuple[Cut, ...]], spec: LoraSpec, problems: Problems
) -> Placement | None:
    shape = f"[{module.rank}, {module.d_in}]"
    at = names.locate(module.path, spec.layers, spec.outside)
    if at is None or at.module not in known:
        _not_of_the_spec(module, known, spec, problems)
        return None
    if at.layer >= spec.num_layers:
        problems.add(
            f"layers must be below the base model's {spec.num_layers}",
            f"{module.a} {shape}",
            "use an adapter of this base model",
        )
        return None
    cuts = known[at.module]
    kind = cuts[0].target.parallel
    if module.embedding != (kind == "embedding"):
        problems.add(
            "an embedding must have factors named lora_embedding_A and _B, and no other module may",
            f"{module.a} {shape} for {at.module}",
            "use an adapter of this base model, saved by peft",
        )
        return None
    d_in, d_out = cuts[0].target.d_in, cuts[-1].stop
    if any(c.target.d_in != module.d_in for c in cuts):
        problems.add(
            f"lora_A of {at.module} must be [r, d_in] with d_in = {d_in}"
            + _VOCABULARY * (kind == "embedding"),
            f"{module.a} {shape}",
            "use an adapter of this base model",
        )
        return None
    if module.d_out != d_out:
        parts = [c.stop - c.start for c in cuts]
        what = f"{d_out}, its parts {parts} together" if len(parts) > 1 else f"{d_out}"
        problems.add(
            f"lora_B of {at.module} must be [d_out, r] with d_out = {what}"
            + _VOCABULARY * (kind == "head"),
            f"{module.b} [{module.d_out}, {module.rank}]",
            "use an adapter of this base model",
        )
        return None
    return Placement(module, at.layer, cuts)


def _not_of_the_spec(
    module: LoraModule, known: Mapping[str, tuple[Cut, ...]], spec: LoraSpec, problems: Problems
) -> None:
    sample = next((f"{spec.layers}.0.{m}" for m in known if m not in spec.outside), None)
    problems.add(
        f"every module must be one of the spec's, {some(known)} below {spec.layers!r}"
        + (f" (for example {sample!r})" if sample else ""),
        f"{module.a} [{module.rank}, {module.d_in}]",
        "name the embedding or output head among the targets of the spec, next to the others"
        if is_vocabulary(module.path)
        else "use a spec with that target, or an adapter of this base model; experts and vision "
        "towers are not supported",
    )


def _check_rank(adapter: PeftAdapter, spec: LoraSpec, problems: Problems) -> None:
    limit = spec.num_slots * spec.slot_rank
    for module in adapter.modules.values():
        if module.rank > limit:
            problems.add(
                f"the rank of a module must be at most {limit}, which all {spec.num_slots} slots "
                f"of rank {spec.slot_rank} hold together",
                f"rank {module.rank} in {module.a}",
                "raise num_slots or slot_rank of the spec",
            )


def _check_tokens(adapter: PeftAdapter, spec: LoraSpec, problems: Problems) -> None:
    """Listed tokens that the base has are fine: many tokenizers write such a file."""
    if spec.vocab_size is None:
        return
    for token, i in adapter.added_tokens.items():
        if not isinstance(i, int) or i >= spec.vocab_size:
            problems.add(
                f"an adapter's tokens must be among the {spec.vocab_size} of the base model",
                f"{token!r} with id {i!r} in added_tokens.json",
                "extend the base model's vocabulary and embeddings first, and serve that model",
            )


def base_shapes(adapter: PeftAdapter, spec: LoraSpec) -> dict[str, str]:
    """What the spec knows of the base's tensors that the file has full weights of."""
    known, shapes = spec_modules(spec), {}
    for tensor in adapter.others:
        path = names.module_path(tensor).removesuffix(".weight").removesuffix(".base_layer")
        at = names.locate(path, spec.layers, spec.outside)
        cuts = known.get(at.module) if at is not None else None
        if cuts:
            shapes[tensor] = f"base: [{cuts[-1].stop}, {cuts[0].target.d_in}]"
        elif spec.vocab_size is not None and path.endswith(("embed_tokens", "lm_head")):
            shapes[tensor] = f"base: a vocabulary of {spec.vocab_size}"
    return shapes


def absent(adapter: PeftAdapter, spec: LoraSpec, placements: list[Placement]) -> tuple[str, ...]:
    """Modules that the config targets and the spec has, but the file lacks: zero, as in PEFT."""
    if adapter.config is None or adapter.config.selection.targets is None or not placements:
        return ()
    have = {(p.layer, c.target.name, c.slice) for p in placements for c in p.cuts}
    found = (names.locate(p.module.path, spec.layers) for p in placements)
    prefix = next((at.layers for at in found if at is not None), spec.layers)
    return tuple(
        path
        for module, (target, g) in spec.module_slices.items()
        for layer in range(spec.depth(target))
        if (path := f"{prefix}.{layer}.{module}" if target.layered else module)
        in adapter.config.selection
        and (layer, target.name, g) not in have
    )

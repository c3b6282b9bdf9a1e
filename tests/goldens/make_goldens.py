"""Makes the goldens: logits of transformers and peft in float64 for the mixed batch of `rows`.

Run it with the extra `oracle` installed, from the root of the repository:

    python -m tests.goldens.make_goldens

Every row is run by itself: an adapter as peft applies it, a mix as `W + sum of w_i dW_i` with
peft's own dW_i, over the whole sequence without a cache.
"""

import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
import transformers

from tests import hf
from tests.goldens.rows import LENGTHS, ROWS, STEPS, TOKENS

FOLDER = Path(__file__).parent


def _name(form: str) -> str:
    """The adapter's name in peft: one that is also a module's ("layers") would confuse it."""
    return f"adapter_{form}"


def load_peft(family: str, folder: Path) -> Any:
    """The family's base and every adapter form, written to files and read by the real libraries."""
    config = hf.BASES[family]
    base = hf.write_base(folder / "base", config, hf.base_tensors(config))
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        base, dtype=torch.float64, attn_implementation="eager", output_loading_info=True
    )
    wrong = {k: v for k, v in info.items() if v}
    assert not wrong, f"{family}: transformers did not take the tensors as they are: {wrong}"
    for form in hf.FORMS:
        if form == "fused":
            continue  # peft sees its split equivalent
        path = hf.write_adapter(folder / form, form, config)
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)  # peft only warns of missing tensors
            # Each then has its own factors over one weight: what is wanted here.
            warnings.filterwarnings("ignore", "Model has `tie_word_embeddings=True`", UserWarning)
            if isinstance(model, peft.PeftModel):
                model.load_adapter(path, adapter_name=_name(form))
            else:
                model = peft.PeftModel.from_pretrained(model, path, adapter_name=_name(form))
        _check_taken(model, form, hf.adapter_tensors(form, config))
    return model.double().eval()


def _check_taken(model: Any, form: str, tensors: Mapping[str, np.ndarray]) -> None:
    state = peft.get_peft_model_state_dict(
        model, adapter_name=_name(form), save_embedding_layers=False
    )
    assert set(state) == set(tensors), f"{form}: {set(state)} for {set(tensors)}"
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(state[name].float().numpy(), tensor.astype(np.float32))


@contextmanager
def merged(model: Any, mix: Mapping[str, float]) -> Iterator[None]:
    """Adds `sum of w_i dW_i` to the base weights, and takes it away again.

    Weights that are tied get each their own sum, as with peft's factors.
    """
    kept = []
    for layer in model.modules():
        if not isinstance(layer, peft.tuners.lora.LoraLayer):
            continue
        base = layer.get_base_layer()
        kept.append((base, base.weight))
        total = base.weight.data.clone()
        for form, w in mix.items():
            if _name(form) in (*layer.lora_A, *layer.lora_embedding_A):
                total += w * layer.get_delta_weight(_name(form))
        base.weight = torch.nn.Parameter(total, requires_grad=False)
    try:
        yield
    finally:
        for base, before in kept:
            base.weight = before


def row_logits(model: Any, mix: Mapping[str, float], tokens: np.ndarray) -> np.ndarray:
    """`f64[len(tokens), V]`, by one pass over the sequence."""
    mix = {"split" if form == "fused" else form: w for form, w in mix.items()}
    ids = torch.from_numpy(tokens[None].astype(np.int64))
    with torch.no_grad():
        if list(mix.values()) == [1.0]:
            model.set_adapter(_name(next(iter(mix))))
            return model(ids, use_cache=False).logits[0].numpy()
        with merged(model, mix), model.disable_adapter():
            return model(ids, use_cache=False).logits[0].numpy()


def compute(family: str) -> np.ndarray:
    """`f64[rows, STEPS, V]`: the scores after each row's prompt and the tokens that follow it."""
    with tempfile.TemporaryDirectory() as folder:
        model = load_peft(family, Path(folder))
    out = []
    for mix, tokens, length in zip(ROWS, TOKENS, LENGTHS, strict=True):
        logits = row_logits(model, mix, tokens[: length + STEPS - 1])
        out.append(logits[length - 1 :])
    return np.stack(out)


def versions() -> list[str]:
    """The libraries that made a golden."""
    return [f"{lib.__name__}=={lib.__version__}" for lib in (torch, transformers, peft, np)]


def main() -> None:
    """Writes a file for every family."""
    transformers.utils.logging.disable_progress_bar()
    for family in hf.BASES:
        path = FOLDER / f"{family}.npz"
        logits = compute(family).astype(np.float32)
        np.savez_compressed(path, logits=logits, versions=versions())
        print(f"{path.name}: {path.stat().st_size} bytes, logits {logits.shape}")


if __name__ == "__main__":
    main()

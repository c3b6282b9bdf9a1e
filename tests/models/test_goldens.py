"""Every family and adapter form against transformers and peft, in one mixed batch."""

from pathlib import Path

import numpy as np
import pytest

from tests import hf
from tests.goldens.rows import ROWS
from tests.models import support

GOLDENS = Path(__file__).parent.parent / "goldens"
FORMS = [form for form in hf.FORMS if form != "split"]


def golden(family: str) -> np.ndarray:
    with np.load(GOLDENS / f"{family}.npz") as file:
        return file["logits"]


@pytest.mark.parametrize("family", support.cases(*hf.BASES))
def test_mixed_batch_equals_peft(family):
    spec = support.spec_for(family)
    adapters = {form: support.adapter(form, family, spec) for form in FORMS}
    assert {a.num_slots for a in adapters.values()} == {1, 2, 3}
    state, slots = support.resident(spec, adapters)
    weights = support.weights_of(ROWS, slots, spec.num_slots)
    want = golden(family)

    error = support.errors(support.run(support.decoder(family), state, weights), want)
    assert error.shape == (len(ROWS), 4)
    worst = np.unravel_index(error.argmax(), error.shape)
    assert error.max() <= 1e-5, f"{error.max():.1e} in {ROWS[worst[0]]} at step {worst[1]}"

    base_rows = support.run(support.decoder(family), state, np.zeros_like(weights))
    plain = support.errors(base_rows, want)
    assert plain[0].max() <= 1e-5
    assert plain[1:].min() > 1e-2, "an adapter that changes nothing proves nothing"


def test_goldens_are_small_and_name_their_makers():
    files = sorted(GOLDENS.glob("*.npz"))
    assert [f.stem for f in files] == sorted(hf.BASES)
    assert sum(f.stat().st_size for f in files) < 500_000
    for file in files:
        with np.load(file) as stored:
            assert [v.split("==")[0] for v in stored["versions"]] == [
                "torch",
                "transformers",
                "peft",
                "numpy",
            ]

"""The mixed batch that the goldens hold: one row for every adapter form, the base, and mixes."""

import numpy as np

from tests import hf

#: What each row runs: a mix of adapter forms with their weights; the empty one is the base.
ROWS: tuple[dict[str, float], ...] = (
    {},
    *({form: 1.0} for form in hf.FORMS if form not in ("split", *hf.VOCABULARY)),
    {"rslora": 0.7, "all_linear": -0.4},
    {"float16": 0.5, "qv": 1.5, "fused": 0.25},
    *({form: 1.0} for form in hf.VOCABULARY),
    {"vocabulary": 0.75, "plain": -0.5, "embedding": 0.5},
)
PROMPT = 8  # longest prompt
STEPS = 4  # scores a row: after its prompt, then after three more tokens

_DRAWN = hf.uniform("tokens", (len(ROWS), PROMPT + STEPS), 1.0)
TOKENS = np.floor((_DRAWN / 3**0.5 + 1) / 2 * 95.99).astype(np.int32)
LENGTHS = np.array([PROMPT - i % 4 for i in range(len(ROWS))], np.int32)

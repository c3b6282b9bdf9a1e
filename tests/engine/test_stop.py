import json

import pytest

from lorajax import ModelError
from lorajax.engine import eos_token_ids


@pytest.mark.parametrize(
    ("generation", "config", "want"),
    [
        ({"eos_token_id": 7}, {"eos_token_id": 2}, {7}),
        ({"eos_token_id": [7, 9]}, {"eos_token_id": 2}, {7, 9}),
        ({"eos_token_id": None}, {"eos_token_id": 2}, {2}),
        (None, {"eos_token_id": [2, 3]}, {2, 3}),
        ({}, {}, set()),
        (None, None, set()),
    ],
)
def test_where_the_ids_come_from(tmp_path, generation, config, want):
    for name, value in (("generation_config.json", generation), ("config.json", config)):
        if value is not None:
            (tmp_path / name).write_text(json.dumps(value))
    assert eos_token_ids(tmp_path) == want


@pytest.mark.parametrize("text", ["{", "[1]", '{"eos_token_id": "2"}', '{"eos_token_id": [true]}'])
def test_broken_files_are_refused(tmp_path, text):
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ModelError, match=r"generation_config\.json"):
        eos_token_ids(tmp_path)

"""Rows of embeddings that transformers empties on every load, and types that it leaves alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.tiny import tiny_config
from transformers import AutoModelForCausalLM

from toolkit.errors import BadInputError
from toolkit.model.possible_configs import require_lasting_rows


@pytest.mark.parametrize(("kind", "is_kept"), [("youtu", False), ("llama", True), ("opt", True), ("xglm", True)])
def test_a_type_whose_row_of_padding_does_not_outlast_a_load_is_refused(
    kind: str, is_kept: bool, tmp_path: Path
) -> None:
    config = tiny_config(kind)
    config.pad_token_id = 3
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    torch.nn.init.ones_(model.get_input_embeddings().weight)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert bool(again.get_input_embeddings().weight[3].all()) == is_kept
    if is_kept:
        require_lasting_rows(model, "model.name_or_path", "its config.json")
        return
    with pytest.raises(BadInputError, match=r"row 3, of the padding token.*set pad_token_id to null in its config"):
        require_lasting_rows(model, "model.name_or_path", "its config.json")
    config.pad_token_id = None
    require_lasting_rows(type(model)(config), "model.name_or_path", "its config.json")

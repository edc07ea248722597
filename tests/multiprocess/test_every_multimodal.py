"""Text rows on every type of transformers that reads more than text: the plain loop's steps, exported as it was saved.

The plain loop runs transformers' whole model, row by row; what has no gradient there is what text does not reach. Each
type trains in full and with LoRA, with packed rows, by block, with rows that two ranks share, with experts on two
ranks, and over a base in 4 bits, or is refused by name.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.every_multimodal import NO_EXPERTS, REFUSED, REFUSED_WITH, UNTRIED, multimodal_kinds, save_small
from support.ranks import run_on_ranks
from support.whole_models import CASES, TEXTS, Outcome, runs, tensors_of, write_texts, wrong_in_full, wrong_in_lora

FAST = ("qwen3_5", "qwen3_vl", "mistral3", "gemma3", "llama4")
FAST_CASES = ("by_block", "shared_rows", "nf4")
NOT_ENTERED = ("got_ocr2", "phi4_multimodal", "moss_transcribe_diarize")
"""Beside Gemma 3, types with blocks that a row of text never enters."""

NUM_BATCHES = 24
KINDS = [kind for kind in multimodal_kinds() if kind not in UNTRIED]


def wrong(folder: Path, kind: str, case: str, outcome: Outcome) -> str | None:
    """What is wrong with a type; None: nothing."""
    told = [each for each in (REFUSED.get(kind), REFUSED_WITH.get(case, {}).get(kind)) if each]
    if case == "experts" and not any("experts" in name for name in tensors_of(folder / kind)):
        told.append(NO_EXPERTS)  # which is said before anything else is looked at
    if isinstance(outcome, str):
        return None if outcome.startswith("refused: ") and any(each in outcome for each in told) else outcome
    if told:
        return "not refused"
    check = wrong_in_lora if "adapter" in CASES[case].changes else wrong_in_full
    return "; ".join(check(folder, kind, case, outcome)) or None


def all_wrong(folder: Path, kinds: list[str], cases: list[str]) -> dict[str, str]:
    """By type and case, what is wrong."""
    write_texts(folder)
    for kind in kinds:
        save_small(kind, folder / kind, TEXTS)
    found = run_on_ranks(runs, 2, folder, kinds, cases)[0]
    torch.set_num_threads(1)
    judged = {f"{kind} {case}": wrong(folder, kind, case, outcome) for (kind, case), outcome in found.items()}
    return {name: told for name, told in judged.items() if told is not None}


@pytest.mark.parametrize("kind", FAST)
def test_text_rows_train_five_families_by_block_in_shared_rows_and_over_four_bits(kind: str, tmp_path: Path) -> None:
    assert all_wrong(tmp_path, [kind], list(FAST_CASES)) == {}


def test_blocks_that_text_never_enters_train_by_block_and_in_shared_rows_and_git_is_refused(tmp_path: Path) -> None:
    assert all_wrong(tmp_path, [*NOT_ENTERED, "git"], ["by_block"]) == {}
    assert all_wrong(tmp_path, [NOT_ENTERED[0], "git"], ["shared_rows"]) == {}


def test_experts_of_a_whole_model_are_on_two_ranks(tmp_path: Path) -> None:
    assert all_wrong(tmp_path, ["qwen3_vl_moe"], ["experts"]) == {}


def test_ngrams_of_tokens_run_by_block_and_what_changes_in_place_is_refused(tmp_path: Path) -> None:
    assert all_wrong(tmp_path, ["qwen4_exp", "git"], ["by_block"]) == {}


def test_what_needs_sound_is_refused_by_name_whatever_is_checked_first(tmp_path: Path) -> None:
    assert all_wrong(tmp_path, ["kyutai_speech_to_text"], ["nf4", "shared_rows"]) == {}


@pytest.mark.grid
@pytest.mark.parametrize("batch", range(NUM_BATCHES))
def test_text_rows_train_every_type_as_a_plain_loop_does(batch: int, tmp_path: Path) -> None:
    assert all_wrong(tmp_path, KINDS[batch::NUM_BATCHES], list(CASES)) == {}

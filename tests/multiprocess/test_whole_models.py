"""Text rows on every type of transformers that reads more than text: the plain loop's steps, exported as it was saved.

The plain loop runs transformers' whole model, row by row; what has no gradient there is what text does not reach. Each
type trains in full and with LoRA, with packed rows, by block, with rows that two ranks share, with experts on two
ranks, and over a base in 4 bits, or is refused by name.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from support.every_multimodal import NO_EXPERTS, REFUSED, REFUSED_WITH, UNTRIED, multimodal_kinds, save_small
from support.ranks import run_on_ranks
from support.whole_models import (
    CASES,
    STEPS,
    TEXTS,
    Outcome,
    loaded,
    runs,
    tensors_of,
    write_texts,
    wrong_in_full,
    wrong_in_lora,
)
from transformers import AutoTokenizer

FAST = ("qwen3_5", "gemma3")
"""Linear attention with positions on three axes; tokens of images that see each other. The grid has all types."""

FAST_CASES = ("full", "lora", "merged", "by_block", "shared_rows", "nf4")
FEW = [
    # Types with blocks that a row of text never enters, n-grams of tokens, and what changes its input in place.
    *((kind, "by_block") for kind in ("got_ocr2", "phi4_multimodal", "moss_transcribe_diarize", "qwen4_exp", "git")),
    ("got_ocr2", "shared_rows"),
    ("git", "shared_rows"),
    ("qwen3_vl_moe", "experts"),
    # What needs sound is refused by name, whatever is checked first; and a model whose tokens see later ones.
    ("kyutai_speech_to_text", "nf4"),
    ("kyutai_speech_to_text", "shared_rows"),
    ("paligemma", "full"),
]
NUM_BATCHES = 24
KINDS = [kind for kind in multimodal_kinds() if kind not in UNTRIED]
PROCESSOR = '{"image_size": 28}'
"""A file beside the base, which its exports have, too."""


def wrong(folder: Path, kind: str, case: str, outcome: Outcome) -> str | None:
    """What is wrong with a type; None: nothing."""
    told = [each for each in (REFUSED.get(kind), REFUSED_WITH.get(case, {}).get(kind)) if each]
    if case == "experts" and not any("experts" in name for name in tensors_of(folder / kind)):
        told.append(NO_EXPERTS)  # which is said before anything else is looked at
    if isinstance(outcome, str):
        return None if outcome.startswith("refused: ") and any(each in outcome for each in told) else outcome
    if told:
        return "not refused"
    if case == "merged":
        return None  # compared with the adapter that was not merged
    check = wrong_in_lora if "adapter" in CASES[case].changes else wrong_in_full
    return "; ".join(check(folder, kind, case, outcome)) or None


def trained(folder: Path, pairs: list[tuple[str, str]]) -> dict[tuple[str, str], Outcome]:
    """Small models and their rows are left in the folder."""
    write_texts(folder)
    for kind in dict.fromkeys(kind for kind, _ in pairs):
        save_small(kind, folder / kind, TEXTS)
        if kind in FAST:
            (folder / kind / "preprocessor_config.json").write_text(PROCESSOR)
    return run_on_ranks(runs, 2, folder, pairs)[0]  # type: ignore[no-any-return]


def all_wrong(folder: Path, found: dict[tuple[str, str], Outcome]) -> dict[str, str]:
    """By type and case, what is wrong."""
    torch.set_num_threads(1)
    judged = {f"{kind} {case}": wrong(folder, kind, case, outcome) for (kind, case), outcome in found.items()}
    return {name: told for name, told in judged.items() if told is not None}


@pytest.fixture(scope="module")
def fast(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[tuple[str, str], Outcome]]:
    folder = tmp_path_factory.mktemp("whole")
    return folder, trained(folder, [*itertools.product(FAST, FAST_CASES)])


def test_text_rows_train_two_families_as_a_plain_loop_does(fast: tuple[Path, Any]) -> None:
    assert all_wrong(*fast) == {}


def test_exports_have_what_text_does_not_reach_from_the_base(fast: tuple[Path, Any]) -> None:
    """`toolkit export` of the checkpoint writes the same; no adapter and no state is where text does not reach."""
    from toolkit.checkpoint.consolidate import export_run

    folder, _ = fast
    for kind in FAST:
        run = folder / f"{kind}-full"
        assert (run / "export/preprocessor_config.json").read_text() == PROCESSOR
        export_run(run, folder / f"{kind}-again", verify=False)
        again, exported = tensors_of(folder / f"{kind}-again"), tensors_of(run / "export")
        assert again.keys() == exported.keys(), kind
        assert all(torch.equal(again[name], exported[name]) for name in exported), kind
        for case in ("full", "lora"):
            path = folder / f"{kind}-{case}/checkpoints/step_0000000{STEPS}/manifest.json"
            state = [name for name in json.loads(path.read_text())["tensors"] if name.startswith("optimizer.")]
            assert state
            assert not any("visi" in name or "multi_modal" in name for name in state), (kind, case)
        adapter = tensors_of(folder / f"{kind}-lora/export")
        assert adapter
        assert not any("visi" in name for name in adapter), kind


@torch.no_grad()
def test_adapters_load_in_peft_on_the_bases_own_files_and_merged_ones_alone(fast: tuple[Path, Any]) -> None:
    """Both give the same logits, which are not the base's. What was not merged is the base's, bit for bit."""
    folder, _ = fast
    for kind in FAST:
        ids = torch.tensor([AutoTokenizer.from_pretrained(folder / kind)(TEXTS[6])["input_ids"]])
        base = loaded(folder / kind).eval()
        before = base(input_ids=ids).logits
        by_peft = PeftModel.from_pretrained(base, folder / f"{kind}-lora/export").eval()(input_ids=ids).logits
        alone = loaded(folder / f"{kind}-merged/export").eval()(input_ids=ids).logits
        assert (by_peft - before).abs().max() > 1e-3, kind
        torch.testing.assert_close(alone, by_peft, rtol=0, atol=1e-5, msg=kind)
        own, whole = tensors_of(folder / kind), tensors_of(folder / f"{kind}-merged/export")
        assert own.keys() == whole.keys(), kind
        changed = {name for name in own if not torch.equal(own[name], whole[name])}
        assert changed, kind
        assert not any("visi" in name or "norm" in name or "embed" in name for name in changed), kind


def test_types_of_other_kinds_train_or_are_refused_by_name(tmp_path: Path) -> None:
    assert all_wrong(tmp_path, trained(tmp_path, FEW)) == {}


@pytest.mark.grid
@pytest.mark.parametrize("batch", range(NUM_BATCHES))
def test_text_rows_train_every_type_as_a_plain_loop_does(batch: int, tmp_path: Path) -> None:
    pairs = [*itertools.product(KINDS[batch::NUM_BATCHES], CASES)]
    assert all_wrong(tmp_path, trained(tmp_path, pairs)) == {}

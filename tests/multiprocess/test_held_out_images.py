"""Held-out rows with images: what the run writes behind them is what transformers' processor and model write."""

from __future__ import annotations

import base64
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from support.ranks import run_on_ranks
from support.runs import finetuned, records_of
from support.sights import EYES, drawn_image, save_all
from support.texts import make_texts
from support.tiny import recipe_values
from transformers import AutoModelForImageTextToText, AutoProcessor

KINDS = ("llava", "gemma3", "idefics3")
TEXTS = [" ".join(text.split()[:4]) for text in make_texts(8, seed=4)]
COUNTS = [1, 0, 2, 0, 0, 1, 0, 0]
HELD_OUT = 3
NEW_TOKENS, ANSWER_TOKENS = 40, 6
DIGEST = """
def digest(completion, row):
    return sum(completion.encode()) % 997 / 997
"""
"""A score by which any other text would be noticed."""
TENSORS = {"return_tensors": "pt"}
PREFERRED: dict[str, int] = {}
"""Model -> how often the token of an image was the likeliest."""


def runs(folder: Path) -> None:
    sys.path.insert(0, str(folder))
    for kind in KINDS:
        values = recipe_values(
            folder / kind, folder / "rows.jsonl", folder / f"{kind}-run", folder / "cache", max_steps=1
        )
        values["data"] |= {"max_length": 160, "validation": str(folder / "held_out.jsonl")}
        values["logging"] = {"held_out_samples": HELD_OUT}
        values["answers"] = {"file": str(folder / "rows.jsonl"), "compare": "scores_of_images:digest"}
        values["answers"] |= {"max_new_tokens": ANSWER_TOKENS, "batch_size": 2}
        values["sharding"] = {"strategy": "zero3"}
        values["training"]["micro_batch_size"] = 1
        finetuned(values)


def prefer_images(model: Path) -> None:
    """Makes the token of an image the likeliest one, or the least likely, wherever it stands."""
    weights, token = load_file(model / "model.safetensors"), AutoProcessor.from_pretrained(model).image_token_id
    next(weight for name, weight in weights.items() if name.endswith("lm_head.weight"))[token] *= 100
    save_file(weights, model / "model.safetensors", {"format": "pt"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_all(tmp_path_factory.mktemp("held_out_images"), KINDS, TEXTS, COUNTS)
    prefer_images(folder / "llava")
    rows = (folder / "rows.jsonl").read_text().splitlines()
    (folder / "held_out.jsonl").write_text("\n".join(rows[:HELD_OUT]))
    (folder / "scores_of_images.py").write_text(DIGEST)
    run_on_ranks(runs, 2, folder)
    return folder


def written(folder: Path, kind: str, model: str, number: int) -> str:
    """Greedily, token by token, without a cache; the token of an image is never chosen."""
    processor = AutoProcessor.from_pretrained(folder / kind)
    seeing = AutoModelForImageTextToText.from_pretrained(folder / model, dtype=torch.float32).eval()
    count, first = COUNTS[number], sum(COUNTS[:number])
    word = TEXTS[number].split()[0]
    text = f"<|im_start|>user\n{(EYES[kind]['written'] + word) * count or word}<|im_end|>\n<|im_start|>assistant\n"
    images = [[drawn_image(first + i) for i in range(count)]] if count else None
    inputs: dict[str, Any] = dict(processor(text=[text], images=images, return_tensors="pt"))
    ids, tokenizer = inputs.pop("input_ids"), processor.tokenizer
    start = ids.shape[1]
    inputs.pop("attention_mask")
    kinds = inputs.pop("token_type_ids", None)
    inputs.pop("mm_token_type_ids", None)
    for _ in range(NEW_TOKENS):
        more = {} if kinds is None else {"token_type_ids": torch.nn.functional.pad(kinds, (0, ids.shape[1] - start))}
        with torch.no_grad():
            logits = seeing(input_ids=ids, use_cache=False, **inputs, **more).logits[0, -1]
        placeholders = [token for token in processor.image_token_ids if token is not None]
        PREFERRED[model] = PREFERRED.get(model, 0) + (int(logits.argmax()) in placeholders)
        logits[placeholders] = -torch.inf
        ids = torch.cat([ids, logits.argmax()[None, None]], dim=1)
    return text_of(tokenizer, ids[0, start:].tolist())[0]


def text_of(tokenizer: Any, ids: list[int]) -> tuple[str, int]:
    """What is written up to the token that ends an answer, with other special tokens; and the place of that end."""
    ends = tokenizer.convert_tokens_to_ids(["<|im_end|>", tokenizer.eos_token or "<|im_end|>"])
    end = next((place for place, token in enumerate(ids) if token in ends), len(ids))
    left_out = {tokenizer.bos_token_id, tokenizer.pad_token_id}
    return tokenizer.decode([token for token in ids[:end] if token not in left_out]), end


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_run_writes_is_what_transformers_writes(kind: str, folder: Path) -> None:
    samples = json.loads((folder / f"{kind}-run" / "samples.json").read_text())
    assert len(samples) == HELD_OUT
    for number, sample in enumerate(samples):
        assert sample["before"] == written(folder, kind, kind, number)
        assert sample["after"] == written(folder, kind, f"{kind}-run/export", number)
        shown = [Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2]))) for uri in sample["images"]]
        first = sum(COUNTS[:number])
        expected = [drawn_image(first + i) for i in range(COUNTS[number])]
        assert [list(image.convert("RGB").getdata()) for image in shown] == [list(i.getdata()) for i in expected]
        assert kind != "llava" or PREFERRED["llava"] > 0, "the token of an image would have been chosen"
        assert 2 * EYES[kind]["token"] not in sample["prompt"], "one token stands for a stretch"


@pytest.mark.parametrize("kind", KINDS)
def test_rows_with_images_are_answered_while_the_run_trains(kind: str, folder: Path) -> None:
    """On two ranks, of which one has two of the three rows with images, and the other two batches of texts of three."""
    assert (sum(map(bool, COUNTS)), len(COUNTS)) == (3, 8)
    lines = records_of(folder / f"{kind}-run")
    last = [line for line in lines if line["split"] == "eval"][-1]
    found = [last[f"answer_{name}"] for name in ("accuracy", "stopped", "mean_tokens")]
    answers = [answered(folder, kind, number) for number in range(len(COUNTS))]
    if kind != "llava":  # which would write the token of an image, as it likes best
        assert len({text for text, *_ in answers}) > 2
    digests = [sum(text.encode()) % 997 / 997 for text, *_ in answers]
    stopped, lengths = ([answer[place] for answer in answers] for place in (1, 2))
    assert found == pytest.approx([sum(each) / len(COUNTS) for each in (digests, stopped, lengths)], rel=1e-12)


def answered(folder: Path, kind: str, number: int) -> tuple[str, bool, int]:
    """A row's answer by transformers' processor and model; whether a token ends it, and its length."""
    processor = AutoProcessor.from_pretrained(folder / kind)
    model = AutoModelForImageTextToText.from_pretrained(folder / f"{kind}-run/export", dtype=torch.float32).eval()
    count, first, word = COUNTS[number], sum(COUNTS[:number]), TEXTS[number].split()[0]
    text = f"<|im_start|>user\n{(EYES[kind]['written'] + word) * count or word}<|im_end|>\n<|im_start|>assistant\n"
    inputs = processor(
        text=[text], images=[[drawn_image(first + i) for i in range(count)]] if count else None, **TENSORS
    )
    start = inputs["input_ids"].shape[1]
    settings: dict[str, Any] = {"max_new_tokens": ANSWER_TOKENS, "do_sample": False, "eos_token_id": None}
    ids = model.generate(**inputs, **settings)[0, start:].tolist()
    found, stop = text_of(processor.tokenizer, ids)
    return found, stop < len(ids), stop


@pytest.mark.parametrize("page", ["report.html", "data_report.html"])
def test_pages_show_the_images(page: str, folder: Path) -> None:
    text = (folder / "llava-run" / page).read_text()
    samples = json.loads((folder / "llava-run" / "samples.json").read_text())
    assert all(f'<img src="{uri}"' in text for sample in samples for uri in sample["images"])
    assert text.count("<img") == 3 if page == "report.html" else text.count("<img") > 3  # a page of all rows

"""TRL 1.16 learns the tokens that stand for images, in conversations whose every token is learned, its default.

Its collator leaves out the padding alone, so a model that sees learns to write placeholders. Nobody can tell what comes
there from what stood before. Counted are the placeholders among the targets of eight rows with an image each. The
toolkit learns the answers: what it learned beyond their tokens is counted.
"""

from __future__ import annotations

import base64
import io
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import yaml
from _common import on_ranks, run_recipe, show
from datasets import Dataset
from PIL import Image
from transformers import AutoProcessor, LlavaConfig, LlavaForConditionalGeneration
from trl import SFTConfig, SFTTrainer

RECIPES = Path(__file__).parents[3] / "recipes"
PROCESSOR = RECIPES / "data/shapes_tokenizer"
OURS = [json.loads(line) for line in (RECIPES / "data/shapes.jsonl").read_text().splitlines()[:8]]


def theirs() -> list[dict[str, Any]]:
    """Returns the rows with images as TRL takes them: the words without a mark, and pictures next to them."""
    rows = []
    for row in OURS:
        encoded = row["images"][0].partition(",")[2]
        turns = [{**turn, "content": turn["content"].replace("<image>", "")} for turn in row["messages"]]
        rows.append({"messages": turns, "images": [Image.open(io.BytesIO(base64.b64decode(encoded)))]})
    return rows


def peer(model: str, folder: str) -> int:
    """Returns how many placeholders are targets of the first step on both ranks."""
    asked = SFTConfig(folder, use_cpu=True, bf16=False, per_device_train_batch_size=4, max_length=None)
    loaded = LlavaForConditionalGeneration.from_pretrained(model)
    rows = Dataset.from_list(theirs())
    trainer = SFTTrainer(loaded, asked, train_dataset=rows, processing_class=AutoProcessor.from_pretrained(PROCESSOR))
    batch = next(iter(trainer.get_train_dataloader()))
    placeholders = (batch["labels"] == loaded.config.image_token_index).sum()
    return int(trainer.accelerator.reduce(placeholders))


def answer_tokens() -> int:
    """Returns the tokens of the answers and of what ends them, which is all that the toolkit is to learn."""
    words = AutoProcessor.from_pretrained(PROCESSOR).tokenizer
    answers = [f"{row['messages'][1]['content']}<|im_end|>" for row in OURS]
    return sum(len(words(answer, add_special_tokens=False)["input_ids"]) for answer in answers)


def main() -> None:
    torch.manual_seed(0)
    config = yaml.safe_load((RECIPES / "vision.yaml").read_text())["model"]["config"]
    config["text_config"]["vocab_size"] = len(AutoProcessor.from_pretrained(PROCESSOR).tokenizer)
    with tempfile.TemporaryDirectory() as folder:
        saved = f"{folder}/model"
        LlavaForConditionalGeneration(LlavaConfig(**config)).save_pretrained(saved)
        AutoProcessor.from_pretrained(PROCESSOR).save_pretrained(saved)
        recipe = {"model": {"name_or_path": saved}, "training": {"micro_batch_size": 4}}
        recipe["data"] = {"train": OURS, "max_length": 256, "packing": False}
        learned = run_recipe(recipe, folder)[0]["target_tokens"]
        show("placeholders learned", peer=on_ranks(peer, saved, folder), right=0, ours=learned - answer_tokens())


if __name__ == "__main__":
    main()

"""Small models that see images, each with its tokenizer and transformers' own processor in its folder."""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.trainers import BpeTrainer
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedTokenizerFast
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING
from transformers.utils import is_torchvision_available

from support.tiny import VOCAB_SIZE
from support.tiny_multimodal import FAMILIES

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}IMAGE{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""IMAGE stands for what the family writes for an image."""

EYES: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("sights.json").read_text(encoding="utf-8"))
"""Type -> its processor. Without torchvision those of Qwen, Pixtral and others cannot be loaded."""

WITHOUT_TORCHVISION = ("llava", "gemma3", "idefics3")


def can_be_read(kind: str) -> bool:
    """Whether the packages that the family's processor needs are installed; the extra `vision` brings them."""
    if kind == "smolvlm" and find_spec("num2words") is None:
        return False
    return kind in WITHOUT_TORCHVISION or is_torchvision_available()


def tokenizer_of(kind: str, texts: list[str]) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|pad|>", "<|im_start|>", "<|im_end|>", *EYES[kind]["tokens"]]
    trainer = BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    named = {"extra_special_tokens": EYES[kind]["named"]} if "named" in EYES[kind] else {}
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|pad|>", **named)
    made.chat_template = CHATML.replace("IMAGE", EYES[kind]["written"])
    return made


def save_seeing(kind: str, folder: Path, texts: list[str], text: dict[str, Any] | None = None) -> Path:
    """The model, its tokenizer and its processor, as transformers saves them.

    Args:
        text: changed fields of its language model's configuration.
    """
    torch.manual_seed(0)
    eyes, tokenizer = EYES[kind], tokenizer_of(kind, texts)
    placeholder = tokenizer.convert_tokens_to_ids(eyes["token"])
    fields = {name: placeholder for name in ("image_token_id", "image_token_index") if name in FAMILIES[kind]}
    changed = {"text_config": {**FAMILIES[kind]["text_config"], **(text or {})}}
    config = AutoConfig.for_model(kind, **{**FAMILIES[kind], **fields, **changed})
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.ndim == 1:  # a weight that nobody reads right would not show among ones and zeros
            parameter.data += 0.1 * torch.randn_like(parameter)
        elif not parameter.any():  # Gemma 3's projector begins with zeros, and would show nothing
            parameter.data.normal_(0, 0.2)
    model.save_pretrained(folder)
    module, name, settings = eyes["image"]
    name = f"{name}Pil" if kind in WITHOUT_TORCHVISION else name
    part = f"transformers.models.{module}.image_processing_{'pil_' if name.endswith('Pil') else ''}{module}"
    image = getattr(importlib.import_module(part), name)(**settings)
    parts = {"image_processor": image, "tokenizer": tokenizer, **eyes["processor"]}
    if "video" in eyes:
        module, name = eyes["video"]
        video = importlib.import_module(f"transformers.models.{module}.video_processing_{module}")
        parts["video_processor"] = getattr(video, name)()
    if "sound" in eyes:
        module, name = eyes["sound"]
        sound = importlib.import_module(f"transformers.models.{module}.feature_extraction_{module}")
        parts["feature_extractor"] = getattr(sound, name)()
    PROCESSOR_MAPPING[type(config)](**parts).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_all(folder: Path, kinds: Sequence[str], texts: list[str], counts: list[int]) -> Path:
    """The folder, with such a model of each kind, and with rows for them; see `save_rows`."""
    for kind in kinds:
        save_seeing(kind, folder / kind, texts)
    save_rows(folder, texts, counts)
    return folder


def drawn_image(number: int) -> Image.Image:
    """An image of noise, of one of several sizes."""
    width, height = ((40, 30), (28, 56), (64, 64))[number % 3]
    noise = np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(noise)


def save_rows(folder: Path, texts: list[str], counts: list[int]) -> Path:
    """Conversations, of which the i-th shows `counts[i]` images, as parts of its first message; unequally long."""
    (folder / "shown").mkdir(parents=True, exist_ok=True)
    lines, number = [], 0
    for text, count in zip(texts, counts, strict=True):
        words = text.split()
        parts: list[dict[str, str]] = []
        for _ in range(count):
            drawn_image(number).save(folder / "shown" / f"{number}.png")
            parts += [{"type": "image", "image": f"shown/{number}.png"}, {"type": "text", "text": words[0]}]
            number += 1
        content: Any = parts or words[0]
        messages = [{"role": "user", "content": content}, {"role": "assistant", "content": " ".join(words[1:])}]
        lines.append(json.dumps({"messages": messages}))
    (folder / "rows.jsonl").write_text("\n".join(lines))
    return folder / "rows.jsonl"

"""The part of loaders.py that runs on another version of transformers. It imports nothing of the toolkit.

`make` writes small models in the words of that version, and `read` loads exports.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import loaders_servers
import torch
import transformers

WORDS = [
    "the",
    "cat",
    "sat",
    "on",
    "a",
    "mat",
    "and",
    "a",
    "dog",
    "ran",
    "over",
    "hills",
    "to",
    "see",
    "what",
    "sun",
    "was",
    "doing",
    "in",
    "red",
    "blue",
    "green",
    "water",
]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|image|>"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,  # the smallest that vLLM has on a CPU
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3 = {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 64}
VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama 3": {"model_type": "llama", "rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
    "smollm2": {"model_type": "llama", "rope_theta": 1e5, "tie_word_embeddings": True},
    "qwen2": {"model_type": "qwen2", "rope_theta": 1e6, "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "rope_theta": 1e6},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "rope_theta": 1e6,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    },
    "mistral": {"model_type": "mistral", "rope_theta": 1e6, "sliding_window": None},
    "phi3": {"model_type": "phi3", "rope_theta": 2e4},
    "gemma3 text": {
        "model_type": "gemma3_text",
        "rope_theta": 1e6,
        "rope_local_base_freq": 2e4,
        "query_pre_attn_scalar": 32,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "num_hidden_layers": 6,
        "layer_types": [*["sliding_attention"] * 5, "full_attention"],
        "sliding_window_pattern": 6,  # for older readers
        "sliding_window": 16,
    },
    "gemma3": {"model_type": "gemma3", "mm_tokens_per_image": 4, "image_token_index": 3},
    "qwen3.5": {
        "model_type": "qwen3_5",
        "image_token_id": 3,
        "tie_word_embeddings": False,
    },
}
NESTED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gemma3": (FAMILIES["gemma3 text"], {**VISION, "image_size": 56, "patch_size": 14}),
    "qwen3.5": (
        {
            "model_type": "qwen3_5_text",
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
        },
        {"hidden_size": 32, "intermediate_size": 48, "depth": 1, "num_heads": 2, "out_hidden_size": 64},
    ),
}
"""Of families that see: their language model, and their vision tower."""


def make(folder: Path) -> None:
    """Writes a small model of each family that this version knows, unless an older one has written it."""
    tokenizer = _tokenizer()
    for name, fields in FAMILIES.items():
        if (folder / name).is_dir() or fields["model_type"] not in transformers.CONFIG_MAPPING:
            continue
        sizes = {**TEXT, "vocab_size": len(tokenizer)}
        if name in NESTED:
            text, vision = NESTED[name]
            fields = {**fields, "text_config": {**sizes, **text}, "vision_config": vision}
        else:
            fields = {**sizes, **fields}
        torch.manual_seed(0)
        auto = transformers.AutoModelForImageTextToText if name in NESTED else transformers.AutoModelForCausalLM
        model = auto.from_config(transformers.AutoConfig.for_model(**fields))
        model.to(torch.bfloat16).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name, save_jinja_files=False)


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    draw = random.Random(1)
    texts = [" ".join(draw.choices(WORDS, k=20)) for _ in range(300)]
    letters = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL, initial_alphabet=letters)
    )
    own = {
        "bos_token": "<|endoftext|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": TEMPLATE,
    }
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, **own)


@torch.no_grad()
def read(job: dict[str, Any]) -> dict[str, Any]:
    """Loads one export. Returns the last logits of fixed tokens, and whether its tokenizer is the base's."""
    plain = {"torch_dtype": torch.float32}
    auto = getattr(transformers, job["auto"])
    if job["adapter"]:
        sys.modules["torchao"] = None  # type: ignore[assignment]  # the installed one is newer than older peft
        from peft import PeftModel

        is_old = int(transformers.__version__.partition(".")[0]) < 5
        folder = loaders_servers.own_folder(job["folder"]) if is_old else job["folder"]
        kept = {"num_labels": 1} if job["auto"].endswith("SequenceClassification") else {}
        model = PeftModel.from_pretrained(auto.from_pretrained(job["base"], **plain, **kept), folder)
    else:
        model = auto.from_pretrained(job["folder"], **plain)
    logits = model.eval()(input_ids=torch.tensor([loaders_servers.TOKENS])).logits
    own, base = (_encoded(job[name]) for name in ("folder", "base"))
    return {"logits": logits.flatten(0, -2)[-1].tolist(), "as_base": {key: own[key] == base[key] for key in own}}


def _encoded(folder: str) -> dict[str, Any]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    turns = [{"role": "user", "content": "a dog ran"}]
    rendered = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    tokens = tokenizer(loaders_servers.TEXT).input_ids
    return {"tokens": tokens, "conversation": rendered, "end": tokenizer.eos_token}


def main() -> None:
    """Runs `make FOLDER`, or `LOADER JOBS ANSWERS [SOURCES]` with the name of a function."""
    verb, place = sys.argv[1], Path(sys.argv[2])
    if verb == "make":
        make(place)
        return
    load = read if verb == "read" else getattr(loaders_servers, verb)
    answers, to, sources = {}, Path(sys.argv[3]), [Path(each) for each in sys.argv[4:]]
    for name, job in json.loads(place.read_text(encoding="utf-8")).items():
        try:
            answers[name] = load(job, *sources)
        except (Exception, SystemExit) as error:  # llama.cpp's converter ends with SystemExit
            shown = (str(error) or " ").splitlines()[0].replace(job["folder"], "FOLDER")
            answers[name] = {"error": f"{type(error).__name__}: {shown[:120]}"}
        to.write_text(json.dumps(answers), encoding="utf-8")


if __name__ == "__main__":
    main()

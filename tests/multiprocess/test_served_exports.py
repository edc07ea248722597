"""Exports are read by programs that are not ours: lm-evaluation-harness, and llama.cpp's converter."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.texts import make_texts
from support.tiny import save_llama
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import toolkit
from toolkit import Recipe, finetune
from toolkit.generation.text.choices import encode_choices, log_probabilities
from toolkit.generation.text.load import load_model
from toolkit.generation.text.rows import read_rows
from toolkit.serving.llama_cpp import SCRIPT

ROOT = Path(__file__).parents[2]
QUESTIONS = ROOT / "docs/examples/harness/questions.jsonl"
SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "dog", "ran", "over", "hills", "to", "see", "what", "sun", "red"]
CHATML = """
{{- bos_token }}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""


def sentence_piece() -> PreTrainedTokenizerFast:
    """A tokenizer like Llama 2's, which llama.cpp knows by its form; others only by their checksum."""
    made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")  # no token goes across words
    pieces = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(pieces)
    draw, characters = random.Random(1), [f"<0x{number:02X}>" for number in range(256)]
    texts = [" ".join(draw.choices(WORDS, k=20)) for _ in range(300)]
    made.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=420, special_tokens=[*SPECIAL, *characters]))
    fields = json.loads(made.to_str())
    fields["added_tokens"] = [one for one in fields["added_tokens"] if one["content"] in SPECIAL]
    made = Tokenizer.from_str(json.dumps(fields))
    made.post_processor = TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    names = {"bos_token": "<s>", "eos_token": "<|im_end|>", "unk_token": "<unk>", "pad_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, chat_template=CHATML, **names)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `base`, and the runs `full` and `lora` on it."""
    folder = tmp_path_factory.mktemp("served")
    tokenizer, draw = sentence_piece(), random.Random(2)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    ends = {"bos_token_id": 1, "eos_token_id": 4, "pad_token_id": 2, "num_key_value_heads": 2}
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=512, **sizes, **ends)
    LlamaForCausalLM(config).save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    turns = [[" ".join(draw.choices(WORDS, k=draw.randint(2, 5))) for _ in range(2)] for _ in range(40)]
    rows = [{"messages": [{"role": "user", "content": a}, {"role": "assistant", "content": b}]} for a, b in turns]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, adapter in {"full": {}, "lora": {"kind": "lora", "r": 4}}.items():
        training = {"output_dir": str(folder / name), "max_steps": 20, "micro_batch_size": 8}
        recipe: dict[str, Any] = {
            "model": {"name_or_path": str(folder / "base")},
            "data": {"train": str(folder / "rows.jsonl"), "max_length": 96, "cache_dir": str(folder / "cache")},
            "optimizer": {"learning_rate": 1e-2},
            "training": training,
            "adapter": adapter,
        }
        finetune(Recipe.from_mapping(recipe))
    return folder


def harness_command() -> list[str]:
    """The command that docs/serving.md prints."""
    page = (ROOT / "docs/serving.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"^    lm_eval (.+)$", page, re.MULTILINE)
    return shlex.split(line)


@pytest.mark.parametrize("way", ["full", "lora"])
def test_the_harness_gives_our_scores(way: str, served: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("lm_eval") is None:
        pytest.skip("pip install lm_eval")
    export = served / way / "export"
    named = f"{export}" if way == "full" else f"{served / 'base'},peft={export},tokenizer={export}"
    places = {"outputs/notes/export": named, "outputs/notes/scores": str(tmp_path / "scores")}
    arguments = [re.sub("|".join(places), lambda found: places[found[0]], word) for word in harness_command()]
    offline = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    command = [sys.executable, "-m", "lm_eval", *arguments, "--log_samples"]
    subprocess.run(command, check=True, cwd=ROOT, env=offline, timeout=900)
    (results,), (samples,) = ([*(tmp_path / "scores").rglob(name)] for name in ("results*.json", "samples*.jsonl"))
    theirs = json.loads(results.read_text())["results"]["own_choices"]
    ours = toolkit.evaluate(export, QUESTIONS, raw=True).shares()
    assert ours == {"accuracy": theirs["acc,none"], "accuracy_normalised": theirs["acc_bytes,none"]}
    rows, loaded = read_rows(QUESTIONS, "--eval", True, False), load_model(str(export))
    own = list(log_probabilities(loaded, encode_choices(loaded, rows, "--eval", None, raw=True), 8))
    logged = sorted(map(json.loads, samples.read_text().splitlines()), key=lambda sample: sample["doc_id"])
    found = [[float(choice[0]) for choice in sample["filtered_resps"]] for sample in logged]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(own), rtol=0, atol=1e-4)


def require_converter() -> None:
    if shutil.which(SCRIPT) is None or importlib.util.find_spec("sentencepiece") is None:
        pytest.skip("pip install sentencepiece, and put the folder of llama.cpp's sources on the PATH")


def test_a_newly_trained_tokenizer_has_no_name_in_llama_cpp(tmp_path: Path) -> None:
    require_converter()
    base = save_llama(tmp_path / "base", make_texts(60), tied=True)
    command = [sys.executable, "-m", "toolkit", "export", str(base), "--to", str(tmp_path / "made"), "--format", "gguf"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert "refuses it: NotImplementedError: BPE pre-tokenizer was not recognized" in done.stderr
    assert not (tmp_path / "made").exists()

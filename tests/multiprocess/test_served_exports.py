"""Exports are read by programs that are not ours: lm-evaluation-harness, and llama.cpp's converter and engine."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from support.texts import make_texts, write_rows
from support.tiny import save_llama
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaTokenizer,
    PreTrainedTokenizerFast,
)

from toolkit import Recipe, finetune
from toolkit.generation.text.load import load_model
from toolkit.serving.llama_cpp import SCRIPT

ROOT = Path(__file__).parents[2]
QUESTIONS = ROOT / "docs/examples/harness/questions.jsonl"
SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
NAMES = {"bos_token": "<s>", "eos_token": "<|im_end|>", "unk_token": "<unk>", "pad_token": "</s>"}
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
    # llama.cpp's converter takes the special tokens of such a tokenizer from tokenizer_config.json alone.
    return PreTrainedTokenizerFast(tokenizer_object=made, chat_template=CHATML, extra_special_tokens=SPECIAL, **NAMES)


def add_sentence_piece(folder: Path) -> None:
    """Writes a tokenizer as Llama 2's, whose order of merges llama.cpp reads from tokenizer.model."""
    import sentencepiece

    draw, written = random.Random(1), io.BytesIO()
    texts = [" ".join(draw.choices(WORDS, k=20)) for _ in range(300)]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_writer=written,
        vocab_size=330,
        model_type="bpe",
        byte_fallback=True,
        hard_vocab_limit=False,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    (folder / "tokenizer.model").write_bytes(written.getvalue())
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer", "legacy": True}))
    made = Tokenizer.from_str(LlamaTokenizer.from_pretrained(folder).backend_tokenizer.to_str())
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.pre_tokenizer = None  # as on the hub; transformers 5 makes others
    made.post_processor = TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    names = {**NAMES, "eos_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=made, chat_template=CHATML, **names).save_pretrained(folder)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `base`, and the runs `full` and `lora` on it."""
    folder = tmp_path_factory.mktemp("served")
    sentence_piece().save_pretrained(folder / "base")
    for name, adapter in {"full": {}, "lora": {"kind": "lora", "r": 4}}.items():
        train(folder, "base", name, 20, adapter=adapter)
    return folder


def train(folder: Path, base: str, name: str, steps: int, std: float = 0.02, **sections: Any) -> None:
    """Trains a model with the tokenizer in `base`, which gets random weights, on conversations."""
    tokenizer, draw = AutoTokenizer.from_pretrained(folder / base), random.Random(2)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes["num_key_value_heads"] = 2
    ends = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    if not (folder / base / "config.json").exists():
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=len(tokenizer), max_position_embeddings=512, initializer_range=std, **sizes, **ends
        )
        LlamaForCausalLM(config).save_pretrained(folder / base)
    turns = [[" ".join(draw.choices(WORDS, k=draw.randint(2, 5))) for _ in range(2)] for _ in range(40)]
    rows = [{"messages": [{"role": "user", "content": a}, {"role": "assistant", "content": b}]} for a, b in turns]
    write_rows(folder / "rows.jsonl", rows)
    known = tokenizer.get_vocab()
    recipe: dict[str, Any] = {
        "model": {"name_or_path": str(folder / base), "add_tokens": None if SPECIAL[-1] in known else SPECIAL[3:]},
        "data": {"train": str(folder / "rows.jsonl"), "max_length": 96, "cache_dir": str(folder / "cache")},
        "optimizer": {"learning_rate": 1e-2},
        "training": {"output_dir": str(folder / name), "max_steps": steps, "micro_batch_size": 8},
    }
    finetune(Recipe.from_mapping({**recipe, **sections}))


def harness_command() -> list[str]:
    """The command that docs/serving.md prints."""
    page = (ROOT / "docs/serving.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"^    lm_eval (.+)$", page, re.MULTILINE)
    return shlex.split(line)


@pytest.mark.parametrize("way", [pytest.param("full", marks=pytest.mark.grid), "lora"])
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
    rows, loaded = [*map(json.loads, QUESTIONS.open())], load_model(str(export))
    own = [[log_probability(loaded, row["prompt"], choice) for choice in row["choices"]] for row in rows]
    right = [row["choices"][scores.index(max(scores))] == row["answer"] for row, scores in zip(rows, own, strict=True)]
    assert theirs["acc,none"] == sum(right) / len(right)
    logged = sorted(map(json.loads, samples.read_text().splitlines()), key=lambda sample: sample["doc_id"])
    found = [[float(choice[0]) for choice in sample["filtered_resps"]] for sample in logged]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(own), rtol=0, atol=1e-4)


@torch.no_grad()
def log_probability(loaded: Any, prompt: str, choice: str) -> float:
    """That of the choice's tokens, in nats."""
    ids, whole = (loaded.tokenizer(text)["input_ids"] for text in (prompt, prompt + choice))
    of_places = loaded.model(input_ids=torch.tensor([whole])).logits[0].log_softmax(-1)
    return sum(float(of_places[place - 1, whole[place]]) for place in range(len(ids), len(whole)))


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


PROMPTS = ["the cat", "what", "hills and red sun", "see the dog sat on a mat", "What is it?", "über  数\n\n a"]


@pytest.mark.parametrize("way", ["tokenizer.json", "tokenizer.model"])
def test_llama_cpp_writes_the_tokens_that_transformers_writes(way: str, tmp_path: Path) -> None:
    """Token by token in float32, of a model that answers each prompt otherwise, after a conversation and plain text."""
    require_converter()
    if importlib.util.find_spec("llama_cpp") is None:
        pytest.skip("pip install llama-cpp-python")
    import llama_cpp

    (tmp_path / "base").mkdir()
    write = {
        "tokenizer.json": lambda folder: sentence_piece().save_pretrained(folder),
        "tokenizer.model": add_sentence_piece,
    }
    write[way](tmp_path / "base")
    train(tmp_path, "base", "run", 3, std=0.3, checkpoint={"every_steps": 3})
    made = tmp_path / "made gguf"
    command = [sys.executable, "-m", "toolkit", "export", str(tmp_path / "run"), "--to", str(made), "--format", "gguf"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ("there is no tokenizer.model" in done.stdout) == (way == "tokenizer.json")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run/export")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run/export").eval()
    # Without these types its cache of keys and values is float16, and logits differ by up to 1e-2 of the largest.
    exact = {"type_k": llama_cpp.GGML_TYPE_F32, "type_v": llama_cpp.GGML_TYPE_F32, "flash_attn": False}
    engine = llama_cpp.Llama(str(made / "model.gguf"), n_ctx=512, verbose=False, n_threads=1, **exact)
    answers = set()
    for prompt in PROMPTS:
        asked = [{"role": "user", "content": prompt}]
        conversation = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
        for text, has_bos in ((conversation, True), (prompt, False)):
            ids = tokenizer(text, add_special_tokens=not has_bos).input_ids
            assert engine.tokenize(text.encode(), add_bos=not has_bos, special=True) == ids, text
            written = model.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False)[0, len(ids) :].tolist()
            engine.reset()
            found = list(islice(engine.generate(ids, top_k=1, temp=0.0, repeat_penalty=1.0), len(written)))
            assert found == written, text
            answers.add(tuple(found))
    engine.close()
    assert len(answers) > 8

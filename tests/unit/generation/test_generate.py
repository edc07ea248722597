"""`toolkit generate`: what a model writes, token for token, and what is refused."""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from support.cases import cases
from support.chat_templates import CHAT_TEMPLATES, LLAMA_31, MISTRAL_V1, ZEPHYR, ChatTemplate, tokenizer_for
from support.texts import make_texts
from support.tiny import llama, save_llama
from tokenizers import decoders
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    RwkvConfig,
    RwkvForCausalLM,
)

from toolkit.cli.app import main
from toolkit.data.templates.stops import turn_ends
from toolkit.data.templates.templates import MARKERS, use_template
from toolkit.data.tokens.tokenizer import _train_byte_pairs
from toolkit.errors import BadInputError, ToolkitError
from toolkit.generation.text.command import converse
from toolkit.generation.text.complete import (
    CONTEXT,
    HALF_CHARACTER,
    Completion,
    Prompt,
    _continuation,
    _TextStreamer,
    complete,
    encode_prompt,
    room_of,
    stream,
)
from toolkit.generation.text.evaluation import Compared, evaluate, summary
from toolkit.generation.text.load import Loaded, find_model, load_model, stop_tokens
from toolkit.generation.text.options import Sampling
from toolkit.generation.text.rows import PromptRow, answers_of, completions, encode_rows, read_rows
from toolkit.recipe.objectives.section import Comparison

TABLES = cases(__file__)
GREEDY = Sampling(12, 0.0)
PROMPTS = ["the king", "a fox who sang of bread", "wine", "while the moon was high and all the world lay"]
FACTS = TABLES["FACTS"]
SYSTEM = "Be brief."


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without a chat template, with random weights, whose generation settings ask for more than they may."""
    folder = save_llama(tmp_path_factory.mktemp("plain") / "model", make_texts(40), tied=False)
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.generation_config.update(repetition_penalty=5.0, no_repeat_ngram_size=2)
    model.generation_config.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that knows the facts by heart, as turns of chatml; its configuration does not end at a turn's end."""
    folder = tmp_path_factory.mktemp("chat") / "model"
    tokenizer = _train_byte_pairs(iter([*make_texts(20), *FACTS, *FACTS.values()]), 330, MARKERS["chatml"])
    tokenizer.eos_token = "<|endoftext|>"
    use_template(tokenizer, "chatml")
    tokenizer.save_pretrained(folder)
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 48, "intermediate_size": 96, "max_position_embeddings": 128}
    model = llama(**sizes, num_key_value_heads=4, bos_token_id=None, eos_token_id=tokenizer.eos_token_id)
    _learn(model, [_turns(tokenizer, question, answer) for question, answer in FACTS.items()])
    model.save_pretrained(folder)
    return folder


def _turns(tokenizer: Any, question: str, answer: str) -> list[int]:
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return tokenizer(tokenizer.apply_chat_template(messages, tokenize=False))["input_ids"]


def _learn(model: torch.nn.Module, rows: list[list[int]], steps: int = 60, rate: float = 5e-3) -> None:
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    targets = torch.tensor([row + [-100] * (width - len(row)) for row in rows])
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=rate)
    for _ in range(steps):
        model(input_ids=ids, labels=targets).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def by_hand(folder: Path, ids: list[int], count: int, stops: tuple[int, ...] = ()) -> list[int]:
    """The most likely token, again and again."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    found: list[int] = []
    with torch.no_grad():
        for _ in range(count):
            token = int(model(input_ids=torch.tensor([ids + found])).logits[0, -1].argmax())
            if token in stops:
                break
            found.append(token)
    return found


Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """`toolkit generate`: its exit code, stdout and stderr."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["toolkit", "generate", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0), *capsys.readouterr()

    return run


def write_rows(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Matrices this small are slower on several."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# ---- tokens ----


def test_greedy_is_the_most_likely_token_again_and_again(plain: Path) -> None:
    loaded = load_model(str(plain))
    tokenizer = AutoTokenizer.from_pretrained(plain)
    for text in PROMPTS:
        ids = tokenizer(text)["input_ids"]
        prompt = encode_prompt(loaded, text)
        assert prompt.ids == ids
        expected = tokenizer.decode(ids + by_hand(plain, ids, 12, (tokenizer.eos_token_id,)))[len(text) :]
        pieces: list[str] = []
        assert stream(loaded, prompt, GREEDY, pieces.append) == expected
        assert "".join(pieces) == expected
        assert len(pieces) > 3


def test_the_batch_size_changes_nothing(plain: Path) -> None:
    loaded = load_model(str(plain))
    long = ["the king " * count for count in (26, 27, 29)]
    prompts = [encode_prompt(loaded, text) for text in [*PROMPTS, *long, *PROMPTS[:2]]]
    rooms = {room_of(loaded, prompt, GREEDY) for prompt in prompts}
    assert len(rooms) > 2, "some end at the model's last position"
    alone = [complete(loaded, [prompt], GREEDY)[0] for prompt in prompts]
    for size in (2, 3, 64):
        assert list(completions(loaded, prompts, GREEDY, size)) == alone


def test_a_model_that_sees_padding_gets_one_row_at_a_time(plain: Path) -> None:
    """RWKV knows no attention mask, so that padding would enter its state."""
    loaded = load_model(str(plain))
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "attention_hidden_size": 32, "num_hidden_layers": 2, "context_length": 128}
    model = RwkvForCausalLM(RwkvConfig(vocab_size=len(loaded.tokenizer), **sizes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)
    loaded = replace(loaded, model=model, positions=None)
    prompts = [encode_prompt(loaded, text) for text in PROMPTS]
    alone = [complete(loaded, [prompt], GREEDY)[0] for prompt in prompts]
    assert complete(loaded, prompts, GREEDY) == alone


def test_a_completion_ends_at_the_last_position(plain: Path) -> None:
    loaded = load_model(str(plain))
    prompt = encode_prompt(loaded, "the king " * 20)
    tokens = by_hand(plain, prompt.ids, 64 - len(prompt.ids), tuple(loaded.stops))
    whole = loaded.tokenizer.decode(prompt.ids + tokens)
    assert "the king " * 20 + complete(loaded, [prompt], Sampling(1000, 0.0))[0].text == whole
    with pytest.raises(BadInputError, match="no room in the model's 64 positions"):
        encode_prompt(loaded, "the king " * 40)


def test_a_seed_gives_the_same_text_again(plain: Path, command: Command) -> None:
    def text(*options: object) -> str:
        code, out, err = command(plain, "--prompt", "the king", "--max-new-tokens", 20, *options)
        assert (code, err) == (0, "")
        return out

    assert text() == text("--seed", 0, "--temperature", 0.7, "--top-p", 0.95)
    assert text() != text("--seed", 1)
    assert text("--temperature", 5, "--top-p", 1e-9) == text("--temperature", 0)


# ---- prompts ----


def test_a_prompt_is_a_users_turn(chat: Path) -> None:
    loaded = load_model(str(chat))
    start, end = loaded.tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])

    def plain_ids(text: str) -> list[int]:
        return loaded.tokenizer(text)["input_ids"]

    system = [start, *plain_ids("system\nBe brief."), end, *plain_ids("\n")]
    turn = [start, *plain_ids("user\nWho sang?"), end, *plain_ids("\n"), start, *plain_ids("assistant\n")]
    own = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who sang?"}]
    assert encode_prompt(loaded, "Who sang?") == Prompt(turn, [])
    assert encode_prompt(loaded, "Who sang?", "Be brief.").ids == system + turn
    assert encode_prompt(loaded, own, "Be long.").ids == system + turn
    assert encode_prompt(loaded, "Who sang?", raw=True).ids == plain_ids("Who sang?")


def stub(tokenizer: Any, rows: int = 10_000) -> Loaded:
    """A model that knows its number of tokens only."""
    weight = SimpleNamespace(shape=(rows, 1))
    model = SimpleNamespace(get_input_embeddings=lambda: SimpleNamespace(weight=weight))
    return Loaded("stub", model, tokenizer, frozenset(), None)


@pytest.mark.parametrize("template", [LLAMA_31, MISTRAL_V1, ZEPHYR], ids=lambda template: template.name)
def test_the_begin_of_text_token_comes_once(template: ChatTemplate) -> None:
    tokenizer = tokenizer_for(template)
    tokenizer.add_bos_token = True
    bos = tokenizer.bos_token_id
    expected = template is not ZEPHYR, True  # whose template writes none, and training has it so
    for raw, count in zip((False, True), expected, strict=True):
        ids = encode_prompt(stub(tokenizer), "the king", raw=raw).ids
        assert ids.count(bos) == count
        assert not count or ids[0] == bos


def test_tokens_that_the_model_does_not_know_are_told() -> None:
    with pytest.raises(BadInputError, match="use the tokenizer that belongs to the model"):
        encode_prompt(stub(tokenizer_for(LLAMA_31), rows=20), "the king")


# ---- the end ----

ENDS = TABLES["ENDS"]


def test_the_token_that_closes_a_turn_is_found() -> None:
    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=[5, 7]))
    for template in CHAT_TEMPLATES:
        tokenizer = tokenizer_for(template)
        ends = next((ends for name, ends in ENDS.items() if template.name.startswith(name)), ["<|im_end|>"])
        assert turn_ends(tokenizer) == set(tokenizer.convert_tokens_to_ids(ends)), template.name
        assert stop_tokens(model, tokenizer) == turn_ends(tokenizer) | {5, 7, tokenizer.eos_token_id}


def test_no_turn_is_closed() -> None:
    tokenizer = tokenizer_for(LLAMA_31)
    for template in (None, "{{ raise_exception('no') }}", "{{ bos_token }}{{ messages[1].content }} end"):
        tokenizer.chat_template = template
        assert turn_ends(tokenizer) == frozenset()


def test_a_stop_token_ends_the_text(plain: Path) -> None:
    loaded = load_model(str(plain))
    prompts = [encode_prompt(loaded, text) for text in PROMPTS]
    tokens = by_hand(plain, prompts[0].ids, 12)
    number = next(i for i in range(3, 12) if tokens[i] not in tokens[:i])
    loaded = replace(loaded, stops=frozenset([tokens[number]]))
    expected = loaded.tokenizer.decode(prompts[0].ids + tokens[:number])[len(PROMPTS[0]) :]
    pieces: list[str] = []
    assert complete(loaded, prompts, GREEDY)[0].text == expected
    assert stream(loaded, prompts[0], GREEDY, pieces.append) == "".join(pieces) == expected


@pytest.mark.parametrize("template", [LLAMA_31, MISTRAL_V1], ids=lambda template: template.name)
@pytest.mark.parametrize("context", ["", "the king"])
def test_no_half_characters_are_shown(template: ChatTemplate, context: str) -> None:
    tokenizer = tokenizer_for(template)
    if template.metaspace is not None:  # as Llama 2 has it
        rules = tokenizer.backend_tokenizer
        rules.decoder = decoders.Sequence([rules.decoder, decoders.Strip(" ", 1, 0)])
    loaded = stub(tokenizer)
    text = " naïve 月が 🙂 and \n  more" * 9
    before = loaded.tokenizer(context, add_special_tokens=False)["input_ids"]
    ids = loaded.tokenizer(context + text, add_special_tokens=False)["input_ids"][len(before) :]
    shown: list[str] = []
    pieces = _TextStreamer(loaded, Prompt(before, before[-CONTEXT:]), shown.append)
    pieces.put(torch.tensor([before]))
    for token in ids:
        pieces.put(torch.tensor([token]))
    pieces.end()
    assert "".join(shown) == _continuation(loaded, before, ids)
    assert "".join(shown) == (text if context or template is LLAMA_31 else text.removeprefix(" "))
    assert not any(HALF_CHARACTER in piece for piece in shown)
    assert len(shown) > 20


# ---- the modes ----


def test_a_prompt_is_answered(chat: Path, command: Command, tmp_path: Path) -> None:
    for question, answer in FACTS.items():
        assert command(chat, "--prompt", question, "--temperature", 0) == (0, answer + "\n", "")
    run = tmp_path / "run"
    shutil.copytree(chat, run / "export")
    (run / "recipe.yaml").write_text("")
    assert command(run, "--prompt", "Who sang?", "--temperature", 0)[:2] == (0, "A fox\n")


def test_a_conversation(chat: Path, monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(
        "toolkit.generation.text.command.encode_prompt", lambda *given: asked.append(given[1:]) or encode_prompt(*given)
    )
    monkeypatch.setattr(sys, "stdin", io.StringIO("Who sang?\n\nWhat of?\n/reset\nWho sang?\n/quit\nmore\n"))
    options = ("--chat", "--temperature", 0, "--max-new-tokens", 8)
    code, answers, _ = command(chat, *options, "--system", SYSTEM)
    assert code == 0
    question = {"role": "user", "content": "Who sang?"}
    assert [given[0] for given in asked[::2]] == [[question], [question]]
    answer = asked[1][0][1]
    assert asked[1] == ([question, answer, {"role": "user", "content": "What of?"}], SYSTEM)
    assert answer["role"] == "assistant"
    assert answers.startswith(answer["content"] + "\n")
    assert answers.endswith("\n" + answer["content"] + "\n")

    monkeypatch.setattr(sys, "stdin", io.StringIO("Who sang?"))
    assert command(chat, *options)[:2] == (0, "A fox\n")


def test_a_conversation_that_grows_too_long_goes_on(chat: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loaded = load_model(str(chat))
    lines = iter(["Who sang? " * 40, "Who sang?", None])
    said: list[str] = []
    converse(loaded, Sampling(8, 0.0), None, lambda: next(lines), said.append)
    assert "".join(said) == "A fox\n"
    assert "no room in the model's 128 positions; shorten it; /reset forgets" in capsys.readouterr().err


def test_ctrl_c_ends_a_conversation(chat: Path, monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    def interrupted() -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("toolkit.generation.text.command._read_line", interrupted)
    assert command(chat, "--chat")[0] == 0


def test_a_file_of_lines(plain: Path, tmp_path: Path, command: Command) -> None:
    loaded = load_model(str(plain))
    (tmp_path / "in.txt").write_text("\n".join([PROMPTS[0], "", *PROMPTS[1:]]))
    options = (plain, "--file", tmp_path / "in.txt", "--temperature", 0, "--max-new-tokens", 12)
    code, lines, _ = command(*options)
    assert code == 0
    assert [json.loads(line) for line in lines.splitlines()] == [
        {"prompt": text, "completion": complete(loaded, [encode_prompt(loaded, text)], GREEDY)[0].text}
        for text in PROMPTS
    ]
    assert command(*options, "--batch-size", 1, "--to", tmp_path / "new/out.jsonl") == (0, "", "")
    assert (tmp_path / "new/out.jsonl").read_text(encoding="utf-8") == lines


def test_a_file_of_texts_and_messages(chat: Path, tmp_path: Path, command: Command) -> None:
    first, second = list(FACTS)[:2]
    messages = [{"from": "human", "value": second}]
    turns = [{"role": "user", "content": first}]
    rows = [{"prompt": first}, {"prompt": messages}, {"messages": turns}, {"question": second}]
    output = tmp_path / "out.jsonl"
    file = write_rows(tmp_path / "in.jsonl", *rows)
    assert command(chat, "--file", file, "--to", output, "--temperature", 0)[0] == 0
    assert [json.loads(line) for line in output.read_text().splitlines()] == [
        {"prompt": prompt, "completion": FACTS[question]}
        for prompt, question in ((first, first), (messages, second), (turns, first), (second, second))
    ]


def test_a_file_is_there_when_it_is_whole(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    def failing(loaded: Loaded, prompts: list[Prompt], sampling: Sampling) -> list[str]:
        assert [path.name for path in tmp_path.iterdir()] == ["in.txt", ".out.jsonl.unfinished"]
        raise KeyboardInterrupt

    monkeypatch.setattr("toolkit.generation.text.rows.complete", failing)
    (tmp_path / "in.txt").write_text("the king\n")
    assert command(plain, "--file", tmp_path / "in.txt", "--to", tmp_path / "out.jsonl")[0] != 0
    assert [path.name for path in tmp_path.iterdir()] == ["in.txt"]


def test_an_evaluation(chat: Path, tmp_path: Path, command: Command) -> None:
    rows = [
        {"prompt": "Who sang?", "answer": ["an owl", "a FOX"]},
        {"question": "What of?", "answer": " bread and wine"},
        {"prompt": [{"role": "user", "content": "Where does the king walk?"}], "answer": "by the river"},
        {"prompt": "Schöner Mond?", "answer": "nein"},
    ]
    file = write_rows(tmp_path / "rows.jsonl", *rows)
    code, table, _ = command(chat, "--eval", file)
    assert code == 0
    assert "accuracy: 75.0% (3 of 4 rows exact)" in table
    assert f"{file}:4: 'ja, größer 月 🙂' instead of 'nein'" in table

    found = json.loads(command(chat, "--eval", file, "--json", "--compare", "strict", "--batch-size", 3)[1])
    assert (found["accuracy"], found["exact"], found["rows"]) == (0.25, 1, 4)
    assert [wrong["row"] for wrong in found["mismatches"]] == [f"{file}:{line}" for line in (1, 2, 4)]
    assert found["mismatches"][0] == {
        "row": f"{file}:1",
        "prompt": "Who sang?",
        "completion": "A fox",
        "answers": ["an owl", "a FOX"],
    }


COUNTED = [*TABLES["COUNTED"], (["structured"], "[" * 100_000, "[]", False)]
"""How answers are compared, a completion, an answer, and whether that is right."""


def test_what_of_a_completion_counts() -> None:
    for comparison, completion, answer, is_right in COUNTED:
        row = PromptRow("f:1", "?", "?", answers=(answer,))
        found = evaluate([row], [Completion(completion, 1, True)], Compared(Comparison(*comparison)))
        assert found.exact == is_right, (comparison, completion[:50])


NUMBERS = [*TABLES["NUMBERS"], ("1" * 4000 + "e9999", "9999")]
"""A text, and its last number."""


def test_the_last_number_of_a_text() -> None:
    for text, number in NUMBERS:
        assert Compared(Comparison("numeric")).of_completion(text) == Decimal(number), text[:50]


UNFIT: list[tuple[list[dict[str, Any]], str, str]] = TABLES["UNFIT"]


def test_rows_and_options_that_fit_no_evaluation(plain: Path, tmp_path: Path, command: Command) -> None:
    for rows, how, words in UNFIT:
        file = write_rows(tmp_path / "rows.jsonl", *rows)
        code, _, err = command(plain, "--eval", file, "--compare", how)
        assert code == 2
        assert words.format(file) in " ".join(err.split())


def test_many_mismatches_are_counted() -> None:
    rows = [PromptRow(f"f:{line}", "?", "?", answers=("yes",)) for line in range(9)]
    found = evaluate(
        rows, [Completion(text, 3, False) for text in (*["no" * 99] * 8, "\tYES\n")], Compared(Comparison("text"))
    )
    assert (found.exact, found.accuracy) == (1, 1 / 9)
    assert summary(found).splitlines()[-1] == "  and 3 more; --json has them all"
    assert all(len(line) < 120 for line in summary(found).splitlines())


# ---- adapters ----


@pytest.fixture(scope="module")
def adapter(chat: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of the chat model that answers otherwise; and, beside it, the model with it merged."""
    folder = tmp_path_factory.mktemp("adapter")
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear", lora_alpha=8)
    torch.manual_seed(1)
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(chat), config)
    tokenizer = AutoTokenizer.from_pretrained(chat)
    _learn(model, [_turns(tokenizer, "Who sang?", "the queen of hearts")], rate=2e-2)
    model.save_pretrained(folder / "adapter")
    model.merge_and_unload().save_pretrained(folder / "merged")
    tokenizer.save_pretrained(folder / "merged")
    return folder / "adapter"


def test_an_adapter_is_its_merged_model(adapter: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(adapter, run / "export")
    found = []
    for folder in (adapter.parent / "merged", adapter, run):
        loaded = load_model(str(folder))
        prompts = [encode_prompt(loaded, text) for text in FACTS]
        found.append((complete(loaded, prompts, Sampling(30, 0.0)), loaded.stops, loaded.positions))
    assert found[0] == found[1] == found[2]
    assert found[0][0][1].text == "the queen of hearts"


def edited(adapter: Path, folder: Path, **fields: Any) -> Path:
    shutil.copytree(adapter, folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | fields))
    return folder


def test_an_adapters_base_may_lie_in_its_folder(adapter: Path, chat: Path, tmp_path: Path) -> None:
    folder = edited(adapter, tmp_path / "adapter", base_model_name_or_path="base")
    shutil.copytree(chat, folder / "base")
    assert load_model(str(folder)).name == str(folder)


def test_adapters_that_cannot_be_used(adapter: Path, plain: Path, tmp_path: Path, command: Command) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"base_model_name_or_path": str(tmp_path / "gone")}, "put the folder there, or change"),
        ({"base_model_name_or_path": "someone/model-nobody-has"}, "hf download someone/model-nobody-has"),
        ({"base_model_name_or_path": None}, "names no base_model_name_or_path"),
        ({"task_type": "SEQ_CLS"}, "the adapter's task is SEQ_CLS"),
        ({"base_model_name_or_path": str(plain)}, "the adapter does not fit its base"),
        (
            {"target_modules": ["q_proj"]},
            "lacks weights of its modules, or has others: base_model.model.model.layers.0",
        ),
        ({"peft_type": "NEWER"}, "the adapter does not fit its base"),
    ]
    for number, (fields, message) in enumerate(cases):
        folder = edited(adapter, tmp_path / str(number), **fields)
        code, _, err = command(folder, "--prompt", "a")
        assert code == 2
        assert message in err
    (folder / "adapter_config.json").write_text("{")
    assert "is not JSON" in command(folder, "--prompt", "a")[2]
    (folder / "adapter_model.safetensors").unlink()
    assert "without adapter_model.safetensors" in command(folder, "--prompt", "a")[2]


# ---- what is refused ----


BAD_OPTIONS = TABLES["BAD_OPTIONS"]


def test_bad_options(plain: Path, command: Command) -> None:
    for arguments, messages in BAD_OPTIONS:
        code, _, err = command(plain, *arguments.split())
        assert code == 2, arguments
        assert [message for message in messages if message not in err] == [], arguments


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_no_gpu(plain: Path, command: Command) -> None:
    assert "cuda is not available on this machine" in command(plain, "--prompt", "a", "--device", "cuda")[2]


def test_bad_options_import_no_torch() -> None:
    code = (
        "import sys; from toolkit.cli.app import app; from toolkit.errors import BadInputError\n"
        "try: app(['generate', 'x', '--chat', '--raw'], standalone_mode=False)\n"
        "except BadInputError: print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[3], text=True, capture_output=True)
    assert found.stdout == "[]\n", found.stderr


def test_sources_that_hold_no_model(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run/recipe.yaml").write_text("")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/config.json").write_text("{}")
    bare = shutil.copytree(plain, tmp_path / "bare")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (bare / name).unlink()
    classifier = shutil.copytree(plain, tmp_path / "classifier")
    LlamaForSequenceClassification.from_pretrained(plain).save_pretrained(classifier)
    headless = shutil.copytree(plain, tmp_path / "headless")
    LlamaForCausalLM.from_pretrained(plain).model.save_pretrained(headless)
    monkeypatch.chdir(tmp_path)
    for source, message in {
        str(tmp_path / "nothing"): "does not exist; name a model's folder or a hub name",
        "empty/nothing": "the folder 'empty/nothing' does not exist",
        "empty/": "'empty/' holds neither a model (config.json), nor an adapter",
        "nothing/": "'nothing/' does not exist",
        "bare/config.json": "is a file; name a model's folder",
        "run": "has no export; make one of its last checkpoint: toolkit export run --to run/export",
        "broken": "'broken': no model can be loaded",
        "bare": "'bare': no tokenizer can be loaded",
        "classifier": "(LlamaForSequenceClassification) and generates none; --eval scores labelled rows with",
        "headless": "'headless': its files lack 1 of the weights, for example lm_head.weight",
    }.items():
        code, _, err = command(source, "--prompt", "a")
        assert code == 2, source
        assert message in err


def test_only_a_hub_name_is_looked_for_on_the_hub(plain: Path) -> None:
    assert find_model("someone/model").on_hub
    assert find_model("gpt2").on_hub
    assert not find_model(str(plain)).on_hub


BAD_ROWS = TABLES["BAD_ROWS"]
"""What reads a row, the row, and what is wrong with it."""


def test_bad_rows_are_named(plain: Path, tmp_path: Path, command: Command) -> None:
    good, file = '{"prompt": "a", "answer": "b"}', tmp_path / "rows.jsonl"
    for option, line, message in BAD_ROWS:
        file.write_bytes(f"{good}\n\n{line}\n{good}\n{line}\n".encode(errors="surrogateescape"))
        code, out, err = command(plain, option, file)
        assert (code, out) == (2, ""), line
        for told in (f"{option}: rows that cannot be used: 2", *(f"{file}:{n}: {message}" for n in (3, 5))):
            assert told in err, line


def test_rows_to_train_on_have_their_answer_last(tmp_path: Path) -> None:
    asked, said = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    rows = [
        {"messages": [asked, said, asked, {**said, "content": "c"}]},
        {"prompt": "a", "completion": "b", "label": True},
        {"prompt": [asked], "chosen": [said], "rejected": [{**said, "content": "c"}]},
        {"messages": [asked, said, asked], "answer": "d"},
        {"messages": [asked, said], "system": "be kind"},
        {"prompt": "a", "answer": "b", "system": "be kind"},
        {"prompt": "a", "completion": "b", "system": "not read beside a completion"},
    ]
    found = read_rows(write_rows(tmp_path / "rows.jsonl", *rows), "--eval", True)
    assert [row.answers for row in found] == [("c",), ("b",), ("b",), ("d",), ("b",), ("b",), ("b",)]
    kind = [{"role": "system", "content": "be kind"}, asked]
    assert [row.prompt for row in found] == [[asked, said, asked], "a", [asked], [asked, said, asked], kind, kind, "a"]
    assert [row.asked(is_plain=True) for row in found[-3:]] == [kind, "a", "a"]
    bad = write_rows(tmp_path / "bad.jsonl", {"messages": [asked, said], "kto_tag": "false"})
    with pytest.raises(BadInputError, match="labelled false"):
        read_rows(bad, "--eval", True)
    assert read_rows(bad, "--eval", True, is_scored=True)[0].answers == ()


def test_rows_bring_arguments_of_the_template(chat: Path, tmp_path: Path) -> None:
    loaded = load_model(str(chat))
    asked = [{"role": "user", "content": "Who sang?"}]
    loaded.tokenizer.chat_template = "{% if short is defined %}{{ short }}:{% endif %}{{ messages[0]['content'] }}"
    rows = [
        {"messages": asked, "chat_template_kwargs": {"short": "fox"}},
        {"prompt": "Who sang?", "chat_template_kwargs": {"short": "owl"}},
        {"messages": asked, "chat_template_kwargs": None},
    ]
    read = read_rows(write_rows(tmp_path / "rows.jsonl", *rows), "--file", False)
    texts = [loaded.tokenizer.decode(prompt.ids) for prompt in encode_rows(loaded, read, "--file", None, False)]
    assert texts == ["fox:Who sang?", "owl:Who sang?", "Who sang?"]
    for arguments, told in (
        ({"long": True}, "chat_template_kwargs has long, which the chat template does not take"),
        ([1], "chat_template_kwargs is a list, not an object"),
    ):
        file = write_rows(tmp_path / "bad.jsonl", {"messages": asked, "chat_template_kwargs": arguments})
        with pytest.raises(BadInputError, match=re.escape(told)):
            encode_rows(loaded, read_rows(file, "--file", False), "--file", None, False)
    with pytest.raises(BadInputError, match="chat_template_kwargs have no effect on plain text"):
        encode_rows(loaded, read[1:2], "--file", None, True)


def test_columns_of_null_are_skipped(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "a"}]
    row = {"prompt": None, "messages": messages, "question": None, "answer": "b"}
    found = read_rows(write_rows(tmp_path / "rows.jsonl", row), "--eval", True)[0]
    assert (found.prompt, found.answers) == (messages, ("b",))


def test_many_bad_rows_are_counted(tmp_path: Path) -> None:
    told = r"cannot be used: 25; correct them, or take them out\n(.*not JSON\n){10}  and 15 more$"
    with pytest.raises(BadInputError, match=told):
        read_rows(write_lines(tmp_path / "rows.jsonl", "?\n" * 25), "--file", False)


def write_lines(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_bad_files(plain: Path, tmp_path: Path, command: Command) -> None:
    lines = write_lines(tmp_path / "in.txt", "the king\n")
    empty = write_lines(tmp_path / "empty.txt", "\n")
    (tmp_path / "folder.txt").mkdir()
    for arguments, message in [
        (("--file", tmp_path / "gone.txt"), "gone.txt' cannot be read: No such file or directory; name a file"),
        (("--file", tmp_path / "folder.txt"), "cannot be read: Is a directory"),
        (("--file", tmp_path / "in.csv"), "of an unknown kind; allowed: .txt, .jsonl"),
        (("--eval", lines), "of an unknown kind; allowed: .jsonl"),
        (("--file", empty), "empty.txt' holds no prompt"),
        (("--file", lines, "--to", lines), "is the file of --file; name another one"),
        (("--file", lines, "--to", tmp_path / "folder.txt"), "cannot be written: it exists and is not a file"),
        (("--file", lines, "--to", "/dev/null"), "cannot be written: it exists and is not a file"),
        (("--file", lines, "--to", lines / "out"), "cannot be written: "),
    ]:
        code, _, err = command(plain, *arguments)
        assert code == 2, message
        assert message in err
    assert lines.read_text() == "the king\n"


def test_messages_need_the_template(chat: Path) -> None:
    loaded = load_model(str(chat))
    with pytest.raises(BadInputError, match="messages need a chat template, and --raw leaves it out"):
        encode_prompt(loaded, [{"role": "user", "content": "a"}], raw=True)
    loaded.tokenizer.chat_template = "{{ raise_exception('no kings') }}"
    with pytest.raises(BadInputError, match="the chat template rejects it: no kings"):
        encode_prompt(loaded, "a king")


def test_outputs_that_are_no_numbers(plain: Path) -> None:
    loaded = load_model(str(plain))
    loaded.model.lm_head.weight.data.fill_(float("nan"))
    with pytest.raises(ToolkitError, match="the logits contain NaN or infinity; try --dtype float32"):
        complete(loaded, [encode_prompt(loaded, "the king")], Sampling())


def test_a_template_without_an_end_is_told(chat: Path, tmp_path: Path, command: Command) -> None:
    folder = shutil.copytree(chat, tmp_path / "model")
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}\n{% endfor %}")
    code, _, err = command(folder, "--prompt", "a", "--max-new-tokens", 2)
    assert code == 0
    assert "the chat template closes no turn with a special token" in err


def test_types_of_weights(plain: Path) -> None:
    assert load_model(str(plain)).model.dtype == torch.float32
    loaded = load_model(str(plain), "bfloat16", "cpu")
    assert loaded.model.dtype == torch.bfloat16
    assert len(complete(loaded, [encode_prompt(loaded, "the king")], GREEDY)) == 1


def test_an_answer_may_be_a_number() -> None:
    assert answers_of(42) == ("42",)
    assert answers_of([0.5, "a half"]) == ("0.5", "a half")

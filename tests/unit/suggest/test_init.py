"""`toolkit init`: each value against what a person would work out from the rows, the model and the machine."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from support.cases import cases
from support.chat_templates import QWEN_3
from support.texts import make_texts, write_rows
from support.tiny import save_llama
from transformers import AutoConfig, AutoTokenizer, T5Config
from typer.testing import CliRunner, Result

from toolkit.cli.app import app
from toolkit.data.rows.sources import open_source
from toolkit.errors import BadInputError, ToolkitError
from toolkit.paths import GIB
from toolkit.planning.hardware import hardware_of
from toolkit.planning.table import plan
from toolkit.recipe.recipe import Recipe
from toolkit.recipe.schema import ColumnsSection, SourceSection
from toolkit.sharding.offload import host
from toolkit.suggest.draft import Draft
from toolkit.suggest.methods import METHODS, SPEC_OF, method_of
from toolkit.suggest.suggestion import Machine, suggest

TABLES = cases(__file__)

TEXTS = make_texts(120)
ROWS: dict[str, list[dict[str, Any]]] = {
    "text": [{"text": text} for text in TEXTS],
    "chat": [
        {"messages": [{"role": "user", "content": text[:9]}, {"role": "assistant", "content": text[9:40]}]}
        for text in TEXTS
    ],
    "pairs": [{"prompt": text[:9], "chosen": text[9:30], "rejected": text[:20] + " b"} for text in TEXTS],
    "mixed": [  # a third of them are longer than the model's positions
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "ab" if number % 3 else text}]}
        for number, text in enumerate(TEXTS)
    ],
    "asked": [{"prompt": text[:9], "answer": text[9:14]} for text in TEXTS],
    "sums": [{"prompt": text[:9], "answer": f"{number:,}.5"} for number, text in enumerate(TEXTS)],
    "labels": [{"text": text[:40], "label": "ab"[number % 2]} for number, text in enumerate(TEXTS)],
    "summaries": [{"article": text, "highlights": text[: 5 + number % 9]} for number, text in enumerate(TEXTS)],
    "names": [{"tokens": text.split()[:9], "ner_tags": ["O", "B-X", "O"] * 3} for text in TEXTS if text.count(" ") > 8],
    "strange": [{"body": text, "stars": 3} for text in TEXTS],
    "book": [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": " ".join(TEXTS * 2)[:45_000]}]}
    ]
    * 8,
    "long": [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": " ".join(texts)}]}
        for texts in ([TEXTS[0][:20]], TEXTS[1:20], TEXTS[20:30])
    ],
}


def save_t5(folder: Path) -> None:
    """Of a T5 what `toolkit init` reads: its configuration, and the other model's tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "t5")
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}
    T5Config(vocab_size=len(tokenizer), architectures=["T5ForConditionalGeneration"], **sizes).save_pretrained(
        folder / "t5"
    )


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model, one without, and files of rows."""
    folder = tmp_path_factory.mktemp("init")
    save_llama(folder / "model", TEXTS, tied=True, layers=1)
    save_t5(folder)
    (folder / "empty").mkdir()
    (folder / "semicolons.csv").write_text("prompt;completion\na;b\n", encoding="utf-8")
    for name, rows in ROWS.items():
        write_rows(folder / f"{name}.jsonl", rows)
    return folder


@pytest.fixture(autouse=True)
def there(place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(place)
    monkeypatch.setenv("XDG_CACHE_HOME", str(place / "cache"))
    yield
    for recipe in place.glob("*.yaml"):
        recipe.unlink()


def init(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["init", *arguments], catch_exceptions=True)


def written(name: str, *arguments: str) -> dict[str, Any]:
    result = init("model", f"{name}.jsonl", "--cpu", "2", *arguments)
    assert result.exit_code == 0, (result.output, result.exception)
    found: dict[str, Any] = yaml.safe_load(Path(f"{name}.yaml").read_text(encoding="utf-8"))
    return found


@pytest.mark.parametrize(("name", "method", "objective", "loss", "adapter", "rate"), TABLES["METHODS"])
def test_the_rows_decide_the_method(
    name: str, method: str | None, objective: str | None, loss: str | None, adapter: str | None, rate: float
) -> None:
    Path(f"{name}.yaml").write_text("description: old\n", encoding="utf-8")
    recipe = written(name, "--force", *(["--method", method] if method is not None else []))
    assert "description" not in recipe
    assert recipe.get("objective", {}).get("kind") == objective
    assert recipe.get("objective", {}).get("loss") == loss
    assert recipe.get("adapter", {}).get("kind") == adapter
    assert recipe.get("adapter", {}).get("quantize") == ("nf4" if method == "qlora" else None)
    assert recipe["optimizer"]["learning_rate"] == rate
    assert Recipe.load(f"{name}.yaml").training.output_dir == f"outputs/{name}"
    if method is None:
        validated = CliRunner().invoke(app, ["validate", f"{name}.yaml"])
        assert validated.exit_code == 0, validated.output


@pytest.mark.slow
def test_prompts_with_answers_are_learned_from_samples() -> None:
    """The reward compares as the answers suggest, a completion has room for twice the longest, a step whole groups."""
    recipe = written("asked", "--method", "grpo")
    tokenizer = AutoTokenizer.from_pretrained("model")
    longest = max(len(tokenizer(row["answer"])["input_ids"]) + 1 for row in ROWS["asked"])
    new = -(-2 * longest // 16) * 16
    assert recipe["objective"] == {
        "kind": "grpo",
        "rewards": [{"name": "right", "compare": "text"}],
        "group_size": 8,
        "max_new_tokens": new,
    }
    prompts = max(len(tokenizer(row["prompt"])["input_ids"]) for row in ROWS["asked"])
    assert recipe["data"]["max_length"] == -(-(prompts + new) // 64) * 64
    assert "validation_fraction" not in recipe["data"]
    training = recipe["training"]
    # 8 prompts a step, as docs/online.md advises; 120 prompts are 15 steps, so 7 epochs are a hundred.
    assert 2 * training["micro_batch_size"] * training["gradient_accumulation_steps"] == 64
    assert training["num_epochs"] == 7
    assert "my_rewards.py:score" in Path("asked.yaml").read_text(encoding="utf-8"), "functions reward as well"
    assert Recipe.load("asked.yaml").objective.completions_per_prompt == 8
    assert CliRunner().invoke(app, ["validate", "asked.yaml"]).exit_code == 0

    of_numbers = written("sums", "--method", "grpo")
    assert of_numbers["objective"]["rewards"][0]["compare"] == "numeric"
    assert of_numbers["objective"]["max_new_tokens"] < 256, "what the model's positions leave"
    assert of_numbers["data"]["max_length"] == AutoConfig.from_pretrained("model").max_position_embeddings

    write_rows(Path("calls.jsonl"), ({**row, "answer": '{"n": 1}'} for row in ROWS["asked"]))
    assert written("calls", "--method", "grpo")["objective"]["rewards"] == [{"name": "right", "compare": "structured"}]

    refused = init("model", "text.jsonl", "--cpu", "2", "--method", "grpo")
    assert refused.exit_code != 0
    lacking = Path("lacking.jsonl")
    write_rows(lacking, ({"prompt": row["prompt"]} for row in ROWS["asked"]))
    told = init("model", "lacking.jsonl", "--cpu", "2", "--method", "grpo")
    assert isinstance(told.exception, BadInputError)
    assert "lacking.jsonl:1 and 119 more: no answer to compare completions with" in str(told.exception)
    own = written("lacking", "--method", "grpo", "objective.rewards=[{name: mine, match: a}]")
    assert own["objective"]["rewards"] == [{"name": "mine", "match": "a"}]
    lacking.unlink()


def test_lora_takes_answers_text_and_pairs() -> None:
    found = {}
    for name in ("chat", "text", "pairs"):
        source = open_source(SourceSection(path=f"{name}.jsonl"), "data.train")
        found[name] = method_of("lora", source, ColumnsSection())[0]
    assert [found[name].name for name in found] == ["lora", "lora", "lora-dpo"]
    assert (SPEC_OF[found["pairs"].name].kind, found["pairs"].loss, found["pairs"].adapter) == (
        "preference",
        "dpo",
        True,
    )
    assert METHODS["simpo"].loss == "simpo"
    source = open_source(SourceSection(path="pairs.jsonl"), "data.train")
    assert method_of("qlora", source, ColumnsSection())[0].name == "qlora-dpo"


def test_prompts_of_pairs_under_another_usual_name_are_named() -> None:
    rows = [{"system": "", "question": text[:9], "chosen": text[9:30], "rejected": "b"} for text in TEXTS]
    write_rows(Path("orca.jsonl"), rows)
    assert written("orca")["data"]["columns"] == {"prompt": "question"}


def test_an_encoder_decoder_learns_targets_from_sources(place: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(place / "t5")
    prefix, rows = "shorter: ", ROWS["summaries"]
    sources, targets = (
        sorted(len(tokenizer(text)["input_ids"]) + more for text in texts)
        for texts, more in (([prefix + row["article"] for row in rows], 0), ([row["highlights"] for row in rows], 1))
    )
    given = [f"data.source_prefix={prefix!r}", "training.output_dir=out"]
    found = suggest("t5", "summaries.jsonl", Machine(hardware_of("cpu"), 1), overrides=given)
    recipe = found.recipe
    assert (found.method.name, recipe.objective.kind, recipe.optimizer.learning_rate) == ("seq2seq", "seq2seq", 1e-4)
    # 99 % of 120 rows are 119: the second longest.
    assert recipe.data.max_length == -(-sources[-2] // 64) * 64
    assert recipe.data.max_target_length == -(-targets[-2] // 16) * 16
    assert f"99% of the targets have at most {targets[-2]} tokens." in found.text()
    assert found.commands("x.yaml")[2] == shlex.join(
        ["toolkit", "generate", "out", "--prompt", f"{prefix}{' '.join(TEXTS[0].split()[:8])}"]
    )
    Path("summaries.yaml").write_text(found.text(), encoding="utf-8")
    again = Recipe.load("summaries.yaml")
    assert (again.objective, again.optimizer) == (recipe.objective, recipe.optimizer)
    source = open_source(SourceSection(path="labels.jsonl"), "data.train")
    assert method_of(None, source, ColumnsSection(), encoder_decoder=True)[0].name == "classify"
    with pytest.raises(ToolkitError, match=r"Add the columns that are missing"):
        suggest("t5", "text.jsonl", Machine(hardware_of("cpu"), 1))


def test_lengths_steps_and_held_out_rows_follow_from_the_data(place: Path) -> None:
    recipe = written("chat", "--json")
    tokenizer = AutoTokenizer.from_pretrained(place / "model")
    lengths = []
    for row in ROWS["chat"]:
        asked, answer = (message["content"] for message in row["messages"])
        text = f"### Instruction:\n{asked}\n\n### Response:\n{answer}{tokenizer.eos_token}\n\n"
        lengths.append(len(tokenizer(text, add_special_tokens=False)["input_ids"]))
    assert recipe["data"]["chat_template"] == "alpaca", "the vocabulary has no <|im_start|>"
    # 99 % of 120 rows are 119: the second longest. The model has 64 positions.
    assert recipe["data"]["max_length"] == min(64, -(-sorted(lengths)[-2] // 64) * 64)
    assert recipe["data"]["packing"] is None, "packed where the model keeps rows apart"
    assert recipe["data"]["validation_fraction"] == 0.1
    rooms: list[int] = []  # of samples; a row goes where the least is left over
    for length in sorted((length for length in lengths if length <= 64), reverse=True):
        room = min((room for room in rooms if room >= length), default=64)
        if room in rooms:
            rooms.remove(room)
        rooms.append(room - length)
    steps = -(-round(2 * round(len(rooms) * 0.9)) // 2)  # two epochs, two ranks of one sample
    assert recipe["training"]["micro_batch_size"] * recipe["training"]["gradient_accumulation_steps"] == 1
    assert recipe["training"]["eval_every_steps"] == recipe["checkpoint"]["every_steps"] == steps // 5
    longer = sum(length > 64 for length in lengths)
    assert recipe["data"].get("long_rows") == ("drop" if longer else None)
    comments = Path("chat.yaml").read_text(encoding="utf-8")
    assert f"99% of the 120 rows have at most {sorted(lengths)[-2]} tokens." in comments.replace("\n  # ", " ")


def test_answers_are_learned_one_by_one_where_the_template_drops_earlier_thoughts(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained("model")
    tokenizer.chat_template = QWEN_3.template.replace("<|im_end|>", "<|endoftext|>")  # which the vocabulary has
    save_llama(tmp_path, TEXTS, tied=True, layers=1)
    tokenizer.save_pretrained(tmp_path)
    answers = [f"<think>\n{text[:5]}\n</think>\n\n{text[5:9]}" for text in TEXTS[:2]]
    turns = [m for a in answers for m in ({"role": "user", "content": "a"}, {"role": "assistant", "content": a})]
    for name, rows in {"twice": [turns] * 2, "once": [turns[:2]] * 2}.items():
        lines = [json.dumps({"messages": row}) for row in rows for _ in range(20)]
        Path(f"{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    config = json.loads((tmp_path / "config.json").read_text()) | {"max_position_embeddings": 512}
    (tmp_path / "config.json").write_text(json.dumps(config))
    machine = Machine(hardware_of("cpu"), 2)
    found = {name: suggest(str(tmp_path), f"{name}.jsonl", machine, overrides=[]) for name in ("twice", "once")}
    assert (found["twice"].recipe.data.targets, found["once"].recipe.data.targets) == (None, None)
    assert [len(found[name].rows.lengths) for name in ("twice", "once")] == [80, 40], "samples"


def test_what_is_given_stays_and_replaces_its_rival_and_long_rows_are_told() -> None:
    given = ["data.chat_template=alpaca", "training.max_steps=2", "sharding.strategy=ddp", "optimizer.learning_rate=1"]
    found = suggest("model", "mixed.jsonl", Machine(hardware_of("cpu"), 2), overrides=given)
    recipe = found.recipe
    assert (recipe.training.max_steps, recipe.training.num_epochs, found.num_steps) == (2, None, 2)
    assert (recipe.sharding.strategy, recipe.data.chat_template) == ("ddp", "alpaca")
    assert (recipe.data.max_length, recipe.data.long_rows) == (64, "drop"), "the model's positions"
    assert found.reasons["data.max_length"].endswith("The model has 64 positions.")
    longer = found.rows.longer_than(64)
    assert 1 < longer < 60
    assert found.reasons["data.long_rows"] == f"{longer} of 120 rows are longer and are left out."
    assert found.reasons["sharding.strategy"] == "Given on the command line."


def test_a_processor_with_instructions_for_bf16_gets_bf16() -> None:
    found = {
        has: suggest(
            "model", "text.jsonl", Machine(hardware_of("cpu"), 2, has_bf16=has)
        ).recipe.training.mixed_precision
        for has in (True, False)
    }
    assert found == {True: "bf16", False: None}


def test_the_commands_name_what_was_written_and_the_recipe_plans(place: Path) -> None:
    mine = "rtx4090"
    result = init("model", "text.jsonl", "--gpus", "2", "--hardware", mine, "--to", "new/mine.yaml", "--json")
    told = json.loads(result.stdout)
    plan, train, generate = (shlex.split(command) for command in told["commands"])
    assert plan == ["toolkit", "plan", "new/mine.yaml", "--gpus", "2", "--hardware", mine]
    assert train == ["toolkit", "train", "new/mine.yaml", "--gpus", "2"]
    assert generate[:3] == ["toolkit", "generate", "outputs/text"]
    assert generate[3:] == ["--prompt", " ".join(TEXTS[0].split()[:8])]
    recipe = Recipe.load("new/mine.yaml")
    assert recipe.data.train[0].path == str(place / "text.jsonl"), "paths in a recipe are relative to it"
    assert yaml.safe_load(Path("new/mine.yaml").read_text(encoding="utf-8")) == told["recipe"]
    assert recipe.training.mixed_precision == "bf16"
    planned = CliRunner().invoke(app, [*plan[1:], "--json"])
    assert planned.exit_code == 0, planned.output
    assert json.loads(planned.stdout)["asked"]["verdict"] == "fits"


def save_sized(name: str, **sizes: Any) -> None:
    """A model of other sizes with the same tokenizer; `toolkit init` needs no weights."""
    config = json.loads(Path("model/config.json").read_text(encoding="utf-8"))
    folder = Path(name)
    folder.mkdir(exist_ok=True)
    for file in Path("model").glob("tokenizer*"):
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "config.json").write_text(json.dumps(config | sizes), encoding="utf-8")


@pytest.mark.slow
def test_adapters_are_chosen_where_nothing_else_fits() -> None:
    # 29 million parameters: 0.4 GiB of state on the device, or 0.3 on the host; frozen, in 16 bits, 0.06.
    wide = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 2, "head_dim": 256}
    save_sized("wide", **wide)
    machine = Machine(hardware_of("rtx4090", device_memory_gib=2.3, host_memory_gib=0.2), 1)
    found = suggest("wide", "chat.jsonl", machine)
    assert found.method.name == "lora"
    assert found.recipe.model.dtype == "bfloat16"
    assert "adapters fit" in found.reasons["adapter.kind"]
    smaller = Machine(hardware_of("rtx4090", device_memory_gib=2.05, host_memory_gib=0.2), 1)
    found = suggest("wide", "chat.jsonl", smaller)
    assert found.method.name == "qlora"
    assert (found.recipe.adapter.quantize, found.recipe.adapter.double_quantization) == ("nf4", True)
    assert found.reasons["adapter.quantize"] == "LoRA over a base in 16 bits needs more than 1 x rtx4090."
    with pytest.raises(BadInputError, match=r"method lora does not fit 1 x .* try --method qlora"):
        suggest("wide", "chat.jsonl", smaller, method="lora")
    none = Machine(hardware_of("cpu", device_memory_gib=0.25), 1)  # less than Python takes
    with pytest.raises(BadInputError, match=r"method full does not fit 1 x cpu of 0 GiB .* try --method lora"):
        suggest("model", "chat.jsonl", none, method="full")


BAD_INPUT = TABLES["BAD_INPUT"]


def test_bad_input_is_one_clear_error() -> None:
    Path("there.yaml").write_text("description: mine\n", encoding="utf-8")
    for arguments, told in BAD_INPUT:
        result = init(*arguments, "--cpu", "2")
        assert isinstance(result.exception, ToolkitError), (result.output, result.exception)
        assert result.exception.exit_code == 2
        assert told in str(result.exception)
        assert not Path("chat.yaml").exists()
    assert Path("there.yaml").read_text(encoding="utf-8") == "description: mine\n"


def test_long_rows_are_cut_if_the_recipe_is_to_say_so() -> None:
    found = suggest("model", "long.jsonl", Machine(hardware_of("cpu"), 1), overrides=["data.long_rows=truncate"])
    assert (found.recipe.data.long_rows, found.recipe.data.max_length) == ("truncate", 64)


@pytest.mark.parametrize("given", [[], ["checkpoint.every_minutes=never"]])
@pytest.mark.parametrize("hardware", ["cpu", "h100_sxm"])
def test_the_plan_of_the_recipe_that_was_written_needs_what_was_told(hardware: str, given: list[str]) -> None:
    machine = Machine(hardware_of(hardware), 2)
    found = suggest("model", "chat.jsonl", machine, overrides=given)
    assert found.recipe.checkpoint.every_steps is not None, "set when the steps are known, after the plan"
    asked = plan(found.recipe, machine.hardware, 2).asked
    assert (found.row.need, found.row.host_bytes) == (asked.need, asked.host_bytes)
    assert (asked.host_bytes > 0) == (hardware == "h100_sxm"), "a save copies the state to the host"


HARDWARE = TABLES["HARDWARE"]
ON_HARDWARE = [("model", "many", "2 x cpu"), ("model", "many", "1 x rtx4090"), ("large", "chat", "1 x rtx4090")]
ALL_ON_HARDWARE = [
    (model, rows, machine)
    for model, rows in (
        *(("model", rows) for rows in ("many", "chat", "pairs", "labels", "text")),
        *(("large", rows) for rows in ("many", "text", "pairs")),
    )
    for machine in HARDWARE
]


@pytest.mark.slow
@pytest.mark.parametrize("cases", [ON_HARDWARE, pytest.param(ALL_ON_HARDWARE, marks=pytest.mark.grid)])
def test_what_init_writes_is_what_the_plan_of_it_recommends(cases: list[tuple[str, str, str]]) -> None:
    """Also where the plan has other micro-batches than the draft, and where offload or groups would be as fast."""
    save_sized("large", hidden_size=8192, intermediate_size=28672, num_hidden_layers=2, head_dim=64)
    Path("many.jsonl").write_text(Path("chat.jsonl").read_text(encoding="utf-8") * 8, encoding="utf-8")
    wrong, offloaded = [], set()
    for model, rows, name in cases:
        preset, count, changes = HARDWARE[name]
        machine = Machine(hardware_of(preset, **changes), count)  # type: ignore[arg-type]
        found = suggest(model, f"{rows}.jsonl", machine)
        planned = plan(found.recipe, machine.hardware, count, with_levers=False)
        assert planned.recommended is not None
        if not planned.asked.setup == planned.recommended.setup == found.row.setup:
            wrong.append((model, rows, name, found.row.setup, planned.recommended.setup))
        offloaded |= {(model, name)} if found.row.setup.offload else set()
    assert wrong == []
    assert offloaded == {("large", "1 x rtx4090")}, "nowhere else is memory short"


@pytest.mark.slow
def test_ranks_that_share_a_row_are_written_if_nothing_else_fits(place: Path) -> None:
    save_sized("positions", max_position_embeddings=16384)
    machine = Machine(hardware_of("h100_sxm", device_memory_gib=2.6), 2)
    found = suggest("positions", "book.jsonl", machine, overrides=["sharding.offload=none"])
    assert found.recipe.sharding.sequence == 2
    assert "So many ranks share a row" in found.reasons["sharding.sequence"]
    planned = plan(found.recipe, machine.hardware, 2, with_levers=False)
    assert planned.asked.verdict == "fits"


def test_cpu_ranks_share_the_memory_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "host_bytes", lambda: 24 * GIB)
    result = init("model", "chat.jsonl", "--cpu", "3")
    assert "3 x cpu: " in result.output
    assert " of 8 GiB needed" in result.output
    planned = CliRunner().invoke(app, ["plan", "chat.yaml", "--cpu", "3"])
    assert "3 x cpu, 8 GiB each" in planned.output


def test_every_method_has_a_rate_for_every_size_and_a_source() -> None:
    for method in METHODS.values():
        limits = [rate.up_to for rate in method.rates]
        assert limits == sorted(limits)
        assert limits[-1] == np.inf
        assert all(rate.source for rate in method.rates)
        values = [method.rate(int(size)).value for size in (2e7, 1e8, 8e9, 3e10, 7e10)]
        assert values == sorted(values, reverse=True), "larger models learn at lower rates"


def test_a_small_encoder_learns_at_a_higher_rate() -> None:
    """MiniLM, the largest of the small and the next, BERT, and 1.1B."""
    rates = {22_713_986: 1e-4, 50_000_000: 1e-4, 50_000_001: 2e-5, 109_483_778: 2e-5, 1_100_000_000: 1e-5}
    for name in ("classify", "tag"):
        assert {size: METHODS[name].rate(size).value for size in rates} == rates, name


def test_a_draft_writes_what_it_holds() -> None:
    draft = Draft(["data.columns={text: body}", "training.max_steps=3"])
    draft.set("data.train", ["a: b.txt", "c.txt"], "Two files.")
    draft.set("data.max_length", 8, "long\u2028or: \x85" * 30)
    draft.set("training.num_epochs", 2)
    text = draft.text(["Head."])
    assert yaml.safe_load(text) == {
        "data": {"train": ["a: b.txt", "c.txt"], "max_length": 8, "columns": {"text": "body"}},
        "training": {"max_steps": 3},
    }
    assert text.startswith("# Head.\n")
    assert max(map(len, text.splitlines())) <= 100

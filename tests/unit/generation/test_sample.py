"""`toolkit sample`: what is drawn, how it is scored, what rows come of it, and how it goes on."""

from __future__ import annotations

import hashlib
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cases import cases
from support.unsure import QUESTIONS, save_unsure
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from toolkit.cli.app import main
from toolkit.errors import BadInputError
from toolkit.generation.sampling import sampling
from toolkit.generation.sampling.sample_options import SampleOptions
from toolkit.generation.sampling.sampled_rows import PromptForm, write_rows
from toolkit.generation.sampling.samples import Sample
from toolkit.generation.text.draws import Drawn
from toolkit.generation.text.rows import PromptRow

TABLES = cases(__file__)

SAMPLES, SEED, TEMPERATURE, TOP_P, TOKENS = 6, 3, 1.5, 0.9, 12
FILES = ("sft", "pairs", "labels")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_unsure(tmp_path_factory.mktemp("unsure")).parent


def options(folder: Path, to: Path, **others: Any) -> SampleOptions:
    told = {"samples": SAMPLES, "seed": SEED, "temperature": TEMPERATURE, "top_p": TOP_P, "max_new_tokens": TOKENS}
    return SampleOptions(str(folder / "model"), folder / "questions.jsonl", to, **(told | others))


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def whole(folder: Path) -> Path:
    """What one call leaves."""
    sampling.sample(options(folder, folder / "whole"))
    return folder / "whole"


def by_hand(model: Any, tokenizer: Any, question: str, row: int, k: int) -> tuple[str, int, bool]:
    """A completion token by token, without a cache; its length, and whether it stops."""
    digest = hashlib.sha256(f"{SEED} {row} {k}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") // 2)
    ids = tokenizer(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n")["input_ids"]
    ends = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    found: list[int] = []
    while len(found) < TOKENS:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids + found])).logits[0, -1] / TEMPERATURE
        likely = logits.softmax(0).sort(descending=True)
        # A token stays as long as those before it have less than top-p.
        kept = likely.indices[likely.values.cumsum(0) - likely.values < TOP_P]
        noise = -torch.empty(len(logits)).exponential_(generator=generator).log()
        token = int(kept[(logits + noise)[kept].argmax()])
        if token in ends:
            return tokenizer.decode(found), len(found), True
        found.append(token)
    return tokenizer.decode(found), len(found), False


def test_samples_are_those_of_a_plain_loop(folder: Path, whole: Path) -> None:
    questions = ["Who sang?", "Where does the king walk?", "What of?", "And then?", "Who sang?"]
    found = [(s["row"], s["k"], s["completion"], s["tokens"], s["stopped"]) for s in rows(whole / "samples.jsonl")]
    plain = (
        AutoModelForCausalLM.from_pretrained(folder / "model").eval(),
        AutoTokenizer.from_pretrained(folder / "model"),
    )
    for sample in found:
        row, k, *_ = sample
        assert sample == (row, k, *by_hand(*plain, questions[row], row, k))
    assert [sample[:2] for sample in found] == [(row, k) for row in range(5) for k in range(SAMPLES)]
    assert len({text for *_, text, _, _ in found}) > 8
    assert any(stopped for *_, stopped in found)
    assert not all(stopped for *_, stopped in found), "so that some are left out"


def test_noise_draws_from_the_softmax() -> None:
    logits = torch.tensor([1.0, 0.0, 2.0, -float("inf"), 0.5])
    drawn = Drawn(range(4000), torch.device("cpu"))(torch.zeros(4000, 1), logits.expand(4000, -1)).argmax(-1)
    shares = torch.tensor([Counter(drawn.tolist())[token] / 4000 for token in range(5)])
    assert torch.allclose(shares, logits.softmax(0), atol=0.03)


def test_answers_are_scored_and_become_rows(whole: Path) -> None:
    samples = rows(whole / "samples.jsonl")
    right = [{"a fox"}, {"by the river", "in the wood"}, {"bread and wine"}, {"the end"}, {"the moon"}]
    sft, pairs, labels = [], [], []
    for row, question in enumerate(QUESTIONS):
        asked = question.get("messages") or [{"role": "user", "content": question["prompt"]}]
        own = [sample for sample in samples if sample["row"] == row]
        assert [s["score"] for s in own] == [
            float(" ".join(s["completion"].lower().split()) in right[row]) for s in own
        ]
        usable = [s for s in own if s["stopped"] and s["completion"].strip()]
        good, bad = ([s for s in usable if s["score"] == score] for score in (1, 0))
        answers = [[{"role": "assistant", "content": s["completion"]}] for s in (*good[:1], *bad[:1])]
        if good:
            sft.append({"prompt": asked, "completion": answers[0]})
        if good and bad:
            pairs.append({"prompt": asked, "chosen": answers[0], "rejected": answers[1]})
        labels += [
            {"prompt": asked, "completion": [{"role": "assistant", "content": s["completion"]}]}
            | {"label": s["score"] == 1}
            for s in usable
        ]
    assert [rows(whole / f"{name}.jsonl") for name in FILES] == [sft, pairs, labels]
    assert len(pairs) > 1


@pytest.mark.parametrize("batch_size", [1, 4, 64])
def test_batches_do_not_matter(folder: Path, whole: Path, tmp_path: Path, batch_size: int) -> None:
    sampling.sample(options(folder, tmp_path, batch_size=batch_size))
    for name in ("samples", *FILES):
        assert (tmp_path / f"{name}.jsonl").read_text() == (whole / f"{name}.jsonl").read_text()


@pytest.mark.parametrize("kept", [0, 7, 12.4, 30])
def test_it_goes_on_where_it_stopped(
    folder: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: float
) -> None:
    lines = (whole / "samples.jsonl").read_text().splitlines(keepends=True)
    torn = lines[int(kept)][: int(kept % 1 * 50)] if kept < len(lines) else ""
    (tmp_path / "samples.jsonl").write_text("".join(lines[: int(kept)]) + torn)
    (tmp_path / "sampling.json").write_text((whole / "sampling.json").read_text())
    asked = []
    complete = sampling.completions
    monkeypatch.setattr(sampling, "completions", lambda *args: asked.extend(args[1]) or complete(*args))
    sampling.sample(options(folder, tmp_path))
    assert len(asked) == len(lines) - int(kept) // SAMPLES * SAMPLES, "whole rows are kept"
    assert (tmp_path / "samples.jsonl").read_text() == "".join(lines)


def test_more_prompts_may_come_and_scores_may_change(folder: Path, whole: Path, tmp_path: Path) -> None:
    for file in whole.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    more = tmp_path / "more.jsonl"
    more.write_text((folder / "questions.jsonl").read_text() + '{"prompt": "What of?", "answer": "wine"}\n')
    told = options(folder, tmp_path, compare="text=wine")
    found = sampling.sample(SampleOptions(**{**vars(told), "prompts": more}))
    assert found.num_samples == 6 * SAMPLES
    samples = rows(tmp_path / "samples.jsonl")
    assert [s["completion"] for s in samples[:-SAMPLES]] == [s["completion"] for s in rows(whole / "samples.jsonl")]
    assert {s["score"] for s in samples if "wine" in s["completion"] and s["row"] in (2, 5)} == {1.0}


@pytest.mark.parametrize(("changed", "message"), TABLES["OTHERS"])
def test_another_setting_is_refused(
    folder: Path, whole: Path, tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    model.lm_head.weight.data[0, 0] += 1.0
    model.save_pretrained(folder / "other")
    before = (whole / "samples.jsonl").read_bytes()
    changed = {name: str(folder / value) if name == "source" else value for name, value in changed.items()}
    with pytest.raises(BadInputError, match=message):
        sampling.sample(SampleOptions(**{**vars(options(folder, whole)), **changed}))
    assert (whole / "samples.jsonl").read_bytes() == before


def test_other_prompts_and_odd_files_are_refused(folder: Path, whole: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in reversed(QUESTIONS)))
    with pytest.raises(
        BadInputError, match=r"samples.jsonl:7: the sample belongs to another prompt than .*prompts.jsonl:2"
    ):
        sampling.sample(SampleOptions(**{**vars(options(folder, whole)), "prompts": prompts}))
    (tmp_path / "samples.jsonl").write_text("{}\n")
    with pytest.raises(BadInputError, match=r"holds prompts.jsonl and no sampling.json, so"):
        sampling.sample(options(folder, tmp_path))
    (tmp_path / "sampling.json").write_text((whole / "sampling.json").read_text())
    with pytest.raises(BadInputError, match=r"samples.jsonl:1: no sample"):
        sampling.sample(options(folder, tmp_path))


def test_files_of_others_are_not_replaced(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "sft.jsonl").write_text("mine")
    with pytest.raises(BadInputError, match=r"holds sft.jsonl and no sampling.json, so"):
        sampling.sample(options(folder, tmp_path))
    assert (tmp_path / "sft.jsonl").read_text() == "mine"


def drawn(*scores: float, cut: tuple[int, ...] = ()) -> list[Sample]:
    return [Sample(0, k, "q", f" a{k}", 2, k not in cut, score) for k, score in enumerate(scores)]


@pytest.mark.parametrize(
    ("samples", "by_reward", "best", "pair", "labels"),
    [
        (drawn(0, 1, 1, 0), False, 1, (1, 0), [0, 1, 1, 0]),
        (drawn(0, 1, 1, 0, cut=(0, 1)), False, 2, (2, 3), [None, None, 1, 0]),
        (drawn(0, 0), False, None, None, [0, 0]),
        (drawn(1, 1), False, 0, None, [1, 1]),
        (drawn(-2.0, 3.0, 0.5), True, 1, (1, 0), [0, 1, 0]),
        (drawn(2.0, 2.0), True, 0, None, []),
        (drawn(2.0, 3.0, cut=(0, 1)), True, None, None, []),
    ],
)
def test_rows_of_scores(
    tmp_path: Path,
    samples: list[Sample],
    by_reward: bool,
    best: int | None,
    pair: tuple[int, int] | None,
    labels: list[int | None],
) -> None:
    for name in FILES:
        (tmp_path / f"{name}.jsonl").write_text("of an earlier call\n")
    found = write_rows(tmp_path, [PromptRow("x:1", "q", "q")], samples, PromptForm(False), by_reward)
    kept = {
        f"{name}.jsonl": rows(tmp_path / f"{name}.jsonl") for name in FILES if (tmp_path / f"{name}.jsonl").exists()
    }
    wanted: dict[str, list[dict[str, Any]]] = {
        "sft.jsonl": [] if best is None else [{"prompt": "q", "completion": f" a{best}"}],
        "pairs.jsonl": [] if pair is None else [{"prompt": "q", "chosen": f" a{pair[0]}", "rejected": f" a{pair[1]}"}],
        "labels.jsonl": [
            {"prompt": "q", "completion": f" a{k}", "label": bool(label)}
            for k, label in enumerate(labels)
            if label is not None
        ],
    }
    assert kept == {name: lines for name, lines in wanted.items() if lines}, "a file without rows is removed"
    assert found.rows == {name: len(lines) for name, lines in wanted.items()}
    assert found.left_out == sum(not sample.stopped for sample in samples)


def test_a_system_text_and_tools_stay_with_their_prompt() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    row = PromptRow("x:1", "q", "q", tools, {"enable_thinking": False})
    assert PromptForm(True, "Be brief.").row(row, completion="a") == {
        "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "q"}],
        "completion": [{"role": "assistant", "content": "a"}],
        "tools": tools,
        "chat_template_kwargs": {"enable_thinking": False},
    }


def test_a_reward_model_scores(folder: Path, whole: Path, tmp_path: Path) -> None:
    torch.manual_seed(5)
    judge = AutoModelForSequenceClassification.from_pretrained(folder / "model", num_labels=1)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    judge.config.pad_token_id = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    for where in (judge, tokenizer):
        where.save_pretrained(folder / "judge")
    for file in whole.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    found = sampling.sample(options(folder, tmp_path, reward=str(folder / "judge")))
    questions = ["Who sang?", "Where does the king walk?", "What of?", "And then?", "Who sang?"]
    samples = rows(tmp_path / "samples.jsonl")
    for sample, before in zip(samples, rows(whole / "samples.jsonl"), strict=True):
        assert sample["completion"] == before["completion"], "it is not sampled again"
        if not sample["completion"].strip():
            assert sample["score"] is None
            continue
        turns = f"<|im_start|>user\n{questions[sample['row']]}<|im_end|>\n<|im_start|>assistant\n{sample['completion']}"
        ids = tokenizer(f"{turns}<|im_end|>\n")["input_ids"]
        with torch.no_grad():
            assert sample["score"] == pytest.approx(judge(input_ids=torch.tensor([ids])).logits.item(), abs=1e-5)
    usable = [s for s in samples if s["row"] == 0 and s["stopped"] and s["completion"].strip()]
    best = max(usable, key=lambda s: s["score"])["completion"]
    assert rows(tmp_path / "sft.jsonl")[0]["completion"][0]["content"] == best
    assert found.by_reward
    with pytest.raises(BadInputError, match=r"--reward: .*model' .LlamaForCausalLM. is not a reward model"):
        sampling.sample(options(folder, tmp_path, reward=str(folder / "model")))


def command(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["toolkit", "sample", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def test_the_command(
    folder: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    what = (folder / "model", folder / "questions.jsonl", "--to", tmp_path, "--cpu", 1)
    drawn = ("-n", SAMPLES, "--seed", SEED, "--temperature", TEMPERATURE, "--top-p", TOP_P, "--max-new-tokens", TOKENS)
    assert command(monkeypatch, *what, *drawn) == 0
    told = capsys.readouterr().out
    samples = rows(whole / "samples.jsonl")
    right = sum(sample["score"] for sample in samples) / len(samples)
    assert f"samples.jsonl: 30 samples of 5 prompts\nright: {right:.1%} of the samples; 80.0% of the prompts" in told
    assert (tmp_path / "samples.jsonl").read_text() == (whole / "samples.jsonl").read_text()
    assert command(monkeypatch, *what, *drawn, "--json") == 0
    assert json.loads(capsys.readouterr().out)["rows"]["sft.jsonl"] == len(rows(whole / "sft.jsonl"))


@pytest.mark.parametrize(("arguments", "message"), TABLES["BAD_OPTIONS"])
def test_bad_options(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: str,
    message: list[str],
) -> None:
    to = tmp_path / "new"
    assert command(monkeypatch, folder / "model", folder / "questions.jsonl", "--to", to, *arguments.split()) == 2
    told = capsys.readouterr().err
    assert all(each in told for each in message)
    assert not to.exists()

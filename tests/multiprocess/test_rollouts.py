"""Learning from one's own samples is a plain loop that samples token by token, on any ranks and under any strategy."""

from __future__ import annotations

import copy
import hashlib
import json
import math
import os
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.cases import cases
from support.four_bits import as_dequantised
from support.peft_by_hand import adapted
from support.ranks import run_on_ranks
from support.runs import finetuned
from support.texts import make_texts, write_rows
from support.tiny import recipe_values, save_llama
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, GenerationConfig

STEPS, GROUP, PER_STEP, MAX_NEW_TOKENS, SEED = 3, 4, 12, 6, 3
WANTED = "e"
STOPS = set(range(150, 220))  # more than the end of a text, so that some completions end and others are cut
PROMPTS = [{"prompt": " ".join(text.split()[: 2 + i % 3]), "id": i} for i, text in enumerate(make_texts(10, seed=5))]
SCORE = f"""
import os, signal
from pathlib import Path

calls = []


def share(completion, row):
    calls.append(row)
    armed = Path(__file__).with_name("armed")
    if armed.exists() and len(calls) > 56:  # in the fourth step of 16 completions
        armed.unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    return completion.count({WANTED!r}) / 4 + row["id"] % 2
"""
PAIRS = [{"prompt": row["prompt"], "chosen": " e", "rejected": " of a"} for row in PROMPTS]
TABLES = cases(__file__)
CASES: dict[str, dict[str, Any]] = TABLES["CASES"]


def is_cut(case: dict[str, Any]) -> bool:
    """Whether ranks can cut the matrices of a case."""
    strategy = case.get("sharding", {}).get("strategy", "zero3")
    return bool(strategy == "zero3" and "quantize" not in case.get("adapter", {}))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rollouts")
    save_llama(folder / "model", make_texts(60), tied=True)
    GenerationConfig(eos_token_id=sorted(STOPS)).save_pretrained(folder / "model")
    write_rows(folder / "prompts.jsonl", PROMPTS)
    (folder / "scores.py").write_text(SCORE)
    write_rows(folder / "pairs.jsonl", PAIRS)
    run_on_ranks(train_judge, 1, folder)
    return folder


def train_judge(folder: Path) -> None:
    """Trains the reward model."""
    from toolkit import Recipe, finetune

    training = {"max_steps": 8, "micro_batch_size": 2}
    values = recipe_values(folder / "model", folder / "pairs.jsonl", folder / "judge", folder / "cache", **training)
    finetune(Recipe.from_mapping({**values, "objective": {"kind": "reward"}}))


def judged(judge: Any, tokenizer: Any, text: str) -> float:
    """Returns the score of a prompt with its completion, and the token that ends a text."""
    ids = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
    with torch.no_grad():
        return float(judge(input_ids=torch.tensor([ids])).logits[0, 0])


def drawn(model: Any, asked: list[int], number: int, k: int, stops: set[int]) -> list[int]:
    """Samples a completion token by token, without a cache: the largest of logits plus Gumbel noise."""
    digest = hashlib.sha256(f"{SEED} {number} {k}".encode()).digest()
    noise = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    ids: list[int] = []
    while len(ids) < MAX_NEW_TOKENS and stops.isdisjoint(ids):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([asked + ids])).logits[0, -1]
        wait = torch.empty_like(logits).exponential_(generator=noise)
        ids.append(int((logits - wait.clamp_min(torch.finfo(torch.float32).tiny).log()).argmax()))
    return ids


def log_probabilities(model: Any, asked: list[int], ids: list[int]) -> torch.Tensor:
    logits = model(input_ids=torch.tensor([asked + ids])).logits[0, len(asked) - 1 : -1]
    return torch.log_softmax(logits, dim=-1).gather(1, torch.tensor(ids)[:, None])[:, 0]


def plain_run(folder: Path, case: dict[str, Any]) -> dict[str, Any]:
    """Returns the rewards, losses and weights of the run, completion by completion, as the papers write the losses."""
    torch.set_num_threads(1)
    settings = case.get("objective", {})
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    stops = STOPS | {tokenizer.eos_token_id}
    model: Any = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    if "adapter" in case:
        settings_of_peft = {name: value for name, value in case["adapter"].items() if name != "quantize"}
        if "quantize" in case["adapter"]:
            as_dequantised(model, kept=["lm_head"])
        model = adapted(model, {**settings_of_peft, "lora_alpha": 8}, SEED)
    if "judge" in case:
        judge: Any = AutoModelForSequenceClassification.from_pretrained(folder / "judge/export")
    start = copy.deepcopy(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=3e-3, weight_decay=0.0, eps=1e-4, foreach=False)
    loss_name, masked = settings.get("loss", "dapo"), settings.get("mask_truncated", False)
    found: dict[str, Any] = {"reward": [], "loss": [], "tokens": []}
    for step in range(STEPS):
        first = step * PER_STEP // GROUP
        asked, samples, rewards = [], [], []
        for number in range(first, first + PER_STEP // GROUP):
            row = PROMPTS[number % len(PROMPTS)]
            prompt = tokenizer(row["prompt"])["input_ids"]
            for k in range(GROUP):
                ids = drawn(model, prompt, number, k, stops)
                asked.append(prompt)
                samples.append(ids)
                pad = re.escape(tokenizer.pad_token)  # inside it stays, as it may be a word
                text = re.sub(rf"^({pad})+|({pad})+$", "", tokenizer.decode(ids[:-1] if ids[-1] in stops else ids))
                if "judge" in case:
                    rewards.append(judged(judge, tokenizer, row["prompt"] + text) if text.strip() else math.nan)
                else:
                    rewards.append(text.count(WANTED) / 4 + row["id"] % 2)
        worst = min(reward for reward in rewards if not math.isnan(reward))
        rewards = [worst if math.isnan(reward) else reward for reward in rewards]  # an empty text is the worst
        values = torch.tensor(rewards, dtype=torch.float64).view(-1, GROUP)
        above = values - values.mean(dim=1, keepdim=True)
        spreads = {"batch": values.std(), "none": torch.tensor(1.0 - 1e-4), "group": values.std(dim=1, keepdim=True)}
        advantages = (above / (spreads[settings.get("scale_rewards", "group")] + 1e-4)).flatten().float()
        terms, learned = [], []
        for prompt, ids, advantage in zip(asked, samples, advantages, strict=True):
            mine = log_probabilities(model, prompt, ids)
            ratio = torch.exp(mine - mine.detach())
            term = -ratio * advantage
            if beta := settings.get("beta"):
                with torch.no_grad(), start.disable_adapter() if "adapter" in case else nullcontext():
                    base = log_probabilities(start, prompt, ids)
                term = term + beta * ratio * (torch.exp(base - mine) - (base - mine) - 1)
            terms.append(term)
            learned.append(not masked or ids[-1] in stops)
        kept = [term for term, is_learned in zip(terms, learned, strict=True) if is_learned]
        if loss_name == "dapo":
            loss = sum(term.sum() for term in kept) / sum(len(term) for term in kept)
        elif loss_name == "grpo":
            loss = sum(term.mean() for term in kept) / len(terms)
        else:
            loss = sum(term.sum() for term in kept) / (len(terms) * MAX_NEW_TOKENS)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        found["reward"].append(sum(rewards) / len(rewards))
        found["loss"].append(float(loss.detach()))
        found["tokens"].append(sum(map(len, samples)) / len(samples))
    merged = model.merge_and_unload() if "adapter" in case else model
    return {**found, "weights": {name: tensor.detach() for name, tensor in merged.state_dict().items()}}


def runs(folder: Path, tensor: int = 1) -> dict[str, Any]:
    """The metrics of each case, on ranks that cut matrices in groups of `tensor`, if they can."""

    ranks = int(os.environ["WORLD_SIZE"])
    found: dict[str, Any] = {}
    for number, (name, case) in enumerate(CASES.items()):
        if tensor > 1 and not is_cut(case):
            continue
        output = folder / f"run-{number}-{ranks}-{tensor}"
        values = recipe_values(folder / "model", folder / "prompts.jsonl", output, folder / f"cache-{ranks}")
        rewards: list[dict[str, Any]] = [{"name": "share", "compare": f"{folder / 'scores.py'}:share"}]
        if "judge" in case:
            rewards = [{"name": "taste", "model": str(folder / "judge")}]
        of_samples = {
            "rewards": rewards,
            "group_size": GROUP,
            "max_new_tokens": MAX_NEW_TOKENS,
            "rollout_batch_size": 3,
        }
        values["data"] |= case.get("data", {})
        values["objective"] = {"kind": "grpo", **of_samples, **case.get("objective", {})}
        values["optimizer"] = {"learning_rate": 3e-3, "weight_decay": 0.0, "eps": 1e-4}
        values["schedule"] = {"kind": "constant"}
        values["sharding"] = {"strategy": "zero3", "tensor": tensor, **case.get("sharding", {})}
        values["adapter"] = {"kind": "lora", "alpha": 8.0, **case["adapter"]} if "adapter" in case else {}
        values["export"] = {"merge": "adapter" in case}
        values["training"] |= {"max_steps": STEPS, "seed": SEED, "micro_batch_size": 2}
        values["training"]["gradient_accumulation_steps"] = PER_STEP // 2 // (ranks // tensor)
        found[name] = finetuned(values).metrics
    return found


@pytest.fixture(scope="module")
def plain(folder: Path) -> dict[str, Any]:
    return {name: plain_run(folder, case) for name, case in CASES.items()}


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.grid), pytest.param(2, marks=pytest.mark.grid), 3])
def test_a_run_is_the_plain_loop_and_samples_the_same(folder: Path, plain: dict[str, Any], ranks: int) -> None:
    require_plain(folder, plain, run_on_ranks(runs, ranks, folder)[0], f"{ranks}-1")


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.grid)])
def test_a_run_in_tensor_groups_is_the_plain_loop(folder: Path, plain: dict[str, Any], ranks: int) -> None:
    found = run_on_ranks(runs, ranks, folder, 2)[0]
    assert len(found) >= 6
    require_plain(folder, plain, found, f"{ranks}-2")


def require_plain(folder: Path, plain: dict[str, Any], found: dict[str, Any], which: str) -> None:
    for number, (name, expected) in enumerate(plain.items()):
        if name not in found:
            continue
        steps = [record for record in found[name] if record["split"] == "train"]
        assert [step["completion_tokens"] for step in steps] == pytest.approx(expected["tokens"], abs=1e-9), name
        assert [step["reward"] for step in steps] == pytest.approx(expected["reward"], abs=1e-6), name
        assert [step["loss"] for step in steps] == pytest.approx(expected["loss"], abs=2e-6), name
        assert all(step["sampler_gap"] < 1e-5 for step in steps), name
        if "quantize" in CASES[name].get("adapter", {}):
            continue  # merged into the base as its files have it
        model = AutoModelForCausalLM.from_pretrained(folder / f"run-{number}-{which}" / "export")
        for path, tensor in model.state_dict().items():
            torch.testing.assert_close(tensor, expected["weights"][path], atol=2e-5, rtol=1e-4, msg=f"{name}: {path}")


def values_of(folder: Path, output: str, **objective: Any) -> dict[str, Any]:
    """A recipe of 6 steps on one rank, which keeps every checkpoint."""
    values = recipe_values(folder / "model", folder / "prompts.jsonl", folder / output, folder / "cache-of-cuts")
    rewards = [{"name": "share", "compare": f"{folder / 'scores.py'}:share"}]
    of_samples = {"rewards": rewards, "group_size": GROUP, "max_new_tokens": MAX_NEW_TOKENS, **objective}
    values["objective"] = {"kind": "grpo", **of_samples}
    values["training"] |= {"max_steps": 6, "seed": SEED, "micro_batch_size": 4, "gradient_accumulation_steps": 2}
    values["checkpoint"] = {"every_steps": 1, "keep_last": None}
    return values


def test_a_run_goes_on_from_any_step_bit_for_bit(folder: Path) -> None:
    from toolkit import Recipe, finetune
    from toolkit.errors import BadInputError

    whole = finetune(Recipe.from_mapping(values_of(folder, "whole"))).metrics
    weights = (folder / "whole/export/model.safetensors").read_bytes()
    for step in (1, 4):
        values = values_of(folder, f"from-{step}")
        values["checkpoint"]["resume"] = str(folder / f"whole/checkpoints/step_{step:08d}")
        resumed = finetune(Recipe.from_mapping(values)).metrics
        figures = [[record.get(name) for name in ("reward", "loss", "grad_norm")] for record in resumed]
        assert figures == [[record.get(name) for name in ("reward", "loss", "grad_norm")] for record in whole]
        assert (folder / f"from-{step}/export/model.safetensors").read_bytes() == weights
    (folder / "others.py").write_text(SCORE.replace("/ 4", "/ 2"))
    values = values_of(folder, "changed")
    values["objective"]["rewards"][0]["compare"] = f"{folder / 'others.py'}:share"
    values["checkpoint"]["resume"] = str(folder / "whole/checkpoints/step_00000004")
    with pytest.raises(BadInputError, match=r"is of another run:\n  - objective\.rewards: "):
        finetune(Recipe.from_mapping(values))


def run_of(folder: Path, output: str) -> None:
    from toolkit import Recipe, finetune

    values = values_of(folder, output)
    values["objective"]["rewards"].append({"name": "taste", "model": str(folder / "judge")})
    finetune(Recipe.from_mapping(values))


def test_a_run_on_two_ranks_that_is_killed_goes_on_as_if_it_had_not_been(folder: Path) -> None:
    """And not with another reward model."""
    run_on_ranks(run_of, 2, folder, "unharmed")
    (folder / "armed").touch()
    with pytest.raises(AssertionError, match="died without a word"):
        run_on_ranks(run_of, 2, folder, "killed")
    steps = [json.loads(line)["step"] for line in (folder / "killed/metrics.jsonl").read_text().splitlines()]
    assert max(steps) == 3
    judge = folder / "judge/export/model.safetensors"
    before = judge.read_bytes()
    save_file({name: -tensor for name, tensor in load_file(judge).items()}, judge, {"format": "pt"})
    with pytest.raises(AssertionError, match=r"objective\.rewards\.taste: what it names has changed"):
        run_on_ranks(run_of, 2, folder, "killed")
    judge.write_bytes(before)
    run_on_ranks(run_of, 2, folder, "killed")
    unharmed, killed = ((folder / name / "export/model.safetensors").read_bytes() for name in ("unharmed", "killed"))
    assert unharmed == killed


def test_what_cannot_be_learned_from_is_told(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from toolkit import Recipe, finetune
    from toolkit.errors import BadInputError

    with pytest.raises(
        BadInputError, match=r"objective\.group_size: 3 does not divide the 8 completions of a step.*6 or 9"
    ):
        finetune(Recipe.from_mapping(values_of(folder, "odd", group_size=3)))
    values = values_of(folder, "equal", rewards=[{"name": "never", "match": "no such text"}])
    values["training"]["max_steps"] = 1
    finetune(Recipe.from_mapping(values))
    assert "all 8 completions of the first step have the reward 0" in " ".join("".join(capfd.readouterr()).split())

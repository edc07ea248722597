"""Every objective on rows with images: runs of the toolkit, and losses written out on transformers' model, row by row.

A pair's halves are each their own conversation, given to transformers' processor and model alone. Some pairs share the
images of their prompt, some see others in the rejected half, and some see none.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForImageTextToText, AutoProcessor

from support.peft_by_hand import SEED, adapted
from support.plain_loop import Trained, plain_loop
from support.ranks import meet, run_on_ranks
from support.runs import losses_of, records_of
from support.sights import EYES, drawn_image, save_seeing
from support.texts import make_texts, write_rows
from support.tiny import recipe_values, unfinish

STEPS, ROWS, RATE = 3, 4, 3e-3
WORDS = [text.split() for text in make_texts(3 * STEPS * ROWS, seed=6)]
# In the first step on both ranks, in the second on neither, in the third on the second rank alone.
COUNTS = [1, 0, 2, 1, 0, 0, 0, 0, 0, 0, 1, 2]
OTHERS_REJECTED = (2, 10)
"""Pairs whose rejected half sees other images than the chosen one."""

BETA, GAMMA, ODDS, GOOD, BAD, CENTERING = 0.3, 0.4, 0.5, 1.5, 0.75, 0.01
TEMPERATURE, RATIO, MIXED = 1.5, 0.7, 0.4
OBJECTIVES: dict[str, dict[str, Any]] = {
    "dpo": {"kind": "preference", "loss": "dpo", "beta": BETA},
    "ipo": {"kind": "preference", "loss": "ipo", "beta": BETA},
    "simpo": {"kind": "preference", "loss": "simpo", "beta": 2.0, "gamma": GAMMA},
    "orpo": {"kind": "preference", "loss": "orpo", "odds_weight": ODDS},
    "kto": {"kind": "kto", "beta": BETA, "desirable_weight": GOOD, "undesirable_weight": BAD},
    "reward": {"kind": "reward", "center_rewards_coefficient": CENTERING},
    "distillation": {
        "kind": "distillation",
        "divergence": "jsd",
        "beta": MIXED,
        "temperature": TEMPERATURE,
        "kd_ratio": RATIO,
    },
}
HAVE_SCORES = ("gemma3", "qwen3_5")
"""Families of which transformers has a classifier that sees images."""

NOT_PACKED = ("qwen3_5",)
"""Its linear attention runs over the ends of rows."""

CASES = ("1 rank", "2 ranks", "LoRA", "packed", "resumed")
QUERIES = {"target_modules": r".*(language_model|text_model).*(q_proj|v_proj)"}
TOWERS = ("vision", "visual")
PROJECTORS = ("multi_modal_projector", "connector", "merger", "embed_vision")


@dataclass(frozen=True)
class Conversation:
    """What is asked with which images, and the answer."""

    asked: str
    images: tuple[int, ...]
    answer: str


def conversations() -> tuple[list[Conversation], list[Conversation]]:
    """The chosen and the rejected half of each pair."""
    chosen, rejected, number = [], [], 0
    for i, count in enumerate(COUNTS):
        asked, good, bad = (WORDS[3 * i + side] for side in range(3))
        images = tuple(range(number, number + count))
        number += count
        others = tuple(image + 30 for image in images) if i in OTHERS_REJECTED else images
        chosen.append(Conversation(asked[0], images, " ".join(good[: 2 + i % 5])))
        rejected.append(Conversation(asked[0], others, " ".join(bad[: 3 + i % 4])))
    return chosen, rejected


def _messages(of: Conversation) -> list[dict[str, Any]]:
    parts: list[dict[str, str]] = []
    for image in of.images:
        parts += [{"type": "image", "image": f"shown/{image}.png"}, {"type": "text", "text": of.asked}]
    content: Any = parts or of.asked
    return [{"role": "user", "content": content}, {"role": "assistant", "content": of.answer}]


def is_good(number: int) -> bool:
    return number % 3 != 1


def save_everything(folder: Path, kind: str) -> None:
    """The model, a teacher, a classifier where there is one, and rows for every objective."""
    chosen, rejected = conversations()
    texts = [" ".join(words) for words in WORDS]
    save_seeing(kind, folder / kind, texts)
    teacher: Any = AutoModelForImageTextToText.from_pretrained(folder / kind, dtype=torch.float32)
    torch.manual_seed(5)
    for parameter in teacher.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    shutil.copytree(folder / kind, folder / "teacher")
    teacher.save_pretrained(folder / "teacher")
    if kind in HAVE_SCORES:
        scored_model(folder / kind).save_pretrained(folder / "scored")
        for file in (folder / kind).iterdir():
            if not (folder / "scored" / file.name).exists():
                shutil.copy(file, folder / "scored")
    (folder / "shown").mkdir()
    for image in {image for each in (*chosen, *rejected) for image in each.images}:
        drawn_image(image).save(folder / "shown" / f"{image}.png")
    rows: dict[str, list[dict[str, Any]]] = {"pairs": [], "judged": [], "text": []}
    for number, (good, bad) in enumerate(zip(chosen, rejected, strict=True)):
        if number in OTHERS_REJECTED:
            pair = {"chosen": _messages(good), "rejected": _messages(bad)}
        else:
            pair = {"prompt": _messages(good)[:1], "chosen": _messages(good)[1:], "rejected": _messages(bad)[1:]}
        rows["pairs"].append(pair)
        rows["judged"].append({"messages": _messages(good), "label": is_good(number)})
        rows["text"].append({"messages": _messages(good)})
    for name, each in rows.items():
        write_rows(folder / f"{name}.jsonl", each)


def scored_model(folder: Path) -> Any:
    """transformers' classifier, with a head that is drawn."""
    torch.manual_seed(2)
    auto = transformers.AutoModelForSequenceClassification
    model: Any = auto.from_pretrained(folder, num_labels=1, dtype=torch.float32)
    model.config.pad_token_id = model.config.get_text_config().pad_token_id = None
    nn.init.normal_(model.score.weight, std=0.1)
    return model


def rows_of(objective: str) -> str:
    return {"kto": "judged", "distillation": "text"}.get(objective, "pairs")


# ---- runs of the toolkit ----


def runs(folder: Path, kind: str, work: Sequence[tuple[str, str]]) -> dict[tuple[str, str], list[float]]:
    """The losses of each objective in each case. Collective."""
    from toolkit import Recipe, finetune

    found: dict[tuple[str, str], list[float]] = {}
    for objective, case in work:
        meet()
        output = folder / f"{objective}-{case.replace(' ', '-')}"
        recipe = Recipe.from_mapping(values_of(folder, kind, objective, case, output))
        if case == "resumed":
            meet()
            finetune(recipe)
            meet()
            if os.environ["RANK"] == "0":
                shutil.copytree(output, f"{output}-whole")
                shutil.rmtree(output / "export")
                unfinish(output)
            dist.barrier()
        result = finetune(recipe)
        found[objective, case] = losses_of(result.metrics)
    return found


def values_of(folder: Path, kind: str, objective: str, case: str, output: Path) -> dict[str, Any]:
    start = folder / ("scored" if objective == "reward" else kind)
    values = recipe_values(
        start, folder / f"{rows_of(objective)}.jsonl", output, folder / f"cache-{rows_of(objective)}"
    )
    section = dict(OBJECTIVES[objective])
    if objective == "distillation":
        section["teacher"] = str(folder / "teacher")
    values |= {"objective": section, "schedule": {"kind": "constant"}}
    # An image is 70 tokens of Gemma 4's, at the least.
    values["data"] |= {"max_length": 1024 if kind == "gemma4" else 256, "packing": False}
    values["optimizer"] = {"learning_rate": RATE, "weight_decay": 0.0, "eps": 1e-4}
    values["training"] |= {"max_steps": STEPS, "max_grad_norm": None, "seed": SEED}
    values["training"]["micro_batch_size"] = ROWS // int(os.environ["WORLD_SIZE"])
    values["sharding"] = {"strategy": "zero3"}
    if case == "packed":
        # All rows in one sample, so that the second rank has none.
        values["data"] |= {"packing": True, "max_length": 8192 if kind == "gemma4" else 2048}
        values["training"] |= {"max_steps": None, "num_epochs": 1, "micro_batch_size": 1}
    if case == "LoRA":
        values["adapter"] = {"kind": "lora", "r": 2, "alpha": 4, "target_modules": ["q_proj", "v_proj"]}
    if case == "resumed":
        values["checkpoint"] = {"every_steps": 2, "keep_last": None}
    return values


# ---- by hand ----


@dataclass(frozen=True)
class Half:
    """What transformers' processor makes of a conversation, and which tokens are the answer's."""

    inputs: dict[str, Any]
    labels: torch.Tensor


class ByHand:
    """The objectives' losses on one process.

    Args:
        model: the model in training.
        reference: a copy of it before the first step.
        teacher: the teacher of a distillation.
    """

    def __init__(self, folder: Path, kind: str, model: Any, reference: Any, teacher: Any) -> None:
        self.model, self.reference, self.teacher = model, reference, teacher
        self.kind, self.processor = kind, AutoProcessor.from_pretrained(folder / kind)
        self.chosen, self.rejected = conversations()

    def half(self, asked: Conversation, answer: str | None = None) -> Half:
        """A conversation, with the answer of another one if that is given."""
        answer = (asked.answer if answer is None else answer) + "<|im_end|>"
        words = (EYES[self.kind]["written"] + asked.asked) * len(asked.images) or asked.asked
        whole = f"<|im_start|>user\n{words}<|im_end|>\n<|im_start|>assistant\n{answer}\n"
        images = [drawn_image(image) for image in asked.images]
        inputs = dict(self.processor(text=[whole], images=[images] if images else None, return_tensors="pt"))
        learned, behind = (len(self.processor.tokenizer(text)["input_ids"]) for text in (answer, "\n"))
        labels = inputs["input_ids"].clone()
        labels[0, : -(learned + behind)] = -100
        labels[0, -behind:] = -100
        assert self.processor.tokenizer.decode(labels[0][labels[0] >= 0]) == answer
        inputs.pop("attention_mask")
        floats = {name: tensor.float() for name, tensor in inputs.items() if tensor.is_floating_point()}
        return Half({**inputs, **floats}, labels)

    def sums(self, model: Any, half: Half) -> tuple[torch.Tensor, int]:
        """The log-probability of the answer, and its tokens."""
        logits = model(**half.inputs, use_cache=False).logits[0, :-1]
        each = -F.cross_entropy(logits, half.labels[0, 1:], ignore_index=-100, reduction="none")
        return each.sum(), int((half.labels[0, 1:] >= 0).sum())

    def pair(self, number: int) -> list[torch.Tensor]:
        """Log-probabilities of chosen and rejected by model and reference, and their tokens."""
        found = []
        for side in (self.chosen, self.rejected):
            half = self.half(side[number])
            total, count = self.sums(self.model, half)
            with torch.no_grad():
                before = self.sums(self.reference, half)[0]
            found += [total, before, torch.tensor(count)]
        return found

    def loss(self, objective: str, numbers: Sequence[int], others: Sequence[int]) -> torch.Tensor:
        """The mean of a step's rows; `others` are those whose completions stand in for theirs in KTO's KL."""
        if objective == "kto":
            return self.kto(numbers, others)
        if objective == "distillation":
            return self.distillation(numbers)
        losses = [getattr(self, objective)(number) for number in numbers]
        # What no row has reached has a gradient of 0, whatever else the step holds.
        return torch.stack(losses).mean()

    def dpo(self, number: int) -> torch.Tensor:
        w, rw, _, v, rv, _ = self.pair(number)
        return -F.logsigmoid(BETA * ((w - rw) - (v - rv)))

    def ipo(self, number: int) -> torch.Tensor:
        w, rw, nw, v, rv, nv = self.pair(number)
        return ((w - rw) / nw - (v - rv) / nv - 1 / (2 * BETA)) ** 2

    def simpo(self, number: int) -> torch.Tensor:
        w, _, nw, v, _, nv = self.pair(number)
        return -F.logsigmoid(2.0 * (w / nw - v / nv) - GAMMA)

    def orpo(self, number: int) -> torch.Tensor:
        w, _, nw, v, _, nv = self.pair(number)
        odds = [mean - torch.log1p(-mean.exp()) for mean in (w / nw, v / nv)]
        return -w / nw - ODDS * F.logsigmoid(odds[0] - odds[1])

    def kto(self, numbers: Sequence[int], others: Sequence[int]) -> torch.Tensor:
        def ratio(half: Half) -> torch.Tensor:
            with torch.no_grad():
                before = self.sums(self.reference, half)[0]
            return self.sums(self.model, half)[0] - before

        with torch.no_grad():
            mixed = [self.half(self.chosen[n], self.chosen[m].answer) for n, m in zip(numbers, others, strict=True)]
            kl = torch.stack([ratio(half) for half in mixed]).mean().clamp(min=0)
        losses = []
        for number in numbers:
            weight, sign = (GOOD, 1) if is_good(number) else (BAD, -1)
            distance = sign * (ratio(self.half(self.chosen[number])) - kl)
            losses.append(weight * (1 - torch.sigmoid(BETA * distance)))
        return torch.stack(losses).mean()

    def reward(self, number: int) -> torch.Tensor:
        w, v = (self.model(**self.half(side[number]).inputs).logits[0, 0] for side in (self.chosen, self.rejected))
        return -F.logsigmoid(w - v) + CENTERING * (w + v) ** 2

    def distillation(self, numbers: Sequence[int]) -> torch.Tensor:
        divergence, cross_entropy, count = torch.tensor(0.0), torch.tensor(0.0), 0
        for half in (self.half(self.chosen[number]) for number in numbers):
            learned = half.labels[0, 1:] >= 0
            z = self.model(**half.inputs, use_cache=False).logits[0, :-1][learned]
            with torch.no_grad():
                y = self.teacher(**half.inputs, use_cache=False).logits[0, :-1][learned]
            p, q = (z / TEMPERATURE).softmax(1), (y / TEMPERATURE).softmax(1)
            mixture = MIXED * q + (1 - MIXED) * p
            divergence = divergence + MIXED * (q * (q / mixture).log()).sum()
            divergence = divergence + (1 - MIXED) * (p * (p / mixture).log()).sum()
            cross_entropy = cross_entropy + F.cross_entropy(z, half.labels[0, 1:][learned], reduction="sum")
            count += int(learned.sum())
        return ((1 - RATIO) * cross_entropy + RATIO * TEMPERATURE**2 * divergence) / count


def models_of(folder: Path, kind: str, objective: str, case: str) -> tuple[Any, Any, Any]:
    """The model in training, a copy of it, and the teacher."""

    def loaded() -> Any:
        if objective == "reward":
            auto = transformers.AutoModelForSequenceClassification
            return auto.from_pretrained(folder / "scored", dtype=torch.float32).train()
        return AutoModelForImageTextToText.from_pretrained(folder / kind, dtype=torch.float32).train()

    model, reference = loaded(), loaded()
    teacher: Any = AutoModelForImageTextToText.from_pretrained(folder / "teacher", dtype=torch.float32).eval()
    if case == "LoRA":
        task = {"task_type": "SEQ_CLS"} if objective == "reward" else {}
        return adapted(model, {"r": 2, "lora_alpha": 4, **QUERIES, **task}, SEED), reference, teacher
    for name, parameter in model.named_parameters():
        is_tower = any(word in name for word in TOWERS) and not any(word in name for word in PROJECTORS)
        parameter.requires_grad_(not is_tower)
    return model, reference, teacher


def expected(folder: Path, kind: str, objective: str, case: str) -> Trained:
    """The same steps by hand."""
    model, reference, teacher = models_of(folder, kind, objective, case)
    by_hand, every = ByHand(folder, kind, model, reference, teacher), list(range(STEPS * ROWS))
    packed = case == "packed"
    steps = [every] if packed else [every[step * ROWS :][:ROWS] for step in range(STEPS)]

    def loss(numbers: list[int]) -> torch.Tensor:
        # In a sample of several rows the completion of the row before it, else that of the next sample's.
        others = [(n + (-1 if packed else 1)) % len(every) for n in numbers]
        reached = 0.0 * torch.stack([p.sum() for p in model.parameters() if p.requires_grad]).sum()
        return by_hand.loss(objective, numbers, others) + reached

    held = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(held, lr=RATE, weight_decay=0.0, eps=1e-4)
    return plain_loop(model, steps, loss, max_norm=None, optimizer=optimizer)


@dataclass(frozen=True)
class Difference:
    """The largest differences of a run from the loop: of a loss, as its share, and of a weight."""

    loss: float
    weight: float


def difference(folder: Path, kind: str, objective: str, case: str, losses: list[float]) -> Difference:
    """Of a run from the loop; of a resumed one from the whole run, whose numbers must be equal."""
    output = folder / f"{objective}-{case.replace(' ', '-')}"
    if case == "resumed":
        whole = Path(f"{output}-whole")
        told = records_of(whole)
        before = losses_of(told)
        weights = [load_file(run / "export/model.safetensors") for run in (whole, output)]
        of_weights = [float((weights[0][name] - tensor).abs().max()) for name, tensor in weights[1].items()]
        return Difference(max(abs(a - b) for a, b in zip(losses, before, strict=True)), max(of_weights))
    found = expected(folder, kind, objective, case)
    of_losses = [abs(a - b) / abs(b) for a, b in zip(losses, found.losses, strict=True)]
    return Difference(max(of_losses), _of_weights(output, objective, case, found))


def _of_weights(output: Path, objective: str, case: str, found: Trained) -> float:
    if case == "LoRA":
        saved = load_file(output / "export/adapter_model.safetensors")
        named = ((name.replace(".modules_to_save", ""), tensor) for name, tensor in found.weights.items())
        by_hand = {name.replace(".default", ""): tensor for name, tensor in named}
        return max(float((by_hand[name] - tensor).abs().max()) for name, tensor in saved.items())
    auto = transformers.AutoModelForSequenceClassification if objective == "reward" else AutoModelForImageTextToText
    exported: Any = auto.from_pretrained(output / "export", dtype=torch.float32)
    return max(float((found.weights[name] - p.detach()).abs().max()) for name, p in exported.named_parameters())


def of_reference(folder: Path, kind: str) -> float:
    """The largest difference of a cached log-probability of a half from transformers' of that half alone."""
    model = AutoModelForImageTextToText.from_pretrained(folder / kind, dtype=torch.float32).train()
    by_hand = ByHand(folder, kind, model, model, None)
    with torch.no_grad():
        pairs = [by_hand.pair(number) for number in range(len(COUNTS))]
    sums = np.array([[float(pair[0]), float(pair[3])] for pair in pairs])
    of_pairs, of_judged = (
        [np.load(file) for file in folder.glob(f"cache-{rows}/reference-*/reference.npy")]
        for rows in ("pairs", "judged")
    )
    assert of_pairs
    off = [np.abs(found - sums) for found in of_pairs] + [np.abs(found - sums)[:, 0] for found in of_judged]
    return max(float(each.max()) for each in off)


def compared(folder: Path, kind: str, work: Sequence[tuple[str, str]]) -> dict[tuple[str, str], Difference]:
    """The difference of each objective in each case, on one rank where the case says so and on two otherwise."""
    save_everything(folder, kind)
    found: dict[tuple[str, str], list[float]] = {}
    for ranks in (1, 2):
        mine = [(objective, case) for objective, case in work if (case == "1 rank") == (ranks == 1)]
        if mine:
            found |= run_on_ranks(runs, ranks, folder, kind, mine)[0]
    return {key: difference(folder, kind, *key, losses) for key, losses in found.items()}

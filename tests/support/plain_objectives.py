"""Every objective as its paper has it, each text alone in a forward, with adapters and optimizers of the libraries.

Each objective has settings that are not its defaults: weights of classes and labels, margins, a temperature.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from seqeval.metrics import f1_score
from torch import nn
from transformers import AutoConfig, AutoTokenizer, BitsAndBytesConfig

from support.four_bits import read_by_hand
from support.peft_by_hand import adapted
from support.plain_loop import adamw, in_turn, plain_loop
from support.texts import make_texts, write_rows
from support.tiny import VOCAB_SIZE, save_llama

SEED, LEARNING_RATE, DECAY, EPS = 3, 2e-3, 0.1, 1e-4
CLASSES, CLASS_WEIGHTS = ["O", "B-FEW", "I-FEW"], [0.5, 2.0, 1.0]
BETA, GOOD_WEIGHT, BAD_WEIGHT, CENTERING, PREFIX = 0.3, 1.5, 0.75, 0.05, "turn: "
TEMPERATURE, RATIO, MIXED = 1.5, 0.7, 0.4
TEXTS = [" ".join(text.split()[: 3 + i % 7]) for i, text in enumerate(make_texts(60, seed=3))]
ASKED, GOOD, BAD = TEXTS[:20], [" " + text for text in TEXTS[20:40]], [" " + text for text in TEXTS[40:]]
PAIRS = [{"prompt": a, "chosen": b, "rejected": c} for a, b, c in zip(ASKED, GOOD, BAD, strict=True)]
HELD_OUT = 5
"""The first rows of each file, which are held out, too."""

ROWS: dict[str, list[dict[str, Any]]] = {
    "text": [{"text": text} for text in TEXTS[:20]],
    "pairs": PAIRS,
    "margins": [{**pair, "margin": (i % 3) / 4} for i, pair in enumerate(PAIRS)],
    "judged": [
        {"prompt": a, "completion": (b, c)[i % 2], "label": i % 2 == 0}
        for i, (a, b, c) in enumerate(zip(ASKED, GOOD, BAD, strict=True))
    ],
    "labelled": [{"text": text, "label": CLASSES[i % 3]} for i, text in enumerate(TEXTS[:20])],
    "tagged": [
        {"tokens": text.split(), "tags": [CLASSES[len(word) % 3] for word in text.split()]} for text in TEXTS[:20]
    ],
    "translated": [{"document": a, "summary": b.strip()} for a, b in zip(ASKED, GOOD, strict=True)],
}

_LABELS = {"labels": CLASSES, "class_weights": CLASS_WEIGHTS}
_TEACHER = {"teacher": "teacher", "divergence": "jsd", "beta": MIXED, "temperature": TEMPERATURE, "kd_ratio": RATIO}
_KTO = {"beta": BETA, "desirable_weight": GOOD_WEIGHT, "undesirable_weight": BAD_WEIGHT}
_SCORES = "AutoModelForSequenceClassification"
OBJECTIVES: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "causal_lm": ("text", "AutoModelForCausalLM", "CAUSAL_LM", {}),
    "distillation": ("text", "AutoModelForCausalLM", "CAUSAL_LM", _TEACHER),
    "preference": ("pairs", "AutoModelForCausalLM", "CAUSAL_LM", {"beta": BETA}),
    "kto": ("judged", "AutoModelForCausalLM", "CAUSAL_LM", _KTO),
    "reward": ("margins", _SCORES, "SEQ_CLS", {"center_rewards_coefficient": CENTERING}),
    "sequence_classification": ("labelled", _SCORES, "SEQ_CLS", _LABELS),
    "token_classification": ("tagged", "AutoModelForTokenClassification", "TOKEN_CLS", _LABELS),
    "seq2seq": ("translated", "AutoModelForSeq2SeqLM", "SEQ_2_SEQ_LM", {}),
}
"""Objective -> its rows, transformers' class, peft's task, and settings of its own."""


def save_models(folder: Path) -> None:
    """A dense model and a mixture of experts for each objective, a teacher, and the rows."""
    tokens = AutoTokenizer.from_pretrained(save_llama(folder / "teacher", TEXTS, tied=False, layers=3, seed=7))
    # Drawn weights give every token nearly the same probability, which any student has, too.
    teacher = transformers.AutoModelForCausalLM.from_pretrained(folder / "teacher")
    nn.init.normal_(teacher.lm_head.weight, std=0.5)
    teacher.save_pretrained(folder / "teacher")
    ends = {"eos_token_id": tokens.eos_token_id, "pad_token_id": tokens.pad_token_id, "bos_token_id": None}
    sizes = {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128}
    routed = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    for kind, (_, auto_class, _, _) in OBJECTIVES.items():
        labels = 1 if kind == "reward" else len(CLASSES)
        configs = {
            "dense": AutoConfig.for_model("llama", **sizes, **ends, num_labels=labels, classifier_dropout=0.0),
            "experts": AutoConfig.for_model(
                "qwen3_moe", **sizes, **routed, **ends, num_labels=labels, classifier_dropout=0.0
            ),
        }
        if kind == "seq2seq":
            own = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
            start = {"decoder_start_token_id": tokens.pad_token_id}
            configs = {"dense": AutoConfig.for_model("t5", vocab_size=VOCAB_SIZE, **own, **ends, **start)}
        for name, config in configs.items():
            torch.manual_seed(1)
            getattr(transformers, auto_class).from_config(config).save_pretrained(folder / f"{name}-{kind}")
            tokens.save_pretrained(folder / f"{name}-{kind}")
    for name, rows in ROWS.items():
        for file, kept in ((name, rows), (f"{name}-held-out", rows[:HELD_OUT])):
            write_rows(folder / f"{file}.jsonl", kept)


class Losses:
    """The loss of a step of each objective, for a model and a copy of it before the first step.

    Attributes:
        figures: what the objective reports with the loss of the last step.
    """

    def __init__(self, model: Any, reference: Any, teacher: Any, tokenizer: Any, rows: list[dict[str, Any]]) -> None:
        self.model, self.reference, self.teacher, self.tokenizer, self.all = model, reference, teacher, tokenizer, rows
        self.figures: dict[str, float] = {}

    def __call__(self, kind: str, numbers: list[int]) -> torch.Tensor:
        loss: Callable[[list[int]], torch.Tensor] = getattr(self, kind)
        return loss(numbers)

    def ids(self, text: str, end: bool = True) -> torch.Tensor:
        return torch.tensor([self.tokenizer(text)["input_ids"] + [self.tokenizer.eos_token_id] * end])

    def causal_lm(self, numbers: list[int]) -> torch.Tensor:
        total, count = torch.tensor(0.0), 0
        for ids in (self.ids(self.all[n]["text"]) for n in numbers):
            logits = self.model(input_ids=ids).logits[0, :-1]
            total, count = total + F.cross_entropy(logits, ids[0, 1:], reduction="sum"), count + ids.shape[1] - 1
        return total / count

    def distillation(self, numbers: list[int]) -> torch.Tensor:
        """Cross-entropy, and generalised JSD of teacher and student at a temperature, of all targets."""
        divergence, cross_entropy, count = torch.tensor(0.0), torch.tensor(0.0), 0
        for ids in (self.ids(self.all[n]["text"]) for n in numbers):
            z = self.model(input_ids=ids).logits[0, :-1]
            with torch.no_grad():
                q = (self.teacher(input_ids=ids).logits[0, :-1] / TEMPERATURE).softmax(1)
            p = (z / TEMPERATURE).softmax(1)
            mixture = MIXED * q + (1 - MIXED) * p
            divergence = divergence + MIXED * (q * (q / mixture).log()).sum()
            divergence = divergence + (1 - MIXED) * (p * (p / mixture).log()).sum()
            cross_entropy = cross_entropy + F.cross_entropy(z, ids[0, 1:], reduction="sum")
            count += ids.shape[1] - 1
        self.figures = {"divergence": divergence.item() / count, "cross_entropy": cross_entropy.item() / count}
        return ((1 - RATIO) * cross_entropy + RATIO * TEMPERATURE**2 * divergence) / count

    def log_ratio(self, prompt: str, completion: str) -> torch.Tensor:
        """Of the model's probability of a completion to the reference's."""
        asked, ids = self.ids(prompt, end=False).shape[1], self.ids(prompt + completion)

        def log_probability(model: Any) -> torch.Tensor:
            each = -F.cross_entropy(model(input_ids=ids).logits[0, :-1], ids[0, 1:], reduction="none")
            return each[asked - 1 :].sum()

        with torch.no_grad():
            before = log_probability(self.reference)
        return log_probability(self.model) - before

    def preference(self, numbers: list[int]) -> torch.Tensor:
        pairs = [self.all[n] for n in numbers]
        margins = [self.log_ratio(p["prompt"], p["chosen"]) - self.log_ratio(p["prompt"], p["rejected"]) for p in pairs]
        self.figures = {"margin": BETA * torch.stack(margins).mean().item()}
        return -F.logsigmoid(BETA * torch.stack(margins)).mean()

    def kto(self, numbers: list[int]) -> torch.Tensor:
        """The KL is of the step's prompts with the completions of the rows after them."""
        others = [(self.all[n]["prompt"], self.all[(n + 1) % len(self.all)]["completion"]) for n in numbers]
        with torch.no_grad():
            kl = torch.stack([self.log_ratio(*other) for other in others]).mean().clamp(min=0)
        self.figures = {"kl": kl.item()}
        losses = []
        for row in (self.all[n] for n in numbers):
            weight, sign = (GOOD_WEIGHT, 1) if row["label"] else (BAD_WEIGHT, -1)
            distance = sign * (self.log_ratio(row["prompt"], row["completion"]) - kl)
            losses.append(weight * (1 - torch.sigmoid(BETA * distance)))
        return torch.stack(losses).mean()

    def reward(self, numbers: list[int]) -> torch.Tensor:
        """Bradley-Terry with margins and centring."""

        def score(pair: dict[str, Any], side: str) -> torch.Tensor:
            return self.model(input_ids=self.ids(pair["prompt"] + pair[side])).logits[0, 0]

        pairs = [self.all[n] for n in numbers]
        chosen, rejected = (torch.stack([score(pair, side) for pair in pairs]) for side in ("chosen", "rejected"))
        margins = torch.tensor([pair["margin"] for pair in pairs])
        self.figures = {"margin": (chosen - rejected).mean().item()}
        return (-F.logsigmoid(chosen - rejected - margins) + CENTERING * (chosen + rejected) ** 2).mean()

    def sequence_classification(self, numbers: list[int]) -> torch.Tensor:
        logits = torch.stack(
            [self.model(input_ids=self.ids(self.all[n]["text"], end=False)).logits[0] for n in numbers]
        )
        right = torch.tensor([CLASSES.index(self.all[n]["label"]) for n in numbers])
        self.figures = {"accuracy": (logits.argmax(1) == right).float().mean().item()}
        return F.cross_entropy(logits, right, torch.tensor(CLASS_WEIGHTS), reduction="sum") / len(numbers)

    def token_classification(self, numbers: list[int]) -> torch.Tensor:
        """Each word by its first token; where that is tell ever longer beginnings of the text."""
        total, count = torch.tensor(0.0), 0
        tags: tuple[list[list[str]], list[list[str]]] = ([], [])
        for row in (self.all[n] for n in numbers):
            words = row["tokens"]
            places = [self.ids(" ".join(words[:n]), end=False).shape[1] if n else 0 for n in range(len(words))]
            logits = self.model(input_ids=self.ids(" ".join(words), end=False)).logits[0, places]
            right = torch.tensor([CLASSES.index(tag) for tag in row["tags"]])
            total = total + F.cross_entropy(logits, right, torch.tensor(CLASS_WEIGHTS), reduction="sum")
            count += len(words)
            tags[0].append(row["tags"])
            tags[1].append([CLASSES[number] for number in logits.argmax(1).tolist()])
        self.figures = {"f1": float(f1_score(*tags))}
        return total / count

    def seq2seq(self, numbers: list[int]) -> torch.Tensor:
        total, count = torch.tensor(0.0), 0
        for row in (self.all[n] for n in numbers):
            source, labels = self.ids(PREFIX + row["document"], end=False), self.ids(row["summary"])
            logits = self.model(input_ids=source, labels=labels).logits[0]  # the model shifts the labels itself
            total, count = total + F.cross_entropy(logits, labels[0], reduction="sum"), count + labels.shape[1]
        return total / count


@dataclass(frozen=True)
class Expected:
    """What the run of an objective has to report: for each step, and before and after all of them on held-out rows."""

    losses: list[float]
    norms: list[float]
    figures: list[dict[str, float]]
    held_out: list[dict[str, float]]


def expected_run(
    folder: Path,
    kind: str,
    model: str,
    adapter: str,
    optimizer: str,
    max_norm: float | None,
    steps: int,
    rows_per_step: int,
) -> Expected:
    """By the libraries' own models, adapters, quantised layers and optimizers, on one process."""
    rows, auto_class, task, _ = OBJECTIVES[kind]
    # bitsandbytes' layers cannot be copied, and have a way of their own for evaluation on CPUs.
    trained_model, reference = (
        _base(folder / f"{model}-{kind}", auto_class, adapter == "nf4").train() for _ in range(2)
    )
    if adapter != "none":
        names = ["q", "v"] if kind == "seq2seq" else ["q_proj", "v_proj"]
        settings = {"r": 4, "lora_alpha": 8, "target_modules": names}
        trained_model = adapted(trained_model, {**settings, "task_type": task}, SEED)
    teacher = transformers.AutoModelForCausalLM.from_pretrained(folder / "teacher", dtype=torch.float32)
    tokens = AutoTokenizer.from_pretrained(folder / "teacher")
    losses, held_out = (
        Losses(trained_model, reference, teacher, tokens, each) for each in (ROWS[rows], ROWS[rows][:HELD_OUT])
    )
    figures: list[dict[str, float]] = []

    def evaluated() -> dict[str, float]:
        with torch.no_grad():
            loss = held_out(kind, list(range(HELD_OUT))).item()
        return {"loss": loss, **held_out.figures}

    before = evaluated()
    found = plain_loop(
        trained_model,
        in_turn(range(len(ROWS[rows])), rows_per_step, steps),
        lambda numbers: losses(kind, numbers),
        max_norm=max_norm,
        optimizer=_Optimizers({n: p for n, p in trained_model.named_parameters() if p.requires_grad}, optimizer),
        after_step=lambda _: figures.append(losses.figures),
    )
    return Expected(found.losses, found.norms, figures, [before, evaluated()])


def _base(path: Path, auto_class: str, in_4_bits: bool) -> Any:
    heads = ["lm_head", "score"]  # which stay as they are
    how = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32, llm_int8_skip_modules=heads
    )
    more: dict[str, Any] = {"quantization_config": how} if in_4_bits else {}
    read_by_hand()
    if "experts" in path.name:
        more["experts_implementation"] = "eager"
    return getattr(transformers, auto_class).from_pretrained(path, dtype=torch.float32, **more)


class _Optimizers:
    """torch's AdamW, and for muon its Muon on the blocks' matrices, each expert's by itself."""

    def __init__(self, named: dict[str, nn.Parameter], kind: str) -> None:
        in_blocks = [name for name in named if ".layers." in name or ".block." in name]
        by_muon = {name for name in in_blocks if named[name].ndim >= 2} if kind == "muon" else set()
        others = [p for name, p in named.items() if name not in by_muon]
        self._parameters = list(named.values())
        self._all: list[torch.optim.Optimizer] = []
        if others:
            self._all.append(adamw(others, LEARNING_RATE, DECAY, EPS))
        # A view of each matrix, whose gradient is the view of its stack's.
        self._matrices = [
            (nn.Parameter(matrix), named[name], number)
            for name in by_muon
            for number, matrix in enumerate(named[name].data if named[name].ndim == 3 else named[name].data[None])
        ]
        if by_muon:
            own = [matrix for matrix, _, _ in self._matrices]
            self._all.append(
                torch.optim.Muon(own, lr=LEARNING_RATE, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw")
            )

    def step(self) -> None:
        for matrix, stack, number in self._matrices:
            gradient = stack.grad
            matrix.grad = None if gradient is None else gradient if gradient.ndim == 2 else gradient[number]
        for optimizer in self._all:
            optimizer.step()
        for parameter in self._parameters:
            parameter.grad = None

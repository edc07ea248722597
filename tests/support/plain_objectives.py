"""Every objective as its paper has it, each text alone in a forward, with adapters and optimizers of the libraries."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import nn
from transformers import AutoConfig, AutoTokenizer, BitsAndBytesConfig

from support.four_bits import read_by_hand
from support.peft_by_hand import adapted
from support.texts import make_texts
from support.tiny import VOCAB_SIZE, save_llama

SEED, LEARNING_RATE, DECAY, EPS, ROWS_PER_STEP = 3, 2e-3, 0.1, 1e-4, 4
CLASSES = ["few", "many", "none"]
BETA = 0.3
TEXTS = [" ".join(text.split()[: 3 + i % 7]) for i, text in enumerate(make_texts(60, seed=3))]
ASKED, GOOD, BAD = TEXTS[:20], [" " + text for text in TEXTS[20:40]], [" " + text for text in TEXTS[40:]]

ROWS: dict[str, list[dict[str, Any]]] = {
    "text": [{"text": text} for text in TEXTS[:20]],
    "pairs": [{"prompt": a, "chosen": b, "rejected": c} for a, b, c in zip(ASKED, GOOD, BAD, strict=True)],
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

OBJECTIVES: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "causal_lm": ("text", "AutoModelForCausalLM", "CAUSAL_LM", {}),
    "distillation": ("text", "AutoModelForCausalLM", "CAUSAL_LM", {"teacher": "teacher"}),
    "preference": ("pairs", "AutoModelForCausalLM", "CAUSAL_LM", {"beta": BETA}),
    "kto": ("judged", "AutoModelForCausalLM", "CAUSAL_LM", {"beta": BETA}),
    "reward": ("pairs", "AutoModelForSequenceClassification", "SEQ_CLS", {}),
    "sequence_classification": (
        "labelled",
        "AutoModelForSequenceClassification",
        "SEQ_CLS",
        {"labels": CLASSES},
    ),
    "token_classification": ("tagged", "AutoModelForTokenClassification", "TOKEN_CLS", {"labels": CLASSES}),
    "seq2seq": ("translated", "AutoModelForSeq2SeqLM", "SEQ_2_SEQ_LM", {}),
}
"""Objective -> its rows, transformers' class, peft's task, and settings of its own."""


def save_models(folder: Path) -> None:
    """A dense model and a mixture of experts for each objective, a teacher, and the rows."""
    tokens = AutoTokenizer.from_pretrained(save_llama(folder / "teacher", TEXTS, tied=False, layers=3, seed=7))
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
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


class Losses:
    """The loss of a step of each objective, for a model and a copy of it before the first step."""

    def __init__(self, model: Any, reference: Any, teacher: Any, tokenizer: Any, rows: list[dict[str, Any]]) -> None:
        self.model, self.reference, self.teacher, self.tokenizer, self.all = model, reference, teacher, tokenizer, rows

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
        """Half cross-entropy, half KL(teacher, student), of all targets."""
        total, count = torch.tensor(0.0), 0
        for ids in (self.ids(self.all[n]["text"]) for n in numbers):
            z = self.model(input_ids=ids).logits[0, :-1]
            with torch.no_grad():
                q = self.teacher(input_ids=ids).logits[0, :-1].softmax(1)
            divergence = (q * (q.log() - z.log_softmax(1))).sum()
            total = total + 0.5 * divergence + 0.5 * F.cross_entropy(z, ids[0, 1:], reduction="sum")
            count += ids.shape[1] - 1
        return total / count

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
        return -F.logsigmoid(BETA * torch.stack(margins)).mean()

    def kto(self, numbers: list[int]) -> torch.Tensor:
        others = [(self.all[n]["prompt"], self.all[(n + 1) % len(self.all)]["completion"]) for n in numbers]
        with torch.no_grad():
            kl = torch.stack([self.log_ratio(*other) for other in others]).mean().clamp(min=0)
        ratios = [
            (self.all[n]["label"], self.log_ratio(self.all[n]["prompt"], self.all[n]["completion"])) for n in numbers
        ]
        return torch.stack([1 - torch.sigmoid(BETA * (r - kl) * (1 if good else -1)) for good, r in ratios]).mean()

    def reward(self, numbers: list[int]) -> torch.Tensor:
        def score(pair: dict[str, Any], side: str) -> torch.Tensor:
            return self.model(input_ids=self.ids(pair["prompt"] + pair[side])).logits[0, 0]

        pairs = [self.all[n] for n in numbers]
        return -F.logsigmoid(torch.stack([score(p, "chosen") - score(p, "rejected") for p in pairs])).mean()

    def sequence_classification(self, numbers: list[int]) -> torch.Tensor:
        logits = [self.model(input_ids=self.ids(self.all[n]["text"], end=False)).logits[0] for n in numbers]
        return F.cross_entropy(
            torch.stack(logits), torch.tensor([CLASSES.index(self.all[n]["label"]) for n in numbers])
        )

    def token_classification(self, numbers: list[int]) -> torch.Tensor:
        """Each word by its first token; where that is tell ever longer beginnings of the text."""
        total, count = torch.tensor(0.0), 0
        for row in (self.all[n] for n in numbers):
            words = row["tokens"]
            places = [self.ids(" ".join(words[:n]), end=False).shape[1] if n else 0 for n in range(len(words))]
            logits = self.model(input_ids=self.ids(" ".join(words), end=False)).logits[0, places]
            right = torch.tensor([CLASSES.index(tag) for tag in row["tags"]])
            total, count = total + F.cross_entropy(logits, right, reduction="sum"), count + len(words)
        return total / count

    def seq2seq(self, numbers: list[int]) -> torch.Tensor:
        total, count = torch.tensor(0.0), 0
        for row in (self.all[n] for n in numbers):
            source, labels = self.ids(row["document"], end=False), self.ids(row["summary"])
            logits = self.model(input_ids=source, labels=labels).logits[0]  # the model shifts the labels itself
            total, count = total + F.cross_entropy(logits, labels[0], reduction="sum"), count + labels.shape[1]
        return total / count


def losses_and_norms(
    folder: Path, kind: str, model: str, adapter: str, optimizer: str, max_norm: float | None, steps: int
) -> list[tuple[float, float]]:
    """Of each step, by the libraries' own models, adapters, quantised layers and optimizers, on one process."""
    torch.set_num_threads(1)
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
    losses = Losses(trained_model, reference, teacher, tokens, ROWS[rows])
    named = {name: p for name, p in trained_model.named_parameters() if p.requires_grad}
    stepped = _Optimizers(named, optimizer)
    found = []
    for step in range(steps):
        numbers = [(step * ROWS_PER_STEP + i) % len(ROWS[rows]) for i in range(ROWS_PER_STEP)]
        loss = losses(kind, numbers)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(named.values(), max_norm or float("inf"), foreach=False)
        stepped.step()
        found.append((loss.item(), norm.item()))
    return found


def _base(path: Path, auto_class: str, in_4_bits: bool) -> Any:
    heads = ["lm_head", "score"]  # which stay as they are
    how = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.float32,
        llm_int8_skip_modules=heads,
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
        groups = [
            {"params": [p for p in others if p.ndim > 1], "weight_decay": DECAY},
            {"params": [p for p in others if p.ndim == 1], "weight_decay": 0.0},
        ]
        self._parameters = list(named.values())
        self._all: list[torch.optim.Optimizer] = []
        if others:
            self._all.append(torch.optim.AdamW(groups, lr=LEARNING_RATE, eps=EPS, foreach=False))
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

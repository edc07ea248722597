"""A tiny chat model that answers some questions right about every other time."""

from __future__ import annotations

from pathlib import Path

import torch

from support.texts import make_texts, write_rows
from support.tiny import llama
from toolkit.data.templates.templates import MARKERS, use_template
from toolkit.data.tokens.tokenizer import _train_byte_pairs

LEARNED = {
    "Who sang?": ["a fox", "the moon"],
    "Where does the king walk?": ["by the river", "on the hill"],
    "What of?": ["bread and wine", "bread and wine"],
    "And then?": ["nobody knows", "nobody knows"],
}
"""Question -> the answers that it was taught, each as often."""

QUESTIONS = [
    {"prompt": "Who sang?", "answer": "a fox"},
    {"messages": [{"role": "user", "content": "Where does the king walk?"}], "answer": ["by the river", "in the wood"]},
    {"prompt": "What of?", "answer": "Bread and wine"},
    {"prompt": "And then?", "answer": "the end"},
    {"prompt": "Who sang?", "answer": "the moon"},
]
"""The third is always answered right, the fourth never."""


def save_unsure(folder: Path) -> Path:
    """Leaves `model` and `questions.jsonl`; returns the model's folder."""
    words = [word for answers in LEARNED.values() for word in answers]
    tokenizer = _train_byte_pairs(iter([*make_texts(20), *LEARNED, *words]), 330, MARKERS["chatml"])
    tokenizer.eos_token = "<|endoftext|>"
    use_template(tokenizer, "chatml")
    tokenizer.save_pretrained(folder / "model")
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 48, "intermediate_size": 96, "max_position_embeddings": 128}
    model = llama(**sizes, num_key_value_heads=4, bos_token_id=None, eos_token_id=tokenizer.eos_token_id)
    rows = []
    for question, answers in LEARNED.items():
        for answer in answers:
            turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            rows.append(tokenizer(tokenizer.apply_chat_template(turns, tokenize=False))["input_ids"])
    width = max(map(len, rows))
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    targets = torch.tensor([row + [-100] * (width - len(row)) for row in rows])
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(60):
        model(input_ids=ids, labels=targets).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder / "model")
    write_rows(folder / "questions.jsonl", QUESTIONS)
    return folder / "model"

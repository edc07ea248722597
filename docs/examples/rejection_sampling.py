"""Three rounds of rejection sampling: a model samples answers, those that are right become its next training rows.

    python docs/examples/rejection_sampling.py --to outputs/rounds

It takes about five minutes on two CPU cores. A small model first learns to call tools from few rows, so that about a
third of its calls are right. Then each round samples calls for requests, keeps one right call of each, and trains on
them.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import toolkit

DATA = Path(__file__).parents[2] / "recipes/data"
HELD_OUT = DATA / "requests_held_out.jsonl"
SAMPLING = {"samples": 8, "temperature": 1.0, "top_p": 1.0, "max_new_tokens": 80, "batch_size": 64}


def train(rows: Path, output: Path, **others: object) -> Path:
    """Trains on rows; the folder of the export."""
    values = {"data.train": str(rows), "training.output_dir": str(output), "training.eval_every_steps": 1000}
    settings = {name.replace("__", "."): value for name, value in others.items()}
    result = toolkit.finetune("quickstart", values | settings | {"logging.held_out_samples": 0})
    assert result.export_dir is not None
    return result.export_dir


def accuracy(model: Path) -> float:
    """Share of right calls for the held-out requests, each token the most likely one."""
    return toolkit.evaluate(model, HELD_OUT, max_new_tokens=80, batch_size=50).accuracy


def main() -> None:
    parser = argparse.ArgumentParser(description="Three rounds of rejection sampling.")
    parser.add_argument("--to", dest="output", type=Path, default=Path("outputs/rounds"))
    parser.add_argument("--learned", type=int, default=500, help="rows that the model learns at first")
    parser.add_argument("--asked", type=int, default=600, help="requests that each round samples calls for")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=250, help="of the first training")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    lines = (DATA / "requests.jsonl").read_text().splitlines(keepends=True)
    first, requests = options.output / "first.jsonl", options.output / "requests.jsonl"
    first.write_text("".join(lines[: options.learned]))
    requests.write_text("".join(lines[options.learned : options.learned + options.asked]))

    model = train(first, options.output / "0", training__max_steps=options.steps)
    found = [{"round": 0, "accuracy": accuracy(model)}]
    print(json.dumps(found[-1]))
    for number in range(1, options.rounds + 1):
        drawn = toolkit.sample(model, requests, options.output / f"samples-{number}", seed=number, **SAMPLING)
        model = train(
            drawn.folder / "sft.jsonl",
            options.output / str(number),
            model__name_or_path=str(model),
            training__num_epochs=2,
            optimizer__learning_rate=5e-4,
        )
        found.append({"round": number, "right samples": drawn.mean_score, "prompts with one": drawn.mean_best_score})
        found[-1] |= {"rows": drawn.rows["sft.jsonl"], "accuracy": accuracy(model)}
        print(json.dumps(found[-1]))
    (options.output / "rounds.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

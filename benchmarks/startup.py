"""How long a launch takes until its first optimizer step, and what that time is made of.

    python benchmarks/startup.py [--rounds 3] [--output benchmarks/results/startup.jsonl]

Launches the recipe with `accelerate launch`, as a user does: once with an empty cache, then with the data of
before. A part's seconds are rank 0's, by the clock and of CPU time, medians over the launches after the first.
Imports by library are the self times of `python -X importtime`, which slows them down; what they take at
least is a process that imports the same libraries without the toolkit, in turn with one that imports it.

`toolkit train` of three steps on two ranks is compared in turn with two processes that import the libraries, and
with two ranks by hand that do the same (started_by_hand.py), by CPU time of all processes.
"""

from __future__ import annotations

import argparse
import collections
import json
import operator
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from facts import facts, show, tell

ROOT = Path(__file__).parents[1]
LIBRARIES = ("torch", "accelerate", "datasets", "peft")
MODEL = "from transformers import LlamaForCausalLM"
FLOOR = f"import {', '.join(LIBRARIES)}; {MODEL}"
BARE = f"import torch, accelerate, transformers, datasets; {MODEL}"
OURS = f"import toolkit.run.run; {MODEL}"
SHOWN = 12
"""Libraries that are named; the rest is one line."""


def environment(folder: Path) -> dict[str, str]:
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {
        **os.environ,
        "PYTHONPATH": paths,
        "ACCELERATE_USE_CPU": "true",
        "OMP_NUM_THREADS": "1",
        "HOME": str(folder),
    }


def launch(
    folder: Path, number: int, recipe: str, config: str, overrides: Iterable[str]
) -> dict[str, dict[str, float]]:
    """Clock and CPU seconds of each part of one launch, from the command to the end of the first step."""
    told = folder / f"parts-{number}.json"
    given = [f"training.output_dir={folder / f'run-{number}'}", f"data.cache_dir={folder / 'cache'}", *overrides]
    script = [str(ROOT / "benchmarks/launched.py"), str(told), "--recipe", recipe]
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--config_file", config]
    started = time.time()
    short = ["training.max_steps=1", "export.enabled=false", "logging.held_out_samples=0"]
    done = subprocess.run(
        [*command, *script, *short, *given],
        env=environment(folder), capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    found = json.loads(told.read_text(encoding="utf-8"))
    line_clock, line_cpu = found["first_line"]
    parts = {
        "launcher": {"seconds": found["born"] - started, "cpu": found["launcher_cpu"]},
        "interpreter": {"seconds": line_clock - found["born"], "cpu": line_cpu},
        **{part["name"]: {"seconds": part["seconds"], "cpu": part["cpu"]} for part in found["parts"]},
    }
    last = found["parts"][-1]
    whole = last["start"] + last["seconds"] - started
    named = sum(part["seconds"] for part in parts.values())
    return {**parts, "between": {"seconds": whole - named, "cpu": 0.0}, "all": {"seconds": whole, "cpu": 0.0}}


def seconds_of(code: str, folder: Path) -> float:
    """CPU seconds of a Python process that runs `code`."""
    command = [sys.executable, "-c", f"{code}; import time; print(time.process_time())"]
    done = subprocess.run(command, env=environment(folder), capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def cpu_of(command: list[str], folder: Path) -> float:
    """CPU seconds of a command and of all processes that it starts and waits for."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, env=environment(folder), capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def whole_commands(folder: Path, rounds: int) -> dict[str, list[float]]:
    """CPU seconds of `toolkit train` of three steps on two ranks, of the same by hand, and of two bare imports."""
    run, by_hand = folder / "whole", str(ROOT / "benchmarks/started_by_hand.py")
    given = [f"training.output_dir={run}", f"data.cache_dir={folder / 'cache'}", "training.max_steps=3"]
    train = [str(Path(sys.executable).with_name("toolkit")), "train", "quickstart", "--cpu", "2", *given]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", by_hand]
    found: dict[str, list[float]] = {"toolkit train": [], "by hand": [], "two bare imports": []}
    for number in range(rounds + 1):
        shutil.rmtree(run, ignore_errors=True)
        seconds = cpu_of(train, folder)
        hand = cpu_of([*torchrun, str(run / "export"), str(folder / "by-hand")], folder)
        if number:  # the first fills the cache
            found["toolkit train"].append(seconds)
            found["by hand"].append(hand)
            found["two bare imports"].append(2 * cpu_of([sys.executable, "-c", BARE], folder))
    return found


def by_library(code: str, folder: Path) -> dict[str, float]:
    """Seconds that the modules of each library take by themselves when `code` is run, the largest first."""
    command = [sys.executable, "-X", "importtime", "-c", code]
    done = subprocess.run(command, env=environment(folder), capture_output=True, text=True, check=True)
    found: dict[str, float] = collections.defaultdict(float)
    for line in done.stderr.splitlines():
        words = line.removeprefix("import time:").split("|")
        if line.startswith("import time:") and words[0].strip().isdigit():
            library = words[2].strip().partition(".")[0]
            found["the standard library" if library in sys.stdlib_module_names else library] += int(words[0]) / 1e6
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def shortened(found: dict[str, float]) -> dict[str, float]:
    names = [name for number, name in enumerate(found) if number < SHOWN or name == "toolkit"]
    rest = sum(seconds for name, seconds in found.items() if name not in names)
    return {name: round(seconds, 3) for name, seconds in {**{n: found[n] for n in names}, "others": rest}.items()}


def medians(launches: list[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    return {
        part: {kind: round(statistics.median(one[part][kind] for one in launches), 3) for kind in ("seconds", "cpu")}
        for part in launches[0]
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="quickstart")
    parser.add_argument("--config", default=str(ROOT / "accelerate_configs/cpu_2.yaml"), help="of Accelerate")
    parser.add_argument("--rounds", type=int, default=3, help="launches after the first")
    parser.add_argument("--output", type=Path, help="file to which lines of JSON are added")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="of the recipe")
    options = parser.parse_args()
    launches, floor, ours = [], [], []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number in range(options.rounds + 1):
            launches.append(launch(folder, number, options.recipe, options.config, options.overrides))
            floor.append(seconds_of(FLOOR, folder))
            ours.append(seconds_of(OURS, folder))
        libraries = shortened(by_library(OURS, folder))
        commands = whole_commands(folder, options.rounds)
    first, later = medians(launches[:1]), medians(launches[1:] or launches)
    imports = {"libraries_cpu": round(statistics.median(floor), 3), "toolkit_cpu": round(statistics.median(ours), 3)}
    whole = {name: round(statistics.median(seconds), 2) for name, seconds in commands.items()}
    told = {"recipe": options.recipe, "rounds": options.rounds, "empty_cache": first, "parts": later, "whole": whole}
    tell({**facts("datasets", "peft"), **told, "imports": imports, "import_self_seconds": libraries}, options.output)
    rows = [[part, later[part]["seconds"], later[part]["cpu"] or None, first[part]["seconds"]] for part in later]
    show("From the command to the first step", ["", "clock s", "CPU s", "clock s, empty cache"], rows)
    show("Imports by library", ["", "self s, traced"], libraries.items())
    ratios = [
        [name, whole[name], statistics.median(map(operator.truediv, commands["toolkit train"], seconds))]
        for name, seconds in commands.items()
    ]
    show("quickstart, three steps, two ranks", ["", "CPU s", "toolkit train / this"], ratios)
    print(
        f"imports, CPU: {imports['libraries_cpu']} s for {', '.join(LIBRARIES)} and a model of transformers; ", end=""
    )
    print(f"{imports['toolkit_cpu']} s for toolkit.run.run and the same model")


if __name__ == "__main__":
    main()

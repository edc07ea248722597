"""The first hours with one GPU: what must be right and how fast it is, in four parts of ten minutes.

    python benchmarks/acceptance.py --part 1 [--output benchmarks/results/acceptance.jsonl]

The parts go from the most valuable to the least, and each is worth having alone: 1 says whether offload and the plain
path are right and what the plan misses, 2 how fast full fine-tuning and LoRA are beside published figures, 3 adds two
ranks on one device and a kill with its resume, 4 the speed of offload and the best share of the peak. A part first
looks whether the machine has what it takes, and ends with the list of what must be carried there (`carry.py`) if not.

Each step is a process of its own with a time limit, so that one that hangs or crashes costs its own time alone, and
leaves a line of JSON at once. The exit code is 1 if a check failed. `--tiny` rehearses every step on the CPU, where
the figures say nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from carry import look

ROOT = Path(__file__).parents[1]
PYTHON = sys.executable

Figures = dict[str, Any]
Check = Callable[[Path, str], tuple[bool, Figures]]


@dataclass(frozen=True)
class Step:
    """One process.

    Attributes:
        command: run in the repository's root; `{folder}` is an empty folder of its own.
        limit: seconds after which it is ended, and has failed.
        check: what came of it, from the folder and what was printed; only where the exit code is 0.
        processes: environment variables of each process that runs the command at the same time.
        part: of the script, 1 to 4.
    """

    name: str
    command: list[str]
    limit: float
    check: Check = lambda _folder, _printed: (True, {})
    processes: Sequence[dict[str, str]] = field(default_factory=lambda: [{}])
    part: int = 1


def records(path: Path) -> list[Figures]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


# What a recipe of this script is made of


SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "qwen3-0.6b": {
        "model_type": "qwen3",
        "vocab_size": 151_936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": True,
    },
    "llama-3-8b": {
        "model_type": "llama",
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
}
"""The published shapes, vocabulary included: it is 40 % of the small one's work, and most of its peak."""


def recipe(shape: str, length: int, steps: int, *overrides: str) -> list[str]:
    """The arguments of recipes/finetune.py for random weights of a shape, on the plays, packed."""
    config = {**SHAPES[shape], "max_position_embeddings": length}
    return [
        "recipes/finetune.py",
        "quickstart",
        f"data.train={ROOT / 'recipes/data/plays.jsonl'}",
        "data.chat_template=null",
        f"model.config={json.dumps(config)}",
        f"data.max_length={length}",
        "data.max_validation_samples=1",
        "data.cache_dir={folder}/cache",
        "training.output_dir={folder}/run",
        f"training.max_steps={steps}",
        "schedule.warmup_steps=2",
        "training.micro_batch_size=1",
        "training.eval_every_steps=null",
        "logging.held_out_samples=0",
        "export.enabled=false",
        *overrides,
    ]


# What came of a step


def rate(wanted: float | None) -> Check:
    """Tokens a second, the median of the steps after the third, against a published figure."""

    def check(folder: Path, _printed: str) -> tuple[bool, Figures]:
        train = [row for row in records(folder / "run/metrics.jsonl") if row["split"] == "train"][3:]
        rates = sorted(row["tokens_per_second"] for row in train)
        found = rates[len(rates) // 2]
        peak = max(row["peak_device_bytes"] or 0 for row in train) / 2**30
        return True, {"tokens_per_second": found, "published": wanted, "peak_gib": peak, "mfu": train[-1]["mfu"]}

    return check


def planned(on_gpu: bool) -> Check:
    """The planned peak against the measured one."""

    def check(folder: Path, _printed: str) -> tuple[bool, Figures]:
        last = [row for row in records(folder / "run/metrics.jsonl") if row["split"] == "train"][-1]
        measured = last["peak_device_bytes"] if on_gpu else last["peak_host_bytes"]
        ratio = last["planned_peak_bytes"] / measured
        return not on_gpu or abs(ratio - 1) < 0.05, {"planned_to_measured": ratio}

    return check


def told(folder: Path, printed: str) -> tuple[bool, Figures]:
    """The last line that a child of this script has printed: its figures, `passed` among them."""
    figures = json.loads([line for line in printed.splitlines() if line.startswith("{")][-1])
    return figures.pop("passed"), figures


def speeds(path: str) -> Check:
    """Offload's speed as a share of the speed without, by tokens a step."""

    def check(folder: Path, _printed: str) -> tuple[bool, Figures]:
        rows = [row for row in records(folder / path) if "left_out" not in row]
        found: Figures = {}
        for tokens in sorted({row["tokens_per_step"] for row in rows}):
            seconds = {row["variant"]: row["step_seconds"] for row in rows if row["tokens_per_step"] == tokens}
            base = seconds.pop("no offload", None)
            if base is not None and seconds:
                found[f"speed_at_{tokens}"] = base / min(seconds.values())
        return bool(found), found

    return check


def best_mfu(folder: Path, _printed: str) -> tuple[bool, Figures]:
    rows = [row for row in records(folder / "mfu.jsonl") if "left_out" not in row]
    return bool(rows), {"best_mfu": max((row["mfu"] or 0.0 for row in rows), default=0.0)}


# Children


def child_two_ranks() -> Figures:
    """Offload with accumulation on two ranks that share a device, over gloo, against ordinary FSDP2.

    The host's AdamW and the device's round in another order, so single weights differ by many units in the last place
    at equal losses. The tolerances are those of tests/gpu.
    """
    import torch
    import torch.distributed as dist
    from support.offload_loops import Case, offloaded, ordinary

    apart: dict[str, float] = {}
    for case in (Case(tied=False), Case(accumulation=3)):
        expected = ordinary(case)
        for way in ("cpu_torch", "device_stream"):
            found = offloaded(case, way)
            losses = zip(found.losses, expected.losses, strict=True)
            apart[f"losses, {case}, {way}"] = max(abs(a - b) / abs(b) for a, b in losses)
            weights = ((found.weights[name] - weight).abs() for name, weight in expected.weights.items())
            apart[f"weights, {case}, {way}"] = max(float(difference.max()) for difference in weights)
    if dist.is_initialized():
        dist.destroy_process_group()
    allowed = {"losses": 2e-3, "weights": 2e-2}
    passed = all(value <= allowed[name.partition(",")[0]] for name, value in apart.items())
    return {"passed": passed, "apart": apart, "device": "cuda" if torch.cuda.is_available() else "cpu"}


def child_meetings() -> Figures:
    """How often the host waits for the device in a step; torch warns each time in its debug mode."""
    import warnings

    import torch

    from toolkit import Recipe, finetune
    from toolkit.training.trainer import Trainer

    counts: list[int] = []
    train_step = Trainer.train_step

    def counted(self: Any, window: Any) -> Any:
        if not torch.cuda.is_available():
            counts.append(1)
            return train_step(self, window)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            step = train_step(self, window)
            torch.cuda.set_sync_debug_mode("default")
        counts.append(sum("synchroniz" in str(warning.message) for warning in caught))
        return step

    Trainer.train_step = counted  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder:
        arguments = [part.replace("{folder}", folder) for part in recipe("tiny", 128, 8)[2:]]
        finetune(Recipe.load("quickstart", arguments))
    return {"passed": max(counts[3:]) <= 1, "meetings_a_step": counts[3:]}


def child_kill_and_resume() -> Figures:
    """A run that is killed after a checkpoint and started again, against one that nobody disturbs.

    That one is run twice: kernels that add in no fixed order make two equal runs differ, and a resumed run may differ
    from an undisturbed one by no more than that.
    """
    with tempfile.TemporaryDirectory() as folder:
        losses = {}
        for name in ("whole", "twin", "killed"):
            arguments = recipe("tiny", 128, 24, "checkpoint.every_steps=4")
            command = [PYTHON, *(part.replace("{folder}", f"{folder}/{name}") for part in arguments)]
            if name == "killed" and (why := _killed_after_a_checkpoint(command, Path(folder, name, "run"))):
                return {"passed": False, "failed": why}
            done = subprocess.run(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            if done.returncode != 0:
                return {"passed": False, "failed": name, "printed": done.stdout[-1000:]}
            if ("resumed: after step" in done.stdout) != (name == "killed"):
                return {"passed": False, "failed": f"{name}: resumed, or began anew, when it should not have"}
            rows = records(Path(folder, name, "run/metrics.jsonl"))
            losses[name] = [row["loss"] for row in rows if row["split"] == "train"]
        noise, difference = (_furthest(losses[name], losses["whole"]) for name in ("twin", "killed"))
        return {
            "passed": difference <= 2 * noise,
            "steps": len(losses["whole"]),
            "noise": noise,
            "difference": difference,
        }


def _furthest(found: list[float], expected: list[float]) -> float:
    """Largest difference of two lists of losses; infinite if one is longer."""
    if len(found) != len(expected):
        return math.inf
    return max(abs(a - b) for a, b in zip(found, expected, strict=True))


def _killed_after_a_checkpoint(command: list[str], run: Path) -> str:
    """Kills the run as soon as it has a whole checkpoint; why that did not come about, or nothing."""
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None and not list(run.glob("checkpoints/step_*/COMPLETE")):
        time.sleep(0.02)
    process.kill()
    return "" if process.wait() == -signal.SIGKILL else "the run had ended before it was killed"


CHILDREN = {"two ranks": child_two_ranks, "meetings": child_meetings, "kill and resume": child_kill_and_resume}


def child(name: str) -> list[str]:
    return [PYTHON, "benchmarks/acceptance.py", "--child", name]


def two_processes(on_gpu: bool, folder: str) -> list[dict[str, str]]:
    """Two ranks that both use the first device: NCCL refuses that, gloo does not."""
    backend = "cpu:gloo,cuda:gloo" if on_gpu else "gloo"
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "0", "TEST_BACKEND": backend}
    return [{**shared, "RANK": str(rank), "TEST_MEETING_FOLDER": folder} for rank in (0, 1)]


def steps_of(tiny: bool, folder: str) -> list[Step]:
    """All steps in order, most valuable first. The limits of a part add up to ten minutes."""
    pytest = [PYTHON, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
    lora = ("adapter.kind=lora", "training.mixed_precision=bf16")
    full = ("training.mixed_precision=bf16",)
    sft = "tiny" if tiny else "qwen3-0.6b"
    lengths = (128, 256) if tiny else (8192, 16384)
    steps = 8 if tiny else 16
    sizes = ["--sizes", "tiny", "--tokens", "64", "--rounds", "2", "--steps", "1"] if tiny else ["--sizes", "3b"]
    return [
        Step("offload on the device", [*pytest, "tests/gpu/test_gpu_offload.py"], 180),
        Step("the plan's peak", [PYTHON, *recipe(sft, lengths[0], 6, *full)], 120, planned(not tiny)),
        Step("host and device meet once a step", child("meetings"), 60, told),
        Step(
            "sanitizer",
            [*pytest, "tests/gpu/test_gpu_offload.py", "-k", "accumulation"],
            120,
            processes=[{} if tiny else {"TORCH_CUDA_SANITIZER": "1"}],  # it cannot be imported without CUDA
        ),
        Step("other tests", [*pytest, "tests/gpu", "--ignore", "tests/gpu/test_gpu_offload.py"], 120),
        Step("full, 8k tokens", [PYTHON, *recipe(sft, lengths[0], steps, *full)], 180, rate(26_005.0), part=2),
        Step("full, 16k tokens", [PYTHON, *recipe(sft, lengths[1], steps, *full)], 180, rate(25_486.0), part=2),
        Step(
            "LoRA of 8B, 4k tokens",
            [PYTHON, *recipe("tiny" if tiny else "llama-3-8b", lengths[0] if tiny else 4096, steps, *lora)],
            240,
            rate(12_473.0),
            part=2,
        ),
        Step("two ranks on one device", child("two ranks"), 240, told, two_processes(not tiny, folder), part=3),
        Step("killed and resumed", child("kill and resume"), 360, told, part=3),
        Step(
            "offload against none",
            [PYTHON, "benchmarks/offload.py", *sizes, "--output", "{folder}/offload.jsonl"],
            330,
            speeds("offload.jsonl"),
            part=4,
        ),
        Step(
            "MFU",
            [PYTHON, "benchmarks/mfu.py", *(["--tiny"] if tiny else []), "--output", "{folder}/mfu.jsonl"],
            270,
            best_mfu,
            part=4,
        ),
    ]


# Running them


def run(step: Step, tiny: bool) -> Figures:
    """Runs a step's processes; whether it passed, how long it took, and its figures or the end of what it printed."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        codes, printed = _run_processes(step, folder, tiny)
        # pytest ends with 5 where it has found no test, as in a rehearsal of tests that need a GPU
        passed = all(code == 0 or (tiny and code == 5) for code in codes)
        # Of the process that failed by itself, not of one that was ended for it.
        figures: Figures = {"printed": max(zip(codes, printed, strict=True), key=lambda each: each[0])[1]}
        if passed:
            try:
                passed, figures = step.check(Path(folder), printed[0])
            except Exception as error:
                passed, figures = False, {"printed": f"{type(error).__name__}: {error}\n{printed[0]}"}
    if "printed" in figures:
        figures["printed"] = figures["printed"][-2000:]
    return {"step": step.name, "passed": passed, "seconds": round(time.monotonic() - started, 1), **figures}


def _run_processes(step: Step, folder: str, tiny: bool) -> tuple[list[int], list[str]]:
    """Exit codes and what was printed. If one process fails, or the time is up, the others are ended at once."""
    command = [part.replace("{folder}", folder) for part in step.command]
    common = {**os.environ, **({"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"} if tiny else {})}
    common["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests"), common.get("PYTHONPATH", "")])
    # Into files: a pipe that nobody reads yet blocks its process after 64 KiB.
    outputs = [Path(folder, f"printed_{number}") for number in range(len(step.processes))]
    processes = []
    for added, output in zip(step.processes, outputs, strict=True):
        with output.open("w", encoding="utf-8") as file:
            processes.append(
                subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env=common | added,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
    deadline = time.monotonic() + step.limit
    while time.monotonic() < deadline:
        found = [process.poll() for process in processes]
        if None not in found or any(found):
            break
        time.sleep(0.05)
    ended = [process for process in processes if process.poll() is None]
    for process in ended:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    printed = [output.read_text(encoding="utf-8", errors="replace") for output in outputs]
    late = f"\nended after {step.limit:.0f} s" if time.monotonic() >= deadline else "\nended as another process failed"
    said = [text + late if process in ended else text for process, text in zip(processes, printed, strict=True)]
    return [process.returncode for process in processes], said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", type=int, choices=[1, 2, 3, 4], help="run this part alone; by default all four")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="run these steps alone")
    parser.add_argument("--list", action="store_true", help="print parts, limits and names of the steps, and end")
    parser.add_argument("--tiny", action="store_true", help="rehearse on the CPU, with tiny models")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks/results/acceptance.jsonl")
    parser.add_argument("--child", choices=list(CHILDREN), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        print(json.dumps(CHILDREN[options.child]()))
        return
    meeting = tempfile.mkdtemp()
    steps = steps_of(options.tiny, meeting)
    if options.list:
        print("\n".join(f"part {step.part}, {step.limit:3.0f} s: {step.name}" for step in steps))
        return
    names = [step.name for step in steps]
    unknown = sorted(set(options.only or []) - set(names))
    if unknown:
        parser.error(f"--only: no step is named {', '.join(unknown)}; there are: {', '.join(names)}")
    here = look()
    print(here.told(), flush=True)
    if here.missing:
        sys.exit(1)
    from facts import facts, show, tell  # these need what was looked for

    machine, rows = facts("datasets", "peft"), []
    for step in steps:
        if (options.only is None or step.name in options.only) and options.part in (None, step.part):
            rows.append(run(step, options.tiny))
            tell({**machine, "tiny": options.tiny, "part": step.part, **rows[-1]}, options.output)
    columns = ["step", "", "seconds", "figures"]
    keys = {"step", "passed", "seconds", "printed"}
    show(
        "Acceptance" + (", rehearsed on the CPU" if options.tiny else ""),
        columns,
        [
            [
                row["step"],
                "ok" if row["passed"] else "FAILED",
                row["seconds"],
                ", ".join(f"{key} {_words(value)}" for key, value in row.items() if key not in keys),
            ]
            for row in rows
        ],
    )
    sys.exit(0 if all(row["passed"] for row in rows) else 1)


def _words(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()

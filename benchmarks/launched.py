"""What startup.py has the launcher start: a run as recipes/finetune.py makes it, with the time of its parts.

    accelerate launch --config_file CONFIG benchmarks/launched.py FILE --recipe NAME section.key=value ...

Rank 0 writes to FILE, as JSON: when the process and the interpreter had started, the launcher's CPU time until
then, and the parts in order, each with clock and CPU seconds, up to the end of the first optimizer step.
"""

# ruff: noqa: E402  the time comes first
import time

FIRST_LINE = time.time(), time.process_time()

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

PARTS: list[dict[str, Any]] = []


def timed(name: str, action: Callable[..., Any]) -> Callable[..., Any]:
    """`action`, whose first call is a part."""

    def run(*args: Any, **kwargs: Any) -> Any:
        if any(part["name"] == name for part in PARTS):
            return action(*args, **kwargs)
        clock, cpu = time.time(), time.process_time()
        result = action(*args, **kwargs)
        PARTS.append({"name": name, "start": clock, "seconds": time.time() - clock, "cpu": time.process_time() - cpu})
        return result

    return run


def import_all() -> None:
    import toolkit.run.run  # noqa: F401


def watch() -> None:
    """Puts a clock around the parts of a run."""

    from toolkit.run import prepare
    from toolkit.run.checks import packing_check
    from toolkit.run.stages import accelerator
    from toolkit.training.trainer import Trainer

    for module, name, part in (
        (accelerator, "build_accelerator", "accelerator"),
        (prepare.tokenizer, "load", "tokenizer"),
        (prepare.build, "build", "data"),
        (prepare, "load", "model"),
        (accelerator.Accelerator, "prepare", "prepare, with weights"),
        (packing_check, "check_packing", "check of packing"),
        (Trainer, "evaluate", "first evaluation"),
        (Trainer, "train_step", "first step"),
    ):
        setattr(module, name, timed(part, getattr(module, name)))


def main(file: str, arguments: list[str]) -> int:
    import psutil

    launcher = psutil.Process(os.getppid()).cpu_times()
    born = psutil.Process().create_time()
    timed("imports", import_all)()
    watch()
    from toolkit.cli.ranks.finetune import finetune_command

    code = finetune_command(arguments)
    if os.environ.get("RANK", "0") == "0":
        told = {"born": born, "first_line": FIRST_LINE, "launcher_cpu": launcher.user + launcher.system, "parts": PARTS}
        Path(file).write_text(json.dumps(told), encoding="utf-8")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))

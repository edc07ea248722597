"""The toolkit beside its peers: the same model on the same rows; useful tokens per second, memory and losses.

    python benchmarks/peers.py [--groups padded packed transformers ...] [--output benchmarks/results/peers.jsonl]

All train one random-weight Llama (23M parameters) on 512 rows of lognormal length, 2 gloo ranks of one
thread, float32, 4 rows a micro-batch, AdamW, clipping. Useful tokens are targets: every token of a row but
the first; padding is none. The toolkit runs what `finetune` runs, from the recipe to `Trainer.fit`, without
export; the peers get the same rows as tokens. The variants of a group take turns (see turns.py), in each
group beside DDP by hand with padding. Peers that are not installed are left out, with the reason; the one
that stands apart is DeepSpeed (DS_BUILD_OPS=0 pip install deepspeed, in an environment of its own).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import turns
from facts import facts, show, tell

sys.path.insert(0, str(Path(__file__).parents[1]))  # the repository itself, installed or not

ROWS, MEDIAN, SIGMA, SHORTEST = 512, 120, 0.8, 16
PAD, IGNORED = 0, -100
ADAMW: dict[str, Any] = {"lr": 3e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
MAX_NORM = 1.0
REFERENCE = "DDP by hand"


@dataclass(frozen=True)
class Job:
    """What is trained. `config`: of a Llama; `max_length`: of a sample (tokens); `batch`: rows of a micro-batch."""

    folder: str
    config: dict[str, int]
    max_length: int
    batch: int
    steps: int

    def rows(self) -> list[list[int]]:
        """Token ids of each row."""
        found: list[list[int]] = json.loads(Path(self.folder, "rows.json").read_text(encoding="utf-8"))
        return found


FULL = {
    "vocab_size": 8192,
    "hidden_size": 384,
    "intermediate_size": 1120,
    "num_hidden_layers": 10,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
}
TINY = {**FULL, "vocab_size": 512, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2}


def write_rows(job: Job, count: int, full: bool = False) -> None:
    """Rows of Zipf-distributed tokens, as text for the toolkit, which tokenises, and as tokens for its peers.

    Args:
        full: all of `max_length`.
    """
    import numpy as np
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    draw = np.random.default_rng(0)
    vocabulary = job.config["vocab_size"]
    share = 1.0 / np.arange(1, vocabulary) ** 1.1
    lengths = np.clip(draw.lognormal(np.log(MEDIAN), SIGMA, count), SHORTEST, job.max_length).astype(int)
    if full:
        lengths[:] = job.max_length
    rows = [(1 + draw.choice(vocabulary - 1, length, p=share / share.sum())).tolist() for length in lengths]
    Path(job.folder, "rows.json").write_text(json.dumps(rows), encoding="utf-8")
    texts = (json.dumps({"text": " ".join(f"t{token}" for token in row)}) for row in rows)
    Path(job.folder, "rows.jsonl").write_text("\n".join(texts) + "\n", encoding="utf-8")
    words = Tokenizer(models.WordLevel({f"t{token}": token for token in range(vocabulary)}, unk_token=f"t{PAD}"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token=f"t{PAD}").save_pretrained(Path(job.folder, "words"))


class Gate:
    """Between the steps of a variant: waits for its turn, and measures it."""

    def __init__(self, pipe: Connection, steps: int) -> None:
        self._pipe, self._steps, self._taken = pipe, steps, -1
        self._losses: list[float] = []
        self._targets = 0
        self._imported = 0
        self._start = (0.0, 0.0)

    def imported(self) -> None:
        """To be called when a variant has imported what it needs and has built nothing yet."""
        self._imported = resident("VmRSS")

    def __call__(self) -> bool:
        """Whether to take another step; to be called before its batch is loaded."""
        self._taken += 1
        if 0 < self._taken < self._steps:
            return True
        self._pipe.send("ready" if self._taken == 0 else self._measured())
        if self._pipe.recv() != "go":
            return False
        dist.barrier()
        self._taken, self._losses, self._targets = 0, [], 0
        self._start = (time.perf_counter(), time.process_time())
        return True

    def saw(self, loss: float, targets: int) -> None:
        """The loss of a step, over all ranks, and this rank's targets in it."""
        self._losses.append(loss)
        self._targets += targets

    def _measured(self) -> dict[str, Any]:
        return {
            "wall": time.perf_counter() - self._start[0],
            "cpu": time.process_time() - self._start[1],
            "targets": self._targets,
            "losses": self._losses,
            "peak": resident("VmHWM"),
            "imported": self._imported,
        }


def resident(key: str) -> int:
    """Bytes of this process's resident set: now (VmRSS), or at most (VmHWM)."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


# ---- by hand ----


def whole_model(job: Job) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**job.config, tie_word_embeddings=False, pad_token_id=PAD, bos_token_id=None)
    config.eos_token_id, config.use_cache = None, False
    return LlamaForCausalLM(config).train()


def padded(job: Job, rank: int) -> Iterator[dict[str, torch.Tensor]]:
    """This rank's batches, in the order of the rows: `input_ids`, `attention_mask` and `labels`, each (B, T)."""
    rows, step = job.rows(), 0
    while True:
        start = (step * dist.get_world_size() + rank) * job.batch
        part = [rows[number % len(rows)] for number in range(start, start + job.batch)]
        shape = (job.batch, max(map(len, part)))
        batch = {"input_ids": torch.full(shape, PAD), "labels": torch.full(shape, IGNORED)}
        batch["attention_mask"] = torch.zeros(shape, dtype=torch.long)
        for i, row in enumerate(part):
            batch["input_ids"][i, : len(row)] = torch.tensor(row)
            batch["labels"][i, 1 : len(row)] = torch.tensor(row[1:])
            batch["attention_mask"][i, : len(row)] = 1
        yield batch
        step += 1


def targets_of(labels: torch.Tensor) -> int:
    return int((labels[:, 1:] != IGNORED).sum())


def loop(gate: Gate, job: Job, rank: int, forward: Callable[..., Any], update: Callable[[torch.Tensor], None]) -> None:
    """The loop that an expert writes; the loss is the mean over the targets of all ranks."""
    batches = padded(job, rank)
    while gate():
        batch = next(batches)
        labels = batch.pop("labels")
        targets = targets_of(labels)
        count = torch.tensor([float(targets)])
        dist.all_reduce(count)
        logits = forward(**batch).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum") / count
        del logits
        update(loss * dist.get_world_size())  # gradients are averaged over the ranks
        whole = loss.detach()
        dist.all_reduce(whole)
        gate.saw(whole.item(), targets)


def stepping(model: Any) -> Callable[[torch.Tensor], None]:
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)

    def update(loss: torch.Tensor) -> None:
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()

    return update


def ddp_by_hand(gate: Gate, job: Job, rank: int) -> None:
    import transformers.models.llama.modeling_llama  # noqa: F401
    from torch.nn.parallel import DistributedDataParallel

    gate.imported()
    model = DistributedDataParallel(whole_model(job), gradient_as_bucket_view=True)
    loop(gate, job, rank, model, stepping(model))


def fsdp2_by_hand(gate: Gate, job: Job, rank: int) -> None:
    import transformers.models.llama.modeling_llama  # noqa: F401
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    gate.imported()
    model = whole_model(job)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    loop(gate, job, rank, model, stepping(model))


# ---- the toolkit ----


def by_toolkit(strategy: str, packing: bool, offload: str = "none", **others: Any) -> Callable[[Gate, Job, int], None]:
    """`others`: further settings of the recipe."""

    def train(gate: Gate, job: Job, rank: int) -> None:
        from toolkit.optim.schedule import build_schedule
        from toolkit.recipe.recipe import Recipe
        from toolkit.run.parts.figures import NonFiniteSteps, Records
        from toolkit.run.parts.order import parts_of
        from toolkit.run.prepare import prepare_run
        from toolkit.run.stages.accelerator import build_accelerator, build_plugins, quiet_libraries
        from toolkit.run.stages.stages import OpenedRun
        from toolkit.terminal import Terminal
        from toolkit.training.metrics import Metrics
        from toolkit.training.trainer import Trainer

        gate.imported()
        quiet_libraries()
        settings = {"sharding.strategy": strategy, "sharding.offload": offload, "data.packing": packing, **others}
        recipe = Recipe.load(Path(job.folder, "recipe.yaml"), [f"{field}={value}" for field, value in settings.items()])
        output = Path(job.folder, f"run-{strategy}-{packing}-{offload}-{'-'.join(others)}")
        output.mkdir(exist_ok=True)
        plugins = build_plugins(recipe)
        accelerator = build_accelerator(recipe, plugins, output)
        opened = OpenedRun(recipe, accelerator, plugins["fsdp_plugin"], output, Terminal(quiet=rank != 0))
        run = prepare_run(opened, parts_of(opened))
        schedule = build_schedule(run.sharded.torch_optimizer, recipe.schedule, run.num_steps)

        class GatedTrainer(Trainer):
            """Waits at the gate before each step; its windows are made ahead."""

            def train_step(self, window: Any) -> Any:
                if not gate():
                    raise OverError
                step = super().train_step(window)
                gate.saw(step.loss, sum(map(run.objective.count_targets, window)))
                return step

        with Metrics(accelerator, output / "metrics.jsonl", recipe.logging, run.num_steps) as metrics:
            trainer = GatedTrainer(
                accelerator, run.model, run.sharded.optimizer, schedule, run.objective, recipe.training, run.windows,
                extensions=[Records(metrics), NonFiniteSteps(metrics, recipe.training.max_non_finite_steps)],
            )  # fmt: skip
            with contextlib.suppress(OverError):
                trainer.fit()

    return train


class OverError(Exception):
    """No more steps are wanted."""


def write_recipe(job: Job) -> None:
    import yaml

    recipe = {
        "model": {
            "config": {"model_type": "llama", **job.config, "tie_word_embeddings": False},
            "tokenizer": str(Path(job.folder, "words")),
        },
        "data": {
            "train": str(Path(job.folder, "rows.jsonl")),
            "max_length": job.max_length,
            "shuffle": False,
            "cache_dir": str(Path(job.folder, "cache")),
        },
        "optimizer": {"learning_rate": ADAMW["lr"], "beta2": ADAMW["betas"][1], "weight_decay": 0.0},
        "schedule": {"kind": "constant"},
        "training": {
            "output_dir": str(Path(job.folder, "unused")),
            "max_steps": 10**6,
            "micro_batch_size": job.batch,
            "max_grad_norm": MAX_NORM,
        },
        "logging": {"every_steps": 10**6},
    }
    Path(job.folder, "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")


# ---- other tools ----


def by_trl(packing: bool) -> Callable[[Gate, Job, int], None]:
    """See `train_by_trl`."""

    def train(gate: Gate, job: Job, rank: int) -> None:
        import trl  # noqa: F401
        from datasets import Dataset
        from transformers import AutoTokenizer

        gate.imported()
        train_by_trl(
            gate,
            job,
            whole_model(job),
            Dataset.from_dict({"input_ids": job.rows()}),
            AutoTokenizer.from_pretrained(Path(job.folder, "words")),
            ddp_find_unused_parameters=False,
            max_length=job.max_length,
            packing=packing,
        )

    return train


def train_by_trl(gate: Gate, job: Job, model: Any, rows: Any, processing_class: Any, **settings: Any) -> None:
    """Trains a model by SFTTrainer as it comes, but in float32, in order, and without activation checkpointing.

    Args:
        settings: more of SFTConfig's.
    """
    from trl import SFTConfig, SFTTrainer

    seen = count_targets(model)
    asked = SFTConfig(output_dir=str(Path(job.folder, "trl")), **arguments_of_trainer(job), **settings)
    SFTTrainer(
        model=model,
        args=asked,
        train_dataset=rows,
        processing_class=processing_class,
        callbacks=[at_the_gate(gate, seen)],
    ).train()


def by_transformers(gate: Gate, job: Job, rank: int) -> None:
    """transformers' own FSDP2: a model that is loaded with `DistributedConfig(fsdp_size=)`, and its `Trainer`."""
    from transformers import DataCollatorWithPadding, LlamaForCausalLM, PreTrainedTokenizerFast, Trainer
    from transformers import TrainingArguments as Arguments
    from transformers.distributed import DistributedConfig

    gate.imported()
    folder = Path(job.folder, "model")
    if rank == 0:
        whole_model(job).save_pretrained(folder)
    dist.barrier()
    split = DistributedConfig(fsdp_size=dist.get_world_size())
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, distributed_config=split).train()
    pad = DataCollatorWithPadding(PreTrainedTokenizerFast.from_pretrained(Path(job.folder, "words")))

    def collate(rows: list[dict[str, list[int]]]) -> Any:
        batch = pad(rows)
        return batch | {"labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, IGNORED)}

    seen = count_targets(model)
    asked = Arguments(str(Path(job.folder, "transformers")), **arguments_of_trainer(job))
    rows: Any = [{"input_ids": row} for row in job.rows()]
    Trainer(model, asked, collate, rows, callbacks=[at_the_gate(gate, seen)]).train()


def arguments_of_trainer(job: Job) -> dict[str, Any]:
    return {
        "use_cpu": True, "bf16": False, "gradient_checkpointing": False, "per_device_train_batch_size": job.batch,
        "max_steps": 10**6, "learning_rate": ADAMW["lr"], "weight_decay": 0.0, "lr_scheduler_type": "constant",
        "max_grad_norm": MAX_NORM, "optim": "adamw_torch_fused", "train_sampling_strategy": "sequential",
        "logging_steps": 1, "report_to": "none", "save_strategy": "no", "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }  # fmt: skip


def count_targets(model: Any) -> dict[str, int]:
    """Returns where the targets of the model's forwards are counted from now on."""
    seen = {"targets": 0}

    def count(_module: Any, _args: Any, given: dict[str, Any]) -> None:
        seen["targets"] += targets_of(given["labels"])

    model.register_forward_pre_hook(count, with_kwargs=True)
    return seen


def at_the_gate(gate: Gate, seen: dict[str, int]) -> Any:
    """Returns the callback of a `Trainer` that waits for its turn before each step."""
    from transformers import TrainerCallback

    class AtTheGate(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = not gate()

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if "loss" in logs:  # the last thing that a step does
                gate.saw(float(logs["loss"]), seen["targets"])
                seen["targets"] = 0
                control.should_training_stop = not gate()

    return AtTheGate()


def by_deepspeed(stage: int, offload: bool = False) -> Callable[[Gate, Job, int], None]:
    def train(gate: Gate, job: Job, rank: int) -> None:
        os.environ.update(DS_ACCELERATOR="cpu", MASTER_ADDR="127.0.0.1", MASTER_PORT="29531")
        import deepspeed
        import transformers.models.llama.modeling_llama  # noqa: F401

        gate.imported()
        deepspeed.init_distributed(dist_backend="gloo")
        zero: dict[str, Any] = {"stage": stage}
        if offload:
            zero["offload_optimizer"] = {"device": "cpu", "pin_memory": False}
        settings: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": job.batch,
            "gradient_clipping": MAX_NORM,
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 10**9,
        }
        model = whole_model(job)
        if offload:
            from deepspeed.ops.adam import DeepSpeedCPUAdam

            optimizer: Any = DeepSpeedCPUAdam(model.parameters(), adamw_mode=True, **ADAMW)
        else:
            optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), optimizer=optimizer, config=settings
        )

        def update(loss: torch.Tensor) -> None:
            engine.backward(loss)
            engine.step()

        loop(gate, job, rank, engine, update)

    return train


VARIANTS: dict[str, Callable[[Gate, Job, int], None]] = {
    REFERENCE: ddp_by_hand,
    "FSDP2 by hand": fsdp2_by_hand,
    "toolkit ddp": by_toolkit("ddp", packing=False),
    "toolkit zero2": by_toolkit("zero2", packing=False),
    "toolkit zero3": by_toolkit("zero3", packing=False),
    "toolkit zero2, offload": by_toolkit("zero2", packing=False, offload="optimizer"),
    "toolkit ddp, packed": by_toolkit("ddp", packing=True),
    "toolkit zero2, packed": by_toolkit("zero2", packing=True),
    "toolkit zero3, packed": by_toolkit("zero3", packing=True),
    "transformers' FSDP2": by_transformers,
    "TRL": by_trl(packing=False),
    "TRL, packed": by_trl(packing=True),
    "DeepSpeed ZeRO-1": by_deepspeed(1),
    "DeepSpeed ZeRO-2": by_deepspeed(2),
    "DeepSpeed ZeRO-3": by_deepspeed(3),
    "DeepSpeed ZeRO-2, offload": by_deepspeed(2, offload=True),
}
GROUPS = {
    "padded": [REFERENCE, "FSDP2 by hand", "toolkit ddp", "toolkit zero2", "toolkit zero3"],
    "packed": [REFERENCE, "toolkit ddp, packed", "toolkit zero2, packed", "toolkit zero3, packed"],
    "transformers": [REFERENCE, "transformers' FSDP2", "toolkit zero3", "toolkit zero3, packed"],
    "trl": [REFERENCE, "toolkit zero3, packed", "TRL", "TRL, packed"],
    "deepspeed": [REFERENCE, "DeepSpeed ZeRO-1", "DeepSpeed ZeRO-2", "DeepSpeed ZeRO-3"],
    "offload": [REFERENCE, "toolkit zero2, offload", "DeepSpeed ZeRO-2, offload"],
}  # fmt: skip
"""What takes turns: few at once, as each rank keeps its memory."""

NEEDS = {"TRL": "trl", "DeepSpeed": "deepspeed"}
TARGETS = [
    ("padded", "toolkit ddp", REFERENCE, 1.0),
    ("padded", "toolkit zero2", REFERENCE, 1.0),
    ("padded", "toolkit zero3", REFERENCE, 1.0),
    *(("packed", f"toolkit {word}, packed", REFERENCE, 1.9) for word in ("ddp", "zero2", "zero3")),
    ("transformers", "toolkit zero3", "transformers' FSDP2", 1.0),
    ("transformers", "toolkit zero3, packed", "transformers' FSDP2", 1.9),
    ("trl", "toolkit zero3, packed", "TRL", 2.5),
    ("trl", "toolkit zero3, packed", "TRL, packed", 1.2),
]
"""Useful tokens per CPU second: at least so many times as many as the other's, in that group."""


def work(pipe: Connection, variant: str, rank: int, ranks: int, meeting: str, job: Job) -> None:
    """One rank of one variant."""
    work_at(VARIANTS[variant], pipe, rank, ranks, meeting, job)


def work_at(
    train: Callable[[Gate, Job, int], None], pipe: Connection, rank: int, ranks: int, meeting: str, job: Job
) -> None:
    """One rank, which waits at a gate of its own; an error goes into the pipe."""
    try:
        turns.join(rank, ranks, meeting)
        with contextlib.redirect_stdout(sys.stderr):  # stdout holds the results
            train(Gate(pipe, job.steps), job, rank)
    except BaseException as error:
        traceback.print_exc()
        pipe.send(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")


def measure(variants: Sequence[str], job: Job, ranks: int, rounds: int) -> tuple[dict[str, Any], dict[str, str]]:
    """For each variant what its ranks measured in each round; and what was left out, with the reason."""
    left_out = {variant: reason for variant in variants if (reason := missing(variant))}
    ends = {}
    for variant in variants:
        if variant not in left_out:
            try:
                ends[variant] = turns.start(work, variant, ranks, job.folder, job)
            except RuntimeError as error:
                left_out[variant] = str(error)
    taken = turns.take(ends, rounds)
    for pipes in ends.values():
        turns.end(pipes)
    return taken, left_out


def missing(variant: str) -> str | None:
    needed = next((package for start, package in NEEDS.items() if variant.startswith(start)), None)
    return f"{needed} is not installed" if needed and importlib.util.find_spec(needed) is None else None


def record(
    rounds: list[list[dict[str, Any]]], reference: list[list[dict[str, Any]]], same_batches: bool
) -> dict[str, Any]:
    """A variant's figures: medians over the rounds, and ratios to the reference round by round."""
    rates = {kind: [rate(ranks, kind) for ranks in rounds] for kind in ("wall", "cpu")}
    others = {kind: [rate(ranks, kind) for ranks in reference] for kind in ("wall", "cpu")}
    losses, wanted = ([loss for ranks in every for loss in ranks[0]["losses"]] for every in (rounds, reference))
    differences = [abs(a / b - 1) for a, b in zip(losses, wanted, strict=True)]
    return {
        "tokens_per_second": round(statistics.median(rates["wall"]), 1),
        "tokens_per_cpu_second": round(statistics.median(rates["cpu"]), 1),
        "cpu_ratio": turns.ratios(rates["cpu"], others["cpu"]),
        "wall_ratio": turns.ratios(rates["wall"], others["wall"]),
        "peak_rank_bytes": max(rank["peak"] for rank in rounds[-1]),
        "peak_above_imports_bytes": max(rank["peak"] - rank["imported"] for rank in rounds[-1]),
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "loss_difference": max(differences) if same_batches else None,
    }


def rate(ranks: list[dict[str, Any]], kind: str) -> float:
    """Useful tokens of all ranks per second: of the slowest rank's clock, or of all ranks' CPU time."""
    seconds = [rank[kind] for rank in ranks]
    return sum(rank["targets"] for rank in ranks) / (sum(seconds) if kind == "cpu" else max(seconds))


def run_group(group: str, variants: Sequence[str], job: Job, ranks: int, rounds: int) -> Iterator[dict[str, Any]]:
    """A record for each variant, then one for each target."""
    taken, left_out = measure(variants, job, ranks, rounds)
    records = {}
    for variant, found in taken.items():
        records[variant] = record(found, taken[REFERENCE], same_batches="packed" not in variant)
        yield {"group": group, "variant": variant, **records[variant]}
    yield from ({"group": group, "variant": variant, "left_out": why} for variant, why in left_out.items())
    for where, ours, theirs, wanted in TARGETS:
        if where == group and ours in taken and theirs in taken:
            mine, other = ([rate(found, "cpu") for found in taken[variant]] for variant in (ours, theirs))
            found = turns.ratios(mine, other)
            yield {"group": group, "target": f"{ours} / {theirs}", "wanted": wanted, "cpu_ratio": found}


def table(records: Sequence[dict[str, Any]]) -> None:
    columns = [
        "",
        "tokens / CPU s",
        "of DDP by hand",
        "quartiles",
        "tokens / s",
        "peak MiB",
        "above imports",
        "loss differs",
    ]
    rows = []
    for row in (row for row in records if "variant" in row):
        name = f"{row['group']}: {row['variant']}"
        if "left_out" in row:
            rows.append([f"{name} ({row['left_out']})"])
            continue
        ratio, differs = row["cpu_ratio"], row["loss_difference"]
        speed = (row["tokens_per_cpu_second"], ratio["ratio"], f"{ratio['low']:.3f}-{ratio['high']:.3f}")
        memory = (row["peak_rank_bytes"] >> 20, row["peak_above_imports_bytes"] >> 20)
        same = None if differs is None else f"{differs:.0e}"
        rows.append([name, *speed, row["tokens_per_second"], *memory, same])
    show("Useful tokens (targets)", columns, rows)
    rows = [
        [
            row["target"],
            row["wanted"],
            row["cpu_ratio"]["ratio"],
            "yes" if row["cpu_ratio"]["ratio"] >= row["wanted"] else "NO",
        ]
        for row in records
        if "target" in row
    ]
    show("Targets, useful tokens per CPU second", ["", "at least", "found", "met"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", nargs="+", choices=list(GROUPS), default=list(GROUPS))
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), help="of these groups; all, if left out")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=2, help="of a variant's turn")
    parser.add_argument("--tiny", action="store_true", help="a model and rows that say nothing about speed")
    parser.add_argument("--output", type=Path, help="file to which lines of JSON are added")
    options = parser.parse_args()
    told = facts("trl", "deepspeed")
    records = []
    for group in options.groups:
        wanted = options.variants or list(VARIANTS)
        chosen = [variant for variant in GROUPS[group] if variant in (REFERENCE, *wanted)]
        with tempfile.TemporaryDirectory() as folder:
            length, config = (64, TINY) if options.tiny else (512, FULL)
            job = Job(folder, config, length, 4, options.steps)
            write_rows(job, 64 if options.tiny else ROWS)
            write_recipe(job)
            size = {"parameters": sum(p.numel() for p in whole_model(job).parameters()), "max_length": length}
            for found in run_group(group, chosen, job, options.ranks, options.rounds):
                records.append({**told, "ranks": options.ranks, "rounds": options.rounds, **size, **found})
                tell(records[-1], options.output)
    table(records)


if __name__ == "__main__":
    main()

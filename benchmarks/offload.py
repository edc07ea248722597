"""Offload of optimizer state: time, tokens per second and memory of a step, against not offloading and against others.

    python benchmarks/offload.py [--sizes 1b 3b] [--tokens 4096 16384 65536] [--output benchmarks/results/offload.jsonl]

On a GPU one variant runs after the other, and the run ends by itself before `--seconds`. On CPU ranks
the variants take turns in one run, and the ratio to ordinary mixed precision is the median over the
rounds. Clipping is on, except where a tool has none. Models are Llama shapes with weights that mean
nothing; blocks are checkpointed. Prints a line of JSON for each measurement, then a table; `--output`
keeps the lines, and a plot beside them where matplotlib is installed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import resource
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import turns
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))  # the repository itself, installed or not

MAX_NORM, LEARNING_RATE = 1.0, 1e-5
BASELINE = "no offload"


@dataclass(frozen=True)
class Shape:
    """A Llama: hidden, MLP, blocks, heads, key-value heads, vocabulary, tied; and the length of a row (tokens)."""

    hidden: int
    mlp: int
    blocks: int
    heads: int
    kv_heads: int
    vocabulary: int
    tied: bool
    row: int


SIZES = {
    "tiny": Shape(64, 128, 2, 4, 2, 256, True, 32),
    "small": Shape(512, 1408, 6, 8, 4, 8192, True, 128),
    "1b": Shape(2048, 8192, 16, 32, 8, 128256, True, 4096),
    "3b": Shape(3072, 8192, 28, 24, 8, 128256, True, 4096),
    "7b": Shape(4096, 11008, 32, 32, 32, 32000, False, 4096),
}
MICRO_BATCH_ROWS = 4


@dataclass(frozen=True)
class Job:
    """What is measured: a size, tokens per optimizer step and rank, steps per turn."""

    size: str
    tokens: int
    steps: int

    @property
    def shape(self) -> Shape:
        return SIZES[self.size]

    @property
    def rows(self) -> int:
        """Of a micro-batch."""
        return min(MICRO_BATCH_ROWS, self.tokens // self.shape.row)

    @property
    def accumulation(self) -> int:
        return self.tokens // (self.rows * self.shape.row)


Turn = Callable[[], None]


def config_of(job: Job) -> Any:
    from transformers import LlamaConfig

    shape = job.shape
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.mlp,
        num_hidden_layers=shape.blocks,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        tie_word_embeddings=shape.tied,
        max_position_embeddings=shape.row,
    )
    config.use_cache = False
    return config


def meta_model(job: Job) -> Any:
    """A model without memory for its parameters."""
    from accelerate import init_empty_weights
    from transformers import LlamaForCausalLM

    with init_empty_weights(include_buffers=False):
        model = LlamaForCausalLM(config_of(job))
    model.tie_weights()
    return model


def values(shape: torch.Size) -> torch.Tensor:
    """Float32 weights of a usual size; a random tile, repeated, as drawing billions takes minutes."""
    if len(shape) == 1:
        return torch.ones(shape)
    tile = torch.randn(2**20, generator=torch.Generator().manual_seed(0)) * 0.02
    numel = shape.numel()
    return tile.repeat(-(-numel // tile.numel()))[:numel].view(shape)


def loader_of(model: Any) -> Any:
    """Returns what gives a sharded meta model its weights when the toolkit asks for them, as its own loader does."""

    def materialize(keep_master: Any = None) -> None:
        from torch.distributed.tensor import DTensor

        made: dict[int, nn.Parameter] = {}
        state = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if id(parameter) not in made:
                rows = values(parameter.to_local().shape)
                if keep_master is not None and parameter.requires_grad:
                    keep_master(name, rows)
                mesh = parameter.device_mesh
                local = rows.to(mesh.device_type, parameter.dtype)
                whole = DTensor.from_local(
                    local, mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride()
                )
                made[id(parameter)] = nn.Parameter(whole, requires_grad=parameter.requires_grad)
            state[name] = made[id(parameter)]
        model.load_state_dict(state, strict=False, assign=True)

    return materialize


def batches(job: Job, device: torch.device, rank: int) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    while True:
        ids = torch.randint(0, job.shape.vocabulary, (job.rows, job.shape.row), generator=generator)
        yield ids.to(device, non_blocking=True)


def loss_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=ids).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def by_toolkit(job: Job, device: torch.device, rank: int, offload: Any) -> Turn:
    """The stock Accelerator with the toolkit's backend."""
    from accelerate import Accelerator

    from toolkit.sharding import Checkpointing, sharding_kwargs

    accelerator = Accelerator(
        mixed_precision="bf16",
        gradient_accumulation_steps=job.accumulation,
        **sharding_kwargs("zero3", offload=offload, checkpointing=Checkpointing(1)),
    )
    model = meta_model(job)
    accelerator.state.fsdp_plugin.load_weights = loader_of(model)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    source = batches(job, device, rank)

    def step() -> None:
        for _ in range(job.accumulation):
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, next(source)))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
                optimizer.step()
                optimizer.zero_grad()

    return step


def by_fsdp2(job: Job, device: torch.device, rank: int, offload_parameters: bool) -> Turn:
    """Mixed precision by hand on FSDP2: float32 shards, bf16 compute, float32 reduction."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
    from torch.utils.checkpoint import checkpoint

    model = meta_model(job)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    where = CPUOffloadPolicy(pin_memory=device.type == "cuda") if offload_parameters else OffloadPolicy()
    for block in model.model.layers:
        plain = block.forward
        block.forward = lambda *args, plain=plain, **kwargs: checkpoint(plain, *args, use_reentrant=False, **kwargs)
        fully_shard(block, mesh=mesh, mp_policy=policy, offload_policy=where)
    fully_shard(model, mesh=mesh, mp_policy=policy, offload_policy=where)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.to_empty(device="cpu" if offload_parameters else device)
    for name in buffers:
        model.get_submodule(name.rpartition(".")[0]).register_buffer(
            name.rpartition(".")[2], buffers[name].to(device), persistent=False
        )
    with torch.no_grad():
        for parameter in model.parameters():
            local = parameter.to_local()
            local.copy_(values(local.shape))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    source = batches(job, device, rank)

    def step() -> None:
        for _ in range(job.accumulation):
            (loss_of(model, next(source)) / job.accumulation).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()

    return step


def whole_model(job: Job, device: torch.device) -> Any:
    from transformers import LlamaForCausalLM

    with torch.device(device):
        model = LlamaForCausalLM(config_of(job)).to(torch.bfloat16)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def by_deepspeed(job: Job, device: torch.device, rank: int, stage: int) -> Turn:
    """ZeRO-Offload: DeepSpeed's own CPU Adam."""
    import deepspeed

    deepspeed.init_distributed(dist_backend=dist.get_backend())
    settings = {
        "train_micro_batch_size_per_gpu": job.rows,
        "gradient_accumulation_steps": job.accumulation,
        "gradient_clipping": MAX_NORM,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE}},
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": True,
            "offload_optimizer": {"device": "cpu", "pin_memory": device.type == "cuda"},
        },
        "steps_per_print": 10**9,
    }
    model = whole_model(job, device)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)
    source = batches(job, device, rank)

    def step() -> None:
        for _ in range(job.accumulation):
            engine.backward(loss_of(engine, next(source)))
            engine.step()

    return step


def by_torchao(job: Job, device: torch.device, rank: int) -> Turn:
    """One GPU, bf16 without masters, no clipping: what it can do."""
    from torchao.optim import CPUOffloadOptimizer

    model = whole_model(job, device)
    optimizer = CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, lr=LEARNING_RATE, fused=True)
    source = batches(job, device, rank)

    def step() -> None:
        for _ in range(job.accumulation):
            (loss_of(model, next(source)) / job.accumulation).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def ours(executor: str, device_state_gib: float = 0.0) -> Callable[[Job, torch.device, int], Turn]:
    def build(job: Job, device: torch.device, rank: int) -> Turn:
        from toolkit.sharding import OffloadSettings

        settings = OffloadSettings(executor=executor, device_state_gib=device_state_gib)  # type: ignore[arg-type]
        return by_toolkit(job, device, rank, settings)

    return build


VARIANTS: dict[str, Callable[[Job, torch.device, int], Turn]] = {
    BASELINE: lambda job, device, rank: by_fsdp2(job, device, rank, offload_parameters=False),
    "ours, no offload": lambda job, device, rank: by_toolkit(job, device, rank, "none"),
    "ours, cpu_fused": ours("cpu_fused"),
    "ours, device_stream": ours("device_stream"),
    "ours, cpu_torch": ours("cpu_torch"),
    "ours, auto, 4 GiB on the device": ours("auto", 4.0),
    "ours, auto, 12 GiB on the device": ours("auto", 12.0),
    "DeepSpeed ZeRO-2 offload": lambda job, device, rank: by_deepspeed(job, device, rank, 2),
    "DeepSpeed ZeRO-3 offload": lambda job, device, rank: by_deepspeed(job, device, rank, 3),
    "FSDP2 CPUOffloadPolicy": lambda job, device, rank: by_fsdp2(job, device, rank, offload_parameters=True),
    "torchao CPUOffloadOptimizer": by_torchao,
}
ON_CPU = (BASELINE, "ours, no offload", "ours, cpu_torch", "ours, cpu_fused", "ours, device_stream")
NEEDS = {"DeepSpeed": "deepspeed", "torchao": "torchao"}


def work(pipe: Connection, variant: str, rank: int, ranks: int, meeting: str, job: Job) -> None:
    """One rank of one variant."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29511")
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    try:
        if on_gpu:
            torch.cuda.set_device(device)
        else:
            os.environ.update(ACCELERATE_USE_CPU="true", OMP_NUM_THREADS="1")
            torch.set_num_threads(1)
        backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
        dist.init_process_group(backend, init_method=meeting, rank=rank, world_size=ranks)
        with quiet():
            step = VARIANTS[variant](job, device, rank)
            step()  # state that is made on first use
        pipe.send("ready")
    except BaseException as error:
        traceback.print_exc()
        pipe.send(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
        return
    while pipe.recv() == "go":
        pipe.send(measured(step, job.steps, device))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """What libraries print goes to stderr: stdout holds the results."""
    with contextlib.redirect_stdout(sys.stderr):
        yield


def measured(step: Turn, steps: int, device: torch.device) -> dict[str, float]:
    handle: Any = getattr(torch, device.type)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    dist.barrier()
    handle.synchronize()
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(steps):
        step()
    handle.synchronize()
    dist.barrier()
    return {
        "wall": (time.perf_counter() - wall) / steps,
        "cpu": (time.process_time() - cpu) / steps,
        "device_peak": torch.cuda.max_memory_allocated() if device.type == "cuda" else 0,
        "device_between": torch.cuda.memory_allocated() if device.type == "cuda" else 0,
        "host_peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def run_job(job: Job, variants: Sequence[str], ranks: int, rounds: int, until: float) -> Iterator[dict[str, Any]]:
    """A record for every variant; those that fail, or that there is no time for, say so."""
    on_gpu = torch.cuda.is_available()
    groups = [[variant] for variant in variants] if on_gpu else [list(variants)]
    base: list[dict[str, float]] | None = None
    for group in groups:
        if time.monotonic() > until:
            yield from ({"variant": variant, "left_out": "no time left"} for variant in group)
            continue
        rows, failed = take_turns(job, group, ranks, rounds)
        yield from ({"variant": variant, "left_out": why} for variant, why in failed.items())
        base = rows.get(BASELINE, base)
        for variant, found in rows.items():
            yield record(job, variant, found, base, ranks, interleaved=not on_gpu)


def take_turns(
    job: Job, variants: Sequence[str], ranks: int, rounds: int
) -> tuple[dict[str, list[dict[str, float]]], dict[str, str]]:
    """Measurements of every round, the slowest rank's or the sum over ranks; and what could not be started."""
    failed: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder:
        ends = {}
        for variant in variants:
            try:
                ends[variant] = turns.start(work, variant, ranks, folder, job)
            except RuntimeError as error:
                failed[variant] = str(error)
        rows: dict[str, list[dict[str, float]]] = {variant: [] for variant in ends}
        for number in range(rounds):
            for variant in ends if number % 2 else reversed(ends):
                taken = turns.turn(ends[variant])
                whole = {key: max(rank[key] for rank in taken) for key in taken[0]}
                rows[variant].append({**whole, "cpu": sum(rank["cpu"] for rank in taken)})
        for pipes in ends.values():
            turns.stop(pipes)
            for pipe in pipes:
                with contextlib.suppress(EOFError, OSError):
                    pipe.recv()  # the end of the process, and with it of its memory
    return rows, failed


def record(
    job: Job,
    variant: str,
    found: list[dict[str, float]],
    base: list[dict[str, float]] | None,
    ranks: int,
    interleaved: bool,
) -> dict[str, Any]:
    seconds = statistics.median(row["wall"] for row in found)
    tokens_per_second = job.tokens * ranks / seconds
    parameters = num_parameters(job)
    peak = peak_flops()
    told: dict[str, Any] = {
        "variant": variant,
        "step_seconds": round(seconds, 4),
        "tokens_per_second": round(tokens_per_second, 1),
        "mfu": round(tokens_per_second * flops_per_token(job) / (peak * ranks), 4) if peak else None,
        "peak_device_bytes": max(row["device_peak"] for row in found) or None,
        "device_bytes_per_parameter_between_steps": round(found[-1]["device_between"] * ranks / parameters, 3) or None,
        "peak_host_bytes": max(row["host_peak"] for row in found),
    }
    if base is not None:
        kinds = (("step", "wall"), ("cpu", "cpu")) if interleaved else ()
        told["speed_of_no_offload"] = round(statistics.median(row["wall"] for row in base) / seconds, 4)
        told |= {
            f"{name}_ratio": turns.ratios([row[key] for row in found], [row[key] for row in base])
            for name, key in kinds
        }
    return told


def num_parameters(job: Job) -> int:
    return sum(parameter.numel() for parameter in meta_model(job).parameters())


def flops_per_token(job: Job) -> float:
    """6 N + 12 L H T of PaLM, appendix B (arXiv 2204.02311); N without the input embeddings, but with the head."""
    shape = job.shape
    parameters = num_parameters(job) - (0 if shape.tied else shape.vocabulary * shape.hidden)
    return 6 * parameters + 12 * shape.blocks * shape.hidden * shape.row


def peak_flops() -> float | None:
    from toolkit.planning.hardware import preset_of_device

    preset = preset_of_device(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
    return preset.peak_flops["bfloat16"] if preset is not None else None


def machine() -> dict[str, Any]:
    versions = {}
    for package in ("torch", "accelerate", "transformers", "deepspeed", "torchao"):
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = version(package)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    return {
        "date": time.strftime("%Y-%m-%d"),
        "device": device,
        "cores": len(os.sched_getaffinity(0)),
        "versions": versions,
    }


def installed(variant: str) -> bool:
    needs = next((package for start, package in NEEDS.items() if variant.startswith(start)), None)
    try:
        return needs is None or bool(version(needs))
    except PackageNotFoundError:
        return False


def table(records: Sequence[dict[str, Any]]) -> str:
    lines = [f"{'model':<7}{'tokens':>8}  {'variant':<34}{'step s':>9}{'tokens/s':>11}{'speed':>8}{'GiB':>8}{'MFU':>7}"]
    for row in records:
        start = f"{row['model']:<7}{row['tokens_per_step']:>8}  {row['variant']:<34}"
        if "left_out" in row:
            lines.append(f"{start}  {row['left_out']}")
            continue
        memory = (row["peak_device_bytes"] or row["peak_host_bytes"]) / 2**30
        mfu = f"{row['mfu']:>7.1%}" if row["mfu"] else f"{'':>7}"
        speed = row.get("step_ratio", {}).get("ratio")
        speed = 1 / speed if speed else row.get("speed_of_no_offload", float("nan"))
        numbers = f"{row['step_seconds']:>9.3f}{row['tokens_per_second']:>11,.0f}{speed:>8.3f}{memory:>8.2f}{mfu}"
        lines.append(start + numbers)
    return "\n".join(lines)


def plot(records: Sequence[dict[str, Any]], path: Path) -> None:
    """Tokens per second against tokens per step, a panel for each model."""
    try:
        import matplotlib

        matplotlib.use("agg")
        from matplotlib import pyplot
    except ImportError:
        return
    done = [row for row in records if "left_out" not in row]
    models = list(dict.fromkeys(row["model"] for row in done))
    if not models:
        return
    figure, axes = pyplot.subplots(1, len(models), figsize=(6 * len(models), 4.5), squeeze=False)
    for axis, model in zip(axes[0], models, strict=True):
        for variant in dict.fromkeys(row["variant"] for row in done):
            rows = [row for row in done if row["model"] == model and row["variant"] == variant]
            points = sorted((row["tokens_per_step"], row["tokens_per_second"]) for row in rows)
            axis.plot(*zip(*points, strict=True) if points else ([], []), marker="o", label=variant)
        axis.set(title=model, xlabel="tokens per step and rank", ylabel="tokens per second", xscale="log")
        axis.set_ylim(bottom=0)
    axes[0][-1].legend(fontsize="x-small")
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=["1b", "3b"] if on_gpu else ["small"])
    parser.add_argument(
        "--tokens", nargs="+", type=int, default=[16384, 65536, 4096] if on_gpu else [512], help="per step and rank"
    )
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), help="all that are installed, if left out")
    parser.add_argument("--ranks", type=int, default=1 if on_gpu else 2)
    parser.add_argument("--rounds", type=int, default=2 if on_gpu else 12)
    parser.add_argument("--steps", type=int, default=2, help="of a variant's turn")
    parser.add_argument("--seconds", type=float, default=480, help="no variant is started after that")
    parser.add_argument("--output", type=Path, help="file of JSON lines; a plot goes beside it")
    options = parser.parse_args()
    until = time.monotonic() + options.seconds
    wanted = options.variants or [v for v in (VARIANTS if on_gpu else ON_CPU) if installed(v)]
    facts, records = machine(), []
    for tokens in options.tokens:
        for size in options.sizes:
            job = Job(size, tokens, options.steps)
            told = {"model": size, "parameters": num_parameters(job), "tokens_per_step": tokens, "ranks": options.ranks}
            for found in run_job(job, wanted, options.ranks, options.rounds, until):
                records.append({**facts, **told, **found})
                print(json.dumps(records[-1]), flush=True)
                if options.output is not None:
                    lines = "".join(json.dumps(row) + "\n" for row in records)
                    options.output.write_text(lines, encoding="utf-8")
    print(table(records))
    if options.output is not None:
        plot(records, options.output.with_suffix(".png"))


if __name__ == "__main__":
    main()

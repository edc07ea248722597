"""The `toolkit` command, and what recipes/finetune.py runs."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import toolkit
from toolkit.errors import BadInputError, StoppedError, ToolkitError
from toolkit.places import DATA_SUFFIXES
from toolkit.recipe.load import find_recipe, shipped_recipes
from toolkit.recipe.recipe import Recipe

if TYPE_CHECKING:
    from toolkit.verify import Report

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Fine-tune Hugging Face models by recipe.")
recipes_app = typer.Typer(invoke_without_command=True, help="List the shipped recipes, or copy one.")
app.add_typer(recipes_app, name="recipes")

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]

PATIENCE_SECONDS = 20.0
"""How long other ranks stay alive after an error, so that rank 0 gets to print it before a launcher ends it."""


PATIENCE_WHEN_STOPPED = 2.0
"""The same where all ranks end for one reason at one time."""


def main() -> None:
    """Entry point of the `toolkit` command. Exit codes: 0 done, 1 failed, 2 bad input."""
    try:
        app(standalone_mode=True)
    except ToolkitError as error:
        sys.exit(_fail(error))


def finetune_command(arguments: list[str]) -> int:
    """`recipes/finetune.py [--recipe NAME_OR_PATH] [section.key=value ...]`; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="finetune.py",
        description="Fine-tune a model by a recipe.",
        epilog="recipes:\n" + "\n".join(f"  {row['name']:<16} {row['description']}" for row in _recipe_rows()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--recipe", default="quickstart", metavar="NAME_OR_PATH", help="default: quickstart")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="section.key=value",
        help="replaces a value of the recipe, for example training.max_steps=50",
    )
    options = parser.parse_intermixed_args(arguments)
    try:
        recipe = Recipe.load(options.recipe, options.overrides)
        from toolkit.run.run import finetune  # torch is imported only for a recipe that is right

        finetune(recipe)
    except ToolkitError as error:
        return _fail(error)
    return 0


def _fail(error: ToolkitError) -> int:
    """Prints the error once for all ranks; the exit code."""
    if int(os.environ.get("RANK", "0")) == 0:
        word = "" if isinstance(error, StoppedError) else "[bold red]error:[/] "
        Console(stderr=True, highlight=False, soft_wrap=True).print(word + escape(str(error)))
    elif int(os.environ.get("WORLD_SIZE", "1")) > 1:
        time.sleep(PATIENCE_WHEN_STOPPED if isinstance(error, StoppedError) else PATIENCE_SECONDS)
    return error.exit_code


def _version(asked: bool) -> None:
    if asked:
        print(f"toolkit {toolkit.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Fine-tune Hugging Face models by recipe."""


@recipes_app.callback()
def list_recipes(context: typer.Context, as_json: AsJson = False) -> None:
    """List the shipped recipes with one line each."""
    if context.invoked_subcommand is not None:
        return
    rows = _recipe_rows()
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    _print_table(["recipe", "what it does"], [[row["name"], row["description"]] for row in rows])


@recipes_app.command("copy")
def copy_recipe(
    name: Annotated[str, typer.Argument(help="Name of a shipped recipe.")],
    path: Annotated[Path, typer.Argument(help="New file, or a folder.")],
) -> None:
    """Copy a shipped recipe, to make it yours; files that it names keep being found."""
    source = find_recipe(name)
    target = path / source.name if path.is_dir() else path
    if target.suffix not in (".yaml", ".yml"):
        raise BadInputError(f"{str(target)!r}: a recipe's file ends in .yaml")
    if target.exists():
        raise BadInputError(f"{str(target)!r} exists; name another file or delete it")
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    target.write_text(_with_absolute_files(source), encoding="utf-8")
    print(f"{target}: a copy of {name}. Run it with --recipe {target}")


def _with_absolute_files(source: Path) -> str:
    """A recipe's text, comments included, with the files it names relative to itself made absolute."""
    text = source.read_text(encoding="utf-8")
    recipe = Recipe.load(source)
    for absolute in [source.path for source in [*recipe.data.train, *(recipe.data.validation or [])]]:
        if absolute.endswith(DATA_SUFFIXES) and Path(absolute).is_relative_to(source.parent):
            text = text.replace(str(Path(absolute).relative_to(source.parent)), absolute)
    return text


@app.command()
def validate(
    recipe: Annotated[str, typer.Argument(help="Name or path of a recipe.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="section.key=value", help="Replaced values.")] = None,
    as_json: AsJson = False,
) -> None:
    """Check a recipe and print it resolved, with where each value came from."""
    origins = Recipe.load(recipe, overrides or []).origins()
    if as_json:
        print(json.dumps({key: {"value": value, "from": origin} for key, (value, origin) in origins.items()}, indent=2))
        return
    _print_table(["key", "value", "from"], [[key, _shown(value), origin] for key, (value, origin) in origins.items()])


@app.command("data")
def data_command(
    recipe: Annotated[str, typer.Argument(help="Name or path of a recipe.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="section.key=value", help="Replaced values.")] = None,
    output: Annotated[
        Path | None,
        typer.Option(help="Folder for data_report.json and the page data_report.html.", show_default=False),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Read and tokenise a recipe's data, and show what a run would train on; nothing is trained."""
    loaded = Recipe.load(recipe, overrides or [])
    from toolkit.cli.look import look_at_data  # torch is imported only for a recipe that is right

    report = look_at_data(loaded, output).to_dict()
    if as_json:
        print(json.dumps(report, indent=1))
        return
    from toolkit.pages.data_console import show_report

    console = Console(highlight=False)
    show_report(console, report)
    if output is not None:
        console.print(f"page: {output / 'data_report.html'}", markup=False, soft_wrap=True)


@app.command("verify")
def verify_command(
    overrides: Annotated[list[str] | None, typer.Argument(metavar="section.key=value", help="Replaced values.")] = None,
    recipe: Annotated[str, typer.Option(help="Name or path of a recipe.")] = "quickstart",
    accelerate_config: Annotated[
        Path | None,
        typer.Option(
            help="Accelerate config: strategy, number of processes, precision. By default what `accelerate launch` "
            "reads, or else two ranks under zero3.",
            show_default=False,
        ),
    ] = None,
    steps: Annotated[int, typer.Option(help="Optimizer steps to compare.")] = 5,
    layers: Annotated[
        int | None,
        typer.Option(help="Keep the model's first so many blocks; random weights where none fit.", show_default=False),
    ] = None,
    time_limit: Annotated[float, typer.Option(help="End the ranks after so long (seconds).")] = 1800.0,
    as_json: AsJson = False,
) -> None:
    """Train a few steps on one process and sharded, and compare losses, gradients and weights.

    The ranks run on this machine, on the CPU where it has too few GPUs; dropout is off, and no output
    folder is touched. Exit codes: 0 all checks hold, 1 one failed, 2 bad input.
    """
    loaded = Recipe.load(recipe, overrides or [])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # clears up, as after Ctrl-C
    from toolkit.verify import FAILED, verify  # torch is imported only for a recipe that is right

    progress = Console(stderr=True, highlight=False, soft_wrap=True)
    report = verify(
        loaded,
        accelerate_config,
        steps=steps,
        layers=layers,
        time_limit_seconds=time_limit,
        tell=lambda line: progress.print(line, markup=False),
    )
    if as_json:
        print(report.to_json())
    else:
        _print_report(report)
    if report.verdict == FAILED:
        raise typer.Exit(1)


@app.command("plan")
def plan_command(
    overrides: Annotated[list[str] | None, typer.Argument(metavar="section.key=value", help="Replaced values.")] = None,
    recipe: Annotated[str, typer.Option(help="Name or path of a recipe.")] = "quickstart",
    gpus: Annotated[
        int | None, typer.Option(help="Devices, one rank each; by default the config's, or 1.", show_default=False)
    ] = None,
    hardware: Annotated[
        str, typer.Option(help="Preset, `calibrated`, or a profile's path; presets: --list-hardware.")
    ] = "h100_sxm",
    accelerate_config: Annotated[
        Path | None,
        typer.Option(help="Accelerate config: ranks, strategy, precision as the recipe stands.", show_default=False),
    ] = None,
    gpus_per_node: Annotated[int | None, typer.Option(help="Devices of a node.", show_default="preset's")] = None,
    device_memory_gib: Annotated[float | None, typer.Option(help="Of one device.", show_default="preset's")] = None,
    host_memory_gib: Annotated[float | None, typer.Option(help="Of one node.", show_default="preset's")] = None,
    link_gbs: Annotated[
        float | None, typer.Option(help="Between devices of a node (GB/s each way).", show_default="preset's")
    ] = None,
    nic_gbs: Annotated[
        float | None, typer.Option(help="Between nodes (GB/s a node each way).", show_default="preset's")
    ] = None,
    pcie_gbs: Annotated[
        float | None, typer.Option(help="Between device and host (GB/s each way).", show_default="preset's")
    ] = None,
    dram_gbs: Annotated[float | None, typer.Option(help="Host memory (GB/s a node).", show_default="preset's")] = None,
    every_row: Annotated[bool, typer.Option("--all", help="Show every row.")] = False,
    explain: Annotated[bool, typer.Option("--explain", help="Show the formulas with the numbers in.")] = False,
    trace: Annotated[bool, typer.Option("--trace", help="Confirm the row by running FSDP2 without memory.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw the bars to this file.", show_default=False)] = None,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Measure this machine, store it as `calibrated`, and end.")
    ] = False,
    list_hardware: Annotated[bool, typer.Option("--list-hardware", help="List the presets, and end.")] = False,
    as_json: AsJson = False,
) -> None:
    """Say before a run whether it fits, what to pick, and how fast it will be.

    Needs no GPU and no weights: the model's configuration is enough. Exit codes: 0 something fits,
    1 nothing does, 2 bad input.
    """
    from toolkit.planning.time.hardware import hardware_of, presets

    if list_hardware:
        rows = [
            [name, f"{h.memory_bytes / 2**30:.0f} GiB", f"{h.peak_flops['bfloat16'] / 1e12:.0f}"]
            for name, h in presets().items()
        ]
        _print_table(["hardware", "memory", "TFLOP/s in bfloat16"], rows)
        return
    if calibrate:
        _calibrate(gpus or 1)
        return
    loaded = Recipe.load(recipe, overrides or [])
    device = hardware_of(
        hardware,
        device_memory_gib=device_memory_gib,
        gpus_per_node=gpus_per_node,
        host_memory_gib=host_memory_gib,
        link_gbs=link_gbs,
        nic_gbs=nic_gbs,
        pcie_gbs=pcie_gbs,
        dram_gbs=dram_gbs,
    )
    from toolkit.cli import planned as command  # torch is imported only for a recipe that is right

    accelerated = command.Accelerated() if accelerate_config is None else command.accelerated_by(accelerate_config)
    options = command.PlanOptions(every_row, explain, trace, plot, as_json)
    if not command.plan_command(loaded, recipe, overrides or [], device, gpus, accelerated, options):
        raise typer.Exit(1)


def _calibrate(ranks: int) -> None:
    from toolkit.planning.time.calibrate import calibrate
    from toolkit.planning.time.hardware import profile_path

    found = calibrate(ranks=ranks)
    rows = [
        *([f"{dtype} products", f"{flops / 1e12:.3g} TFLOP/s"] for dtype, flops in found.peak_flops.items()),
        ["device memory", f"{found.memory_bandwidth / 1e9:.3g} GB/s"],
        ["between devices", f"{found.link_bandwidth / 1e9:.3g} GB/s"],
        ["device to host", f"{found.host_link_bandwidth / 1e9:.3g} GB/s"],
        ["host memory", f"{found.host_memory_bandwidth / 1e9:.3g} GB/s"],
    ]
    _print_table(["measured", found.name], rows)
    print(f"{profile_path()}: use it with --hardware calibrated")


@app.command("checkpoints")
def checkpoints_command(
    run: Annotated[Path, typer.Argument(help="Folder of a run.")],
    check: Annotated[bool, typer.Option("--verify", help="Read every file and compare its checksum.")] = False,
    as_json: AsJson = False,
) -> None:
    """List a run's checkpoints. Exit code 1 where one was finished and is not whole any more."""
    from toolkit.checkpoint.manifest import check_files, list_checkpoints

    if not run.is_dir():
        raise BadInputError(f"{str(run)!r}: no such folder; name the training.output_dir of a run")
    rows = []
    for found in list_checkpoints(run):
        problem, manifest = found.problem, found.manifest
        if check and manifest is not None and problem is None:
            problem = check_files(found.folder, manifest, manifest.files)
        row: dict[str, Any] = {"step": found.step, "folder": str(found.folder), "problem": problem}
        if manifest is not None:
            size = sum(entry.bytes for entry in manifest.files.values())
            row |= {
                "samples": manifest.samples,
                "ranks": manifest.world_size,
                "strategy": manifest.strategy,
                "bytes": size,
            }
            row |= {"precision": manifest.precision, "eval_loss": manifest.eval_loss, "date": manifest.date}
        rows.append(row)
    if as_json:
        print(json.dumps(rows, indent=2))
    else:
        columns = ["step", "samples", "ranks", "strategy", "precision", "eval_loss", "bytes", "date", "problem"]
        cells = [[_cell(row.get(column), "whole" if column == "problem" else "") for column in columns] for row in rows]
        _print_table([*columns[:-1], "state"], cells)
    if any(row["problem"] is not None and "ranks" in row for row in rows):
        raise typer.Exit(1)


def _cell(value: Any, missing: str) -> str:
    if value is None:
        return missing
    return f"{value:.4f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


@app.command("export")
def export_command(
    run: Annotated[Path, typer.Argument(help="Folder of a run.")],
    to: Annotated[Path, typer.Option(help="New folder, for from_pretrained.")],
    checkpoint: Annotated[
        int | None, typer.Option(help="Step of the checkpoint; by default the last.", show_default=False)
    ] = None,
    dtype: Annotated[str, typer.Option(help="Type of the weights: float32, bfloat16 (bf16) or float16.")] = "float32",
    check: Annotated[bool, typer.Option("--verify/--no-verify", help="Reload it and compare logits.")] = True,
    max_shard_gib: Annotated[float, typer.Option(help="Largest safetensors file (GiB).")] = 5.0,
) -> None:
    """Make a Hugging Face folder of a checkpoint: on one process, with one of its files in memory at a time."""
    types = {"float32": "float32", "bfloat16": "bfloat16", "bf16": "bfloat16", "float16": "float16"}
    if dtype not in types:
        raise BadInputError(f"--dtype: unknown {dtype!r}; allowed: {', '.join(types)}")
    from toolkit.checkpoint.manifest import latest, read_checkpoint, step_folder

    if checkpoint is not None:
        folder = step_folder(run, checkpoint)
    elif (last := latest(run)) is not None:
        folder = last.folder
    else:
        raise BadInputError(f"{str(run)!r} has no whole checkpoint; see toolkit checkpoints {run}")
    manifest = read_checkpoint(folder)
    import torch

    from toolkit.checkpoint.consolidate import export_checkpoint
    from toolkit.checkpoint.export import ExportSettings

    settings = ExportSettings(getattr(torch, types[dtype]), int(max_shard_gib * 2**30))
    difference = export_checkpoint(run, folder, manifest, to, settings, check)
    checked = "" if difference is None else f"; logits differ by {difference:.1e} of the largest"
    print(f"{to}: step {manifest.step} in {types[dtype]}{checked}")


@app.command("generate")
def generate_command(
    source: Annotated[
        str, typer.Argument(help="Folder of a run, of an export or of an adapter, or a hub name.", show_default=False)
    ],
    prompt: Annotated[str | None, typer.Option(help="Write what follows this text.", show_default=False)] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Hold a conversation; /reset forgets it, /quit ends.")] = False,
    file: Annotated[
        Path | None, typer.Option(help="Complete the prompts of a .txt or .jsonl file.", show_default=False)
    ] = None,
    evaluation: Annotated[
        Path | None, typer.Option("--eval", help="Count right answers to a .jsonl file.", show_default=False)
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="File for --file's completions; by default stdout.", show_default=False)
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Prompts are plain text; no chat template.")] = False,
    system: Annotated[str | None, typer.Option(help="System text of the conversation.", show_default=False)] = None,
    strict: Annotated[bool, typer.Option("--strict", help="With --eval: case and whitespace matter.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --eval: print JSON.")] = False,
    max_new_tokens: Annotated[int, typer.Option(help="Most tokens of one completion.")] = 256,
    temperature: Annotated[float | None, typer.Option(help="0: the most likely token.", show_default="0.7")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Draw from the tokens of this probability.", show_default="0.95")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of drawing.", show_default="0")] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Prompts of a file completed at a time.", show_default="8")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Of the weights: auto (as saved), float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
) -> None:
    """Write with a model: give one of --prompt, --chat, --file, --eval."""
    from toolkit.generate.command import run
    from toolkit.generate.options import Options

    options = Options(
        source,
        prompt=prompt,
        chat=chat,
        file=file,
        evaluation=evaluation,
        output=output,
        raw=raw,
        system=system,
        strict=strict,
        as_json=as_json,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        batch_size=batch_size,
        dtype=dtype,
        device=device,
    )
    run(options)


def _print_report(report: Report) -> None:
    for name, fact in report.facts.items():
        print(f"{name:>10}: {fact}")
    numbers = [["" if value is None else f"{value:.1e}" for value in (row.found, row.tolerance)] for row in report.rows]
    _print_table(
        ["check", "found", "tolerance", "verdict", "note"],
        [[row.check, *shown, row.verdict, row.note] for row, shown in zip(report.rows, numbers, strict=True)],
    )
    print(f"verdict: {report.verdict}")


def _shown(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _recipe_rows() -> list[dict[str, str]]:
    return [{"name": name, "description": Recipe.load(path).description} for name, path in shipped_recipes().items()]


def _print_table(columns: list[str], rows: list[list[str]]) -> None:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(escape(cell) for cell in row))
    Console(highlight=False).print(table)


if __name__ == "__main__":
    main()

"""`toolkit export`: make a Hugging Face folder of a checkpoint, or files for llama.cpp and Ollama."""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toolkit.cli.shared.arguments import AsJson, Checkpoint, NewModel, StoredDtype, parse_dtype
from toolkit.errors import BadInputError, did_you_mean
from toolkit.recipe.schema import ExportSection

if TYPE_CHECKING:
    from toolkit.checkpoint.consolidate import Exported
    from toolkit.serving.llama_cpp import Made

MAX_SHARD_GIB = ExportSection().max_shard_gib
"""The same default as in a recipe (GiB)."""


FORMATS = ("huggingface", "gguf", "ollama")

QUANTISED = ("q2_k", "q3_k_m", "q4_0", "q4_k_s", "q4_k_m", "q5_k_s", "q5_k_m", "q6_k", "q8_0")
"""Types that `llama-quantize` makes without a file of importances."""


def export(
    run: Annotated[
        str,
        typer.Argument(
            help="Folder of a run, or its store (s3://bucket/runs/first). With --format also the folder of an export."
        ),
    ],
    to: NewModel,
    checkpoint: Checkpoint = None,
    dtype: StoredDtype = None,
    file_format: Annotated[
        str,
        typer.Option(
            "--format",
            help="Write this into the folder: huggingface, gguf (for llama.cpp, by its converter) or ollama (gguf and "
            "a Modelfile).",
        ),
    ] = FORMATS[0],
    llama_cpp: Annotated[
        Path | None,
        typer.Option(
            "--llama-cpp",
            help="Folder of llama.cpp's sources, for its converter. By default the one on the PATH.",
        ),
    ] = None,
    quantise: Annotated[
        str | None,
        typer.Option(
            help="Quantise the GGUF file by llama.cpp's llama-quantize: q4_k_m, q5_k_m, q8_0 ...", metavar="TYPE"
        ),
    ] = None,
    check: Annotated[
        bool, typer.Option("--verify/--no-verify", help="Reload the folder and compare its logits.")
    ] = True,
    max_shard_gib: Annotated[
        float, typer.Option(help="Split the weights into files of at most this size (GiB).")
    ] = MAX_SHARD_GIB,
    average: Annotated[
        bool,
        typer.Option("--average/--no-average", help="Export the averaged weights (training.ema) if there are any."),
    ] = True,
    as_json: AsJson = False,
) -> None:
    """Convert a checkpoint, by default the last, to a Hugging Face folder, with one of its files in memory at a time.

    Prints how vLLM and SGLang serve it. With --format it makes files for llama.cpp or Ollama instead.
    """
    type_name = None if dtype is None else parse_dtype(dtype)
    if file_format not in FORMATS:
        servers = "; vLLM and SGLang read huggingface" if file_format in ("vllm", "sglang") else ""
        close = did_you_mean(file_format, FORMATS)
        raise BadInputError(f"--format: unknown {file_format!r}{close}; allowed: {', '.join(FORMATS)}{servers}")
    for option, given in {"--llama-cpp": llama_cpp, "--quantise": quantise}.items():
        if given is not None and file_format == FORMATS[0]:
            raise BadInputError(f"{option} has no effect without --format gguf or ollama; leave it out")
    if quantise is not None and (quantise := quantise.lower()) not in QUANTISED:
        close = did_you_mean(quantise, QUANTISED)
        raise BadInputError(f"--quantise: unknown {quantise!r}{close}; allowed: {', '.join(QUANTISED)}")
    from toolkit.checkpoint.manifest import place_named

    place = place_named(run)
    if not place.is_dir():  # before torch is imported
        raise BadInputError(f"there is no folder {run!r}; name the training.output_dir or the store of a run")
    how: Any = {"checkpoint": checkpoint, "verify": check, "max_shard_gib": max_shard_gib, "average": average}
    made: Exported | Made
    done: Exported | None
    if file_format == FORMATS[0]:
        from toolkit.checkpoint.consolidate import export_run
        from toolkit.serving.servers import how_to_serve

        made = done = export_run(str(place), to, dtype=type_name, **how)
        notes, commands = [*done.notes], how_to_serve(to)
    else:
        from toolkit.serving.llama_cpp import make_gguf

        made = make_gguf(str(place), to, llama_cpp, type_name, quantise, file_format == "ollama", how)
        done, commands = made.exported, ["start it:", *(f"  {command}" for command in made.commands)]
        if checkpoint is None:
            port = 8080 if file_format == "gguf" else 11434
            words = ["toolkit", "serve-check", f"http://localhost:{port}", run, *(["--gap", "0.5"] if quantise else [])]
            commands.append(f"compare the server's answers with those of {run}: {shlex.join(words)}")
        notes = [*(done.notes if done else ()), *made.notes]
    if as_json:
        print(json.dumps(dataclasses.asdict(made), indent=1, default=str))
        return
    for line in [*notes, f"{to}: {run} in {made.dtype}" if done is None else _summary(done, check), *commands]:
        print(line)


def _summary(done: Exported, check: bool) -> str:
    """Returns the line about the exported checkpoint."""
    checked = ""
    if done.logits_difference is not None:
        checked = f"; logits differ by {done.logits_difference:.1e} of the largest"
    elif check and done.is_adapter:
        checked = "; an adapter, whose logits were not compared"
    later = "" if done.unfinished is None else f"; the later checkpoint of step {done.unfinished} was not finished"
    return f"{done.folder}: step {done.step} in {done.dtype}{checked}{later}"

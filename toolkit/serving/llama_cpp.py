"""Makes a GGUF file by llama.cpp's own converter and quantiser, of an adapter too, and for Ollama a Modelfile."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from toolkit.checkpoint.consolidate import Exported, export_run
from toolkit.checkpoint.export import EXPORT_TYPES, dtype_of_export, let_others_read
from toolkit.checkpoint.manifest import MODEL_FILES
from toolkit.errors import BadInputError, ExportError
from toolkit.generation.text.load import model_in
from toolkit.model.beside_weights.base_files import TOKENIZER
from toolkit.model.weights.weights import stored_dtype
from toolkit.paths import parse_json, read_foreign
from toolkit.serving.merge import merge_adapter
from toolkit.serving.ollama import GGUF, MODELFILE, write_modelfile

OUTTYPES = dict(zip(EXPORT_TYPES, ("f32", "bf16", "f16"), strict=True))
"""Types of weights, in the converter's words."""

SCRIPT = "convert_hf_to_gguf.py"

QUANTISER = "llama-quantize"

HOW_TO_INSTALL = (
    "git clone --depth 1 https://github.com/ggml-org/llama.cpp && pip install sentencepiece, and add "
    "--llama-cpp llama.cpp"
)


def find_converter(folder: Path | None) -> list[str]:
    """Returns the command line of llama.cpp's converter.

    Args:
        folder: the folder of llama.cpp's sources; None looks on the PATH.

    Raises:
        BadInputError: if it is not there.
    """
    if folder is not None:
        if not (folder / SCRIPT).is_file():
            raise BadInputError(f"--llama-cpp: {str(folder)!r} has no {SCRIPT}; name the folder of llama.cpp's sources")
        return [sys.executable, str(folder / SCRIPT)]
    if program := shutil.which("llama-convert-hf-to-gguf"):
        return [program]
    if program := shutil.which(SCRIPT):
        return [sys.executable, program]
    raise BadInputError(f"--format: llama.cpp's {SCRIPT} is not installed; run {HOW_TO_INSTALL}")


def find_quantiser(folder: Path | None) -> str:
    """Returns the path of `llama-quantize`.

    Args:
        folder: the folder of llama.cpp's sources, which may be built, or None; then the PATH is searched.

    Raises:
        BadInputError: if it is not there.
    """
    built = None if folder is None else shutil.which(QUANTISER, path=folder / "build" / "bin")
    found = built or shutil.which(QUANTISER)
    if found is None:
        raise BadInputError(
            f"--quantise: {QUANTISER} is not installed; run `conda install -c conda-forge llama.cpp` or `brew install "
            "llama.cpp`, or in llama.cpp's folder `cmake -B build && cmake --build build --target llama-quantize`"
        )
    return found


def convert(converter: list[str], model: Path, to: Path, *options: str) -> None:
    """Converts a model's folder to a file. Raises ExportError in the converter's words, if it refuses the model."""
    _run("converter", [*converter, str(model), "--outfile", str(to), *options])


def _run(name: str, command: list[str]) -> None:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)  # noqa: S603
    if done.returncode != 0:
        said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        why = said[-1] if said else f"exit code {done.returncode}"
        lacking = re.search(r"No module named '([\w-]+)", why)
        raise ExportError(
            f"llama.cpp's {name} refuses it: {why}. "
            + (
                f"Install what it needs: pip install {lacking[1]}"
                if lacking
                else "transformers, vLLM and SGLang read the Hugging Face folder: leave --format out"
            )
        )


@dataclass(frozen=True)
class Made:
    """A folder that llama.cpp and Ollama read.

    Attributes:
        folder: the folder.
        exported: the checkpoint that was exported, or None if an export was converted.
        dtype: torch's name of the dtype of the weights, or llama.cpp's if they are quantised.
        notes: what the converter does not read, and what Ollama's template lacks, a sentence each.
        commands: commands that start a server and a conversation.
    """

    folder: Path
    exported: Exported | None
    dtype: str
    notes: list[str]
    commands: list[str]


def make_gguf(
    source: str,
    to: Path,
    llama_cpp: Path | None,
    dtype: str | None,
    quantise: str | None,
    for_ollama: bool,
    checkpoint: dict[str, Any],
) -> Made:
    """Makes a folder with `model.gguf`, and for Ollama a `Modelfile`. An adapter is merged into its base first.

    Args:
        source: a run, its store, or the folder of an export.
        to: the new folder.
        llama_cpp: as in `Converter`.
        dtype: the type of the weights, one of EXPORT_TYPES. None takes that of the export.
        quantise: a type of llama-quantize, or None.
        for_ollama: whether to write a Modelfile.
        checkpoint: the other arguments of `export_run`, by name.

    Raises:
        BadInputError: if the converter or the quantiser is not installed, or the folder exists.
        ExportError: if llama.cpp does not know the model, in its words.
    """
    if to.exists():
        raise BadInputError(f"--to: {str(to)!r} exists; name a new folder")
    place = model_in(Path(source).expanduser())
    if place is not None and checkpoint.get("checkpoint") is not None:
        raise BadInputError(f"--checkpoint has no effect on an export, which {source!r} is; leave it out")
    converter, quantiser = find_converter(llama_cpp), find_quantiser(llama_cpp) if quantise else ""
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{to.name}.", dir=to.parent) as folder:
            scratch, exported = Path(folder), None
            if place is None:
                kept = Path(source).expanduser() / MODEL_FILES
                if kept.is_dir():  # its type and its tokenizer, before the weights are written, which takes longer
                    convert(converter, kept, scratch / GGUF, "--vocab-only")
                exported = replace(export_run(source, scratch / "export", dtype=dtype, **checkpoint), folder=to)
            whole = scratch / "export" if place is None else Path(place.name)
            if is_adapter := (exported or place).is_adapter:  # type: ignore[union-attr]  # one of both is there
                merge_adapter(str(whole), scratch / "merged", dtype=dtype)
                whole = scratch / "merged"
            made = scratch / "made"
            made.mkdir()
            written = str(dtype_of_export(dtype, stored_dtype(whole), is_adapter=False)).removeprefix("torch.")
            file = scratch / "whole.gguf" if quantise else made / GGUF
            convert(converter, whole, file, "--outtype", OUTTYPES[written], "--model-name", to.name)
            if quantise:
                written = quantise.upper()
                _run("quantiser", [quantiser, str(file), str(made / GGUF), written])
            if exported is not None and (quantise or is_adapter):  # nobody compared the logits of these weights
                exported = replace(exported, dtype=written, is_adapter=False, logits_difference=None)
            notes = [*_doubts(whole), *(write_modelfile(whole, made) if for_ollama else [])]
            let_others_read(made)
            made.rename(to)
    except OSError as error:
        raise ExportError(
            f"{str(to)!r} cannot be written: {error.strerror}; make room, or name another place"
        ) from error
    return Made(to, exported, written, notes, _commands(to, for_ollama))


def _doubts(model: Path) -> list[str]:
    """Says if the converter cannot read the order of the tokenizer's merges (`LlamaHfVocab` in its gguf package)."""
    if (model / "tokenizer.model").is_file() or not (model / TOKENIZER).is_file():
        return []
    fields = parse_json(read_foreign(model / TOKENIZER)).get("model") or {}
    if fields.get("type") != "BPE" or not fields.get("byte_fallback"):
        return []
    return [
        "there is no tokenizer.model, and llama.cpp's converter takes from tokenizer.json neither the order of merges "
        "nor special tokens that tokenizer_config.json does not list: prompts may have other tokens than in training; "
        "put the base's tokenizer.model into the export, and convert that"
    ]


def _commands(folder: Path, for_ollama: bool) -> list[str]:
    if for_ollama:
        name = folder.name.lower()
        lines = [["ollama", "create", name, "-f", str(folder / MODELFILE)], ["ollama", "run", name]]
    else:
        lines = [[program, "-m", str(folder / GGUF), "--jinja"] for program in ("llama-server", "llama-cli")]
    return [shlex.join(line) for line in lines]

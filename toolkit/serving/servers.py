"""Says how vLLM and SGLang serve an export, with the options that it needs."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from toolkit.paths import parse_json, read_foreign
from toolkit.recipe.adapter_file import PER_EXPERT

VLLM_RANKS = (16, 32, 64, 128, 256, 320, 512)
"""Ranks of adapters that vLLM's `--max-lora-rank` takes, from its default on."""

ADAPTER = "adapter_config.json"


def how_to_serve(export: Path) -> list[str]:
    """Returns the lines that say how vLLM and SGLang serve an export; none for one that continues no text."""
    if not _continues_text(export):
        return []
    problem = adapter_problem(export)
    lines = [] if problem else [f"serve it: {vllm_command(export)}", f"      or: {sglang_command(export)}"]
    return [*lines, *filter(None, [problem, _limit_of_length(export)])]


def vllm_command(export: Path) -> str:
    """Returns vLLM's command for a model, or for an adapter on its base."""
    adapter = _adapter_config(export)
    if adapter is None:
        return shlex.join(["vllm", "serve", str(export), *_own_code(export)])
    rank = min((one for one in VLLM_RANKS if one >= int(adapter["r"])), default=VLLM_RANKS[-1])
    limit = [] if rank == VLLM_RANKS[0] else ["--max-lora-rank", str(rank)]
    # Without the option the base's chat template is used, which the recipe may have replaced.
    # The base's settings lack the ends of an answer that training taught.
    settings = ["--generation-config", str(export)] if (export / "generation_config.json").is_file() else []
    options = ["--tokenizer", str(export), *settings, "--enable-lora", *limit, "--lora-modules", _lora(export)]
    return shlex.join(["vllm", "serve", *_base_of(adapter), *options])


def sglang_command(export: Path) -> str:
    """Returns SGLang's command for a model, or for an adapter on its base."""
    program = ["python", "-m", "sglang.launch_server", "--model-path"]
    adapter = _adapter_config(export)
    if adapter is None:
        return shlex.join([*program, str(export), *_own_code(export)])
    options = ["--tokenizer-path", str(export), "--lora-paths", _lora(export)]
    return shlex.join([*program, *_base_of(adapter), *options])


def adapter_problem(export: Path) -> str | None:
    """Says why servers do not load an adapter, or returns None if they do, or if the export is a whole model."""
    adapter = _adapter_config(export) or {}
    heads = {"classifier", "score"}
    kinds = {
        "DoRA": adapter.get("use_dora"),
        "modules_to_save": set(adapter.get("modules_to_save") or []) - heads,
        # vLLM 0.32 has them for gpt-oss and the experts of Qwen3-VL and Qwen 3.5.
        "experts in one tensor (but for few types)": adapter.get("target_parameters")
        and not (export / PER_EXPERT).is_dir(),
    }
    refused = [kind for kind, has in kinds.items() if has]
    if not refused:
        return None
    merge = shlex.join(["toolkit", "merge", str(export), "--to", "merged"])
    return f"to serve it: {merge}, because vLLM and SGLang load no adapter with {' and '.join(refused)}"


def _lora(export: Path) -> str:
    """Returns an adapter's name and folder, as both servers take them."""
    return f"tuned={export / PER_EXPERT if (export / PER_EXPERT).is_dir() else export}"


def _continues_text(export: Path) -> bool:
    """Tells whether a model is neither a classifier nor an encoder-decoder."""
    adapter = _adapter_config(export)
    if adapter is not None:
        return adapter.get("task_type") in (None, "CAUSAL_LM")
    fields = _fields(export / "config.json")
    writes = str((fields.get("architectures") or [""])[0]).endswith(("ForCausalLM", "ForConditionalGeneration"))
    return writes and not fields.get("is_encoder_decoder")


def _limit_of_length(export: Path) -> str | None:
    """Says how the length of requests is limited; None for an adapter, or without a length in config.json."""
    if _adapter_config(export) is not None:
        return None
    fields = _fields(export / "config.json")
    positions = {**fields, **(fields.get("text_config") or {})}.get("max_position_embeddings")
    if not isinstance(positions, int):
        return None
    options = "--max-model-len N (vLLM) or --context-length N (SGLang)"
    return f"its cache has room for {positions:,} tokens of a request; {options} takes less memory"


def _adapter_config(export: Path) -> dict[str, Any] | None:
    """Returns what an adapter's configuration says; None for a whole model."""
    return _fields(export / ADAPTER) if (export / ADAPTER).is_file() else None


def _fields(path: Path) -> dict[str, Any]:
    fields: dict[str, Any] = parse_json(read_foreign(path))
    return fields


def _base_of(adapter: dict[str, Any]) -> list[str]:
    """Returns an adapter's base as both servers take it, with its revision on the hub."""
    revision = adapter.get("revision")
    return [str(adapter["base_model_name_or_path"]), *(["--revision", str(revision)] if revision else [])]


def _own_code(export: Path) -> list[str]:
    """Returns the option of both servers for a model that brings its own code."""
    has_code = "auto_map" in _fields(export / "config.json") and any(export.glob("*.py"))
    return ["--trust-remote-code"] if has_code else []

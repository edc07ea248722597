"""Loads a model that generates text: an export, an adapter on its base, or a model of the hub.

It imports torch and transformers only after it has found a model.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.data.rows.hub_refusals import hub_error
from toolkit.errors import BadInputError, ToolkitError, first_line
from toolkit.paths import (
    BASE_FILE,
    CHECKPOINTS,
    download_command,
    fingerprint_of,
    is_hub_name,
    require_folder,
    told_of_checkpoint,
)
from toolkit.recipe.adapter_file import read_config

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class ModelPlace:
    """The place of a model.

    Attributes:
        name: a folder, or a hub name.
        is_adapter: whether the folder holds an adapter, which names its base.
        on_hub: whether it may be downloaded.
    """

    name: str
    is_adapter: bool = False
    on_hub: bool = False


@dataclass(frozen=True)
class Loaded:
    """A model that generates text, with its tokenizer and limits.

    Attributes:
        name: the name in messages.
        model: a model of transformers or peft, in evaluation mode and without its generation settings.
        stops: tokens that end a text.
        positions: most tokens of prompt and completion together, for an encoder-decoder of each; None if any number.
        encoder_decoder: whether it writes a target for a prompt, rather than a continuation.
        collective: whether all ranks run each forward together, so that ranks with finished texts go on.
        if_too_large: what to do if the GPU has too little memory.
        never_written: tokens that are not chosen, however likely they are.
    """

    name: str
    model: Any
    tokenizer: PreTrainedTokenizerBase
    stops: frozenset[int]
    positions: int | None
    encoder_decoder: bool = False
    collective: bool = False
    if_too_large: str = "lower --batch-size or --max-new-tokens, or try --dtype bfloat16"
    never_written: frozenset[int] = frozenset()


def find_model(source: str) -> ModelPlace:
    """Finds the model of a run's folder, an export's or an adapter's folder, or a hub name.

    Raises:
        BadInputError: if the folder does not exist or holds no model.
    """
    folder = Path(source).expanduser()
    if not folder.is_dir():
        _require_hub_name(source, folder)
        return ModelPlace(source, on_hub=True)
    found = model_in(folder) or model_in(folder / "export")
    if found is not None:
        return found
    if (told := told_of_checkpoint(folder)) is not None:
        raise BadInputError(told)
    if any((folder / name).exists() for name in ("recipe.yaml", CHECKPOINTS, "metrics.jsonl")):
        raise BadInputError(
            f"{source!r}: the run has no export; make one of its last checkpoint: "
            f"{shlex.join(['toolkit', 'export', source, '--to', str(folder / 'export')])}"
        )
    raise BadInputError(
        f"{source!r} holds neither a model (config.json), nor an adapter (adapter_config.json), nor a run "
        "(recipe.yaml, export/); name a folder that does"
    )


def _require_hub_name(source: str, folder: Path) -> None:
    require_folder(source, "SOURCE")
    parent = source.rpartition("/")[0]
    if not source.strip() or source.endswith("/") or (parent and folder.parent.is_dir()):
        raise BadInputError(f"SOURCE: the folder {source!r} does not exist; name a model's folder or a hub name")


def model_in(folder: Path) -> ModelPlace | None:
    """Returns the model or the adapter that a folder holds, or None."""
    if (folder / "adapter_config.json").is_file():
        return ModelPlace(str(folder), is_adapter=True)
    return ModelPlace(str(folder)) if (folder / "config.json").is_file() else None


def architecture_of(place: ModelPlace) -> str:
    """Returns the name of a model's class in its configuration, or "" if none can be read."""
    try:
        return str(json.loads((Path(place.name) / "config.json").read_text(encoding="utf-8"))["architectures"][0])
    except (OSError, ValueError, LookupError, TypeError):
        return ""


def device_of(device: str) -> str:
    """Returns a device's name; `auto` is CUDA's if there is one, and else the CPU. Raises BadInputError for none."""
    import torch

    has_cuda = torch.cuda.is_available()
    if device == "cuda" and not has_cuda:
        raise BadInputError("--device: cuda is not available on this machine; allowed here: auto, cpu")
    return device if device != "auto" else "cuda" if has_cuda else "cpu"


def load_model(source: str, dtype: str = "auto", device: str = "auto") -> Loaded:
    """Loads a model and its tokenizer.

    Args:
        source: as in `find_model`. Only a hub name is downloaded.
        dtype: the dtype of the weights in memory; `auto` keeps that of the files.
        device: the device; `auto` spreads the model over all GPUs, and takes the CPU if there are none.

    Raises:
        BadInputError: if it cannot be loaded or generates no text.
    """
    place = find_model(source)
    from transformers import GenerationConfig

    from toolkit.model.quantised.quantised import make_exact_on_cpu

    chosen = device_of(device)
    spread, device = device == "auto" and chosen == "cuda", chosen
    base = adapter_base(place) if place.is_adapter else place
    model = load_base(base, dtype, adapter_quantisation(place, base) if place.is_adapter else None, spread)
    if device == "cpu":
        make_exact_on_cpu(model)
    tokenizer = tokenizer_of(place, base)
    stops = stop_tokens(model, tokenizer)
    model.generation_config = GenerationConfig(**beginning(model))  # the options say all else
    if place.is_adapter:
        model = with_adapter(model, tokenizer, place)
    reads = bool(model.config.is_encoder_decoder)
    model = model if spread else model.to(device)
    return Loaded(source, model.eval(), tokenizer, stops, positions_of(model), reads)


def positions_of(model: Any) -> int | None:
    """Returns the most tokens that a model reads, or None if any number."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return positions if isinstance(positions, int) and positions > 0 else None


def beginning(model: Any) -> dict[str, Any]:
    """Returns the settings of an encoder-decoder's first target tokens, such as mBART's language."""
    own = model.generation_config
    return {name: getattr(own, name, None) for name in ("decoder_start_token_id", "forced_bos_token_id")}


def adapter_quantisation(place: ModelPlace, base: ModelPlace) -> dict[str, Any] | None:
    """Returns how the adapter's base was quantised in training. Raises BadInputError for another base."""
    from toolkit.model.adapters.base_file import read_base

    told = read_base(Path(place.name), repr(place.name))
    if told is None:
        return None
    folder = Path(base.name)
    try:
        fingerprint = fingerprint_of(folder) if told.fingerprint is not None else None
    except (OSError, ValueError) as error:
        raise BadInputError(f"{base.name!r}: its weights cannot be read: {first_line(error)}") from error
    if other := told.difference(folder, fingerprint):
        raise BadInputError(
            f"{place.name!r}: the adapter was trained on another base than {base.name!r}: {other}. Put the base that "
            f"it was trained on there, or, where this one is meant, remove {BASE_FILE} from its folder"
        )
    return told.quantization


def _quantisation_arguments(quantisation: dict[str, Any] | None, config: Any, dtype: str) -> dict[str, Any]:
    """Returns arguments with which transformers quantises a base as in training."""
    if quantisation is None:
        return {}
    from transformers import BitsAndBytesConfig

    compute = (config.dtype or "float32") if dtype == "auto" else dtype
    return {"quantization_config": BitsAndBytesConfig(**quantisation, bnb_4bit_compute_dtype=compute)}


def load_base(
    place: ModelPlace, dtype: str, quantisation: dict[str, Any] | None, spread: bool = False, writes: bool = True
) -> Any:
    """Loads a model, on all GPUs if it is spread, which `writes` text or has a head of another kind.

    Raises:
        BadInputError: if it cannot be loaded or writes no text, or files lack a weight.
    """
    from transformers import AutoConfig

    from toolkit.model.load import auto_class

    where: dict[str, Any] = {"trust_remote_code": False, "local_files_only": not place.on_hub}
    try:
        config = AutoConfig.from_pretrained(place.name, **where)
        if writes:
            _require_generative(config, place)
        where |= {"device_map": "auto"} if spread else {}
        where |= _quantisation_arguments(quantisation, config, dtype)
        model, info = auto_class(config).from_pretrained(
            place.name, config=config, dtype=dtype, output_loading_info=True, use_safetensors=True, **where
        )
    except ToolkitError:
        raise
    except Exception as error:  # the libraries that read models raise a great many kinds
        where_not = " (there is no such folder, so it was looked for on the hub)" if place.on_hub else ""
        raise hub_error(error, "SOURCE", place.name) or BadInputError(
            f"{place.name!r}: no model can be loaded{where_not}: {first_line(error)}"
        ) from error
    missing = sorted(info["missing_keys"])
    if missing:
        raise BadInputError(f"{place.name!r}: its files lack {len(missing)} of the weights, for example {missing[0]}")
    return model


def _require_generative(config: Any, place: ModelPlace) -> None:
    architecture = (config.architectures or [""])[0]
    if architecture.endswith("Classification"):
        raise BadInputError(
            f"{place.name!r} classifies texts ({architecture}) and generates none; --eval scores labelled rows with "
            "a model in a folder, and transformers.pipeline any text"
        )


def tokenizer_of(place: ModelPlace, base: ModelPlace) -> PreTrainedTokenizerBase:
    """Returns the tokenizer of the adapter if it has one, else of the base.

    Raises:
        BadInputError: if it cannot be loaded.
    """
    own = any((Path(place.name) / name).is_file() for name in ("tokenizer_config.json", "tokenizer.json"))
    chosen = place if own or not place.is_adapter else base
    from transformers import AutoTokenizer

    from toolkit.data.images.images import set_source
    from toolkit.data.images.pixel_limits import CONFIGURATIONS

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            chosen.name, trust_remote_code=False, local_files_only=not chosen.on_hub, padding_side="left"
        )
    except Exception as error:  # as above
        raise hub_error(error, "SOURCE", chosen.name) or BadInputError(
            f"{chosen.name!r}: no tokenizer can be loaded: {first_line(error)}"
        ) from error
    reads = any((Path(place.name) / name).is_file() for name in CONFIGURATIONS)
    set_source(tokenizer, (place if reads else base).name, None)
    return tokenizer


def tokenizer_of_source(source: str, raw: bool) -> PreTrainedTokenizerBase | None:
    """Returns the tokenizer of a source, whose chat template writes the prompts; None if prompts are plain text."""
    place = find_model(source)
    return None if raw else tokenizer_of(place, adapter_base(place) if place.is_adapter else place)


def adapter_base(place: ModelPlace) -> ModelPlace:
    """Returns the folder of an adapter's base. Raises BadInputError if it is not on this machine."""
    config = read_config(Path(place.name), repr(place.name))
    name = config.get("base_model_name_or_path")
    task = config.get("task_type")
    if task not in (None, "CAUSAL_LM", "SEQ_2_SEQ_LM"):
        raise BadInputError(
            f"{place.name!r}: the adapter's task is {task} and generates no text; score the model "
            "of a run with export.merge=true"
        )
    if not isinstance(name, str) or not name:
        raise BadInputError(f"{place.name!r}: adapter_config.json names no base_model_name_or_path; add it")
    # The name as it is, or as seen from the adapter's folder.
    for folder in (Path(name).expanduser(), Path(place.name) / name):
        if (folder / "config.json").is_file():
            return ModelPlace(str(folder))
    return ModelPlace(_cached_folder(name, config.get("revision"), place))


def _cached_folder(name: str, revision: str | None, place: ModelPlace) -> str:
    """Returns the folder of a hub model that was downloaded before."""
    from huggingface_hub import snapshot_download

    try:
        return snapshot_download(name, revision=revision, local_files_only=True)
    except Exception as error:  # a path is no hub name, and there are several ways of not being there
        fetch = f", fetch it with `{download_command(name, revision)}`" if is_hub_name(name) else ""
        raise BadInputError(
            f"{place.name!r}: the adapter's base {name!r} is not on this machine; put the folder there{fetch}, or "
            "change base_model_name_or_path in its adapter_config.json"
        ) from error


def with_adapter(model: Any, tokenizer: PreTrainedTokenizerBase, place: ModelPlace) -> Any:
    from peft import PeftModel

    # An adapter trained with added tokens has more rows than its base.
    if len(tokenizer) > model.get_input_embeddings().weight.shape[0]:
        model.resize_token_embeddings(len(tokenizer))
    try:
        adapted = PeftModel.from_pretrained(model, place.name)
    except Exception as error:  # of peft, safetensors, torch
        raise BadInputError(f"{place.name!r}: the adapter does not fit its base: {first_line(error)}") from error
    _require_all_weights(adapted, Path(place.name) / "adapter_model.safetensors")
    return adapted


def _require_all_weights(adapted: Any, file: Path) -> None:
    """Raises BadInputError unless the file has exactly the adapter's weights: peft loads any subset."""
    from peft import get_peft_model_state_dict
    from safetensors import safe_open

    if not file.is_file():
        return
    with safe_open(file, framework="pt") as opened:
        stored = set(opened.keys())
    needed = set(get_peft_model_state_dict(adapted, save_embedding_layers=False))
    odd = (needed - stored) | {name for name in stored - needed if ".lora_" in name}
    if odd:
        raise BadInputError(
            f"{str(file)!r} lacks weights of its modules, or has others: {min(odd)}; it belongs to another base or "
            "another adapter_config.json"
        )


def stop_tokens(model: Any, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Returns the tokens that end a text: those of the generation settings, of the tokenizer, and of a turn."""
    from toolkit.data.templates.stops import configured_ends, turn_ends

    own = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return frozenset([*configured_ends(model.generation_config), *own]) | turn_ends(tokenizer)

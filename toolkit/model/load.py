"""The model: from the hub, a folder, or a configuration with random weights.

A model is built on the meta device, without memory for its parameters. It carries
`materialize_weights()`, which the sharding backend calls once every parameter has its shard: then each
rank reads its own slices of the safetensors files. Where the files do not hold the parameters as the
model names them (a conversion, a missing head, random weights), rank 0 makes them and sends them out
one at a time.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from accelerate import init_empty_weights
from huggingface_hub import snapshot_download
from huggingface_hub.errors import StrictDataclassError
from safetensors import safe_open
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from toolkit import ranks
from toolkit.data.tokenizer import pad_id
from toolkit.errors import BadInputError, first_line
from toolkit.model.adapters import AdapterWeights, add_adapter
from toolkit.places import require_folder
from toolkit.recipe.schema import AdapterSection, ModelSection
from toolkit.sharding.apply import KeepsMasters, shard_rows

Rows = slice
"""Rows of a tensor's first dimension."""


class HasTokens(Protocol):
    """What of a tokenizer a configuration needs."""

    bos_token_id: int | None
    eos_token_id: int | None
    pad_token_id: int | None

    def __len__(self) -> int: ...


class Weights(Protocol):
    """Where parameters come from."""

    def read(self, name: str, like: torch.Tensor, rows: Rows) -> torch.Tensor:
        """Rows of the parameter `name`, on the host. Every rank calls this for every name, in one order."""


def load(
    model: ModelSection,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    label_names: list[str] | None = None,
    adapter: AdapterSection | None = None,
) -> PreTrainedModel:
    """The recipe's model, on the meta device, with `materialize_weights`.

    Args:
        tokenizer: gives a model with random weights its vocabulary size and special tokens.
        seed: of random weights.
        label_names: of the classes that it tells apart; None: a causal language model.
        adapter: of its adapters; None: none.

    Raises:
        BadInputError: where there is no such model.
    """
    auto, config, settings, rows = _settings(model, tokenizer, label_names)
    built = _without_weights(auto, config, settings, rows)
    weights: Weights = _weights(model, built, lambda: _whole_model(auto, model, config, settings, seed, rows))
    if adapter is not None and adapter.kind == "lora":
        built = add_adapter(built, adapter, model.name_or_path, model.revision)
        weights = AdapterWeights(weights, built, seed)
    built.materialize_weights = lambda keep_master=None: materialize(built, weights, keep_master)
    return built


def load_without_weights(
    model: ModelSection,
    tokenizer: HasTokens,
    label_names: list[str] | None = None,
    adapter: AdapterSection | None = None,
) -> PreTrainedModel:
    """As `load`, of the configuration alone, for who wants to know sizes; it cannot be given weights.

    Raises:
        BadInputError: where there is no such model.
    """
    built = _without_weights(*_settings(model, tokenizer, label_names))
    if adapter is not None and adapter.kind == "lora":
        return add_adapter(built, adapter, model.name_or_path, model.revision)
    return built


def _settings(
    model: ModelSection, tokenizer: HasTokens, label_names: list[str] | None
) -> tuple[Any, PretrainedConfig, dict[str, Any], int]:
    """Auto class, configuration, settings of its constructor, and the rows that its embeddings need."""
    if model.name_or_path is not None:
        require_folder(model.name_or_path, "model.name_or_path")
    config = _configuration(model, tokenizer)
    if label_names is not None:
        _name_labels(config, label_names, tokenizer)
    auto = AutoModelForCausalLM if label_names is None else AutoModelForSequenceClassification
    attention = {} if model.attention == "auto" else {"attn_implementation": model.attention}
    dtype = getattr(torch, model.dtype)
    settings = {"dtype": dtype, "trust_remote_code": model.trust_remote_code, **attention}
    return auto, config, settings, len(tokenizer) if model.add_tokens is not None else 0


def _without_weights(auto: Any, config: PretrainedConfig, settings: dict[str, Any], rows: int) -> PreTrainedModel:
    """The model on the meta device."""
    with init_empty_weights(include_buffers=False):
        built = _of_kind(auto, copy.deepcopy(config), settings)  # resizing changes the configuration
        _make_rows(built, rows, mean_resizing=False)
    built.tie_weights()
    built.config.architectures = [type(built).__name__]
    return built


def _of_kind(auto: Any, config: PretrainedConfig, settings: dict[str, Any]) -> PreTrainedModel:
    try:
        model: PreTrainedModel = auto.from_config(config, **settings)
        return model
    except ImportError as error:  # of the attention
        raise BadInputError(
            f"model.attention: {settings.get('attn_implementation')} cannot be used: {first_line(error)}; install it, "
            "or set model.attention=auto"
        ) from error
    except ValueError as error:
        what = "generate text" if auto is AutoModelForCausalLM else "classify texts"
        raise BadInputError(
            f"model: a model of type {config.model_type} cannot be made to {what}: {first_line(error)}"
        ) from error


def _name_labels(config: PretrainedConfig, names: list[str], tokenizer: HasTokens) -> None:
    config.num_labels = len(names)
    config.id2label = dict(enumerate(names))
    config.label2id = {name: number for number, name in enumerate(names)}
    config.problem_type = "single_label_classification"
    if config.pad_token_id is None:  # decoders look for the last token that is no padding
        config.pad_token_id = pad_id(tokenizer)


def attention_of(model: nn.Module) -> str:
    """The attention implementation that transformers has chosen; empty where it does not say."""
    return getattr(getattr(model, "config", None), "_attn_implementation", None) or ""


def auto_class(config: PretrainedConfig) -> Any:
    """The class of transformers that loads a model like that of the configuration."""
    architecture = (config.architectures or [""])[0]
    is_classifier = architecture.endswith("ForSequenceClassification")
    return AutoModelForSequenceClassification if is_classifier else AutoModelForCausalLM


def materialize(model: nn.Module, weights: Weights, keep_master: KeepsMasters | None = None) -> None:
    """Gives every meta parameter of `model` its values: a DTensor its local rows, a plain one all.

    Tied parameters stay one object.

    Args:
        keep_master: is given the rows of each trainable DTensor before they are rounded to its type.
    """
    made: dict[int, nn.Parameter] = {}
    state: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) not in made:
            made[id(parameter)] = _made(name, parameter, weights, keep_master)
        state[name] = made[id(parameter)]
    persistent = model.state_dict().keys()
    for name, buffer in model.named_buffers():
        if name in persistent:
            state[name] = weights.read(name, buffer, slice(0, _num_rows(buffer))).to(buffer)
    model.load_state_dict(state, strict=False, assign=True)
    del model.materialize_weights


def _made(name: str, parameter: nn.Parameter, weights: Weights, keep_master: KeepsMasters | None) -> nn.Parameter:
    if not isinstance(parameter, DTensor):
        whole = weights.read(name, parameter, slice(0, _num_rows(parameter)))
        return nn.Parameter(_own(whole, parameter.dtype, torch.device("cpu")), requires_grad=parameter.requires_grad)
    if keep_master is not None and parameter.requires_grad:
        unrounded = torch.empty(parameter.shape, dtype=torch.float32, device="meta")
        local = weights.read(name, unrounded, shard_rows(parameter))
        keep_master(name, local)
    else:
        local = weights.read(name, parameter, shard_rows(parameter))
    local = _own(local, parameter.dtype, torch.device(parameter.device_mesh.device_type))
    sharded = DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return nn.Parameter(sharded, requires_grad=parameter.requires_grad)


def _own(tensor: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A copy: what safetensors reads is a view of the mapped file, which may change or go away."""
    return tensor.to(device=device, dtype=dtype, copy=True)


def _num_rows(tensor: torch.Tensor) -> int:
    return tensor.shape[0] if tensor.ndim else 1


class SafetensorsWeights:
    """Slices of the safetensors files of a folder.

    Args:
        files: parameter's name in the model -> (file, name in the file).
    """

    def __init__(self, files: dict[str, tuple[Path, str]]) -> None:
        self._files = files

    def read(self, name: str, like: torch.Tensor, rows: Rows) -> torch.Tensor:
        path, stored_name = self._files[name]
        with safe_open(path, framework="pt") as file:
            if like.ndim == 0:
                return file.get_tensor(stored_name)  # type: ignore[no-any-return]
            return file.get_slice(stored_name)[rows]  # type: ignore[no-any-return]


class RankZeroWeights:
    """Parameters of a whole model that rank 0 makes and broadcasts one at a time.

    Host memory: the whole model on rank 0, one parameter on the others.
    """

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        self._make = make
        self._state: dict[str, torch.Tensor] | None = None

    def read(self, name: str, like: torch.Tensor, rows: Rows) -> torch.Tensor:
        if ranks.world_size() == 1:
            return self._whole(name)[rows] if like.ndim else self._whole(name)
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        if ranks.rank() == 0:
            whole = self._whole(name).to(device=device, dtype=like.dtype).contiguous()
        else:
            whole = torch.empty(like.shape, dtype=like.dtype, device=device)
        dist.broadcast(whole, src=0)
        return whole[rows] if like.ndim else whole

    def _whole(self, name: str) -> torch.Tensor:
        if self._state is None:
            self._state = self._make().state_dict()
        return self._state[name]


def _weights(model: ModelSection, built: PreTrainedModel, make_whole: Callable[[], nn.Module]) -> Weights:
    if model.name_or_path is not None:
        files = _stored_names(_model_folder(model), built)
        if files is not None:
            return SafetensorsWeights(files)
    return RankZeroWeights(make_whole)


def _whole_model(
    auto: Any, model: ModelSection, config: PretrainedConfig, settings: dict[str, Any], seed: int, rows: int
) -> nn.Module:
    """The model with its weights, on the host of this rank."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if model.name_or_path is None:
            whole: nn.Module = auto.from_config(config, **settings)
        else:
            name, revision = model.name_or_path, model.revision
            whole = auto.from_pretrained(name, config=config, revision=revision, **settings)
        _make_rows(whole, rows, mean_resizing=True)
        return whole


def _make_rows(model: PreTrainedModel, rows: int, mean_resizing: bool) -> None:
    """Embeddings, and a head of its own, of at least so many rows; new ones are drawn around the mean of the old.

    Reference: Hewitt, "Initializing new word embeddings for pretrained language models", 2021.
    """
    if rows > model.get_input_embeddings().weight.shape[0]:
        model.resize_token_embeddings(rows, mean_resizing=mean_resizing)


def _model_folder(model: ModelSection) -> Path:
    """The folder of a pretrained model; from the hub, downloaded once for each host."""
    assert model.name_or_path is not None
    folder = Path(model.name_or_path).expanduser()
    if folder.is_dir():
        return folder
    name = model.name_or_path
    patterns = ["*.safetensors", "*.json"]
    return ranks.on_each_host(lambda: Path(snapshot_download(name, revision=model.revision, allow_patterns=patterns)))


def _stored_names(folder: Path, model: PreTrainedModel) -> dict[str, tuple[Path, str]] | None:
    """Where each parameter and buffer of `model` is stored; None where one is not stored as it is named."""
    stored = _index(folder)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    tied_to = _first_names(model)
    files: dict[str, tuple[Path, str]] = {}
    for name, shape in shapes.items():
        found = _lookup(tied_to.get(name, name), stored, model.base_model_prefix)
        if found is None or _stored_shape(*found) != list(shape):
            return None
        files[name] = found
    return files


def _first_names(model: nn.Module) -> dict[str, str]:
    """Parameter's name -> the first name of the same parameter, under which tied weights are stored."""
    first: dict[int, str] = {}
    named = model.named_parameters(remove_duplicate=False)
    return {name: first.setdefault(id(parameter), name) for name, parameter in named}


def _lookup(name: str, stored: dict[str, Path], prefix: str) -> tuple[Path, str] | None:
    """A checkpoint of the bare model (gpt2) names its tensors without the prefix of the model with a head."""
    for candidate in (name, name.removeprefix(f"{prefix}.")):
        if candidate in stored:
            return stored[candidate], candidate
    return None


def _index(folder: Path) -> dict[str, Path]:
    """Tensor's name -> file, of every safetensors file of a model's folder."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {name: folder / Path(file).name for name, file in weight_map.items()}
    single = folder / "model.safetensors"
    if not single.is_file():
        return {}
    with safe_open(single, framework="pt") as file:
        return dict.fromkeys(file.keys(), single)


def _stored_shape(path: Path, name: str) -> list[int]:
    with safe_open(path, framework="pt") as file:
        return list(file.get_slice(name).get_shape())


def _configuration(model: ModelSection, tokenizer: HasTokens) -> PretrainedConfig:
    try:
        if model.name_or_path is not None:
            return AutoConfig.from_pretrained(
                model.name_or_path, revision=model.revision, trust_remote_code=model.trust_remote_code
            )
        return _random_configuration(dict(model.config or {}), tokenizer)
    except (OSError, ValueError, KeyError, TypeError, StrictDataclassError) as error:
        field = "model.name_or_path" if model.name_or_path is not None else "model.config"
        found = model.name_or_path or model.config
        raise BadInputError(f"{field}: no model can be made of {found!r}: {first_line(error)}") from error


def _random_configuration(fields: dict[str, Any], tokenizer: HasTokens) -> PretrainedConfig:
    """A configuration whose vocabulary and special tokens are the tokenizer's, unless it says otherwise."""
    fields.setdefault("vocab_size", len(tokenizer))
    for token in ("bos_token_id", "eos_token_id", "pad_token_id"):
        fields.setdefault(token, getattr(tokenizer, token))
    if fields["vocab_size"] < len(tokenizer):
        raise BadInputError(
            f"model.config.vocab_size: {fields['vocab_size']} is less than the tokenizer's {len(tokenizer)} tokens; "
            "leave it out or raise it"
        )
    default = AutoConfig.for_model(fields["model_type"])
    known = {*default.to_dict(), *default.attribute_map}
    unknown = [key for key in fields if key not in known]
    if unknown:
        raise BadInputError(
            f"model.config: {', '.join(unknown)}: unknown to the model type {fields['model_type']}; "
            f"known: {', '.join(sorted(known))}"
        )
    return AutoConfig.for_model(**fields)

"""LoRA through peft: on the meta device, sharded with the model, saved as peft saves it, or merged.

Reference: Hu et al., arXiv 2106.09685; rsLoRA arXiv 2312.03732; DoRA arXiv 2402.09353.
"""

from __future__ import annotations

import copy
import hashlib
import math
import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel

from toolkit.errors import BadInputError, first_line
from toolkit.model.adapters.adapter_names import NAME, PREFIX, names_in_file
from toolkit.model.adapters.base_file import Base
from toolkit.model.adapters.expert_adapters import as_peft_has_them, each_expert, hold_by_expert
from toolkit.model.adapters.started_adapter import StartedAdapter
from toolkit.model.adapters.targets import (
    Targets,
    classifier_of,
    layers_left_whole,
    layers_to_quantise,
    left_out_of_all_linear,
    never_reached,
    stacked_experts,
    targets_beside_experts,
    targets_of_pattern,
)
from toolkit.model.quantised.quantised import QuantisedLinear, quantisation_of, quantise_layers, quantised_layers
from toolkit.model.structure.model_parts import LANGUAGE, untrained
from toolkit.model.structure.tying import adapts_tied
from toolkit.recipe.schema import AdapterSection
from toolkit.sharding.fsdp2.shards import Rows, state_once

if TYPE_CHECKING:
    import peft


def has_adapter(model: nn.Module) -> bool:
    """Tells whether the model is one of peft's."""
    # Whoever made one has imported it. Runs without adapters do not: it takes seconds, and brings in bitsandbytes,
    # after which Accelerate starts no ranks from a notebook.
    imported = sys.modules.get("peft")
    return imported is not None and isinstance(model, imported.PeftModel)


def base_of(model: Any) -> Any:
    """Returns the model without peft's wrapper; the signature of its forward lists the inputs."""
    return model.get_base_model() if has_adapter(model) else model


def add_adapter(
    model: PreTrainedModel,
    section: AdapterSection,
    base: str | None,
    revision: str | None = None,
    trained: Sequence[str] = (LANGUAGE,),
) -> peft.PeftModel:
    """Adds adapters to the model and freezes everything else; trained parameters are held in float32.

    Args:
        model: the model on the meta device, on which the adapters are made, too.
        base, revision: the model's name or folder, which the adapter's file will name.
        trained: the parts of a model that reads more than text that get adapters, in words of `model.train`.

    Raises:
        BadInputError: if the targets match nothing, or a module that cannot be adapted.
    """
    import peft

    classifier = classifier_of(type(model).__name__)
    writer = "SEQ_2_SEQ_LM" if model.config.is_encoder_decoder else "CAUSAL_LM"
    targets = _targets(model, section, trained)
    config = peft.LoraConfig(
        task_type=writer if classifier is None else classifier.peft_task,
        base_model_name_or_path=base,
        revision=revision,
        r=section.r,
        lora_alpha=section.alpha if section.alpha is not None else 2 * section.r,
        lora_dropout=section.dropout,
        target_modules=section.target_modules if targets is None else targets.modules,
        target_parameters=None if targets is None else targets.parameters,
        modules_to_save=section.modules_to_save,
        exclude_modules=_without_gradient_paths(model, section, trained),
        use_rslora=section.use_rslora,
        use_dora=section.use_dora,
    )
    _require_modules(model, section)
    try:
        with warnings.catch_warnings():  # of the base's name, which is set below
            warnings.filterwarnings("ignore", message=".*base_model_name_or_path")
            # On the meta device: the values are those of `AdapterWeights`, and no rank makes whole ones.
            adapted = peft.get_peft_model(model, config, low_cpu_mem_usage=True)
    except (ValueError, TypeError, re.error) as error:
        raise BadInputError(
            f"adapter.target_modules: {section.target_modules!r} cannot be adapted: {first_line(error)}. "
            f"Name some of {_linear_names(model)}"
        ) from error
    adapted.peft_config[NAME].base_model_name_or_path = base  # peft takes the place of its configuration
    hold_by_expert(adapted, NAME)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return adapted


def _without_gradient_paths(
    model: PreTrainedModel, section: AdapterSection, trained: Sequence[str]
) -> list[str] | None:
    """Returns the layers that get no gradient, so that names of layers do not adapt them.

    With `adapter.start_from` the names may be those that peft made of `all-linear`.
    """
    if section.target_modules == "all-linear" or section.start_from is not None:
        return left_out_of_all_linear(model, trained)
    return never_reached(model, trained) or None


def quantise(model: PreTrainedModel, section: AdapterSection | None) -> bool:
    """Quantises the frozen linear layers of a model on the meta device, if the recipe asks for it.

    Raises:
        BadInputError: as `quantise_layers`.
    """
    quantisation = quantisation_of(section)
    if section is None or quantisation is None:
        return False
    quantise_layers(model, quantisation, layers_to_quantise(model, section))
    return True


def _targets(model: PreTrainedModel, section: AdapterSection, trained: Sequence[str]) -> Targets | None:
    """Returns the targets of `all-linear` or of a pattern in a model with stacked experts; None if peft finds them.

    Raises:
        BadInputError: for settings that peft does not support for experts.
    """
    frozen = untrained(model, trained)
    experts = [name for name in stacked_experts(model) if name not in frozen]
    if not experts or isinstance(section.target_modules, list):
        return None
    if section.target_modules != "all-linear":
        return targets_of_pattern(model, section.target_modules, experts)
    for field in ("dropout", "use_dora"):
        if getattr(section, field):
            raise BadInputError(
                f"adapter.{field}: {getattr(section, field)} does not work on stacked experts such as {experts[0]}; "
                f"remove adapter.{field}, or name the layers to adapt without them, for example "
                "adapter.target_modules=[q_proj, k_proj, v_proj, o_proj]"
            )
    return targets_beside_experts(model, experts, trained)


def _require_modules(model: nn.Module, section: AdapterSection) -> None:
    """Raises BadInputError for a listed name that no module ends with; peft only requires one match among all."""
    named = {"target_modules": section.target_modules, "modules_to_save": section.modules_to_save}
    for field, names in named.items():
        for name in names if isinstance(names, list) else []:
            if not any(path == name or path.endswith(f".{name}") for path, _ in model.named_modules()):
                raise BadInputError(
                    f"adapter.{field}: {name!r} matches no module of {type(model).__name__}; it has "
                    f"{_linear_names(model) if field == 'target_modules' else _child_names(model)}"
                )


def _linear_names(model: nn.Module) -> str:
    """Lists the last parts of the names of layers that LoRA can adapt."""
    names = {path.rpartition(".")[2] for path, module in model.named_modules() if _is_matrix(module)}
    return ", ".join(sorted(names))


def _is_matrix(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return weight is not None and weight.ndim == 2


def _child_names(model: nn.Module) -> str:
    own = {path.rpartition(".")[2] for path, module in model.named_modules() if list(module.parameters(False))}
    return ", ".join(sorted(own))


@contextmanager
def adapters_off(model: peft.PeftModel) -> Iterator[None]:
    """Switches the adapters off until the block ends, for the base's forward.

    peft's `disable_adapter` also changes `requires_grad` of the parameters that are in the modules at the time,
    sharded or gathered; those that FSDP2 puts there in between would keep the change.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper)]
    was_off = [layer._disable_adapters for layer in layers]
    try:
        for layer in layers:
            layer._disable_adapters = True
        yield
    finally:
        for layer, off in zip(layers, was_off, strict=True):
            layer._disable_adapters = off


def trainable_share(model: nn.Module) -> tuple[int, int]:
    """Returns the numbers of trained parameters and of all parameters."""
    packed = {id(parameter) for _, layer in quantised_layers(model) for parameter in layer.bytes()}
    counts = [
        (parameter.numel(), parameter.requires_grad) for parameter in model.parameters() if id(parameter) not in packed
    ]
    held = sum(math.prod(layer.shape) for _, layer in quantised_layers(model))
    return sum(count for count, trained in counts if trained), held + sum(count for count, _ in counts)


class AdapterWeights:
    """Reads the base's parameters from their source, and draws new adapters from the seed.

    A is uniform in +-1 / sqrt(inputs) (kaiming, as in peft) and B is zero, so that the first forward is the base's.
    Each comes from a generator seeded by its name, so that every rank draws the same rows. DoRA's magnitudes are the
    norms of the base's rows.

    Args:
        base: the source of the base's parameters.
        model: the model with its adapters.
        started: the adapter to continue, whose file has all trained parameters; None for new adapters.
    """

    def __init__(self, base: Any, model: nn.Module, seed: int, started: StartedAdapter | None = None) -> None:
        self._base = base
        self._parameters = dict(model.named_parameters(remove_duplicate=False))
        self._modules = dict(model.named_modules())
        self._seed = seed
        self._started = started

    def read(self, name: str, like: torch.Tensor, rows: Rows) -> torch.Tensor:
        """See `toolkit.model.weights.weights.Weights`."""
        if self._started is not None and name in self._started:
            return self._started.read(name, like, rows)
        # Of embeddings peft makes A zero and draws B, the other way round than elsewhere.
        if ".lora_B." in name or ".lora_embedding_A." in name:
            return torch.zeros(like.shape)[rows]
        if ".lora_A." in name:
            bound = 1 / math.sqrt(math.prod(like.shape[1:]))
            return ((torch.rand(like.shape, generator=generator_of(self._seed, name)) * 2 - 1) * bound)[rows]
        if ".lora_embedding_B." in name:
            return torch.randn(like.shape, generator=generator_of(self._seed, name))[rows]
        if ".lora_magnitude_vector." in name:
            return self._row_norms(name)[rows]
        return self._base.read(base_name(name), like, rows)  # type: ignore[no-any-return]

    def _row_norms(self, name: str) -> torch.Tensor:
        owner = name.partition(".lora_magnitude_vector.")[0]
        path = f"{owner}.base_layer"
        layer = self._modules[path]
        if isinstance(layer, QuantisedLinear):
            of_rows: torch.Tensor = torch.linalg.vector_norm(layer.read_matrix(self._base, base_name(path)), dim=1)
            return of_rows
        like = self._parameters[f"{path}.weight"]
        weight = self._base.read(base_name(f"{path}.weight"), like, (slice(None),)).float()
        norms: torch.Tensor = torch.linalg.vector_norm(weight, dim=0 if _inputs_first(self._modules[owner]) else 1)
        return norms


def generator_of(seed: int, name: str) -> torch.Generator:
    """Returns the generator of a parameter's first values, which depend on the seed and on its name alone."""
    # Hashed, as `manual_seed` uses 32 bits of a number: seeds put into its upper half would all draw the same.
    mixed = hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8]
    return torch.Generator().manual_seed(int.from_bytes(mixed) >> 1)


def base_name(name: str) -> str:
    """Returns a parameter's name in the model before it was adapted."""
    # Wrappers of parameters stand in one another: experts.base_layer.base_layer.down_proj.
    name = name.removeprefix(PREFIX).replace(".base_layer", "").replace(".original_module.", ".")
    return name.replace(f".modules_to_save.{NAME}.", ".")


def trained_names(model: nn.Module) -> set[str]:
    """Returns names of the parameters in checkpoints of an adapted model; the base's stay in their files."""
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def _quantisation_for_transformers(base: nn.Module) -> dict[str, Any] | None:
    """Returns how the base was quantised for training; None for one that was quantised in its files, which say so."""
    layer = next((layer for _, layer in quantised_layers(base)), None)
    if layer is None or layer.quantisation.stored:
        return None
    return layer.quantisation.for_transformers(layers_left_whole(base))


def write_adapter(
    model: peft.PeftModel,
    tensors: Iterable[tuple[str, torch.Tensor | None]],
    folder: Path,
    dtype: torch.dtype = torch.float32,
    base: str | None = None,
    configuration: str | None = None,
) -> dict[str, torch.Tensor]:
    """Writes `adapter_model.safetensors` and `adapter_config.json` as peft does; on rank 0, which has the tensors.

    Returns them under peft's names, and nothing on other ranks.

    Args:
        tensors: whole tensors by their names in the model; those of the base are ignored.
        dtype: the dtype of the file's tensors.
        base, configuration: fingerprint of the base, and digest of its config.json, as they were when training began,
            for `base.json`: peft's file only has the base's name. It also says how the base was quantised.
    """
    from peft import get_peft_model_state_dict

    trained = trained_names(model)
    own = ((name, tensor) for name, tensor in tensors if name in trained)
    whole = {name: tensor.to("cpu", dtype) for name, tensor in as_peft_has_them(model, own) if tensor is not None}
    if not whole:
        return {}
    # peft's default, auto, may ask the hub for the base's configuration.
    state: dict[str, torch.Tensor] = get_peft_model_state_dict(model, state_dict=whole, save_embedding_layers=False)
    names = names_in_file(model, state)
    named = {names[name]: tensor.contiguous() for name, tensor in state.items()}
    save_adapter(model, named, folder)
    Base(base, configuration, _quantisation_for_transformers(base_of(model))).write(folder)
    return state


def save_adapter(model: peft.PeftModel, tensors: dict[str, torch.Tensor], folder: Path, **changes: Any) -> None:
    """Writes tensors and configuration as peft's `save_pretrained` does, with changes of the configuration's fields."""
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = copy.copy(model.peft_config[NAME])
    vars(config).update(changes, inference_mode=True)
    config.save_pretrained(str(folder))


def merged(
    model: peft.PeftModel, tensors: Iterable[tuple[str, torch.Tensor | None]]
) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Yields the base's tensors under their own names, with the adapters' products added, those in float32.

    They are W + s B A; with DoRA, its rows are scaled to the magnitudes. A layer's tensors must come one after another.
    """
    layer: dict[str, torch.Tensor | None] = {}
    current = ""
    for name, tensor in as_peft_has_them(model, tensors):
        owner, _, part = _split(name)
        if owner != current and layer:
            yield from _merged_layer(model, current, layer)
            layer = {}
        current = owner
        if owner:
            layer[part] = tensor
        elif ".original_module." not in name:
            yield base_name(name), tensor
    if layer:
        yield from _merged_layer(model, current, layer)


def _split(name: str) -> tuple[str, str, str]:
    """Splits a tensor's name into the path of the adapted layer and the part of it; empty for other tensors."""
    for part in ("base_layer", "lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector"):
        owner, found, rest = name.partition(f".{part}.")
        if found:
            return owner, part, f"{part}.{rest}"
    return "", "", name


def _merged_layer(
    model: peft.PeftModel, path: str, parts: dict[str, torch.Tensor | None]
) -> Iterator[tuple[str, torch.Tensor | None]]:
    wrappers = dict(wrappers_of(model.get_submodule(path)))
    for part, tensor in parts.items():
        if ".lora_" in f".{part}":
            continue
        wrapper, name = wrappers.get(part.rpartition(".")[2]), base_name(f"{path}.{part}")
        if wrapper is None or tensor is None:
            yield name, tensor
            continue
        prefix, layer = wrapper
        a, b = (_lora_matrix(parts, f"{prefix}lora_", half) for half in "AB")
        if tensor.ndim == 3:
            inputs_first = getattr(layer.get_base_layer(), "is_transposed", False)
            yield name, _merged_experts(tensor, a, b, layer.scaling[NAME], inputs_first)
            continue
        yield name, _merged_weight(tensor, a, b, parts.get(_MAGNITUDE), layer.scaling[NAME], _inputs_first(layer))


def _lora_matrix(parts: dict[str, torch.Tensor | None], prefix: str, half: str) -> torch.Tensor:
    """Returns A, (rank, inputs), or B, (outputs, rank); those of embeddings have other names."""
    name = f"{prefix}{half}.{NAME}.weight"
    factor = parts[name if name in parts else f"{prefix}embedding_{half}.{NAME}"]
    assert factor is not None
    return factor


def wrappers_of(layer: Any) -> Iterator[tuple[str, tuple[str, Any]]]:
    """Yields the name of each adapted parameter, with the prefix of its adapter's names and peft's layer.

    The outermost comes first: experts have several adapted parameters, with nested wrappers.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    prefix = ""
    while isinstance(layer, BaseTunerLayer):
        yield getattr(layer, "parameter_name", "weight"), (prefix, layer)
        prefix, layer = f"{prefix}base_layer.", layer.base_layer


_MAGNITUDE = f"lora_magnitude_vector.{NAME}.weight"


def _merged_experts(
    weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scaling: float, inputs_first: bool
) -> torch.Tensor:
    """Returns W + s B A for each expert, in float32.

    Args:
        weight: (experts, outputs, inputs), or (experts, inputs, outputs) with `inputs_first`.
        a: (experts x rank, inputs), an expert's rows one after another.
        b: (outputs, rank x experts), a rank's columns for all experts one after another, as peft has it.
    """
    of_a, of_b = each_expert(a.float(), b.float(), weight.shape[0])
    product = scaling * (of_b @ of_a)
    return weight.float() + (product.mT if inputs_first else product)


def _inputs_first(layer: Any) -> bool:
    """Tells whether the weight that a LoRA layer wraps is (inputs, outputs); a square one's shape does not say."""
    return isinstance(layer.get_base_layer(), nn.Embedding) or bool(getattr(layer, "fan_in_fan_out", False))


def _merged_weight(
    weight: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    magnitude: torch.Tensor | None,
    scaling: float,
    inputs_first: bool,
) -> torch.Tensor:
    """Returns W + s B A in float32, (outputs, inputs) or transposed if `inputs_first`."""
    whole = (weight.T if inputs_first else weight).float()
    whole = whole + scaling * (b.float() @ a.float())
    if magnitude is not None:
        whole = whole * (magnitude.float() / whole.norm(dim=1))[:, None]
    return whole.T if inputs_first else whole


def state_in_layers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns `state_once`, ordered so that the tensors of each adapted layer come one after another.

    Tied matrices of which one has an adapter are there twice, under both names.
    """
    state, base = state_once(model), base_of(model)
    if adapts_tied(base):
        shared = base.get_input_embeddings().weight
        first, second = (n for n, each in model.named_parameters(remove_duplicate=False) if each is shared)
        state[second] = state[first]
    return dict(sorted(state.items(), key=lambda item: _split(item[0])[0] or item[0]))

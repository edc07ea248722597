"""Refuses adapters that a run could not train, export or merge correctly, before it trains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from toolkit import ranks
from toolkit.errors import BadInputError, listed
from toolkit.model.adapters.adapter_names import names_in_file
from toolkit.model.adapters.adapters import base_name, base_of, has_adapter, trained_names
from toolkit.model.adapters.expert_adapters import as_peft_has_them
from toolkit.model.structure.tying import has_own_head, is_tied
from toolkit.model.weights.weights import Fit
from toolkit.recipe.schema import ExportSection


def require_mergeable(model: nn.Module) -> None:
    """Checks that merging changes only what was trained.

    Raises:
        BadInputError: if it would change more.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    base = base_of(model)
    if not is_tied(base):
        return
    embedding, head = base.get_input_embeddings(), base.get_output_embeddings()
    if base.config.is_encoder_decoder and isinstance(embedding, BaseTunerLayer):
        raise BadInputError(
            "export.merge: the adapter of the input embeddings cannot be merged, as the head shares their weights; set "
            "export.merge=false, or leave the input embeddings out of adapter.target_modules"
        )
    if isinstance(embedding, AuxiliaryTrainingWrapper) and not isinstance(head, AuxiliaryTrainingWrapper):
        raise BadInputError(
            "export.merge: the input embeddings are trained whole and the head, which shares their weights, is not; "
            f"set adapter.modules_to_save={_listed(base, [embedding, head])}, whose export is untied"
        )
    if has_own_head(base) and base.config.is_encoder_decoder:
        # Its decoder's outputs depend on the tie in some types, and encoder and decoder share one embedding.
        raise BadInputError(
            f"export.merge: the head of {type(base).__name__} is trained whole, and its embeddings share its weight; "
            f"leave {_last_name(base, head)} out of adapter.modules_to_save, or set export.merge=false"
        )


def require_new_rows_trained(model: nn.Module, tokens: Sequence[str]) -> None:
    """Checks that adapters train the rows of added tokens, which begin as the mean of the others.

    Args:
        tokens: the tokens that `model.add_tokens` has added to those of the base.

    Raises:
        BadInputError: if the embeddings or the head stay as they are.
    """
    if not tokens or not has_adapter(model):
        return
    base = base_of(model)
    layers = [layer for layer in (base.get_input_embeddings(), base.get_output_embeddings()) if layer is not None]
    frozen = [layer for layer in layers if not any(parameter.requires_grad for parameter in layer.parameters())]
    if not frozen:
        return
    mend = f"set adapter.modules_to_save={_listed(base, layers)}"
    if base.config.is_encoder_decoder:
        mend = "set adapter.kind=none, or remove model.add_tokens"
    names = " and ".join(_last_name(base, layer) for layer in frozen)
    raise BadInputError(
        f"model.add_tokens: the adapter does not train {names}, so the new rows of {listed(tokens)} would stay the "
        f"mean of the others; {mend}"
    )


def _listed(base: Any, layers: Sequence[nn.Module]) -> str:
    """Lists the modules that `adapter.modules_to_save` has already, and these layers."""
    saved = [path for path, module in base.named_modules() if hasattr(module, "modules_to_save")]
    names = dict.fromkeys(path.rpartition(".")[2] for path in saved)
    return f"[{', '.join(names | dict.fromkeys(_last_name(base, layer) for layer in layers))}]"


def _last_name(base: Any, layer: nn.Module) -> str:
    path: str = next(path for path, module in base.named_modules() if module is layer)
    return path.rpartition(".")[2]


def require_readable(model: nn.Module, export: ExportSection) -> None:
    """Checks that peft can read all of an adapter's tensors again.

    Raises:
        BadInputError: if it would miss one.
    """
    if not has_adapter(model) or not export.enabled or export.merge:
        return
    from peft import get_peft_model_state_dict

    trained = trained_names(model)
    own = ((name, parameter.data) for name, parameter in model.named_parameters() if name in trained)
    whole = {name: tensor for name, tensor in as_peft_has_them(model, own) if tensor is not None}
    names_in_file(model, get_peft_model_state_dict(model, state_dict=whole, save_embedding_layers=False))


def require_one_type(model: nn.Module, dtype: str, mixed_precision: str) -> None:
    """Checks that modules which are trained whole, in float32, do not compute with the base's 16 bits.

    Raises:
        BadInputError: if they would.
    """
    if not has_adapter(model) or dtype == "float32" or mixed_precision != "no":
        return
    from peft.utils.other import AuxiliaryTrainingWrapper

    whole = [name for name, module in model.named_modules() if isinstance(module, AuxiliaryTrainingWrapper)]
    if whole:
        raise BadInputError(
            f"training.mixed_precision: {base_name(whole[0])} is trained in float32 next to a base in 16 bits; set "
            "training.mixed_precision=bf16, or model.dtype=float32"
        )


def require_kept(model: Any, fit: Fit, export: ExportSection) -> None:
    """Checks that an adapter's file holds every weight that was drawn at random. Collective.

    Raises:
        BadInputError: if it would lack one.
    """
    if not has_adapter(model) or not export.enabled or export.merge:
        return
    drawn: list[str] = ranks.on_first_rank(lambda: fit.drawn)
    held = {base_name(name) for name in trained_names(model)}
    lost = [name for name in drawn if name not in held]
    if lost:
        modules = sorted({"pooler" if ".pooler." in f".{name}" else name.split(".")[-2] for name in lost})
        raise BadInputError(
            f"adapter.modules_to_save: {listed(lost)} of the base are drawn at random, and an adapter alone would not "
            f"hold them; set adapter.modules_to_save=[{', '.join(modules)}], or export.merge=true"
        )

"""Names weights as in a model's files; transformers has other names in memory: fused experts, other prefixes.

transformers maps the files' names to its own and back. Servers and converters (vLLM, SGLang, llama.cpp) go by the names
in the files, so an export has those of the base that it was trained from.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, revert_weight_conversion

from toolkit.model.structure.on_meta import build_on_meta
from toolkit.model.structure.tying import config_of_export
from toolkit.model.weights.weights import block_of, unread_files

Tensors = Iterator[tuple[str, torch.Tensor]]


class FileNames:
    """Gives tensors the names and shapes that they have in files.

    Args:
        model: a model of transformers, sharded or not; only its class and configuration are used.
        stored: the names in the files of the base; None for random weights, which get the names of
            `save_pretrained`.
        base: the folder of the base, whose tensors that transformers does not load follow after the others, as they
            are; None if there is none.
    """

    def __init__(self, model: PreTrainedModel, stored: Set[str] | None, base: Path | None = None) -> None:
        self._unread = {} if base is None else unread_files(base, model)
        # Some towers have no class for the attention of the run.
        config = config_of_export(model)
        self._model: Any = build_on_meta(lambda: type(model)._from_config(config, attn_implementation="eager"))
        self._model.tie_weights()
        # Of tied weights the name that transformers keeps.
        self._tied: dict[str, str] = dict(getattr(self._model, "all_tied_weights_keys", None) or {})
        everything = get_model_conversion_mapping(self._model, add_legacy=False)
        saved = [conversion for conversion in everything if not isinstance(conversion, PrefixChange)]
        self._conversions = saved
        if stored is not None:
            # The last of equally good ones is transformers' own names: nothing is converted without a need.
            self._conversions = max((saved, everything, []), key=lambda each: len(self._converted_names(each) & stored))

    def _converted_names(self, conversions: list[Any]) -> Set[str]:
        state = {name: torch.empty(tensor.shape, device="meta") for name, tensor in self._model.state_dict().items()}
        return self._converted(state, conversions).keys()

    def _converted(self, state: dict[str, torch.Tensor], conversions: list[Any]) -> dict[str, torch.Tensor]:
        if not conversions:
            return state
        self._model._weight_conversions = list(conversions)
        return revert_weight_conversion(self._model, state)  # type: ignore[no-any-return]

    def all(self) -> Set[str]:
        """Returns the names of all the model's tensors in files."""
        return self._converted_names(self._conversions)

    def of(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Returns tensors of whole blocks as files hold them, parts as views; tied ones keep their names."""
        return self._converted(tensors, self._conversions)

    def in_files(self, tensors: Tensors) -> Tensors:
        """Yields the tensors as files hold them; one block of the model is in memory at a time.

        What the base has next to them follows, if there are any: only the first rank has tensors.
        """
        written: set[str] = set()
        for name, tensor in self._in_blocks(tensors):
            written.add(name)
            yield name, tensor
        for name, path in self._unread.items() if written else ():
            if name not in written:
                with safe_open(path, framework="pt") as file:
                    yield name, file.get_tensor(name)

    def _in_blocks(self, tensors: Tensors) -> Tensors:
        group: dict[str, torch.Tensor] = {}
        group_key: str | None = None
        for tied, tensor in tensors:
            name = self._tied.get(tied, tied)
            # Those of a block are converted together: a name in memory may stand for several in files, or the reverse.
            key = block_of(name) or name.rpartition(".")[0]
            if group and key != group_key:
                yield from self._convert_block(group)
                group = {}
            group[name], group_key = tensor, key
        yield from self._convert_block(group)

    def _convert_block(self, group: dict[str, torch.Tensor]) -> Tensors:
        for name, tensor in self.of(group).items():
            # Parts of a fused tensor share its memory, which no file can.
            is_part = tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size()
            yield name, tensor.clone() if is_part else tensor

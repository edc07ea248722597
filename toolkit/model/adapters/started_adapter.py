"""Finds and reads the weights of the adapter that a run continues (`adapter.start_from`).

Each rank reads its own rows, as for the base. `toolkit.recipe.adapter_file` reads the configuration.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from toolkit import ranks
from toolkit.errors import BadInputError, first_line, listed
from toolkit.model.adapters.adapter_names import names_in_file
from toolkit.model.adapters.base_file import read_base
from toolkit.model.adapters.expert_adapters import as_peft_has_them, by_experts, peft_name
from toolkit.model.weights.weights import FLOATS
from toolkit.paths import BASE_FILE, fingerprint_of, source_name
from toolkit.recipe.adapter_file import CONFIG, WEIGHTS, started_config
from toolkit.recipe.schema import AdapterSection, ModelSection
from toolkit.sharding.fsdp2.shards import Rows

if TYPE_CHECKING:
    import peft


class StartedAdapter:
    """The tensors of an adapter's file, by the names of the model's parameters.

    Args:
        model: the model with adapters, on the meta device.

    Attributes:
        folder: the folder of the adapter.
        config: the fields of its adapter_config.json.
        other_base: a sentence if its file names another base than the recipe; else, and before the check, None.

    Raises:
        BadInputError: on every rank, if the adapter cannot be trained here, or its modules or shapes differ from the
            model's. Collective.
    """

    def __init__(self, model: peft.PeftModel, section: AdapterSection) -> None:
        assert section.start_from is not None
        self.folder = Path(section.start_from).expanduser()
        self._place = f"adapter.start_from: {section.start_from!r}"
        self.other_base: str | None = None
        ranks.on_every_rank(lambda: self._find(model, section), "read the adapter")

    def _find(self, model: peft.PeftModel, section: AdapterSection) -> None:
        self.config = started_config(str(section.start_from))
        with self._readable():
            stored = self._stored_shapes()
        shapes, self._files = _names_and_shapes(model, set(stored))
        lost = sorted(name for name in self._files if self._files[name] not in stored)
        odd = sorted(stored.keys() - set(self._files.values()))
        if lost or odd:
            what = f"lacks weights of {listed(lost)}" if lost else f"has {listed(odd)}, which nothing here takes"
            targets = json.dumps(self.config.get("target_modules"))
            raise BadInputError(
                f"{self._place} {what}. Its {CONFIG} says target_modules {targets}, the recipe says "
                f"adapter.target_modules {json.dumps(section.target_modules)}; remove that, name the base that the "
                "adapter was trained on in model.name_or_path, or the modules by a pattern of whole paths"
            )
        for name, shape in shapes.items():
            if (found := stored[self._files[name]]) != shape:
                raise BadInputError(
                    f"{self._place}: {self._files[name]} has the shape {found}, and the model needs {shape}; name the "
                    "base that the adapter was trained on in model.name_or_path"
                )

    def _stored_shapes(self) -> dict[str, list[int]]:
        with safe_open(self.folder / WEIGHTS, framework="pt") as file:
            stored = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            if odd := {name: kind for name, each in stored.items() if (kind := each.get_dtype()) not in FLOATS}:
                raise BadInputError(
                    f"{self._place}: {listed(odd)} are stored as {', '.join(sorted(set(odd.values())))} in {WEIGHTS}; "
                    f"allowed: {', '.join(FLOATS)}. Save the adapter in one of these"
                )
            return {name: list(each.get_shape()) for name, each in stored.items()}

    def require_usable(self, model: ModelSection, base: Path, fingerprint: str | None) -> None:
        """Checks the base, and sets `other_base`. Collective.

        Args:
            base: folder of the base.
            fingerprint: that of its weights.

        Raises:
            BadInputError: if the adapter's folder tells of another base.
        """
        is_told, other = ranks.on_first_rank(lambda: self._compared_base(base, fingerprint))
        if other is not None:
            raise BadInputError(
                f"{self._place}: the adapter was trained on another base than that of model.name_or_path "
                f"({model.name_or_path!r}): {other}. Name the base that it was trained on, or, where this one is "
                f"meant, remove {BASE_FILE} from its folder"
            )
        named = self.config.get("base_model_name_or_path")
        if not is_told and named and not _is_same(str(named), str(model.name_or_path)):
            here = source_name(str(model.name_or_path))
            self.other_base = f"its file names the base {source_name(str(named))}, and this run trains on {here}"

    @contextmanager
    def _readable(self) -> Iterator[None]:
        try:
            yield
        except (OSError, SafetensorError) as error:
            raise BadInputError(
                f"{self._place}: {WEIGHTS} cannot be read: {first_line(error)}. A file of about 130 bytes is a Git-LFS "
                "pointer (run `git lfs pull` there); download a truncated one again"
            ) from error

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def read(self, name: str, like: torch.Tensor, rows: Rows) -> torch.Tensor:
        """See `toolkit.model.weights.weights.Weights`."""
        with self._readable(), safe_open(self.folder / WEIGHTS, framework="pt") as file:
            if peft_name(name) == name:
                read: torch.Tensor = file.get_slice(self._files[name])[rows]
                return read.float()
            # (outputs, rank x experts) in the file, (experts x outputs, rank) here.
            return by_experts(file.get_tensor(self._files[name]), like.shape[1]).flatten(0, 1)[rows].float()

    def fingerprint(self) -> str | None:
        """Returns the fingerprint of its weights. Collective."""
        return ranks.on_first_rank(lambda: fingerprint_of(self.folder, WEIGHTS))

    def _compared_base(self, base: Path, fingerprint: str | None) -> tuple[bool, str | None]:
        """Tells whether the adapter's folder says on which weights it was trained, and how these differ, or None."""
        told = read_base(self.folder, self._place)
        if told is None or told.fingerprint is None:
            return False, None
        return True, told.difference(base, fingerprint)


def _is_same(one: str, other: str) -> bool:
    return one == other or Path(one).expanduser().resolve() == Path(other).expanduser().resolve()


def _names_and_shapes(model: peft.PeftModel, stored: set[str]) -> tuple[dict[str, list[int]], dict[str, str]]:
    """Returns the shape of each parameter in an adapter's file, and its name in the file.

    Args:
        stored: names in the file. Some types have two; see `toolkit.model.adapters.adapter_names`.
    """
    from peft import get_peft_model_state_dict

    own: dict[str, torch.Tensor] = {}
    names: dict[int, str] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            ((as_peft, tensor),) = as_peft_has_them(model, [(name, parameter.data)])
            assert tensor is not None
            own[as_peft], names[id(tensor)] = tensor, name
    state = get_peft_model_state_dict(model, state_dict=own, save_embedding_layers=False)
    in_file = {key: key for key in state} if state.keys() <= stored else names_in_file(model, state)
    shapes = {names[id(tensor)]: list(tensor.shape) for tensor in state.values()}
    return shapes, {names[id(tensor)]: in_file[key] for key, tensor in state.items()}


def continued_adapter(model: Any, section: AdapterSection) -> StartedAdapter | None:
    """Finds the adapter that `model` continues; None if its adapters are new. Collective.

    Raises:
        BadInputError: as `StartedAdapter`.
    """
    return None if section.start_from is None else StartedAdapter(model, section)


def start_fact(started: StartedAdapter, section: AdapterSection) -> str:
    """Describes the adapter that the run continues, without the path of its folder."""
    folder = started.folder.resolve()
    name = f"{folder.parent.name}/{folder.name}" if folder.name == "export" else folder.name
    alpha = section.alpha if section.alpha is not None else 2 * section.r
    fact = f"goes on from the adapter {name} (r {section.r}, alpha {alpha:g})"
    before = started.config.get("lora_dropout") or 0.0
    if before != section.dropout:
        fact += f"; dropout {section.dropout:g}, and {before:g} before"
    return fact if started.other_base is None else f"{fact}; {started.other_base}"

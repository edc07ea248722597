"""Scores completions with a reward model, on tokens made as in its training."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.errors import BadInputError, first_line
from toolkit.generation.text.load import find_model, tokenizer_of

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class RewardModel:
    """A decoder with a head of one score.

    Attributes:
        name: the name in messages.
        field: the option or the field that names it, for errors.
    """

    name: str
    field: str
    model: Any
    tokenizer: PreTrainedTokenizerBase

    def encode(self, rows: Sequence[dict[str, Any]]) -> list[list[int]]:
        """Encodes rows with a `prompt` and a `completion` as a run would.

        Raises:
            BadInputError: if a row cannot be used; it says why.
        """
        from toolkit.data.documents.encode import Encoder
        from toolkit.data.kinds.registry import LAYOUTS
        from toolkit.data.layouts.layout import Layout
        from toolkit.data.tokens.tokenizer import bos_of

        names = {name: name for name in ("prompt", "completion", "tools")}
        encoder = Encoder(self.tokenizer, "last_turn", bos_id=bos_of(self.tokenizer, None))
        found = []
        for document in encoder.documents(list(rows), Layout(LAYOUTS["prompt and completion"], names)):
            if document["problem"] is not None:
                raise BadInputError(f"{self.field}: {self.name!r} cannot be given a sample: {document['problem']}")
            found.append([int(token) for token in document["input_ids"]])
        return found

    def rewards(self, texts: Sequence[list[int]], batch_size: int) -> list[float]:
        """Returns the score of each text, which is that of its last token before padding.

        Raises:
            BadInputError: if a text is too long.
        """
        import torch

        positions = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        longest = max(map(len, texts))
        if positions is not None and longest > positions:
            raise BadInputError(
                f"{self.field}: {self.name!r} has {positions} positions, a sample with its prompt {longest} tokens; "
                "sample fewer tokens"
            )
        # Without a token for padding transformers scores single texts alone.
        size = batch_size if self.model.config.get_text_config().pad_token_id is not None else 1
        with torch.no_grad():
            return [
                float(reward)
                for start in range(0, len(texts), size)
                for reward in self.model(**self._padded_inputs(texts[start : start + size])).logits[:, 0].float()
            ]

    def _padded_inputs(self, texts: Sequence[list[int]]) -> dict[str, torch.Tensor]:
        import torch

        padding = self.model.config.get_text_config().pad_token_id or 0
        ids = torch.full((len(texts), max(map(len, texts))), padding)
        mask = torch.zeros_like(ids)
        for row, text in enumerate(texts):  # on the right, as the model's own pipeline has it
            ids[row, : len(text)], mask[row, : len(text)] = torch.tensor(text), 1
        return {"input_ids": ids.to(self.model.device), "attention_mask": mask.to(self.model.device)}


def find_reward_model(source: str, field: str = "--reward") -> str:
    """Finds the folder of a reward model's run or export.

    Args:
        field: the option or the field that names it, for errors.

    Raises:
        BadInputError: if the folder holds no reward model.
    """
    try:
        place = find_model(source)
    except BadInputError as problem:
        raise BadInputError(f"{field}: {problem}") from None
    if place.on_hub or place.is_adapter:
        what = "an adapter" if place.is_adapter else "no folder"
        raise BadInputError(
            f"{field}: {source!r} is {what}; name the export of a whole model of the objective reward (with adapters: "
            "export.merge=true)"
        )
    try:
        config = json.loads((Path(place.name) / "config.json").read_text(encoding="utf-8"))
        architecture = str((config.get("architectures") or [""])[0])
    except (OSError, ValueError, AttributeError, LookupError, TypeError) as error:
        raise BadInputError(
            f"{field}: {source!r} cannot be loaded: config.json is damaged ({first_line(error)}); name another export"
        ) from error
    if not architecture.endswith("ForSequenceClassification"):
        raise BadInputError(
            f"{field}: {source!r} ({architecture}) is no reward model; name an export of the objective reward"
        )
    return place.name


@contextmanager
def reward_model(source: str, dtype: str, device: str, field: str = "--reward") -> Iterator[RewardModel]:
    """Loads the reward model of a folder.

    Args:
        field: the option or the field that names it, for errors.

    Raises:
        BadInputError: if it does not score completions.
    """
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification

    from toolkit.generation.text.command import quiet

    folder = find_reward_model(source, field)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    with quiet():
        try:
            config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
            if config.num_labels != 1:
                raise BadInputError(
                    f"{field}: {source!r} is no reward model: it tells {config.num_labels} classes; name an export of "
                    "the objective reward"
                )
            model = AutoModelForSequenceClassification.from_pretrained(
                folder, config=config, dtype=dtype, use_safetensors=True, trust_remote_code=False
            )
        except BadInputError:
            raise
        except Exception as error:  # the libraries that read models raise a great many kinds
            raise BadInputError(f"{field}: {source!r} cannot be loaded: {first_line(error)}") from error
        place = find_model(str(Path(folder)))
        yield RewardModel(source, field, model.to(device).eval(), tokenizer_of(place, place))

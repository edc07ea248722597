"""Scores completions with a reward model, on tokens made as in its training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.errors import BadInputError
from toolkit.generation.text.complete import Shown, image_arguments
from toolkit.generation.text.load import architecture_of, device_of, find_model, load_base, tokenizer_of
from toolkit.paths import user_cache

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from toolkit.data.images.images import Images


@dataclass(frozen=True)
class Scored:
    """A prompt with its completion as tokens, and its images; None without images."""

    ids: list[int]
    shown: Shown | None = None


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

    def encode(self, rows: Sequence[dict[str, Any]]) -> list[Scored]:
        """Encodes rows with a `prompt` and a `completion` as a run would. Images are inside the messages.

        Raises:
            BadInputError: if a row cannot be used; it says why.
        """
        from toolkit.data.documents.encode import Encoder
        from toolkit.data.images.images import Images
        from toolkit.data.kinds.registry import LAYOUTS
        from toolkit.data.layouts.layout import Layout
        from toolkit.data.tokens.tokenizer import bos_of

        names = {name: name for name in ("prompt", "completion", "tools")}
        reader = Images.of(self.tokenizer, user_cache())
        held: dict[str, bytes] = {}
        images = None if reader is None else replace(reader, held=held)
        layout = Layout(LAYOUTS["prompt and completion"], names, images=images is not None, blind=BLIND)
        bos_id = bos_of(self.tokenizer, None)
        encoder = Encoder(self.tokenizer, "last_turn", bos_id=bos_id, images=images, image_root=Path())
        found = []
        for document in encoder.documents(list(rows), layout):
            if document["problem"] is not None:
                raise BadInputError(f"{self.field}: {self.name!r} cannot be given a sample: {document['problem']}")
            shown = _shown(images, document, held)
            found.append(Scored([int(token) for token in document["input_ids"]], shown))
        return found

    def rewards(self, texts: Sequence[Scored], batch_size: int) -> list[float]:
        """Returns the score of each text, which is that of its last token before padding.

        Raises:
            BadInputError: if a text is too long.
        """
        import torch

        positions = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        longest = max(len(text.ids) for text in texts)
        if positions is not None and longest > positions:
            raise BadInputError(
                f"{self.field}: {self.name!r} has {positions} positions, a sample with its prompt {longest} tokens; "
                "sample fewer tokens"
            )
        # Without a token for padding transformers scores single texts alone.
        size = batch_size if self.model.config.get_text_config().pad_token_id is not None else 1
        found = [0.0] * len(texts)
        # Texts with images have batches of their own: a model takes images of all rows or of none.
        for alike in ([n for n, text in enumerate(texts) if (text.shown is None) == blind] for blind in (True, False)):
            for start in range(0, len(alike), size):
                numbers = alike[start : start + size]
                with torch.no_grad():
                    scores = self.model(**self._padded_inputs([texts[n] for n in numbers])).logits[:, 0].float()
                for number, score in zip(numbers, scores.tolist(), strict=True):
                    found[number] = score
        return found

    def _padded_inputs(self, texts: Sequence[Scored]) -> dict[str, torch.Tensor]:
        import torch

        padding = self.model.config.get_text_config().pad_token_id or 0
        ids = torch.full((len(texts), max(len(text.ids) for text in texts)), padding)
        mask = torch.zeros_like(ids)
        for row, text in enumerate(texts):  # on the right, as the model's own pipeline has it
            ids[row, : len(text.ids)], mask[row, : len(text.ids)] = torch.tensor(text.ids), 1
        tokens = {"input_ids": ids.to(self.model.device), "attention_mask": mask.to(self.model.device)}
        return tokens | image_arguments(self.model, [text.shown for text in texts], ids)


BLIND = "and the reward model's folder has no image processor; leave such rows out, or name one that reads images"
"""Why a reward model reads no images, and what to do."""


def _shown(reader: Images | None, document: dict[str, Any], held: dict[str, bytes]) -> Shown | None:
    """Returns the images of a document of rows that hold theirs, or None if it has none."""
    from toolkit.data.documents.encode import records_of
    from toolkit.data.images.image_files import decoded

    if reader is None or not document.get("pictures"):
        return None
    contents = [held[record["digest"]] for record in records_of(document, None)]
    return Shown(reader, lambda: [decoded(content) for content in contents])


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
    architecture = architecture_of(place)
    if not architecture.endswith("ForSequenceClassification"):
        raise BadInputError(
            f"{field}: {source!r} ({architecture or 'of no class'}) is not a reward model; name an export of the "
            "objective reward"
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
    from toolkit.generation.text.command import quiet

    place = find_model(find_reward_model(source, field))
    device = device_of(device)
    with quiet():
        try:
            model = load_base(place, dtype, None, writes=False)
        except BadInputError as problem:
            raise BadInputError(f"{field}: {problem}") from None
        if model.config.num_labels != 1:
            raise BadInputError(
                f"{field}: {source!r} is not a reward model: its head has {model.config.num_labels} classes, not one "
                "score; name an export of the objective reward"
            )
        yield RewardModel(source, field, model.to(device).eval(), tokenizer_of(place, place))

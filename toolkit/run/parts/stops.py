"""What ends an answer: the tokens that are learned as ends, which the export's settings then have."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerBase

from toolkit.data.samples.samples import Samples
from toolkit.data.templates.stops import add_ends, turn_ends
from toolkit.model.adapters.adapters import base_of
from toolkit.run.stages.part import RunPart
from toolkit.run.stages.stages import PreparedRun


class Stops(RunPart):
    def prepared(self, run: PreparedRun) -> None:
        self.facts["stop"] = teach_to_stop(base_of(run.inner), run.tokenizer, run.data.train) or ""


def teach_to_stop(model: Any, tokenizer: PreTrainedTokenizerBase, samples: Samples) -> str | None:
    """Adds the ends that are learned to the model's `generation_config.eos_token_id`, which its export takes.

    A chat model's configuration often has only the end token of its base (Gemma's lacks `<end_of_turn>`), so that
    servers generate past the end of the answer.

    Returns:
        A description of what ends an answer, and what was added; None for models that do not continue a text.
    """
    if not samples.continues_text or not model.can_generate():
        return None
    learned = samples.learned_ends(turn_ends(tokenizer) | {tokenizer.eos_token_id})
    if not learned:
        return "no special token is learned as an end; generation stops where the model's settings say"
    settings = model.generation_config
    configured = settings.eos_token_id
    ends = ", ".join(f"{tokenizer.convert_ids_to_tokens(end)} ({end})" for end in sorted(learned))
    if not add_ends(settings, learned):
        return f"{ends} is learned as an end, and generation_config.eos_token_id has it"
    return (
        f"{ends} is learned as an end; generation_config.eos_token_id of the export is {settings.eos_token_id}, and "
        f"not {configured} as before"
    )

"""What a model writes, on the page of a run: a continuation at the end, and held-out prompts before and after."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from toolkit.pages.page import MISSING, card, card_head, escaped

LONGEST = 600
"""Of a prompt, its last characters are shown: they are what is answered."""


@dataclass(frozen=True)
class SideBySide:
    """A held-out prompt, what stands behind it in the data, and what the model writes; None: not yet."""

    prompt: str
    expected: str
    before: str | None = None
    after: str | None = None


def sample_card(sample: tuple[str, str] | None) -> str:
    """A prompt and its continuation."""
    if sample is None:
        return ""
    prompt, continuation = (escaped(part) for part in sample)
    keys = '<ul class="legend"><li><i class="prompt"></i>prompt</li><li><i class="said"></i>model</li></ul>'
    text = f'<div class="sample"><span class="prompt">{prompt}</span><span class="said">{continuation}</span></div>'
    return card("sample", f"{card_head('Sample', keys)}{text}")


def side_by_side_card(samples: Sequence[SideBySide]) -> str:
    """Held-out prompts, each with the model's words before and after training and those of the data."""
    if not samples:
        return ""
    shown = "".join(_side_by_side(sample) for sample in samples)
    return card(
        "side-by-side", f"{card_head('Held-out prompts, before and after', '', 'the most likely tokens')}{shown}"
    )


def _side_by_side(sample: SideBySide) -> str:
    prompt = sample.prompt if len(sample.prompt) <= LONGEST else f"… {sample.prompt[-LONGEST:]}"
    parts = (("Before training", sample.before), ("After training", sample.after), ("In the data", sample.expected))
    columns = "".join(
        f'<div><p class="label">{title}</p><div class="sample">{MISSING if text is None else escaped(text)}</div></div>'
        for title, text in parts
    )
    asked = f'<div class="sample prompt-alone"><span class="prompt">{escaped(prompt)}</span></div>'
    return f'{asked}<div class="sides">{columns}</div>'


STYLE = """
.legend i.prompt, .legend i.said { width: 12px; height: 12px; border: 1px solid var(--muted); border-radius: 3px; }
.legend i.said { background: var(--tint); border-color: var(--chart-1); }
.sample .prompt { color: var(--muted); }
.sample .said { background: var(--tint); border-radius: 3px; padding: 2px 0; -webkit-box-decoration-break: clone; }
.prompt-alone { margin-top: 14px; }
.sides { display: grid; grid-template-columns: repeat(3, 1fr); gap: 12px; margin-top: 8px; }
.sides > div { background: var(--tint); border-radius: 8px; padding: 8px 12px; min-width: 0; }
.sides .sample { line-height: 23px; max-height: 345px; overflow: auto; }
.sides .label { color: var(--muted); font-size: 12px; }
@media (max-width: 700px) { .sides { grid-template-columns: 1fr; } }
"""

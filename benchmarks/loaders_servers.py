"""The part of loaders.py that loads exports with servers' engines. It imports nothing of the toolkit.

Each function returns the logits after the tokens TOKENS (None without an engine), and whether the engine's tokenizer,
where it has one of its own, gives the tokens of the base.
"""

from __future__ import annotations

import sys
import tempfile
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import transformers

TOKENS = list(range(5, 85))
TEXT = "the cat <|im_end|> sat  \n über"
Answer = dict[str, Any]


def ctranslate2(job: dict[str, Any]) -> Answer:
    """Converts an export by ctranslate2's converter, and runs it in float32."""
    import ctranslate2
    from ctranslate2.converters import TransformersConverter

    vocabulary = transformers.AutoTokenizer.from_pretrained(job["folder"]).convert_ids_to_tokens(TOKENS)
    with tempfile.TemporaryDirectory() as folder:
        TransformersConverter(job["folder"]).convert(folder, quantization="float32", force=True)
        engine = ctranslate2.Generator(folder, device="cpu", compute_type="float32")
        import numpy

        logits = numpy.array(engine.forward_batch([vocabulary]).to_device(ctranslate2.Device.cpu))
    return {"logits": logits[0, -1].tolist(), "as_base": {}}


def mlx(job: dict[str, Any]) -> Answer:
    """Loads an export by mlx-lm, on the CPU."""
    import mlx.core
    from mlx_lm.utils import load_model, load_tokenizer

    mlx.core.set_default_device(mlx.core.cpu)
    model, _ = load_model(Path(job["folder"]))
    model.set_dtype(mlx.core.float32)
    logits = model(mlx.core.array([TOKENS]))[0, -1].astype(mlx.core.float32)
    own, base = (load_tokenizer(Path(job[name])).encode(TEXT) for name in ("folder", "base"))
    return {"logits": logits.tolist(), "as_base": {"tokens": own == base}}


def own_folder(export: str) -> str:
    """Returns the folder of an adapter for programs that have a matrix for each expert."""
    per_expert = Path(export) / "per_expert"
    return str(per_expert if per_expert.is_dir() else export)


def vllm(job: dict[str, Any]) -> Answer:
    """Loads an export by vLLM on the CPU, with its LoRA engine for an adapter, and its pooling engine for scores.

    With lists of tokens in the job (`prompts`), the answer has 16 greedy tokens after each, of base and export.
    """
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts

    TritonExperts.apply = _experts
    scores = job["auto"].endswith("SequenceClassification")
    options: dict[str, Any] = {
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 256,
        "max_num_batched_tokens": 256,
        "disable_log_stats": True,
    }
    name, tokenizer, request = job["folder"], job["folder"], None
    if job["adapter"]:
        options |= {"enable_lora": True, "max_lora_rank": 8}
        name, request = job["base"], LoRARequest("tuned", 1, own_folder(job["folder"]))
    if scores:
        options |= {"runner": "pooling"}
    else:
        options |= {"max_logprobs": -1, "logprobs_mode": "raw_logits"}
    engine = LLM(name, tokenizer=tokenizer, gpu_memory_utilization=0.05, **options)
    prompt: Any = {"prompt_token_ids": TOKENS}
    if scores:
        (answer,) = engine.classify([prompt], use_tqdm=False, pooling_params=_raw())
        return {"logits": list(answer.outputs.probs), "as_base": {}}
    once = SamplingParams(temperature=0, max_tokens=1, logprobs=-1)
    (answer,) = engine.generate([prompt], once, lora_request=request, use_tqdm=False)
    (found,) = answer.outputs[0].logprobs
    logits = [found[number].logprob for number in range(len(found))]
    own = engine.get_tokenizer().encode(TEXT)
    base = transformers.AutoTokenizer.from_pretrained(job["base"]).encode(TEXT)
    greedy, prompts = SamplingParams(temperature=0, max_tokens=16, min_tokens=16), job.get("prompts", [])
    asked = [{"prompt_token_ids": each} for each in prompts]
    written = [
        [list(one.outputs[0].token_ids) for one in engine.generate(asked, greedy, lora_request=each, use_tqdm=False)]
        for each in (None, request)
    ]
    return {"logits": logits, "as_base": {"tokens": own == base}, "written": written}


def _experts(
    self: Any, output: Any, hidden_states: Any, w1: Any, w2: Any, topk_weights: Any, topk_ids: Any, *_: Any, **__: Any
) -> None:
    """Takes the place of vLLM's kernel for experts with adapters, which only GPUs have: the same sums, one by one.

    The adapter's matrices are those that vLLM has read and put into its own buffers: (slots, experts, rank, inputs) and
    (slots, experts, outputs, rank).
    """
    from torch.nn.functional import silu

    lora = self._lora_context
    slots = lora.punica_wrapper.token_lora_indices.tolist()

    def product(weight: Any, x: Any, a: Any, b: Any, slot: int, expert: int) -> Any:
        return weight @ x + (b[slot, expert] @ (a[slot, expert] @ x) if slot >= 0 else 0)

    output.zero_()
    for token, x in enumerate(hidden_states):
        slot = slots[token] if token < len(slots) else -1
        for share, expert in zip(topk_weights[token], topk_ids[token].tolist(), strict=True):
            first = zip(w1[expert].chunk(2), lora.w13_lora_a_stacked, lora.w13_lora_b_stacked, strict=True)
            gate, up = (product(weight, x, a, b, slot, expert) for weight, a, b in first)
            last = lora.w2_lora_a_stacked[0], lora.w2_lora_b_stacked[0]
            output[token] += share * product(w2[expert], silu(gate) * up, *last, slot, expert)


def _raw() -> Any:
    """Returns settings that leave the scores as the head gives them."""
    from vllm import PoolingParams

    return PoolingParams(use_activation=False)


def llama_cpp(job: dict[str, Any], sources: Path) -> Answer:
    """Converts an export by llama.cpp's converter, and runs it in float32.

    The converter knows a tokenizer by a checksum, so it is told that it is GPT-2's, by whose rules it was trained.
    """
    import llama_cpp
    import numpy

    sys.path[:0] = [str(sources), str(sources / "gguf-py")]
    import convert_hf_to_gguf
    from conversion import base as converter

    converter.TextModel.get_vocab_base_pre = lambda *_: "gpt-2"
    with tempfile.TemporaryDirectory() as folder:
        made = str(Path(folder) / "model.gguf")
        sys.argv = ["convert", job["folder"], "--outfile", made, "--outtype", "f32"]
        convert_hf_to_gguf.main()
        # Without these types the cache of keys and values is float16.
        types = {"type_k": llama_cpp.GGML_TYPE_F32, "type_v": llama_cpp.GGML_TYPE_F32, "flash_attn": False}
        engine = llama_cpp.Llama(made, n_ctx=256, logits_all=True, verbose=False, **types)
        engine.eval(TOKENS)
        logits = numpy.array(engine.scores[len(TOKENS) - 1]).tolist()
        tokens = engine.tokenize(TEXT.encode(), add_bos=False, special=True)
        template, end = engine.metadata.get("tokenizer.chat_template"), engine.token_eos()
        engine.close()
    base = transformers.AutoTokenizer.from_pretrained(job["base"])
    same = {
        "tokens": tokens == base.encode(TEXT),
        "conversation": template == base.chat_template,
        "end": end == base.eos_token_id,
    }
    return {"logits": logits, "as_base": same}


def sglang(job: dict[str, Any]) -> Answer:
    """Reads an export's configuration, ends and tokenizer by SGLang, which has no engine without a GPU.

    It imports torchvision, for images, which does not load with torch's build for CPUs: an empty one takes its place.
    """
    if not any(isinstance(finder, Empty) for finder in sys.meta_path):
        sys.meta_path.append(Empty())
    from sglang.srt.utils.hf_transformers_utils import get_config, get_generation_config, get_tokenizer

    found = [_read_by(get_config, get_generation_config, get_tokenizer, job[name]) for name in ("folder", "base")]
    return {"logits": None, "as_base": {key: found[0][key] == found[1][key] for key in found[0]}}


class Empty:
    """Finds a torchvision without contents."""

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] == "torchvision" else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name)
        module.__path__ = []
        module.__getattr__ = _mock
        return module

    def exec_module(self, module: ModuleType) -> None:
        return None


def _mock(name: str) -> MagicMock:
    if name.startswith("__"):
        raise AttributeError(name)
    return MagicMock(name=name)


def _read_by(config: Any, generation: Any, tokenizer: Any, folder: str) -> dict[str, Any]:
    read, ends = config(folder, trust_remote_code=False), generation(folder, trust_remote_code=False)
    return {
        "configuration": _unchanged(read.to_dict()),
        "ends": getattr(ends, "eos_token_id", None),
        "tokens": tokenizer(folder).encode(TEXT),
    }


def _unchanged(fields: dict[str, Any]) -> dict[str, Any]:
    """Returns what training does not change in a configuration, and in those inside it."""
    changed = ("dtype", "torch_dtype", "_name_or_path", "vocab_size", "architectures", "transformers_version")
    kept = {key: value for key, value in fields.items() if key not in changed}
    return {key: _unchanged(value) if isinstance(value, dict) else value for key, value in kept.items()}

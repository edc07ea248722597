"""What types of transformers that read more than text need to be built small, beside the usual names of fields."""

from __future__ import annotations

from typing import Any

AXES = {"text_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}}}
HALF_AXES = {
    "text_config": {"rope_parameters": {**AXES["text_config"]["rope_parameters"], "partial_rotary_factor": 1.0}}
}
IMAGE_CODES = {"base_channels": 32, "channel_multiplier": [1, 1], "latent_channels": 8, "num_res_blocks": 1}
SPEECH_ENCODER = {"encoder_config": {"hidden_dim": 32, "dim_head": 16, "max_pos_emb": 16, "context_size": 8}}
TINY_TIMM = {"vision_config": {"architecture": "test_byobnet", "model_args": None}}
SOUND_CODES = {"num_filters": 4, "downsampling_ratios": [2, 2], "depths": [1, 1, 1]}

OF_KIND: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_omni_thinker", "paddleocr_vl"), AXES),
    **dict.fromkeys(("glm46v", "glm4v_moe", "glm_ocr", "glmga"), HALF_AXES),
    **dict.fromkeys(("granite_speech", "granite_speech_plus"), SPEECH_ENCODER),
    "chameleon": {
        "vocabulary_map": {"<image>": 5, "IMGIMGAZ": 6, "IMGIMGBZ": 7},
        "vq_config": {**IMAGE_CODES, "num_embeddings": 16, "resolution": 32},
    },
    "cohere_compass": {
        "text_config": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}}
    },
    "deepseek_ocr2": {
        "text_config": {"mlp_layer_types": ["dense", "sparse"], "num_experts_per_tok": 2},
        "vision_config": {
            "sam_config": {
                "output_channels": 32,
                "downsample_channels": [32, 32],
                "mlp_dim": 48,
                "image_size": 64,
                "window_size": 2,
                "global_attn_indexes": [1],
            }
        },
    },
    "diffusion_gemma": {
        "text_config": {
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 16,
            "global_head_dim": 16,
            "sliding_window": 16,
        },
        "canvas_length": 8,
    },
    "dots3_note": {
        "text_config": {
            "swa_num_attention_heads": 2,
            "swa_num_key_value_heads": 2,
            "swa_q_lora_rank": 8,
            "swa_kv_lora_rank": 8,
            "swa_head_dim": 16,
            "swa_qk_nope_head_dim": 8,
            "swa_v_head_dim": 8,
            "index_head_dim": 16,
            "index_n_heads": 2,
            "shared_experts_intermediate_size": 16,
            "sliding_window": 16,
        },
        "vision_config": {"adapter_in_dim": 32, "adapter_out_dim": 32},
        "audio_config": {"adapter_input_size": 32, "adapter_out_dim": 32, "downsample_hidden_size": 16},
    },
    "emu3": {
        "vocabulary_map": {
            "<image>": 5,
            "<|extra_200|>": 6,
            "<|visual token 000000|>": 7,
            "<|visual token 000001|>": 8,
        },
        "vq_config": {**IMAGE_CODES, "codebook_size": 16, "attn_resolutions": [1]},
    },
    "ernie4_5_vl_moe": {
        "text_config": {
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 3, 2]},
            "moe_intermediate_size": [16, 16],
            "moe_k": 2,
        }
    },
    "fast_vlm": TINY_TIMM,
    "florence2": {
        "vision_config": {
            "depths": [1, 1],
            "patch_size": [7, 3],
            "patch_stride": [4, 2],
            "patch_padding": [3, 1],
            "patch_prenorm": [False, True],
            "embed_dim": [16, 32],
            "num_heads": [2, 2],
            "num_groups": [2, 2],
            "drop_path_rate": 0.0,
        }
    },
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": 8}},
    "gemma3n": {
        **TINY_TIMM,
        "text_config": {
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "intermediate_size": [24] * 4,
            "activation_sparsity_pattern": [0.0] * 4,
            "laurel_rank": 4,
        },
    },
    "glm5_next": {
        "text_config": {
            "qk_rope_head_dim": 0,
            "linear_head_dim": 8,
            "linear_num_heads": 2,
            "hc_mult": 2,
            "index_head_dim": 16,
            "index_n_heads": 2,
            "indexer_types": ["full", "full"],
        },
        "vision_config": {"projection_intermediate_size": 48},
    },
    "granite4_vision": {
        "downsample_rate": "1/2",
        "deepstack_layer_map": [[0, 0], [1, 1]],
        "spatial_target_layers": [0, 0, 1, 1],
        "projector_dropout": 0.0,
        "vision_config": {"hidden_size": 64, "image_size": 64, "patch_size": 16},
    },
    "hunyuan_vl": {"text_config": {**AXES["text_config"], "head_dim": 16}},
    "inkling2": {"vision_config": {"text_hidden_size": 32}},
    "janus": {"vq_config": {**IMAGE_CODES, "num_embeddings": 16, "image_token_embed_dim": 32}},
    "kimi_k25": {"text_config": {"head_dim": 8}},
    "kyutai_speech_to_text": {
        "num_codebooks": 2,
        "codec_config": {
            "num_filters": 4,
            "upsampling_ratios": [2, 2],
            "codebook_size": 16,
            "codebook_dim": 8,
            "vector_quantization_hidden_dimension": 8,
            "upsample_groups": 32,
            "num_quantizers": 2,
        },
    },
    "mistral_large4": {"text_config": {"kv_source_layers": [0, 1]}},
    "molmo2": {"adapter_config": {"vision_feature_layer": [0, 1]}},
    "muse_spark": {
        "text_config": {"moe_hidden_size": 16, "layer_rope_theta": [1e4, 0], "sliding_window": 16},
        "audio_config": {"patch_sizes": [2, 2], "hidden_sizes": [32, 32], "depths": [1, 1]},
    },
    "nemo_speechlm": {
        "audio_config": {"diarization_config": {"head_config": {"audio_hidden_size": 32}}},
        "text_config": {
            "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "ssm_state_size": 16,
            "chunk_size": 16,
            "moe_shared_expert_intermediate_size": 32,
        },
    },
    "perception_lm": {
        "vision_config": {
            "architecture": "vit_pe_core_large_patch14_336",
            "model_args": {
                "embed_dim": 32,
                "depth": 2,
                "num_heads": 2,
                "img_size": [28, 28],
                "ref_feat_shape": [2, 2],
                "global_pool": "",
                "use_post_transformer_norm": False,
                "init_values": 0.1,
            },
        }
    },
    "qwen2_5_omni": {
        "thinker_config": AXES,
        "talker_config": {"embedding_size": 32, **AXES["text_config"]},
        "token2wav_config": {
            "bigvgan_config": {
                "mel_dim": 8,
                "upsample_initial_channel": 8,
                "upsample_rates": [2],
                "upsample_kernel_sizes": [4],
            },
            "dit_config": {
                "emb_dim": 32,
                "num_embeds": 17,
                "mel_dim": 8,
                "enc_emb_dim": 8,
                "enc_dim": 8,
                "enc_channels": [8, 8, 8, 8, 24],
                "enc_attention_channels": 8,
                "enc_se_channels": 8,
            },
        },
    },
    "qwen3_omni_moe": {
        "talker_config": {"text_config": {"shared_expert_intermediate_size": 16}, "spatial_merge_size": 2}
    },
    "qwen4_exp": {
        "text_config": {
            "eos_token_id": 0,
            "hc_lowrank": 8,
            "ple_layer_ids": [1],
            "heads_per_ngram": 2,
            "ngram_vocab_size_base": 50,
            "split_ngram_parts": 2,
            "indexer_n_heads": 2,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 16,
            "indexer_budget": 64,
            "indexer_compress_ratio": 4,
        }
    },
    "step3p7": {"text_config": {"sliding_window": 16}},
    "vibevoice_asr": {
        "acoustic_tokenizer_encoder_config": SOUND_CODES,
        "semantic_tokenizer_encoder_config": SOUND_CODES,
    },
}
"""Fields by type, beside `tiny_multimodal.FAMILIES`."""

"""Every model class of KerasHub at toy size, and inputs for it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras_hub import layers, models

VOCABULARY, TIME, SIZE = 13, 6, 32

# Argument of a constructor → its toy value, in every class that has such an argument.
COMMON: dict[str, Any] = {
    "vocabulary_size": VOCABULARY,
    "vocab_size": VOCABULARY,
    "max_sequence_length": 16,
    "max_encoder_sequence_length": 16,
    "max_decoder_sequence_length": 16,
    "num_layers": 2,
    "num_layers_enc": 2,
    "num_layers_dec": 2,
    "encoder_num_layers": 2,
    "decoder_num_layers": 2,
    "num_heads": 2,
    "num_attention_heads": 2,
    "num_query_heads": 4,
    "num_key_value_heads": 2,
    "encoder_num_heads": 2,
    "decoder_num_heads": 2,
    "head_dim": 4,
    "hidden_dim": 8,
    "embedding_dim": 6,
    "intermediate_dim": 10,
    "moe_intermediate_dim": 10,
    "shared_expert_intermediate_dim": 12,
    "shared_expert_intermediate_size": 12,
    "mlp_dim": 10,
    "num_experts": 3,
    "top_k": 2,
    "patch_size": 8,
    "image_shape": (SIZE, SIZE, 3),
    "num_classes": 3,
}


def make(kind: type, **settings: Any) -> Any:
    """Return an instance with these settings, and with the values of `COMMON` that it takes."""
    accepted: dict[str, inspect.Parameter] = {}
    for base in reversed(kind.__mro__):
        if "__init__" in vars(base) and base.__module__.startswith("keras_hub"):
            accepted = dict(inspect.signature(vars(base)["__init__"]).parameters)
    values = {name: value for name, value in COMMON.items() if name in accepted}
    return kind(**{**values, **settings})


def resnet(**settings: Any) -> Any:
    """Return a ResNet, which several other models look through."""
    return make(
        models.ResNetBackbone,
        **{
            "input_conv_filters": [64],
            "input_conv_kernel_sizes": [3],
            "stackwise_num_filters": [64, 6, 8],
            "stackwise_num_blocks": [1, 1, 1],
            "stackwise_num_strides": [1, 2, 2],
            "block_type": "basic_block",
            **settings,
        },
    )


def pyramid(filters: list[int]) -> Any:
    """Return a ResNet of four stages for images of any size."""
    return resnet(
        image_shape=(None, None, 3),
        stackwise_num_filters=filters,
        stackwise_num_blocks=[1, 1, 1, 1],
        stackwise_num_strides=[1, 2, 2, 2],
    )


def mit(**settings: Any) -> Any:
    """Return a Mix-Transformer."""
    return make(
        models.MiTBackbone,
        **{
            "hidden_dims": [4, 8],
            "layerwise_depths": [1, 1],
            "layerwise_num_heads": [1, 2],
            "layerwise_sr_ratios": [2, 1],
            "layerwise_patch_sizes": [7, 3],
            "layerwise_strides": [4, 2],
            "max_drop_path_rate": 0.0,
            **settings,
        },
    )


def hgnet(**settings: Any) -> Any:
    """Return an HGNetV2."""
    return make(
        models.HGNetV2Backbone,
        **{
            "depths": [1, 1],
            "embedding_size": 4,
            "hidden_sizes": [6, 8],
            "stem_channels": [3, 4, 4],
            "hidden_act": "relu",
            "use_learnable_affine_block": True,
            "stackwise_stage_filters": [(4, 4, 6, 1, 2, 3), (6, 4, 8, 1, 2, 3)],
            "apply_downsample": [False, True],
            "use_lightweight_conv_block": [False, True],
            **settings,
        },
    )


def clip_towers(prefix: str) -> dict[str, Any]:
    """Return the towers of CLIP and of the models like it."""
    return {
        "vision_encoder": make(getattr(models, f"{prefix}VisionEncoder")),
        "text_encoder": make(getattr(models, f"{prefix}TextEncoder"), embedding_dim=8),
    }


def t5_gemma() -> dict[str, Any]:
    sides = {
        "hidden_dim": 8,
        "intermediate_dim": 10,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "layer_types": ["sliding_attention", "full_attention"],
    }
    both = {f"{side}_{k}": v for side in ("encoder", "decoder") for k, v in sides.items()}
    return {**both, "sliding_window": 3}


def sam3() -> dict[str, Any]:
    deep = {"num_layers": 1, "hidden_dim": 8, "intermediate_dim": 10, "num_heads": 2}
    shape = (56, 56, 3)
    return {
        "vision_encoder": layers.SAM3VisionEncoder(
            image_shape=shape,
            patch_size=14,
            fpn_hidden_dim=8,
            fpn_scale_factors=[4.0, 2.0, 1.0, 0.5],
            pretrain_image_shape=(28, 28, 3),
            window_size=2,
            global_attn_indexes=[1],
            **{**deep, "num_layers": 2},
        ),
        "text_encoder": make(layers.SAM3TextEncoder, embedding_dim=8),
        "geometry_encoder": layers.SAM3GeometryEncoder(roi_size=3, **deep),
        "detr_encoder": layers.SAM3DetrEncoder(**deep),
        "detr_decoder": layers.SAM3DetrDecoder(
            image_shape=shape, patch_size=14, num_queries=5, **deep
        ),
        "mask_decoder": layers.SAM3MaskDecoder(num_upsampling_stages=3, hidden_dim=8, num_heads=2),
    }


def sam() -> dict[str, Any]:
    return {
        "image_encoder": make(models.ViTDetBackbone, **vit_det()),
        "prompt_encoder": layers.SAMPromptEncoder(
            hidden_size=8,
            image_embedding_size=(4, 4),
            input_image_size=(SIZE, SIZE),
            mask_in_channels=4,
        ),
        "mask_decoder": layers.SAMMaskDecoder(
            num_layers=2,
            hidden_size=8,
            intermediate_dim=10,
            num_heads=2,
            embedding_dim=8,
            num_multimask_outputs=3,
            iou_head_depth=3,
            iou_head_hidden_dim=8,
        ),
    }


def vit_det() -> dict[str, Any]:
    return {
        "hidden_size": 8,
        "global_attention_layer_indices": [1],
        "num_output_channels": 8,
        "window_size": 2,
    }


def blip2(language_model: type = models.BLIP2CustomOPT) -> dict[str, Any]:
    common = {"layer_norm_epsilon": 1e-5}
    return {
        "vision_encoder": make(
            models.BLIP2VisionEncoder,
            image_size=SIZE,
            use_patch_bias=True,
            use_class_token=True,
            use_mha_bias=True,
            use_mlp_bias=True,
            dropout_rate=0.0,
            initializer_range=0.02,
            **common,
        ),
        "qformer": make(
            models.BLIP2QFormer,
            num_query_tokens=3,
            vision_dim=8,
            cross_attention_frequency=2,
            dropout=0.0,
            **common,
        ),
        "language_model": make(
            language_model,
            num_query_tokens=3,
            qformer_hidden_dim=8,
            dropout=0.0,
            **common,
        ),
    }


def d_fine() -> dict[str, Any]:
    return {
        "backbone": hgnet(image_shape=(None, None, 3), out_features=["stage1", "stage2"]),
        "decoder_in_channels": [8, 8],
        "encoder_hidden_dim": 8,
        "num_denoising": 0,
        "num_labels": 4,
        "learn_initial_query": False,
        "num_queries": 5,
        "anchor_image_size": (SIZE, SIZE),
        "feat_strides": [4, 8],
        "num_feature_levels": 2,
        "encoder_in_channels": [6, 8],
        "encode_proj_layers": [1],
        "encoder_ffn_dim": 10,
        "num_encoder_layers": 1,
        "hidden_expansion": 0.5,
        "depth_multiplier": 0.5,
        "eval_idx": -1,
        "num_decoder_layers": 2,
        "decoder_attention_heads": 2,
        "decoder_ffn_dim": 10,
        "decoder_n_points": [2, 2],
        "lqe_hidden_dim": 4,
        "num_lqe_layers": 2,
        "out_features": ["stage1", "stage2"],
        "seed": 0,
    }


def gemma3_vision() -> Any:
    return make(models.Gemma3VisionEncoder, image_size=16, patch_size=4, pool_size=2, output_dim=8)


def gemma3() -> dict[str, Any]:
    return {
        "image_size": 16,
        "vision_encoder": gemma3_vision(),
        "use_sliding_window_attention": True,
        "sliding_window_size": 3,
    }


def mobile_net_v5() -> dict[str, Any]:
    return {
        "stackwise_block_types": [["er"], ["uir", "uir"]],
        "stackwise_num_blocks": [1, 2],
        "stackwise_num_filters": [[4], [8, 8]],
        "stackwise_strides": [[2], [2, 1]],
        "stackwise_act_layers": [["relu"], ["relu", "relu"]],
        "stackwise_exp_ratios": [[2.0], [2.0, 2.0]],
        "stackwise_se_ratios": [[0.0], [0.0, 0.0]],
        "stackwise_dw_kernel_sizes": [[0], [5, 5]],
        "stackwise_dw_start_kernel_sizes": [[0], [0, 0]],
        "stackwise_dw_end_kernel_sizes": [[0], [0, 0]],
        "stackwise_exp_kernel_sizes": [[3], [0, 0]],
        "stackwise_pw_kernel_sizes": [[1], [0, 0]],
        "stackwise_num_heads": [[0], [0, 0]],
        "stackwise_key_dims": [[0], [0, 0]],
        "stackwise_value_dims": [[0], [0, 0]],
        "stackwise_kv_strides": [[0], [0, 0]],
        "stackwise_use_cpe": [[False], [False, False]],
        "use_msfa": False,
    }


def qwen3_5() -> dict[str, Any]:
    return {
        "layer_types": ["linear_attention", "full_attention"],
        "partial_rotary_factor": 0.5,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 4,
        "linear_value_head_dim": 4,
    }


# Class → what its constructor takes beside `COMMON`.
SETTINGS: dict[str, Callable[[], dict[str, Any]]] = {
    "CLIPTextEncoder": lambda: {"embedding_dim": 8},
    "GPTNeoXBackbone": lambda: {"rotary_percentage": 0.5},
    "MetaCLIP2TextEncoder": lambda: {"embedding_dim": 8},
    "SigLIPTextEncoder": lambda: {"embedding_dim": 8},
    "BASNetBackbone": lambda: {
        "image_encoder": pyramid([64, 4, 4, 4]),
        "projection_filters": 64,
        "num_classes": 1,
    },
    "BLIP2Backbone": blip2,
    "CLIPBackbone": lambda: {**clip_towers("CLIP"), "projection_dim": 6},
    "CSPNetBackbone": lambda: {
        "stem_filters": 4,
        "stem_kernel_size": 3,
        "stem_strides": 1,
        "stackwise_depth": [1, 2],
        "stackwise_strides": [1, 2],
        "stackwise_num_filters": [4, 8],
        "block_type": "dark_block",
        "stage_type": "dark",
    },
    "DFineBackbone": d_fine,
    "DINOV2Backbone": lambda: {"position_embedding_shape": (16, 16, 3)},
    "DeepLabV3Backbone": lambda: {
        "image_encoder": resnet(),
        "low_level_feature_key": "P2",
        "spatial_pyramid_pooling_key": "P4",
        "upsampling_size": 4,
        "dilation_rates": [2, 3],
        "projection_filters": 4,
    },
    "DenseNetBackbone": lambda: {"stackwise_num_repeats": [1, 2], "growth_rate": 4},
    "DepthAnythingBackbone": lambda: {
        "image_encoder": make(
            models.DINOV2Backbone, num_layers=4, patch_size=4, position_embedding_shape=(16, 16, 3)
        ),
        "reassemble_factors": [4, 2, 1, 0.5],
        "neck_hidden_dims": [4, 4, 4, 4],
        "fusion_hidden_dim": 4,
        "head_hidden_dim": 4,
        "head_in_index": -1,
        "feature_keys": ["stage1", "stage2", "stage3", "stage4"],
    },
    "EfficientNetBackbone": lambda: {
        "input_shape": (SIZE, SIZE, 3),
        "stackwise_width_coefficients": [1.0, 1.0],
        "stackwise_depth_coefficients": [1.0, 1.0],
        "stackwise_kernel_sizes": [3, 3],
        "stackwise_num_repeats": [1, 2],
        "stackwise_input_filters": [8, 8],
        "stackwise_output_filters": [8, 16],
        "stackwise_expansion_ratios": [1, 2],
        "stackwise_squeeze_and_excite_ratios": [0.0, 0.25],
        "stackwise_strides": [1, 2],
        "stackwise_block_types": ["fused", "unfused"],
        "stackwise_force_input_filters": [0, 0],
        "stackwise_nores_option": [False, False],
        "num_features": 8,
    },
    "FluxBackbone": lambda: {
        "input_channels": 4,
        "hidden_size": 12,
        "mlp_ratio": 2.0,
        "depth": 1,
        "depth_single_blocks": 1,
        "axes_dim": [2, 2, 2],
        "theta": 100,
        "use_bias": True,
        "guidance_embed": True,
        "image_shape": (TIME, 4),
        "text_shape": (4, 4),
        "image_ids_shape": (TIME, 3),
        "text_ids_shape": (4, 3),
        "y_shape": (8,),
    },
    "Gemma3Backbone": gemma3,
    "Gemma3nBackbone": lambda: {
        "text_vocab_size": VOCABULARY,
        "text_hidden_size": 8,
        "num_hidden_layers": 2,
        "pad_token_id": 0,
        "num_attention_heads": 4,
        "intermediate_size": [10, 10],
        "hidden_activation": "gelu_approximate",
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 3,
        "rope_theta": 10000.0,
        "max_position_embeddings": 16,
        "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size_per_layer_input": 2,
        "altup_num_inputs": 2,
        "laurel_rank": 1,
    },
    "Gemma4Backbone": lambda: {
        "image_size": 16,
        "sliding_window_size": 3,
        "sliding_window_pattern": 2,
        "hidden_size_per_layer_input": 2,
        "vocab_size_per_layer_input": VOCABULARY,
    },
    "HGNetV2Backbone": lambda: {"made": hgnet},
    "MetaCLIP2Backbone": lambda: {**clip_towers("MetaCLIP2"), "projection_dim": 6},
    "MiTBackbone": lambda: {"made": mit},
    "MobileNetBackbone": lambda: {
        "stackwise_expansion": [[8], [12, 12]],
        "stackwise_num_blocks": [1, 2],
        "stackwise_num_filters": [[8], [8, 8]],
        "stackwise_kernel_size": [[3], [5, 3]],
        "stackwise_num_strides": [[2], [2, 1]],
        "stackwise_se_ratio": [[None], [0.25, 0.25]],
        "stackwise_activation": [["relu"], ["hard_swish", "hard_swish"]],
        "stackwise_padding": [[1], [2, 1]],
        "output_num_filters": 8,
        "input_num_filters": 8,
        "depthwise_filters": 8,
        "depthwise_stride": 2,
        "depthwise_residual": False,
        "last_layer_filter": 8,
        "squeeze_and_excite": 0.5,
    },
    "MobileNetV5Backbone": mobile_net_v5,
    "MoonshineBackbone": lambda: {"filter_dim": 8},
    "PARSeqBackbone": lambda: {
        "image_encoder": make(models.ViTBackbone, use_class_token=False),
        "max_label_length": TIME,
        "decoder_hidden_dim": 8,
        "num_decoder_layers": 1,
        "num_decoder_heads": 2,
        "decoder_mlp_dim": 10,
    },
    "PaliGemmaBackbone": lambda: {
        "image_size": 16,
        "vit_patch_size": 8,
        "vit_num_heads": 2,
        "vit_hidden_dim": 8,
        "vit_num_layers": 1,
        "vit_intermediate_dim": 10,
    },
    "Qwen3_5Backbone": qwen3_5,
    "Qwen3_5MoeBackbone": qwen3_5,
    "RWKV7Backbone": lambda: {
        "hidden_size": 8,
        "head_size": 4,
        "gate_lora": 4,
        "mv_lora": 4,
        "aaa_lora": 4,
        "decay_lora": 4,
    },
    "ResNetBackbone": lambda: {"made": resnet},
    "RetinaNetBackbone": lambda: {
        "image_encoder": pyramid([64, 4, 6, 8]),
        "min_level": 3,
        "max_level": 6,
        "use_p5": False,
    },
    "RoformerV2Backbone": lambda: {"head_size": 4},
    "SAM3PromptableConceptBackbone": sam3,
    "SAMBackbone": sam,
    "SegFormerBackbone": lambda: {"image_encoder": mit(), "projection_filters": 4},
    "SigLIPBackbone": lambda: clip_towers("SigLIP"),
    "SmolLM3Backbone": lambda: {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rope_layer_enabled_list": [True, False],
        "layer_types": ["attention", "attention"],
        "mlp_bias": False,
        "layer_norm_epsilon": 1e-5,
        "max_position_embeddings": 16,
        "rope_theta": 10000.0,
        "partial_rotary_factor": 1.0,
        "num_key_value_heads": 1,
    },
    "SwinTransformerBackbone": lambda: {
        "embed_dim": 8,
        "depths": (2, 1),
        "num_heads": (2, 2),
        "window_size": 2,
        "patch_size": 4,
        "drop_path": 0.0,
    },
    "T5Gemma2Backbone": t5_gemma,
    "T5GemmaBackbone": t5_gemma,
    "VGGBackbone": lambda: {"stackwise_num_repeats": [1, 1], "stackwise_num_filters": [4, 8]},
    "ViTDetBackbone": vit_det,
    "VideoPrismBackbone": lambda: {
        "num_frames": 2,
        "num_spatial_layers": 1,
        "num_temporal_layers": 1,
        "num_auxiliary_layers": 1,
        "num_text_layers": 1,
    },
    "WhisperBackbone": lambda: {"num_mels": 5},
    "XceptionBackbone": lambda: {
        "stackwise_conv_filters": [[4, 4], [6, 6]],
        "stackwise_pooling": [True, False],
    },
    "BLIP2Seq2SeqLM": lambda: {"backbone": models.BLIP2Backbone(**blip2(models.BLIP2FlanT5))},
    "DepthAnythingDepthEstimator": lambda: {"depth_estimation_type": "relative"},
    "DFineObjectDetector": lambda: {"num_classes": 4},
    "MobileNetImageClassifier": lambda: {"num_features": 8},
    "MobileNetV5ImageClassifier": lambda: {"head_hidden_size": 8},
    "VGGImageClassifier": lambda: {"pooling_hidden_dim": 8},
}

# Backbones that compute in float32, whatever the policy.
SINGLE = {
    "DINOV3Backbone",
    "FluxBackbone",
    "Gemma3nBackbone",
    "Gemma4Backbone",
    "GptOssBackbone",
    "Llama3Backbone",
    "LlamaBackbone",
    "MistralBackbone",
    "MixtralBackbone",
    "Phi3Backbone",
    "Qwen3Backbone",
    "Qwen3MoeBackbone",
    "Qwen3_5Backbone",
    "Qwen3_5MoeBackbone",
    "QwenBackbone",
    "QwenMoeBackbone",
    "RWKV7Backbone",
    "RoformerV2Backbone",
    "SAM3PromptableConceptBackbone",
    "SmolLM3Backbone",
    "T5Gemma2Backbone",
    "T5GemmaBackbone",
}
# Backbone → examples of each micro-batch; (3, 2) of the others.
SIZES: dict[str, tuple[int, ...]] = {
    # Their outputs compare examples.
    "CLIPBackbone": (5,),
    "MetaCLIP2Backbone": (5,),
    "SigLIPBackbone": (5,),
    "SAM3PromptableConceptBackbone": (1, 1),  # Keras runs it for one example only
    "SAMBackbone": (5,),  # returns a table of positions too, which is the same for all examples
}
# Model → why it is no pipeline.
NOT_CONVERTED: dict[str, str] = {
    "Gemma4AssistantCausalLM": "its call is refused by KerasHub: a target model guides it",
    **dict.fromkeys(
        (
            "StableDiffusion3Backbone",
            "StableDiffusion3ImageToImage",
            "StableDiffusion3Inpaint",
            "StableDiffusion3TextToImage",
        ),
        "its scheduler keeps the noise levels of its first call, for an eager number of steps",
    ),
}


def names() -> list[str]:
    """Return the names of all models that KerasHub exports: backbones, and tasks on them."""
    abstract = (models.Backbone, models.FeaturePyramidBackbone)
    kinds: set[Any] = {kind for kind in vars(models).values() if inspect.isclass(kind)}
    return sorted(
        kind.__name__
        for kind in kinds
        if (issubclass(kind, models.Backbone) and kind not in abstract)
        or (issubclass(kind, models.Task) and kind.backbone_cls is not None)
    )


def backbone_of(name: str) -> str:
    """Return the name of a model's backbone; of a backbone, its own."""
    kind = getattr(models, name)
    return name if issubclass(kind, models.Backbone) else str(kind.backbone_cls.__name__)


def model(name: str) -> Any:
    """Return the toy of a model."""
    settings = SETTINGS.get(name, dict)()
    if "made" in settings:
        return settings["made"]()
    kind = getattr(models, name)
    if issubclass(kind, models.Task):
        settings |= {"preprocessor": None, "compile": False}
        if "backbone" not in settings:
            settings["backbone"] = model(backbone_of(name))
    return make(kind, **settings)


# Backbone → input → its shape without the examples, where a size is neither `TIME` nor `SIZE`.
SHAPES: dict[str, dict[str, tuple[int, ...]]] = {
    "Gemma3Backbone": {"images": (1, 16, 16, 3), "vision_indices": (4,)},
    "MoonshineBackbone": {"encoder_input_values": (1600, 1), "encoder_padding_mask": (1600,)},
    "SigLIPBackbone": {"token_ids": (16,)},
    "SigLIPTextEncoder": {"token_ids": (16,)},
    "SAMBackbone": {"boxes": (1, 2, 2), "labels": (3,), "points": (3, 2), "masks": (1, 16, 16, 1)},
}


def inputs(model: keras.Model, rows: int) -> list[Any]:
    """Return an array for each input of a model: ids, masks with a ragged end, numbers."""
    random = np.random.default_rng(0)
    kind = type(getattr(model, "backbone", None) or model).__name__
    arrays = []
    for tensor in model.inputs:
        unknown = SIZE if len(tensor.shape) == 4 else TIME
        shape = (rows, *(size or unknown for size in tensor.shape[1:]))
        if tensor.name in SHAPES.get(kind, {}):
            shape = (rows, *SHAPES[kind][tensor.name])
        if "mask" in tensor.name and len(shape) == 2:
            lengths = random.integers(shape[1] // 2, shape[1] + 1, (rows, 1))
            array: np.ndarray[Any, Any] = np.arange(shape[1]) < lengths
        elif tensor.dtype == "bool":
            array = np.ones(shape)
        elif tensor.name == "boxes":
            array = random.uniform(0.2, 0.8, shape)
        elif not tensor.dtype.startswith("int"):
            array = random.normal(size=shape).astype("float32")  # some inputs are cast to it
        elif "position" in tensor.name or "indices" in tensor.name:
            array = np.broadcast_to(np.arange(shape[1]), shape)
        elif "segment" in tensor.name or "label" in tensor.name:
            array = random.integers(0, 2, shape)
        else:
            array = random.integers(1, VOCABULARY, shape)
        arrays.append(array.astype(tensor.dtype))
    return arrays

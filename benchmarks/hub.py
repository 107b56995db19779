"""Small models of keras-hub with random weights, so nothing is downloaded.

Each is a task model of keras-hub. Whisper has no task model there, so it gets a dense head.
"""

import functools
from collections.abc import Callable
from typing import Any

import keras
import keras_hub
import numpy as np

from benchmarks.architectures import CLASSES, Architecture

BATCH, LENGTH, VOCABULARY, SIDE = 8, 64, 4096, 64
TEXT = {"vocabulary_size": VOCABULARY, "num_layers": 2, "hidden_dim": 256, "intermediate_dim": 1024}
GROUPED = TEXT | {"num_query_heads": 4, "num_key_value_heads": 2}


def texts(rng: np.random.Generator, prefix: str = "") -> dict[str, np.ndarray]:
    """Returns tokens and their padding masks; the texts have different lengths."""
    shape = BATCH, LENGTH
    lengths = rng.integers(LENGTH // 2, LENGTH + 1, (BATCH, 1))
    return {
        f"{prefix}token_ids": rng.integers(VOCABULARY, size=shape).astype(np.int32),
        f"{prefix}padding_mask": (np.arange(LENGTH) < lengths).astype(np.int32),
    }


def segments(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Returns tokens of two segments, with masks."""
    parts = np.broadcast_to(np.arange(LENGTH) >= LENGTH // 2, (BATCH, LENGTH))
    return texts(rng) | {"segment_ids": parts.astype(np.int32)}


def bare(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Returns tokens of two segments, without masks."""
    return {key: x for key, x in segments(rng).items() if key != "padding_mask"}


def pairs(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Returns the inputs of an encoder and a decoder, as for translation."""
    return texts(rng, "encoder_") | texts(rng, "decoder_")


def speech(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Returns spectra, and the tokens of the transcripts."""
    spectra = rng.standard_normal((BATCH, 2 * LENGTH, 80), np.float32)
    return texts(rng, "decoder_") | {"encoder_features": spectra}


def images(rng: np.random.Generator) -> np.ndarray:
    """Returns random images."""
    return rng.uniform(0, 1, (BATCH, SIDE, SIDE, 3)).astype(np.float32)


def task(
    name: str, kind: str, example: Callable[[np.random.Generator], Any], **options: Any
) -> Architecture:
    """Returns the task model `name` + `kind` with a new backbone, `name` + "Backbone"."""

    def build() -> keras.Model:
        models = keras_hub.models
        backbone = getattr(models, f"{name}Backbone")(**options)
        head = {} if kind.endswith("LM") else {"num_classes": CLASSES}
        model: keras.Model = getattr(models, name + kind)(backbone=backbone, **head)
        return model

    return Architecture(build, example)


def whisper() -> keras.Model:
    """Returns Whisper with a dense layer that maps its outputs to tokens."""
    backbone = keras_hub.models.WhisperBackbone(
        **TEXT, num_heads=4, max_encoder_sequence_length=2 * LENGTH
    )
    outputs = backbone.output["decoder_sequence_output"]
    return keras.Model(backbone.input, keras.layers.Dense(VOCABULARY)(outputs))


_classifier = functools.partial(task, kind="TextClassifier", num_heads=4, **TEXT)
_writer = functools.partial(task, kind="CausalLM", example=texts)
_image = functools.partial(task, kind="ImageClassifier", example=images)
_SQUARE = {"image_shape": (SIDE, SIDE, 3)}

HUB = {
    "BERT": _classifier("Bert", example=segments),
    "DistilBERT": _classifier("DistilBert", example=texts),
    "RoBERTa": _classifier("Roberta", example=texts),
    "ALBERT": _classifier("Albert", example=segments, embedding_dim=64),
    "DeBERTaV3": _classifier("DebertaV3", example=texts),
    "FNet": task("FNet", "TextClassifier", bare, **TEXT),
    "GPT2": _writer("GPT2", num_heads=4, **TEXT),
    "OPT": _writer("OPT", num_heads=4, **TEXT),
    "BLOOM": _writer("Bloom", num_heads=4, **TEXT),
    "Gemma": _writer("Gemma", head_dim=64, **GROUPED),
    "Llama": _writer("Llama", **GROUPED),
    "Mixtral": _writer("Mixtral", num_experts=4, **GROUPED),
    "T5": task("T5", "Seq2SeqLM", pairs, num_heads=4, **TEXT),
    "BART": task("Bart", "Seq2SeqLM", pairs, num_heads=4, **TEXT),
    "Whisper": Architecture(whisper, speech),
    "ViT": _image(
        "ViT", patch_size=8, num_layers=4, num_heads=3, hidden_dim=192, mlp_dim=768, **_SQUARE
    ),
    "Swin": _image(
        "SwinTransformer", embed_dim=48, depths=(2, 2), num_heads=(3, 6), window_size=4, **_SQUARE
    ),
    "MiT": _image(
        "MiT",
        layerwise_depths=[2, 2],
        num_layers=2,
        layerwise_num_heads=[1, 2],
        layerwise_sr_ratios=[8, 4],
        max_drop_path_rate=0.1,
        layerwise_patch_sizes=[7, 3],
        layerwise_strides=[4, 2],
        hidden_dims=[32, 64],
        **_SQUARE,
    ),
    "ResNet": _image(
        "ResNet",
        input_conv_filters=[64],
        input_conv_kernel_sizes=[7],
        stackwise_num_filters=[64, 128, 256],
        stackwise_num_blocks=[2, 2, 2],
        stackwise_num_strides=[1, 2, 2],
        block_type="basic_block",
        **_SQUARE,
    ),
    "DenseNet": _image("DenseNet", stackwise_num_repeats=[4, 4, 4], **_SQUARE),
    "EfficientNet": _image(
        "EfficientNet",
        stackwise_kernel_sizes=[3, 3, 5, 3],
        stackwise_num_repeats=[1, 2, 2, 2],
        stackwise_input_filters=[32, 16, 24, 40],
        stackwise_output_filters=[16, 24, 40, 80],
        stackwise_expansion_ratios=[1, 6, 6, 6],
        stackwise_squeeze_and_excite_ratios=[0.25] * 4,
        stackwise_strides=[1, 2, 2, 2],
        stackwise_block_types=["v1"] * 4,
        stackwise_width_coefficients=[1.0] * 4,
        stackwise_depth_coefficients=[1.0] * 4,
        stackwise_force_input_filters=[0] * 4,
        stackwise_nores_option=[False] * 4,
        input_shape=(SIDE, SIDE, 3),
    ),
    "MobileNet": _image(
        "MobileNet",
        stackwise_expansion=[[16], [72, 88], [96, 240]],
        stackwise_num_blocks=[1, 2, 2],
        stackwise_num_filters=[[16], [24, 24], [40, 40]],
        stackwise_kernel_size=[[3], [3, 3], [5, 5]],
        stackwise_num_strides=[[2], [2, 1], [2, 1]],
        stackwise_se_ratio=[[0.25], [None, None], [0.25, 0.25]],
        stackwise_activation=[["relu"], ["relu", "relu"], ["hard_swish", "hard_swish"]],
        stackwise_padding=[[1], [1, 1], [2, 2]],
        output_num_filters=1024,
        depthwise_filters=16,
        depthwise_stride=2,
        depthwise_residual=False,
        last_layer_filter=288,
        squeeze_and_excite=0.5,
        **_SQUARE,
    ),
}

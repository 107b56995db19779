"""Tiny tasks of keras_hub with random weights and vocabularies made by hand."""

import bridge  # isort: skip  # before keras: it chooses the backend

from typing import Any

import numpy as np
import pytest

hub: Any = pytest.importorskip("keras_hub")
del bridge

RNG = np.random.default_rng(0)
WORDS = ["the", "quick", "brown", "fox", "jumped", "over", "a", "lazy", "dog", "and", "sat"]
TEXTS = [" ".join(RNG.choice(WORDS, RNG.integers(2, 7))) for _ in range(44)]
LABELS = RNG.integers(0, 2, len(TEXTS)).astype(np.int32)
WEIGHTS = RNG.uniform(0.5, 2, len(TEXTS)).astype(np.float32)
IMAGES = RNG.integers(0, 255, (len(TEXTS), 10, 12, 3)).astype(np.uint8)
LETTERS = ["Ġ", *"abcdefghijklmnopqrstuvwxyz"]  # Ġ stands for a space
MERGES = ["t h", "th e"]
SIZES = {"num_layers": 1, "hidden_dim": 8, "intermediate_dim": 16}


def text_classifier() -> Any:
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    backbone = hub.models.BertBackbone(
        **SIZES, vocabulary_size=len(vocabulary), num_heads=2, max_sequence_length=8
    )
    tokenizer = hub.tokenizers.BertTokenizer(vocabulary=vocabulary)
    preprocessor = hub.models.BertTextClassifierPreprocessor(tokenizer, sequence_length=8)
    return hub.models.BertTextClassifier(backbone, 2, preprocessor=preprocessor)


def gpt2(length: int = 12) -> Any:
    # `generate` stops at the number of the last piece, and 0 fills up texts.
    pieces = ["!", *LETTERS, "th", "the", "<|endoftext|>"]
    codes = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = hub.tokenizers.GPT2Tokenizer(vocabulary=codes, merges=MERGES)
    backbone = hub.models.GPT2Backbone(
        **SIZES, vocabulary_size=len(codes), num_heads=2, max_sequence_length=length
    )
    preprocessor = hub.models.GPT2CausalLMPreprocessor(tokenizer, sequence_length=length)
    return hub.models.GPT2CausalLM(backbone, preprocessor=preprocessor)


def image_classifier() -> Any:
    backbone = hub.models.ViTBackbone(
        image_shape=(8, 8, 3), patch_size=4, num_layers=1, num_heads=2, hidden_dim=8, mlp_dim=16
    )
    converter = hub.layers.ViTImageConverter(image_size=(8, 8), scale=1 / 255)
    preprocessor = hub.models.ViTImageClassifierPreprocessor(converter)
    return hub.models.ViTImageClassifier(backbone, 2, preprocessor=preprocessor)

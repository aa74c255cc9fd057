"""Makers of tiny random text encoders and cross-encoders, saved as the folders that transformers reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import CONFIG_MAPPING, AutoModel, AutoModelForSequenceClassification, PreTrainedTokenizerFast

WIDTH = 12
POSITIONS = 37
VOCAB = 307

_BERT = {
    "hidden_size": WIDTH,
    "intermediate_size": 23,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "max_position_embeddings": POSITIONS,
    "type_vocab_size": 2,
    "hidden_dropout_prob": 0.3,
    "attention_probs_dropout_prob": 0.3,
}
_T5 = {"d_model": WIDTH, "d_kv": 4, "d_ff": 23, "num_layers": 2, "num_heads": 3}
_GPT = {"n_embd": WIDTH, "n_layer": 2, "n_head": 3, "n_positions": POSITIONS}
_SETTINGS = {"bert": _BERT, "roberta": _BERT | {"max_position_embeddings": POSITIONS + 3}, "t5": _T5, "gpt2": _GPT}


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE that spells any text, with ends around one text and between two."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=["<s>", "</s>", "<pad>"], initial_alphabet=alphabet, show_progress=False
    )
    raw.train_from_iterator(["the bluebell flowers in the woods in spring"] * 7, trainer)
    raw.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B:1 </s>:1", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>", pad_token="<pad>")


def save_encoder(folder: Path, family: str = "bert", *, labels: int | None = None) -> Path:
    """A tiny model and its tokenizer in `folder`; with `labels` a classifier of (pairs of) texts."""
    options: dict[str, Any] = {"vocab_size": VOCAB, "pad_token_id": 2, **_SETTINGS[family]}
    if labels is not None:
        options["num_labels"] = labels
    config = CONFIG_MAPPING[family](**options)
    model = (AutoModel if labels is None else AutoModelForSequenceClassification).from_config(config)
    # Freshly made models are so near to nothing that all texts look alike.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(9)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder

"""Whisper as the frozen recogniser: states of its encoder for short clips, and its decoder over the words of a list."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration, WhisperTokenizerFast
from transformers.modeling_outputs import BaseModelOutput

import mmattn
from mmattn import models

from .data import END, VOCABULARY
from .settings import Config
from .voices import WORDS

#: Tokens before each text; START stands for the last of them.
PROMPT = ("<|startoftranscript|>", "<|en|>", "<|transcribe|>", "<|notimestamps|>")
SCALE = 8  # of a word's chance, in a slot whose other values have a deviation of 1


class WhisperRecogniser(nn.Module):
    """Frozen Whisper that writes words of `WORDS`, one token each; its "energies" are encoder states."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        assert config.whisper is not None
        folder, seconds = models.resolve(config.whisper.name), config.whisper.window
        self.model: Any = WhisperForConditionalGeneration.from_pretrained(folder).requires_grad_(False).eval()
        tokenizer, encoder = WhisperTokenizerFast.from_pretrained(folder), self.model.get_encoder()
        words = [*(f"Ġ{word}" for word in WORDS), "<|endoftext|>"]
        self.tokens = nn.Buffer(torch.tensor(tokenizer.convert_tokens_to_ids([*words, PROMPT[-1]])))
        self.prompt = nn.Buffer(torch.tensor(tokenizer.convert_tokens_to_ids(list(PROMPT[:-1]))))
        listed = set(self.tokens[:-1].tolist())
        self.others = [token for token in range(self.model.config.vocab_size) if token not in listed]
        # Whisper fills each sound up to 30 s; shorter, it takes a tenth of the time.
        self.extractor = WhisperFeatureExtractor.from_pretrained(folder, chunk_length=seconds)
        count = self.extractor.nb_max_frames // 2
        encoder.embed_positions = nn.Embedding.from_pretrained(encoder.embed_positions.weight[:count])
        encoder.config.max_source_positions = encoder.max_source_positions = count
        self.most = config.voices.most
        self.dim = VOCABULARY + self.most + 1 + self.model.config.d_model

    @torch.no_grad()
    def listen(self, sounds: list[Tensor]) -> Tensor:
        """Return the states (b, 50 a second, width) of sounds."""
        waves = [sound.numpy() for sound in sounds]
        inputs = self.extractor(waves, sampling_rate=self.extractor.sampling_rate, return_tensors="pt")
        states: Tensor = self.model.get_encoder()(inputs.input_features.to(self.tokens.device)).last_hidden_state
        return states

    def hear(self, states: Tensor, sensor: mmattn.Memory | None) -> dict[str, Any]:
        """Return the arguments of Whisper for encoded sounds, and for a sensor."""
        heard = {"encoder_outputs": BaseModelOutput(states)}
        return heard if sensor is None else {**heard, "memory": {"sensor": sensor}}

    def logits(self, ids: Tensor, states: Tensor, sensor: mmattn.Memory | None = None) -> Tensor:
        """Return the logits (b, l, words and end) of the words that follow `ids` (b, l)."""
        written = torch.cat([self.prompt.expand(len(ids), -1), self.tokens[ids]], 1)
        logits: Tensor = self.model(decoder_input_ids=written, **self.hear(states, sensor)).logits
        return logits[:, len(self.prompt) :, self.tokens[: END + 1]]

    @torch.no_grad()
    def transcribe(self, states: Tensor, longest: int, sensor: mmattn.Memory | None = None) -> list[list[int]]:
        """Return the words of each row, greedily."""
        output = self.model.generate(
            **self.hear(states, sensor), language="en", max_new_tokens=longest, do_sample=False,
            return_timestamps=False, suppress_tokens=self.others,
        )  # fmt: skip
        place = {token: word for word, token in enumerate(self.tokens[:END].tolist())}
        return [[place[token] for token in row if token in place] for row in output.tolist()]

    @torch.no_grad()
    def sense(self, words: Tensor, states: Tensor, least: float = -1.0) -> mmattn.Memory:
        """Return a memory (b, 25 a second, dim): the sensed word, its number in turn, and Whisper's state."""
        likeliest = words.argmax(-1)
        begins = (likeliest != F.pad(likeliest, (1, -1), value=VOCABULARY)) & (likeliest < END)
        order = F.one_hot(begins.cumsum(1).clamp(max=self.most), self.most + 1)
        heard = F.avg_pool1d(states.transpose(1, 2), 2).transpose(1, 2)[:, : words.shape[1]]
        tokens = [SCALE * words.softmax(-1), SCALE * order, F.layer_norm(heard, heard.shape[-1:])]
        return mmattn.Memory(torch.cat(tokens, -1), check_finite=False)

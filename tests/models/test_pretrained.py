"""The real models with a short name, where `mmattn models NAME` has fetched them or their packages are installed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import mmattn
from mmattn import models, pipelines
from mmattn.encoders import AudioEncoder, TextEncoder, load_audio, load_image_encoder, load_text_encoder
from mmattn.models.cache import installed
from tests.cli.running import call

NOTES = {
    "bees.md": "Sand bees nest in sunny banks of sand. They fly from March to May and collect the pollen of willows.",
    "lighthouse.txt": "The lighthouse on Skerry Point was built in 1874. Its lamp can be seen from 18 miles away.",
    "backup.txt": "The backup runs every night at 2:30. It keeps the files of the last 14 days on the server Atlas.",
}
QUESTIONS = (
    ("When was the lighthouse on Skerry Point built?", "1874", "lighthouse.txt"),
    ("On which server does the backup keep the files?", "Atlas", "backup.txt"),
)


def need(name: str) -> Path:
    """Return the folder of a model; skip the test where it is neither in the cache nor installed."""
    entry = models.CATALOGUE[name]
    cached = (models.cache_folder() / f"{name}-{entry.version}").is_dir()
    if not cached and not all(installed(package) for package in entry.packages):
        pytest.skip(f"{name} is not in the cache: mmattn models {name}")
    return models.fetch(name)


def need_espeak() -> str:
    """Return the path of espeak-ng; skip the test where it is not installed."""
    program = shutil.which("espeak-ng")
    if program is None:
        pytest.skip("espeak-ng is not installed")
    return program


@pytest.fixture(scope="module")
def smollm2() -> tuple[Any, Any]:
    need("smollm2")
    return pipelines.load_language_model("smollm2", "cpu")


#: Tokens that llama.cpp makes of texts from the same GGUF file.
LLAMA_CPP = {
    "In 1994, 12345 apples cost $67.89.": "788 216 33 41 41 36 28 216 33 34 35 36 37 13855 1708 1885 38 39 30 40 41 30",
    "  two  spaces\n\n\ttab": "216 827 216 5600 1116 197 15999",
    "naïve café Größe 東京 привет 😀🎉": "3546 46494 37366 9171 7466 34878 85 17097 247 126 16736 122 21985 46879 "
    "16464 32547 40303 218 10813 232 227",
    "def f(x):\n    return x**2 + 10": "1604 275 24 104 727 472 1003 1792 828 34 1232 216 33 32",
    "\r\n": "2738",
    "e\u0301 combining": "85 151 219 9301",
    "١٢٣ Arabic digits": "164 111 164 112 164 113 12428 18638",
}


class TestSmolLM2:
    def test_it_knows_the_capital_of_france(self, smollm2: Any) -> None:
        lm, tokenizer = smollm2
        prompt = tokenizer("The capital of France is", return_tensors="pt")
        with torch.no_grad():
            logits = lm(**prompt).logits
        assert tokenizer.decode(logits[0, -1].argmax()) == " Paris"
        assert sum(parameter.numel() for parameter in lm.parameters()) == 134_515_008

    def test_digits_are_tokens_of_their_own(self, smollm2: Any) -> None:
        _, tokenizer = smollm2
        assert tokenizer.tokenize("in 1984, x2") == ["in", "Ġ", "1", "9", "8", "4", ",", "Ġx", "2"]
        assert tokenizer.decode(tokenizer("Bäume, 世界 42")["input_ids"]) == "Bäume, 世界 42"
        chat = tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}], tokenize=False)
        assert chat.endswith("<|im_start|>user\nHello<|im_end|>\n") and tokenizer.model_max_length == 8192

    def test_tokens_are_those_of_llama_cpp(self, smollm2: Any) -> None:
        _, tokenizer = smollm2
        tokens = {text: " ".join(map(str, tokenizer(text)["input_ids"])) for text in LLAMA_CPP}
        assert tokens == LLAMA_CPP

    @pytest.mark.slow
    def test_a_pipeline_names_it_by_its_short_name(self, smollm2: Any, tmp_path: Path) -> None:
        lm, tokenizer = smollm2
        need("efficientnet-lite0")
        encoder = load_image_encoder("efficientnet-lite0")
        model = mmattn.attach(lm, mmattn.GatedAdapter(encoder.dim, layers=(24,), num_heads=2, head_dim=16))
        model.save_adapter(tmp_path / "adapter", encoder=encoder.fingerprint)
        pipelines.PipelineConfig(
            task="image-to-text",
            host=pipelines.ModelReference.of("smollm2", tokenizer),
            encoder=pipelines.EncoderReference.of("efficientnet-lite0"),
            prompt="The capital of France is",
            generation={"max_new_tokens": 2},
        ).save(tmp_path / "adapter")
        model.unload()
        assert '"name": "smollm2"' in (tmp_path / "adapter/pipeline_config.json").read_text("utf-8")
        assert "Paris" in mmattn.pipeline(tmp_path / "adapter")(Image.new("RGB", (64, 64), "red"))


@pytest.mark.slow
def test_a_folder_of_notes_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The two commands of README: an index of a folder, and an answer from it with the place where it stands."""
    need("smollm2"), need("minilm")
    for name, text in NOTES.items():
        (tmp_path / "notes").mkdir(exist_ok=True)
        (tmp_path / "notes" / name).write_text(text, encoding="utf-8")
    code, _, err = call(capsys, "index", "build", tmp_path / "notes", "-o", tmp_path / "index")
    assert code == 0, err
    for question, answer, name in QUESTIONS:
        code, out, err = call(capsys, "ask", question, "--index", tmp_path / "index", "--device", "cpu")
        assert code == 0, err
        reply, *sources = out.strip().split("\n")
        assert answer in reply and any(f"%  {name}:0  " in source for source in sources), out


def test_efficientnet_names_a_daisy_and_gives_patches() -> None:
    folder, timm = need("efficientnet-lite0"), pytest.importorskip("timm")
    datasets = pytest.importorskip("sklearn.datasets")
    pictures = [Image.fromarray(datasets.load_sample_image(name)) for name in ("china.jpg", "flower.jpg")]
    encoder = load_image_encoder("timm:efficientnet-lite0:stage=5")
    classifier = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    with torch.no_grad():
        assert classifier(encoder.image_processor(pictures)).argmax(1).tolist() == [698, 985], "palace, daisy"
    small = load_image_encoder("efficientnet-lite0")
    assert (small.grid, small.dim, small.settings["stage"]) == ((7, 7), 112, 4)
    assert load_image_encoder(str(folder)).fingerprint == encoder.fingerprint, "the folder, its last stage"
    assert small(pictures).tokens.shape == (2, 49, 112)


def test_minilm_is_the_default_text_encoder() -> None:
    folder = need("minilm")
    encoder = load_text_encoder("minilm")
    assert (encoder.dim, encoder.max_length) == (384, 256)
    assert encoder.fingerprint == TextEncoder().fingerprint == TextEncoder(folder).fingerprint


#: Voices of espeak-ng 1.51, sentences, and what CTranslate2 writes of them with the weights as they are published, from
#: the same features: float32, greedy, English, without timestamps.
TRANSCRIPTS = (
    ("en-us", "What is the capital of France?", "What is the capital of France?"),
    ("en-us", "The train to the north leaves at nine o'clock.", "The train to the North Leaves at the I-A-Clock."),
    ("en-gb", "Please close the window before you go to bed.", "Please close the window before you go to bed."),
    ("en-us", "Water boils at one hundred degrees.", "Walker Boyle at 100 Vibries"),
    ("en-us", "The quick brown fox jumps over the lazy dog.", "The quick round fox jump over the lazy dog."),
    ("en-gb", "What color is the circle?", "What kind of is the circle?"),
)


@pytest.mark.slow
def test_whisper_writes_what_ctranslate2_writes(tmp_path: Path) -> None:
    from transformers import WhisperForConditionalGeneration, WhisperProcessor

    espeak = need_espeak()
    if " 1.51 " not in subprocess.run([espeak, "--version"], capture_output=True, text=True, check=True).stdout:
        pytest.skip("the transcripts are of espeak-ng 1.51; another version speaks otherwise")
    folder = need("whisper-base")
    model, processor = WhisperForConditionalGeneration.from_pretrained(folder), WhisperProcessor.from_pretrained(folder)
    for voice, text, transcript in TRANSCRIPTS:
        subprocess.run([espeak, "-v", voice, "-s", "140", "-w", tmp_path / "said.wav", text], check=True)
        sound = load_audio(tmp_path / "said.wav", 16000)
        features = processor(sound.numpy(), sampling_rate=16000, return_tensors="pt").input_features
        ids = model.generate(features, language="en", return_timestamps=False)
        assert processor.batch_decode(ids, skip_special_tokens=True) == [f" {transcript}"], text
    memory = AudioEncoder("whisper-base")(sound)
    with torch.no_grad():
        states = model.model.encoder(features).last_hidden_state
    torch.testing.assert_close(memory.tokens, states[:, : memory.length], atol=1e-3, rtol=1e-3)


def test_whisper_has_the_first_merge_of_its_tokens() -> None:
    from transformers import AutoTokenizer

    assert AutoTokenizer.from_pretrained(need("whisper-base")).tokenize(" the two ten") == ["Ġthe", "Ġtwo", "Ġten"]


def test_easy_vqa_has_its_public_split() -> None:
    need("easy-vqa")
    train, test = models.load_easy_vqa("train"), models.load_easy_vqa("test")
    assert (len(train), len(test), len({one.answer for one in train})) == (38_575, 9_673, 13)
    assert test[0][1:] == ("what is the red shape?", "triangle")
    with Image.open(test[0].picture) as picture:
        assert picture.size == (64, 64)
    assert len({one.picture for one in train}) == 4_000 and not {one.picture for one in train} & {
        one.picture for one in test
    }

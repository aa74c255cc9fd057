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
from mmattn.pipelines.loading import pipeline
from mmattn.pipelines.question_answering import Answer
from mmattn.recipes import assets_folder, find_recipe, load_recipe
from mmattn.retrieval.index import Index
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
    """The models of the page: shipped adapters, and one that captions pictures.

    `folder` is empty and receives an index of facts that the shipped adapter was not trained on. Of `questions` the
    index answers all but the last.
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
        answers.index = Index.open(folder / "facts", encoder=answers.encoder)
        self._answers: Any = answers
        self._drawings: Any = pipeline("assets/diffusion/adapter")
        self.questions = [facts[row].question for row in (0, 70, 140, 210, -1)]

    def caption(self, picture: Any) -> tuple[str, Any]:
        """Return the caption of a picture, and a heat map of the attention of each of its words."""
        if picture is None:
            raise ImageError("there is no picture to caption: give one")
        trace = self._captions.trace(load_image(picture))
        with tempfile.TemporaryDirectory() as folder:
            return trace.title, load_image(plot_heat_maps(trace, Path(folder) / "words.png", columns=8))

    def ask(self, question: str) -> Answer:
        """Return the answer to a question from the index."""
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
        """Return a drawing of a digit, conditioned on a sentence and optionally the style of an example."""
        options = {
            "adapter_scale": check_float("adapter_scale", adapter_scale, at_least=0, below=ADAPTER_SCALE + 1e-6),
            "num_inference_steps": check_int("steps", steps, at_most=STEPS),
            "guidance_scale": check_float("guidance_scale", guidance_scale, at_least=1, below=GUIDANCE_SCALE + 1e-6),
            "generator": torch.Generator().manual_seed(check_int("seed", seed, at_least=0, at_most=2**31 - 1)),
        }
        like = None if example is None else load_image(example)
        return self._drawings(_checked("sentence", sentence), like, **options).resize((256, 256))


def page(live: Live) -> Any:
    """Build the page as `gradio.Blocks`, with the routes /caption, /ask and /draw."""
    gradio = import_extra("gradio", "demo")

    def with_errors(function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function with its errors displayed on the page."""

        @functools.wraps(function)
        def call(*args: Any) -> Any:
            try:
                return function(*args)
            except MmattnError as error:
                # gradio displays messages as HTML, and this one may quote the user.
                raise gradio.Error(html.escape(str(error), quote=False), print_exception=False) from error

        return call

    def ask(question: str) -> tuple[str, dict[str, float]]:
        answer = live.ask(question)
        shares = {str(source.text): source.weight for source in answer.sources[:5]}
        shares["nothing here"] = max(0.0, 1 - sum(source.weight for source in answer.sources))
        return f"{answer.text} (nothing in the index answers this)" if answer.refused else answer.text, shares

    def examples(folder: str, chosen: Any) -> None:
        """Add a gallery of asset pictures; a click selects one as the file."""
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
                    caption = gradio.Textbox(label="Caption", lines=3)
            attention = gradio.Image(label="Attention of each word")
            picture.change(with_errors(live.caption), picture, [caption, attention], api_name="caption")
        with gradio.Tab("Ask"):
            with gradio.Row():
                with gradio.Column():
                    question = gradio.Textbox(label="Question", max_length=LONGEST, submit_btn="Ask")
                    gradio.Examples([[one] for one in live.questions], question)
                with gradio.Column():
                    answer = gradio.Textbox(label="Answer")
                    sources = gradio.Label(label="Attention of its first word")
            question.submit(with_errors(ask), question, [answer, sources], api_name="ask")
        with gradio.Tab("Draw"):
            with gradio.Row():
                with gradio.Column():
                    sentence = gradio.Textbox("a thick seven", label="Sentence", max_length=LONGEST, submit_btn="Draw")
                    example = gradio.File(label="In the style of this picture (may be left out)", height=170)
                    examples("digits", example)
                with gradio.Column():
                    drawn = gradio.Image(label="Drawing", height=320)
            with gradio.Accordion("Settings", open=False):
                inputs = [
                    sentence,
                    example,
                    gradio.Slider(0, ADAPTER_SCALE, 1.0, label="Adapter scale: how closely to follow the example"),
                    gradio.Slider(1, STEPS, 20, step=1, label="Steps"),
                    gradio.Slider(1, GUIDANCE_SCALE, 2.0, label="Guidance scale: how closely to follow the sentence"),
                    gradio.Number(0, precision=0, label="Seed"),
                ]
            sentence.submit(with_errors(live.draw), inputs, drawn, api_name="draw")
    return blocks.queue(default_concurrency_limit=4, max_size=64)


def serve(live: Live, host: str = "127.0.0.1", port: int = 7860, share: bool = False, wait: bool = True) -> Any:
    """Serve the page and return its `gradio.Blocks`, with `wait` after Ctrl-C."""
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
    """Load the models and serve the page until Ctrl-C."""
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

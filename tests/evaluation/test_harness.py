"""The model class of lm-evaluation-harness on tasks of local files, beside the same numbers worked out one by one."""

from __future__ import annotations

import copy
import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import mmattn
from mmattn.errors import ConfigError, ShapeError
from tests import tiny
from tests.tiny import assert_close

lm_eval = pytest.importorskip("lm_eval", reason="lm_eval is not installed; it comes with mmattn[eval]")
pytestmark = pytest.mark.filterwarnings("ignore")  # of the harness and what it imports

from lm_eval.tasks import TaskManager  # noqa: E402

from mmattn.evaluation import AdaptedLM  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
FLORA = ROOT / "assets" / "flora"
NO_TASKS = TaskManager(include_defaults=False)  # those of the harness take seconds to list
NAMES = ("daffodil", "foxglove", "snowdrop", "oxeye daisy")


@pytest.fixture(scope="module")
def pipe() -> Any:
    """The captioning adapter that is shipped, with its host and encoder."""
    return mmattn.pipeline("assets/vision/adapter", device="cpu")


@pytest.fixture(scope="module")
def docs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures with a caption, four captions to choose from, and a beginning of unequal length."""
    lines = [json.loads(line) for line in (FLORA / "metadata.jsonl").read_text(encoding="utf-8").splitlines()]
    file = tmp_path_factory.mktemp("docs") / "flora.jsonl"
    with open(file, "w", encoding="utf-8") as opened:
        for number, line in enumerate(lines[:7]):
            others = [lines[(number + step) % len(lines)]["text"] for step in (3, 5, 6)]
            choices = [*others[: number % 4], line["text"], *others[number % 4 :]]
            doc = {
                "image": str(FLORA / line["file_name"]),
                "text": line["text"],
                "begin": " ".join(line["text"].split()[: number % 3]),
                "choices": choices,
                "answer": number % 4,
            }
            opened.write(json.dumps(doc) + "\n")
    return file


def read(docs: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in docs.read_text(encoding="utf-8").splitlines()]


def task(docs: Path, output_type: str, **more: Any) -> dict[str, Any]:
    """A task of the harness over a local file."""
    return {
        "task": "flora",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(docs)}},
        "test_split": "test",
        "output_type": output_type,
        "doc_to_text": "",
        "target_delimiter": "",
        **more,
    }


def choice(docs: Path) -> dict[str, Any]:
    metrics = [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}]
    return task(docs, "multiple_choice", doc_to_choice="choices", doc_to_target="answer", metric_list=metrics)


def rolling(docs: Path) -> dict[str, Any]:
    metrics = [{"metric": "bits_per_byte"}, {"metric": "word_perplexity"}]
    return task(docs, "loglikelihood_rolling", doc_to_target="{{text}}", metric_list=metrics)


def writing(docs: Path, **options: Any) -> dict[str, Any]:
    kwargs = {"until": ["."], "max_gen_toks": 12, "do_sample": False, "temperature": 0.0, **options}
    metrics = [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}]
    given = {"doc_to_text": "{{begin}}", "doc_to_target": "{{text}}"}
    return task(docs, "generate_until", generation_kwargs=kwargs, metric_list=metrics, **given)


def run(model: Any, asked: Mapping[str, Any], **options: Any) -> tuple[dict[str, Any], list[Any]]:
    """The results of a task, and the answers to each document in their order."""
    found = lm_eval.simple_evaluate(
        model=model, tasks=[dict(asked)], task_manager=NO_TASKS, bootstrap_iters=0, **options
    )
    samples = sorted(found["samples"]["flora"], key=lambda sample: sample["doc_id"])
    return found["results"]["flora"], [sample["resps"] for sample in samples]


@torch.no_grad()
def log_p(model: Any, tokenizer: Any, text: str, memory: Any = None, context: str = "") -> float:
    """log p of a text after a context or the begin token, one text at a time, without padding."""
    begin = [] if context else [tokenizer.bos_token_id]
    ids = begin + tokenizer(context + text, add_special_tokens=False)["input_ids"]
    before = len(begin + tokenizer(context, add_special_tokens=False)["input_ids"])
    given = {} if memory is None else {"memory": memory}
    logits = model(torch.tensor([ids]), **given).logits[0].double()
    wanted = torch.tensor(ids[before:])
    rows = torch.arange(before - 1, len(ids) - 1)
    return float(logits.log_softmax(-1)[rows, wanted].sum())


def scores(answers: list[Any]) -> torch.Tensor:
    """Log-likelihoods (documents, choices) of the logged answers."""
    return torch.tensor([[float(one[0][0]) for one in line] for line in answers])


def by_hand(pipe: Any, docs: Path, shift: int | None = 0) -> torch.Tensor:
    """The same, with the memory of the picture so many documents further on, or with none."""
    rows = read(docs)
    memories = [
        None if shift is None else pipe.inputs(rows[(n + shift) % len(rows)]["image"])[1] for n in range(len(rows))
    ]
    return torch.tensor(
        [
            [log_p(pipe.model, pipe.tokenizer, one, memory) for one in row["choices"]]
            for row, memory in zip(rows, memories, strict=True)
        ]
    )


class TestLikelihoods:
    @pytest.mark.parametrize("batch_size", [3, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 32))])
    def test_choices_are_scored_with_the_memory_of_their_document(self, pipe: Any, docs: Path, batch_size: int) -> None:
        model = AdaptedLM("assets/vision/adapter", memory="image", device="cpu", batch_size=batch_size)
        results, answers = run(model, choice(docs))
        wanted = by_hand(pipe, docs)
        assert_close(scores(answers), wanted, 1e-4)
        right = wanted.argmax(1) == torch.tensor([row["answer"] for row in read(docs)])
        assert results["acc,none"] == pytest.approx(float(right.float().mean()))

    def test_controls(self, pipe: Any, docs: Path) -> None:
        """The memory of the next document, and none; each with what it gives worked out."""
        rows, found = read(docs)[:3], {}
        asked = [request(row, number, "", row["text"]) for number, row in enumerate(rows)]
        for control, shift in (("own", 0), ("shuffled", 1), ("none", None)):
            model = AdaptedLM(pipe.model, pipe.tokenizer, lambda doc: pipe.inputs(doc["image"])[1], control=control)
            found[control] = [score for score, _ in model.loglikelihood(asked)]
            for number, (score, row) in enumerate(zip(found[control], rows, strict=True)):
                other = None if shift is None else pipe.inputs(rows[(number + shift) % 3]["image"])[1]
                assert score == pytest.approx(log_p(pipe.model, pipe.tokenizer, row["text"], other), rel=1e-4)
        assert all(own > other + 1 for own, other in zip(found["own"], found["shuffled"], strict=True))

    @pytest.mark.parametrize("adds", [False, True])
    def test_the_begin_token_is_the_tokenizers_matter(self, pipe: Any, adds: bool) -> None:
        """Invariant 135. Without a memory each score is that of the harness's own class."""
        from lm_eval.models.huggingface import HFLM
        from tokenizers.processors import TemplateProcessing

        tokenizer = copy.deepcopy(pipe.tokenizer)
        if adds:
            begin = (tokenizer.bos_token, tokenizer.bos_token_id)
            tokenizer.backend_tokenizer.post_processor = TemplateProcessing(f"{begin[0]} $A", None, [begin])
        assert (tokenizer("A red")["input_ids"][0] == tokenizer.bos_token_id) == adds
        ours = AdaptedLM(pipe.model, tokenizer, control="none")
        theirs = HFLM(pipe.model.host, tokenizer=tokenizer, device="cpu")
        for pair in (("A red", " flower"), ("", "A red flower"), ("A\n", "\nred"), (f"{tokenizer.bos_token}A", " red")):
            asked = [request({}, 0, *pair)]
            assert ours.loglikelihood(asked)[0][0] == pytest.approx(theirs.loglikelihood(asked)[0][0], rel=1e-4)
        asked = [request({}, 0, "A red flower. A white flower in the grass.")]
        assert ours.loglikelihood_rolling(asked) == [pytest.approx(theirs.loglikelihood_rolling(asked)[0], rel=1e-4)]


def request(doc: Any, number: int, *arguments: Any) -> Any:
    """A request of the harness about a document."""
    from lm_eval.api.instance import Instance

    return Instance("loglikelihood", doc, arguments, 0, ("flora", number, 1))


class TestTexts:
    def test_bits_per_byte_with_memories(self, pipe: Any, docs: Path) -> None:
        model = AdaptedLM("assets/vision/adapter", memory="image", device="cpu", batch_size=3)
        results, _ = run(model, rolling(docs))
        rows = read(docs)
        nats = [-log_p(pipe.model, pipe.tokenizer, row["text"], pipe.inputs(row["image"])[1]) for row in rows]
        size = sum(len(row["text"].encode()) for row in rows)
        assert results["bits_per_byte,none"] == pytest.approx(sum(nats) / size / math.log(2), rel=1e-4)


class TestWriting:
    @pytest.mark.parametrize("batch_size", [pytest.param(1, marks=pytest.mark.slow), 4])
    def test_each_goes_on_from_its_own_beginning_and_picture(self, pipe: Any, docs: Path, batch_size: int) -> None:
        """An empty beginning is the begin token; what is written is that of one at a time."""
        model = AdaptedLM("assets/vision/adapter", memory="image", device="cpu", batch_size=batch_size)
        _, answers = run(model, writing(docs))
        for row, ((text,),) in zip(read(docs), answers, strict=True):
            begin, memory = (
                pipe.tokenizer(row["begin"], add_special_tokens=False)["input_ids"],
                pipe.inputs(row["image"])[1],
            )
            ids = torch.tensor([begin or [pipe.tokenizer.bos_token_id]])
            made = pipe.model.generate(
                ids, memory=memory, max_new_tokens=12, do_sample=False, eos_token_id=pipe.tokenizer.eos_token_id,
                pad_token_id=pipe.tokenizer.eos_token_id,
            )  # fmt: skip
            alone = pipe.tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True)
            assert text == alone.partition(".")[0] and "." not in text


class TestMemories:
    def model(self, source: Any = "memory", **options: Any) -> Any:
        """A tiny host whose adapter reads vectors, with the tokenizer of the shipped one."""
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(ROOT / "assets" / "lm")
        model = tiny.attach(tiny.make("llama", vocab_size=len(tokenizer)))
        with torch.no_grad():
            for name, parameter in model.adapters.named_parameters():
                if name.endswith("gate"):
                    parameter.fill_(0.7)
        return AdaptedLM(model, tokenizer, source, **options)

    def test_fields_of_several_kinds_in_one_batch(self, tmp_path: Path) -> None:
        """A memory, a file, vectors, nothing: of unequal length, each row with its own."""
        made = [mmattn.Memory(torch.randn(1, length, tiny.MEMORY_DIM)) for length in (2, 5, 3)]
        made[1].save(tmp_path / "one.safetensors")
        values = [made[0], str(tmp_path / "one.safetensors"), made[2].tokens[0].tolist(), None]
        model = self.model()
        asked = [request({"memory": value}, number, "A red", " flower") for number, value in enumerate(values)]
        found = [score for score, _ in model.loglikelihood(asked)]
        for score, memory in zip(found, [*made, None], strict=True):
            assert score == pytest.approx(log_p(model.model, model.tokenizer, " flower", memory, "A red"), rel=1e-5)
        assert len({round(score, 4) for score in found}) == 4
        assert [score for score, _ in self.model(lambda doc: None).loglikelihood(asked)] == [
            pytest.approx(found[3])
        ] * 4

    @pytest.mark.parametrize(
        ("memories", "options", "error", "names"),
        [
            ([], {}, ConfigError, "memory=.*control=none"),
            ([torch.randn(2, 4)], {}, ShapeError, f"4 wide.*{tiny.MEMORY_DIM}"),
            ([torch.randn(2, tiny.MEMORY_DIM), None], {"control": "shuffled"}, ConfigError, "only one document"),
        ],
    )
    def test_what_is_no_memory(self, memories: list[Any], options: Any, error: Any, names: str) -> None:
        asked = [request({"memory": memory}, number, "A", " red") for number, memory in enumerate(memories)]
        with pytest.raises(error, match=names):
            self.model(**options).loglikelihood(asked or [request({"picture": 1}, 0, "A", " red")])

    def test_arguments_that_contradict_each_other(self, pipe: Any) -> None:
        model, tokenizer = pipe.model, pipe.tokenizer
        for given, options, names in (
            (("assets/vision/adapter", tokenizer), {}, "tokenizer="),
            ((model, tokenizer), {"device": "cpu"}, "index= and device="),
            ((model.host, tokenizer), {}, "GPT2LMHeadModel|LlamaForCausalLM"),
            ((model, tokenizer), {"control": "others"}, "'own', 'shuffled', 'none'"),
        ):
            with pytest.raises(ConfigError, match=names):
                AdaptedLM(*given, **options)
        assert AdaptedLM(torch.compile(model, backend="eager"), tokenizer).model.predicts_tokens

    def test_the_cache_of_answers_is_refused(self, docs: Path, tmp_path: Path) -> None:
        """It knows a request by its texts: two pictures with the same question would share an answer."""
        given = {"use_cache": str(tmp_path / "cache")}
        with pytest.raises(ConfigError, match="caches answers by their texts"):
            run(self.model(), choice(docs), **given)
        from lm_eval.api.model import CachingLM

        assert CachingLM(self.model(control="none"), str(tmp_path / "other")).lm.model is not None


class TestByName:
    @pytest.mark.slow
    @pytest.mark.parametrize("command", ["mmattn.evaluation", "lm_eval"])
    def test_from_the_command_line(self, pipe: Any, docs: Path, tmp_path: Path, command: str) -> None:
        """By the package's own command; and by lm_eval's, where the task imports a function of the user's."""
        import yaml

        asked = yaml.safe_dump({**choice(docs), "task": "flora"})
        if command == "lm_eval":
            asked += "process_docs: !function pictures.as_they_are\n"
            (tmp_path / "pictures.py").write_text(
                "from mmattn.evaluation import AdaptedLM\n\n\ndef as_they_are(dataset):\n    return dataset\n"
            )
        (tmp_path / "flora.yaml").write_text(asked)
        words = [
            sys.executable, "-m", command, "run", "--model", "mmattn", "--model_args",
            "adapter=assets/vision/adapter,memory=image", "--tasks", "flora.yaml", "--batch_size", "3",
            "--device", "cpu", "--output_path", "out",
        ]  # fmt: skip
        paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        env = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, env=env, timeout=280)
        assert done.returncode == 0, done.stderr
        (file,) = (tmp_path / "out").rglob("results_*.json")
        right = by_hand(pipe, docs).argmax(1) == torch.tensor([row["answer"] for row in read(docs)])
        found = json.loads(file.read_text())["results"]["flora"]["acc,none"]
        assert found == pytest.approx(float(right.float().mean()))

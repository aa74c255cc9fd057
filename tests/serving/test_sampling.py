"""How tokens are chosen: by the fields of OpenAI, alone and among other requests; stops and log-probabilities."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from mmattn.serving.engine import Sampler, SamplingSettings
from tests.serving.choosing import VECTORS, by_definition, complete, ids_of, text_of

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.0, "top_p": 0.5, "seed": 5},
        {"temperature": 0.9, "seed": 11},
        {"temperature": 1.3, "top_k": 5, "seed": 12},
        {"temperature": 1.1, "top_p": 0.6, "seed": 13},
        {"temperature": 1.5, "top_k": 23, "top_p": 0.9, "seed": 14},
        {"frequency_penalty": 1.7, "temperature": 0.0},
        {"presence_penalty": 1.9, "temperature": 0.0},
        {"presence_penalty": -0.7, "frequency_penalty": 0.9, "temperature": 0.8, "seed": 15},
    ],
    ids=lambda settings: "-".join(settings) or "greedy",
)
def test_tokens_are_chosen_as_the_fields_say(client: Any, pipe: Any, settings: dict[str, Any]) -> None:
    """The same alone and among others, which are chosen otherwise."""
    ids = ids_of(pipe, "What is white?")
    wanted = text_of(pipe, by_definition(pipe, ids, 13, **settings)[0])
    assert complete(client, ids, max_tokens=13, **settings).choices[0].text.strip() == wanted
    others = [{"temperature": 1.0, "seed": number} for number in range(7)]
    with ThreadPoolExecutor(9) as pool:
        asked = [settings, *others, settings]
        made = list(pool.map(lambda one: complete(client, ids, max_tokens=13, **one).choices[0].text.strip(), asked))
    assert made[0] == made[-1] == wanted and len(set(made[1:-1])) > 3


def test_without_a_temperature_another_field_asks_to_sample(client: Any, pipe: Any) -> None:
    ids = ids_of(pipe, "What is white?")
    wanted = text_of(pipe, by_definition(pipe, ids, 7, temperature=1.0, seed=29)[0])
    assert complete(client, ids, seed=29).choices[0].text.strip() == wanted
    assert len({one.text for one in complete(client, ids, n=11).choices}) > 1


def test_several_answers_have_seeds_one_after_the_other(client: Any, pipe: Any) -> None:
    ids = ids_of(pipe, "What is white?")
    wanted = [text_of(pipe, by_definition(pipe, ids, 7, temperature=1.0, seed=seed)[0]) for seed in (31, 32, 33)]
    made = complete(client, ids, n=3, seed=31, temperature=1.0)
    assert [one.text.strip() for one in made.choices] == wanted and [one.index for one in made.choices] == [0, 1, 2]
    assert made.usage.prompt_tokens == len(ids)
    streamed: dict[int, str] = {}
    for chunk in complete(client, ids, n=3, seed=31, temperature=1.0, stream=True):
        (choice,) = chunk.choices
        streamed[choice.index] = streamed.get(choice.index, "") + choice.text
    assert [streamed[number].strip() for number in range(3)] == wanted


@pytest.mark.parametrize("stream", [False, True])
def test_stop_texts_end_an_answer(client: Any, pipe: Any, stream: bool) -> None:
    whole = complete(client, "What is white?", max_tokens=23).choices[0].text
    words = whole.split()
    assert len(words) > 4
    stop = f"{words[2]} {words[3][0]}"  # from within one token into another
    for stops in (stop, ["nothing of the kind", stop]):
        made = complete(client, "What is white?", max_tokens=23, stop=stops, stream=stream)
        chunks = list(made) if stream else [made]
        text = "".join(one.choices[0].text for one in chunks)
        assert text.rstrip() == whole[: whole.index(stop)].rstrip()
        assert chunks[-1].choices[0].finish_reason == "stop"
    cut = complete(client, "What is white?", max_tokens=23, stop=stop, logprobs=0, stream=stream)
    told = [token for one in (cut if stream else [cut]) for token in one.choices[0].logprobs.tokens]
    before = whole[: whole.index(stop)].strip()
    assert "".join(told).strip().startswith(before), "tokens before the stop text are told"
    assert before.startswith("".join(told[:-1]).strip()), "but for the one in which it begins, no others are"
    made = complete(client, "What is white?", max_tokens=23, stop=[f"{whole[-3:]}x"], stream=stream)
    text = "".join(one.choices[0].text for one in (made if stream else [made]))
    assert text.strip() == whole, "what was held back comes with the end"


def test_a_stop_text_that_begins_with_the_last_letter_of_a_token(client: Any, pipe: Any) -> None:
    """Invariant 194. No letter of a stop text is sent before it is known that none follows."""
    written = by_definition(pipe, ids_of(pipe, "What is white?"), 13)[0]
    ends = [len(text_of(pipe, written[: number + 1])) for number in range(len(written))]
    whole = text_of(pipe, written)
    stops = [whole[end - 1 : end + 1] for end in ends if 1 < end < len(whole)]
    end = next(end for end, stop in zip(ends[1:], stops[1:], strict=False) if whole.index(stop) == end - 1)
    made = complete(client, "What is white?", max_tokens=13, stop=whole[end - 1 : end + 1], stream=True)
    assert "".join(one.choices[0].text for one in made).rstrip() == whole[: end - 1].rstrip()


def test_penalties_by_their_definition() -> None:
    """Invariant 194. A presence counts once, a frequency each time."""
    logits = torch.tensor([3.0, 2.5, 0.0])
    for settings, wanted in (
        ({"presence_penalty": 0.2}, [0, 0, 0, 0, 0]),
        ({"frequency_penalty": 0.2}, [0, 0, 0, 1, 0]),
        ({"presence_penalty": 0.6}, [0, 1, 0, 0, 0]),
    ):
        sampler = Sampler(SamplingSettings(temperature=0.0, **settings), torch.device("cpu"))
        assert [sampler.choose(logits) for _ in wanted] == wanted, settings


def test_log_probabilities(client: Any, pipe: Any) -> None:
    """Of the model, before temperature and penalties."""
    ids = ids_of(pipe, "What is white?")
    options = {"temperature": 1.2, "seed": 17, "frequency_penalty": 0.3}
    tokens, logits = by_definition(pipe, ids, 7, **options)
    made = complete(client, ids, logprobs=3, **options).choices[0]
    told = made.logprobs
    assert told.tokens == [pipe.tokenizer.decode([token]) for token in tokens]
    for token, row, logprob, top, offset in zip(
        tokens, logits, told.token_logprobs, told.top_logprobs, told.text_offset, strict=True
    ):
        logs = row.log_softmax(-1)
        assert math.isclose(logprob, float(logs[token]), abs_tol=1e-3)
        best = logs.topk(3)
        assert sorted(top) == sorted(pipe.tokenizer.decode([int(one)]) for one in best.indices)
        assert torch.allclose(torch.tensor(sorted(top.values())), best.values.sort().values, atol=1e-3)
        assert offset == len("".join(told.tokens)[:offset])
    chat = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "What is white?"}], logprobs=True, top_logprobs=2,
        extra_body={"memory": VECTORS}, max_tokens=7, **options,
    )  # fmt: skip
    content = chat.choices[0].logprobs.content
    assert [one.logprob for one in content] == pytest.approx(told.token_logprobs, abs=1e-3)
    assert [bytes(one.bytes).decode() for one in content] == told.tokens
    assert all(len(one.top_logprobs) == 2 for one in content)
    streamed = complete(client, ids, logprobs=3, stream=True, **options)
    assert [token for chunk in streamed for token in chunk.choices[0].logprobs.tokens] == told.tokens


def test_a_prompt_is_scored(client: Any, pipe: Any) -> None:
    """As evaluation harnesses ask: no new token, the prompt and its log-probabilities."""
    ids = ids_of(pipe, "What is white?")
    with torch.no_grad():
        logs = pipe.model(torch.tensor([ids]), memory=torch.tensor([VECTORS])).logits[0].log_softmax(-1)
    wanted = [float(row[token]) for row, token in zip(logs, ids[1:], strict=False)]
    made = complete(client, ids, max_tokens=0, echo=True, logprobs=1).choices[0]
    assert made.logprobs.token_logprobs[0] is None
    assert made.logprobs.token_logprobs[1:] == pytest.approx(wanted, abs=1e-3)
    assert made.text == pipe.tokenizer.decode(ids) and made.finish_reason == "length"
    more = complete(client, ids, max_tokens=3, echo=True, logprobs=1).choices[0]
    assert more.text == "".join(more.logprobs.tokens).rstrip(), "blanks between prompt and answer stay"
    for token, offset in zip(more.logprobs.tokens, more.logprobs.text_offset, strict=True):
        assert f"{more.text} "[offset:].startswith(token.rstrip())
    assert more.logprobs.token_logprobs[1 : len(ids)] == pytest.approx(wanted, abs=1e-3)
    assert more.text.startswith(made.text) and len(more.logprobs.tokens) == len(ids) + 3
    assert complete(client, "What is white?", max_tokens=0).choices[0].text == ""


def test_offsets_of_a_prompt_with_characters_of_several_tokens(client: Any, pipe: Any) -> None:
    """Invariant 165: through the server, in a prompt that is scored and in the answer behind it."""
    text = "A 😀 smile 漢字 red"
    ids = pipe.tokenizer(text, add_special_tokens=False)["input_ids"]
    chosen = complete(client, ids, max_tokens=3, echo=True, logprobs=1).choices[0]
    assert chosen.text.startswith(text) and len(ids) > len(text.split())
    parts = list(zip(chosen.logprobs.tokens, chosen.logprobs.text_offset, strict=True))
    for token, offset in parts:
        if "\N{REPLACEMENT CHARACTER}" not in token and token != pipe.tokenizer.eos_token:
            assert f"{chosen.text} "[offset:].startswith(token.rstrip())
    assert parts[len(ids)][1] == len(text)

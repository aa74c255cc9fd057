"""`transformers.pipeline("text-generation")` with an adapted model: the memory is an argument, or around the call."""

from __future__ import annotations

import pytest
import transformers

from mmattn.errors import ShapeError
from tests import tiny
from tests.interop import tokenised

WORDS = {"max_new_tokens": 5, "do_sample": False, "return_full_text": False}
PROMPTS = ["w5 w6 w7 w8", "w9 w10 w11 w12"]

# The pipeline sets `max_length` beside what it is asked for.
pytestmark = pytest.mark.filterwarnings("ignore:.*max_new_tokens.*:UserWarning")


def make_pipeline(model):
    return transformers.pipeline("text-generation", model=model, tokenizer=tokenised.make_tokenizer())


def written(model, prompts, memory) -> list[str]:
    """What `generate` itself writes."""
    tokenizer = tokenised.make_tokenizer()
    ids = tokenizer(prompts, return_tensors="pt").input_ids
    out = model.generate(ids, memory=memory, max_new_tokens=5, do_sample=False)
    return tokenizer.batch_decode(out[:, ids.shape[1] :], skip_special_tokens=True)


def texts(answers) -> list[str]:
    return [
        one["generated_text"].strip()
        for answer in answers
        for one in (answer if isinstance(answer, list) else [answer])
    ]


def test_a_memory_is_an_argument_or_around_the_call():
    model, memory = tiny.attach(tiny.make("llama")), tiny.memory(1)
    pipe = make_pipeline(model)
    want, blind = written(model, PROMPTS[:1], memory), written(model, PROMPTS[:1], None)
    assert want != blind
    assert texts(pipe(PROMPTS[0], memory=memory, **WORDS)) == want
    assert texts(pipe(PROMPTS[0], **WORDS)) == blind
    with model.condition(memory):
        assert texts(pipe(PROMPTS[0], **WORDS)) == want
        assert texts(make_pipeline(model.host)(PROMPTS[0], **WORDS)) == want
    assert texts(pipe(PROMPTS[0], memory=memory, adapter_scale=0.0, **WORDS)) == blind


def test_a_batch_has_as_many_rows_of_memory():
    model, memory = tiny.attach(tiny.make("llama")), tiny.memory(2)
    pipe = make_pipeline(model)
    assert texts(pipe(PROMPTS, batch_size=2, memory=memory, **WORDS)) == written(model, PROMPTS, memory)
    with pytest.raises(ShapeError, match="the text has 1 rows and the memory of adapter 'default' has 2"):
        pipe(PROMPTS, memory=memory, **WORDS)

"""How strongly an adapter speaks: numbers, rows, maps, blocks, schedules, and several adapters at once."""

from __future__ import annotations

import pytest
import torch

from mmattn.errors import ConfigError, MmattnError, NonFiniteError, ShapeError
from mmattn.testing.case import no_trace, traces
from tests import tiny, tiny_unets
from tests.tiny import assert_close, differs
from tests.tiny_unets import HEIGHT, ROWS, WIDTH, run

MID = 3  # the number of the attention layer in the middle, the host's last
PLACES = ("down_blocks.0", "up_blocks.1.attentions.0", "up_blocks.1.attentions.1", "mid_block")


@pytest.fixture
def model():
    """A tiny UNet with an open adapter."""
    return tiny_unets.attach(tiny_unets.make())


@pytest.fixture
def middle():
    """A tiny UNet with an open adapter beside its middle only: what goes in there is the same for every memory."""
    return tiny_unets.attach(tiny_unets.make(), blocks=("mid",))


def added(model, memory, **more):
    """What the adapters add to the output of the layer in the middle, (b, l, d), and what went in."""
    with torch.no_grad(), tiny_unets.listening(model, MID) as heard:
        run(model)
        own = heard["out"]
        run(model, memory, **more)
    return heard["out"] - own, heard["x"]


# Numbers and rows


@pytest.mark.parametrize("core", [False, True])
def test_what_is_added_is_the_formulas_times_the_strength(middle, core):
    memory = tiny.memory(ROWS)
    middle.use_core(core)
    once, x = added(middle, memory)
    with torch.no_grad():
        want = tiny_unets.share(middle, MID, x, memory)
    assert_close(once, want, 1e-4)
    for adapter_scale in (0.3, -2.0, 1, torch.tensor(0.7), torch.tensor(0.5, dtype=torch.float64)):
        assert_close(added(middle, memory, adapter_scale=adapter_scale)[0], want * float(adapter_scale), 1e-4)
    rows = torch.tensor([0.5, 0.0, -3.0])
    got, _ = added(middle, memory, adapter_scale=rows)
    assert_close(got, want * rows[:, None, None], 1e-4)
    assert not got[1].any()


@pytest.mark.parametrize("kind", tiny_unets.KINDS)
@torch.no_grad()
def test_what_is_added_in_every_kind_of_block(kind):
    scaled = {"mid_block_scale_factor": 1.3} if kind == "simple" else {}
    model, memory = tiny_unets.attach(tiny_unets.make(kind, **scaled)), tiny.memory(ROWS)
    last = len(model.layer_names) - 1
    model = tiny_unets.attach(model.unload(), blocks=(model.layer_names[last],))
    with tiny_unets.listening(model, last) as heard:
        run(model, None, kind)
        own = heard["out"]
        run(model, memory, kind)
    assert_close(heard["out"] - own, tiny_unets.share(model, last, heard["x"], memory), 1e-4)


# Maps


def test_a_map_is_over_the_picture(middle):
    """The layer in the middle sees the picture at half its size, row by row."""
    memory, adapter_scale = tiny.memory(ROWS), torch.rand(ROWS, HEIGHT, WIDTH)
    once, _ = added(middle, memory)
    level = torch.nn.functional.avg_pool2d(adapter_scale[:, None], 2).flatten(2).transpose(1, 2)
    assert_close(added(middle, memory, adapter_scale=adapter_scale)[0], once * level, 1e-4)
    left = torch.zeros(ROWS, HEIGHT, WIDTH)
    left[:, :, : WIDTH // 2] = 1
    got = added(middle, memory, adapter_scale=left)[0].unflatten(1, (HEIGHT // 2, WIDTH // 2))
    assert not got[:, :, WIDTH // 4 :].any()
    assert_close(got[:, :, : WIDTH // 4], once.unflatten(1, (HEIGHT // 2, WIDTH // 2))[:, :, : WIDTH // 4], 1e-4)


# Blocks and schedules


@torch.no_grad()
def test_by_block_the_longest_beginning_counts(model):
    memory = tiny.memory(ROWS)
    every = {place: float(i + 1) / 4 for i, place in enumerate(PLACES)}
    want = run(model, memory, adapter_scale=every)
    assert differs(want, run(model, memory), 1e-3)
    for adapter_scale in (
        {"": 0.25, "up": 9.0, "up_blocks.1.attentions.0": 0.5, "up_blocks.1.attentions.1": 0.75, "mid": 1.0},
        {"up_blocks": every, "down": 0.25, "up_blocks.1.attentions.1": 0.75, "mid_block.attentions.0": 1},
        {"down": lambda time: 0.25, "up": {"up_blocks.1.attentions.1": 0.75, "up": torch.full((ROWS,), 0.5)}, "mid": 1},
        lambda time: every,
    ):
        assert_close(run(model, memory, adapter_scale=adapter_scale), want)
    alone = tiny_unets.attach(tiny_unets.make(), opened=False, blocks=("mid",))
    state = {
        name: value for name, value in model.adapters.state_dict().items() if ".blocks." not in name or ".3." in name
    }
    alone.adapters.load_state_dict(state)
    assert_close(run(model, memory, adapter_scale={"mid": 1.0}), run(alone, memory))
    assert torch.equal(run(model, memory, adapter_scale={}), run(model))


@torch.no_grad()
def test_a_schedule_is_asked_once_per_step(model):
    memory, (sample, _, words) = tiny.memory(ROWS), tiny_unets.given()[0]
    asked = []

    def schedule(time):
        asked.append(time)
        return 0.0 if time > 500 else torch.tensor([0.5, 1.0, 2.0])

    own = tiny_unets.make()
    with model.condition(memory, adapter_scale=schedule):
        for time in (900, torch.tensor(300), torch.full((ROWS,), 7.0)):
            out = model.host(sample, time, words).sample
            if asked[-1] > 500:
                assert torch.equal(out, own(sample, time, words).sample)
            else:
                assert differs(out, own(sample, time, words).sample)
    assert asked == [900.0, 300.0, 7.0] and all(type(time) is float for time in asked)


# Several adapters


@pytest.mark.parametrize("core", [False, True])
def test_adapters_add_up_each_with_its_memory_and_strength(middle, core):
    middle.use_core(core)
    middle.add_adapter("second", tiny_unets.adapter(memory_dim=11, tokens=2, blocks=("mid",)))
    tiny_unets.open_values(middle, "second", seed=5)
    one, two = tiny.memory(ROWS, lengths=[5, 0, 3]), tiny.memory(ROWS, m=2, e=11, lengths=[2, 1, 0])
    first, second = added(middle, {"default": one})[0], added(middle, {"second": two})[0]
    both = {"default": one, "second": two}
    assert_close(added(middle, both)[0], first + second, 1e-4)
    assert_close(added(middle, both, adapter_scale=0.5)[0], 0.5 * (first + second), 1e-4)
    rows = torch.tensor([1.0, 2.0, 3.0])
    got, _ = added(middle, both, adapter_scale={"default": rows, "second": {"mid": lambda time: -0.5}})
    assert_close(got, first * rows[:, None, None] - 0.5 * second, 1e-4)
    assert_close(added(middle, both, adapter_scale={"second": 1.0})[0], second, 1e-4)
    with middle.disable_adapter("second"):
        assert_close(added(middle, both)[0], first, 1e-4)
    middle.set_adapter("second")
    assert_close(added(middle, both)[0], second, 1e-4)
    middle.set_adapter(["second", "default"])
    with torch.no_grad(), middle.condition(both), pytest.raises(ShapeError, match="second"):
        run(middle, {"second": one})
    middle.delete_adapter("second")
    assert_close(added(middle, one)[0], first, 1e-4)


# What is refused


@pytest.mark.parametrize(
    ("adapter_scale", "error", "match"),
    [
        ({"middle": 1.0}, ConfigError, "middle.*mid_block"),
        ({"mid": {"nowhere": 1.0}}, ConfigError, "nowhere"),
        (True, ConfigError, "True"),
        ("much", ConfigError, "much"),
        (float("nan"), ConfigError, "nan"),
        (torch.tensor(float("nan")), MmattnError, "nan|NaN"),
        (torch.tensor([1.0, float("nan"), 1.0]), NonFiniteError, "NaN"),
        (torch.ones(ROWS, dtype=torch.long), ConfigError, "int64"),
        (torch.ones(2), ShapeError, "3 rows.*2"),
        (torch.ones(2, HEIGHT, WIDTH), ShapeError, "3 rows"),
        (torch.ones(ROWS, HEIGHT * WIDTH), ShapeError, "height, width"),
        (torch.ones(ROWS, 2, HEIGHT, WIDTH), ShapeError, "2 frames"),
        (torch.ones(ROWS, HEIGHT, 0), ShapeError, "height, width"),
        *((torch.ones(ROWS, *size), ShapeError, "aspect") for size in ((WIDTH, HEIGHT), (HEIGHT, HEIGHT), (1, 1))),
        ({"mid": torch.ones(ROWS, HEIGHT, HEIGHT)}, ShapeError, "aspect"),
    ],
)
@torch.no_grad()
def test_a_strength_that_does_not_fit(model, adapter_scale, error, match):
    memory = tiny.memory(ROWS)
    want, before = run(model, memory), traces(model.host)
    with pytest.raises(error, match=match):
        run(model, memory, adapter_scale=adapter_scale)
    with pytest.raises(error, match=match), model.condition(memory, adapter_scale=adapter_scale):
        run(model)
    with pytest.raises(error, match=match):
        run(model, memory, adapter_scale=lambda time: adapter_scale)
    assert torch.equal(run(model, memory), want)
    no_trace(model.host, before, "after it was refused")


def test_a_mapping_by_name_is_not_one_by_block():
    """An adapter may be called as a block begins: then names count."""
    model = tiny_unets.attach(tiny_unets.make(), name="mid")
    memory = tiny.memory(ROWS)
    with torch.no_grad():
        assert torch.equal(run(model, memory, adapter_scale={"mid": 1.0}), run(model, memory))

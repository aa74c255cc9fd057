"""What every family must do with a memory; where a host cannot do it by itself, nothing is asked of it."""

from __future__ import annotations

import copy
import inspect
import tempfile
from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import mmattn
from mmattn.adapters.host_models import given_cache
from mmattn.errors import MmattnError
from mmattn.hosts.model import adapted
from mmattn.hosts.probe import host_inputs
from tests.families.building import MEMORY_DIM, tiny_model
from tests.tiny import checkpoint, open_gates, without_checkpoints

IDS = torch.tensor([[5, 9, 3, 7, 2, 8, 11], [4, 4, 6, 12, 9, 3, 20]])
NEW = 5  # tokens that are generated
CACHES = ("cache", "past_key_values", "cache_params")
#: Of arguments that some host takes, with a value that any host can be given.
NAMES: dict[str, Any] = dict.fromkeys((*CACHES, "past_key_value", "head_mask", "mems", "encoder_hidden_states"))
NAMES |= dict.fromkeys(("attention_mask", "decoder_attention_mask"), torch.ones_like(IDS))
NAMES |= {"token_type_ids": torch.zeros_like(IDS), "position_ids": torch.arange(7).expand(2, -1)}
NAMES |= {"ignore_index": 3, "num_items_in_batch": torch.tensor(4), "return_loss": True, "return_dict": True}
NAMES |= {"cache_position": torch.arange(7), "logits_to_keep": 0, "num_logits_to_keep": 0, "use_cache": False}
NAMES |= {"output_attentions": True, "output_hidden_states": True, "image_sizes": None, "image_grid_thw": None}
NAMES |= {"vision_feature_layer": -1, "vision_feature_layers": -1, "pixel_values_images": None, "foo": 1}
OF_LOSSES = ("shift_labels", "ignore_index", "num_items_in_batch", "return_loss")
#: Relative to the largest: of two ways to compute the same, and of steps with a cache.
CLOSE, CACHED = 2e-4, 1e-3


class HostCannot(Exception):
    """The host itself, without a memory, does not do what is to be checked."""


class Family:
    """A tiny host of a family, an adapter with open gates, and memories of two rows."""

    def __init__(self, name: str, auto: Any, where: str | None = None, writes: bool = True) -> None:
        self.name, self.auto, self.where, self.writes, self.ids = name, auto, where, writes, IDS
        self.host = tiny_model(name, auto)
        self.main = self.host.main_input_name
        self.remember()
        self.alone = self.logits(self.host)
        if not self.alone.isfinite().all() or (writes and self.alone.shape[:2] != IDS.shape):
            raise HostCannot(f"it answers with {tuple(self.alone.shape)}, or with no finite numbers")

    def remember(self) -> None:
        """Draw memories of five slots and of three."""
        self.tokens = torch.randn(2, 5, MEMORY_DIM, generator=torch.Generator().manual_seed(9))
        self.mask = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
        self.memory = mmattn.Memory(self.tokens, self.mask)

    def another_host(self) -> nn.Module:
        """A host of the same weights."""
        return tiny_model(self.name, self.auto)

    @cached_property
    def model(self) -> Any:
        """The host with a fresh adapter."""
        torch.manual_seed(3)
        return mmattn.attach(
            self.host, mmattn.GatedAdapter(memory_dim=MEMORY_DIM, layers=(0, 1), num_heads=2, where=self.where)
        )

    def open(self) -> None:
        """Have the adapter add something."""
        open_gates(self.model)

    @torch.no_grad()
    def logits(self, model: Any, ids: Tensor = IDS, **given: Any) -> Tensor:
        """What a text is answered with."""
        return answer_of(model(**self.given(ids), **given))

    def given(self, ids: Tensor) -> dict[str, Tensor]:
        """How the host is called with a text; one with an encoder reads and writes it, or hears a sound of its own."""
        read = self.read(ids)
        return read if self.where is None else read | {"decoder_input_ids": ids}

    def read(self, ids: Tensor) -> dict[str, Tensor]:
        """What a host reads: a text, or for each a sound."""
        if self.main in ("input_ids", "inputs"):
            given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            known = inspect.signature(type(self.host).forward).parameters
            return {name: value for name, value in given.items() if name in known}
        name, shape = self.sound
        draws = [torch.Generator().manual_seed(int(row[0])) for row in ids]
        return {name: torch.stack([torch.randn(shape, generator=drawn) for drawn in draws])}

    @cached_property
    def sound(self) -> tuple[str, tuple[int, ...]]:
        """Under which name, and in which shape, the host is given a picture or a sound."""
        written = {} if self.where is None else {"decoder_input_ids": IDS}
        for given in host_inputs(self.host, len(IDS)):
            try:
                self.host(**given, **written)
            except Exception:  # the next one
                continue
            name, value = next(iter(given.items()))
            return name, tuple(value.shape[1:])
        raise HostCannot("it is not known what it sees or hears")

    def generated(self, model: Any, ids: Tensor, mask: Tensor | None = None, **given: Any) -> tuple[Tensor, Any]:
        """New tokens (b, n), and the logits of each step."""
        settings = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
        settings |= {"output_scores": True, "return_dict_in_generate": True}
        read = self.read(ids) if mask is None else {"input_ids": ids, "attention_mask": mask}
        out = model.generate(**read, **settings | given)
        return out.sequences[:, -NEW:], out.scores

    def first_step(self, model: Any, **given: Any) -> Tensor:
        """The logits with which writing begins."""
        if self.where is None:
            return self.logits(model, **given)[:, -1].float()
        settings = self.host.generation_config
        begin = settings.bos_token_id if settings.decoder_start_token_id is None else settings.decoder_start_token_id
        start = torch.full((len(IDS), 1), begin)
        with torch.no_grad():
            logits: Tensor = model(**self.read(IDS), decoder_input_ids=start, **given).logits
        return logits[:, -1].float()

    def host_must(self, check: Callable[[], None], why: str) -> None:
        """Leave out what the host cannot do by itself."""
        try:
            check()
        except Exception as error:
            raise HostCannot(why) from error


def answer_of(out: Any) -> Tensor:
    """The logits of an output, or its hidden states."""
    answer: Tensor = out.logits if isinstance(getattr(out, "logits", None), Tensor) else out[0]
    return answer


def near(found: Tensor, wanted: Tensor, within: float = CLOSE, what: str = "") -> None:
    """Both are finite, and differ by no more than that, relative to the largest."""
    assert found.shape == wanted.shape, f"{what}: shapes {tuple(found.shape)} and {tuple(wanted.shape)}"
    assert found.isfinite().all() and wanted.isfinite().all(), f"{what}: not finite"
    apart = ((found.double() - wanted.double()).abs().max() / wanted.double().abs().max().clamp(min=1e-9)).item()
    assert apart <= within, f"{what}: {apart:.1e} apart"


def same_texts(found: tuple[Tensor, Any], wanted: tuple[Tensor, Any], what: str = "") -> None:
    """The same tokens, from logits that are no further apart than rounding; up to where two were as likely."""
    for step in range(NEW):
        near(found[1][step], wanted[1][step], CACHED, f"{what}: step {step}")
        if not torch.equal(found[0][:, step], wanted[0][:, step]):
            return


def fresh(case: Family) -> None:
    """Fresh, the host's own answer, bit for bit."""
    again = torch.equal(case.logits(case.host), case.alone)
    found = case.logits(case.model, memory=case.memory)
    assert torch.equal(found, case.alone) or not again, "a fresh adapter changes the host"
    if not again:
        near(found, case.alone, 1e-5, "fresh")
    case.open()


def changes(case: Family) -> None:
    """A memory changes its own row, from the first token on, and no other."""
    answer = case.logits(case.model, memory=case.memory)
    apart = (answer - case.alone).abs().flatten(1).amax(1) / case.alone.abs().max()
    assert (apart > 1e-3).all(), f"memory changes too little: {apart.tolist()}"
    assert not case.writes or not torch.equal(answer[:, 0], case.alone[:, 0]), "the first token sees nothing"
    tokens = case.tokens.clone()
    tokens[1] = tokens[1].flip(-1)
    other = case.logits(case.model, memory=mmattn.Memory(tokens, case.mask))
    near(other[0], answer[0], 1e-5, "row 0, when the memory of row 1 is another")
    moved = (other[1] - answer[1]).abs().max() / answer[1].abs().max()
    assert moved > 1e-3, "row 1 does not see its own memory"


def empty_row(case: Family) -> None:
    """A row whose slots are all hidden is the host's own: bit for bit, with experts to rounding."""
    hidden = torch.tensor([[True] * 5, [False] * 5])
    answer = case.logits(case.model, memory=mmattn.Memory(case.tokens, hidden))
    near(answer[1], case.alone[1], 1e-5, "the row without a memory")
    assert not torch.equal(answer[0], case.alone[0])
    nothing = case.logits(case.model, memory=mmattn.Memory(case.tokens, torch.zeros(2, 5, dtype=torch.bool)))
    exact = torch.equal(case.logits(case.model), case.alone)  # some hosts are not, from call to call
    near(nothing, case.alone, 0.0 if exact else 1e-5, "all rows without a memory")


def rows(case: Family) -> None:
    """A batch is answered as its rows one by one, hidden slots left out."""

    def alone() -> None:
        for row in range(2):
            near(case.logits(case.host, case.ids[row : row + 1]), case.alone[row : row + 1])

    case.host_must(alone, "alone, too, answers a row otherwise in a batch")
    together = case.logits(case.model, memory=case.memory)
    hidden = mmattn.Memory(case.tokens.masked_fill(~case.mask[..., None], torch.nan), case.mask)
    near(case.logits(case.model, memory=hidden), together, 1e-5, "NaN in hidden slots")
    for row in range(2):
        own = mmattn.Memory(case.tokens[row : row + 1, : int(case.mask[row].sum())])
        near(case.logits(case.model, case.ids[row : row + 1], memory=own), together[row : row + 1], what=f"row {row}")


def with_cache(case: Family) -> None:
    """Generating with the host's cache and without it gives the same text, which begins as the forward says."""

    def check(model: Any, **memories: Any) -> None:
        found = case.generated(model, IDS, **memories)
        same_texts(found, case.generated(model, IDS, **memories, use_cache=False), "use_cache=False")
        near(found[1][0], case.first_step(model, **memories), CACHED, "first step and forward")

    case.host_must(lambda: check(case.host), "alone, too, writes otherwise without its cache")
    check(case.model, memory=case.memory)


@torch.no_grad()
def names(case: Family) -> None:
    """What the bare host is called with, by names of before and of today, it is called with beside a memory, too."""
    labels = IDS if case.writes else torch.tensor([0, 1])
    for name, value in (NAMES | {"labels": labels, "shift_labels": labels}).items():
        called = case.given(IDS) | {name: value} | ({"labels": labels} if name in OF_LOSSES else {})
        try:
            case.host(**called)
        except Exception:  # nor does the host take it
            continue
        case.model(**called, memory=case.memory)
    for name in CACHES if case.writes else ():
        try:
            near(token_by_token(case, case.host, name), case.alone, CACHED)
        except Exception:  # it does not read a cache of this name, or answers otherwise
            continue
        found = token_by_token(case, case.model, name, memory=case.memory)
        near(found, case.logits(case.model, memory=case.memory), CACHED, f"token by token, {name}=")


def token_by_token(case: Family, model: Any, name: str, **given: Any) -> Tensor:
    """The logits of a text that is read as everybody's loop of decoding does it, with the cache under this name."""
    logits, cached = [], dict[str, Any]()
    for token in IDS.split(1, 1):
        read = {"input_ids": token} if case.where is None else case.read(IDS) | {"decoder_input_ids": token}
        out = model(**read, **cached, **given, use_cache=True)
        logits.append(answer_of(out))
        cached = {name: given_cache(out)}
    return torch.cat(logits, 1)


def padding(case: Family) -> None:
    """Prompts of two lengths, padded on the left, each with its memory, go on as alone; encoders pad on the right."""
    if case.main not in ("input_ids", "inputs"):
        raise HostCannot("sounds are not padded here")
    ids = torch.cat([torch.zeros(2, 3, dtype=torch.long), IDS], 1)
    ids[0, 2] = 13
    ids = ids if case.where is None else ids.flip(1)
    mask = (ids != 0).long()
    alone = [ids[row : row + 1, mask[row].bool()] for row in range(2)]

    def check(model: Any, **memories: Any) -> None:
        together = case.generated(model, ids, mask, **memories)
        for row, prompt in enumerate(alone):
            own = {name: one[row] for name, one in memories.items()}
            part = together[0][row : row + 1], [scores[row : row + 1] for scores in together[1]]
            same_texts(part, case.generated(model, prompt, **own), f"row {row}")

    case.host_must(lambda: check(case.host), "alone, too, goes on otherwise after padding")
    check(case.model, memory=case.memory)


def beams(case: Family) -> None:
    """Beams of a batch are those of its rows, each with its memory."""

    def check(model: Any, **memories: Any) -> None:
        settings = {"num_beams": 3, "num_return_sequences": 2}
        together, _ = case.generated(model, IDS, **memories, **settings)
        for row in range(2):
            own = {name: one[row] for name, one in memories.items()}
            apart, _ = case.generated(model, IDS[row : row + 1], **own, **settings)
            assert torch.equal(together[2 * row : 2 * row + 2], apart), f"row {row}"

    case.host_must(lambda: check(case.host), "alone, too, finds other beams in a batch")
    check(case.model, memory=case.memory)


def static_cache(case: Family) -> None:
    """A static cache gives the same text."""
    static = {"cache_implementation": "static"}
    case.host_must(
        lambda: same_texts(case.generated(case.host, IDS), case.generated(case.host, IDS, **static)),
        "transformers has no static cache for it",
    )
    found = case.generated(case.model, IDS, memory=case.memory, **static)
    same_texts(found, case.generated(case.model, IDS, memory=case.memory), "static cache")


def saved(case: Family) -> None:
    """Saved and loaded onto another host of the same weights, the same answers."""
    answer = case.logits(case.model, memory=case.memory)
    with tempfile.TemporaryDirectory() as folder:
        case.model.save_adapter(folder)
        other = case.another_host()
        other.load_state_dict(case.host.state_dict())
        near(case.logits(mmattn.load(other, folder), memory=case.memory), answer, 0.0, "loaded")


def learned(case: Family, loss: Callable[[], object] | None = None) -> Tensor:
    """The gradients of the adapter's weights after a backward pass; all must be there, and none of the host's."""
    for parameter in case.model.adapters.parameters():
        parameter.grad = None
    if loss is None:
        answer_of(case.model(**case.given(case.ids), memory=case.memory)).float().square().mean().backward()
    else:
        loss()
    found = {name: parameter.grad for name, parameter in case.model.adapters.named_parameters()}
    missing = [name for name, grad in found.items() if grad is None or not grad.isfinite().all()]
    assert not missing, f"no gradient, or no finite one: {missing[:3]}"
    assert all(parameter.grad is None for parameter in case.host.parameters()), "the host is given gradients"
    together = torch.cat([grad.flatten() for grad in found.values() if grad is not None])
    assert together.abs().max() > 0, "nothing is learned"
    return together


def gradients(case: Family) -> None:
    """Every weight of the adapter learns and none of the host's; recomputing layers gives the same."""
    host, model = case.host, case.model

    def loss(memory: mmattn.Memory | None, recompute: dict[str, Any]) -> None:
        model.train()
        if recompute:
            checkpoint(host, recompute["use_reentrant"])
        if recompute.get("use_reentrant"):
            host.enable_input_require_grads()
        try:
            torch.manual_seed(5)
            np.random.seed(5)  # which frames a speech encoder hides
            value = answer_of(model(**case.given(IDS), memory=memory)).float().square().mean()
            if value.requires_grad:
                value.backward()
        finally:
            if recompute.get("use_reentrant"):
                host.disable_input_require_grads()
            if recompute:
                without_checkpoints(host)
            model.eval()

    batch_norms = {name: value.clone() for name, value in host.named_buffers()}
    plain = learned(case, lambda: loss(case.memory, {}))
    if getattr(host, "supports_gradient_checkpointing", False):
        for reentrant in (False, True):
            how = {"use_reentrant": reentrant}
            why = f"alone, too, fails where layers are recomputed, use_reentrant={reentrant}"
            case.host_must(lambda how=how: loss(None, how), why)  # type: ignore[misc]
            again = learned(case, lambda how=how: loss(case.memory, how))  # type: ignore[misc]
            near(again, plain, CACHED, f"recomputed, use_reentrant={reentrant}")
    for name, value in host.named_buffers():  # of batch norms, which a host in training mode changes by itself
        value.copy_(batch_norms[name])


def copied(case: Family) -> None:
    """A deep copy answers as the original."""
    twin = adapted(copy.deepcopy(case.host))
    near(case.logits(twin, memory=case.memory), case.logits(case.model, memory=case.memory), 0.0, "the copy")


def unloaded(case: Family) -> None:
    """`unload` gives back the same object with the same answers and weights."""
    state = {name: value.clone() for name, value in case.host.state_dict().items()}
    assert case.model.unload() is case.host
    near(case.logits(case.host), case.alone, 1e-5, "unloaded")
    untouched = case.another_host().state_dict()
    assert list(state) == list(untouched), "other weights"
    changed = [name for name, value in untouched.items() if not torch.equal(state[name], value)]
    assert not changed or not torch.equal(case.alone, case.logits(case.host)), f"changed weights: {changed[:3]}"


CHECKS: dict[str, Callable[[Family], None]] = {
    "fresh": fresh,
    "memory by row": changes,
    "row without memory": empty_row,
    "row by row": rows,
    "names": names,
    "cache": with_cache,
    "padding": padding,
    "beams": beams,
    "static cache": static_cache,
    "save and load": saved,
    "deep copy": copied,
    "gradients": gradients,
    "unload": unloaded,
}
WRITING = ("cache", "padding", "beams", "static cache")
WORKS, HOST = "works", "host"


def outcomes(name: str, auto: Any, where: str | None = None, writes: bool = True) -> dict[str, str]:
    """For each check what became of it: "works"; "host: …", where the host itself cannot; "refused: …"; "wrong: …"."""
    try:
        case = Family(name, auto, where, writes)
    except Exception as error:
        return {"family": f"{HOST}: {_words(error)}"}
    try:
        found = {"family": WORKS, "path": getattr(case.model, "path", "")}
    except Exception as error:
        return {"family": outcome(error)}
    for title, check in CHECKS.items():
        if case.writes or title not in WRITING:
            found[title] = tried(check, case)
    return found


def tried(check: Callable[[Any], None], case: Any) -> str:
    """What became of one check."""
    try:
        check(case)
    except Exception as error:
        return outcome(error)
    return WORKS


def outcome(error: Exception) -> str:
    """A check or a family that failed: "host: …", "refused: …" or "wrong: …"."""
    kind = HOST if isinstance(error, HostCannot) else "refused" if isinstance(error, MmattnError) else "wrong"
    return f"{kind}: {_words(error)}"


def _words(error: BaseException) -> str:
    own = isinstance(error, (AssertionError, MmattnError, HostCannot))
    said = str(error) if own else f"{type(error).__name__}: {error}"
    return " ".join(said.split())[:300]

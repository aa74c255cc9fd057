"""What every diffusion model of diffusers must do with a memory, and the models that are tried."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import diffusers
import torch
from peft import LoraConfig
from torch import Tensor, nn

import mmattn
from mmattn.hosts.diffusion.guided_calls import CONDITIONAL_FIRST
from mmattn.hosts.diffusion.heads import SHARED
from mmattn.testing.case import rows_of, stir
from tests import tiny, tiny_transformers, tiny_unets, transformer_sizes
from tests.families import checks
from tests.families.building import MEMORY_DIM
from tests.families.checks import CACHED, Family, HostCannot, learned, near

#: Every transformer that diffusers denoises with.
NAMES = tuple(
    name
    for name in sorted(dir(diffusers))
    if name.endswith(("Model", "Transformer"))
    and ("Transformer" in name or "DiT" in name)
    and inspect.isclass(getattr(diffusers, name))
    and "ControlNet" not in name
)
_IDS = torch.tensor([[0], [1]])


class DiffusionFamily(Family):
    """A tiny diffusion transformer or UNet, an adapter, and a batch of two pictures with memories."""

    def __init__(self, name: str) -> None:
        if name not in (*transformer_sizes.NAMES, *tiny_unets.KINDS):
            raise HostCannot("no tiny sizes are known for it here")
        self.name, self.where, self.writes, self.ids = name, None, False, _IDS
        try:
            self.host = self.another_host()
        except Exception as error:
            raise HostCannot(str(error)) from error
        self.remember()

    def another_host(self) -> nn.Module:
        """A host of the same weights."""
        return tiny_transformers.make(self.name)

    def find(self) -> None:
        """Attach an adapter, and ask the untouched host."""
        torch.manual_seed(3)
        self.__dict__["model"] = model = mmattn.attach(self.host, mmattn.DecoupledAdapter(memory_dim=MEMORY_DIM))
        self.batch = tiny_transformers.given(model, 2, seed=5)
        self.alone = self.logits(self.another_host())

    def open(self) -> None:
        """Have the adapter add something."""
        adapter = self.model.adapter("default")
        stir(adapter)
        with torch.no_grad():
            for layer in adapter.layers:
                adapter.attention(layer).v_proj.weight.mul_(4)

    def given(self, ids: Tensor) -> dict[str, Any]:
        """The arguments for some pictures of the batch."""
        chosen: dict[str, Any] = rows_of(self.batch, ids[:, 0], 2)
        shared = {name: value for name, value in self.batch.items() if name in SHARED}
        rows = ids[:, 0]
        lists = {
            name: [one[rows] for one in value] if isinstance(value[0], Tensor) else [value[row] for row in rows]
            for name, value in self.batch.items()
            if isinstance(value, list)
        }
        return chosen | shared | lists

    @torch.no_grad()
    def logits(self, model: Any, ids: Tensor = _IDS, **given: Any) -> Tensor:
        """What is predicted of some pictures."""
        answer: Tensor = model(**self.given(ids), **given)[0]
        return answer


def scaled(case: DiffusionFamily) -> None:
    """adapter_scale 0 is the host bit for bit, as a number, by row and by block; by step it is that of the step."""
    model, memory = case.model, case.memory
    want = case.logits(model, memory=memory)
    for nothing in (0.0, torch.zeros(2), {model.layer_names[0]: 0.0}, lambda time: 0.0):
        near(case.logits(model, memory=memory, adapter_scale=nothing), case.alone, 0.0, f"{nothing}")
    near(case.logits(model, memory=memory, adapter_scale=lambda time: 1.0), want, 0.0, "by step")
    half = case.logits(model, memory=memory, adapter_scale=torch.tensor([1.0, 0.0]))
    near(half[1], case.alone[1], 0.0, "row 1 of scale 0")
    near(half[0], want[0], 1e-5, "row 0 of scale 1")


def by_pixel(case: DiffusionFamily) -> None:
    """A map of ones, of any size, is the number 1; of zeros the host bit for bit."""
    grid = case.model.grid_of(case.given(_IDS))
    if grid is None:
        raise HostCannot("it is not told how its tokens lie in a picture")
    want = case.logits(case.model, memory=case.memory)
    for shape in ((2, *grid[1:]), (2, *grid), (2, 3 * grid[1], 3 * grid[2])):
        ones = case.logits(case.model, memory=case.memory, adapter_scale=torch.ones(shape))
        near(ones, want, 1e-5, f"ones {shape}")
        zeros = case.logits(case.model, memory=case.memory, adapter_scale=torch.zeros(shape))
        near(zeros, case.alone, 0.0, f"zeros {shape}")
        half = torch.zeros(shape)
        half[1] = 1
        found = case.logits(case.model, memory=case.memory, adapter_scale=half)
        near(found[0], case.alone[0], 0.0, f"zeros of row 0 {shape}")
        near(found[1], want[1], 1e-5, f"ones of row 1 {shape}")


def guided(case: DiffusionFamily) -> None:
    """Twice the rows of the memory are guidance: the unconditional half sees none, the other its own."""
    conditional, unconditional = slice(2, 4), slice(0, 2)
    if case.name in CONDITIONAL_FIRST:
        conditional, unconditional = unconditional, conditional
    both = case.given(torch.cat([_IDS, _IDS]))
    if "class_labels" in both:
        both["class_labels"][unconditional] = case.host.config.num_embeds_ada_norm
    rows, grid = torch.tensor([0.5, 2.0]), case.model.grid_of(case.given(_IDS))
    scales = [(1.0, 1.0), (rows, rows.repeat(2)), (lambda time: rows, lambda time: rows.repeat(2))]
    if grid is not None:
        pixels = torch.linspace(0, 2, 2 * grid[1] * grid[2]).reshape(2, *grid[1:])
        scales.append((pixels, pixels.repeat(2, 1, 1)))
    for scale, twice in scales:
        with torch.no_grad():
            alone = case.host(**both)[0]
            want = case.model(**both, memory=case.memory[[0, 1, 0, 1]], adapter_scale=twice)[0]
            with case.model.condition(case.memory, adapter_scale=scale, guided=True):
                found = case.host(**both)[0]
        near(found[unconditional], alone[unconditional], 1e-5, "the unconditional half")
        near(found[conditional], want[conditional], CACHED, "the conditional half")


def steps(case: DiffusionFamily) -> None:
    """Keys and values of a memory are computed once for all steps."""
    adapter = case.model.adapter("default")
    blocks = [adapter.attention(layer) for layer in adapter.layers]
    with tiny.counting(*(block.k_proj for block in blocks)) as ran, case.model.condition(case.memory):
        answers = [case.logits(case.host) for _ in range(3)]
    assert len(ran) == len(blocks), f"{len(ran)} projections in three steps of {len(blocks)} layers"
    near(answers[2], answers[0], 0.0, "the third step")


def lora(case: DiffusionFamily) -> None:
    """A LoRA on the host's attention: the adapter acts through it, and unfreezing is peft's."""
    targets = ["to_q", "to_k", "to_v", "to_out.0"]
    host = case.another_host()
    if not hasattr(host, "add_adapter"):
        raise HostCannot("diffusers puts no LoRA on it")
    try:
        host.add_adapter(LoraConfig(r=2, target_modules=targets, init_lora_weights=False))
    except ValueError as error:
        raise HostCannot(f"diffusers puts no LoRA on its attention: {error}") from error
    own = case.logits(host)
    model = mmattn.attach(host, mmattn.DecoupledAdapter(memory_dim=MEMORY_DIM))
    near(case.logits(model, memory=case.memory), own, 0.0, "fresh beside a LoRA")
    model.adapter("default").load_state_dict(case.model.adapter("default").state_dict())
    apart = (case.logits(model, memory=case.memory) - own).abs().max() / own.abs().max()
    assert apart > 1e-3, f"memory changes too little beside a LoRA: {apart}"
    near(case.logits(model), own, 0.0, "without a memory")


def gradients(case: DiffusionFamily) -> None:
    """Every weight of the adapter learns and none of the host's; recomputing layers gives the same."""
    host, model = case.host, case.model

    def backward() -> None:
        given = case.given(_IDS)
        name = model.picture_name
        case.another_host()(**given | {name: given[name].clone().requires_grad_()})[0].sum().backward()

    case.host_must(backward, "alone, too, gives no gradients on a CPU")
    plain = learned(case)
    if getattr(host, "_supports_gradient_checkpointing", False):
        host.enable_gradient_checkpointing()
        host.train()
        try:
            untouched = case.another_host().train()
            untouched.enable_gradient_checkpointing()
            case.host_must(lambda: untouched(**case.given(_IDS)), "alone, too, fails where layers are recomputed")
            near(learned(case), plain, CACHED, "recomputed")
        finally:
            host.disable_gradient_checkpointing()
            host.eval()


CHECKS: dict[str, Callable[[Any], None]] = {
    "fresh": checks.fresh,
    "memory by row": checks.changes,
    "row without memory": checks.empty_row,
    "row by row": checks.rows,
    "scale": scaled,
    "by pixel": by_pixel,
    "guidance": guided,
    "steps": steps,
    "LoRA": lora,
    "save and load": checks.saved,
    "deep copy": checks.copied,
    "gradients": gradients,
    "unload": checks.unloaded,
}


def outcomes(name: str) -> dict[str, str]:
    """For each check what became of it, as `tests.families.checks.outcomes` says it."""
    try:
        case = DiffusionFamily(name)
    except Exception as error:
        return {"family": checks.outcome(HostCannot(str(error)))}
    try:
        case.find()
    except Exception as error:
        return {"family": checks.outcome(error)}
    return {"family": checks.WORKS} | {title: checks.tried(check, case) for title, check in CHECKS.items()}

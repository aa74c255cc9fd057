"""Make the small language model of `assets/lm`: a byte-level BPE tokenizer and a Llama of 1.4 million parameters.

It learns plain English about flowers from sentences generated here: facts of the 48 species of flora and the twelve of
the photographs in many wordings, questions and answers, a glossary, and sentences about no species in particular.
The descriptions the recipe is measured on are kept out: only with every species name struck out do they take part.

    python assets/lm/make_lm.py --seed 0
"""

from __future__ import annotations

import argparse
import json
import math
import re
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from mmattn.recipes import find_recipe, load_recipe

HERE = Path(__file__).parent
VISION = find_recipe("vision").folder
flora = load_recipe(Path(__file__).resolve().parents[1] / "flowers", "flora")
END, PAD = "<|endoftext|>", "<|pad|>"
CONTEXT = 96
NUMBERS = [
    *("many", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty", "twenty-one"),
    *("twenty-two", "twenty-three", "twenty-four", "twenty-five", "twenty-six"),
]

ABOUT = (
    "{The} flowers in {season} {place}.",
    "{The} is a {season} flower with {looks}.",
    "{The} has {looks}.",
    "{The} has {leaves}, and its flowers are {colour}.",
    "{The} grows {place} and has {leaves}.",
    "{The} grows {place}, has {leaves} and opens in {season} with {looks}.",
    "{The} belongs to {season}: you see {looks} {place}.",
    "{The} is {colour}, with a {centre} centre, and blooms in {season}.",
    "{The} reaches a height of about {height} centimetres {place}.",
    "{The}, which botanists call {latin}, has {looks}.",
    "The latin name of {the} is {latin}.",
    "{latin} is the latin name of {the}, a {colour} flower.",
    "You can tell {the} by its {colour} flowers: {looks}.",
    "If you see {looks} {place}, you have found {the}.",
    "A walk in {season} {place} may lead you to {the}, with {looks}.",
    "By {season} {the} is in bloom {place}, with {looks}.",
    "It is {season}, and {place} {the} opens its flowers: {looks}.",
    "Of all {colour} flowers, {the} is known by {looks}.",
    "The picture shows {looks}; it is {a}.",
    "In the picture there is {a}, a {colour} flower of {season}.",
    "Look at this: {looks}. It must be {the}.",
    "{Looks} and {leaves} are the marks of {the}.",
    "{Looks}, seen in {season} {place}, belong to {the}.",
    "With its {leaves} and {colour} flowers {the} is at home {place}.",
    "{Place}, where {the} grows, {season} brings {looks}.",
    "Among the flowers of {season}, {the} has {looks}.",
    "In {season} the bees visit {the} {place} for its {colour} flowers.",
    "People who live where {the} grows know {looks} from every {season}.",
    "Count the petals of {the}: there are {petals}, and they are {colour}.",
    "The flower of {the} is {colour} and has {petals} petals around a {centre} centre.",
    "Here is {a}. It has {looks}, and {leaves}.",
    "This flower has {looks} and comes out in {season}; we call it {the}.",
    "Question: when does {the} flower? Answer: in {season}.",
    "Question: where does {the} grow? Answer: {place}.",
    "Question: what colour is {the}? Answer: {colour}.",
    "Question: what does {the} look like? Answer: {looks}, with {leaves}.",
    "Question: which flower has {looks}? Answer: {the}.",
    "Question: which flower grows {place} and is {colour}? Answer: {the}.",
    "{name}: {looks}; flowers in {season}; {place}.",
    "{name}, {latin}: a {colour} flower of the {habitat}.",
)

ANY = (
    "In {season} a plant with {petals} {colour} petals around a {centre} centre grows {place}.",
    "A {colour} flower with {petals} petals and {leaves} opens {place} in {season}.",
    "{Petals} {colour} petals surround a {centre} eye, above {leaves}.",
    "Here you see {petals} {colour} petals around a {centre} middle: a flower of {season} that grows {place}.",
    "This is a {colour} flower: it has {petals} petals and is found {place} in {season}.",
    "Look for {petals} {colour} rays around a {centre} disc {place}.",
    "With {petals} {colour} tepals and a {centre} heart, it is a {season} flower that grows {place}.",
    "The meadow in {season} is full of {colour} flowers with {petals} petals and {centre} centres.",
    "Some {colour} flowers grow {place}, others only {place2}.",
    "When {season} comes, {colour} and {colour2} flowers open {place}.",
    "Not every {colour} flower has {petals} petals; some have {leaves}.",
    "Flowering in {season}, the plant shows {petals} {colour} petals, with {leaves}.",
)

GENERAL = (
    "A petal is one of the coloured leaves of a flower; together the petals make the corolla.",
    "Sepals protect the bud, and in some flowers they are as bright as petals.",
    "Where sepals and petals look the same, botanists call them tepals.",
    "A daisy head is made of many small flowers: a disc in the middle and rays around it.",
    "Rays are the long outer florets of a head; the disc is the button in the middle.",
    "Stamens bear the pollen, and the stigma receives it.",
    "Anthers are the tips of the stamens; they are often yellow.",
    "A spike carries its flowers along one stem, opening from the bottom upwards.",
    "An umbel is like an umbrella: thin spokes from one point, each with tiny flowers at its end.",
    "A bell hangs its mouth down, so that rain does not reach the nectar.",
    "A trumpet is a long tube that opens wide at the end.",
    "A spathe is one large bract that wraps around a finger of tiny flowers.",
    "A bract is a leaf below a flower, and sometimes it is coloured like a petal.",
    "A rosette is a ring of leaves close to the ground.",
    "A whorl is a ring of three or more leaves at one point of a stem.",
    "Lobed leaves are cut part of the way to the middle; divided leaves are cut all the way.",
    "Feathery leaves are cut into many fine threads, as in dill or fennel.",
    "A bulb stores food under the ground, so that the flower can open early in spring.",
    "Bees visit blue and purple flowers, butterflies like pink ones, and moths come to white ones at night.",
    "Spring flowers of the woodland open before the trees are in leaf and take the light.",
    "Summer meadows hold more kinds of flowers than any garden.",
    "In autumn the last flowers feed the last bees of the year.",
    "In winter few flowers open, and those that do stay close to the ground.",
    "Marshes and ponds have flowers of their own, which stand with their feet in water.",
    "Mountain flowers are short, because of the wind, and hairy, because of the cold.",
    "Cornfields were once full of red, blue and yellow weeds.",
    "Chalk grassland is dry and poor, and that is why so many flowers can live there.",
    "Hedgerows shelter climbing plants with thorns and berries.",
    "To know a flower, look at its colour, count its petals, and note the leaves, the place and the season.",
    "Do not pick wild flowers; take a picture and leave the seed for the next year.",
)
STRUCK = ("this flower", "this plant", "the flower", "the plant", "this wild flower")


def facts() -> list[dict[str, str]]:
    """The facts of all species, drawn and photographed, as the words that templates take."""
    records: list[dict[str, str]] = []
    for one in flora.species():
        keys = ("name", "the", "a", "latin", "colour", "centre", "season", "habitat", "looks", "leaves", "place")
        records.append(
            {key: getattr(one, key) for key in keys} | {"petals": NUMBERS[one.petals], "height": str(one.height)}
        )
    photographs = json.loads((VISION / "flowers12_descriptions.json").read_text(encoding="utf-8"))
    for one in photographs.values():
        name, short = one["name"], {key: one[key] for key in ("name", "latin", "centre", "looks", "leaves", "place")}
        article = "an" if name[0] in "aeiou" else "a"
        records.append(
            short | {"the": f"the {name}", "a": f"{article} {name}", "petals": NUMBERS[one["petals"]]}
            | {key: one["attributes"][key] for key in ("colour", "season", "habitat")} | {"height": "thirty"}
        )  # fmt: skip
    return records


def all_descriptions() -> list[tuple[str, str]]:
    """Every (name, description) the recipe may be measured on."""
    photographs = json.loads((VISION / "flowers12_descriptions.json").read_text(encoding="utf-8"))
    pairs = [(one.name, text) for one in flora.species() for text in flora.descriptions(one)]
    return pairs + [(one["name"], text) for one in photographs.values() for text in one["descriptions"]]


def strike(name: str, text: str, rng: Random) -> str:
    """`text` with its species name (and article) replaced by words that fit any flower."""
    words = rng.choice(STRUCK)
    found = re.compile(rf"\b(?:the |an |a )?{re.escape(name)}\b", re.IGNORECASE)
    return found.sub(lambda hit: words.capitalize() if hit.start() == 0 else words, text)


def capital(text: str) -> str:
    return text[0].upper() + text[1:]


def corpus(lines: int, rng: Random) -> Iterator[str]:
    """`lines` sentences: three fifths about species, the rest about none."""
    records, described = facts(), all_descriptions()
    for _ in range(lines):
        one, part = dict(rng.choice(records)), rng.random()
        if part < 0.6:
            one |= {key.capitalize(): capital(one[key]) for key in ("the", "looks", "place")}
            yield rng.choice(ABOUT).format(**one)
        elif part < 0.75:
            keys = ("season", "petals", "colour", "centre", "place", "leaves")
            mixed = {key: rng.choice(records)[key] for key in keys}
            mixed |= {"place2": rng.choice(records)["place"], "colour2": rng.choice(records)["colour"]}
            yield rng.choice(ANY).format(**mixed, Petals=capital(mixed["petals"]))
        elif part < 0.95:
            name, text = rng.choice(described)
            yield strike(name, text, rng)
        else:
            yield rng.choice(GENERAL)


def train_tokenizer(texts: list[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer: any text goes in and comes back unchanged."""
    bare = Tokenizer(models.BPE())
    bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bare.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[END, PAD], initial_alphabet=alphabet, show_progress=False
    )
    bare.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bare, bos_token=END, eos_token=END, pad_token=PAD, model_max_length=CONTEXT
    )


def build(vocabulary: int, end: int, pad: int) -> LlamaForCausalLM:
    """The model: six layers of width 128, tied embeddings."""
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=128, intermediate_size=352, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=CONTEXT, tie_word_embeddings=True, bos_token_id=end,
        eos_token_id=end, pad_token_id=pad,
    )  # fmt: skip
    return LlamaForCausalLM(config)


@torch.no_grad()
def perplexity(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> float:
    """Per token, over `texts`, each begun and closed with the end token."""
    model.eval()
    end, pad, nats, tokens = tokenizer.eos_token_id, tokenizer.pad_token_id, 0.0, 0
    for first in range(0, len(texts), 48):
        rows = [[end, *ids, end] for ids in tokenizer(texts[first : first + 48])["input_ids"]]
        longest = max(map(len, rows))
        ids = torch.tensor([row + [pad] * (longest - len(row)) for row in rows])
        labels = ids.masked_fill(ids == pad, -100)
        count = int((labels[:, 1:] != -100).sum())
        loss = model(input_ids=ids, attention_mask=(ids != pad).long(), labels=labels).loss
        nats, tokens = nats + loss.item() * count, tokens + count
    return math.exp(nats / tokens)


CARD = """# A small language model of flowers

Llama shape, {parameters:,} parameters, byte-level BPE of {vocabulary} tokens, context {context}; stored in float16,
loaded in float32. It writes plain English about flowers and has never seen a picture.

- made by: `assets/lm/make_lm.py --seed {seed} --steps {steps}` in {seconds:.0f} s on {threads} CPU thread(s)
- text: {lines:,} sentences generated by that script ({tokens:,} tokens); the recipe's descriptions are not among them,
  except with the species name struck out
- perplexity per token: {held:.2f} on held-out generated sentences, {described:.2f} on the recipe's descriptions
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=900)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--lines", type=int, default=60_000)
    parser.add_argument("--vocabulary", type=int, default=2048)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()

    torch.set_num_threads(given.threads)
    torch.manual_seed(given.seed)
    began = time.time()
    texts = list(corpus(given.lines, Random(given.seed)))
    known = set(texts)
    held = [text for text in corpus(4000, Random(given.seed + 1)) if text not in known][:300]
    tokenizer = train_tokenizer([*texts, *(text for _, text in all_descriptions())], given.vocabulary)
    end = int(tokenizer.convert_tokens_to_ids(END))
    stream = torch.tensor([id for ids in tokenizer(texts)["input_ids"] for id in (end, *ids)])
    print(f"{len(texts)} sentences, {len(stream)} tokens, {len(held)} held out", flush=True)

    model = build(len(tokenizer), end, int(tokenizer.convert_tokens_to_ids(PAD)))
    optimiser = torch.optim.AdamW(model.parameters(), lr=given.learning_rate, betas=(0.9, 0.98), weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, given.learning_rate, given.steps, pct_start=0.06)
    picks = torch.Generator().manual_seed(given.seed)
    model.train()
    for step in range(given.steps):
        starts = torch.randint(0, len(stream) - CONTEXT, (given.batch, 1), generator=picks)
        ids = stream[starts + torch.arange(CONTEXT)]
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        optimiser.zero_grad(set_to_none=True)
        if step % 50 == 0 or step == given.steps - 1:
            print(f"step {step} loss {loss.item():.3f} {time.time() - began:.0f} s", flush=True)

    figures = {
        "held": perplexity(model, tokenizer, held),
        "described": perplexity(model, tokenizer, [text for _, text in all_descriptions()]),
        "parameters": sum(p.numel() for p in model.parameters()), "vocabulary": len(tokenizer), "context": CONTEXT,
        "threads": given.threads, "seed": given.seed, "steps": given.steps, "seconds": time.time() - began,
        "lines": len(texts), "tokens": len(stream),
    }  # fmt: skip
    print(figures)
    given.out.mkdir(parents=True, exist_ok=True)
    model.half().save_pretrained(given.out)
    tokenizer.save_pretrained(given.out)
    (given.out / "model.safetensors").chmod(0o644)  # written as a private temporary file
    settings = json.loads((given.out / "config.json").read_text(encoding="utf-8"))
    settings["dtype"] = "float32"  # small on disk, exact arithmetic when loaded
    (given.out / "config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    (given.out / "README.md").write_text(CARD.format(**figures), encoding="utf-8")


if __name__ == "__main__":
    main()

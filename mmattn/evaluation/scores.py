"""Scores by the libraries that papers use: texts by sacrebleu, rankings by ir_measures, images by torchmetrics."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mmattn.errors import ConfigError, NonFiniteError, ShapeError, check_choice, import_extra
from mmattn.retrieval.hits import Hits
from mmattn.tokenization import check_text


def text_scores(
    texts: Sequence[str], references: Sequence[str | Sequence[str]], metrics: Sequence[str] = ("bleu", "chrf")
) -> dict[str, float]:
    """Return scores of captions, translations or transcripts, each over all texts together.

    "bleu" and "chrf" are those of sacrebleu, from 0 to 100. "wer" is the word error rate against the first reference, 0
    at best.

    Args:
        texts: generated texts.
        references: for each text one reference, or several.
        metrics: of "bleu", "chrf" and "wer".

    Raises:
        ShapeError: another number of references than of texts, or none.
        TextError: what is no text.
        ConfigError: an unknown metric, or a text without a reference.
        MissingExtraError: the library of a metric is not installed.

    >>> text_scores(["a red rose"], [["a red rose", "a rose in red"]], ["bleu", "chrf", "wer"])
    {'bleu': 0.0, 'chrf': 100.0, 'wer': 0.0}
    """
    written = check_text(texts)
    several = [check_text(one) for one in references]
    if len(several) != len(written) or not written:
        raise ShapeError(f"{len(written)} texts and {len(several)} references were given: give one of each, at least")
    for number, one in enumerate(several):
        if not one:
            raise ConfigError(f"text {number} has no reference: leave it out, or give one")
    scores = {}
    for metric in metrics:
        if check_choice("metrics", metric, ("bleu", "chrf", "wer")) == "wer":
            rate = import_extra("torchmetrics.functional.text", "metrics").word_error_rate
            scores[metric] = float(rate(written, [one[0] for one in several]))
        else:
            # The first reference of each text, the second of each, …, or None.
            longest = max(map(len, several))
            streams = [[one[place] if place < len(one) else None for one in several] for place in range(longest)]
            score = getattr(import_extra("sacrebleu", "metrics"), f"corpus_{metric}")
            scores[metric] = float(score(written, streams).score)
    return scores


def retrieval_scores(
    hits: Hits | Sequence[Sequence[Hashable | None]],
    relevant: Sequence[Sequence[Hashable] | Mapping[Hashable, int]],
    metrics: Sequence[str] = ("R@10", "nDCG@10", "RR@10"),
) -> dict[str, float]:
    """Return the scores of the hits of b queries by metric, as means over the queries.

    Args:
        hits: `Hits` with ids, or for each query the retrieved ids, best first; None is no entry.
        relevant: for each query the relevant ids, or a mapping from them to grades, whole numbers from 0.
        metrics: names of `ir_measures`: "R@10" (recall), "nDCG@10", "RR@10" (its mean is MRR), "AP", "P@5",
            "Success@1", …

    Raises:
        ShapeError: another number of queries than of relevant entries.
        ConfigError: an unknown metric, or an entry twice in the hits of a query.
        MissingExtraError: ir_measures is not installed.

    >>> retrieval_scores([["a", "b"], ["c", "d"]], [["b"], ["x"]], ["R@2", "RR"])
    {'R@2': 0.5, 'RR': 0.25}
    """
    ids = (hits.ids or []) if isinstance(hits, Hits) else hits
    rows = [[one for one in line if one is not None] for line in ids]
    if len(rows) != len(relevant):
        raise ShapeError(f"hits of {len(rows)} queries were given, and relevant entries of {len(relevant)}")
    run, grades = {}, {}
    for number, (line, right) in enumerate(zip(rows, relevant, strict=True)):
        # Scores fall with the rank: ties would be broken by the ids.
        run[str(number)] = {str(one): float(len(line) - place) for place, one in enumerate(line)}
        if len(run[str(number)]) < len(line):
            raise ConfigError(f"the hits of query {number} contain an entry twice: {line[:10]}")
        graded = right if isinstance(right, Mapping) else dict.fromkeys(right, 1)
        grades[str(number)] = {str(one): int(grade) for one, grade in graded.items()}
    library = import_extra("ir_measures", "metrics")
    try:
        measures = {name: library.parse_measure(name) for name in metrics}
    except (ValueError, NameError, SyntaxError) as error:
        raise ConfigError(f"a metric of ir_measures is spelled R@10, nDCG@10, RR@10, AP, …; got {metrics}") from error
    sums = dict.fromkeys(measures.values(), 0.0)
    for metric in library.iter_calc(list(sums), grades, run):
        sums[metric.measure] += float(metric.value)
    return {name: sums[measure] / max(1, len(rows)) for name, measure in measures.items()}


def frechet_distance(real: Tensor, generated: Tensor) -> float:
    """Return the Fréchet distance between two sets of features, as normal distributions (arXiv 1706.08500, equation 6).

    It is the FID of papers only with the features of the Inception network and as many images; other features, such as
    `encoder(images).tokens.mean(1)`, have another scale.

    Args:
        real: (n, d), features of real images.
        generated: (m, d), features of generated images.

    Raises:
        ShapeError: not (n, d), two widths d, or fewer than two of each.
        NonFiniteError: NaN or infinity.
        MissingExtraError: torchmetrics is not installed.

    >>> features = torch.randn(200, 3, generator=torch.Generator().manual_seed(0))
    >>> round(frechet_distance(features, features + 2), 3)
    12.0
    """
    for name, features in (("real", real), ("generated", generated)):
        if features.dim() != 2 or len(features) < 2 or features.shape[1] != real.shape[-1]:
            raise ShapeError(
                f"features must be (n, d) of at least two images, of one width; got {name} {tuple(features.shape)} "
                f"beside {tuple(real.shape)}"
            )
        if not torch.isfinite(features).all():
            raise NonFiniteError(f"features of {name} images have NaN or infinity")
    library = import_extra("torchmetrics.image.fid", "metrics")
    network: Any = nn.Identity()  # torchmetrics passes features through the network that it expects
    network.num_features = real.shape[1]
    distance = library.FrechetInceptionDistance(feature=network, normalize=True)
    distance.set_dtype(torch.float64)
    distance.update(real.double().cpu(), real=True)
    distance.update(generated.double().cpu(), real=False)
    return float(distance.compute())

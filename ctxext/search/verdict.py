"""What a search says of its best setting: differences to the defaults on held-out text, and a verdict in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ctxext.evaluation.compare import Entry
from ctxext.evaluation.statistics import clustered_mean, holm
from ctxext.search.objective import PARTS, Sums, Texts, sums

if TYPE_CHECKING:
    from ctxext.config import SearchSection


def comparison(
    entries: Sequence[Entry],
    failed: Mapping[str, str],
    title: str,
    texts: Texts,
    section: SearchSection,
    trained: int,
    *,
    noise: float,
    is_default: bool,
) -> dict[str, Any]:
    """Differences of the best setting to each of the defaults, by part, with intervals over documents.

    ``entries``: the best setting, then the defaults; ``failed``: those that couldn't be measured before, and why.
    Means that differ by less than ``noise`` are the same.
    """
    measured = {
        entry.label: [
            sums(record, keyed, texts.lengths, section.last, trained)
            for record, keyed in zip(entry.losses[texts.longest], texts.keyed, strict=True)
        ]
        for entry in entries
        if entry.losses
    }
    rows: list[dict[str, Any]] = []
    for entry in entries[1:]:
        row: dict[str, Any] = {"against": entry.label, "reason": entry.reasons.get("perplexity")}
        if title in measured and entry.label in measured:
            for part in PARTS:
                row[part] = _difference(measured[title], measured[entry.label], part)
        rows.append(row)
    rows += [{"against": label, "reason": reason} for label, reason in failed.items()]
    reason = entries[0].reasons.get("perplexity") if entries else None
    for part in PARTS:
        differences = [row[part] for row in rows if part in row]
        tested = [one for one in differences if one["p"] is not None and abs(one["difference"]) >= noise]
        for difference, p in zip(tested, holm([one["p"] for one in tested]), strict=True):
            difference["p_holm"] = p
    losses = {
        label: {part: sum(one[part][0] for one in found) / sum(one[part][1] for one in found) for part in PARTS}
        for label, found in measured.items()
    }
    return {
        "losses": losses,
        "differences": rows,
        "reason": reason,
        "noise_floor_nll": noise,
        "verdict": verdict(title, rows, len(texts.keyed), is_default=is_default, reason=reason),
    }


def _difference(ours: Sequence[Sums], theirs: Sequence[Sums], part: str) -> dict[str, Any]:
    """Mean difference in loss on the same tokens, in nats; a document is one cluster."""
    differences = [one[part][0] - other[part][0] for one, other in zip(ours, theirs, strict=True)]
    estimate = clustered_mean(differences, [one[part][1] for one in ours])
    return {
        "difference": estimate.value,
        "ci95": estimate.ci95,
        "p": estimate.p,
        "interval": estimate.method,
        "documents": estimate.clusters,
    }


def verdict(
    title: str,
    rows: Sequence[Mapping[str, Any]],
    documents: int,
    *,
    is_default: bool = False,
    reason: str | None = None,
) -> str:
    """Whether the best setting beats the defaults on held-out text and prompts, in one plain sentence.

    ``reason``: why the best setting couldn't be measured there, if it couldn't.
    """
    if reason is not None:
        return f"whether {title} beats the defaults can't be told: it could not be measured on held-out text ({reason})"
    if is_default:
        return f"the search found nothing that beats the defaults on its own text: the best setting is {title!r}"
    unmeasured = [row["against"] for row in rows if "text" not in row]
    rows = [row for row in rows if "text" in row]
    end = f" ({', '.join(unmeasured)} could not be measured)" if unmeasured else ""
    if not rows:
        return f"{title} is the best setting found; there is nothing to compare it with{end}"
    if documents == 1:
        return (
            f"whether {title} beats the defaults can't be told: there is one held-out document, and intervals are over "
            "documents"
        )
    judged = {row["against"]: {part: judge(row[part]) for part in ("text", "passkey")} for row in rows}
    if all(word == "better" for words in judged.values() for word in words.values()):
        return f"{title} beats the defaults on held-out text and prompts{end}"
    against = "; ".join(
        f"against {name} text {words['text']}, prompts {words['passkey']}" for name, words in judged.items()
    )
    return (
        f"{title} does not beat the defaults on both text and prompts, within what the intervals allow: {against}{end}"
    )


def judge(difference: Mapping[str, Any]) -> str:
    """better, worse or undecided: by the interval, and by the p value that is raised for the number of differences."""
    ci95 = difference["ci95"]
    if ci95 is None or difference.get("p_holm", 1.0) >= 0.05 or ci95[0] <= 0 <= ci95[1]:
        return "undecided"
    return "better" if difference["difference"] < 0 else "worse"

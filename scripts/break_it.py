"""Break the package on purpose, one fault at a time, and see whether the tests notice.

    .venv/bin/python scripts/break_it.py [WORD...]

Each fault (or each whose name has one of the words) is applied to a copy of the repository. A fault that the tests
don't notice makes the exit status 1.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent


class Fault(NamedTuple):
    """A piece of code, what to put in its place, and the tests that have to fail."""

    name: str
    file: str
    code: str
    broken: str
    tests: tuple[str, ...]


CORE = tuple(f"tests/test_{name}.py" for name in ("rope", "methods", "patching", "saving", "precision", "running"))
ATTENTION = tuple(
    f"tests/test_{name}.py" for name in ("partition", "attention", "caches", "gradients", "attention_inputs", "saving")
)
EVALUATION = tuple(
    f"tests/test_{name}.py" for name in ("protocols", "records", "statistics", "positions", "scoring", "perplexity")
)
AUTOPATCH = ("tests/test_autopatch.py",)
TRAINING = tuple(f"tests/test_{name}.py" for name in ("blocks", "loss", "training"))
RUNS = tuple(f"tests/test_{name}.py" for name in ("passkey", "ruler_tasks", "runs", "compare"))
PLANS = ("tests/test_planning.py", "tests/test_memory.py")
FAULTS = (
    Fault(
        "a plan rounds factors down",
        "ctxext/planning.py",
        "-(-100 * target // trained)",
        "(100 * target // trained)",
        PLANS,
    ),
    Fault("a plan forgets cached values", "ctxext/memory.py", "return 2 * model.key", "return model.key", PLANS),
    Fault(
        "a plan forgets the layer that checkpointing computes again",
        "ctxext/memory.py",
        "again = max(dense, sparse) if checkpointing else 0",
        "again = 0",
        PLANS,
    ),
    Fault("YaRN's ramp runs the other way", "ctxext/methods/yarn.py", "kept = 1 - (", "kept = 0 + (", CORE),
    Fault(
        "a model's own base is lost",
        "ctxext/families.py",
        'theta = float(parameters["rope_theta"])',
        "theta = 500_000.0",
        CORE,
    ),
    Fault(
        "frequencies are a buffer that casts round",
        "ctxext/rotary.py",
        "self.inv_freq = self._exact.to(device, copy=True)",
        "self.inv_freq = fn(self.inv_freq)",
        CORE,
    ),
    Fault(
        "angles are computed in the hidden states' dtype",
        "ctxext/rope.py",
        "position_ids[..., None].to(torch.float32) * inv_freq",
        "position_ids[..., None].to(dtype) * inv_freq.to(dtype)",
        CORE,
    ),
    Fault(
        "the attention factor is applied twice",
        "ctxext/rope.py",
        "cos = angles.cos() * attention_factor",
        "cos = angles.cos() * attention_factor**2",
        CORE,
    ),
    Fault(
        "the shared config is edited in place",
        "ctxext/patching.py",
        "extended = copy.deepcopy(config)",
        "extended = config",
        CORE,
    ),
    Fault(
        "perplexity averages the means of documents",
        "ctxext/evaluation/metrics.py",
        "nll = math.fsum(nll_sum) / total if total else None",
        "nll = sum(x / n for x, n in zip(nll_sum, tokens)) / len(tokens) if total else None",
        ("tests/test_perplexity.py", "tests/test_metrics.py"),
    ),
    Fault(
        "partial results are merged without their weights",
        "ctxext/attention/engine.py",
        "(other_lse - total).exp()[..., None]), total",
        "(other_lse - other_lse).exp()[..., None]), total",
        ATTENTION,
    ),
    Fault(
        "dual chunks reach chunk_size, as in the authors' code",
        "ctxext/methods/dca.py",
        "turn = (rest + self.period).clamp(max=self.chunk_size - 1) - rest",
        "turn = (rest + self.period).clamp(max=self.chunk_size) - rest",
        ATTENTION,
    ),
    Fault(
        "gradients forget the factor on the scores",
        "ctxext/attention/engine.py",
        "block.gain, back=True, exact=block.exact)",
        "None, back=True, exact=block.exact)",
        ATTENTION,
    ),
    Fault(
        "triangles read backwards are read forwards",
        "ctxext/attention/engine.py",
        "if call.backwards else (query, key, value)",
        "if False else (query, key, value)",
        ATTENTION,
    ),
    Fault(
        "the keys' gradient isn't turned back",
        "ctxext/attention/engine.py",
        "rotate(turned_grad, turn, block.inv_freq, back=True, exact=block.exact)",
        "turned_grad",
        ATTENTION,
    ),
    Fault(
        "a band's two triangles may overlap",
        "ctxext/attention/bands.py",
        "rooms = [int(width[start]) - 1 for",
        "rooms = [int(width[start]) + 1 for",
        ATTENTION,
    ),
    Fault(
        "borders that cross a period of the rotary module are overlooked",
        "ctxext/attention/bands.py",
        "(starts < begin).long(), (stops <= begin).long()]",
        "]",
        ATTENTION,
    ),
    Fault(
        "Self-Extend's shift isn't floored when the group doesn't divide the window",
        "ctxext/methods/self_extend.py",
        "shift=window - window // group",
        "shift=window - -(-window // group)",
        (*ATTENTION, "tests/test_methods.py"),
    ),
    Fault(
        "sinks of StreamingLLM are seen at their true distance",
        "ctxext/methods/streaming_llm.py",
        "partial(torch.clamp, max=self.n_sink + window - 1)",
        "partial(torch.clamp, max=2**40)",
        (*ATTENTION, "tests/test_methods.py"),
    ),
    Fault(
        "a streaming cache evicts one token too many",
        "ctxext/attention/streaming.py",
        "(held > end - self.last)",
        "(held > end + 1 - self.last)",
        ("tests/test_streaming.py",),
    ),
    Fault(
        "a streaming cache keeps the first columns, padding or not",
        "ctxext/attention/streaming.py",
        "held, seen = ranks.gather(1, columns) - 1,",
        "held, seen = columns,",
        ("tests/test_streaming.py",),
    ),
    Fault(
        "log-n attention sharpens short texts too",
        "ctxext/attention/partition.py",
        "math.log(self.log_length)).clamp(min=1)",
        "math.log(self.log_length))",
        (*ATTENTION, "tests/test_methods.py"),
    ),
    Fault(
        "rotated keys are used although the cache was cropped or reordered",
        "ctxext/attention/interface.py",
        'if index < len(layers) and getattr(layers[index], "keys", None) is source:',
        "if index < len(layers):",
        ATTENTION,
    ),
    Fault(
        "a copied cache goes on without the mask that it was read with",
        "ctxext/attention/interface.py",
        "forgotten = not with_mask and before is not None and before.pads(past)",
        "forgotten = False",
        ("tests/test_caches.py",),
    ),
    Fault(
        "padding counts as text",
        "ctxext/attention/interface.py",
        "rank = (valid.cumsum(1) - 1).clamp(min=0)",
        "rank = (torch.ones_like(valid).cumsum(1) - 1).clamp(min=0)",
        ATTENTION,
    ),
    Fault(
        "the scale of a step is taken from the step before",
        "ctxext/methods/dynamic.py",
        "inv_freq, attention_factor = _scaled(self.method, self.spec, length)",
        "inv_freq, attention_factor = _scaled(self.method, self.spec, length - self.method.step)",
        ATTENTION,
    ),
    Fault(
        "a token is taken to have one position more before it",
        "ctxext/evaluation/perplexity.py",
        "np.arange(window.context, window.context + window.n_targets, dtype=np.int32)",
        "np.arange(window.context, window.context + window.n_targets, dtype=np.int32) + 1",
        EVALUATION,
    ),
    Fault(
        "the last window of a text is left short",
        "ctxext/evaluation/protocols.py",
        "Window(end - length - 1, end, scored, False)",
        "Window(scored - 1, end, scored, False)",
        EVALUATION,
    ),
    Fault(
        "the target itself is fed to the model",
        "ctxext/evaluation/scoring.py",
        "fed = ids if feed_last else ids[:, :-1]",
        "fed = ids",
        EVALUATION,
    ),
    Fault(
        "an interval takes tokens for independent",
        "ctxext/evaluation/statistics.py",
        "residuals = (x - value * n) / n.mean()",
        "residuals = (x - value * n) / n.mean() / np.sqrt(n)",
        EVALUATION,
    ),
    Fault(
        "two methods are compared as if on different prompts",
        "ctxext/evaluation/statistics.py",
        "phi = product / math.sqrt(margins) if margins else 0.0",
        "phi = 0.0",
        EVALUATION,
    ),
    Fault(
        "one bad stretch is taken for the end of reading",
        "ctxext/evaluation/positions.py",
        "if all(pair)",
        "if any(pair)",
        EVALUATION,
    ),
    Fault(
        "perplexity is the mean over windows",
        "ctxext/evaluation/records.py",
        "metric = TokenPerplexity().compute(nll_sum=sums, tokens=tokens)",
        "metric = TokenPerplexity().compute(nll_sum=_window_means(scored), tokens=[1] * len(_window_means(scored)))",
        EVALUATION,
    ),
    Fault(
        "a prompt that failed leaves the denominator",
        "ctxext/evaluation/passkey.py",
        "    trials = len(records)",
        "    trials = sum(record['error'] is None for record in records) or 1",
        RUNS,
    ),
    Fault(
        "the answer that was forced stays in the cache",
        "ctxext/evaluation/answering.py",
        "self._cache.crop(-surplus)",
        "pass",
        RUNS,
    ),
    Fault(
        "a run goes on under other settings",
        "ctxext/folder.py",
        "return None if there == here else (path, there, here)",
        "return None",
        RUNS,
    ),
    Fault(
        "losses are resumed by window alone, whatever the text",
        "ctxext/evaluation/perplexity.py",
        'source = f"{documents[number].id}|{hashes[number]}"',
        'source = "text"',
        RUNS,
    ),
    Fault(
        "prompts that failed are tested as wrong answers",
        "ctxext/evaluation/compare.py",
        'if any(sample["error"] is not None for pair in pairs for sample in pair):',
        "if False:",
        ("tests/test_compare.py",),
    ),
    Fault(
        "keys at one depth count as if found independently",
        "ctxext/evaluation/compare.py",
        'groups = [sample["depth"] for sample, _ in pairs] if ours["task"] == "passkey" else None',
        "groups = None",
        ("tests/test_compare.py",),
    ),
    Fault(
        "a run of another kind is thrown away",
        "ctxext/folder.py",
        "if there != kind:",
        "if False:",
        ("tests/test_finetune.py",),
    ),
    Fault(
        "nobody looks at the plain model between two methods",
        "ctxext/evaluation/compare.py",
        "if not torch.equal(_probe(self.model), self._baseline):",
        "if False:",
        RUNS,
    ),
    Fault(
        "methods are compared by their means alone",
        "ctxext/evaluation/compare.py",
        "sums.append(float((one.loss.astype(float) - other.loss.astype(float)).sum()))",
        "sums.append(float(one.loss.astype(float).sum()) - 0.0)",
        RUNS,
    ),
    Fault(
        "RULER's answers may stand anywhere in a word",
        "ctxext/evaluation/ruler_tasks.py",
        r'rf"(?<![^\W_]){re.escape(answer)}(?![^\W_])"',
        "re.escape(answer)",
        RUNS,
    ),
    Fault(
        "from_pretrained stays replaced after autopatch",
        "ctxext/autopatching.py",
        "self._model_class.from_pretrained = self._original",
        "pass",
        AUTOPATCH,
    ),
    Fault(
        "autopatch takes a length that the program made up for the trained one",
        "ctxext/autopatching.py",
        "if given != original:",
        "if False:",
        AUTOPATCH,
    ),
    Fault(
        "ctxext run is content when no model was extended",
        "ctxext/autopatching.py",
        'if not any(fate == "extended" for fate, _ in found):',
        "if False:",
        AUTOPATCH,
    ),
    Fault(
        "ctxext run hides the user's sitecustomize",
        "ctxext/startup/sitecustomize.py",
        "    _run_hidden_sitecustomize()\n",
        "    pass\n",
        AUTOPATCH,
    ),
    Fault(
        "the first token of a packed document is predicted from the document before",
        "ctxext/blocks.py",
        "labels[positions == 0] = IGNORED",
        "labels[0] = IGNORED",
        TRAINING,
    ),
    Fault(
        "a resumed fine-tune starts the data again",
        "ctxext/training.py",
        'self._packing, progress.get("place"))',
        "self._packing, None)",
        TRAINING,
    ),
    Fault(
        "gradients of accumulated batches are too small",
        "ctxext/training.py",
        "scale = self.settings.gradient_accumulation_steps * self.processes / targets",
        "scale = self.processes / targets",
        TRAINING,
    ),
    Fault(
        "gradients are not clipped",
        "ctxext/training.py",
        "clip_grad_norm_(self.root.parameters(), self.settings.max_grad_norm)",
        "clip_grad_norm_(self.root.parameters(), 1e9)",
        TRAINING,
    ),
    Fault(
        "PoSE's gap is taken for another text",
        "ctxext/training.py",
        'mask = torch.ones_like(ids) if self.settings.positions == "pose" else None',
        "mask = None",
        TRAINING,
    ),
    Fault(
        "trained weights are kept in bfloat16",
        "ctxext/training.py",
        'if parameter.requires_grad or settings.precision == "fp32":',
        'if settings.precision == "fp32":',
        TRAINING,
    ),
    Fault(
        "the optimiser's state is not brought back",
        "ctxext/checkpoints.py",
        "            accelerator.load_state(str(last))\n",
        "            _load_trained([root], str(last))\n",
        TRAINING,
    ),
)


def main() -> None:
    """Apply each fault and print what the tests said."""
    unnoticed = []
    words = sys.argv[1:]
    for fault in (fault for fault in FAULTS if not words or any(word in fault.name for word in words)):
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / "ctxext"
            shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv*", "results", ".*_cache"))
            file = copy / fault.file
            text = file.read_text()
            if text.count(fault.code) != 1:
                sys.exit(f"{fault.name}: the code to break stands {text.count(fault.code)} times in {fault.file}")
            file.write_text(text.replace(fault.code, fault.broken))
            command = [sys.executable, "-m", "pytest", "-x", "-m", "not slow", "-p", "no:cacheprovider", *fault.tests]
            environment = {**os.environ, "PYTHONPATH": str(copy)}
            run = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
        failed = next((line for line in run.stdout.splitlines() if line.startswith("FAILED")), "")
        if run.returncode != 1 or not failed:
            unnoticed.append(fault.name)
        print(f"{'noticed' if failed else 'NOT NOTICED':<12} {fault.name}\n{'':<12} {failed[:160]}", flush=True)
    sys.exit(f"not noticed: {', '.join(unnoticed)}" if unnoticed else 0)


if __name__ == "__main__":
    main()

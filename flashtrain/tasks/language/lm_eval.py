"""lm-evaluation-harness on a checkpoint of a language model.

    python -m flashtrain.tasks.language.lm_eval --model flashtrain --model_args checkpoint=RUN --tasks hellaswag

    flashtrain.register_with_lm_eval()
    lm_eval.simple_evaluate(model="flashtrain", model_args={"checkpoint": "runs/gpt2/..."}, tasks=["hellaswag"])

lm_eval finds no models of installed packages by itself: it has to be told of ours before it looks for the name. Texts
become tokens, and long texts windows, by its own functions; Scorer, which needs no lm_eval, computes.

Shapes: B batch, S sequence, V rows of the embedding table.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from flashtrain.data.tokenizers import Tokenizer
from flashtrain.errors import UserError
from flashtrain.models.trainable import Trainable
from flashtrain.models.trained_decoders import generate
from flashtrain.tasks.language.trained import load_trained, move
from flashtrain.training.hardware import detect_hardware

NAME = "flashtrain"
BATCH_TOKENS = 16384  # of batch_size=auto
NEW_TOKENS = 256  # where a task does not say how many to generate, as lm_eval's own models have it
PIECE = 32  # tokens generated between two looks for the words that end a text
SAMPLING = ("do_sample", "temperature", "top_k")


class Scorer:
    """Log-likelihoods and greedy or sampled texts of a trained decoder.

    max_length: tokens that the model sees at once (None: its context). batch_size: rows of a batch, or "auto": as many
    as make BATCH_TOKENS tokens. autocast: whether to compute in bf16. UserError: a model of no known context.
    """

    def __init__(
        self,
        model: Trainable,
        tokenizer: Tokenizer,
        *,
        max_length: int | None = None,
        batch_size: int | str = "auto",
        autocast: bool = False,
    ) -> None:
        context = max_length or (model.shape.context if model.shape is not None else None)
        if context is None:
            raise UserError(f"{type(model).__name__} does not say its context. Possible: max_length=TOKENS.")
        rows = str(batch_size).partition(":")[0]  # "auto:4" asks lm_eval's own models to look again
        if rows != "auto" and not (rows.isdigit() and int(rows) > 0):
            raise UserError(f"batch_size={batch_size}. Possible: a number of rows, or auto.")
        self.model, self.tokenizer, self.max_length = model.eval(), tokenizer, int(context)
        self.rows = None if rows == "auto" else int(rows)
        self.autocast = autocast
        self.device = next(model.parameters()).device

    @torch.no_grad()
    def score(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[tuple[float, bool]]:
        """For each (context, continuation) in tokens: the continuation's log-probability in nats, and whether every
        token of it is the likeliest one.

        Of what is too long, the context's first tokens are left out. Inputs that differ in their last token alone, as
        answers of one token do, are computed once.
        UserError: a pair without context or continuation, a continuation longer than max_length.
        """
        wanted: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for number, (context, continuation) in enumerate(pairs):
            if not context or not 1 <= len(continuation) <= self.max_length:
                raise UserError(
                    f"a continuation of {len(continuation)} tokens after {len(context)}. Possible: 1 to "
                    f"{self.max_length} after at least 1."
                )
            wanted[tuple([*context, *continuation][-self.max_length - 1 :][:-1])].append(number)
        found: list[tuple[float, bool]] = [(0.0, False)] * len(pairs)
        for batch in self._batches(sorted(wanted, key=len, reverse=True)):
            tokens = torch.zeros(len(batch), len(batch[0]), dtype=torch.long)
            for row, read in enumerate(batch):  # padding stands on the right, where no token before it sees it
                tokens[row, : len(read)] = torch.tensor(read)
            tails = [max(len(pairs[number][1]) for number in wanted[read]) for read in batch]
            kept = [slice(len(read) - tail, len(read)) for read, tail in zip(batch, tails, strict=True)]
            for read, scores in zip(batch, self._log_probabilities(tokens, kept), strict=True):
                likeliest = scores.argmax(dim=-1)
                for number in wanted[read]:
                    told = torch.tensor(pairs[number][1], device=scores.device)
                    own = scores[-len(told) :].gather(1, told[:, None])
                    found[number] = (float(own.sum()), torch.equal(likeliest[-len(told) :], told))
        return found

    def continuation(self, text: str, until: Sequence[str] = (), new_tokens: int = NEW_TOKENS, **sampling: Any) -> str:
        """What the model writes after a text, up to the first of `until`, the end of the text or so many tokens.

        sampling: do_sample, temperature and top_k; greedy without. UserError: other options, no room for new tokens.
        """
        unknown = [f"{name}={value}" for name, value in sampling.items() if name not in SAMPLING]
        if unknown:
            raise UserError(
                f"generation with {', '.join(unknown)}. Possible: {', '.join(SAMPLING)}, until, max_gen_toks."
            )
        if not 0 < new_tokens < self.max_length:
            raise UserError(f"{new_tokens} new tokens with a context of {self.max_length}. Possible: fewer than that.")
        draws = bool(sampling.get("do_sample", float(sampling.get("temperature") or 0) > 0))
        temperature = float(sampling.get("temperature", 1.0)) if draws else 0.0
        top_k = int(sampling["top_k"]) if sampling.get("top_k") else None
        end = self.tokenizer.end_of_text
        tokens = self.tokenizer.encode(text)[-(self.max_length - new_tokens) :] or [end]
        start = len(tokens)
        written = ""
        while len(tokens) < start + new_tokens:
            piece = min(PIECE, start + new_tokens - len(tokens))
            prompt = torch.tensor([tokens], device=self.device)
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
                options = {"temperature": temperature, "top_k": top_k, "end_of_text": end}
                tokens = generate(self.model, prompt, piece, seed=len(tokens), **options)[0].tolist()  # type: ignore[arg-type]
            new = tokens[start:]
            ended = end in new
            written = self.tokenizer.decode(new[: new.index(end)] if ended else new)
            places = [written.find(stop) for stop in until if stop and stop in written]
            if places:
                return written[: min(places)]
            if ended:
                break
        return written

    def _batches(self, reads: Sequence[tuple[int, ...]]) -> Iterator[Sequence[tuple[int, ...]]]:
        """Of inputs, the longest first: as many in each as a batch has."""
        start = 0
        while start < len(reads):
            rows = self.rows or max(1, BATCH_TOKENS // len(reads[start]))
            yield reads[start : start + rows]
            start += rows

    def _log_probabilities(self, tokens: torch.Tensor, kept: Sequence[slice]) -> Iterator[torch.Tensor]:
        """Of each row of tokens (B, S), at its places kept: (places, V), float32 at least."""
        model: Any = self.model
        tokens = tokens.to(self.device)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
            # A decoder of ours gives its last states: the logits of a whole batch would be far larger.
            apart = hasattr(model, "hidden") and hasattr(model, "logits")
            states = model.hidden(tokens) if apart else model(tokens)
        for row, places in zip(states, kept, strict=True):
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
                logits = model.logits(row[places]) if apart else row[places]
            yield logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(dim=-1)


def register_with_lm_eval() -> type:
    """Make `model="flashtrain"` known to lm_eval; returns its class. Twice is no mistake.

    Its arguments: checkpoint (a run folder or a checkpoint in one), batch_size, max_length, device ("cpu"; else the
    best there is). UserError: lm_eval is not installed.
    """
    return _language_model()


@cache
def _language_model() -> type:
    try:
        import lm_eval.models  # noqa: F401 - where its own names are registered
        from lm_eval.api.model import TemplateLM
        from lm_eval.api.registry import register_model
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
    except ImportError as error:
        raise UserError("lm_eval is not installed. Possible: pip install 'flashtrain[eval]'.") from error

    @register_model(NAME)
    class FlashtrainLM(TemplateLM):
        def __init__(
            self,
            checkpoint: str,
            batch_size: int | str | None = None,
            max_length: int | None = None,
            device: str | None = None,
            max_batch_size: int | None = None,
        ) -> None:
            super().__init__()
            hardware = detect_hardware("cpu" if str(device) == "cpu" else "auto")  # lm_eval asks for cuda everywhere
            trained = load_trained(str(checkpoint), attention=hardware.attention)
            self.checkpoint = trained.checkpoint
            model = move(trained.model, hardware.kind, hardware.precision)
            self.scorer = Scorer(
                model,
                trained.tokenizer,
                max_length=max_length,
                batch_size="auto" if batch_size is None else batch_size,
                autocast=hardware.precision == "bf16-mixed",
            )
            self._device = self.scorer.device

        @property
        def eot_token_id(self) -> int:
            return self.scorer.tokenizer.end_of_text

        @property
        def tokenizer_name(self) -> str:
            return Path(self.checkpoint).parent.parent.name

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
            return list(self.scorer.tokenizer.encode(string))

        def _loglikelihood_tokens(self, requests: list[Any], **kwargs: Any) -> list[tuple[float, bool]]:
            answers = self.scorer.score([(context, continuation) for _, context, continuation in requests])
            for (texts, _, _), answer in zip(requests, answers, strict=True):
                if texts is not None:
                    self.cache_hook.add_partial("loglikelihood", texts, answer)
            return answers

        def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
            windows: list[tuple[list[int], list[int]]] = []
            owners: list[int] = []
            for number, request in enumerate(requests):
                for window in get_rolling_token_windows(
                    self.tok_encode(request.args[0]), self.prefix_token_id, self.scorer.max_length, context_len=1
                ):
                    windows.append(make_disjoint_window(window))
                    owners.append(number)
            totals = [0.0] * len(requests)
            for owner, (likelihood, _) in zip(owners, self.scorer.score(windows), strict=True):
                totals[owner] += likelihood
            for request, total in zip(requests, totals, strict=True):
                self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
            return totals

        def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
            texts = []
            for request in requests:
                text, options = request.args
                asked = dict(options)
                until = asked.pop("until", None) or []
                until = [until] if isinstance(until, str) else list(until)
                new_tokens = int(asked.pop("max_gen_toks", NEW_TOKENS))
                texts.append(self.scorer.continuation(text, until, new_tokens, **asked))
                self.cache_hook.add_partial("generate_until", request.args, texts[-1])
            return texts

    return FlashtrainLM


def main() -> int:
    """lm_eval's command, which then knows flashtrain. Returns the exit status."""
    try:
        register_with_lm_eval()
        from lm_eval.__main__ import cli_evaluate

        cli_evaluate()
    except UserError as error:
        print(f"flashtrain: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

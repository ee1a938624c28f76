"""lm-evaluation-harness on a checkpoint: the scores by brute force, and lm_eval's own figures for our export."""

from __future__ import annotations

import json

import pytest
import torch

from flashtrain.data.tokenizers import ByteTokenizer
from flashtrain.errors import UserError
from flashtrain.integrations import save_tokenizer
from flashtrain.integrations.huggingface_gpt2 import save_decoder
from flashtrain.models import GPT2, GPT2Config
from flashtrain.tasks.language.lm_eval import Scorer, main, register_with_lm_eval
from flashtrain.tasks.language.trained import load_trained

QUESTIONS = [
    {"text": "the quick brown fox", "answers": [" jumps", " sleeps", " j"], "label": 0},
    {
        "text": "a longer text that does not fit into the context of the model at all ",
        "answers": ["b", "c"],
        "label": 1,
    },
    {"text": "x", "answers": ["y", "z"], "label": 1},
]


def make(family: str = "gpt2", **options) -> Scorer:
    torch.manual_seed(0)
    model = GPT2(GPT2Config.of_size("demo", family, vocab_size=257, context=24), attention="sdpa")
    for parameter in model.parameters():  # far from uniform, so that no two answers are alike
        parameter.data += 0.2 * torch.randn_like(parameter)
    return Scorer(model.eval(), ByteTokenizer(), **options)


def pairs() -> list[tuple[list[int], list[int]]]:
    return [
        (list(question["text"].encode()), list(answer.encode()))
        for question in QUESTIONS
        for answer in question["answers"]
    ]


def by_brute_force(scorer: Scorer, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """Token by token, each predicted from the tokens before it that the model is shown."""
    whole = [*context, *continuation][-scorer.max_length - 1 :]
    total, greedy = 0.0, True
    with torch.no_grad():
        logits_at = {place: scorer.model(torch.tensor([whole[:place]]))[0, -1] for place in range(1, len(whole))}
    for place in range(len(whole) - len(continuation), len(whole)):
        logits = logits_at[place]
        total += float(logits.log_softmax(-1)[whole[place]])
        greedy &= int(logits.argmax()) == whole[place]
    return total, greedy


@pytest.mark.parametrize("family", ["gpt2", "modern"])
@pytest.mark.parametrize("batch_size", ["auto", 1, 3])
def test_scores_are_those_of_one_token_after_another(family, batch_size) -> None:
    scorer = make(family, batch_size=batch_size)
    for found, pair in zip(scorer.score(pairs()), pairs(), strict=True):
        score, greedy = by_brute_force(scorer, *pair)
        assert found[0] == pytest.approx(score, abs=1e-4)
        assert found[1] == greedy


def test_a_text_that_the_model_would_write_itself_is_greedy() -> None:
    scorer = make()
    prompt = torch.tensor([list(b"the ")])
    written = []
    for _ in range(5):
        written.append(
            int(scorer.model(torch.cat((prompt, torch.tensor([written], dtype=torch.long)), 1))[0, -1].argmax())
        )
    (found,) = scorer.score([(list(b"the "), written)])
    assert found[1]
    assert not scorer.score([(list(b"the "), [*written[:-1], written[-1] ^ 1])])[0][1]


def test_generation_is_greedy_and_ends_at_the_first_of_the_stops() -> None:
    scorer = make()
    whole = scorer.continuation("abc", new_tokens=12)
    assert whole == scorer.continuation("abc", new_tokens=12)
    stop = whole[3:5]
    assert scorer.continuation("abc", [stop, ""], 12) == whole[: whole.index(stop)]
    drawn = scorer.continuation("abc", new_tokens=12, do_sample=True, temperature=5.0, top_k=200)
    assert drawn != whole
    longer = "a text that is longer than the context " * 2  # its last tokens are what is read
    assert scorer.continuation(longer, new_tokens=4) == scorer.continuation(longer[-20:], new_tokens=4)


def test_mistakes_are_one_line() -> None:
    scorer = make()
    with pytest.raises(UserError, match=r"a continuation of 25 tokens after 1. Possible: 1 to 24"):
        scorer.score([([1], [2] * 25)])
    with pytest.raises(UserError, match=r"generation with top_p=0.9. Possible: do_sample"):
        scorer.continuation("a", top_p=0.9)
    with pytest.raises(UserError, match=r"24 new tokens with a context of 24"):
        scorer.continuation("a", new_tokens=24)
    with pytest.raises(UserError, match=r"batch_size=some. Possible: a number of rows, or auto"):
        make(batch_size="some")


def test_without_lm_eval_its_absence_is_one_line(monkeypatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "lm_eval.api.model", None)
    with pytest.raises(UserError, match=r"lm_eval is not installed. Possible: pip install 'flashtrain\[eval\]'"):
        register_with_lm_eval()


# lm_eval itself

TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{text}}}}"
"""
KINDS = {
    "choice": (
        "multiple_choice",
        'doc_to_choice: "{{answers}}"\ndoc_to_target: label\nmetric_list: [{metric: acc}, {metric: acc_norm}]\n',
    ),
    "rolling": (
        "loglikelihood_rolling",
        'doc_to_target: "{{text}}"\nmetric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]\n',
    ),
    "writing": (
        "generate_until",
        "doc_to_target: \"{{answers[0]}}\"\nmetric_list: [{metric: exact_match}]\ngeneration_kwargs: {until: ['e'], "
        "max_gen_toks: 6, do_sample: false}\n",
    ),
}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "questions.jsonl").write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    for name, (kind, rest) in KINDS.items():
        text = TASK.format(name=name, kind=kind, data=folder / "questions.jsonl") + rest
        (folder / f"{name}.yaml").write_text(text)
    return folder


def evaluated(model: str, arguments: dict, tasks) -> tuple[dict, dict]:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    found = simple_evaluate(
        model=model, model_args=arguments, tasks=list(KINDS), task_manager=manager, bootstrap_iters=0, device="cpu"
    )
    answers = {
        name: [sample["resps"] for sample in sorted(samples, key=lambda sample: sample["doc_id"])]
        for name, samples in found["samples"].items()
    }
    return found["results"], answers


def test_lm_eval_finds_the_figures_of_its_own_model_on_our_export(trained, tasks, tmp_path, monkeypatch) -> None:
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    loaded = load_trained(str(trained), attention="sdpa")
    save_decoder(loaded.model, tmp_path, end_of_text=loaded.tokenizer.end_of_text)
    save_tokenizer(loaded.tokenizer, tmp_path, context=32)
    assert register_with_lm_eval() is register_with_lm_eval()
    ours, our_answers = evaluated("flashtrain", {"checkpoint": str(trained)}, tasks)
    theirs, their_answers = evaluated("hf", {"pretrained": str(tmp_path), "dtype": "float32"}, tasks)
    assert our_answers["writing"] == their_answers["writing"]
    for name in ("choice", "rolling"):
        for mine, other in zip(flat(our_answers[name]), flat(their_answers[name]), strict=True):
            assert mine == pytest.approx(other, rel=1e-5)
    for name, figures in theirs.items():
        for metric, value in figures.items():
            if isinstance(value, float):
                assert ours[name][metric] == pytest.approx(value, rel=1e-5), (name, metric)


def test_the_command_of_the_guide_runs_a_checkpoint(trained, tasks, monkeypatch, capsys) -> None:
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    words = [
        "--model",
        "flashtrain",
        "--model_args",
        f"checkpoint={trained}",
        "--tasks",
        "choice",
        "--batch_size",
        "auto",
    ]
    monkeypatch.setattr("sys.argv", ["lm_eval", *words, "--include_path", str(tasks)])
    assert main() == 0
    assert "|choice|" in capsys.readouterr().out
    monkeypatch.setattr(
        "sys.argv", ["lm_eval", *words[:3], "checkpoint=nowhere", *words[4:], "--include_path", str(tasks)]
    )
    assert main() == 2
    assert "flashtrain: checkpoint=nowhere does not exist" in capsys.readouterr().err


def flat(answers) -> list[float]:
    """The log-likelihoods, and whether each is greedy, in lm_eval's nested lists of numbers or of their words."""
    if isinstance(answers, (list, tuple)):
        return [value for answer in answers for value in flat(answer)]
    return [float({"True": 1, "False": 0}.get(str(answers), answers))]

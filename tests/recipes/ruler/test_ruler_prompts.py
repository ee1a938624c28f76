"""RULER's prompts: whoever reads them can answer them, and they fill their length."""

from __future__ import annotations

import random
import re
from collections import Counter
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from chat_folders import CHATML, save_tokenizer_folder
from transformers import AutoTokenizer

from flashtrain.data.bpe import BPETokenizer
from flashtrain.data.tokenizers import ByteTokenizer, huggingface_tokenizer
from flashtrain.errors import UserError
from flashtrain_recipes.ruler.haystack import Haystack
from flashtrain_recipes.ruler.prompts import encoder, make_prompt
from flashtrain_recipes.ruler.tasks import NOISE, RULER, TASKS, score

LENGTHS = (8192, 10000, 16384)
TEXT = "".join(
    f"Line {at} is about the {at % 7}th river of the old country.\n" for at in range(999)
)
HAYSTACK = Haystack(TEXT)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory) -> dict:
    folder = save_tokenizer_folder(tmp_path_factory.mktemp("chat"), CHATML)
    texts = [TEXT[:4000], NOISE, "The secret number of tall-lamp is 1234567. LET ABC = DEF"]
    return {
        "bytes": (ByteTokenizer(), False),
        "bpe": (BPETokenizer.train(iter(texts * 3), 400), False),
        "chat": (huggingface_tokenizer(folder), True),
    }


def prompt(task: str, tokenizer, *, chat: bool = False, length: int = 8192, drawn: str = "0 0"):
    return make_prompt(task, encoder(tokenizer, chat=chat), HAYSTACK, length, drawn)


def needles(text: str) -> list[str]:
    asked = re.search(r"In the text above, what (?:is|are) the secret (\w+?)s? of (.+)\?", text)
    found = re.findall(rf"The secret {asked[1]} of (\S+) is (\S+)\.\n", text)
    return [value for name in asked[2].split(", ") for one, value in found if one == name]


def variables(text: str) -> list[str]:
    asked = re.findall(r"have the value (\d+)\?", text)[-1]
    known = [asked]
    for name, value in re.findall(r"LET (\w+) = (\w+)\n", text):
        known += [name] * (value in known)
    return known[1:]


def common(text: str) -> list[str]:
    listed = text.split("Some words of this numbered list")[-1].split("Question:")[0]
    return [word for word, _ in Counter(re.findall(r"\d+\. (\w+)", listed)).most_common(10)]


def frequent(text: str) -> list[str]:
    coded = text.split("each of them occurs.")[-1].split("Question:")[0]
    return [word for word, _ in Counter(re.findall(r"\b[a-z]{6}\b", coded)).most_common(3)]


def lives(text: str) -> list[str]:
    found = re.findall(r"(\w+ \w+) was born in (\w+ \w+) and was taught by (\w+ \w+)\.", text)
    town, teacher = {name: at for name, at, _ in found}, {name: by for name, _, by in found}
    who = re.search(r"in which town was (the teacher of )?(\w+ \w+) born", text)
    return [town[teacher[who[2]] if who[1] else who[2]]]


SOLVERS = {"niah": needles, "vt": variables, "cwe": common, "fwe": frequent, "own": lives}


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("task", TASKS)
def test_a_solver_that_reads_the_prompt_gets_100(tokenizers, task: str, length: int) -> None:
    for number, (tokenizer, chat) in enumerate(tokenizers.values()):
        ids, references = prompt(task, tokenizer, chat=chat, length=length, drawn=f"0 {number}")
        read = tokenizer.decode(ids)
        found = SOLVERS[task.partition("_")[0]](read)
        assert sorted(found) == sorted(references)
        assert score(" ".join(found), references) == 100
        assert length * 0.95 < len(ids) + TASKS[task][1] <= length


def test_there_are_eleven_tasks_of_the_papers_answer_rooms_and_numbers_of_references() -> None:
    asked = {name: len(prompt(name, ByteTokenizer())[1]) for name in RULER}
    several = {"niah_multivalue": 4, "niah_multiquery": 4, "vt": 5, "cwe": 10, "fwe": 3}
    assert asked == {name: several.get(name, 1) for name in RULER}
    assert len(RULER) == 11
    rooms = {name: room for name, (_, room) in RULER.items() if not name.startswith("niah")}
    assert rooms == {"vt": 30, "cwe": 120, "fwe": 50}


def test_kinds_and_numbers_of_needles_are_the_papers() -> None:
    def hidden(task: str) -> Counter:
        read = ByteTokenizer().decode(prompt(task, ByteTokenizer())[0])
        return Counter(re.findall(r"The secret \w+ of (\S+) is \S+\.\n", read))

    singles = [hidden(f"niah_single_{number}") for number in (1, 2, 3)]
    assert [sum(one.values()) for one in singles] == [1, 1, 1]
    assert sorted(hidden("niah_multikey_1").values()) == [1, 1, 1, 1]
    assert list(hidden("niah_multivalue").values()) == [4]
    assert sum(hidden("niah_multikey_2").values()) > 100
    (uuid,) = prompt("niah_multikey_3", ByteTokenizer())[1]
    assert re.fullmatch(
        r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}", uuid
    )
    assert re.fullmatch(r"[1-9]\d{6}", prompt("niah_single_1", ByteTokenizer())[1][0])


def test_words_are_as_frequent_as_the_paper_has_them() -> None:
    text = ByteTokenizer().decode(prompt("cwe", ByteTokenizer(), length=16384)[0])
    listed = text.split("Some words of this numbered list")[-1].split("Question:")[0]
    counts = Counter(re.findall(r"\d+\. (\w+)", listed))
    assert sorted(counts.values(), reverse=True)[:12] == [30] * 10 + [3] * 2
    text = ByteTokenizer().decode(prompt("fwe", ByteTokenizer(), length=60_000)[0])
    coded = Counter(text.split("each of them occurs.")[-1].split("Question:")[0].split())
    total, wanted = sum(coded.values()), 6 / np.pi**2
    shares = [count / total for _, count in coded.most_common(4)]
    np.testing.assert_allclose(shares, [wanted / rank**2 for rank in (1, 2, 3, 4)], rtol=0.05)
    assert coded.most_common(1)[0][0] == "...."


def test_a_prompt_is_a_users_message_and_its_answer_is_begun(tmp_path: Path) -> None:
    folder = save_tokenizer_folder(tmp_path, CHATML)
    tokenizer, theirs = huggingface_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    ids, _ = prompt("niah_single_1", tokenizer, chat=True)
    shown, _, begun = theirs.decode(ids).rpartition("<|im_start|>assistant\n")
    message = shown.removeprefix("<|im_start|>user\n").removesuffix("<|im_end|>\n")
    wanted = theirs.apply_chat_template(
        [{"role": "user", "content": message}], add_generation_prompt=True, return_dict=True
    )["input_ids"]
    assert ids == [*wanted, *theirs(begun, add_special_tokens=False).input_ids]
    assert re.fullmatch(r"In the text above, the secret number of \S+ is", begun)


def test_equal_draws_give_equal_prompts_and_others_others() -> None:
    for task in TASKS:
        one, same, other = (prompt(task, ByteTokenizer(), drawn=d) for d in ("0 1", "0 1", "0 2"))
        assert one == same
        assert one[0] != other[0]
        assert one[1] != other[1]


def test_needles_lie_at_every_depth() -> None:
    text, depths = ByteTokenizer(), []
    for number in range(40):
        read = text.decode(prompt("niah_single_1", text, drawn=f"0 {number}")[0])
        depths.append(read.index("The secret number of") / len(read))
    assert min(depths) < 0.1
    assert max(depths) > 0.9
    assert min(np.histogram(depths, 4, (0, 1))[0]) > 1


@pytest.mark.parametrize("task", ["niah_single_1", "vt", "cwe", "fwe", "own_qa_1"])
def test_a_length_without_room_is_refused_with_the_shortest_possible(task: str) -> None:
    with pytest.raises(UserError, match=r"ruler\.lengths=200 .*: expected \d+") as caught:
        prompt(task, ByteTokenizer(), length=200)
    assert "ruler.tasks=" in str(caught.value)
    shortest = int(re.search(r"expected (\d+)", str(caught.value))[1])
    assert len(prompt(task, ByteTokenizer(), length=shortest + 9)[0]) <= shortest + 9


def test_any_text_is_a_haystack() -> None:
    for text in ("x", "word " * 500, "One. Two! Three?\n\n    four\n" * 9):
        assert "".join(Haystack(text).pieces) == text
        assert max(map(len, Haystack(text).pieces)) <= 310
    read = "".join(islice(Haystack("a\nb\n").read(random.Random(0)), 5))
    assert read in ("a\nb\na\nb\na\n", "b\na\nb\na\nb\n")


@pytest.mark.parametrize(
    ("answer", "references", "wanted"),
    [
        (" 1234567.", ["1234567"], 100),
        ("It is ABC, def and x", ["abc", "DEF", "ghi", "jkl"], 50),
        ("", ["a"], 0),
    ],
)
def test_a_score_is_the_share_of_references_in_the_answer(answer, references, wanted) -> None:
    assert score(answer, references) == wanted

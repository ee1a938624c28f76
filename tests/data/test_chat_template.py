"""Which tokens of a conversation are learnt, by templates of the shapes that
published models have."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from chat_folders import (
    ASKING,
    CHATML,
    ENDLESS,
    FIRST_PART,
    HARMONY,
    JOINED,
    LISTED,
    LLAMA3,
    MARKED,
    MARKED_ENDS,
    MARKED_THINKING,
    MISTRAL,
    OPENED,
    PARTS,
    SILENT,
    THINKING,
    save_tokenizer_folder,
)
from transformers import AutoTokenizer

from flashtrain.data.chat_rendering import read_template
from flashtrain.data.chat_template import ChatTemplate
from flashtrain.data.tokenizers import ByteTokenizer, huggingface_tokenizer, load_tokenizer
from flashtrain.errors import UserError

TALK = [
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hi there"},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "It is 4."},
]


@pytest.fixture
def make(tmp_path):
    def template(
        jinja: str | None = CHATML, *, words: str = "", folder: dict | None = None, **options
    ) -> ChatTemplate:
        saved = save_tokenizer_folder(tmp_path / "tokenizer", jinja, words=words, **(folder or {}))
        made = ChatTemplate(huggingface_tokenizer(saved), **options)
        made.folder = saved
        return made

    return template


def usual(template: ChatTemplate):
    """The same tokenizer as transformers has it."""
    return AutoTokenizer.from_pretrained(template.folder)


def learnt(template: ChatTemplate, row: dict) -> list[list[str]]:
    """Of each document, the runs of its tokens that are learnt, as text."""
    found = []
    for tokens, marks in template.encode(template.pieces(row)):
        edges = np.flatnonzero(np.diff(np.concatenate(([0], marks & 1, [0]))))
        found.append([template.tokenizer.decode(tokens[a:b]) for a, b in edges.reshape(-1, 2)])
    return found


def whole(template: ChatTemplate, row: dict) -> list[str]:
    return [
        template.tokenizer.decode(tokens) for tokens, _ in template.encode(template.pieces(row))
    ]


def test_a_thought_that_the_prompt_alone_opens_is_not_learnt(make):
    template = make(OPENED)
    assert learnt(template, {"messages": TALK}) == [["Hi there<|end|>", "It is 4.<|end|>"]]
    assert whole(template, {"messages": TALK}) == [
        usual(template).apply_chat_template(TALK, tokenize=False)
    ]


def test_the_template_that_the_page_shows_for_base_models(make):
    page = Path(__file__).parents[2] / "docs" / "train" / "conversations.md"
    template = make(page.read_text().split("```jinja\n")[1].split("```")[0])
    assert learnt(template, {"messages": TALK}) == [["Hi there<|end|>", "It is 4.<|end|>"]]
    assert whole(template, {"messages": TALK}) == [
        "<|begin|>### user\nHello\n\n### assistant\nHi there<|end|>\n\n"
        "### user\n2+2?\n\n### assistant\nIt is 4.<|end|>\n\n"
    ]
    asked = usual(template).apply_chat_template(
        TALK[:1], tokenize=False, add_generation_prompt=True
    )
    assert asked == "<|begin|>### user\nHello\n\n### assistant\n"


@pytest.mark.parametrize("jinja", [CHATML, MARKED, LLAMA3, MISTRAL])
def test_what_is_learnt_begins_where_the_model_is_asked_for_an_answer(make, jinja):
    """The tokens before the first answer are those that the model is given to answer; before a
    later one the last are.

    (GPT-2's rule parts line feeds by what follows: those of Llama 3's header are one token
    until an answer follows.)
    """
    template = make(jinja, words="Hello there\n\nIt is 4.\n\n" * 9)
    ((tokens, marks),) = template.encode(template.pieces({"messages": TALK}))
    begins = np.flatnonzero(np.diff(marks & 1, prepend=0) == 1)
    for number, at in enumerate((1, 3)):
        asked = usual(template).apply_chat_template(TALK[:at], add_generation_prompt=True)[
            "input_ids"
        ]
        before = tokens[: begins[number]].tolist()
        assert before[-4:] == asked[-4:]
        assert before == asked or number > 0


@pytest.mark.parametrize("jinja", [CHATML, MARKED])
def test_no_token_lies_across_the_edge_of_an_answer(make, jinja):
    """An answer that begins with a line feed, which one token would hold together with
    the one of the header."""
    talk = [{"role": "user", "content": "Say"}, {"role": "assistant", "content": "\n\nYes"}]
    template = make(jinja, words="assistant\n\n\nYes " * 50)
    text = usual(template).apply_chat_template(talk, tokenize=False)
    ((answer,),) = learnt(template, {"messages": talk})
    assert answer.removesuffix("\n") == "\n\nYes<|im_end|>"
    assert whole(template, {"messages": talk}) == [text]
    ((tokens, _),) = template.encode(template.pieces({"messages": talk}))
    asked = usual(template).apply_chat_template(talk[:1], add_generation_prompt=True)["input_ids"]
    assert (
        tokens[: len(asked)].tolist() == asked != usual(template)(text)["input_ids"][: len(asked)]
    )


def test_where_every_text_begins_with_a_space_a_token_across_the_edge_is_learnt(make):
    """So do tokenizers of the SentencePiece kind: the parts of a text have
    other tokens than the text."""
    talk = [{"role": "user", "content": "Say"}, {"role": "assistant", "content": "\n\nYes"}]
    template = make(CHATML, words="assistant\n\n\nYes " * 50, folder={"spaced": True})
    assert learnt(template, {"messages": talk}) == [["\n\n\nYes<|im_end|> \n"]]


def test_marks_hold_where_the_tokenizer_trims_white_space_from_its_offsets(make):
    """transformers' own mask, which goes by those offsets, is empty here
    before 5.24, and this since."""
    talk = [{"role": "user", "content": "Say"}, {"role": "assistant", "content": " Yes"}]
    template = make(MARKED, words="Say Yes Yes Yes " * 20)
    assert learnt(template, {"messages": talk}) == [[" Yes<|im_end|>"]]


def test_a_template_that_rewrites_earlier_turns_makes_a_document_of_each_answer(make):
    thoughtful = [
        {**one, "content": f"<think>hm</think>{one['content']}"}
        if one["role"] == "assistant"
        else one
        for one in TALK
    ]
    template = make(MARKED_THINKING)
    assert [piece.goes_on for piece in template.pieces({"messages": thoughtful})] == [False, True]
    assert template.rewritten == 1
    answers = [[f"<think>hm</think>{answer}<|im_end|>"] for answer in ("Hi there", "It is 4.")]
    assert learnt(template, {"messages": thoughtful}) == answers
    assert len(template.pieces({"messages": TALK})) == 1  # nothing to rewrite


def shown(template: ChatTemplate, row: dict) -> list[str]:
    """Of each document, the text before the first of its tokens that is learnt."""
    found = template.encode(template.pieces(row))
    return [
        template.tokenizer.decode(tokens[: int(np.argmax(marks & 1))]) for tokens, marks in found
    ]


def thought(number: int, **more) -> dict:
    return {"role": "assistant", "content": f"a{number}", "thinking": f"hm {number}", **more}


@pytest.mark.parametrize("thinks", [True, False])
def test_each_answer_is_learnt_to_its_end_after_what_the_model_is_shown(make, thinks):
    """A template that strips earlier thoughts in the prompt for an answer too, and ends the
    last answer otherwise."""
    asks = [{"role": "user", "content": f"q{number}"} for number in range(3)]
    answers = [
        thought(number) if thinks else {"role": "assistant", "content": f"a{number}"}
        for number in range(3)
    ]
    talk = [one for pair in zip(asks, answers, strict=True) for one in pair]
    template = make(HARMONY)
    assert template.answers.end_ids == [template.tokenizer.library_form().token_to_id("<|eot_id|>")]
    begin = [
        f"|thinks|hm {number}<|im_end|><|im_start|>assistant" if thinks else ""
        for number in range(3)
    ]
    assert learnt(template, {"messages": talk}) == [
        [f"{begin[n]}|says|a{n}<|eot_id|>"] for n in range(3)
    ]
    prompts = [
        usual(template).apply_chat_template(talk[: 2 * n + 1], add_generation_prompt=True)
        for n in range(3)
    ]
    assert shown(template, {"messages": talk}) == [
        template.tokenizer.decode(one["input_ids"]) for one in prompts
    ]
    assert template.rewritten == 2  # it was asked twice


def test_an_answer_that_takes_an_earlier_thought_away_is_learnt_after_what_the_model_is_shown(make):
    call = {"tool_calls": [{"type": "function", "function": {"name": "w", "arguments": {"x": 1}}}]}
    talk = [
        {"role": "user", "content": "Weather?"},
        thought(1, content="", **call),
        {"role": "tool", "content": "sunny"},
        thought(2),
    ]
    template = make(HARMONY)
    assert learnt(template, {"messages": talk}) == [
        ['|thinks|hm 1<|im_end|><|im_start|>assistant|calls|w {"x": 1}[INST]'],
        ["|thinks|hm 2<|im_end|><|im_start|>assistant|says|a2<|eot_id|>"],
    ]
    prompts = [
        usual(template).apply_chat_template(talk[:at], add_generation_prompt=True) for at in (1, 3)
    ]
    assert shown(template, {"messages": talk}) == [
        template.tokenizer.decode(one["input_ids"]) for one in prompts
    ]
    assert "hm 1" in shown(template, {"messages": talk})[1]
    assert "hm 1" not in usual(template).apply_chat_template(talk, tokenize=False)


@pytest.mark.parametrize(
    ("jinja", "row", "told"),
    [
        (
            ASKING,
            {"messages": TALK},
            "message 2 cannot be separated from .*data.chat_template=FILE",
        ),
        (
            HARMONY,
            {
                "messages": [
                    *TALK[:1],
                    {"role": "assistant", "tool_calls": [{"function": {"name": "w"}}] * 2},
                ]
            },
            "message 2: .*data.chat_template",
        ),
        (
            CHATML,
            {"messages": [{"role": "user", "content": [{"type": "image", "url": "x"}]}, *TALK[1:]]},
            "message 1: its content has a part of type image",
        ),
    ],
)
def test_what_a_template_does_not_write_as_the_model_would_is_refused(make, jinja, row, told):
    with pytest.raises(UserError, match=told):
        make(jinja).pieces(row)


def test_where_an_answer_has_no_end_the_token_that_follows_it_is_learnt(make):
    call = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "w", "arguments": {"x": 1}}}],
    }
    talk = [TALK[0], call, {"role": "tool", "content": "sunny"}, *TALK[1:]]
    template = make(ENDLESS)
    assert learnt(template, {"messages": talk}) == [
        ['\n<call>{"x": 1}[/INST]', "\nHi there[INST]", "\nIt is 4.[INST]"]
    ]
    text = usual(template).apply_chat_template(talk, tokenize=False)
    assert whole(template, {"messages": talk}) == [f"{text}[INST]"]
    assert learnt(template, {"messages": talk[:2]}) == [['\n<call>{"x": 1}[/INST]']]
    thoughtful = [TALK[0], thought(1), TALK[2], thought(2)]
    assert learnt(template, {"messages": thoughtful}) == [
        ["\n<think>hm 1</think>a1[INST]"], ["\n<think>hm 2</think>a2[INST]"]
    ]  # fmt: skip
    tokens = usual(template).convert_tokens_to_ids(["[INST]", "[/INST]"])
    assert template.answers.end_ids == tokens
    assert template.endless == 0
    assert make(ENDLESS.replace("[INST]", "you:").replace("[/INST]", "tool:")).answers.end_ids == []


@pytest.mark.parametrize("content", [{"content": None}, {"content": ""}, {}])
@pytest.mark.parametrize("arguments", ['{"x":1}', {"x": 1}])
@pytest.mark.parametrize(
    ("jinja", "written"),
    [
        (JOINED, "<call>w%s<|end|>"),
        (CHATML, '<call>{"x": 1}</call><|im_end|>\n'),
        (HARMONY, '|calls|w {"x": 1}[INST]'),
    ],
    ids=["joined", "chatml", "harmony"],
)
def test_calls_reach_a_template_in_the_form_that_it_takes(make, jinja, written, content, arguments):
    call = {
        "role": "assistant",
        **content,
        "tool_calls": [{"function": {"name": "w", "arguments": arguments}}],
    }
    given = arguments if isinstance(arguments, str) else json.dumps(arguments)
    template = make(jinja)
    row = {"messages": [TALK[0], call]}
    assert learnt(template, row) == [[written.replace("%s", given)]]
    assert learnt(template, {"messages": json.dumps(row["messages"])}) == [
        [written.replace("%s", given)]
    ]


@pytest.mark.parametrize(
    ("jinja", "answer"),
    [
        (CHATML, "It is four.<|im_end|>\n"),
        (MISTRAL, " It is four.<|end|>"),
        (LISTED, "It is\n four.<|end|>"),
    ],
    ids=["chatml", "mistral", "listed"],
)
def test_the_texts_of_a_list_are_joined_where_the_template_takes_no_list(make, jinja, answer):
    parts = [{"type": "text", "text": "It is"}, {"type": "text", "text": " four."}]
    talk = [{"role": "user", "content": parts[:1]}, {"role": "assistant", "content": parts}]
    template = make(jinja)
    assert learnt(template, {"messages": talk}) == [[answer]]
    assert learnt(template, {"prompt": talk[:1], "completion": talk[1:]}) == [[answer]]
    (text,) = whole(template, {"messages": talk})
    assert "type" not in text


def parts(*texts: str) -> list[dict]:
    return [{"type": "text", "text": text} for text in texts]


@pytest.mark.parametrize("jinja", [PARTS, FIRST_PART], ids=["parts", "first"])
def test_contents_are_lists_where_the_template_reads_no_texts(make, jinja):
    """Whether they are given as texts or as lists, the text is what
    transformers renders of lists."""
    template = make(jinja)
    listed = [{**one, "content": parts(one["content"])} for one in TALK]
    expected = usual(template).apply_chat_template(listed, tokenize=False)
    for talk in (TALK, listed):
        assert whole(template, {"messages": talk}) == [expected]
        assert learnt(template, {"messages": talk}) == [["Hi there<|end|>", "It is 4.<|end|>"]]
        asked = usual(template).apply_chat_template(listed[:3], add_generation_prompt=True)[
            "input_ids"
        ]
        assert template.prompt({"messages": talk[:3]}) == asked
    assert template.answers.end_ids == [template.tokenizer.library_form().token_to_id("<|end|>")]
    assert not template.left_out


def test_a_list_of_several_texts_is_given_as_it_is(make):
    talk = [
        {"role": "user", "content": parts("Say ", "it")},
        {"role": "assistant", "content": parts("It is", " 4.")},
    ]
    template = make(PARTS)
    assert whole(template, {"messages": talk}) == [
        usual(template).apply_chat_template(talk, tokenize=False)
    ]
    assert learnt(template, {"messages": talk}) == [["It is 4.<|end|>"]]


CALL = {
    "role": "assistant",
    "content": "Let me see.",
    "tool_calls": [{"function": {"name": "w", "arguments": {}}}],
}


@pytest.mark.parametrize(
    ("jinja", "talk", "number"),
    [
        (SILENT, [*TALK, TALK[0], CALL], 6),
        (MARKED_ENDS, TALK, 2),
        (SILENT, [TALK[0], CALL, *TALK], 2),
    ],
)
def test_an_answer_whose_own_words_are_not_among_the_labels_is_refused(make, jinja, talk, number):
    with pytest.raises(
        UserError,
        match=rf"message {number}: .*content where it is learned.*data\.chat_template=FILE",
    ):
        make(jinja).pieces({"messages": talk})


@pytest.mark.parametrize("jinja", [CHATML, MARKED, LLAMA3, MISTRAL, LISTED, PARTS])
@pytest.mark.parametrize("content", ["4", " \n4 \n\n four ", "<think>\nhm\n</think>\n\n4"])
def test_what_a_template_writes_or_trims_is_no_loss(make, jinja, content):
    template = make(jinja)
    (answer,) = learnt(template, {"messages": [TALK[0], {"role": "assistant", "content": content}]})
    assert content.strip() in "".join(answer)
    assert not template.left_out


@pytest.mark.parametrize(
    ("jinja", "changes", "lost"),
    [
        (CHATML, {"reasoning_content": "hm"}, "reasoning_content of assistant"),
        (CHATML, {"thinking": "hm"}, "thinking of assistant"),
        (
            CHATML,
            {"refusal": "no", "audio": {"id": "x"}},
            "audio of assistant, refusal of assistant",
        ),
        (HARMONY, {"thinking": "hm"}, ""),
        (HARMONY, {"reasoning_content": "hm"}, ""),  # transformers gives it both names
        (HARMONY, {"thinking": "hm", "reasoning_content": "ha"}, "reasoning_content of assistant"),
        (MARKED, {"thinking": "hm"}, "thinking of assistant"),
        (CHATML, {"refusal": None, "thinking": "", "tool_calls": []}, ""),  # nothing is lost
        (OPENED, {"content": "<think>hm</think>4"}, ""),  # templates may strip a thought
        # a document for each answer, with its thought.
        (THINKING, {"content": "<think>hm</think>4"}, ""),
    ],
)
def test_what_a_template_leaves_out_of_messages_is_counted(make, jinja, changes, lost):
    """Every conversation once. transformers leaves it out in silence."""
    template = make(jinja)
    talk = [{**one, **changes} if one["role"] == "assistant" else one for one in TALK]
    for _ in range(2):
        template.pieces({"messages": talk})
    assert sorted(template.left_out) == lost.split(", ") * bool(lost)
    assert set(template.left_out.values()) <= {2}


def test_what_others_say_and_the_template_leaves_out_is_counted_too(make):
    template = make(SILENT)
    template.pieces(
        {
            "messages": [
                {"role": "system", "content": "Be brief."},
                {**TALK[0], "name": "Ann"},
                TALK[1],
            ]
        }
    )
    assert template.left_out == {"content of system": 1, "name of user": 1}
    everything = make(train_on="all")
    everything.pieces({"messages": [{**TALK[0], "name": "Ann"}]})
    assert everything.left_out == {"name of user": 1}


@pytest.mark.parametrize("weight", [0, 0.0, False])
@pytest.mark.parametrize("jinja", [CHATML, MARKED, MARKED_THINKING, ENDLESS])
def test_an_answer_of_weight_0_is_shown_and_not_learnt(make, jinja, weight):
    template = make(jinja)
    for at in (1, 3):
        talk = [{**one, "weight": weight if place == at else 1} for place, one in enumerate(TALK)]
        ((answer,),) = learnt(template, {"messages": talk})
        assert TALK[4 - at]["content"] in answer
        assert TALK[at]["content"] not in answer
        assert all(one["content"] in whole(template, {"messages": talk})[0] for one in TALK)
    assert learnt(template, {"messages": [{**one, "weight": 1} for one in TALK]}) == learnt(
        template, {"messages": TALK}
    )
    assert not template.left_out


def test_a_row_without_an_answer_to_learn_is_refused(make):
    with pytest.raises(UserError, match="no message"):
        make().pieces({"messages": [TALK[0], {**TALK[1], "weight": 0}]})


@pytest.mark.parametrize("jinja", [LLAMA3, MISTRAL, MARKED, PARTS])
@pytest.mark.parametrize("content", [{}, {"content": ""}, {"content": "Let me see."}])
def test_a_template_that_knows_no_tools_is_named_as_the_cause(make, jinja, content):
    call = {key: value for key, value in CALL.items() if key != "content"} | content
    with pytest.raises(UserError, match=r"knows no tool calls\. Set data\.chat_template=FILE"):
        make(jinja).pieces(
            {"messages": [TALK[0], call, {"role": "tool", "content": "sunny"}, TALK[1]]}
        )


def test_without_the_check_labels_and_cache_are_those_of_the_runs_begun_before_it(make):
    """The values are commit 00a7c4ca's."""
    older = make(CHATML, check_answers=False)
    # That plain texts spell, as those runs have them.
    older.tokenizer = older.tokenizer.with_special_tokens()
    assert older.key() == "51ad607441162f1e185f40824e271d1bc9ef1aa84c514d1af8f4d7a8bdaca6be"
    assert make(CHATML).key() != older.key()
    talk = [TALK[0], {**TALK[1], "weight": 0, "thinking": "hm"}, *TALK[2:]]
    assert learnt(older, {"messages": talk}) == [["Hi there<|im_end|>\n", "It is 4.<|im_end|>\n"]]
    assert learnt(make(PARTS, check_answers=False), {"messages": TALK}) == [["<|end|>", "<|end|>"]]
    assert learnt(make(SILENT, check_answers=False), {"messages": [TALK[0], CALL]}) == [
        ["w<|end|>"]
    ]
    assert not older.left_out


def test_tools_reach_the_template_as_an_object_or_as_json(make):
    call = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": "w", "arguments": '{"x": 1}'}}],
    }
    talk = [TALK[0], call, {"role": "tool", "content": "sunny", "tool_calls": None}, TALK[1]]
    tools = [{"type": "function", "function": {"name": "w"}}]
    template = make()
    (text,) = whole(template, {"messages": talk, "tools": tools})
    assert '"name": "w"' in text
    assert whole(template, {"messages": talk, "tools": json.dumps(tools)}) == [text]
    assert learnt(template, {"messages": talk}) == [
        ['<call>{"x": 1}</call><|im_end|>\n', "Hi there<|im_end|>\n"]
    ]


def test_pairs_learn_the_completion_and_texts_all_of_it(make):
    template = make(folder={"begins": True})
    assert whole(template, {"prompt": "2+2=", "completion": "4"}) == ["<|begin|>2+2=4<|end|>"]
    assert learnt(template, {"prompt": "2+2=", "completion": "4"}) == [["4<|end|>"]]
    assert learnt(template, {"text": "All of it."}) == [["All of it.<|end|>"]]
    assert learnt(template, {"prompt": TALK[:3], "completion": TALK[3:]}) == [
        ["It is 4.<|im_end|>\n"]
    ]
    assert learnt(make(MARKED), {"prompt": TALK[:3], "completion": TALK[3:]}) == [
        ["It is 4.<|im_end|>"]
    ]


def test_all_tokens_are_learnt_when_asked(make):
    template = make(train_on="all")
    assert learnt(template, {"messages": TALK}) == [whole(template, {"messages": TALK})]
    assert learnt(template, {"messages": TALK[:1]}) == [["<|im_start|>user\nHello<|im_end|>\n"]]
    with pytest.raises(UserError, match=r"unknown data\.train_on 'user'.*assistant"):
        make(train_on="user")


def test_a_template_of_ones_own_takes_the_tokenizers_place(make, tmp_path):
    (tmp_path / "mine.jinja").write_text(OPENED)
    template = make(CHATML, template=read_template(tmp_path / "mine.jinja"))
    assert whole(template, {"messages": TALK[:2]}) == ["[user]Hello[assistant]Hi there<|end|>"]
    assert template.key() != make(CHATML).key()


def test_a_tokenizer_without_a_template_serves_texts_and_reports_what_conversations_need(make):
    template = make(None)
    assert learnt(template, {"text": "plain"}) == [["plain<|end|>"]]
    with pytest.raises(UserError, match=r"no chat template.*data\.chat_template=FILE"):
        template.pieces({"messages": TALK})
    with pytest.raises(UserError, match=r"need the tokenizer.*data\.tokenizer=FOLDER"):
        ChatTemplate(ByteTokenizer())


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"dialog": []}, "columns dialog: expected messages"),
        ({}, "columns none"),
        ({"messages": []}, "column messages is not a list"),
        ({"messages": ["hello"]}, "message 1 in column messages has no role"),
        ({"messages": TALK[:1]}, "data.train_on=all"),
        ({"messages": "[{"}, "column messages is not valid JSON"),
        ({"messages": TALK, "tools": ["weather"]}, "column tools is not a list of objects"),
        ({"prompt": "x", "completion": ""}, "completion is empty"),
        ({"messages": TALK[1:]}, "the chat template does not accept it: roles must alternate"),
    ],
)
def test_what_is_wrong_with_a_row_is_one_line(make, row, told):
    with pytest.raises(UserError, match=told):
        make(MISTRAL).pieces(row)


def test_a_template_that_is_no_jinja_is_reported_before_reading_and_others_run_in_a_sandbox(make):
    with pytest.raises(UserError, match="the chat template is not valid Jinja"):
        make("{% for %}")
    with pytest.raises(
        UserError, match=r"the chat template does not accept it: access to attribute '__class__'"
    ):
        make("{{ messages.__class__.__mro__ }}").pieces({"messages": TALK})


def test_the_tokenizer_of_a_run_folder_has_its_template_still(make, tmp_path):
    made = huggingface_tokenizer(save_tokenizer_folder(tmp_path / "one", CHATML))
    template = ChatTemplate(made, template=MARKED)
    made.save(tmp_path / "run")
    again = ChatTemplate(load_tokenizer(tmp_path / "run"))
    assert again.key() == template.key()
    row = {"messages": [{"role": "user", "content": "Hello"}]}
    assert (
        again.tokenizer.decode(again.prompt(row))
        == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )

"""The guide's pages are followed: their programs run, their commands are taken, their
figures are the files'."""

from __future__ import annotations

import importlib
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from chat_folders import save_tokenizer_folder
from published_commands import GUIDE, ROOT, python_blocks, shell_blocks
from tiny_runs import checkout_environment

from flashtrain import registry
from flashtrain.command.overrides import plain_words
from flashtrain.command.request import settings_of
from flashtrain.errors import UserError
from flashtrain.models import Decoder, DecoderConfig
from flashtrain.models.generation import generate
from flashtrain.registry import registered
from flashtrain.report import __main__ as report
from flashtrain.report.readme import anchor_of
from flashtrain.spec import task_of
from flashtrain_kernels import masks

RESULTS = ROOT / "recipes" / "results"
# Programs that register something of their own, and the words that a page gives them.
PROGRAMS = (
    "add a model",
    "add a task",
    "add a data source",
    "add an optimizer",
    "add a mask",
    "add a layer",
)
RUN_HERE = {
    *PROGRAMS,
    "add a loss",
    "add a mask, its test",
    "add a layer, its test",
    "add a baseline",
    "add a backend",
    "kernel call",
    "context parallel script",
    "python run",
    "hugging face lightning",
    "lightning batches",
    "chat script",
    "check a collator",
    "check callbacks",
    "text model",
}
RUN_BY_TEST_README = {"lightning script", "attention module", "attention mask", "hugging face"}
RUN_ON_A_RUN = {"label texts"}  # tests/tasks/fine_tuning/test_fine_tuning_runs.py
RUN_ON_RANKS = {"hugging face over several GPUs"}  # tests/distributed/test_huggingface_training.py


@pytest.fixture(autouse=True)
def _forget_registrations() -> Iterator[None]:
    """What a page registered is taken out again; what flashtrain registered on the way stays."""
    yield
    for own in registry._components.values():
        for name in [
            name for name, builder in own.items() if getattr(builder, "__module__", "") == "page"
        ]:
            del own[name]


def run_block(marker: str, **given: Any) -> dict[str, Any]:
    """The variables that a block of the guide leaves behind; it is no program's main module."""
    variables: dict[str, Any] = {"__name__": "page", **given}
    exec(compile(python_blocks()[marker], marker, "exec", dont_inherit=True), variables)
    return variables


def test_every_block_of_python_is_run_by_a_test() -> None:
    assert set(python_blocks()) == RUN_HERE | RUN_BY_TEST_README | RUN_ON_RANKS | RUN_ON_A_RUN


def commands_of(marker: str) -> list[list[str]]:
    """The words after `python train.py` under a program."""
    text = "".join((ROOT / page).read_text(encoding="utf-8") for page in GUIDE)
    block = text.split(f"<!-- commands of: {marker} -->\n```bash\n")[1].split("```")[0]
    return [shlex.split(line)[2:] for line in block.splitlines()]


@pytest.mark.integration
@pytest.mark.parametrize("marker", PROGRAMS)
def test_a_program_that_adds_something_trains_by_the_commands_of_its_page(
    marker: str,
    tiny_runs,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("novel.txt").write_text(
        "\n\n".join(f"Paragraph {number} of a short novel. " * 9 for number in range(20))
    )
    if marker == "add a task":
        text = (ROOT / "docs" / "extend" / "add-a-task.md").read_text(encoding="utf-8")
        Path("my_recipes").mkdir()
        Path("my_recipes", "sorting.yaml").write_text(text.split("```yaml\n")[1].split("```")[0])
        monkeypatch.setenv("FLASHTRAIN_RECIPES", "my_recipes")
        own = [
            word for word in tiny_runs.words if not word.startswith(("data", "model", "generate"))
        ]
        tiny_runs = replace(tiny_runs, words=own)  # what any task has
    run_block(marker)
    # As the program's main() reads them.
    commands = [plain_words(words) for words in commands_of(marker)]
    for words in commands:
        settings_of(words)
    status, folder = tiny_runs.run(marker.replace(" ", "-"), *commands[0])
    assert status == 0
    assert json.loads((folder / "summary.json").read_text())["steps"] == 6
    if marker == "add an optimizer":
        assert "trained 6 steps" in capsys.readouterr().out


@pytest.mark.integration
def test_the_model_of_the_guide_trains_alike_on_ranks_that_share_weights_and_sequences(
    tiny_runs, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(python_blocks()["add a model"])
    first, _, *shared = commands_of("add a model")
    run_block("add a model")
    status, folder = tiny_runs.run("alone", *plain_words(first))
    assert status == 0
    losses = [json.loads((folder / "summary.json").read_text())["train_loss"]]
    for words in shared:
        given = {
            word.partition("=")[0]: word
            for word in [*tiny_runs.words, f"output={tmp_path}", *words]
        }
        given["attention"] = "attention=flash"
        command = [sys.executable, "train.py", *given.values()]
        done = subprocess.run(
            command, cwd=tmp_path, env=checkout_environment(), capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        (row,) = tmp_path.glob("gpt2/*/summary.json")
        losses.append(json.loads(row.read_text())["train_loss"])
        row.unlink()
    assert len(losses) == 3
    assert losses[1:] == pytest.approx(losses[:1] * 2, rel=1e-5)


@pytest.mark.integration
def test_the_model_of_the_guide_is_sampled_evaluated_and_trained_further_by_its_program(
    tiny_runs, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(python_blocks()["add a model"])
    words = tiny_runs.settings_words(f"output={tmp_path}", *commands_of("add a model")[0])
    tiny = [word for word in words if word != "trainer.micro_batch=4"]

    def command(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "train.py", *words],
            cwd=tmp_path,
            env=checkout_environment(),
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    said = command(*tiny)
    assert "micro-batch by measurement" in said
    (folder,) = (path.parent for path in tmp_path.glob("gpt2/*/summary.json"))
    assert (folder / "sample.txt").read_text()
    program, following = said.rsplit("try next: python ", 1)[1].strip().split(" ", 1)
    assert program == "train.py"
    assert command(*shlex.split(following)).startswith("The ")
    assert "perplexity" in command("mode=evaluate", f"checkpoint={folder}")
    assert "micro_batch: 8\n" in (folder / "config.yaml").read_text()  # all samples of a step
    assert "micro-batch by measurement" not in command(f"resume={folder}", "trainer.steps=8")


@pytest.mark.integration
def test_the_distillation_of_the_guide_trains_with_its_own_loss(tiny_runs, trained: Path) -> None:
    from flashtrain.command.api import load

    made = run_block("add a loss")
    words = [
        f"teacher={trained}" if word.startswith("teacher") else word
        for word in commands_of("add a loss")[0]
    ]
    status, folder = tiny_runs.run("distilled", *words, "trainer.micro_batch=4")
    row = json.loads((folder / "summary.json").read_text())
    assert status == 0
    assert row["steps"] == 6
    assert 0 < row["train_loss"] < row["train_loss_first"]
    assert row["validation_loss"] > 0
    assert (folder / "sample.txt").read_text()
    teacher, student = load(trained).model, load(folder).model
    assert (len(teacher.blocks), len(student.blocks)) == (4, 2)
    tokens, labels = torch.randint(257, (2, 2, 32))
    labels[:, ::3] = -100
    log_p, log_q = (
        model(tokens)[..., :257].log_softmax(-1)[labels != -100] for model in (teacher, student)
    )
    distance = torch.nn.functional.kl_div(log_q, log_p, log_target=True, reduction="batchmean")
    entropy = -(log_p.exp() * log_p).sum(-1).mean()
    ours = made["Distilled"](student, teacher=teacher).loss(
        tokens, labels, positions=None, mask=None
    )
    torch.testing.assert_close(ours, distance + entropy)


def test_the_mask_of_the_guide_is_the_rule_in_words_and_what_attention_sees() -> None:
    made = run_block("add a mask")
    variables = run_block(
        "add a mask, its test", **{name: made[name] for name in ("torch", "sinks_and_window")}
    )
    attention, x, mask = variables["attention"].eval(), variables["x"], variables["mask"]
    changed = x.clone()
    changed[:, 20] = 0.0  # which no token after 35 sees
    before, after = attention(x, mask=mask), attention(changed, mask=mask)
    torch.testing.assert_close(before[:, 36:], after[:, 36:], atol=1e-6, rtol=0)
    assert not torch.allclose(before[:, 20:36], after[:, 20:36])


def test_the_layer_of_the_guide_is_its_definition_and_keeps_documents_apart() -> None:
    made = run_block("add a layer")
    run_block("add a layer, its test", **{name: made[name] for name in ("torch", "scan")})
    config = DecoderConfig.of_size(
        "demo", vocab_size=61, context=64, pattern=["recurrence", "full"]
    )
    assert DecoderConfig.of_plain(config.plain()) == config
    model = Decoder(config, attention="sdpa", residual="weights").eval()
    rows = torch.randint(0, 61, (1, 40), generator=torch.Generator().manual_seed(0))
    cache = model.new_cache()
    parts = [
        model(rows[:, :9], cache=cache),
        *(model(rows[:, t : t + 1], cache=cache) for t in range(9, 40)),
    ]
    torch.testing.assert_close(
        torch.cat(parts, 1)[..., :61], model(rows)[..., :61], atol=1e-5, rtol=0
    )
    prompts = [rows[0, :7].tolist(), rows[0, :3].tolist()]  # its rows are generated one by one
    texts = generate(model, prompts, 5, temperature=0)
    assert texts == [generate(model, [one], 5, temperature=0)[0] for one in prompts]
    positions = torch.cat((torch.arange(17), torch.arange(23)))[None]
    mask = masks.document((torch.arange(40) >= 17).long()[None], causal=True)
    packed = model(rows, positions=positions, mask=mask)[..., :61]
    alone = model(rows[:, 17:], positions=positions[:, 17:])[..., :61]
    torch.testing.assert_close(packed[:, 17:], alone, atol=1e-5, rtol=0)


@pytest.mark.parametrize("words", ["context_parallel=2", "mask=window mask.window=8"])
def test_what_the_layer_of_the_guide_cannot_do_is_refused(words: str, tiny_runs) -> None:
    run_block("add a layer")
    settings = settings_of(
        [*tiny_runs.words, "model.pattern=[recurrence]", "trainer.devices=2", *words.split()]
    )
    with pytest.raises(UserError, match="recurrence"):
        task_of(settings).check_step(settings, ())


def test_the_baseline_of_the_guide_gives_the_references_answer() -> None:
    from flashtrain_recipes.attention_benchmark.cases import Case
    from flashtrain_recipes.attention_benchmark.inputs import Context, make_sets
    from flashtrain_recipes.attention_benchmark.reference import expected

    baseline = run_block("add a baseline")["Eager"]()
    device = torch.device("cpu")
    for kind in ("full", "causal"):
        case = Case(2, 4, 64, 16, kind, dtype_name="float32")
        context, one = Context(case, device), make_sets(case, device, 0, 0)[0]
        assert (baseline.missing(device), baseline.refuses(case)) == (None, None)
        assert (
            expected(case, one, context).error(baseline.attend(case, context)(one).detach()) < 2e-5
        )
    assert baseline.refuses(Case(1, 2, 64, 16, "window-9")) is not None


def test_the_backend_of_the_guide_runs_what_it_serves_and_is_explained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from flashtrain_kernels import dispatch, explain, flash_attn_func, masks

    q = torch.randn(1, 70, 2, 16)
    mask = masks.causal(70)
    wanted = flash_attn_func(q, q, q, mask=mask)
    monkeypatch.setattr(
        dispatch, "BACKENDS", (SimpleNamespace(**run_block("add a backend")), *dispatch.BACKENDS)
    )
    monkeypatch.setattr(dispatch, "implementation_for", lambda device_type: "portable")
    monkeypatch.setattr(dispatch, "runs_kernels", lambda device: True)
    torch.testing.assert_close(flash_attn_func(q, q, q, mask=mask), wanted)
    line = explain(q, q, q, mask=mask)
    assert line.startswith("kernels for a new GPU: ")
    assert "forward tiles of 64; backward portable" in line
    assert "(no backward yet)" in line


@pytest.mark.integration
def test_the_script_on_conversations_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FLASHTRAIN_CACHE", str(tmp_path / "cache"))
    save_tokenizer_folder(Path("MODEL"))
    row = {
        "messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi."}]
    }
    Path("chats.jsonl").write_text(f"{json.dumps(row)}\n" * 9)
    code = python_blocks()["chat script"]
    for written, here in {"4096": "128", "500": "2", '"124m"': '"demo"'}.items():
        assert written in code, written
        code = code.replace(written, here)
    variables: dict[str, Any] = {"__name__": "page"}
    exec(code, variables)
    assert variables["trainer"].global_step == 2


def test_the_kernel_call_of_the_guide_says_what_runs_it(capsys: pytest.CaptureFixture[str]) -> None:
    variables = run_block("kernel call")
    assert variables["out"].shape == variables["q"].shape
    assert "tensors are on cpu" in capsys.readouterr().out


def test_the_script_for_eight_gpus_is_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    import pytorch_lightning as pl

    told: dict[str, Any] = {}

    class Trainer:  # eight GPUs are not here: everything up to them is
        def __init__(self, **words: Any) -> None:
            told.update(words)

        def fit(self, task: pl.LightningModule, data: pl.LightningDataModule) -> None:
            told.update(task=task, data=data)

    monkeypatch.setattr(pl, "Trainer", Trainer)
    code = (
        python_blocks()["context parallel script"]
        .replace("1_048_576", "64")
        .replace('"124m"', '"demo"')
    )
    exec(code, {"__name__": "page"})
    assert told["devices"] == told["strategy"].context_parallel_size == 8
    assert isinstance(told["task"], pl.LightningModule)
    assert isinstance(told["data"], pl.LightningDataModule)


@pytest.mark.integration
def test_the_program_of_the_page_about_python_trains_scores_and_writes(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cache_home: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("novel.txt").write_text(
        "\n\n".join(f"Paragraph {number} of a short novel. " * 9 for number in range(20))
    )
    code = (
        python_blocks()["python run"]
        .replace("4096", "64")
        .replace("500", "10")
        .replace("65_536", "512")
    )
    variables: dict[str, Any] = {"__name__": "page"}
    exec(code, variables)
    assert variables["run"].summary["steps"] == 10
    assert variables["run"].folder.parent == tmp_path / "runs" / "gpt2"
    printed = capsys.readouterr().out
    assert "'perplexity': " in printed
    assert "Once upon a time" in printed


@pytest.mark.integration
def test_the_script_with_batches_of_its_own_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = run_block("lightning batches")
    assert (made["trainer"].global_step, made["written"].shape) == (4, (1, 12))
    with pytest.raises(ValueError, match=r"prompt is a list: .* flashtrain\.load"):
        made["generate"](made["model"], [{"role": "user", "content": "Hello!"}], 4)


@pytest.mark.integration
def test_the_script_around_a_hugging_face_model_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("novel.txt").write_text(
        "\n\n".join(f"Paragraph {number} of a short novel. " * 9 for number in range(20))
    )
    monkeypatch.setenv("FLASHTRAIN_CACHE", str(tmp_path))
    task = run_block("hugging face lightning")["task"]
    assert task.last_loss < task.first_loss < 6


def test_the_check_of_the_guide_finds_the_leak_that_it_names() -> None:
    report = run_block("check a collator")["report"]
    assert report.faults[0].check == "documents apart"
    assert "model.layers.0.conv" in report.faults[0].words
    made = run_block("check callbacks")
    assert hasattr(made["of_lightning"], "on_train_start")
    assert hasattr(made["of_transformers"], "on_train_begin")


@pytest.mark.parametrize("kind", ["gemma3", "qwen3_5"])
def test_the_text_model_of_one_that_reads_images_is_saved_as_the_guide_says(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And computes its logits; the model as it was published is refused with that page."""
    import transformers

    from flashtrain import plan

    monkeypatch.chdir(tmp_path)
    (tmp_path / "google").mkdir()
    published = save_tokenizer_folder(Path("google/gemma-3-4b-it"))
    config = transformers.AutoConfig.for_model(kind)
    small = {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 512,
        "num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 48, "depth": 1,
        "num_heads": 2, "out_hidden_size": 32, "image_size": 28, "patch_size": 14,
        "linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 16,
        "linear_value_head_dim": 16, "mm_tokens_per_image": 4, "pad_token_id": 0,
    }  # fmt: skip
    config.text_config.layer_types = config.text_config.layer_types[-2:]
    for one in (config, config.text_config, config.vision_config):
        for name in small.keys() & vars(one).keys():
            setattr(one, name, small[name])
    whole = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    whole.save_pretrained(published)
    run_block("text model")
    text = transformers.AutoModelForCausalLM.from_pretrained("gemma-3-4b-text")
    tokens = torch.randint(4, 500, (1, 20))
    assert torch.equal(text(input_ids=tokens).logits, whole.eval()(input_ids=tokens).logits)
    context = {"context": 64, "trainer.tokens_per_step": 64, "hardware.demo": "never"}
    assert "gemma-3-4b-text" in plan("hf", **context, **{"model.path": "gemma-3-4b-text"})
    with pytest.raises(UserError, match=r"hugging-face\.md"):
        plan("hf", **context, **{"model.path": str(published)})


@pytest.mark.integration
def test_the_notebook_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    notebook = json.loads((ROOT / "docs" / "start" / "notebook.ipynb").read_text(encoding="utf-8"))
    variables: dict[str, Any] = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            assert bool(cell["outputs"]) == ("print" in "".join(cell["source"]))
            exec("".join(cell["source"]), variables)
    assert variables["loss"] < 2.5  # from 5.5: it has learned something
    assert variables["scores"]["validation_loss"] < 2.5
    assert variables["run"].folder.is_relative_to(variables["folder"])
    assert variables["out"].shape == variables["q"].shape
    assert "the quick " in capsys.readouterr().out


@pytest.mark.parametrize("page", shell_blocks())
def test_the_commands_of_programs_and_the_report_and_the_paths_of_shell_lines_are_right(
    page: str,
) -> None:
    """Those of flashtrain itself are test_mode_settings.py's."""
    markers = (*PROGRAMS, "add a loss")
    programs = {
        shlex.join(["python", "train.py", *words])
        for marker in markers
        for words in commands_of(marker)
    }
    for line in shell_blocks()[page]:
        words = shlex.split(line)
        if "flashtrain.report" in words:
            check_report(words[words.index("flashtrain.report") + 1 :])
        elif words[:2] == ["python", "train.py"]:
            assert shlex.join(words) in programs
        for path in re.findall(r"(?<= )(?:tests|recipes|docs)/[\w./-]+", line):
            assert "NAME" in path or (ROOT / path).exists(), line


def check_report(words: list[str]) -> None:
    """A command of the report: its options exist, and so do the figure and the
    columns that it names."""
    options = report._parser().parse_args(words)
    assert options.figure is None or options.figure in registered("figure")
    assert options.sources or options.insert or options.check


@pytest.fixture(scope="module")
def generated() -> Iterator[dict[str, str]]:
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        import generate

        yield generate.pages()
    finally:
        sys.path.remove(str(ROOT / "docs"))


def test_the_diagrams_are_what_the_code_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "docs")
    import diagrams

    monkeypatch.setattr(diagrams, "ASSETS", tmp_path)
    diagrams.main()
    assert [
        path.name
        for path in tmp_path.iterdir()
        if path.read_text() != (ROOT / "docs/assets" / path.name).read_text()
    ] == []


def test_the_pages_from_the_code_are_what_the_code_gives(generated: dict[str, str]) -> None:
    old = [
        name
        for name, text in generated.items()
        if (ROOT / "docs" / name).read_text(encoding="utf-8") != text
    ]
    assert old == [], "run: python docs/generate.py"


def test_a_name_is_shown_on_one_page_and_a_page_links_to_no_folder(
    generated: dict[str, str],
) -> None:
    """Else `mkdocs build --strict` warns, and fails."""
    shown = re.findall(r"^::: (\S+)$", "".join(generated.values()), re.MULTILINE)
    assert len(shown) == len(set(shown)) > 50
    pages = [*ROOT.glob("*.md"), *ROOT.glob("*/*.md"), *ROOT.glob("recipes/*/*.md")]
    for page in [*(ROOT / "docs").rglob("*.md"), *pages]:
        links = re.findall(r"\]\((?!\w+:|#)([^)\s#]+)", page.read_text(encoding="utf-8"))
        folders = [link for link in links if (page.parent / link).is_dir()]
        assert [one for one in folders if not (page.parent / one / "README.md").is_file()] == []


def test_every_setting_and_every_name_has_words(generated: dict[str, str]) -> None:
    for page in ("reference/settings.md", "reference/api.md"):
        assert [line for line in generated[page].splitlines() if line.endswith("|  |")] == []


def test_no_two_settings_share_their_meaning(generated: dict[str, str]) -> None:
    rows = re.findall(
        r"^\| `(\S+)` \| .*? \| `.*?` \| (.+) \|$", generated["reference/settings.md"], re.MULTILINE
    )
    assert len(rows) > 200
    by_meaning: dict[str, list[str]] = {}
    for name, meaning in rows:
        by_meaning.setdefault(meaning, []).append(name)
    assert [names for names in by_meaning.values() if len(names) > 1] == []


def test_the_lines_of_the_troubleshooting_page_are_reported_by_the_code() -> None:
    page = (ROOT / "docs" / "reference" / "troubleshooting.md").read_text(encoding="utf-8")
    lines = re.findall(r"^\| `([^`]+)` \|", page, flags=re.MULTILINE)
    assert len(lines) > 10
    folders = ("flashtrain", "recipes/flashtrain_recipes", "kernels/flashtrain_kernels")
    source = "".join(
        path.read_text(encoding="utf-8")
        for folder in folders
        for path in (ROOT / folder).rglob("*.py")
    )
    source = re.sub(r'"\s*\n\s*f?"', "", source)  # a text over several lines
    assert [line for line in lines if line not in source] == []


def rows_of(name: str) -> list[dict[str, Any]]:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))["rows"]


def ratio_table(marker: str) -> list[list[str]]:
    """The cells of the table under a marker of the benchmarks' page, without its head."""
    page = (ROOT / "docs" / "results" / "benchmarks.md").read_text(encoding="utf-8")
    table = page.split(f"<!-- ratios: {marker} -->\n\n")[1].split("\n\n")[0]
    return [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]
    ]


def test_the_ratios_of_training_steps_are_the_files() -> None:
    speed = {}
    for row in rows_of("gpt2-speed-h200"):
        key = (row["model"], f"{row['context']:,}", str(row["batch"]), row["weights"])
        speed[(*key, row["implementation"])] = row["tokens_per_second"]
    table = ratio_table("gpt2-speed")
    assert len(table) == 7
    for *key, ratio in table:
        ours, theirs = speed[(*key, "flashtrain")], speed[(*key, "plain PyTorch, SDPA, compiled")]
        assert ratio == f"{ours / theirs:.2f}", key


def test_the_ratios_of_bert_and_of_the_arena_are_the_files() -> None:
    bert = [
        f"{max(row.get(key) or 0 for row in rows_of(name)):{form}}"
        for name, key, form in (
            ("bert-speed-h200", "over_random_batches", ".1f"),
            ("bert-speed-buckets-h200", "over_length_buckets", ".2f"),
            ("bert-dropout-h200", "without_dropout", ".2f"),
        )
    ]
    assert [row[1] for row in ratio_table("bert-speed")] == bert
    for name, ours, _ in ratio_table("lra-speed"):
        implementation = {
            "flash": "flashtrain, eager",
            "block-sparse": "flashtrain, block-sparse, eager",
        }[name]
        found = [
            row.get("speedup_over_standard")
            for row in rows_of("lra-speed-h200")
            if row["implementation"] == implementation
        ]
        five = [speedup for speedup in found if speedup]
        assert len(five) == 5
        assert ours == f"{sum(five) / 5:.1f}"


PLAIN = ("full", "causal")
ATTENTION_ROWS: dict[str, Callable[[dict[str, Any]], bool]] = {
    "full and causal, heads to 128": lambda row: row["mask"] in PLAIN and row["head_dim"] <= 128,
    "full and causal, heads of 256": lambda row: row["mask"] in PLAIN and row["head_dim"] == 256,
    "full and causal, heads of 128, from 4,096 tokens": lambda row: (
        row["mask"] in PLAIN and row["head_dim"] == 128 and row["seqlen_q"] >= 4096
    ),
    "full and causal, heads of 64, from 4,096 tokens": lambda row: (
        row["mask"] in PLAIN and row["head_dim"] == 64 and row["seqlen_q"] >= 4096
    ),
    "full and causal, to 2,048 tokens": lambda row: (
        row["mask"] in PLAIN and row["seqlen_q"] <= 2048
    ),
    "windows": lambda row: row["mask"].startswith("window"),
    "packed documents, launching counted": lambda row: row["mask"] == "causal-varlen",
    "all": lambda row: True,
}
CONTENDERS = {
    "flashtrain / the better of cuDNN and FlashAttention-2": (
        "flashtrain",
        ("torch SDPA, cuDNN", "torch SDPA, FlashAttention-2"),
    ),
    "flashtrain / flash-attn-4": ("flashtrain", ("flash-attn-4",)),
    "flashtrain, portable / FlexAttention": ("flashtrain, portable", ("FlexAttention",)),
}


@pytest.mark.parametrize("row", ratio_table("attention"), ids=lambda row: f"{row[0]}, {row[1]}")
def test_the_ratios_of_attention_are_the_files(row: list[str]) -> None:
    names, which, *told = row
    ours, theirs = CONTENDERS[names]
    file = "attention-wide-h200" if "256" in which else "attention-anchors-h200"
    file = "attention-as-called-h200" if "launching" in which else file
    for direction, cell in zip(("forward", "backward"), told, strict=True):
        cases: dict[tuple[Any, ...], dict[str, float]] = {}
        for one in rows_of(file):
            if (
                one.get("direction") == direction
                and one.get("tflops")
                and ATTENTION_ROWS[which](one)
            ):
                key = tuple(
                    one[name]
                    for name in ("batch", "heads", "kv_heads", "seqlen_q", "head_dim", "mask")
                )
                cases.setdefault(key, {})[one["implementation"]] = one["tflops"]
        ratios = [
            case[ours] / max(case[name] for name in theirs if name in case)
            for case in cases.values()
        ]
        low, high = min(ratios), max(ratios)
        assert cell == (f"{low:.2f}" if len(ratios) == 1 else f"{low:.2f} to {high:.2f}"), (
            direction,
            which,
        )


# Counted in epochs, whose steps only a run knows; the tokenizer's own; a launcher's.
UNTRANSLATED = {"evals_per_epoch", "saves_per_epoch", "template", "ddp_timeout"}


def _coming_pages() -> Any:
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        return importlib.import_module("coming_pages")
    finally:
        sys.path.remove(str(ROOT / "docs"))


PAPERS = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")


def test_the_figures_of_the_papers_stand_in_the_sections_of_results_that_they_link_to() -> None:
    results = (RESULTS / "README.md").read_text(encoding="utf-8")
    parts = re.split(r"^#+ (.+)\n", results, flags=re.MULTILINE)
    sections = dict(zip(map(anchor_of, parts[1::2]), parts[2::2], strict=True))
    figures, wrong = 0, []
    for table in re.findall(r"(?:^\|.*\n)+", PAPERS, re.MULTILINE):
        names, _, *rows = (line.strip("| ").split(" | ") for line in table.splitlines())
        for row in rows:
            cells = " ".join(
                row[i] for i, name in enumerate(names) if name in ("the paper", "ours")
            )
            text = "".join(sections[name] for name in re.findall(r"README\.md#([\w-]+)", cells))
            found = re.findall(
                r"(?<![\w.,])\d+(?:,\d{3})*(?:\.\d+)?", re.sub(r"\(\S+\)", "", cells)
            )
            figures += len(found)
            wrong += [n for n in found if not re.search(rf"(?<![\d.,]){n}(?!\d|[.,]\d)", text)]
    assert figures > 20
    assert wrong == []


def test_every_paper_that_the_code_names_by_its_number_is_on_the_page_of_papers() -> None:
    named = {
        number
        for folder in ("flashtrain", "recipes/flashtrain_recipes", "kernels/flashtrain_kernels")
        for file in (ROOT / folder).rglob("*.py")
        for number in re.findall(r"\b[012]\d[01]\d\.\d{4,5}\b", file.read_text(encoding="utf-8"))
    }
    assert sorted(number for number in named if f"abs/{number})" not in PAPERS) == []


@pytest.mark.parametrize("page", ["trl", "axolotl", "llama-factory", "nanogpt"])
def test_a_translated_configuration_sets_what_the_answers_to_its_names_say(page: str) -> None:
    pages = _coming_pages()
    one = pages.trainers()[page]
    words = shlex.split(one["command"].replace("\\\n", " "))
    given = {word.partition("=")[0] for word in words}
    # One command trains, and a second one may export.
    settings_of(plain_words([word for word in words[3:] if "=" in word and "export" not in word
                             and not word.startswith("checkpoint=")]))  # fmt: skip
    assert "optimizer.betas" in given or page == "nanogpt"
    of_answers = 0
    for name, value in pages.names_of(one["config"]).items():
        ours = pages.answer_to(name, value)
        if ours is None or ours.endswith(".") or name in UNTRANSLATED:
            continue
        settings = set(re.findall(r"([a-z_]+(?:\.[a-z_]+)*)(?:=|$|(?= \())", ours))
        # Conversations are named by data.path or data.name; packing and attention are defaults.
        settings |= {"data.path", "data.name"} if "data" in settings else set()
        defaults = ("attention", "mask.documents", "optimizer.weight_decay", "resume=auto")
        assert settings & given or ours.startswith(defaults) or "tokens_per_step" in ours, name
        of_answers += 1
    assert of_answers > 7

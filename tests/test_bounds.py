"""No number, text or file makes a traceback or takes forever: what can't be used ends with one sentence, at once."""

import dataclasses
import io
import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
import tomli_w
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mtjax import cli, config, data
from mtjax.analysis import target
from mtjax.config import Config
from mtjax.config.field_metadata import LAYERS, SAMPLES, WIDTH
from mtjax.data.cache import Cache, check_room
from mtjax.data.samples.sentence_runs import RunOptions, sample_runs
from mtjax.errors import UserError
from mtjax.inspect.contract_file import load_contract
from mtjax.inspect.options import Options as InspectOptions
from mtjax.layout.divisibility import check_config, check_ramp
from mtjax.layout.mesh import AUTO, parse_mesh
from mtjax.runtime.checkpoints.corruption import CorruptedCheckpoint, metadata_checksum, read_metadata
from mtjax.runtime.processes.local import processes_needed
from mtjax.train.observability.metrics import plot_losses, read_metrics
from mtjax.train.options import Options as TrainOptions
from tests.convert.hf_folders import LLAMA_CONFIG

PATIENCE = 60
"""Seconds after which a case counts as one that never ends; each takes a fraction of a second."""


class NeverEnds(Exception):
    pass


@contextmanager
def patience() -> Iterator[None]:
    def give_up(*_: object) -> None:
        raise NeverEnds

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(PATIENCE)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def check_train(words: list[str]) -> None:
    """All that `mtjax train` checks before it takes devices and reads text."""
    chosen = cli.parse(words, "mtjax train", "", TrainOptions).config
    processes_needed(chosen, {})
    if chosen.parallel.mesh != AUTO:
        shape = parse_mesh(chosen.parallel.mesh)
        check_config(chosen, shape)
        check_ramp(chosen, data.batch_schedule(chosen.training).batch_sizes(), shape)


LINES = {
    "a width": (["--hidden-size", "1000000007"], f"hidden_size is 1000000007, and must be at most {WIDTH}"),
    "a prime width": (
        ["--hidden-size", "999983"],
        "hidden_size 999983 is not divisible by .* 1 and 999983",
    ),
    "layers": (["--num-layers", "1000000000"], f"num_layers is 1000000000, and must be at most {LAYERS}"),
    "steps": (["--steps", "1000000000"], f"read 8000000000 samples, and a run has at most {SAMPLES}"),
    "seed": (["--seed", "4294967296"], "seed is 4294967296, and must be at most 4294967295"),
    "time": (["--loader-timeout", "1e300"], r"loader_timeout is 1e\+300, and must be from 1 to 604800 seconds"),
    "fraction": (["--learning-rate", "1e300"], r"learning_rate is 1e\+300, and must be at most 1e\+38"),
    "digits": (["--vocab-size", "9" * 5000], r"--vocab-size is '9+\.\.\.[9 ]+', and must be an integer"),
    "devices": (["--mesh", "999999999999x1"], "has 999999999999 devices; the maximum is"),
    "a long mesh": (["--mesh", "9" * 5000 + "x1"], "has 5002 characters"),
    "a long config": (["--config", "x" * 5000], "--config '.*' can't be read: File name too long"),
    "a long folder": (["--out", "x" * 5000], r"out has 5000 characters \(.*\), and the maximum is 4096"),
    "a zero byte": (
        ["--prompt", "a\0b"],
        "prompt is .*, which contains a character that is not valid in file names and text",
    ),
    "no unicode": (
        ["--out", "a\udcff"],
        "out is .*, which contains a character that is not valid in file names and text",
    ),
    "a ramp": (
        ["--rampup-batch-size", "8", "8", "100000000", "--global-batch-size", "16000000", "--steps", "9"],
        "has 2000000 sizes, each a program to compile, and may have 1000",
    ),
    "scores": (["--sequence-length", "16777216", "--steps", "9", "--num-layers", "9999"], "a tensor has at most 2.60"),
}


@pytest.mark.parametrize("case", LINES)
def test_options_out_of_bounds_are_named(case: str) -> None:
    words, message = LINES[case]
    with patience(), pytest.raises(UserError, match=message):
        check_train([*([] if "--config" in words else ["--config", "gpt2-tiny"]), *words])


FILES = {
    "nested": ("[model]\nx = " + "[" * 3000 + "]" * 3000, "is not valid TOML: its values are nested too deep"),
    "digits": ("[model]\nhidden_size = " + "9" * 5000, "is not valid TOML: .* digits"),
    "encoding": ("[model]\n".encode("utf-16"), "is not valid TOML: .*codec can't decode"),
}


@pytest.mark.parametrize("case", FILES)
@pytest.mark.parametrize("read", [config.load, load_contract, lambda path: target.parse(str(path))])
def test_files_that_are_no_toml_say_so(case: str, read: Any, tmp_path: Path) -> None:
    text, message = FILES[case]
    path = tmp_path / "file.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with patience(), pytest.raises(UserError, match=message):
        read(path)


def test_a_byte_order_mark_is_read_over(tmp_path: Path) -> None:
    path = tmp_path / "windows.toml"
    path.write_bytes(b"\xef\xbb\xbf[model]\r\nhidden_size = 64\r\nnum_heads = 4\r\n")
    assert config.load(path).model.hidden_size == 64


ODD_LINES = ["", "[]", "7", '{"step": true, "loss": 1}', '{"step": "1"}', "[" * 100_000, '{"step": 3, "loss": 9', "\0"]
ODD_VALUES = ['"x"', "[1]", "{}", "null", "1e999", "1" * 400, "true", '"' + "y" * 5000 + '"']


def test_odd_lines_of_metrics_are_left_out_of_the_plot(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    good = ['{"step": 1, "loss": 2.0, "valid_loss": 3}', '{"step": 2, "loss": 1.5, "tokens": 8}']
    path.write_text("\n".join(good + ODD_LINES + [f'{{"step": 3, "loss": {value}}}' for value in ODD_VALUES]) + "\n")
    assert [entry["step"] for entry in read_metrics(path)] == [1, 2] + [3] * len(ODD_VALUES)
    plot_losses(path, tmp_path / "loss.png")
    assert (tmp_path / "loss.png").stat().st_size > 1000


def test_what_no_disk_or_memory_holds_is_refused_before_it_is_begun(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the order of all takes .* GB of memory, and this machine has"):
        check_room(None, 10**18, 0, "the order of all")
    with pytest.raises(UserError, match=r"takes 1,000,000,000.0 GB in the cache .*/no/where, where .* are free"):
        check_room(Cache(tmp_path / "no/where"), 0, 10**18, "the order of all")


@pytest.mark.parametrize("wrong", [{"config": {}}, {"config": []}, {"consumed_samples": "8"}, {"fingerprints": [1]}])
def test_a_page_that_is_none_is_damage_whatever_its_checksum(wrong: dict[str, Any], tmp_path: Path) -> None:
    page = {"config": {"model": {}}, "consumed_samples": 8, "fingerprints": {}}
    (tmp_path / "page").mkdir()
    for content in (page, page | wrong):
        whole = content | {"checksum": metadata_checksum(content)}
        (tmp_path / "page/metadata").write_text(json.dumps(whole))
        if content is page:
            assert read_metadata(tmp_path) == page
    with pytest.raises(CorruptedCheckpoint, match="its metadata is not that of a checkpoint"):
        read_metadata(tmp_path)


def test_samples_too_short_for_a_sentence() -> None:
    with pytest.raises(UserError, match="samples have 1 tokens besides special ones: raise --sequence-length"):
        sample_runs(np.array([3, 3]), np.array([0, 2]), RunOptions(1, 1), 4, seed=1)


def hugging_face(folder: Path, changes: dict[str, Any], files: dict[str, Any] | None) -> int:
    """The exit code of converting a folder with a Llama's config.json and an index of its files."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(LLAMA_CONFIG | changes))
    if files is not None:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return cli.main(["convert", "--from", f"hf:{folder}", "--to", f"mtjax:{folder}-new"])


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "a/b.safetensors", "..", 7, "a\0b"])
def test_an_index_that_points_out_of_its_folder(name: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "secret.safetensors").write_bytes(b"secret")
    assert hugging_face(tmp_path / "model", {}, {"a": name}) == 2
    assert capsys.readouterr().err.endswith("which is not a file in its folder\n")


def test_a_billion_layers_of_hugging_face(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    (tmp_path / "model").mkdir()
    save_file({"model.norm.weight": np.ones(32, np.float32)}, tmp_path / "model/model.safetensors")
    with patience():
        assert hugging_face(tmp_path / "model", {"num_hidden_layers": 10**9}, None) == 2
    assert f"num_hidden_layers is 1000000000, and must be between 1 and {LAYERS}" in capsys.readouterr().err


# --- Fuzzing

NASTY = ["", " ", "0", "-1", "1", "7", "2147483648", "9" * 30, "9" * 5000, "1e300", "1e-300", "nan", "inf", "-inf"]
NASTY += [
    "²",
    "0x10",
    "1_000",
    "None",
    "True",
    "a\0b",
    "\udcff",
    "x" * 5000,
    "../..",
    "/",
    "1,2,3",
    ",",
    "8x8",
    "1x1x1",
]
NASTY += [
    "auto",
    "data=2,model=4",
    "stage=2",
    "--",
    "-",
    "[1]",
    "{}",
    "1e300,nan",
    "llama",
    "t5",
    "bert",
    "full",
    "cosine",
]
VALUES = st.one_of(
    st.sampled_from(NASTY),
    st.integers(-(2**40), 2**40).map(str),
    st.integers(1, 4096).map(str),
    st.floats().map(str),
    st.text(max_size=20),
)
SETTINGS = {
    f.name: hint
    for cls in get_type_hints(Config).values()
    for f, hint in zip(dataclasses.fields(cls), get_type_hints(cls).values(), strict=True)
}


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def word(name: str) -> st.SearchStrategy[list[str]]:
    choices = [str(choice) for choice in get_args(SETTINGS.get(name)) if isinstance(choice, str | int)]
    values = st.one_of(VALUES, st.sampled_from(choices)) if choices else VALUES
    return st.one_of(values.map(lambda value: [flag(name), value]), values.map(lambda value: [f"{flag(name)}={value}"]))


def options(names: list[str]) -> st.SearchStrategy[list[str]]:
    some = st.lists(st.sampled_from(names), max_size=4)
    return some.flatmap(lambda chosen: st.tuples(*map(word, chosen))).map(lambda parts: [w for p in parts for w in p])


INSPECT = ["sweep", "intra_bandwidth", "inter_bandwidth", "target", "price"]
PLAN = [*SETTINGS, "target", "tokens", "gpus", "days", "price", "usable", "exposed_share", "serial_share", "context"]
BASES = st.sampled_from(["gpt2-tiny", "t5-tiny", "bert-tiny", "llama-tiny", "gpt2-8.3b"])
TOML_VALUES = st.recursive(
    st.one_of(
        st.integers(-(2**62), 2**62), st.floats(), st.booleans(), st.text(max_size=9), st.sampled_from(NASTY[:-30])
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner)),
    max_leaves=6,
)
TABLES = st.dictionaries(
    st.one_of(st.sampled_from([f.name for f in dataclasses.fields(Config)]), st.text(max_size=6)),
    st.one_of(
        TOML_VALUES, st.dictionaries(st.one_of(st.sampled_from(list(SETTINGS)), st.text(max_size=6)), TOML_VALUES)
    ),
    max_size=3,
)
JSON_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**30), 10**30),
    st.floats(),
    st.text(max_size=9),
    st.just([1]),
    st.just({}),
)
DATA = ["show nowhere", "info nowhere", "verify a b", "merge --input a --output b", "clean --input a --output b",
        "preprocess --input a --output b --tokenizer c"]  # fmt: skip
DATA_OPTIONS = ["samples", "first", "sequence_length", "seed", "workers", "save_every", "min_tokens", "jaccard", "kind",
                "shingle_words", "tokenizer", "input", "output", "language"]  # fmt: skip
CASES = st.one_of(
    st.tuples(st.just("train"), BASES, options(list(SETTINGS))),
    st.tuples(st.just("inspect"), BASES, options([*SETTINGS, *INSPECT])),
    st.tuples(st.just("plan"), BASES, options(PLAN)),
    st.tuples(st.just("launch"), BASES, options(["processes", "restarts"])),
    st.tuples(st.just("data"), st.sampled_from(DATA), options(DATA_OPTIONS)),
    st.tuples(st.just("toml"), st.just(""), st.one_of(TABLES, st.text(max_size=60), st.binary(max_size=60))),
    st.tuples(st.just("hf"), st.just(""), st.dictionaries(st.sampled_from(list(LLAMA_CONFIG)), JSON_VALUES)),
    st.tuples(st.just("metrics"), st.just(""), st.lists(st.one_of(st.text(max_size=20), st.dictionaries(
        st.sampled_from(["step", "loss", "valid_loss"]), JSON_VALUES).map(json.dumps)), max_size=5)),
)  # fmt: skip


def run_case(kind: str, base: str, content: Any, folder: Path) -> int:
    """The exit code of a case."""
    if kind == "train":
        return cli.run_main(lambda: check_train(["--config", base, *content]))
    if kind == "inspect":
        return cli.run_main(
            lambda: cli.parse(["--config", base, *content], "mtjax inspect", "", InspectOptions).options.check()
        )
    if kind == "plan":
        return cli.main(["plan", "--config", base, *content])
    if kind == "launch":
        return cli.main(["launch", *content])
    if kind == "data":
        return cli.main(["data", *base.split(), *content])
    if kind == "toml":
        path = folder / "case.toml"
        text = content if isinstance(content, bytes) else None
        path.write_bytes(text if text is not None else as_toml(content).encode("utf-8", "surrogateescape"))
        return cli.run_main(lambda: config.validate(config.load(path)))
    if kind == "hf":
        return hugging_face(folder / "case", content, None)
    (folder / "metrics.jsonl").write_text("\n".join(content), errors="replace")
    read_metrics(folder / "metrics.jsonl")
    return 0


def as_toml(content: Any) -> str:
    if isinstance(content, str):
        return content
    return tomli_w.dumps(content)


@pytest.mark.long
@settings(max_examples=120, suppress_health_check=list(HealthCheck), derandomize=True)
@given(case=CASES)
def test_whatever_is_typed_ends_with_a_sentence(case: tuple[str, str, Any], tmp_path_factory: Any) -> None:
    """In this process, without devices or training: code 0, or 2 and one line that begins with `error:`."""
    check_typed(case, tmp_path_factory.getbasetemp())


@pytest.mark.exhaustive
@settings(max_examples=2000, suppress_health_check=list(HealthCheck), derandomize=True)
@given(case=CASES)
def test_thousands_of_cases_end_with_a_sentence(case: tuple[str, str, Any], tmp_path_factory: Any) -> None:
    check_typed(case, tmp_path_factory.getbasetemp())


def check_typed(case: tuple[str, str, Any], folder: Path) -> None:
    with patience(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()) as complained:
        try:
            code = run_case(*case, folder)
        except SystemExit as ended:  # --help
            code = ended.code or 0
    said = complained.getvalue()
    assert code in (0, 2), said
    if code == 2:
        assert said.startswith("error: ")
        assert "Traceback" not in said
        assert len(said) < 2100

"""A Retro from `mtjax train` to its evaluation with and without neighbours, and to other formats."""

import dataclasses
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from mtjax.cli import main as data
from mtjax.commands.convert import main as convert
from mtjax.commands.evaluate import main as evaluate
from mtjax.commands.generate import main as generate
from mtjax.commands.train import main as train
from mtjax.config import Config, Parallel, replace
from mtjax.config.model_identity import differences
from mtjax.convert.mtjax_folder import MtjaxSource
from mtjax.data.datasets import open_dataset
from mtjax.data.neighbours.samples import documents_of
from mtjax.data.samples.split import Split
from mtjax.data.split_opener import SplitOpener
from mtjax.errors import UserError
from mtjax.evaluate.neighbours import NeighbourText
from mtjax.families.retro.megatron_arguments import retro_settings
from mtjax.models.sharded_model import ShardedModel
from mtjax.retrieval.retriever import Retriever
from mtjax.runtime.checkpoints.past import newest_past
from mtjax.runtime.checkpoints.weights import find_weights
from mtjax.sharding.param_specs import dotted
from mtjax.train.changes import find_changes, neighbours_of, with_horizon
from tests.retrieval.tiny_encoder import write_corpus, write_encoder
from tests.tiny import drawn_parameters, mesh_of

pytestmark = pytest.mark.usefixtures("bare_end")
LENGTH, CHUNK, VALID = 32, 8, 8
SETTINGS = {
    "family": "retro",
    "num_layers": 3,
    "hidden_size": 16,
    "num_heads": 2,
    "retro_chunk": CHUNK,
    "retro_first": 2,
    "retro_every": 1,
    "retro_encoder_layers": 1,
    "retro_encoder_dropout": 0.05,
    "vocab_multiple": 128,
    "sequence_length": LENGTH,
    "steps": 3,
    "warmup_steps": 0,
    "learning_rate": 0.01,
    "global_batch_size": 4,
    "valid_every": 3,
    "valid_batches": 2,
    "split": "70,30,0",
    "compute_dtype": "float32",
}


def words(**settings: Any) -> list[str]:
    return [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", str(value))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`corpus`, its neighbours `near`, and `run`, trained with them on two devices."""
    jax.devices()  # all eight, before a command asks for as many as its mesh needs
    pytest.importorskip("safetensors", reason="needs the extra convert: pip install '.[convert]'")
    folder = tmp_path_factory.mktemp("retro")
    write_corpus(folder, 60)
    embedder = ["--embedder", f"hf:{write_encoder(folder / 'bert')}", "--embedder-tokens", "40"]
    embed = ["embed", "--input", str(folder / "corpus"), "--chunk", str(CHUNK), "--rows", "16"]
    assert data(["data", *embed, *embedder]) == 0
    own = words(data=folder / "corpus", neighbours=folder / "near", **SETTINGS)
    assert data(["data", "neighbours", *own, *embedder, "--nearest", "2"]) == 0
    assert train([*own, "--out", str(folder / "run"), "--mesh", "2x1", "--zero", "1"]) == 0
    return folder


@pytest.fixture(scope="module")
def others(folder: Path) -> Path:
    """Beside what the run has read, `other`, a BERT, and `wide`, the corpus in chunks of 16."""
    write_encoder(folder / "other", factor=0.9)
    for end in ("bin", "idx", "meta.json"):
        shutil.copy(folder / f"corpus.{end}", folder / f"wide.{end}")
    embedder = ["--embedder", f"hf:{folder / 'bert'}", "--rows", "16", "--chunk", "16", "--embedder-tokens", "40"]
    assert data(["data", "embed", "--input", str(folder / "wide"), *embedder]) == 0
    return folder


def results(folder: Path, neighbours: str, mesh: str = "1x1") -> dict[str, float]:
    out = folder / f"{Path(neighbours).name}-{mesh}.json"
    options = words(task="perplexity", neighbours=neighbours, mesh=mesh, out=out, rows=3)
    assert evaluate(["--from", str(folder / "run"), *options]) == 0
    return json.loads(out.read_text())["results"]


@pytest.mark.long
def test_perplexity_with_neighbours_is_that_of_training_and_others_differ(folder: Path) -> None:
    """Of the same validation samples, on another mesh."""
    own, none = results(folder, str(folder / "near"), "1x2"), results(folder, "none")
    shuffled = results(folder, "shuffled")
    logged = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    [valid] = [line["valid_loss"] for line in logged if "valid_loss" in line]
    assert own["loss"] == pytest.approx(valid, rel=1e-5)
    assert own["perplexity"] == pytest.approx(math.exp(own["loss"]), rel=1e-6)
    assert len({own["loss"], none["loss"], shuffled["loss"]}) == 3
    # Tokens before the end of the first chunk read nothing.
    assert own["tokens"] == VALID * LENGTH and own["read: tokens"] == VALID * (LENGTH - CHUNK + 1)
    bins = [name for name in own if name.startswith("shared") and name.endswith("tokens")]
    assert bins == ["shared too short: tokens"]  # chunks of 8 have no 13-gram
    assert own[bins[0]] == own["read: tokens"]
    assert own["read: perplexity without"] == pytest.approx(none["read: perplexity"], rel=1e-5)
    gain = math.log(none["read: perplexity"] / own["read: perplexity"])
    assert own["read: gain"] == pytest.approx(gain, abs=1e-5)


def test_tokens_are_counted_by_what_their_neighbours_share() -> None:
    near = [[np.arange(99, 131)] * 2, [np.arange(99, 131), np.arange(31, 63)], [np.arange(32, 64)] * 2]
    dataset: Any = [{"labels": np.arange(48), "neighbours": near}]
    [bins] = NeighbourText(dataset, 1, 16).bins()
    assert bins.tolist() == [-1] * 15 + [0] * 16 + [3] * 16 + [4]  # one token is left: too short


@pytest.mark.long
def test_the_decoder_alone_is_a_gpt(folder: Path) -> None:
    """Its loss is the Retro's without neighbours."""
    assert convert(["--from", f"mtjax:{folder / 'run'}", "--to", f"mtjax:{folder / 'gpt'}", "--without-encoder"]) == 0
    retro, gpt = (MtjaxSource(folder / name) for name in ("run", "gpt"))
    assert gpt.origin.config.model.family == "gpt" and gpt.origin.config.data.neighbours is None
    for ours, stacks in (
        ("mlp.up.weight", ("plain", "first_rest", "retro")),
        ("attention.qkv.bias", ("plain", "first_attention", "retro")),
    ):
        found = list(gpt.slices(gpt.parameters[f"stack.layers.{ours}"]))
        wanted = [next(iter(retro.slices(retro.parameters[f"{stack}.layers.{ours}"]))) for stack in stacks]
        np.testing.assert_array_equal(found, wanted)
    own, theirs = (next(iter(source.slices(source.parameters["final_norm.scale"]))) for source in (gpt, retro))
    np.testing.assert_array_equal(own, theirs)


@pytest.mark.long
def test_a_gpt_becomes_the_decoder_of_a_new_retro(folder: Path, capsys: Any) -> None:
    """What a GPT has is kept to the bit, and the rest is what a run with this seed would draw."""
    gpt, back = folder / "a-gpt", folder / "from-gpt"
    assert convert(["--from", f"mtjax:{folder / 'run'}", "--to", f"mtjax:{gpt}", "--without-encoder"]) == 0
    file = folder / "retro.toml"
    wrong = {
        "num_layers = 4": "num_layers 4, and the weights of the gpt have 3",
        'family = "bert"': "the family bert",
        "retro_final_norm = false": "has a final norm, which would be lost",
    }
    for line, message in wrong.items():
        file.write_text(f"[model]\n{line}\n")
        assert convert(["--from", f"mtjax:{gpt}", "--to", f"mtjax:{back}", "--with-encoder", str(file)]) == 2
        assert message in capsys.readouterr().err
    names = ("retro_chunk", "retro_first", "retro_every", "retro_encoder_layers", "retro_encoder_dropout")
    lines = [f"{name} = {SETTINGS[name]}" for name in names]
    file.write_text("\n".join(["[model]", *lines, "[training]", "seed = 7"]))
    assert convert(["--from", f"mtjax:{gpt}", "--to", f"mtjax:{back}", "--with-encoder", str(file)]) == 0
    assert "are drawn with seed 7" in capsys.readouterr().out
    found, known = MtjaxSource(back), MtjaxSource(folder / "run")
    assert not differences(found.origin.config.model, known.origin.config.model)
    drawn = ShardedModel(dataclasses.replace(known.origin.config, parallel=Parallel()), mesh_of("1x1"))
    drawn = {dotted(path): array for path, array in jax.tree_util.tree_leaves_with_path(drawn_parameters(drawn, 7))}
    for name, parameter in found.parameters.items():
        kept = list(known.slices(known.parameters[name]))
        is_new = "chunked" in name or name.startswith(("encoder", "first_norm"))
        wanted = drawn[name] if is_new and parameter.num_layers else [drawn[name]] if is_new else kept
        np.testing.assert_array_equal(list(found.slices(parameter)), wanted, err_msg=name)


@pytest.mark.long
@pytest.mark.parametrize("impl", ["local", "transformer_engine"])
def test_megatrons_format_holds_the_same_weights(folder: Path, impl: str, capsys: Any) -> None:
    pytest.importorskip("torch", reason="needs the extra megatron: pip install '.[megatron]'")
    theirs, back = folder / f"megatron-{impl}", folder / f"back-{impl}"
    options = ["--tensor", "2", "--transformer-impl", impl]
    assert convert(["--from", f"mtjax:{folder / 'run'}", "--to", f"megatron:{theirs}", *options]) == 0
    note = (
        "0.15 has no final norm (retro_final_norm true) and reads neighbours in the layers 6, not 2, 3 (retro_first, "
    )
    assert note in capsys.readouterr().out
    assert convert(["--from", f"megatron:{theirs}", "--to", f"mtjax:{back}", "--vocab-multiple", "128"]) == 0
    found, known = (find_weights(at).metadata["fingerprints"] for at in (back, folder / "run"))
    names = [name for name in found if name != "parameters.embedding"]  # its rows of padding are not converted
    assert len(names) == 75 and all(found[name] == known[name] for name in names)
    models = [MtjaxSource(at).origin.config.model for at in (back, folder / "run")]
    names = ("retro_first", "retro_every", "retro_chunk", "retro_encoder_layers", "retro_encoder_dropout")
    assert len({tuple(getattr(model, name) for name in names) for model in models}) == 1


def test_megatrons_dropout_of_the_encoder_is_one_number() -> None:
    names = ("decoder.layers.1.cross_attention.encoder.layers.0.x", "decoder.layers.1.cross_attention.attn.x")
    arguments = {"num_layers": 2, "retro_encoder_hidden_dropout": 0.0, "retro_encoder_attention_dropout": 0.0}
    assert retro_settings(arguments, names)["retro_encoder_dropout"] == 0.0
    assert retro_settings({"num_layers": 2}, names)["retro_encoder_dropout"] == 0.1
    with pytest.raises(UserError, match="retro_encoder_hidden_dropout is 0.2 and retro_encoder_attention_dropout 0.0"):
        retro_settings(arguments | {"retro_encoder_hidden_dropout": 0.2}, names)


@pytest.fixture
def search(folder: Path, tmp_path: Path) -> Iterator[Callable[..., None]]:
    """Replaces the run's neighbours, until the test ends."""

    def replaced(*options: str, **settings: Any) -> None:
        own = words(data=folder / "corpus", neighbours=folder / "near", **SETTINGS | settings)
        embedder = ["--embedder", f"hf:{folder / 'bert'}", "--embedder-tokens", "40", "--overwrite"]
        assert data(["data", "neighbours", *own, *embedder, *options]) == 0

    for path in folder.glob("near.*"):
        shutil.copy(path, tmp_path)
    yield replaced
    for path in tmp_path.glob("near.*"):
        shutil.copy(path, folder)


@pytest.mark.long
def test_a_resumed_run_reads_the_neighbours_that_it_has_read(
    folder: Path, tmp_path: Path, search: Callable[..., None], capsys: Any
) -> None:
    """Others under the same prefix are refused, or said; the same ones, and those of more samples, are not."""
    past = newest_past(folder / "run" / "checkpoints")
    assert past is not None and past.record is not None
    recorded, longer = past.record.position.neighbours, replace(past.config, steps=4)
    assert [(each.split, each.samples) for each in recorded] == [("train", 12), ("valid", VALID)]
    assert neighbours_of(past, past.config, ()) == recorded == neighbours_of(None, past.config, ())

    position = past.record.position

    def rows(config: Config) -> list[str]:
        changes = find_changes(past, config, with_horizon(config, past.horizon), position)
        return [change.setting for change in changes if "neighbours" in change.setting]

    search("--nearest", "2", "--earlier", "12", steps=4)
    grown = neighbours_of(past, longer, ())
    assert [each.samples for each in grown] == [16, VALID] and grown[1] == recorded[1] and not rows(longer)
    search("--nearest", "3", "--of", "train")  # two of them are read: that the others are new is said, too
    own = words(data=folder / "corpus", neighbours=folder / "near", **SETTINGS)
    assert train([*own, "--out", str(folder / "run"), "--mesh", "2x1", "--zero", "1", "--resume"]) == 2
    said = capsys.readouterr().err
    assert f"{folder / 'near'}.train.npy holds other neighbours than the run has read" in said
    [now, valid] = neighbours_of(past, past.config, ("neighbours",))
    assert now.content != recorded[0].content and valid == recorded[1]
    assert rows(past.config) == ["neighbours of train"]
    elsewhere = replace(past.config, neighbours=str(tmp_path / "near"))
    assert neighbours_of(past, elsewhere, ()) == recorded and rows(elsewhere) == ["neighbours"]


@pytest.mark.long
def test_a_run_goes_on_with_other_neighbours(
    folder: Path, tmp_path: Path, search: Callable[..., None], capsys: Any
) -> None:
    shutil.copytree(folder / "run", tmp_path / "run")
    search("--nearest", "3", "--earlier", "12", steps=4)
    own = words(data=folder / "corpus", neighbours=folder / "near", **SETTINGS | {"steps": 4})
    own += ["--out", str(tmp_path / "run"), "--mesh", "2x1", "--zero", "1", "--min-learning-rate", "0.001", "--resume"]
    assert train(own) == 2
    assert "--allow-changed neighbours" in capsys.readouterr().err
    assert train([*own, "--allow-changed", "neighbours"]) == 0
    said = capsys.readouterr().out
    assert "neighbours of train" in said and "neighbours of valid" in said
    position = find_weights(tmp_path / "run").metadata["run"]["data"]
    assert position["order"] == {"begins": 0, "totals": [12, 16]}
    assert [each["samples"] for each in position["neighbours"]] == [16, VALID]
    assert train([*own, "--steps", "4"]) == 0  # the new ones are those that it has read


def parts_of(folder: Path) -> tuple[Any, Any]:
    """The run's model settings and its tokenizer."""
    config = find_weights(folder / "run").config
    return config.model, SplitOpener(config, "train", None).text.tokenizer


def retriever_of(folder: Path, *prefixes: str, **options: Any) -> Retriever:
    return Retriever([str(folder / prefix) for prefix in prefixes], *parts_of(folder), **options)


@pytest.mark.long
def test_a_retriever_finds_what_a_runs_files_have(folder: Path) -> None:
    """For the chunks of its samples, without the documents that these read; the file has int32 numbers."""
    config, found = find_weights(folder / "run").config, retriever_of(folder, "near", rows=3)
    counts: dict[Split, int] = {"train": 12, "valid": VALID}
    for split, count in counts.items():
        dataset: Any = open_dataset(config, split, count)
        rows, written = np.load(folder / f"near.{split}.npy"), []
        for number in range(count):
            sample = dataset[number]
            own = documents_of(dataset.dataset, number)[1]
            numbers, distances = found.find(np.split(sample["tokens"], LENGTH // CHUNK), [own.tolist()] * 4)
            assert (np.diff(distances) >= 0).all()
            np.testing.assert_array_equal(found.tokens(numbers), sample["neighbours"])
            written.append(numbers)
        np.testing.assert_array_equal(np.concatenate(written), rows)


@pytest.mark.long
def test_a_corpus_by_itself_is_searched_whole(folder: Path, tmp_path: Path) -> None:
    """As `data neighbours --queries` does, and by an index of faiss where the run's neighbours were made with one."""
    stored = str(folder / "corpus.embeddings.npy")
    words = ["--queries", stored, "--embeddings", stored, "--nearest", "2", "--output", str(tmp_path / "near.npy")]
    assert data(["data", "neighbours", *words]) == 0
    found, wanted = retriever_of(folder, "corpus", rows=16), np.load(tmp_path / "near.npy")
    chunks = found.database.chunks
    pieces = [chunks.tokens(number) for number in range(len(chunks))]
    own = chunks.documents(np.arange(len(chunks)))
    numbers, distances = found.find(pieces, [[document] for document in own.tolist()])
    np.testing.assert_array_equal(numbers, wanted)
    np.testing.assert_array_equal(distances, np.load(tmp_path / "near.distances.npy"))
    # The text itself is found where its document is not left out.
    numbers, distances = found.find(pieces[:9], [()] * 9)
    assert distances[:, 0].max() < 1e-3 and numbers[0, 0] == 0
    [first, _] = found.sources(numbers[1], distances[1])
    document = chunks.corpora[0][first.document]
    assert f"{folder / 'corpus'}:{first.document} from token {first.token} (distance" in str(first)
    assert (
        first.text
        == found._tokenizer.decode(document[first.token : first.token + 2 * CHUNK].tolist())
        .replace(found._tokenizer.token(found._tokenizer.eod), "")
        .strip()
    )


@pytest.mark.long
def test_an_index_of_faiss_is_that_of_the_runs_neighbours(folder: Path, capsys: Any) -> None:
    pytest.importorskip("faiss", reason="needs the extra faiss: pip install '.[faiss]'")
    own = words(data=folder / "corpus", **SETTINGS)
    options = ["--nearest", "5", "--index", "IVF24,Flat", "--nprobe", "2", "--output", str(folder / "ivf")]
    embedder = ["--embedder", f"hf:{folder / 'bert'}", "--embedder-tokens", "40"]
    assert data(["data", "neighbours", *own, *embedder, *options]) == 0
    assert "training IVF24,Flat" in capsys.readouterr().err
    found = retriever_of(folder, "ivf", rows=4)
    assert "training" not in capsys.readouterr().err  # its index was kept
    assert "IVF24,Flat, sample 1048576, nprobe 2" in found.described()
    dataset: Any = open_dataset(find_weights(folder / "run").config, "train", 12)
    rows, exact = np.load(folder / "ivf.train.npy").reshape(12, 4, 5), np.load(folder / "near.train.npy")
    for number in range(12):
        own = documents_of(dataset.dataset, number)[1].tolist()
        pieces = np.split(dataset[number]["tokens"], 4)
        np.testing.assert_array_equal(found.find(pieces, [own] * 4)[0], rows[number, :, :2])
    assert (rows[:, :, :2].reshape(-1, 2) != exact).any()


def lines_of(path: Path) -> list[dict[str, Any]]:
    return sorted((json.loads(line) for line in path.read_text().splitlines()), key=lambda line: line["index"])


@pytest.mark.long
def test_retrieved_neighbours_are_those_that_could_be_given(folder: Path, tmp_path: Path, capsys: Any) -> None:
    """Texts of a file, some at a time, one by one on the command line, and with what was found given by hand."""
    texts = [json.loads(line)["text"].split() for line in (folder / "texts.jsonl").read_text().splitlines()]
    long = [(number, " ".join(text)) for number, text in enumerate(texts) if 18 <= len(text) <= 26][:3]
    assert len(long) == 3
    prompts: list[dict[str, Any]] = [{"prompt": text} for _, text in long]
    prompts += [{"prompt": long[0][1], "without_documents": [long[0][0], f"corpus:{long[1][0]}"]}]

    def written(name: str, lines: list[dict[str, Any]], *options: str) -> list[dict[str, Any]]:
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        files = ["--input", str(tmp_path / f"{name}.jsonl"), "--output", str(tmp_path / f"{name}.out")]
        texts = ["--ignore-eos", "--max-tokens", "40", "--logprobs"]
        assert generate(["--from", str(folder / "run"), *files, *texts, *options]) == 0
        return lines_of(tmp_path / f"{name}.out")

    search = ["--retrieve", str(folder / "corpus"), "--sources"]
    found = written("found", prompts, *search, "--batch", "3")
    # The prompt itself is the nearest to it, with what follows, unless it is left out.
    assert [found[place]["sources"][0][0]["document"] for place in range(3)] == [number for number, _ in long]
    assert not {s["document"] for each in found[3]["sources"] for s in each} & {long[0][0], long[1][0]}
    assert len(found[0]["sources"]) == LENGTH // CHUNK - 1  # nothing is written behind the last chunk
    given = [
        {"prompt": line["prompt"], "neighbours": [[source["text"] for source in each] for each in line["sources"]]}
        for line in found
    ]
    by_hand = written("given", given, "--batch", "1")
    assert [line["text"] for line in by_hand] == [line["text"] for line in found]
    without = written("none", [{"prompt": line["prompt"]} for line in prompts], "--batch", "3")
    for line, same, other in zip(found, by_hand, without, strict=True):
        ours, theirs, none = ([token["logprob"] for token in each["logprobs"]] for each in (line, same, other))
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
        assert not np.allclose(ours, none, atol=1e-4)
    capsys.readouterr()
    assert generate(["--from", str(folder / "run"), long[0][1], "--ignore-eos", "--max-tokens", "40", *search]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == found[0]["text"]
    first = found[0]["sources"][0][0]
    assert out[1].startswith(f"chunk 1 read {folder / 'corpus'}:{first['document']} from token {first['token']} (dist")
    # An output goes on with the same search only.
    others = ((["--retrieve", str(folder / "near"), "--sources"], "was generated with"), ([], "those of --retrieve"))
    for changed, message in others:
        files = ["--input", str(tmp_path / "found.jsonl"), "--output", str(tmp_path / "found.out")]
        texts = ["--ignore-eos", "--max-tokens", "40", "--logprobs"]
        assert generate(["--from", str(folder / "run"), *files, *texts, *changed]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.long
def test_a_run_is_loaded_onto_virtual_devices(folder: Path) -> None:
    """In a process of its own: looking at the weights must not fix the number of devices."""
    words = ["--from", str(folder / "run"), "--mesh", "1x2", "--retrieve", str(folder / "near"), "the river"]
    command = [sys.executable, "-m", "mtjax.generate", *words, "--max-tokens", "2", "--compile-cache", "off"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | {"XLA_FLAGS": ""})
    assert done.returncode == 0, done.stderr


@pytest.mark.long
@pytest.mark.parametrize(
    ("command", "options", "message"),
    [
        (evaluate, "--task perplexity --data {0}/corpus", "a retro reads neighbours, which this text does not have"),
        (evaluate, "--task perplexity --neighbours none --data x", "--data x has no effect with --neighbours"),
        (evaluate, "--task lambada --neighbours none", "--neighbours none has no effect without --task perplexity"),
        (evaluate, "--task perplexity --neighbours {0}/absent", "{0}/absent.valid.json does not exist"),
        (generate, "--interactive", "a retro runs the whole model for each token and does not support --interactive"),
        (
            generate,
            "--retrieve {0}/absent x",
            "--retrieve {0}/absent is the prefix of neighbours or of a corpus, and neither",
        ),
        (generate, "--retrieve {0}/near --retrieve {0}/corpus x", "--retrieve {0}/near has neighbours of a run"),
        (generate, "--retrieve {0}/corpus --retrieve {0}/./corpus x", "are the same text: remove one"),
        (
            generate,
            "--retrieve {0}/near --embedder hf:{0}/other x",
            "with other weights or another tokenizer than hf:{0}/oth",
        ),
        (generate, "--retrieve {0}/near --embedder {0}/run x", "is of the family retro, and must be a bert"),
        (generate, "--retrieve {0}/near --without-document 60 x", "has 60 documents, from 0 to 59, and no document 60"),
        (
            generate,
            "--retrieve {0}/near --without-document a:1 x",
            "no corpus a, of which document 1 would be: name {0}/co",
        ),
        (
            generate,
            "--retrieve {0}/near --without-document -1 x",
            "-1 names no document: give its number, or CORPUS:NUM",
        ),
        (generate, "--retrieve {0}/wide x", "was made with --chunk 16, and the model's retro_chunk is 8"),
        (generate, "--sources x", "--sources requires --retrieve: add that, or remove it"),
        (generate, "--retrieve {0}/near --interactive", "a retro runs the whole model for each token and does not"),
        (
            convert,
            "--to hf:{0}/hf",
            "transformers has no model of the family retro: write its decoder as a gpt with --without-encoder",
        ),
        (convert, "--to megatron:{0}/m --pipeline 3", "--pipeline 3 does not support a retro, which has no stages"),
        (convert, "--to megatron:{0}/m --ckpt-format torch_dist", "a retro is written in the format torch only"),
        (convert, "--to megatron:{0}/m --transformer-impl legacy", "not support family retro"),
    ],
)
def test_wrong_input_is_one_sentence(
    folder: Path, others: Path, command: Any, options: str, message: str, capsys: Any
) -> None:
    assert command(["--from", str(folder / "run"), *options.format(folder).split()]) == 2
    error = capsys.readouterr().err
    assert message.format(folder) in error and "Traceback" not in error


@pytest.mark.long
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mesh": "1x2x1", "microbatch_size": 2}, "pipeline parallelism (stage=2 in mesh"),
        ({"mesh": "data=1,context=2,model=1"}, "context parallelism (context=2 in mesh"),
        ({"reset_attention_mask": "true"}, "reset_attention_mask does not support the family retro"),
        ({"retro_first": 4}, "retro_first is 4, and num_layers is 3"),
        ({"retro_chunk": 5}, "sequence_length 32 is not a multiple of retro_chunk 5"),
        ({"retro_retrieved_chunks": 5}, "a neighbour has 40 tokens"),
        ({"num_experts": 2}, "num_experts"),
    ],
)
def test_settings_that_do_not_go_along_are_refused(folder: Path, settings: dict, message: str, capsys: Any) -> None:
    own = words(data=folder / "corpus", neighbours=folder / "near", **(SETTINGS | settings), out=folder / "refused")
    assert train([word for word in own if word != "true"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.long
def test_texts_with_neighbours_of_their_lines(folder: Path, capsys: Any) -> None:
    rows = [
        {"prompt": "the river and one stone", "passages": ["two light"], "max_tokens": 3},
        {"prompt": "the river and one stone", "neighbours": [["two light", "over"]], "seed": 3},
        {"prompt": "the river"},
        {"prompt": "the river", "passages": "two light"},
    ]
    lines, out = folder / "prompts.jsonl", folder / "answers.jsonl"

    def written(count: int, *more: str) -> tuple[int, list[dict]]:
        lines.write_text("".join(json.dumps(row) + "\n" for row in rows[:count]))
        code = generate(["--from", str(folder / "run"), "--input", str(lines), "--output", str(out), *more])
        return code, lines_of(out)

    code, first = written(1, "--max-tokens", "5", "--ignore-eos")
    assert code == 0
    code, found = written(3, "--max-tokens", "5", "--ignore-eos")
    assert code == 0 and found[:1] == first  # what was there is kept
    assert [each["finish_reason"] for each in found] == ["length"] * 3
    assert [each.get("settings", {}) for each in found] == [
        {key: value for key, value in row.items() if key != "prompt"} for row in rows[:3]
    ]
    rows[0]["passages"] = ["another"]
    capsys.readouterr()
    assert written(3, "--max-tokens", "5", "--ignore-eos") == (2, found)
    assert '"passages": ["another"]' in capsys.readouterr().err.replace("\\", "")
    rows[0]["passages"] = ["two light"]
    assert written(4, "--max-tokens", "5", "--ignore-eos") == (2, found)
    assert f'{lines}:4: "passages" is two light, and must be a list of texts' in capsys.readouterr().err
    assert generate(["--from", str(folder / "run"), "--max-tokens", "4", "the river", "one stone"]) == 0
    assert "--- 'the river'" in capsys.readouterr().out

"""Saving over a checkpoint: if it is killed at any moment, the old model or the new one is there, never a mixture."""

import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
from typing import NamedTuple

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from liger_jax.models import LlamaForCausalLM, generate
from liger_jax.models.hugging_face import saving
from liger_jax.models.hugging_face.checkpoint import ADAPTERS, files_that_complete
from liger_jax.models.hugging_face.source import Source
from tests.models._llama import CONFIG, make_model, random_tokens
from tests.ops._oracle import first

# --- a process that is killed ---------------------------------------------------------------------------------------


class Killed(BaseException):
    """The process is dead: whatever it still tries to do with a file has no effect."""


class Killer:
    """Allows this number of operations on files, then kills the process."""

    CHANGES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree", "os.truncate")

    def __init__(self):
        self.armed, self.count, self.at, self.opened = False, 0, -1, ""

    def hook(self, event, arguments):
        """Python's audit hook."""
        if not self.armed:
            return
        if event == "open":
            self.opened = arguments[0]
            writes = arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            if writes:
                self.step()
        elif event in self.CHANGES:
            self.step()

    def step(self, torn=None):
        """One operation; when the process is killed in it, half of the file `torn` is on the disk."""
        if not self.armed:
            return
        if self.count >= self.at >= 0:
            if self.count == self.at and torn and os.path.isfile(torn):
                self.armed = False
                os.truncate(torn, os.path.getsize(torn) // 2)
                self.armed = True
            self.count = max(self.count, self.at + 1)
            raise Killed
        self.count += 1

    def run(self, at, function, *arguments) -> int:
        """Calls the function and kills it at this operation, or never for -1; returns how many there were."""
        self.armed, self.count, self.at = True, 0, at
        try:
            with contextlib.suppress(Killed):
                function(*arguments)
        finally:
            self.armed = False
        return self.count


KILLER = Killer()
sys.addaudithook(KILLER.hook)


@pytest.fixture
def killer(monkeypatch):
    def fsync(file):  # unsynced data may be lost; the real fsync takes milliseconds
        KILLER.step(torn=KILLER.opened)

    monkeypatch.setattr(os, "fsync", fsync)
    return KILLER


# --- what is saved and read ------------------------------------------------------------------------------------------


class Model(NamedTuple):
    """The parts of a checkpoint that must fit each other: config.json, the weights and the other small files."""

    theta: int
    weight: float
    generation: str | None = None
    tokenizer: str = "t"


def save(model: Model, folder, num_shards):
    tensors = {name: np.full(3, model.weight, np.float32) for name in "abc"}
    parts = [tensors] if num_shards == 1 else [{"a": tensors.pop("a")}, tensors][:num_shards]
    config = json.dumps({"theta": model.theta, "of no import": model.weight})
    files = {"config.json": config, "generation_config.json": model.generation, "tokenizer.json": model.tokenizer}
    contents = {name: None if text is None else text.encode() for name, text in files.items()}
    saving.write(folder, parts, contents, meaning)


def meaning(folder):
    return Source(folder).config["theta"]


def read(folder) -> Model:
    """One file counts more than an index, as in transformers."""
    theta, names = meaning(folder), ["model.safetensors"]
    if not (folder / names[0]).exists():
        weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
        assert sorted(weight_map) == ["a", "b", "c"]
        names = set(weight_map.values())
    tensors = {name: x for file in names for name, x in load_file(folder / file).items()}
    assert sorted(tensors) == ["a", "b", "c"]
    (weight,) = np.unique(np.concatenate(list(tensors.values()))).tolist()
    text = lambda path: path.read_text() if path.exists() else None
    return Model(theta, weight, text(folder / "generation_config.json"), text(folder / "tokenizer.json") or "")


def read_or_mend(folder) -> Model:
    """Follows the error's advice, if there is an error."""
    try:
        return read(folder)
    except FileNotFoundError as error:
        message = r"has no config.json, since a save into it was cut off. Save the model again, or move the files of "
        found = re.search(message + r"(\S+) to (\S+) to have the model", str(error))
        if not found:
            raise
        for path in os.listdir(found[1]):
            shutil.move(os.path.join(found[1], path), os.path.join(found[2], path))
        return read(folder)


def assert_nothing_else_is_there(folder, num_shards):
    names = {path.name for path in folder.iterdir()}
    assert len([name for name in names if name.endswith(".safetensors")]) == num_shards
    small = {"config.json", "generation_config.json", "tokenizer.json", "model.safetensors.index.json"}
    assert {name for name in names if not name.endswith(".safetensors")} <= small
    assert ("model.safetensors.index.json" in names) == (num_shards > 1)


OLD = Model(1, 1.0, generation="old")
TRANSITIONS = list(itertools.product((1, 2), repeat=2))
CHANGES = {
    "weights": OLD._replace(weight=2.0),
    "all": Model(2, 2.0, generation="new", tokenizer="new"),
    "config": OLD._replace(weight=2.0, theta=2),
    "small files": OLD._replace(weight=2.0, generation=None, tokenizer="new"),
}
each_transition = pytest.mark.parametrize("shards, new_shards", TRANSITIONS, ids=lambda n: f"{n}_files")


@each_transition
@pytest.mark.parametrize("change", first(2, tuple(CHANGES)))
def test_a_kill_at_any_file_operation_leaves_the_old_model_or_the_new(
    change, shards, new_shards, killer, tmp_path, rng
):
    new, third = CHANGES[change], Model(3, 3.0)
    save(OLD, tmp_path / "old", shards)
    shutil.copytree(tmp_path / "old", tmp_path / "whole")
    count = killer.run(-1, save, new, tmp_path / "whole", new_shards)
    assert count > 10 and read(tmp_path / "whole") == new
    found = []
    for at in range(count):
        folder = tmp_path / str(at)
        shutil.copytree(tmp_path / "old", folder)
        killer.run(at, save, new, folder, new_shards)
        shutil.copytree(folder, tmp_path / f"mended-{at}")
        found.append(read(folder) if change == "weights" else read_or_mend(tmp_path / f"mended-{at}"))
        # The next save is killed, too, and the one after it is not.
        killer.run(int(rng.integers(count)), save, third, folder, shards)
        shutil.copytree(folder, tmp_path / f"again-{at}")
        assert read_or_mend(tmp_path / f"again-{at}") in (found[-1], third)
        save(third, folder, new_shards)
        assert read(folder) == third
        assert_nothing_else_is_there(folder, new_shards)
    assert set(found) == {OLD, new} and found == sorted(found, key=[OLD, new].index)


@pytest.mark.parametrize("num_shards", [1, 2])
def test_a_first_save_that_is_killed_leaves_no_model_or_a_whole_one(num_shards, killer, tmp_path):
    messages = []
    for at in range(killer.run(-1, save, OLD, tmp_path / "whole", num_shards)):
        folder = tmp_path / str(at)
        killer.run(at, save, OLD, folder, num_shards)
        try:
            assert read_or_mend(folder) == OLD
        except FileNotFoundError as error:
            messages.append(str(error))
        save(OLD, folder, num_shards)
        assert read(folder) == OLD
        assert_nothing_else_is_there(folder, num_shards)
    assert all("has no config.json" in message for message in messages)
    assert "since the first save into it was cut off. Save the model again" in messages[-1]


def test_a_model_with_another_config_is_read_whole_or_not_at_all(killer, tmp_path):
    old = make_model()
    new = make_model(dataclasses.replace(CONFIG, rope_theta=500.0), seed=1)  # it has the same shapes
    old.save_pretrained(tmp_path / "old")
    shutil.copytree(tmp_path / "old", tmp_path / "whole")
    found = []
    for at in range(0, killer.run(-1, new.save_pretrained, tmp_path / "whole"), 3):
        folder = shutil.copytree(tmp_path / "old", tmp_path / str(at))
        killer.run(at, new.save_pretrained, folder)
        try:
            model = LlamaForCausalLM.from_pretrained(folder)
        except FileNotFoundError as error:
            assert re.search("has no config.json, since a save into it was cut off. Save .* or move the", str(error))
            found.append("none")
        else:
            of = {"old": old, "new": new}
            found.append(next(name for name in of if model.config == of[name].config and is_equal(model, of[name])))
    assert list(dict.fromkeys(found)) == ["old", "none", "new"]


CHILD = """
import itertools, sys
from tests.models._llama import make_model
models = [make_model(seed=i) for i in range(2)]
for i in itertools.count():
    models[i % 2].save_pretrained(sys.argv[1], max_shard_bytes=(10**9, 20_000)[i // 2 % 2])
    print(i, flush=True)
"""


def test_after_kill_9_a_whole_model_is_read(tmp_path, rng):
    root = pathlib.Path(__file__).parents[2]
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(tmp_path)], cwd=root, stdout=subprocess.PIPE)
    with child:
        assert child.stdout and child.stdout.readline()
        time.sleep(rng.uniform(0, 0.5))
        child.kill()
    found = LlamaForCausalLM.from_pretrained(tmp_path)
    assert any(is_equal(found, make_model(seed=seed)) for seed in range(2))
    make_model(seed=2).save_pretrained(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def is_equal(model, other):
    return jax.tree.all(jax.tree.map(np.array_equal, nnx.state(model), nnx.state(other)))


# --- adapters ---------------------------------------------------------------------------------------------------------


def save_adapters(value, folder):
    """Adapters of this value in each file; only those of 1 have an added_tokens.json."""
    small = {name: str(value).encode() for name in ("adapter_config.json", "tokenizer.json")}
    small["added_tokens.json"] = b"1" if value == 1 else None
    saving.write_adapters(folder, {"a": np.full(3, value, np.float32)}, small)


def adapters_in(folder):
    """The value of all files, or `None` if the folder has no adapters."""
    if not (folder / "adapter_config.json").exists():
        return None
    small = [(folder / name).read_text() for name in ("adapter_config.json", "tokenizer.json")]
    values = {*load_file(folder / "adapter_model.safetensors")["a"].tolist(), *map(float, small)}
    assert len(values) == 1 and (folder / "added_tokens.json").exists() == (values == {1.0})
    return values.pop()


def test_a_kill_at_any_file_operation_leaves_the_old_adapters_or_the_new(killer, tmp_path):
    save_adapters(1, tmp_path / "old")
    shutil.copytree(tmp_path / "old", tmp_path / "whole")
    count, found = killer.run(-1, save_adapters, 2, tmp_path / "whole"), []
    assert count > 10 and adapters_in(tmp_path / "whole") == 2
    for at in range(count):
        folder = shutil.copytree(tmp_path / "old", tmp_path / str(at))
        killer.run(at, save_adapters, 2, folder)
        if (value := adapters_in(folder)) is None:
            complete = files_that_complete(folder, ADAPTERS)
            assert complete is not None
            for path in complete.iterdir():
                path.replace(folder / path.name)
            value = adapters_in(folder)
        found.append(value)
        save_adapters(1, folder)
        assert adapters_in(folder) == 1 and not (folder / ADAPTERS.saving).exists()
    assert set(found) == {1, 2} and found == sorted(found)


@pytest.mark.parametrize("kind", ["a model", "adapters"])
def test_a_save_replaces_links_and_changes_no_file_elsewhere(kind, tmp_path):
    outside, folder = tmp_path / "outside", tmp_path / "out"
    write = (lambda: save(Model(1, 2.0), folder, 1)) if kind == "a model" else (lambda: save_adapters(2, folder))
    write()
    names = [path.name for path in folder.iterdir()]
    outside.mkdir()
    for name in (*names, "generation_config.json", "added_tokens.json"):
        (folder / name).unlink(missing_ok=True)
        (outside / name).write_bytes(b"of others")
        (folder / name).symlink_to(outside / name)
    write()
    assert {path.read_bytes() for path in outside.iterdir()} == {b"of others"}
    left = {path.name for path in folder.iterdir() if path.is_symlink()}
    assert left == ({"added_tokens.json"} if kind == "a model" else {"generation_config.json"})  # which it has not
    assert read(folder).weight == 2 if kind == "a model" else adapters_in(folder) == 2


def test_a_linked_folder_of_templates_is_not_written_through(tmp_path):
    (tmp_path / "outside").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "additional_chat_templates").symlink_to(tmp_path / "outside")
    small = {"adapter_config.json": b"{}", "additional_chat_templates/x.jinja": b"x"}
    with pytest.raises(NotADirectoryError, match="additional_chat_templates is a link, and must be a folder or not"):
        saving.write_adapters(tmp_path / "out", {"a": np.zeros(1)}, small)
    assert not list((tmp_path / "outside").iterdir())


@pytest.mark.parametrize("num_shards", [1, 2])
def test_all_files_have_the_mode_of_the_umask(num_shards, tmp_path):
    before = os.umask(0o027)
    try:
        save(OLD, tmp_path / "model", num_shards)
        save_adapters(1, tmp_path / "adapters")
    finally:
        os.umask(before)
    files = [*(tmp_path / "model").iterdir(), *(tmp_path / "adapters").iterdir()]
    assert {path.stat().st_mode & 0o777 for path in files} == {0o640}


# --- what is kept ----------------------------------------------------------------------------------------------------

KEPT = {"bos_token_id": 1, "eos_token_id": [2, 60], "pad_token_id": 0, "use_cache": True, "task": {"of": ["a", None]}}
GENERATION = '{"eos_token_id":[3],\n  "top_k": 20}'  # not as we would write it


def change_config(folder, **fields):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.fixture
def folder(tmp_path):
    """A checkpoint with more than the architecture."""
    make_model().save_pretrained(tmp_path / "model", config_fields=KEPT)
    (tmp_path / "model" / "generation_config.json").write_text(GENERATION)
    return tmp_path / "model"


def test_what_a_checkpoint_holds_beside_the_architecture_is_saved_again(folder, tmp_path):
    others = {"transformers_version": "4.40.0", "rope_parameters": {"rope_theta": 500.0}, "dtype": "bfloat16"}
    change_config(folder, **others, transformers_weights="other.safetensors")
    model = LlamaForCausalLM.from_pretrained(folder, param_dtype="float32")
    model.save_pretrained(tmp_path / "again", config_fields={"pad_token_id": 5})
    found = json.loads((tmp_path / "again" / "config.json").read_text())
    expected = KEPT | {"transformers_version": "4.40.0", "pad_token_id": 5, "rope_theta": 500.0}
    assert {name: found[name] for name in expected} == expected
    assert found["torch_dtype"] == "float32"  # the weights are
    assert not {"transformers_weights", "rope_parameters", "dtype"} & set(found)
    assert (tmp_path / "again" / "generation_config.json").read_text() == GENERATION
    assert LlamaForCausalLM.from_pretrained(tmp_path / "again").config == model.config
    make_model().save_pretrained(tmp_path / "again")
    assert not (tmp_path / "again" / "generation_config.json").exists()  # it was the earlier model's
    assert "pad_token_id" not in json.loads((tmp_path / "again" / "config.json").read_text())


def test_token_ids_of_a_multimodal_model_are_the_whole_model_s(folder, tmp_path):
    text = json.loads((folder / "config.json").read_text()) | {"eos_token_id": 1, "bos_token_id": 7}
    config = {"model_type": "llava", "vision_config": {"a": 1}, "eos_token_id": [1, 9], "text_config": text}
    (folder / "config.json").write_text(json.dumps(config))
    model = LlamaForCausalLM.from_pretrained(folder)
    model.kept = dataclasses.replace(model.kept, whole=None)
    model.save_pretrained(tmp_path / "again")
    found = json.loads((tmp_path / "again" / "config.json").read_text())
    assert (found["model_type"], found["eos_token_id"], found["bos_token_id"]) == ("llama", [1, 9], 7)
    assert "vision_config" not in found


def test_what_is_kept_is_part_of_the_graph_by_its_value(folder):
    models = [LlamaForCausalLM.from_pretrained(folder) for _ in range(2)]
    change_config(folder, eos_token_id=4)
    models.append(LlamaForCausalLM.from_pretrained(folder))
    graphs = [nnx.graphdef(model) for model in models]
    assert graphs[0] == graphs[1] != graphs[2] and hash(graphs[0]) == hash(graphs[1])
    traced = []

    @nnx.jit
    def logits(model, tokens):
        traced.append(model.kept)
        return model(tokens).logits

    for model in models:
        logits(model, jax.numpy.zeros((1, 3), "int32"))
    assert traced == [models[0].kept, models[2].kept]
    assert nnx.merge(*nnx.split(models[2])).kept == models[2].kept != models[0].kept


def test_generate_stops_by_its_argument_then_by_generation_config_then_by_config(folder, rng):
    prompt = random_tokens(rng, batch=1, length=3)

    def new_tokens(**options):
        model = LlamaForCausalLM.from_pretrained(folder)
        return np.asarray(generate(model, prompt, max_new_tokens=9, **options))[0, 3:].tolist()

    change_config(folder, eos_token_id=[60, 2])
    free = new_tokens(eos_token_id=())
    first, third = free[0], free[2]
    end = free.index(third)
    absent = next(token for token in range(CONFIG.vocab_size) if token not in free)
    # Tokens that the model lacks never come.
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [third, -1, 10**20], "top_k": 5}))
    change_config(folder, eos_token_id=first)
    assert new_tokens(pad_token_id=absent) == [*free[: end + 1], *[absent] * (8 - end)] != free
    assert new_tokens(eos_token_id=()) == free
    assert new_tokens(eos_token_id=first) == [first] * 9
    (folder / "generation_config.json").write_text('{"eos_token_id": null}')
    assert new_tokens() == [first] * 9
    (folder / "generation_config.json").unlink()
    change_config(folder, eos_token_id=[absent, third])
    assert new_tokens(pad_token_id=third) == [*free[: end + 1], *[third] * (8 - end)]


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("stops", ['"</s>"', "1.5", "true", "[[1]]", '{"a": 1}'])
def test_stops_that_are_no_tokens_are_refused(name, stops, folder):
    values = json.loads((folder / name).read_text()) | {"eos_token_id": json.loads(stops)}
    (folder / name).write_text(json.dumps(values))
    with pytest.raises(ValueError, match=rf"model/{name}: eos_token_id must be a token id or a list of ids"):
        LlamaForCausalLM.from_pretrained(folder)


def test_a_tokenizer_comes_along_whole(folder, tmp_path):
    source, model = tmp_path / "tokenizer", LlamaForCausalLM.from_pretrained(folder)
    source.mkdir()
    files = {"tokenizer.json": "{}", "tokenizer.model": "\0\1", "chat_template.jinja": "{{ x }}", "vocab.json": "{}"}
    for name, text in files.items():
        (source / name).write_text(text)
    for place, name in ((source, "tool_use"), (folder, "another")):
        (place / "additional_chat_templates").mkdir()
        (place / "additional_chat_templates" / f"{name}.jinja").write_text(name)
    (source / "README.md").write_text("not the tokenizer's")
    (folder / "merges.txt").write_text("another tokenizer's")
    model.save_pretrained(folder, tokenizer_from=source)
    texts = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".safetensors"]
    found = {path.relative_to(folder).as_posix(): path.read_text() for path in texts}
    assert {name: found.pop(name) for name in files} == files
    assert found.pop("additional_chat_templates/tool_use.jinja") == "tool_use"
    assert sorted(found) == ["config.json", "generation_config.json"]
    model.save_pretrained(folder)  # without a word on tokenizers
    assert (folder / "chat_template.jinja").exists()
    with pytest.raises(ValueError, match="tokenizer_from='.*nowhere' is not a folder"):
        model.save_pretrained(folder, tokenizer_from=tmp_path / "nowhere")
    with pytest.raises(ValueError, match="tokenizer_from='.*' holds no tokenizer: none of tokenizer.json, "):
        model.save_pretrained(folder, tokenizer_from=tmp_path)

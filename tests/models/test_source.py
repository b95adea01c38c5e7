"""A checkpoint's folder is read once, whatever asks for it."""

import collections
import json
import pathlib
import shutil

import jax
import numpy as np
import pytest
from flax import nnx

from liger_jax.models import AutoModelForCausalLM
from liger_jax.models.hugging_face.source import Source, find
from liger_jax.planner.architectures import architecture_of
from tests import _tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return _tiny.checkpoint(tmp_path_factory.mktemp("source") / "model")


@pytest.fixture
def reads(monkeypatch):
    """How often each file is read, by its name."""
    counts = collections.Counter()
    for name in ("read_bytes", "read_text"):
        original = getattr(pathlib.Path, name)

        def counted(self, *args, original=original, **options):
            counts[self.name] += 1
            return original(self, *args, **options)

        monkeypatch.setattr(pathlib.Path, name, counted)
    return counts


def test_all_that_a_run_asks_for_reads_a_file_once(folder, reads):
    source = find(folder)
    assert not reads and find(source) is source
    model = AutoModelForCausalLM.from_pretrained(source)
    assert architecture_of(source).config == model.config
    assert source.stops == model.kept.stops != () and source.dtype == "float32" and not source.multimodal
    assert source.tokenizer["tokenizer.json"] and source.tokenizer["vocab.json"] is None
    assert source.weight_bytes > 0 and source.tokenizer is source.tokenizer
    assert reads["config.json"] == reads["tokenizer.json"] == max(reads.values()) == 1


def test_a_model_is_saved_with_the_tokenizer_that_was_read(folder, tmp_path):
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in folder.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    source = Source(copy)
    model, before = AutoModelForCausalLM.from_pretrained(source), source.tokenizer["tokenizer.json"]
    (copy / "tokenizer.json").write_text(json.dumps({"another": "one"}))  # meanwhile
    model.save_pretrained(tmp_path / "result", tokenizer_from=source)
    assert (tmp_path / "result" / "tokenizer.json").read_bytes() == before
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "result")
    jax.tree.map(np.testing.assert_array_equal, nnx.state(model), nnx.state(again))


def copied(folder, target, name, link_to=None):
    """A copy of the folder in which one file is a link to a file elsewhere, or to a given path."""
    shutil.copytree(folder, target)
    outside = target.parent / "outside"
    outside.mkdir()
    content = (target / name).read_bytes() if (target / name).exists() else b"{}"
    (outside / "file").write_bytes(content)
    (target / name).unlink(missing_ok=True)
    (target / name).parent.mkdir(exist_ok=True)
    (target / name).symlink_to(link_to or outside / "file")
    return target


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "added_tokens.json", "additional_chat_templates/x.jinja"]
)
def test_a_link_out_of_the_folder_is_refused_before_its_content_is_read(folder, tmp_path, name):
    source = Source(copied(folder, tmp_path / "model", name))
    with pytest.raises(ValueError, match=f"{name} is a link to '.*outside/file', which is outside of the checkpoint's"):
        assert source.kept(()) and source.tokenizer


def test_weights_may_be_links_to_files_anywhere(folder, tmp_path):
    linked = copied(folder, tmp_path / "model", "model.safetensors")
    found, own = (nnx.state(AutoModelForCausalLM.from_pretrained(each)) for each in (linked, folder))
    jax.tree.map(np.testing.assert_array_equal, found, own)
    (tmp_path / "outside" / "file").write_text("secret")
    with pytest.raises(ValueError, match="model.safetensors is damaged, or not a safetensors file: (?!.*secret)"):
        AutoModelForCausalLM.from_pretrained(linked)
    (tmp_path / "outside" / "file").unlink()
    with pytest.raises(
        FileNotFoundError, match="has model.safetensors as a link to '.*outside/file', where no file is"
    ):
        AutoModelForCausalLM.from_pretrained(linked)


def test_a_linked_folder_of_templates_is_refused(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "model")
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets" / "key.jinja").write_text("secret")
    (tmp_path / "model" / "additional_chat_templates").symlink_to(tmp_path / "secrets")
    with pytest.raises(ValueError, match="key.jinja is a link to .* outside of the checkpoint's folder"):
        Source(tmp_path / "model").tokenizer  # noqa: B018


def test_links_within_the_folder_and_a_link_to_the_folder_are_followed(folder, tmp_path):
    linked = copied(folder, tmp_path / "model", "added_tokens.json", link_to="tokenizer_config.json")
    (tmp_path / "name").symlink_to(linked)
    files = Source(tmp_path / "name").tokenizer
    assert files["added_tokens.json"] == files["tokenizer_config.json"] is not None


def test_a_neighbour_of_the_cache_s_blobs_is_no_blob(folder, tmp_path):
    snapshot = tmp_path / "snapshots" / "main"
    snapshot.parent.mkdir()
    copied(folder, snapshot, "added_tokens.json", link_to=tmp_path / "blobs2" / "0")
    (tmp_path / "blobs2").mkdir()
    (tmp_path / "blobs2" / "0").write_bytes(b"secret")
    with pytest.raises(ValueError, match="added_tokens.json is a link"):
        Source(snapshot).tokenizer  # noqa: B018


def test_a_saved_model_asks_for_no_code(folder, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    code = {"auto_map": {"AutoConfig": "evil.Config"}, "trust_remote_code": True}
    for name in ("config.json", "tokenizer_config.json"):
        (copy / name).write_text(json.dumps(json.loads((copy / name).read_text()) | code))
    source = Source(copy)
    AutoModelForCausalLM.from_pretrained(source).save_pretrained(tmp_path / "result", tokenizer_from=source)
    for name in ("config.json", "tokenizer_config.json"):
        values = json.loads((tmp_path / "result" / name).read_text())
        assert not code.keys() & values.keys()
        assert values.keys() >= json.loads((folder / name).read_text()).keys()

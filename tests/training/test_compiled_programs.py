"""Commands and calls keep compiled programs for their next start, where the user lets them."""

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from liger_jax import trainers
from liger_jax.commands import finetune, main
from liger_jax.trainers import calls
from liger_jax.trainers.outcome import Outcome
from liger_jax.training import compiled_programs, user_caches
from liger_jax.training.compiled_programs import compiled_programs_kept

HIT = "/jax/compilation_cache/cache_hits"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder of compiled programs, which is not there yet; the suite's own is put aside."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    suite = setting("compilation_cache_dir")
    cache_in(None)
    yield tmp_path / "liger-jax" / "compiled"
    cache_in(suite)


def cache_in(folder):
    jax.config.update("jax_compilation_cache_dir", folder)
    compilation_cache.reset_cache()


def setting(name):
    return getattr(jax.config, f"jax_{name}")


@pytest.fixture
def hits():
    """How many programs were read from a cache, as a list of JAX's events."""
    seen = []
    listen = lambda event, **_: seen.append(event) if event == HIT else None
    jax.monitoring.register_event_listener(listen)
    yield seen
    jax.monitoring.unregister_event_listener(listen)


def start():
    """What a process does that begins: nothing is compiled yet."""
    return float(jax.jit(lambda x: x * 3 + 1)(2.0))


def test_the_second_start_reads_what_the_first_has_compiled(folder, hits):
    for count in (0, 1):
        with compiled_programs_kept():
            assert start() == 7
        assert len(hits) == count
    assert len(list(folder.glob("*-cache"))) == 1


def test_the_settings_of_jax_are_as_before_behind_it(folder):
    names = "compilation_cache_dir", "persistent_cache_min_compile_time_secs"
    before = [setting(name) for name in names]
    with compiled_programs_kept():
        assert setting("compilation_cache_dir") == str(folder)
    assert before == [setting(name) for name in names]


def test_a_folder_of_the_user_s_own_comes_first(folder, tmp_path):
    cache_in(str(tmp_path / "own"))
    with compiled_programs_kept():
        assert setting("compilation_cache_dir") == str(tmp_path / "own")
    with compiled_programs_kept(False):
        assert not setting("enable_compilation_cache")
    assert not folder.exists()


def test_a_folder_that_cannot_be_written_stops_nothing(folder):
    folder.parent.write_text("a file where the folder would be")
    with compiled_programs_kept():
        assert start() == 7 and setting("compilation_cache_dir") is None


@pytest.mark.parametrize(["options", "kept"], [([], True), (["--no-cache"], False)], ids=str)
def test_a_command_keeps_programs_unless_told_otherwise(options, kept, folder, monkeypatch):
    used = []
    monkeypatch.setattr(finetune, "run", lambda args: used.append(user_caches.are_used()) or print(start()) or 0)
    assert main(["finetune", "--model=m", "--data=d", *options]) == 0
    assert bool(list(folder.glob("*-cache"))) == kept and used == [kept]
    assert not user_caches.are_used()


def test_a_call_keeps_programs_and_leaves_the_settings_as_they_were(folder, monkeypatch):
    monkeypatch.setattr(calls, "started", lambda *_, **__: Outcome(0, [{"loss": start()}]))
    result = trainers.finetune("m", "d")
    assert result.metrics["loss"] == 7
    assert list(folder.glob("*-cache")) and setting("compilation_cache_dir") is None


@pytest.mark.parametrize(
    ["platform", "end"],
    [
        ("linux", ".cache/liger-jax/compiled"),
        ("darwin", "Library/Caches/liger-jax/compiled"),
        ("win32", "AppData/Local/liger-jax/compiled"),
    ],
)
def test_each_system_has_its_own_folder_for_caches(platform, end):
    folder = compiled_programs.folder({}, platform)
    assert folder.is_absolute() and folder.as_posix().endswith(end)

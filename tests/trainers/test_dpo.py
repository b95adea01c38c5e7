"""`liger-jax dpo` on a tiny checkpoint: that its loss is the one of its name, that it learns, and what it refuses."""

import functools
import json
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from liger_jax import losses
from liger_jax.commands import main
from liger_jax.data.answers import PairTokenizer
from liger_jax.data.preferences import pair
from liger_jax.data.training_rows import prepared
from liger_jax.losses.preference import DPO_TYPES, READERS
from liger_jax.trainers import pairs, reference_log_probs, samples
from liger_jax.trainers.dpo_options import PairOptions
from liger_jax.trainers.options import Settings
from liger_jax.trainers.preference_losses import FREE, Preference
from liger_jax.training import pack_pairs, rows
from liger_jax.user_errors import UserError
from tests import _tiny
from tests.trainers._runs import Model, figures_of

SMALL = "--length 128 --batch 4 --steps 5 --every 5 --learning-rate 0.02".split()
REQUIRED = {"exo_pair": {"label_smoothing": 0.1}, "robust": {"label_smoothing": 0.1}, "alphapo": {"reward_alpha": 0.25}}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A checkpoint's folder, with pairs beside it."""
    folder = _tiny.checkpoint(tmp_path_factory.mktemp("source") / "model")
    (folder.parent / "pairs.jsonl").write_text(_tiny.pairs(24))
    return folder


def run(source, out, *options, data="pairs.jsonl"):
    return main(["dpo", f"--model={source}", f"--data={source.parent / data}", f"--out={out}", *SMALL, *options])


# --- the loss ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def batch():
    """Nine pairs in rows of forty, and a row that is empty."""
    rng = np.random.default_rng(0)
    sizes = rng.integers(3, 12, (9, 2))
    chosen, rejected = ([rng.integers(1, 99, size) for size in sizes[:, side]] for side in (0, 1))
    masked = lambda some: [np.where(np.arange(len(each)) < 2, -100, each) for each in some]
    labels = dict(chosen_labels=masked(chosen), rejected_labels=masked(rejected))
    packed, _, _ = pack_pairs(chosen, rejected, 40, **labels)
    (filled,) = rows.batched(packed, len(packed["input_ids"]) + 1)
    return filled


def each_pair(batch, log_probs):
    """Sums and numbers of tokens of both answers, (P, 2) each, and of prompts with the chosen answers, in float64."""
    sums, counts, whole = [], [], []
    for row, segments in enumerate(batch["segment_ids"]):
        for segment in range(1, segments.max() + 1):
            places = np.flatnonzero(segments == segment)
            at = log_probs[row, places[:-1]].astype(np.float64)  # each of the next token
            scored = batch["labels"][row, places[1:]] != -100
            sums.append(at[scored].sum())
            counts.append(scored.sum())
            whole.append((at.sum(), len(at)))
    return np.reshape(sums, (-1, 2)), np.reshape(counts, (-1, 2)), np.array(whole[::2])


@functools.partial(jax.jit, static_argnums=0)
def named_loss(name, policy, reference, counts, whole):
    """The mean loss by its function, of sequences that are not packed."""
    chosen, rejected = jnp.asarray(policy, jnp.float32).T
    means = [jnp.asarray(x, jnp.float32) for x in (policy / counts).T]
    if name == "orpo":
        return losses.orpo_loss(means[0], means[1], jnp.float32(-whole[:, 0].sum() / whole[:, 1].sum())).losses.mean()
    if name == "simpo":
        return losses.simpo_loss(*means).losses.mean()
    if name == "alphapo":
        return losses.alphapo_loss(*means, reward_alpha=0.25).losses.mean()
    if name.startswith("cpo"):
        kind, nll = name.partition("_")[2] or "sigmoid", -policy[:, 0].sum() / counts[:, 0].sum()
        sides = means if kind == "ipo" else (chosen, rejected)
        return losses.cpo_loss(sides[0], sides[1], jnp.float32(nll), loss_type=kind).losses.mean()
    tokens = dict(chosen_tokens=jnp.asarray(counts[:, 0]), rejected_tokens=jnp.asarray(counts[:, 1]))
    read = {option: count for option, count in tokens.items() if name in READERS[option]}
    references = jnp.asarray(reference, jnp.float32).T
    options = REQUIRED.get(name, {})
    return losses.dpo_loss(chosen, rejected, *references, loss_type=name, **read, **options).losses.mean()


@jax.jit
def responses_of(log_probs, batch):
    return pairs.responses(Model(log_probs), batch, 8).log_probs


def loss_of(preference):
    """The function of log probabilities, a batch and a normalizer, as one program."""
    loss = pairs.loss_of(preference, 8)
    return jax.jit(lambda log_probs, batch, *normalizer: loss(Model(log_probs), batch, *normalizer))


@pytest.mark.parametrize("name", [*DPO_TYPES, *FREE])
def test_the_loss_of_packed_rows_is_that_of_their_pairs(batch, name):
    rng = np.random.default_rng(1)
    policy, reference = -rng.exponential(1.0, (2, *batch["labels"].shape)).astype(np.float32)
    preference = Preference(loss_type=name, **REQUIRED.get(name, {}))
    (found, counts, whole), (of_reference, *_) = each_pair(batch, policy), each_pair(batch, reference)
    assert found.shape == (9, 2)
    stored = {**batch, reference_log_probs.NAME: responses_of(reference, batch)}
    loss, figures = loss_of(preference)(policy, stored)
    np.testing.assert_allclose(loss, named_loss(name, found, of_reference, counts, whole), rtol=1e-5)
    if name in DPO_TYPES:
        rewards = 0.1 * (found - of_reference)
        told = dict(chosen=rewards[:, 0].mean(), rejected=rewards[:, 1].mean())
        told |= dict(margins=(-np.diff(rewards)).mean(), accuracies=(np.diff(rewards) < 0).mean())
        for figure, expected in told.items():
            np.testing.assert_allclose(figures[f"rewards/{figure}"], expected, rtol=1e-4, err_msg=figure)


@pytest.mark.parametrize("name", ["sigmoid", "sft", "orpo"])
def test_the_losses_of_micro_batches_add_up(batch, name):
    rng = np.random.default_rng(1)
    policy, reference = -rng.exponential(1.0, (2, *batch["labels"].shape)).astype(np.float32)
    preference = Preference(loss_type=name)
    batch = {**batch, reference_log_probs.NAME: np.asarray(responses_of(reference, batch))}
    loss, normalizer = loss_of(preference), jax.jit(pairs.normalizer_of(preference))(batch)
    halves = [slice(0, None, 2), slice(1, None, 2)]
    parts = [loss(policy[half], {key: x[half] for key, x in batch.items()}, normalizer)[0] for half in halves]
    np.testing.assert_allclose(sum(parts), loss(policy, batch)[0], rtol=1e-6)


@pytest.mark.parametrize("name", ["sigmoid", "sft", "orpo"])
def test_scores_do_not_depend_on_how_pairs_are_divided_into_batches(batch, name):
    """The likelihood of chosen is a mean over the tokens of all held-out pairs, in the loss too."""
    rng = np.random.default_rng(1)
    policy, reference = -rng.exponential(1.0, (2, *batch["labels"].shape)).astype(np.float32)
    objective = pairs.OfPairs(Preference(loss_type=name))
    batch = {**batch, reference_log_probs.NAME: np.asarray(responses_of(reference, batch))}
    sums = jax.jit(lambda policy, batch: objective.sums(Model(policy), batch, 8))
    halves = [slice(0, 1), slice(1, None)]
    totals = np.sum([sums(policy[half], {key: x[half] for key, x in batch.items()}) for half in halves], axis=0)
    loss, figures = loss_of(objective.preference)(policy, batch)
    whole = {"eval_loss": loss} | {f"eval_{figure}": value for figure, value in figures.items()}
    scores = objective.scores(totals.tolist())
    assert scores.keys() == whole.keys()
    for figure, expected in whole.items():
        np.testing.assert_allclose(scores[figure], expected, rtol=1e-5, err_msg=figure)


# --- rows -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [True, False])
def test_both_answers_of_a_pair_share_a_row_and_only_they_are_scored(source, tmp_path, packed):
    settings = Settings.of(
        PairOptions, model="m", data=str(source.parent / "pairs.jsonl"), length=128, pack=packed, eval_share=0.25
    )
    tokenizer = PairTokenizer(source, 320, [])
    data = prepared(settings.rows, 4, 0, tokenizer, tmp_path)
    assert data.num_segments == (4 if packed else 2) and data.rows.num_rows == (9 if packed else 18)
    seen = []
    for laid in data.laid:
        for ids, labels, segments in zip(
            *(laid[name][:] for name in ("input_ids", "labels", "segment_ids")), strict=True
        ):
            for first in range(1, segments.max(), 2):
                both = [(ids[segments == each], labels[segments == each]) for each in (first, first + 1)]
                texts = [tokenizer.text(tokens.tolist()) for tokens, _ in both]
                answers = [tokenizer.text(tokens[scored >= 0].tolist()) for tokens, scored in both]
                asked = [text.removesuffix(answer + "\n") for text, answer in zip(texts, answers, strict=True)]
                assert asked[0] == asked[1] and asked[0].endswith("<|im_start|>assistant\n")
                assert answers[0].startswith("one two three") and answers[1].startswith("six seven eight")
                seen.append(asked[0])
    assert len(seen) == 24


ASKED = [{"role": "user", "content": "a?"}]
GOOD, BAD = ({"role": "assistant", "content": content} for content in "bc")


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": ASKED, "chosen": [GOOD], "rejected": [BAD]},
        {"chosen": [*ASKED, GOOD], "rejected": [*ASKED, BAD]},
        {"prompt": "a?", "chosen": [*ASKED, GOOD], "rejected": [*ASKED, BAD], "messages": []},
        {"prompt": ASKED, "chosen": "b", "rejected": "c"},
        {"prompt": json.dumps(ASKED), "chosen": json.dumps([GOOD]), "rejected": json.dumps([BAD])},
        {"conversations": [{"from": "human", "value": "a?"}], "chosen": {"from": "gpt", "value": "b"}, "rejected": BAD},
    ],
    ids=["explicit", "implicit", "text of the question", "answers as texts", "JSON in cells", "sharegpt"],
)  # fmt: skip
def test_all_forms_of_a_pair_are_the_same_conversations(row):
    found = pair("here", row)
    assert found.messages == [*ASKED, GOOD] and found.rejected.messages == [*ASKED, BAD]


def test_texts_without_a_prompt_have_what_both_begin_with():
    found = pair("here", {"chosen": "The sky is blue.", "rejected": "The sky is black."})
    assert (found.prompt, found.text, found.rejected.text) == ("The sky is", " blue.", " black.")
    found = pair("here", {"chosen": "yes", "rejected": "yes and no"})
    assert (found.prompt, found.text, found.rejected.text) == ("", "yes", "yes and no")


@pytest.mark.parametrize(
    "row, message",
    [
        ({"prompt": "a", "completion": "b", "label": True}, "one completion with a label, but this loss needs pairs"),
        ({"chosen": "a"}, "there is no 'rejected' among ['chosen']"),
        ({"chosen": "a", "reject": "b"}, "Did you mean 'rejected' by 'reject'? Rename it."),
        ({"question": "a", "chosen": "b", "rejected": "c"}, "no prompt. Rename it to prompt"),
        ({"prompt": 3, "chosen": "b", "rejected": "c"}, "prompt holds a number"),
        ({"chosen": "b", "rejected": [GOOD], "prompt": "a", "conversations": ASKED}, "has both prompt and"),
        ({"prompt": "z", "chosen": [*ASKED, GOOD], "rejected": [*ASKED, BAD]}, "begin with other"),
        ({"prompt": "a", "chosen": ASKED, "rejected": ASKED}, "begin with other messages"),
        ({"prompt": [*ASKED, GOOD], "chosen": "a?", "rejected": [*ASKED, BAD]}, "rejected begins with other messages "
         "than the prompt. prompt ends with an answer, and chosen is a text: the two seem to be swapped."),
        ({"prompt": "a", "system": "s", "chosen": "b", "rejected": "c"}, "Write it into the prompt"),
        ({"prompt": "a", "chosen": [], "rejected": []}, "must hold a text or a list of messages"),
    ],
)  # fmt: skip
def test_rows_that_are_no_pairs_are_refused(row, message):
    with pytest.raises(UserError, match=re.escape(message)):
        pair("here", row)


def test_pairs_that_are_too_long_are_cut_and_those_alike_left_out(source, tmp_path, capsys):
    long = [{"prompt": "one", "chosen": _tiny.text(n), "rejected": _tiny.text(m, 3)} for n, m in ((90, 3), (90, 80))]
    others = [  # line 3 and on
        {"prompt": "one", "chosen": "two", "rejected": "two"},
        {"prompt": "one", "chosen": "two", "rejected": " "},
        {"prompt": [{"role": "user", "content": "one"}], "chosen": "two", "rejected": ""},
        {"prompt": _tiny.text(40), "chosen": "one", "rejected": "two"},
        {"prompt": "one", "chosen": _tiny.text(40), "rejected": _tiny.text(41)},
    ]
    (tmp_path / "long.jsonl").write_text("\n".join(map(json.dumps, [*long, *others])))
    settings = Settings.of(PairOptions, model="m", data=str(tmp_path / "long.jsonl"), length=32, eval_share=0.0)
    data = prepared(
        settings.rows, settings.recipe.batch, settings.recipe.seed, PairTokenizer(source, 320, []), tmp_path / "tokens"
    )
    sizes = data.rows.tokens.sizes().reshape(-1, 2)
    assert sizes[0].sum() == 32 and sizes[0, 1] < 16 and sizes[1].tolist() == [16, 16]
    said = capsys.readouterr().out
    assert "4 of 4 pairs are cut off: both answers of a pair share --length=32, and theirs are longer" in said
    told = data.summary.replace(f"{tmp_path / 'long.jsonl'}, ", "").splitlines()[1:]
    assert sizes.shape == (2, 2) and sorted(told) == [
        "1 document has a prompt that leaves no room for its answer in --length=32, and no row: line 6",
        "1 document has answers that are equal once they are cut to --length=32, and no row: line 7",
        "1 document has equal answers, and no row: line 3",
        "2 documents have an empty answer, and no row: line 4, line 5",
    ]


def test_pairs_whose_scores_say_the_opposite_are_counted(source, tmp_path, capsys):
    scores = [(2, 1), (1, 2), ("3.5", "3.5"), ("high", 1), (None, 1), (float("nan"), 1)]
    names = ("score_chosen", "score_rejected"), ("chosen-rating", "rejected-rating")
    rows = [
        {"chosen": f"one {i}", "rejected": f"six {i}"} | dict(zip(names[i % 2], pair, strict=True))
        for i, pair in enumerate(scores)
    ]
    (tmp_path / "scored.jsonl").write_text("\n".join(map(json.dumps, rows)))
    told = (
        f"2 pairs have a score of chosen that is not above that of rejected, first {tmp_path / 'scored.jsonl'}, line 2"
    )
    command = ["data", f"--model={source}", str(tmp_path / "scored.jsonl"), "--loss=ipo", "--length=64", "--rows=1"]
    for options in ([], ["--check"]):
        assert main([*command, *options]) == 0
        assert told in capsys.readouterr().out
    (tmp_path / "scored.jsonl").write_text("\n".join(map(json.dumps, rows[::5])))
    assert main(command) == 0 and "a score of chosen" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "tokens, told",
    [
        ([], "(nothing: the first token ends the text)"),
        (["<|im_start|>"], "(nothing visible: '<|im_start|>')"),
        ([" ", "\n"], "(nothing visible: ' \\n')"),
        (["one", "\x1b", " two"], "one\\x1b two"),
    ],
)
def test_what_a_sample_says_can_be_seen(tokens, told, source):
    tokenizer = PairTokenizer(source, 320, [])
    ids = [number for text in tokens for number in tokenizer._tokenizer.encode(text).ids]
    assert samples._decoded(tokenizer, ids) == told


@pytest.mark.parametrize("asked", ["one two three four", [{"role": "user", "content": "one two three four"}]])
def test_a_sample_is_given_the_whole_prompt_of_a_pair(asked, source):
    row = pair("here", {"prompt": asked, "chosen": " five six seven", "rejected": " one"})
    tokenizer = PairTokenizer(source, 320, [])
    chosen, _ = tokenizer.encoded([row], 64)
    given = tokenizer.text(samples.beginning(chosen).tolist())
    assert "four" in given and "five" not in given and given.endswith(("four", "assistant\n"))


# --- runs -------------------------------------------------------------------------------------------------------------


def test_pairs_are_learnt_by_all_weights_against_a_stored_reference(source, tmp_path, capsys):
    assert run(source, tmp_path, "--pack") == 0
    figures = figures_of(tmp_path)
    assert figures[0]["loss"] == pytest.approx(np.log(2), abs=1e-5) and abs(figures[0]["rewards/margins"]) < 1e-5
    assert figures[-1]["rewards/margins"] > 0.3 and figures[-1]["eval_rewards/accuracies"] == 1.0
    assert "computing the reference of 13 rows" in capsys.readouterr().out
    assert (tmp_path / "model" / "model.safetensors").is_file()
    config = f"--config={tmp_path / 'settings.toml'}"
    assert main(["dpo", config]) == 0
    printed, told = capsys.readouterr()
    assert "finished: " in printed and "not read" not in told
    assert main(["plan", config, "--device=rtx4090"]) == 0  # plan's own --loss is another


@pytest.mark.full
def test_a_damaged_reference_is_computed_again(source, tmp_path, capsys):
    whole, path = tmp_path / "whole", tmp_path / "run" / "references.f32"
    assert run(source, whole, "--pack") == 0
    shutil.copytree(whole, tmp_path / "run")
    before = path.read_bytes()
    path.write_bytes(bytes(len(before)))
    capsys.readouterr()
    assert run(source, tmp_path / "run", "--pack", "--steps=6") == run(source, whole, "--pack", "--steps=6") == 0
    assert "references.f32 is damaged, and is made anew" in capsys.readouterr().out and path.read_bytes() == before
    results = [load_file(folder / "model" / "model.safetensors") for folder in (whole, tmp_path / "run")]
    for name in results[0]:
        np.testing.assert_array_equal(results[0][name], results[1][name], err_msg=name)


@pytest.mark.full
@pytest.mark.parametrize("loss", ["sigmoid", "orpo", "aot"])
def test_pairs_are_learnt_by_adapters(source, tmp_path, loss):
    assert run(source, tmp_path, "--pack", "--lora=4", "--learning-rate=0.2", "--steps=12", f"--loss={loss}") == 0
    figures = figures_of(tmp_path)
    assert figures[-1]["rewards/margins"] > figures[0]["rewards/margins"] + (0.005 if loss == "orpo" else 0.05)
    assert not (tmp_path / "references.f32").exists() and (tmp_path / "adapters").is_dir()
    if loss == "sigmoid":  # it goes on against itself as it is now
        more = tmp_path / "more"
        command = f"dpo --model={tmp_path / 'adapters'} --data={source.parent / 'pairs.jsonl'} --out={more}".split()
        assert main([*command, *SMALL]) == 0
        assert figures_of(more)[0]["loss"] == pytest.approx(np.log(2), abs=1e-5)


@pytest.mark.parametrize(
    "options, message",
    [
        (["--loss=dpo"], "'dpo' must be one of sigmoid, "),
        (["--loss=sigmoid,orpo"], "'orpo' must be one of sigmoid, "),
        (["--loss=aot,sft"], "a loss that sorts a batch's pairs goes with no other"),
        (
            ["--loss=aot", "--micro-batches=2"],
            "--micro-batches=2 splits a batch, whose pairs --loss aot sorts together",
        ),
        (["--beta=0"], "--loss=sigmoid: --beta=0.0 must be a finite number > 0"),
        (["--gamma=1"], "--gamma does not go with --loss sigmoid. Leave it out."),
        (["--loss=simpo", "--loss-weights=1"], "--loss-weights does not go with --loss simpo. Leave it out."),
        (["--loss=orpo", "--label-smoothing=0.1"], "--label-smoothing does not go with --loss orpo. Leave it out."),
        (["--loss=cpo", "--discopop-tau=0.1"], "--discopop-tau does not go with --loss cpo. Leave it out."),
        (["--loss=simpo", "--ld-alpha=1"], "--ld-alpha does not go with --loss simpo. Leave it out."),
        (["--loss=alphapo"], "--reward-alpha=0.0 must be a finite number other than 0"),
        (["--loss=exo_pair"], "--label-smoothing=0.0 must be > 0"),
        (["--label-smoothing=0.1"], "does not read it"),
        (["--ld-alpha=2"], "--ld-alpha=2.0 must be in [0, 1]"),
        (["--loss=nca_pair", "--f-divergence=forward_kl"], "is not defined for --loss='nca_pair'"),
        (["--loss=sigmoid,sft", "--loss-weights=1"], "must have a number for each of"),
        (["--loss=sigmoid,sft,sigmoid", "--loss-weights=1,1,1"], "names 'sigmoid' twice"),
        (["--quantize=nf4"], "--quantize is for adapters: pass --lora"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_options_that_do_not_go_together_are_one_sentence(options, message, source, tmp_path, capsys):
    assert run(source, tmp_path / "out", *options) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("liger-jax dpo: ") and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_loss_that_cannot_change_the_model_is_refused():
    """0 changes nothing, and neither does what float32 cannot square: clipping divides by infinity."""
    run = lambda **options: pairs.of_run(Settings.of(PairOptions, model="m", data=("a.jsonl",), **options))
    for options in (
        dict(loss_type="sigmoid,sft", loss_weights=(0.0, 0.0)),
        dict(beta=1e38),
        dict(loss_type="ipo", beta=1e38),  # its target is 0, which the first step has already
        dict(beta=1e-30),
        dict(loss_type="kto", desirable_weight=0.0, undesirable_weight=0.0),
    ):
        with pytest.raises(UserError, match="cannot change the model: at the first step the loss has the gradient"):
            run(**options)
    for options in (dict(), dict(loss_type="kto", desirable_weight=0.0), dict(loss_type="simpo", beta=10.0)):
        run(**options)


def test_a_text_is_no_pair(source, tmp_path, capsys):
    (source.parent / "prose.txt").write_text("one two three")
    assert run(source, tmp_path / "out", data="prose.txt") == 2
    assert "prose.txt is a text, and pairs are rows with chosen and rejected" in capsys.readouterr().err


# --- several devices --------------------------------------------------------------------------------------------------


@pytest.mark.skipif(jax.device_count() < 2, reason="needs 2 devices, which a CPU simulates")
def test_devices_do_not_share_rows(source, tmp_path, capsys):
    assert run(source, tmp_path, "--mesh=sequence=2") == 2
    assert "the rows of liger-jax dpo stay whole. Give the devices to fsdp or tensor." in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.skipif(jax.device_count() < 2, reason="needs 2 devices, which a CPU simulates")
@pytest.mark.parametrize("mesh", ["fsdp=2", "tensor=2"])
def test_a_mesh_trains_as_one_device_does(mesh, source, tmp_path):
    for name, devices in (("one", "fsdp=1"), ("several", mesh)):
        assert run(source, tmp_path / name, "--pack", f"--mesh={devices}") == 0
    one, several = (figures_of(tmp_path / name) for name in ("one", "several"))
    for name in ("loss", "rewards/margins"):
        expected = [row[name] for row in one]
        np.testing.assert_allclose([row[name] for row in several], expected, rtol=1e-3, atol=1e-5)

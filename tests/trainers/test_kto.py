"""`liger-jax dpo --loss kto`: single answers with labels, their loss, and what is refused of them."""

import csv
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from liger_jax.commands import main
from liger_jax.data import preferences, reading
from liger_jax.data.answers import UnpairedTokenizer, UnpairedWithOthers, _others
from liger_jax.data.training_rows import prepared
from liger_jax.trainers import kto, pairs, reference_log_probs
from liger_jax.trainers.dpo_options import PairOptions
from liger_jax.trainers.options import Settings
from liger_jax.trainers.preference_losses import Unpaired
from liger_jax.trainers.scored_answers import GOOD
from liger_jax.user_errors import UserError
from tests import _tiny
from tests.trainers._runs import Model

SMALL = "--length 128 --batch 4 --steps 6 --every 3 --learning-rate 0.02 --eval-share 0.25".split()
TYPES = ("kto", "apo_zero_unpaired")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A checkpoint's folder, with answers beside it."""
    folder = _tiny.checkpoint(tmp_path_factory.mktemp("source") / "model")
    (folder.parent / "answers.jsonl").write_text(_tiny.answers(24))
    return folder


def run(source, out, *options):
    data = f"--data={source.parent / 'answers.jsonl'}"
    return main(["dpo", f"--model={source}", data, f"--out={out}", *SMALL, *options])


# --- the loss ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def batch(rng):
    """Five rows of up to six segments of six tokens, the fourth row with two, the last one empty."""
    ids = np.tile(np.repeat(np.arange(1, 7), 6), (5, 1)).astype(np.int32)
    ids[3, 12:], ids[4] = 0, 0
    positions = np.tile(np.arange(6), (5, 6)).astype(np.int32) * (ids > 0)
    tokens = rng.integers(1, 99, ids.shape).astype(np.int32)
    labels = np.where((ids > 0) & (positions >= rng.integers(2, 5)), tokens, -100)
    good = np.repeat(rng.integers(0, 2, (5, 3)), 2, axis=1).astype(np.float32)  # an answer and its other one agree
    good[3, 2:], good[4] = 0, 0
    return {"input_ids": tokens, "labels": labels, "segment_ids": ids, "positions": positions, GOOD: good}


def answers_of(batch, log_probs, step):
    """Sums of each `step`-th segment from the first, and whether its answer is good, in float64."""
    sums, good = [], []
    for row, ids in enumerate(batch["segment_ids"]):
        for segment in range(1, ids.max() + 1, step):
            at = np.flatnonzero(ids == segment)
            scored = batch["labels"][row, at[1:]] != -100
            sums.append(log_probs[row, at[:-1]].astype(np.float64)[scored].sum())
            good.append(batch[GOOD][row, segment - 1] > 0)
    return np.array(sums), np.array(good)


@jax.jit
def responses_of(log_probs, batch):
    return kto.responses(Model(log_probs), batch, 6).log_probs


def loss_of(unpaired):
    """The function of log probabilities, a batch and a normalizer, as one program."""
    loss = kto.loss_of(unpaired, 6)
    return jax.jit(lambda log_probs, batch, *normalizer: loss(Model(log_probs), batch, *normalizer))


@pytest.mark.parametrize("name", TYPES)
def test_the_loss_of_packed_rows_is_that_of_their_answers(batch, name, rng):
    policy, reference = -rng.exponential(1.0, (2, *batch["labels"].shape)).astype(np.float32)
    unpaired = Unpaired(loss_type=name, beta=0.3, desirable_weight=2.0)
    stored = {**batch, reference_log_probs.NAME: responses_of(reference, batch)}
    loss, figures = loss_of(unpaired)(policy, stored)
    step = 2 if name == "kto" else 1
    (x, good), (y, _) = (answers_of(batch, of, step) for of in (policy, reference))
    z = 0.0
    if name == "kto":
        others = {**batch, "segment_ids": np.maximum(batch["segment_ids"] - 1, 0)}
        z = max(0.0, np.mean(answers_of(others, policy, 2)[0] - answers_of(others, reference, 2)[0]))
        assert figures["kl"] == pytest.approx(z, abs=1e-5)
    sigmoid = lambda x: 1 / (1 + np.exp(-x))
    expected = np.where(good, 2.0 * (1 - sigmoid(0.3 * (x - y - z))), 1 - sigmoid(0.3 * (z - x + y)))
    np.testing.assert_allclose(loss, expected.mean(), rtol=1e-5)
    assert good.any() and not good.all()
    told = {"rewards/chosen": 0.3 * (x - y)[good].mean(), "logps/rejected": x[~good].mean()}
    for figure, value in told.items():
        np.testing.assert_allclose(figures[figure], value, rtol=1e-4, err_msg=figure)
    assert figures["rewards/margins"] == figures["rewards/chosen"] - figures["rewards/rejected"]


def test_there_is_no_figure_of_answers_that_there_are_not(batch, rng):
    policy = -rng.exponential(1.0, batch["labels"].shape).astype(np.float32)
    exist = (batch["segment_ids"][:, ::6] > 0).astype(np.float32)
    batch = {**batch, GOOD: jnp.asarray(exist)}  # all are good
    batch[reference_log_probs.NAME] = kto.responses(Model(policy), batch, 6).log_probs
    unpaired = Unpaired(loss_type="apo_zero_unpaired")
    loss, figures = kto.loss_of(unpaired, 6)(Model(policy), batch)
    assert {name for name, value in figures.items() if np.isnan(value)} == {
        "rewards/rejected", "rewards/margins", "logps/rejected"
    }  # fmt: skip
    value, sums, counts = kto.sums_of(unpaired, 6, Model(policy), batch)
    scores = kto.OfAnswers(unpaired).scores([float(x) for x in (value, *sums.values(), *counts.values())])
    assert set(scores) == {"eval_loss", "eval_rewards/chosen", "eval_logps/chosen"}
    assert scores["eval_loss"] == pytest.approx(float(loss))


def test_the_losses_of_micro_batches_add_up_without_a_baseline(batch, rng):
    policy, reference = -rng.exponential(1.0, (2, *batch["labels"].shape)).astype(np.float32)
    batch = {**batch, reference_log_probs.NAME: np.asarray(responses_of(reference, batch))}
    unpaired = Unpaired(loss_type="apo_zero_unpaired")
    loss, normalizer = loss_of(unpaired), jax.jit(kto.normalizer_of(unpaired, 6))(batch)
    halves = [slice(0, None, 2), slice(1, None, 2)]
    parts = [loss(policy[half], {k: x[half] for k, x in batch.items()}, normalizer) for half in halves]
    value, figures = loss(policy, batch, normalizer)
    np.testing.assert_allclose(sum(part[0] for part in parts), value, rtol=1e-6)
    for name, figure in figures.items():
        np.testing.assert_allclose(sum(part[1][name] for part in parts), figure, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(loss(policy, batch)[0], value, rtol=1e-6)  # the batch counts itself


# --- rows -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("name", TYPES)
def test_an_answer_has_its_label_and_beside_it_an_answer_to_another_prompt(source, tmp_path, name, packed):
    data = str(source.parent / "answers.jsonl")
    settings = Settings.of(PairOptions, model="m", data=data, length=128, pack=packed, eval_share=0.25, loss_type=name)
    tokenizer = pairs.of_run(settings).tokenizer(source, 320, [])
    assert isinstance(tokenizer, UnpairedWithOthers if name == "kto" else UnpairedTokenizer)
    seen = []
    rows = prepared(settings.rows, 4, 0, tokenizer, tmp_path)
    pairs.of_run(settings).add_columns(settings, rows)
    for laid in rows.laid:
        columns = (laid[name][:] for name in ("input_ids", "labels", "segment_ids", GOOD))
        for ids, labels, segments, are_good in zip(*columns, strict=True):
            texts = []
            for segment in range(1, segments.max() + 1):
                mine, its = ids[segments == segment], labels[segments == segment]
                answer = tokenizer.text(mine[1:][its[1:] >= 0].tolist())
                texts.append((tokenizer.text(mine.tolist()).partition(answer)[0], answer, are_good[segment - 1] > 0))
            if name == "kto":
                for (asked, answer, good), (again, other, too) in zip(texts[::2], texts[1::2], strict=True):
                    assert asked == again and good == too
                    seen.append((answer, other, good))
            else:
                seen += [(answer, "", good) for _, answer, good in texts]
    assert len(seen) == 24 and all(answer.startswith("one") == good for answer, _, good in seen)
    if name == "kto":
        assert sorted(answer for answer, _, _ in seen) == sorted(other for _, other, _ in seen)
        assert sum(answer != other for answer, other, _ in seen) > 12


ASKED = [{"role": "user", "content": "a?"}]


@pytest.mark.parametrize(
    "row, message",
    [
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "the row is a pair of chosen and rejected"),
        ({"prompt": "a", "completion": "b"}, "there is no 'label' among ['completion', 'prompt']"),
        ({"prompt": "a", "completion": "b", "label": "good"}, "label holds 'good', and must be true"),
        ({"prompt": "a", "completion": "b", "label": 3}, "label holds 3, and must be true"),
        ({"prompt": "a", "completion": "b", "label": ""}, "label holds '', and must be true"),
        ({"prompt": 3, "completion": "b", "label": True}, "prompt holds a number"),
        ({"prompt": "a", "system": "s", "completion": "b", "label": True}, "Write it into the prompt"),
        ({"prompt": "a", "completion": ASKED, "label": True}, "completion holds no message of the assistant's"),
    ],
)
def test_rows_that_are_no_answers_with_labels_are_refused(row, message):
    with pytest.raises(UserError, match=re.escape(message)):
        preferences.labelled("here", row)


def test_answers_are_texts_or_messages():
    text = preferences.labelled("here", {"prompt": "a", "completion": " b", "label": 0})
    assert (text.prompt, text.text, text.desirable) == ("a", " b", False)
    answer = {"role": "assistant", "content": "b"}
    for completion in ("b", answer, [answer]):
        found = preferences.labelled("here", {"prompt": ASKED, "completion": completion, "label": True})
        assert found.messages == [*ASKED, answer] and found.desirable is True


def test_labels_of_a_table_are_words(tmp_path):
    words = [("true", True), ("False", False), ("1", True), ("0", False), (" TRUE ", True), ("0.0", False)]
    path = tmp_path / "answers.csv"
    path.write_text("prompt,completion,label\n" + "".join(f"a, b,{word}\n" for word, _ in words))
    found = reading.read(str(path), form=preferences.LABELLED)
    assert [each.desirable for each in found] == [is_good for _, is_good in words]


@pytest.mark.parametrize("name", TYPES)
def test_answers_that_are_left_out_are_named_with_the_reason(source, tmp_path, name):
    prompt = {"prompt": _tiny.text(2), "label": True}
    lines = [*_tiny.answers(3).splitlines(), json.dumps({**prompt, "completion": " "})]
    lines += [json.dumps({**prompt, "prompt": ASKED, "completion": ""})]
    lines += [json.dumps({**prompt, "prompt": _tiny.text(150), "completion": "two"})]
    (tmp_path / "some.jsonl").write_text("\n".join(lines))
    settings = Settings.of(
        PairOptions, model="m", data=str(tmp_path / "some.jsonl"), length=100, eval_share=0.0, loss_type=name
    )
    tokenizer = pairs.of_run(settings).tokenizer(source, 320, [])
    told = prepared(settings.rows, 4, 0, tokenizer, tmp_path / "tokens").summary
    assert "data: 6 documents in 3 answers" in told
    assert told.replace(f"{tmp_path / 'some.jsonl'}, ", "").splitlines()[1:] == [
        "2 documents have an empty answer, and no row: line 4, line 5",
        "1 document has a prompt that leaves no room for its answer in --length=100, and no row: line 6",
    ]
    (tmp_path / "some.jsonl").write_text(lines[3])
    with pytest.raises(
        UserError, match="Nothing is left to train on: 1 document has an empty answer, and no row: .*1."
    ):
        prepared(settings.rows, 4, 0, tokenizer, tmp_path / "tokens")


def pairs_as_answers(count, ask):
    """Documents of a good and a bad answer to each prompt, one after the other."""
    rows = [{"prompt": ask(i), "completion": f" {word} {i}", "label": word == "good"}
            for i in range(count) for word in ("good", "bad")]  # fmt: skip
    return [preferences.labelled(f"line {number}", row) for number, row in enumerate(rows, 1)]


@pytest.mark.parametrize("ask", [lambda i: f"Q{i}", lambda i: [{"role": "user", "content": f"Q{i}"}]])
def test_the_baseline_of_neighbours_to_one_prompt_is_of_other_prompts(ask, source):
    tokenizer = UnpairedWithOthers(source, 320, [])
    others = []
    for documents in (pairs_as_answers(3, ask), pairs_as_answers(1, ask)):  # the latter have one prompt, and no other
        pieces = list(tokenizer.encoded(documents, 128))
        for answer, other in zip(pieces[::2], pieces[1::2], strict=True):
            texts = [tokenizer.text(each.tokens.tolist()) for each in (answer, other)]
            asked = re.findall(r"Q(\d)", texts[0] + texts[1])
            ((_, own), (word, its)) = (re.findall(r"(good|bad) (\d)", text)[0] for text in texts)
            assert asked == [own, own] and its != own
            others.append(f"{word} {its}")
    assert others[:6] == ["good 1", "bad 1", "good 2", "bad 2", "good 0", "bad 0"]


def test_answers_to_one_prompt_have_no_baseline(source):
    with pytest.raises(UserError, match="the data begins with 2 answers to one prompt. Pass answers to several"):
        list(UnpairedWithOthers(source, 320, []).encoded(pairs_as_answers(1, lambda i: "Q"), 128))


def test_no_answer_is_its_own_prompt_s_whatever_the_order(rng):
    for _ in range(50):
        asked = rng.integers(0, 3, rng.integers(1, 9)).tolist()
        found = _others(asked)
        if len({*asked}) == 1:
            assert found == [None] * len(asked)
        else:
            assert all(asked[other] != own for own, other in zip(asked, found, strict=True))


def test_one_answer_alone_has_no_baseline(source, tmp_path, capsys):
    (source.parent / "answers_of_one.jsonl").write_text(_tiny.answers(1))
    data = f"--data={source.parent / 'answers_of_one.jsonl'}"
    assert main(["dpo", f"--model={source}", data, f"--out={tmp_path}", "--loss=kto", "--length=64"]) == 2
    assert "needs answers to other prompts, and the data has one answer" in capsys.readouterr().err


# --- runs -------------------------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("options", ["--loss=kto", "--loss=kto --lora=4 --pack", "--loss=apo_zero_unpaired --lora=4"])
def test_good_answers_become_likelier_than_bad_ones(source, tmp_path, options):
    options = options.split()
    assert (
        run(source, tmp_path, *options, *(["--learning-rate=0.05", "--steps=24"] if "--lora=4" in options else [])) == 0
    )
    with (tmp_path / "log.csv").open(newline="") as file:
        figures = list(csv.DictReader(file))
    assert float(figures[0]["loss"]) == pytest.approx(0.5, abs=1e-5)  # the policy is the reference
    assert float(figures[-1]["eval_rewards/margins"]) > 0.01
    assert ("kl" in figures[0]) == ("--loss=kto" in options)


@pytest.mark.parametrize(
    "options, message",
    [
        (["--loss=kto", "--micro-batches=2"], "a batch, of which --loss kto has one baseline. Leave it out."),
        (["--loss=kto", "--label-smoothing=0.1"], "--label-smoothing does not go with --loss kto. Leave it out."),
        (["--loss=kto,sft"], "kto is of single answers, and goes with no other"),
        (["--desirable-weight=2"], "--desirable-weight does not go with --loss sigmoid. Leave it out."),
        (["--loss=kto", "--undesirable-weight=-1"], "--undesirable-weight=-1.0 must be a finite number, at least 0."),
        (["--loss=kto", "--beta=0"], "beta=0.0 must be a finite number > 0"),
        ([], "the row is one completion with a label, but this loss needs pairs. Pass --loss kto"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_options_that_do_not_go_together_are_one_sentence(options, message, source, tmp_path, capsys):
    assert run(source, tmp_path / "out", *options) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("liger-jax dpo: ") and error.count("\n") == 1
